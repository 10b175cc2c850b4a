"""Refreshes when clusters come, go or are exchanged, and at rest with many topics and groups."""

import base64
import secrets
import shutil

import pytest

from kmirror_dagster.broker.admin import ClusterAdmin
from kmirror_dagster.broker.admin_types import CommittedOffset, NewTopic, Partition
from kmirror_dagster.metadata.outcome import Step
from kmirror_dagster.sandbox.cluster import SandboxCluster
from kmirror_dagster.settings import FilterSettings
from tests.conftest import ClusterFactory, Clusters
from tests.helpers import kafka
from tests.helpers.altering import altering, requests
from tests.helpers.refreshing import RefreshedMirror, changes_of, commit, errors_of, step_of
from tests.helpers.secured import client_settings, is_secured, own_settings
from tests.helpers.waiting import unique_name, wait_until

pytestmark = pytest.mark.integration


@pytest.mark.case("C20")
def test_refreshes_at_rest_alter_nothing(clusters: Clusters) -> None:
    """Twenty refreshes of many topics and groups without a change: not one altering request on the wire."""
    stem = unique_name("rest")
    source = ClusterAdmin(own_settings(clusters.source))
    topics = [NewTopic(f"{stem}-{index}", 2, 1, {"retention.ms": "86400000"}) for index in range(60)]
    assert set(source.create_topics(topics).values()) == {None}
    wait_until(lambda: not source.topics([topic.name for topic in topics]).errors)
    commit(clusters.source.bootstrap, f"{stem}-first", [(topics[0].name, 0, 0)])
    positions = {(topic.name, 0): CommittedOffset(0, "text") for topic in topics}
    source.alter_group_offsets({f"{stem}-{index}": positions for index in range(40)})
    source.close()
    source_proxy, destination_proxy = proxies = (clusters.source_proxy, clusters.destination_proxy)
    mirror = RefreshedMirror(
        source=client_settings(source_proxy.bootstrap, "source"),
        destination=client_settings(destination_proxy.bootstrap, "destination"),
        filters=FilterSettings(topics_include=(f"{stem}-.*",), groups_include=(f"{stem}-.*",)),
        source_cluster_id=clusters.source.cluster_id,
    )
    for proxy in proxies:
        proxy.reset()
    wait_until(lambda: mirror.refresh().status.ok and "OffsetCommit" in altering(*proxies), 60)
    wait_until(lambda: changes_of(mirror.refresh()) == 0)
    altered = altering(*proxies)
    for proxy in proxies:
        proxy.reset()

    outcomes = [mirror.refresh() for _ in range(20)]
    mirror.close()

    # where there is an authorizer, whether the mirror is a super user is tried out once, by an ACL
    tried_out = {"CreateAcls", "DeleteAcls"} if is_secured() else set[str]()
    assert altered.keys() == {"CreateTopics", "OffsetCommit"} | tried_out
    assert requests(*proxies) > 20
    assert altering(*proxies) == {}
    assert [errors_of(outcome) for outcome in outcomes] == [{}] * 20


@pytest.mark.case("C27")
def test_a_source_that_hangs_is_reported_and_sync_resumes_by_itself(
    cluster_factory: ClusterFactory, clusters: Clusters
) -> None:
    """While the source does not answer, also at the first refresh, each ends in time; afterwards all is in step.

    Two hundred unrelated groups come and go meanwhile.
    """
    source = cluster_factory("hanging", role="source")
    topic, group = unique_name("hanging"), unique_name("hanging")
    kafka.create_topic(source.bootstrap, topic)
    commit(source.bootstrap, group, [(topic, 0, 0)])
    mirror = RefreshedMirror(
        source=source.settings(),
        destination=clusters.destination.settings(),
        filters=FilterSettings(topics_include=(topic,), groups_include=(group,)),
        source_cluster_id=source.cluster_id,
    )

    others = {unique_name("unrelated"): {(topic, 0): CommittedOffset(0)} for _ in range(200)}
    admin = ClusterAdmin(own_settings(source))
    wait_until(lambda: len(admin.alter_group_offsets(others).values) == len(others))
    mirror.deadline_s = 3
    source.pause()
    hanging = mirror.refresh()
    source.resume()
    assert set(admin.delete_groups(others, timeout_s=60).values()) == {None}
    admin.close()
    mirror.deadline_s = 30
    wait_until(lambda: mirror.refresh().status.source_reachable)
    wait_until(lambda: mirror.refresh() and positions(clusters, group) == {(topic, 0): 0})
    resumed = mirror.refresh()
    mirror.close()

    assert not hanging.status.source_reachable
    assert hanging.topics == []
    assert errors_of(resumed) == {}
    assert [intent.error for intent in resumed.topics] == [None]


