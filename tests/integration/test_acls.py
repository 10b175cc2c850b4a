"""ACLs of clusters with an authorizer: kept equal, held back, granted at stop."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from confluent_kafka import KafkaError

from kmirror_dagster.broker.admin import ClusterAdmin
from kmirror_dagster.broker.admin_types import Acl, NewTopic
from kmirror_dagster.broker.clients import producer
from kmirror_dagster.lifecycle import DesiredState, MirrorState
from kmirror_dagster.metadata.acl_release import release_acls
from kmirror_dagster.metadata.acls import OTHER_TOPIC_OPERATIONS, TopicAcls, freeze_of
from kmirror_dagster.metadata.outcome import Step
from kmirror_dagster.sandbox.cluster import SandboxCluster
from kmirror_dagster.sandbox.properties import Protocol
from kmirror_dagster.sandbox.security import ClusterSecurity, User
from kmirror_dagster.settings import ClusterSettings, FilterSettings, PolicySettings
from tests.conftest import Clusters, start_all
from tests.helpers.refreshing import RefreshedMirror, changes_of, errors_of, step_of
from tests.helpers.waiting import unique_name, wait_until

pytestmark = pytest.mark.integration

ROOT = User("root", "root-secret", is_super=True)
MIRROR = User("mirror", "mirror-secret")
ALICE = User("alice", "alice-secret")
SECURITY = ClusterSecurity(Protocol.SASL_PLAINTEXT, "PLAIN", (ROOT, MIRROR, ALICE), authorizer=True)


@dataclass
class Guarded:
    """Source and destination with authorizers, and clients of their super users."""

    source: SandboxCluster
    destination: SandboxCluster
    at_source: ClusterAdmin
    at_destination: ClusterAdmin

    def topic(self) -> str:
        """A new topic at the source."""
        name = unique_name("guarded")
        assert self.at_source.create_topics([NewTopic(name, 1, 1)]) == {name: None}
        wait_until(lambda: not self.at_source.topics([name]).errors)
        return name

    def mirror(self, *topics: str, user: str = "root", read_only: str = "auto") -> RefreshedMirror:
        """A mirror of topics on behalf of a user."""
        return RefreshedMirror(
            source=self.source.settings(user),
            destination=self.destination.settings(user),
            filters=FilterSettings(topics_include=topics, groups_include=("guarded-.*",)),
            policies=PolicySettings.model_validate({"read_only": read_only}),
            source_cluster_id=self.source.cluster_id,
        )

    def there(self, *topics: str) -> set[Acl]:
        """ACLs on topics, and all that are on none, at the destination."""
        return {
            each
            for each in self.at_destination.acls()
            if each.resource_name in topics or each.resource_type != "TOPIC"
        }


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Guarded]:
    """Two clusters with authorizers for this module."""
    home: Path = tmp_path_factory.mktemp("guarded")
    source = SandboxCluster("source", home, security=SECURITY)
    destination = SandboxCluster("destination", home, security=SECURITY)
    admins: list[ClusterAdmin] = []
    try:
        start_all([source, destination])
        admins = [ClusterAdmin(cluster.settings("root")) for cluster in (source, destination)]
        yield Guarded(source, destination, *admins)
    finally:
        for admin in admins:
            admin.close()
        source.stop(wait_s=5)
        destination.stop(wait_s=5)


def acl(who: str, operation: str, name: str, *, kind: str = "TOPIC", deny: bool = False) -> Acl:
    return Acl(kind, name, "LITERAL", f"User:{who}", "*", operation, "DENY" if deny else "ALLOW")


def give(admin: ClusterAdmin, *acls: Acl) -> None:
    """Create ACLs and wait until they are listed."""
    assert set(admin.create_acls(acls).values()) == {None}
    wait_until(lambda: admin.acls() >= set(acls))


def may_write(settings: ClusterSettings, topic: str) -> bool:
    """Whether one record can be produced."""
    client = producer(settings, enable_idempotence=False)
    answers: list[KafkaError | None] = []
    client.produce(topic, b"x", on_delivery=lambda error, _message: answers.append(error))
    client.flush(15)
    assert len(answers) == 1
    error = answers[0]
    assert error is None or error.code() == KafkaError.TOPIC_AUTHORIZATION_FAILED
    return error is None


def stopped(mirror: RefreshedMirror, topic: str) -> None:
    """Play the stop of a topic."""
    mirror.known[topic] = mirror.known[topic].model_copy(update={"desired": DesiredState.STOPPED})
    for key in mirror.states:
        if key[0] == topic:
            mirror.states[key] = MirrorState.STOPPED


@pytest.mark.case("C28")
def test_writers_are_kept_out_until_the_stop_and_let_in_then(guarded: Guarded) -> None:
    """DENY and other rights are there at once, WRITE and ALL after the stop, which does not ask the source."""
    topic = guarded.topic()
    group = unique_name("guarded-group")
    given = {
        acl("alice", "WRITE", topic),
        acl("bob", "ALL", topic),
        acl("eve", "READ", topic, deny=True),
        acl("alice", "READ", group, kind="GROUP"),
        acl("alice", "WRITE", unique_name("transaction"), kind="TRANSACTIONAL_ID"),
    }
    give(guarded.at_source, *given)
    mirror = guarded.mirror(topic)
    mirror.refresh()
    wait_until(lambda: mirror.refresh() and freeze_of(topic) in guarded.there(topic))
    give(guarded.at_destination, acl("alice", "DESCRIBE", topic))

    while_mirrored = guarded.there(topic)
    let_in_early = may_write(guarded.destination.settings("alice"), topic)
    mirror_may = may_write(guarded.destination.settings("root"), topic)
    give(guarded.at_destination, acl("alice", "WRITE", topic))  # an operator's mistake while mirroring
    let_in_by_mistake = may_write(guarded.destination.settings("alice"), topic)
    record = mirror.known[topic]
    held = TopicAcls(record.held_acls, record.read_only_acl)
    outcome = release_acls(guarded.at_destination, {topic: held}, deadline_s=20)
    wait_until(lambda: freeze_of(topic) not in guarded.there(topic))
    stopped(mirror, topic)
    mirror.refresh()
    settled = mirror.refresh()
    mirror.close()

    split = {acl("bob", operation, topic) for operation in OTHER_TOPIC_OPERATIONS}
    assert given - while_mirrored == {acl("alice", "WRITE", topic), acl("bob", "ALL", topic)}
    assert split | {freeze_of(topic)} <= while_mirrored
    assert (let_in_early, mirror_may, let_in_by_mistake) == (False, True, False)
    assert outcome == {topic: None}
    assert given <= guarded.there(topic)
    assert not (split | {freeze_of(topic)}) & guarded.there(topic)
    wait_until(lambda: may_write(guarded.destination.settings("alice"), topic))
    assert changes_of(settled) == 0
    assert mirror.known[topic].held_acls == ()


@pytest.mark.case("C28")
def test_changes_at_the_source_follow_and_others_acls_stay(guarded: Guarded) -> None:
    """Added and removed ACLs follow, twenty refreshes at rest change nothing, an operator's own is kept."""
    topic = guarded.topic()
    first, second, own = acl("a", "READ", topic), acl("b", "READ", topic), acl("c", "READ", topic)
    give(guarded.at_source, first)
    mirror = guarded.mirror(topic, read_only="off")
    mirror.refresh()
    wait_until(lambda: mirror.refresh() and first in guarded.there(topic))
    give(guarded.at_destination, own)
    assert guarded.at_source.delete_acls([first]) == {first: None}
    give(guarded.at_source, second)
    wait_until(lambda: first not in guarded.at_source.acls())

    mirror.restart()
    mirror.refresh()
    wait_until(lambda: guarded.there(topic) >= {second, own})
    wait_until(lambda: first not in guarded.there(topic))
    outcomes = [mirror.refresh() for _ in range(20)]
    planned = mirror.planned()
    mirror.close()

    assert [changes_of(outcome) for outcome in outcomes] == [0] * 20
    assert planned == ()
    assert own in guarded.there(topic)


