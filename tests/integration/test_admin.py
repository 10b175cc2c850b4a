"""Admin calls against real brokers, with and without an authorizer."""

import asyncio
import threading
import time
from collections.abc import Iterator

import pytest

from kmirror_dagster.broker.admin import ClusterAdmin
from kmirror_dagster.broker.admin_types import (
    Acl,
    CommittedOffset,
    ConfigChange,
    GroupType,
    NewTopic,
    OffsetKind,
)
from kmirror_dagster.errors import AuthorizationError, BrokerError, ClusterUnreachableError, KmirrorError
from kmirror_dagster.metadata.outcome import Step
from kmirror_dagster.metadata.release import release
from kmirror_dagster.sandbox.cluster import SandboxCluster
from kmirror_dagster.sandbox.properties import ListenerPlan, Protocol
from kmirror_dagster.settings import ClusterSettings, FilterSettings
from tests.conftest import Clusters
from tests.helpers import kafka
from tests.helpers.refreshing import RefreshedMirror, commit, errors_of, step_of
from tests.helpers.secured import own_settings
from tests.helpers.waiting import unique_name, wait_until

pytestmark = pytest.mark.integration

_LOGIN = (
    'org.apache.kafka.common.security.plain.PlainLoginModule required user_mirror="mirror-secret" '
    'user_root="root-secret";'
)


@pytest.fixture
def admin(clusters: Clusters) -> Iterator[ClusterAdmin]:
    """Admin client of the shared source."""
    client = ClusterAdmin(own_settings(clusters.source))
    yield client
    client.close()


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SandboxCluster]:
    """A broker with an authorizer: ANONYMOUS on its first listener and User:root are super users."""
    sasl = {"sasl.enabled.mechanisms": "PLAIN", "plain.sasl.jaas.config": _LOGIN}
    cluster = SandboxCluster(
        "guarded",
        tmp_path_factory.mktemp("guarded"),
        overrides={
            "authorizer.class.name": "org.apache.kafka.metadata.authorizer.StandardAuthorizer",
            "super.users": "User:ANONYMOUS;User:root",
        },
        listeners=(ListenerPlan("OPEN"), ListenerPlan("LOGIN", Protocol.SASL_PLAINTEXT, sasl)),
    )
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.remove()


def open_settings(cluster: SandboxCluster) -> ClusterSettings:
    """Settings of a super user."""
    return ClusterSettings.model_validate({"bootstrap.servers": cluster.bootstrap_of("OPEN")})


def mirror_settings(cluster: SandboxCluster) -> ClusterSettings:
    """Settings of User:mirror, who has the rights it was given."""
    return ClusterSettings.model_validate(
        {
            "bootstrap.servers": cluster.bootstrap_of("LOGIN"),
            "security.protocol": "SASL_PLAINTEXT",
            "sasl.mechanism": "PLAIN",
            "sasl.username": "mirror",
            "sasl.password": "mirror-secret",
        }
    )


def allow(operation: str, kind: str, name: str, principal: str = "User:mirror") -> Acl:
    """An ALLOW for User:mirror."""
    return Acl(kind, name, "LITERAL", principal, "*", operation, "ALLOW")


def grant(root: ClusterAdmin, *acls: Acl) -> None:
    """Create ACLs and wait until they are in force."""
    assert set(root.create_acls(acls).values()) == {None}
    wait_until(lambda: root.acls() >= set(acls))


def test_a_cluster_tells_id_and_brokers(admin: ClusterAdmin, clusters: Clusters) -> None:
    """Cluster id and broker count come from the brokers."""
    described = admin.describe_cluster()

    assert admin.cluster_id() == described.cluster_id == clusters.source.cluster_id
    assert admin.broker_count() == 1
    assert list(described.brokers.values()) == [clusters.source.bootstrap]


