"""`kmirror check` against clusters without an authorizer: who they are, and what has to be made by hand."""

import pytest
from confluent_kafka.admin import ScramCredentialInfo, ScramMechanism, UserScramCredentialUpsertion

from kmirror_dagster.broker.admin import ClusterAdmin
from kmirror_dagster.metadata.preflight import PreflightReport, run_preflight
from kmirror_dagster.sandbox.cluster import SandboxCluster
from kmirror_dagster.settings import ClusterSettings, MirrorSettings
from tests.conftest import Clusters
from tests.helpers import kafka
from tests.helpers.secured import own_settings
from tests.helpers.waiting import unique_name, wait_until

pytestmark = pytest.mark.integration


def check(source: ClusterSettings, destination: ClusterSettings, *topics: str) -> PreflightReport:
    """Check a mirror of topics."""
    settings = MirrorSettings.model_validate(
        {
            "mirror": "m",
            "source": source,
            "destination": destination,
            "filters": {"topics.include": list(topics), "groups.include": ["none"]},
            "policies": {"client_quotas": "off"},
        }
    )
    admins = ClusterAdmin(settings.source), ClusterAdmin(settings.destination)
    try:
        return run_preflight(settings, *admins, deadline_s=30)
    finally:
        for admin in admins:
            admin.close()


@pytest.mark.unsecured("about clusters without an authorizer")
def test_clusters_without_an_authorizer_lack_nothing(clusters: Clusters) -> None:
    """Ids and topics are told, every right is there, and that writes by others are only noticed."""
    topic = unique_name("check")
    kafka.create_topic(clusters.source.bootstrap, topic)

    report = check(clusters.source.settings(), clusters.destination.settings(), topic)

    assert report.ok
    assert (report.source_cluster_id, report.destination_cluster_id) == (
        clusters.source.cluster_id,
        clusters.destination.cluster_id,
    )
    assert report.topics == [topic]
    assert (report.missing, report.commands, report.read_only) == ([], [], "detected")


def test_users_and_quotas_that_are_not_mirrored_are_named(clusters: Clusters) -> None:
    """What the destination lacks is a warning: it has to be made there by hand."""
    user = unique_name("check")
    add_user(clusters.source, user)
    add_quota(clusters.source, user, 1_000.0)

    def warnings() -> dict[str, str]:
        report = check(clusters.source.settings(), clusters.destination.settings(), "none")
        assert report.ok
        return {each.subject: each.text for each in report.findings if each.level == "warning"}

    wait_until(lambda: f"user={user}" in warnings().get("quotas", ""))
    found = warnings()
    add_user(clusters.destination, user)
    add_quota(clusters.destination, user, 1_000.0)
    wait_until(lambda: f"user={user}" not in warnings().get("quotas", ""))
    for cluster in (clusters.source, clusters.destination):
        add_quota(cluster, user, None)

    assert user in found["users"]
    assert found["topics"] == "not at the source (yet): none"
    assert user not in warnings().get("users", "")


def test_what_cannot_work_is_an_error_and_no_traceback(clusters: Clusters) -> None:
    """A cluster that does not answer, and one cluster on both sides."""
    settings = clusters.source.settings()
    nobody = ClusterSettings.model_validate({"bootstrap.servers": "127.0.0.1:1"})

    same = check(settings, settings, "none")
    unreachable = check(nobody, settings, "none")

    assert not same.ok
    assert any("same cluster" in finding.text for finding in same.findings)
    assert not unreachable.ok
    assert "127.0.0.1:1" in unreachable.findings[0].text


def add_user(cluster: SandboxCluster, name: str) -> None:
    """Give a user SCRAM credentials."""
    info = ScramCredentialInfo(ScramMechanism.SCRAM_SHA_256, 4096)
    change = UserScramCredentialUpsertion(name, info, password=b"secret")
    client = kafka.admin(cluster.bootstrap)
    client.alter_user_scram_credentials([change])[name].result(30)


def add_quota(cluster: SandboxCluster, user: str, bytes_per_second: float | None) -> None:
    """Limit what a user may produce, or end that."""
    admin = ClusterAdmin(own_settings(cluster))
    entity = (("user", user),)
    try:
        changes = {entity: {"producer_byte_rate": bytes_per_second}}
        assert admin.alter_client_quotas(changes) == {entity: None}
    finally:
        admin.close()