def test_a_source_exchanged_under_its_address_is_never_accepted(
    cluster_factory: ClusterFactory, clusters: Clusters
) -> None:
    """Another cluster that comes up at the same address is noticed by a refresher that was connected before."""
    source = cluster_factory("exchanged", role="source")
    topic = unique_name("exchanged")
    kafka.create_topic(source.bootstrap, topic)
    mirror = RefreshedMirror(
        source=source.settings(),
        destination=clusters.destination.settings(),
        filters=FilterSettings(topics_include=(".*",), groups_include=("none",)),
        source_cluster_id=source.cluster_id,
    )
    before = mirror.refresh()
    rebuild(source)
    kafka.create_topic(source.bootstrap, f"{topic}-new")

    outcomes = [mirror.refresh() for _ in range(3)]
    mirror.close()

    assert before.source_replaced is None
    for outcome in outcomes:
        assert "another cluster" in (outcome.source_replaced or "")
        assert [intent.topic for intent in outcome.topics] == [topic]
        assert changes_of(outcome) == 0
        assert step_of(outcome, Step.CLUSTER_IDS).errors["*"] == outcome.source_replaced


@pytest.mark.case("C16")
def test_a_rebuilt_destination_gets_nothing_from_the_former_one_s_mirror(
    cluster_factory: ClusterFactory, clusters: Clusters
) -> None:
    """An empty cluster that comes up at the destination's address is noticed: no topic is made there."""
    destination = cluster_factory("rebuilt")
    topic = unique_name("rebuilt")
    kafka.create_topic(clusters.source.bootstrap, topic)
    mirror = RefreshedMirror(
        source=clusters.source.settings(),
        destination=destination.settings(),
        filters=FilterSettings(topics_include=(topic,), groups_include=("none",)),
        source_cluster_id=clusters.source.cluster_id,
        destination_cluster_id=destination.cluster_id,
    )
    before = mirror.refresh()
    rebuild(destination)
    wait_until(lambda: (outcome := mirror.refresh()).status.steps[0].errors and not outcome.topics)
    outcome = mirror.refresh()
    mirror.close()

    assert [intent.error for intent in before.topics] == [None]
    assert "another cluster" in step_of(outcome, Step.CLUSTER_IDS).errors["*"]
    assert outcome.topics == []
    admin = ClusterAdmin(own_settings(destination))
    assert topic not in admin.topic_names()
    admin.close()


def positions(clusters: Clusters, group: str) -> dict[Partition, int]:
    """Committed positions at the destination."""
    return kafka.committed_offsets(clusters.destination.bootstrap, group)


def rebuild(cluster: SandboxCluster) -> None:
    """Bring up a new, empty cluster with the ports of a former one."""
    plan = cluster.plan
    cluster.stop()
    for broker in cluster.brokers:
        shutil.rmtree(broker.home)
    plan.model_copy(update={"cluster_id": other_cluster_id()}).save(cluster.home)
    cluster.start()


def other_cluster_id() -> str:
    """A cluster id of the form Kafka gives them: 16 bytes in base64."""
    return base64.urlsafe_b64encode(b"\x01" + secrets.token_bytes(15)).decode().rstrip("=")
