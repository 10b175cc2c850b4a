"""Mirrors on clusters with TLS, SASL and an authorizer, with the rights they need and no more.

The whole integration suite runs like this with `pytest --secured`; what is here always does.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from kmirror_dagster.broker.admin import ClusterAdmin
from kmirror_dagster.broker.admin_types import Acl
from kmirror_dagster.coordination.models import VerbRequest
from kmirror_dagster.errors import AuthorizationError, KmirrorError
from kmirror_dagster.lifecycle import MirrorState
from kmirror_dagster.metadata.preflight import PreflightReport, run_preflight
from kmirror_dagster.metadata.rights import Scope
from tests.conftest import start_all
from tests.helpers.histories import alter_topic
from tests.helpers.kafka import (
    Record,
    commit_offsets,
    committed_offsets,
    consume,
    create_topic,
    delete_records,
    grow_topic,
    produce,
    produce_transaction,
)
from tests.helpers.nodes import NodeMirror, NodeProcess
from tests.helpers.pairs import Pair
from tests.helpers.secured import (
    USERS,
    Role,
    SecuredCluster,
    acls_of,
    advised,
    give,
    granted,
    own_settings,
    way_back,
)
from tests.helpers.waiting import wait_until

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300)]

NODES = Scope(frozenset(), quotas=True)  # what mirrors need whatever their topics are, and nodes


@dataclass
class Guarded:
    """Source and destination where nobody may do anything that a test has not allowed."""

    source: SecuredCluster
    destination: SecuredCluster
    at_source: ClusterAdmin
    at_destination: ClusterAdmin
    told: list[str] = field(default_factory=list)

    def allow(self, topics: list[str], groups: tuple[str, ...] = ()) -> None:
        """What docs/security.md lists, for these topics and groups, on both sides."""
        scope = Scope(frozenset(topics), frozenset(groups))
        self.source.allow(scope, "source")
        self.destination.allow(scope, "destination")

    def obey(self, text: str) -> None:
        """Run the `kafka-acls` commands that a message advises, each at the cluster it names."""
        lines = advised(text)
        assert lines, text
        for line in lines:
            # without rights there is no cluster that the line could mean but the one that refused
            port = line.split()[2].rsplit(":", 1)[1]
            at_source = port in self.source.client_properties()["bootstrap.servers"]
            give(self.at_source if at_source else self.at_destination, acls_of(line))


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Guarded]:
    """Two clusters of this module."""
    home = tmp_path_factory.mktemp("guarded")
    source = SecuredCluster("source", home, role="source", scope=None)
    destination = SecuredCluster("destination", home, scope=None)
    admins: list[ClusterAdmin] = []
    try:
        start_all([source, destination])
        admins = [ClusterAdmin(own_settings(cluster)) for cluster in (source, destination)]
        yield Guarded(source, destination, admins[0], admins[1])
    finally:
        for admin in admins:
            admin.close()
        source.stop(wait_s=0)
        destination.stop(wait_s=0)


@pytest.fixture(scope="module")
def node(guarded: Guarded, tmp_path_factory: pytest.TempPathFactory) -> Iterator[NodeProcess]:
    """A node whose principal is given, one after the other, the rights that it says it lacks."""
    process = NodeProcess(tmp_path_factory.mktemp("node") / "state", guarded.destination.bootstrap)
    try:
        while process.endpoint is None:
            try:
                process.start()
            except KmirrorError as error:
                assert isinstance(error, AuthorizationError), error
                assert str(error) not in guarded.told
                guarded.told.append(str(error))
                guarded.obey(str(error))
                if "on group" in str(error):  # the rest is asked for later, and retried without an end
                    guarded.destination.allow(NODES, "destination")
        guarded.source.allow(NODES, "source")
        guarded.destination.allow(NODES, "destination")
        yield process
    finally:
        process.stop()


@pytest.fixture
def mirror(guarded: Guarded, node: NodeProcess) -> Iterator[NodeMirror]:
    made = NodeMirror(node, guarded.source.bootstrap, guarded.destination.bootstrap)
    try:
        yield made
    finally:
        made.delete()


def preflight(mirror: NodeMirror) -> PreflightReport:
    """`kmirror check` of a mirror."""
    source, destination = ClusterAdmin(mirror.settings.source), ClusterAdmin(mirror.settings.destination)
    try:
        return run_preflight(mirror.settings, source, destination)
    finally:
        source.close()
        destination.close()


def test_a_node_says_which_rights_it_lacks(guarded: Guarded, node: NodeProcess) -> None:
    """Without rights it does not start: it names principal, right and command; with them granted it runs."""
    assert node.client.ready()
    rights = [text.split(" at ")[0] for text in guarded.told]
    assert all(text.startswith("User:mirror-destination lacks ") for text in rights)
    assert "User:mirror-destination lacks CREATE on topic __mirror_state" in rights
    assert "User:mirror-destination lacks READ on group kmirror" in rights


@dataclass
class Lacking:
    """A right that one topic lacks at first."""

    side: str
    operation: str
    topic: str

    @property
    def role(self) -> Role:
        """Of the user that lacks it."""
        return "source" if self.side == "source" else "destination"

    @property
    def acls(self) -> list[Acl]:
        """The right itself."""
        return [
            acl
            for acl in granted(Scope(frozenset({self.topic})), self.role, USERS[self.role].name)
            if (acl.resource_name, acl.operation) == (self.topic, self.operation)
        ]


# what a right would have implied, and is there all the same
IMPLIED = {
    ("source", "READ"): "DESCRIBE",
    ("source", "DESCRIBE_CONFIGS"): "DESCRIBE",
    ("destination", "ALTER_CONFIGS"): "DESCRIBE_CONFIGS",
}


class Reasons:
    """What a mirror says of topics that lack a right, by topic."""

    def __init__(self, guarded: Guarded, mirror: NodeMirror, lacking: list[Lacking]) -> None:
        self.told: dict[str, str] = {}
        self._mirror = mirror
        self._topics = {each.topic for each in lacking}
        self._later = {each.operation: each.topic for each in lacking if each.side == "destination"}
        for each in lacking:
            admin = guarded.at_source if each.side == "source" else guarded.at_destination
            assert set(admin.delete_acls(each.acls).values()) == {None}
            if implied := IMPLIED.get((each.side, each.operation)):
                give(admin, [replace(each.acls[0], operation=implied)])

    def complete(self) -> bool:
        """Look again, at a time when each right is needed; whether every topic has said something."""
        source = self._mirror.source
        delete_records(source, self._later["DELETE"], 10)
        alter_topic(source, self._later["ALTER_CONFIGS"], {"retention.ms": "86400000"})
        grow_topic_once(source, self._later["ALTER"])
        found = self._mirror.errors()
        for status in self._mirror.node.client.refresh(self._mirror.name).steps:
            found |= status.errors
        for name, text in found.items():
            if advised(text) and (topic := name.split("/")[0]) in self._topics:
                self.told[topic] = text
        return self.told.keys() == self._topics


@pytest.mark.case("C30")
def test_each_missing_right_names_itself_and_what_grants_it(guarded: Guarded, mirror: NodeMirror) -> None:
    """Eight topics lack one right each: their reasons name it with a command; run as printed, all are in step."""
    rights = [("source", each) for each in ("READ", "DESCRIBE_CONFIGS")]
    rights += [
        ("destination", each) for each in ("CREATE", "READ", "WRITE", "ALTER", "DELETE", "ALTER_CONFIGS")
    ]
    lacking = [Lacking(side, each, mirror.topic(f"{side}-{each.lower()}")) for side, each in rights]
    topics, fine = [each.topic for each in lacking], mirror.topic("fine")
    for topic in [*topics, fine]:
        create_topic(mirror.source, topic)
        produce(mirror.source, topic, [Record(b"%d" % n) for n in range(20)])
    guarded.allow([*topics, fine])
    reasons = Reasons(guarded, mirror, lacking)
    mirror.create()
    mirror.await_states(MirrorState.MIRRORING, fine)
    mirror.await_copied(fine)
    wait_until(reasons.complete, 90, what=f"reasons of {topics}: {reasons.told}", poll_s=0.5)
    report = preflight(mirror)

    for each in lacking:
        principal, text = USERS[each.role].name, reasons.told[each.topic]
        assert f"User:{principal} lacks {each.operation} on topic {each.topic} at " in text
        assert acls_of(advised(text)[0]) == each.acls
        guarded.obey(text)
    assert preflight(mirror).missing == []
    mirror.node.client.verb(mirror.name, "recover", VerbRequest())
    mirror.await_states(MirrorState.MIRRORING, *topics, deadline_s=90)
    mirror.await_copied(*topics, deadline_s=90)
    mirror.compare(*topics, fine)

    missing = {(right.resource_name, right.operation) for right in report.missing}
    assert missing == {(each.topic, each.operation) for each in lacking}


def grow_topic_once(bootstrap: str, topic: str) -> None:
    """Two partitions instead of one."""
    from confluent_kafka import KafkaException

    try:
        grow_topic(bootstrap, topic, 2)
    except KafkaException as error:
        assert "already" in str(error), error


@pytest.fixture(scope="module")
def back_node(guarded: Guarded, tmp_path_factory: pytest.TempPathFactory) -> Iterator[NodeProcess]:
    """A node that writes to the source cluster."""
    guarded.source.allow(NODES, "destination")
    process = NodeProcess(tmp_path_factory.mktemp("back") / "state", guarded.source.bootstrap)
    try:
        yield process.start()
    finally:
        process.stop()


@pytest.mark.case("C31")
def test_there_and_back_again(
    guarded: Guarded, mirror: NodeMirror, back_node: NodeProcess, tmp_path: Path
) -> None:
    """Plain, transactional and compacted topics, a group and an ACL; stop, writes, and the way back."""
    plain, transactional, compacted = (mirror.topic(stem) for stem in ("plain", "transactional", "compacted"))
    topics, group = [plain, transactional, compacted], f"{mirror.name}.readers"
    create_topic(mirror.source, plain, 2)
    create_topic(mirror.source, transactional)
    policy = {"cleanup.policy": "compact", "segment.bytes": "1048576", "min.cleanable.dirty.ratio": "0.01"}
    create_topic(mirror.source, compacted, configs=policy)
    guarded.allow(topics, (group,))
    alice = Acl("TOPIC", plain, "LITERAL", "User:alice", "*", "READ", "ALLOW")
    give(guarded.at_source, [alice])
    produce(mirror.source, plain, [Record(b"p%d" % n, partition=n % 2) for n in range(200)])
    for number in range(4):
        records = [Record(b"t%d-%d" % (number, n)) for n in range(10)]
        produce_transaction(mirror.source, transactional, records, commit=number % 2 == 0)
    produce(mirror.source, compacted, [Record(b"c%d" % n, key=b"k%d" % (n % 7)) for n in range(100)])
    commit_offsets(mirror.source, group, [(plain, 0, 30), (transactional, 0, 11)])
    mirror.create()
    mirror.await_states(MirrorState.MIRRORING, *topics)
    mirror.await_copied(*topics)
    wait_until(
        lambda: committed_offsets(mirror.destination, group) == {(plain, 0): 30, (transactional, 0): 11}, 60
    )
    wait_until(lambda: alice in guarded.at_destination.acls(), 60)
    mirror.compare(*topics, groups=True)

    pair = Pair(mirror, back_node, tmp_path / "quarantine")
    pair.fail_over(*topics)
    produce(mirror.source, plain, [Record(b"unseen")])
    produce(mirror.destination, plain, [Record(b"new", partition=1)] * 5)
    # the principal that only read there writes from now on
    scope = Scope(frozenset(topics), frozenset({group}), quotas=True)
    with way_back(guarded.source, guarded.destination, scope):
        try:
            assert pair.failback("--yes")["finished"]
            pair.back.await_copied(*topics)
            pair.back.compare(*topics)
        finally:
            pair.back.delete()
    assert [each.value for each in consume(mirror.source, plain, 1)][-5:] == [b"new"] * 5
