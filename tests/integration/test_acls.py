"""ACLs of clusters with an authorizer: kept equal, held back, granted at stop."""

import json
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar

import pytest
from confluent_kafka import KafkaError

from kmirror_dagster.broker.admin import ClusterAdmin
from kmirror_dagster.broker.admin_types import Acl, CommittedOffset, NewTopic, OffsetKind
from kmirror_dagster.broker.clients import producer
from kmirror_dagster.coordination.models import VerbRequest
from kmirror_dagster.errors import KmirrorError
from kmirror_dagster.lifecycle import DesiredState, MirrorState
from kmirror_dagster.metadata.acl_release import release_acls
from kmirror_dagster.metadata.acls import OTHER_TOPIC_OPERATIONS, TopicAcls, acl_text, freeze_of
from kmirror_dagster.metadata.outcome import Step
from kmirror_dagster.metadata.preflight import PreflightReport, run_preflight
from kmirror_dagster.metadata.rights import Scope, needs
from kmirror_dagster.sandbox.cluster import SandboxCluster
from kmirror_dagster.sandbox.properties import Protocol
from kmirror_dagster.sandbox.security import ClusterSecurity, User
from kmirror_dagster.settings import ClusterSettings, FilterSettings, PolicySettings, mirror_from_document
from tests.conftest import Clusters, start_all
from tests.helpers.nodes import NodeMirror, NodeProcess
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
    problems = errors_of(mirror.refresh())
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
    assert problems == {}
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


class CountingAdmin(ClusterAdmin):
    """An admin client that counts its altering requests about ACLs."""

    requests: ClassVar[Counter[str]] = Counter()

    def create_acls(
        self, acls: Sequence[Acl], *, timeout_s: float | None = None
    ) -> Mapping[Acl, KmirrorError | None]:
        """Create ACLs, counted."""
        self.requests["create_acls"] += 1
        return super().create_acls(acls, timeout_s=timeout_s)

    def delete_acls(
        self, acls: Sequence[Acl], *, timeout_s: float | None = None
    ) -> Mapping[Acl, KmirrorError | None]:
        """Delete ACLs, counted."""
        self.requests["delete_acls"] += 1
        return super().delete_acls(acls, timeout_s=timeout_s)

    def is_exempt(self, *, timeout_s: float | None = None) -> bool:
        """Try it, counted."""
        self.requests["is_exempt"] += 1
        return super().is_exempt(timeout_s=timeout_s)


def test_a_thousand_acls_at_rest_cost_no_altering_request(guarded: Guarded) -> None:
    """They are there after a few requests; twenty refreshes later nothing was created, deleted or tried again."""
    topic = guarded.topic()
    many = {acl(f"user-{index}", "READ", topic) for index in range(1_000)}
    give(guarded.at_source, *many)
    mirror = replace(guarded.mirror(topic), source_admin=CountingAdmin, destination_admin=CountingAdmin)
    CountingAdmin.requests.clear()
    wait_until(lambda: mirror.refresh() and guarded.there(topic) >= {freeze_of(topic), *many}, 60)
    wait_until(lambda: changes_of(mirror.refresh()) == 0)
    before = dict(CountingAdmin.requests)

    began = time.monotonic()
    outcomes = [mirror.refresh() for _ in range(20)]
    seconds = (time.monotonic() - began) / 20
    mirror.close()

    assert dict(CountingAdmin.requests) == before == {"is_exempt": 1, "create_acls": 2}
    assert [errors_of(outcome) for outcome in outcomes] == [{}] * 20
    assert seconds < 2


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
    problem = wait_until(lambda: step_of(mirror.refresh(), Step.ACLS).errors.get("*"))
    mirror.close()

    assert mirror.known[topic].partitions == 1
    assert "User:mirror lacks DESCRIBE on the cluster" in problem
    assert "acls.include" in problem


@pytest.mark.unsecured("about a cluster without an authorizer")
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


def rights(scope: Scope, side: str, *, without: tuple[tuple[str, str], ...] = ()) -> list[Acl]:
    """What docs/security.md says a mirror needs on one side, for the user `mirror`."""
    return [
        Acl(n.resource_type, n.resource_name, n.pattern_type, "User:mirror", "*", n.operation, "ALLOW")
        for n in needs(scope)
        if n.side == side and (n.resource_name, n.operation) not in without
    ]