def test_topics_are_created_described_grown_changed_and_deleted(admin: ClusterAdmin) -> None:
    """The life of a topic through batched calls, each item with its own outcome."""
    one, two = unique_name("one"), unique_name("two")
    created = admin.create_topics(
        [
            NewTopic(one, 2, 1, {"retention.ms": "5000"}),
            NewTopic(two, 1, 1),
            NewTopic(unique_name("bad"), 1, 9),
        ]
    )
    assert [error is None for error in created.values()] == [True, True, False]
    wait_until(lambda: not admin.topics([one, two]).errors)

    described = admin.topics([one, two, "no-such-topic"])
    assert described.values[one].partitions == 2
    assert described.values[one].topic_id != described.values[two].topic_id
    assert described.values[one].replication_factor == 1
    missing = described.errors["no-such-topic"]
    assert isinstance(missing, BrokerError)
    assert missing.code == 3
    assert admin.create_partitions({one: 3, two: 1})[one] is None
    assert admin.create_partitions({two: 1})[two] is not None
    changed = admin.alter_configs(
        {
            one: ConfigChange({"segment.ms": "9000"}, ("retention.ms",)),
            two: ConfigChange({"retention.ms": "x"}),
        }
    )
    assert changed[one] is None
    assert "retention.ms" in str(changed[two])
    wait_until(lambda: admin.topic_configs([one]).values[one]["segment.ms"].value == "9000")
    configs = admin.topic_configs([one]).values[one]
    assert configs["segment.ms"].is_override
    assert not configs["retention.ms"].is_override
    assert configs["retention.ms"].value == "604800000"
    assert admin.delete_topics([one, two]) == {one: None, two: None}
    wait_until(lambda: not {one, two} & admin.topic_names())


@pytest.mark.case("C22")
def test_looking_never_creates_a_topic(admin: ClusterAdmin) -> None:
    """No look-up of a topic that does not exist makes a broker with auto-creation create it."""
    ghost = unique_name("ghost")

    admin.topics([ghost])
    admin.topic_configs([ghost])
    admin.list_offsets([(ghost, 0)], OffsetKind.LATEST)
    admin.delete_records({(ghost, 0): 1})
    admin.alter_group_offsets({unique_name("g"): {(ghost, 0): CommittedOffset(1)}})

    assert ghost not in admin.topic_names()


def test_offsets_are_looked_up_by_end_time_and_isolation(admin: ClusterAdmin, clusters: Clusters) -> None:
    """Earliest, latest, by timestamp; the last stable offset stays before an open transaction."""
    topic = unique_name("offsets")
    # records of 1970 would be deleted by retention while they are looked up
    kafka.create_topic(clusters.source.bootstrap, topic, configs={"retention.ms": "-1"})
    records = [kafka.Record(b"x", timestamp=1_000 * index) for index in range(1, 11)]
    kafka.produce(clusters.source.bootstrap, topic, records)
    writer = kafka.producer(clusters.source.bootstrap, {"transactional.id": topic})
    writer.init_transactions(30)
    writer.begin_transaction()
    kafka.write(writer, topic, [kafka.Record(b"open")])
    writer.flush(30)
    assert admin.delete_records({(topic, 0): 3}).values == {(topic, 0): 3}

    def offset(at: OffsetKind | int, **more: bool) -> int:
        return admin.list_offsets([(topic, 0)], at, **more).values[topic, 0].offset

    assert offset(OffsetKind.EARLIEST) == 3
    assert offset(OffsetKind.LATEST) == 11
    assert offset(OffsetKind.LATEST, read_committed=True) == 10
    assert offset(5_500) == 5
    assert offset(4_000_000_000_000) == -1
    writer.abort_transaction(30)
    assert admin.list_offsets([(topic, 7)], OffsetKind.LATEST).errors.keys() == {(topic, 7)}


def test_groups_are_listed_described_altered_and_deleted(admin: ClusterAdmin, clusters: Clusters) -> None:
    """Positions are written and read back per partition, an error of one partition stays there."""
    topic, group = unique_name("groups"), unique_name("groups")
    kafka.create_topic(clusters.source.bootstrap, topic, 2)
    commit(clusters.source.bootstrap, group, [(topic, 0, 1)])

    altered = admin.alter_group_offsets(
        {group: {(topic, 0): CommittedOffset(0, "text"), ("no-such-topic", 0): CommittedOffset(1)}}
    )

    assert altered.values[group][topic, 0] is None
    assert isinstance(altered.values[group]["no-such-topic", 0], BrokerError)
    assert admin.group_offsets([group, "nobody"]).values == {
        group: {(topic, 0): CommittedOffset(0, "text")},
        "nobody": {},
    }
    listed = {item.group: (item.type, item.state) for item in admin.groups().groups}
    assert listed[group] == (GroupType.CLASSIC, "Empty")
    assert admin.describe_groups([group, "nobody"]).values["nobody"].state == "Dead"
    assert admin.delete_group_offsets(group, [(topic, 0)]) == {(topic, 0): None}
    assert admin.group_offsets([group]).values == {group: {}}
    commit(clusters.source.bootstrap, group, [(topic, 0, 1)])
    assert admin.delete_groups([group]) == {group: None}