def test_a_mirror_that_is_no_super_user_says_who_may_write(guarded: Guarded) -> None:
    """It cannot deny everybody without denying itself: it holds back, and names those an operator let in."""
    topic = guarded.topic()
    rights = [
        acl("mirror", operation, "kafka-cluster", kind="CLUSTER") for operation in ("DESCRIBE", "ALTER")
    ]
    rights += [acl("mirror", "ALL", topic), acl("mirror", "CREATE", "kafka-cluster", kind="CLUSTER")]
    give(guarded.at_source, acl("alice", "WRITE", topic), *rights)
    give(guarded.at_destination, acl("alice", "WRITE", topic), acl("carol", "WRITE", topic), *rights)
    mirror = guarded.mirror(topic, user="mirror")
    wait_until(lambda: mirror.refresh() and mirror.known[topic].held_acls)
    wait_until(lambda: mirror.refresh() and acl("alice", "WRITE", topic) not in guarded.there(topic))
    outcome = mirror.refresh()
    mirror.close()

    notes = step_of(outcome, Step.ACLS).notes
    assert errors_of(outcome) == {}
    assert [note for note in notes if "may write" in note] == [
        f"User:carol may write to {topic} (ALLOW User:carol WRITE on topic {topic})"
    ]
    assert freeze_of(topic) not in guarded.there(topic)
    assert not any(each.resource_name.startswith("kmirror-") for each in guarded.at_destination.acls())
    assert may_write(guarded.destination.settings("mirror"), topic)


def test_a_missing_right_is_named_and_everything_else_goes_on(guarded: Guarded) -> None:
    """Without the right to list ACLs the step says so and what to do; topics are mirrored all the same."""
    topic = guarded.topic()
    rights = [acl("mirror", "ALL", topic), acl("mirror", "CREATE", topic)]
    taken = [each for each in guarded.at_source.acls() if each.principal == "User:mirror"]
    guarded.at_source.delete_acls(taken)
    give(guarded.at_source, *rights)
    wait_until(lambda: not guarded.at_source.acls() & set(taken) - set(rights))
    mirror = replace(guarded.mirror(topic, user="mirror"), destination=guarded.destination.settings("root"))
    outcome = mirror.refresh()
    outcome = mirror.refresh()
    mirror.close()

    assert mirror.known[topic].partitions == 1
    problem = step_of(outcome, Step.ACLS).errors["*"]
    assert "User:mirror lacks DESCRIBE on the cluster" in problem
    assert "acls.include" in problem


def test_a_cluster_without_an_authorizer_is_one_note(guarded: Guarded, clusters: Clusters) -> None:
    """On either side: nothing is copied, nothing fails."""
    topic = guarded.topic()
    to_open = RefreshedMirror(
        source=guarded.source.settings("root"),
        destination=clusters.destination.settings(),
        filters=FilterSettings(topics_include=(topic,), groups_include=("none",)),
        source_cluster_id=guarded.source.cluster_id,
    )
    to_open.refresh()
    outcome = to_open.refresh()
    to_open.close()

    assert errors_of(outcome) == {}
    assert step_of(outcome, Step.ACLS).notes == ["the destination has no authorizer: ACLs are not mirrored"]