@pytest.mark.case("C27")
def test_one_group_that_may_not_be_read_does_not_keep_the_others_back(guarded: Guarded) -> None:
    """Of fifty groups one is denied to the mirror: 49 are in step, it is reported; allowed again, it follows."""
    topic = guarded.topic()
    groups = [unique_name("guarded") for _ in range(50)]
    denied = acl("mirror", "ALL", groups[7], kind="GROUP", deny=True)
    everything = [
        acl("mirror", "ALL", "*"),
        acl("mirror", "ALL", "*", kind="GROUP"),
        acl("mirror", "ALL", "kafka-cluster", kind="CLUSTER"),
    ]
    give(guarded.at_source, *everything, denied)
    give(guarded.at_destination, *everything)
    positions = {(topic, 0): CommittedOffset(0, "text")}
    wait_until(
        lambda: (
            not guarded.at_source.alter_group_offsets(dict.fromkeys(groups, positions)).errors
            and len(guarded.at_source.group_offsets(groups).values) == 50
        ),
        60,
    )
    mirror = guarded.mirror(topic, user="mirror")

    def in_step() -> set[str]:
        return {
            group for group, offsets in guarded.at_destination.group_offsets(groups).values.items() if offsets
        }

    wait_until(lambda: mirror.refresh() and len(in_step()) == 49, 60)
    outcome = mirror.refresh()
    missing = set(groups) - in_step()
    assert guarded.at_source.delete_acls([denied]) == {denied: None}
    wait_until(lambda: mirror.refresh() and in_step() == set(groups), 60)
    for admin in (guarded.at_source, guarded.at_destination):
        admin.delete_acls(everything)
    mirror.close()

    assert missing == {groups[7]}
    assert list(step_of(outcome, Step.GROUPS).errors) == [groups[7]]
    assert "User:mirror lacks DESCRIBE on group" in step_of(outcome, Step.GROUPS).errors[groups[7]]


class PlantedAdmin(ClusterAdmin):
    """An admin client that cannot create one ACL."""

    planted: ClassVar[set[Acl]] = set()

    def create_acls(
        self, acls: Sequence[Acl], *, timeout_s: float | None = None
    ) -> Mapping[Acl, KmirrorError | None]:
        """Create all others."""
        answers = dict(super().create_acls([each for each in acls if each not in self.planted]))
        return {each: answers.get(each, KmirrorError("planted")) for each in acls} if acls else {}


@pytest.mark.case("C27")
@pytest.mark.case("C30")
def test_a_topic_a_group_and_an_acl_that_fail_name_themselves(guarded: Guarded) -> None:
    """One of each is planted: three errors under three names, and everything else is in step in the same refresh."""
    topics = [guarded.topic() for _ in range(5)]
    bad = topics[2]
    assert guarded.at_destination.create_topics([NewTopic(bad, 3, 1)]) == {bad: None}
    groups = [unique_name("guarded") for _ in range(5)]
    reads = [acl(f"reader-{index}", "READ", topic) for index, topic in enumerate(topics) if topic != bad]
    PlantedAdmin.planted = {reads[1]}
    rights = [
        *(acl("mirror", "ALL", name, kind=kind) for name, kind in (("*", "TOPIC"), ("*", "GROUP"))),
        acl("mirror", "ALL", "kafka-cluster", kind="CLUSTER"),
    ]
    denied = acl("mirror", "ALL", groups[3], kind="GROUP", deny=True)
    give(guarded.at_source, *rights, *reads, denied)
    give(guarded.at_destination, *rights)
    positions = {(topics[0], 0): CommittedOffset(0, "text")}
    offsets = dict.fromkeys(groups, positions)
    wait_until(lambda: len(guarded.at_source.alter_group_offsets(offsets).values) == len(groups))
    mirror = replace(guarded.mirror(*topics, user="mirror"), destination_admin=PlantedAdmin)
    fine = set(reads) - PlantedAdmin.planted

    def rest_is_in_step() -> bool:
        mirror.refresh()
        there = guarded.at_destination.group_offsets(groups).values
        return {group for group, found in there.items() if found} == set(groups) - {
            groups[3]
        } and guarded.there(*topics) >= fine

    wait_until(rest_is_in_step, 60)
    errors = errors_of(mirror.refresh())
    mirror.close()
    for admin in (guarded.at_source, guarded.at_destination):
        admin.delete_acls([*rights, denied])

    assert errors.keys() == {bad, groups[3], acl_text(reads[1])}
    assert "has 3 partitions at the destination" in errors[bad]
    assert "User:mirror lacks DESCRIBE on group" in errors[groups[3]]
    assert errors[acl_text(reads[1])] == "planted"
    assert {topic for topic, record in mirror.known.items() if record.partitions} == set(topics) - {bad}