def test_a_dead_cluster_ends_in_time_with_its_address() -> None:
    """No broker: the call ends at its deadline with one line that names the address."""
    client = ClusterAdmin(ClusterSettings(bootstrap_servers=("127.0.0.1:1",)))
    began = time.monotonic()

    with pytest.raises(ClusterUnreachableError, match=r"127\.0\.0\.1:1") as caught:
        client.topics(["t"], timeout_s=2)

    assert time.monotonic() - began < 5
    assert "\n" not in str(caught.value)
    client.close()


def test_closing_ends_a_call_under_way() -> None:
    """A call that waits in another thread gives up when the client is closed."""
    client = ClusterAdmin(ClusterSettings(bootstrap_servers=("127.0.0.1:1",)))
    outcome: list[KmirrorError] = []

    def ask() -> None:
        try:
            client.topics(["t"], timeout_s=30)
        except KmirrorError as error:
            outcome.append(error)

    thread = threading.Thread(target=ask)
    thread.start()
    wait_until(lambda: client._client is not None)
    client.close()
    thread.join(10)

    assert not thread.is_alive()
    assert "closed" in str(outcome[0])
    with pytest.raises(KmirrorError, match="closed"):
        client.topics(["t"])


def test_release_puts_the_source_s_values_in_place_without_the_source(
    admin: ClusterAdmin, clusters: Clusters
) -> None:
    """Stopped topics get what was held back, once; a topic that is gone has nothing to release."""
    topic = unique_name("released")
    held = {"compression.type": "zstd", "message.timestamp.type": "LogAppendTime", "max.message.bytes": None}
    values = {
        "compression.type": "producer",
        "message.timestamp.type": "CreateTime",
        "max.message.bytes": "9000000",
    }
    kafka.create_topic(clusters.source.bootstrap, topic, configs={**values, "retention.ms": "7000"})

    outcomes = release(admin, {topic: held, "no-such-topic": held}, deadline_s=30)
    wait_until(lambda: admin.topic_configs([topic]).values[topic]["compression.type"].value == "zstd")
    again = release(admin, {topic: held}, deadline_s=30)

    assert outcomes == {topic: None, "no-such-topic": None}
    assert again == {topic: None}
    configs = admin.topic_configs([topic]).values[topic]
    own = {key: entry.value for key, entry in configs.items() if entry.is_override}
    assert own == {
        "compression.type": "zstd",
        "message.timestamp.type": "LogAppendTime",
        "retention.ms": "7000",
    }


def test_acls_of_every_kind_are_created_listed_and_deleted(guarded: SandboxCluster) -> None:
    """Resource types, pattern types, hosts and permissions come back as they were given."""
    root = ClusterAdmin(open_settings(guarded))
    acls = [
        Acl("TOPIC", "t", "PREFIXED", "User:alice", "10.0.0.1", "WRITE", "DENY"),
        Acl("GROUP", "g", "LITERAL", "User:alice", "*", "READ", "ALLOW"),
        Acl("TRANSACTIONAL_ID", "x", "LITERAL", "User:alice", "*", "WRITE", "ALLOW"),
        Acl("CLUSTER", "kafka-cluster", "LITERAL", "User:alice", "*", "IDEMPOTENT_WRITE", "ALLOW"),
        Acl("DELEGATION_TOKEN", "d", "LITERAL", "User:alice", "*", "DESCRIBE", "ALLOW"),
        Acl("USER", "User:bob", "LITERAL", "User:alice", "*", "DESCRIBE_TOKENS", "ALLOW"),
    ]

    grant(root, *acls)

    assert root.delete_acls(acls) == dict.fromkeys(acls)
    wait_until(lambda: not root.acls() & set(acls))
    root.close()


@pytest.mark.unsecured("about a cluster without an authorizer")
def test_a_cluster_without_an_authorizer_says_so(admin: ClusterAdmin) -> None:
    """Listing ACLs where there are none to enforce is Kafka's SECURITY_DISABLED."""
    with pytest.raises(BrokerError) as caught:
        admin.acls()

    assert caught.value.code == 54


@pytest.mark.case("C30")
def test_missing_rights_name_operation_resource_and_principal(guarded: SandboxCluster) -> None:
    """Each refused call says what to grant to whom; the others in the same batch are answered."""
    root, client = ClusterAdmin(open_settings(guarded)), ClusterAdmin(mirror_settings(guarded))
    seen, hidden, group = unique_name("seen"), unique_name("hidden"), unique_name("group")
    root.create_topics([NewTopic(seen, 1, 1), NewTopic(hidden, 1, 1)])
    grant(root, allow("DESCRIBE", "TOPIC", seen))
    wait_until(lambda: seen in client.topic_names())

    described = client.topics([seen, hidden])
    configs = client.topic_configs([seen])
    created = client.create_topics([NewTopic(unique_name("new"), 1, 1)])
    offsets = client.group_offsets([group])

    assert described.values.keys() == {seen}
    assert hidden not in client.topic_names()
    expected = {
        f"User:mirror lacks DESCRIBE on topic {hidden}": described.errors[hidden],
        f"User:mirror lacks DESCRIBE_CONFIGS on topic {seen}": configs.errors[seen],
        "User:mirror lacks CREATE on topic": next(iter(created.values())),
        f"User:mirror lacks DESCRIBE on group {group}": offsets.errors[group],
    }
    for text, error in expected.items():
        assert isinstance(error, AuthorizationError)
        assert text in str(error)
    with pytest.raises(AuthorizationError, match="lacks DESCRIBE on the cluster"):
        client.acls()
    root.close()
    client.close()


@pytest.mark.case("C27")
@pytest.mark.case("C30")
def test_what_may_not_be_read_fails_alone_and_recovers_by_itself(
    guarded: SandboxCluster, clusters: Clusters
) -> None:
    """Of five topics and groups those without rights are reported; granting them is enough."""
    root = ClusterAdmin(open_settings(guarded))
    stem = unique_name("rights")
    topics = [f"{stem}-{index}" for index in range(5)]
    groups = [f"{stem}-g{index}" for index in range(5)]
    root.create_topics([NewTopic(topic, 1, 1) for topic in topics])
    wait_until(lambda: not root.topics(topics).errors)
    for topic in topics:
        kafka.produce(guarded.bootstrap_of("OPEN"), topic, [kafka.Record(b"x")] * 5)
    for group in groups:
        commit(guarded.bootstrap_of("OPEN"), group, [(topics[0], 0, 3)])
    rights = [allow(right, "TOPIC", topic) for topic in topics[1:] for right in ("DESCRIBE", "READ")]
    rights += [allow("DESCRIBE_CONFIGS", "TOPIC", topic) for topic in topics if topic != topics[2]]
    rights += [allow("DESCRIBE", "TOPIC", topics[0])]
    rights += [allow("DESCRIBE", "GROUP", group) for group in groups]
    denied = Acl("GROUP", groups[4], "LITERAL", "User:mirror", "*", "DESCRIBE", "DENY")
    grant(root, *rights, denied)
    mirror = RefreshedMirror(
        source=mirror_settings(guarded),
        destination=clusters.destination.settings(),
        filters=FilterSettings(
            topics_include=(f"{stem}-.*",), groups_include=(f"{stem}-.*",), acls_include=()
        ),
        source_cluster_id=guarded.cluster_id,
    )

    first = mirror.refresh()
    kafka.produce(clusters.destination.bootstrap, topics[0], [kafka.Record(b"x")] * 5)
    synced = mirror.refresh()
    grant(root, allow("DESCRIBE_CONFIGS", "TOPIC", topics[2]))
    root.delete_acls([denied])
    wait_until(lambda: denied not in root.acls())
    wait_until(lambda: errors_of(mirror.refresh()) == {})

    by_name = {intent.topic: intent.error for intent in first.topics}
    assert "DESCRIBE_CONFIGS" in (by_name.pop(topics[2]) or "")
    assert set(by_name.values()) == {None}
    # a group that may not be described is not even listed to this principal
    copied = [kafka.committed_offsets(clusters.destination.bootstrap, group) for group in groups]
    assert copied == [{(topics[0], 0): 3}] * 5
    assert step_of(synced, Step.GROUPS).changes == 4
    # the mirror may not list users either; a broker never answers the question for all of them then
    assert "lacks DESCRIBE" in "".join(step_of(synced, Step.USERS).notes)
    mirror.close()
    root.close()


def test_admin_calls_need_no_event_loop_of_the_caller(admin: ClusterAdmin) -> None:
    """Calls over the wire client work in a thread beside a running loop, as in a node."""

    async def node() -> int:
        return len((await asyncio.to_thread(admin.groups)).errors)

    assert asyncio.run(node()) == 0