@contextmanager
def least_privileged(guarded: Guarded, home: Path, topics: list[str]) -> Iterator[NodeMirror]:
    """A node and a mirror on behalf of the user `mirror`, whatever that may do."""
    secrets = {"MIRROR_PASSWORD": MIRROR.password}
    node = NodeProcess(home / "state", guarded.destination.bootstrap, environ=secrets)
    document = json.loads(node.config.read_text())
    document["destination"] = dict(guarded.destination.client_properties("mirror"))
    node.config.write_text(json.dumps(document))
    mirror = NodeMirror(node, guarded.source.bootstrap, guarded.destination.bootstrap, include=topics)
    for side, cluster in (("source", guarded.source), ("destination", guarded.destination)):
        hidden = {"sasl.password": "${MIRROR_PASSWORD}"}
        mirror.document[side] = {**cluster.client_properties("mirror"), **hidden}
    try:
        node.start()
        mirror.create()
        yield mirror
    finally:
        mirror.delete()
        node.stop()


def ends(guarded: Guarded, topics: list[str]) -> dict[str, int]:
    """Log ends at the destination, of topics that are there."""
    found = guarded.at_destination.list_offsets([(topic, 0) for topic in topics], OffsetKind.LATEST)
    return {topic: listed.offset for (topic, _), listed in found.values.items()}


@pytest.mark.case("C30")
@pytest.mark.case("C28")
def test_a_mirror_with_just_the_rights_it_needs(guarded: Guarded, tmp_path: Path) -> None:
    """Three topics flow, two name the right they lack, the preflight prints it; granted, they flow without a restart.

    A writer is let in by the stop, and not before.
    """
    topics = [guarded.topic() for _ in range(5)]
    fine, unread, unconfigured, existing, _ = topics
    for topic in topics:
        assert may_write(guarded.source.settings("root"), topic)
    assert guarded.at_destination.create_topics([NewTopic(existing, 1, 1)]) == {existing: None}
    scope = Scope(frozenset(topics))
    lacking = ((unread, "READ"), (unconfigured, "DESCRIBE_CONFIGS"))
    visible = [acl("mirror", "DESCRIBE", topic) for topic in (unread, unconfigured)]
    writer = [acl("alice", operation, fine) for operation in ("WRITE", "DESCRIBE")]
    everything = rights(scope, "source")
    give(guarded.at_source, *rights(scope, "source", without=lacking), *visible, *writer)
    give(guarded.at_destination, *rights(scope, "destination", without=((existing, "CREATE"),)))
    with least_privileged(guarded, tmp_path, topics) as mirror:
        flowing = [topic for topic in topics if topic not in (unread, unconfigured)]
        mirror.await_states(MirrorState.MIRRORING, *flowing)
        wait_until(lambda: ends(guarded, flowing) == dict.fromkeys(flowing, 1), 60)
        told: dict[str, str] = {}

        def both_are_told() -> bool:  # between two retries a partition has no error for a moment
            told.update({name.split("/")[0]: text for name, text in mirror.errors().items()})
            return told.keys() == {unread, unconfigured}

        wait_until(both_are_told, 60)
        report = preflight(guarded, mirror)
        wait_until(lambda: acl("alice", "DESCRIBE", fine) in guarded.there(fine), 60)
        let_in_early = may_write(guarded.destination.settings("alice"), fine)

        give(guarded.at_source, *everything)
        mirror.node.client.verb(mirror.name, "recover", VerbRequest())
        mirror.await_states(MirrorState.MIRRORING, *topics, deadline_s=90)
        wait_until(lambda: ends(guarded, topics) == dict.fromkeys(topics, 1), 60)
        complete = preflight(guarded, mirror)
        planned = mirror.node.client.plan(mirror.name)
        mirror.node.client.verb(mirror.name, "stop", VerbRequest())
        mirror.await_states(MirrorState.STOPPED, *topics)
        wait_until(lambda: may_write(guarded.destination.settings("alice"), fine))

    for topic, operation in lacking:
        assert f"User:mirror lacks {operation} on topic {topic}" in told[topic]
    assert {(right.resource_name, right.operation) for right in report.missing} == set(lacking)
    assert len(report.commands) == 2
    for line in report.commands:
        assert line.startswith(f"kafka-acls --bootstrap-server {guarded.source.bootstrap} --add")
        assert "--allow-principal User:mirror --operation" in line
    assert not let_in_early
    assert (complete.missing, complete.read_only) == ([], "held-back")
    assert planned.changes == []


def preflight(guarded: Guarded, mirror: NodeMirror) -> PreflightReport:
    """`kmirror check` of a mirror."""
    settings = mirror_from_document(mirror.document, {"MIRROR_PASSWORD": MIRROR.password})
    source, destination = ClusterAdmin(settings.source), ClusterAdmin(settings.destination)
    try:
        return run_preflight(settings, source, destination)
    finally:
        source.close()
        destination.close()
