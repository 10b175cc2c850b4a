"""Faults other tools have met with topics and clusters, tried on a whole mirror: a real node, real clusters."""

import shutil
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from confluent_kafka import KafkaException, TopicCollection, TopicPartition
from confluent_kafka.admin import AlterConfigOpType, ConfigEntry, ConfigResource, OffsetSpec

from kmirror_dagster.errors import SameClusterError, UnknownMirrorError
from kmirror_dagster.lifecycle import MirrorState
from kmirror_dagster.records import STATE_TOPIC
from kmirror_dagster.sandbox.cluster import SandboxCluster
from kmirror_dagster.sandbox.plan import random_uuid
from tests.conftest import ClusterFactory, Clusters
from tests.helpers.kafka import (
    DEADLINE_S,
    Record,
    admin,
    consume,
    create_topic,
    delete_topic,
    grow_topic,
    log_range,
    produce,
)
from tests.helpers.nodes import NodeMirror, NodeProcess, mirrored, ranges
from tests.helpers.waiting import unique_name, wait_until

pytestmark = pytest.mark.integration

_YEAR_MS = 365 * 86_400_000


@pytest.fixture
def mirror(clusters: Clusters, node: NodeProcess) -> Iterator[NodeMirror]:
    with mirrored(node, clusters.source.bootstrap, clusters.destination.bootstrap) as made:
        yield made


def numbered(count: int, first: int = 0, partition: int = 0) -> list[Record]:
    return [Record(b"v-%d" % n, b"k-%d" % n, partition=partition) for n in range(first, first + count)]


# --- C16: the copy, or its whole cluster, is gone


@pytest.mark.case("C16")
def test_a_deleted_copy_is_made_again_from_the_source_s_start(clusters: Clusters, mirror: NodeMirror) -> None:
    """A copy deleted at the destination is noticed, created again and identical again, and goes on."""
    topic = mirror.topic()
    create_topic(mirror.source, topic, configs={"retention.ms": "7200000"})
    produce(mirror.source, topic, numbered(1_000))
    mirror.await_states(MirrorState.MIRRORING, topic)
    mirror.await_copied(topic)
    former = topic_id(mirror.destination, topic)
    delete_topic(mirror.destination, topic)
    wait_until(lambda: topic_id(mirror.destination, topic) not in (None, former), 30, what="made again")
    mirror.await_copied(topic)
    mirror.await_states(MirrorState.MIRRORING, topic)
    mirror.compare(topic)
    assert len(consume(mirror.destination, topic)) == 1_000
    assert configs_of(mirror.destination, topic)["retention.ms"] == "7200000"
    produce(mirror.source, topic, numbered(500, first=1_000))
    mirror.await_copied(topic)
    mirror.compare(topic)


@pytest.mark.case("C16")
@pytest.mark.timeout(300)
def test_a_rebuilt_destination_starts_over_and_restarts_copy_nothing(
    clusters: Clusters, cluster_factory: ClusterFactory, tmp_path: Path
) -> None:
    """A destination rebuilt empty under its address: the node ends, saying so; then all is copied once.

    Three restarts after that copy nothing at all.
    """
    destination = cluster_factory("rebuilt")
    source, topic = clusters.source.bootstrap, unique_name("rebuilt")
    create_topic(source, topic, 2)
    produce(source, topic, [*numbered(500), *numbered(500, partition=1)])
    node = NodeProcess(tmp_path / "state", destination.bootstrap)
    mirror = NodeMirror(node, source, destination.bootstrap, include=[topic])
    try:
        node.start()
        mirror.create()
        mirror.await_states(MirrorState.MIRRORING, topic, partitions=2)
        mirror.await_copied(topic)
        former = destination.cluster_id
        rebuild(destination)
        # what it knows belongs to a cluster that is gone: nothing of it may reach the new one
        wait_until(lambda: node.endpoint is None, 60, what="the node ended by itself", poll_s=0.2)
        assert f"another cluster now (id {destination.cluster_id}, this node was started on {former})" in (
            node.log.read_text()
        )
        assert topic not in admin(destination.bootstrap).list_topics(timeout=DEADLINE_S).topics
        assert STATE_TOPIC not in admin(destination.bootstrap).list_topics(timeout=DEADLINE_S).topics

        node.start()
        assert node.client.mirrors() == []
        assert mirror.create().destination_cluster_id == destination.cluster_id
        mirror.await_states(MirrorState.MIRRORING, topic, partitions=2)
        mirror.await_copied(topic)
        mirror.compare(topic)
        assert node.metric("kmirror_copied_records_total", mirror=mirror.name) == 1_000

        ends = ranges(destination.bootstrap, topic)
        for _ in range(3):
            node.stop()
            node.start()
            wait_until(lambda: _is_copying(mirror, topic), 30, what="copying again")
            assert node.metric("kmirror_copied_records_total", mirror=mirror.name) == 0
            assert node.metric("kmirror_copied_batches_total", mirror=mirror.name) == 0
        assert ranges(destination.bootstrap, topic) == ends
        mirror.compare(topic)
    finally:
        node.stop()


def rebuild(cluster: SandboxCluster) -> None:
    """Replace a cluster by an empty one with another id, at the same address."""
    cluster.stop(wait_s=0)
    for broker in cluster.brokers:
        shutil.rmtree(broker.data)
    cluster.plan.model_copy(update={"cluster_id": random_uuid()}).save(cluster.home)
    cluster.start()


def _is_copying(mirror: NodeMirror, topic: str) -> bool:
    """Whether every partition is being read, and the reader has been told where the source ends."""
    statuses = mirror.partitions(topic)
    ends = [status.lag_records for status in statuses]
    return mirror.node.metric("kmirror_refresh_finished_timestamp_seconds") > 0 and ends == [0] * len(ends)


def topic_id(bootstrap: str, topic: str) -> str | None:
    """Id of a topic; None while it does not exist."""
    client = admin(bootstrap)
    try:
        found = client.describe_topics(TopicCollection([topic]))[topic].result(DEADLINE_S)
    except KafkaException:
        return None
    return str(found.topic_id)


def configs_of(bootstrap: str, topic: str) -> dict[str, str | None]:
    """Effective configurations of a topic."""
    client = admin(bootstrap)
    resource = ConfigResource(ConfigResource.Type.TOPIC, topic)
    entries = client.describe_configs([resource])[resource].result(DEADLINE_S)
    return {key: entry.value for key, entry in entries.items()}


# --- C17: partitions


@pytest.mark.case("C17")
def test_partitions_added_under_traffic_are_copied(
    clusters: Clusters, node: NodeProcess, mirror: NodeMirror
) -> None:
    """One partition becomes three while it is written to: all three are copied under their numbers, no restart."""
    topic, pid = mirror.topic(), node.process.pid
    create_topic(mirror.source, topic)
    stop = threading.Event()
    written = [0, 0, 0]
    live = threading.Thread(target=_traffic, args=(mirror.source, topic, written, stop), daemon=True)
    live.start()
    try:
        mirror.await_states(MirrorState.MIRRORING, topic, partitions=1)
        before = mirror.partitions(topic)[0]
        wait_until(lambda: written[0] > 200, what="traffic")
        grow_topic(mirror.source, topic, 3)
        for partition in (1, 2):
            produce(mirror.source, topic, numbered(100 * partition, partition=partition))
            written[partition] = 100 * partition
        mirror.await_states(MirrorState.MIRRORING, topic, partitions=3, deadline_s=20)
    finally:
        stop.set()
        live.join(DEADLINE_S)
    mirror.await_copied(topic)
    mirror.compare(topic)
    assert [end for _, end in ranges(mirror.destination, topic).values()] == written
    statuses = mirror.partitions(topic)
    assert [status.partition for status in statuses] == [0, 1, 2]
    assert statuses[0].state_epoch == before.state_epoch  # it was not interrupted
    assert node.process.pid == pid


def _traffic(bootstrap: str, topic: str, written: list[int], stop: threading.Event) -> None:
    while not stop.wait(0.02):
        produce(bootstrap, topic, numbered(50, first=written[0]))
        written[0] += 50


@pytest.mark.case("C17")
def test_more_partitions_at_the_destination_are_refused(clusters: Clusters, mirror: NodeMirror) -> None:
    """A destination topic with more partitions than the source's is refused with the reason, and left alone."""
    topic, other = mirror.topic("wide"), mirror.topic("other")
    create_topic(mirror.destination, topic, 3)
    create_topic(mirror.source, topic, 2)
    create_topic(mirror.source, other)
    for name in (topic, other):
        produce(mirror.source, name, numbered(100))
    mirror.await_copied(other)
    wait_until(lambda: topic in mirror.errors(), 20, what="refused")
    reason = mirror.errors()[topic]
    assert "3 partitions at the destination" in reason
    assert "2 at the source" in reason
    assert set(ranges(mirror.destination, topic).values()) == {(0, 0)}
    assert mirror.summary.states == {"MIRRORING": 1}
    # the remedy the message names
    grow_topic(mirror.source, topic, 3)
    mirror.await_states(MirrorState.MIRRORING, topic, partitions=3)
    mirror.await_copied(topic)
    mirror.compare(topic, other)
    assert mirror.errors() == {}


# --- C18: configurations


@pytest.mark.case("C18")
def test_a_topic_never_exists_with_defaults(clusters: Clusters, node: NodeProcess) -> None:
    """A compacted topic with old records, where defaults would delete them at once: it never has defaults.

    Requests to the destination are slowed down, so that any moment between creation and configuration shows.
    """
    source, destination = clusters.source.bootstrap, clusters.destination.bootstrap
    old_ms = time.time_ns() // 1_000_000 - _YEAR_MS
    wanted = {"cleanup.policy": "compact", "retention.ms": "-1", "segment.bytes": "1048576"}
    with retention_by_default(destination, 1_000):
        # a topic with defaults shows that they are at work
        control = unique_name("control")
        create_topic(destination, control, configs={"segment.ms": "1000"})
        produce(destination, control, [Record(b"old", timestamp=old_ms)] * 10)
        clusters.destination_proxy.reset()
        clusters.destination_proxy.latency_s = 0.1
        mirror = NodeMirror(node, source, clusters.destination_proxy.bootstrap)
        topic = mirror.topic("old")
        create_topic(source, topic, configs=wanted)
        produce(source, topic, [Record(b"v-%d" % n, b"k-%d" % n, timestamp=old_ms + n) for n in range(1_000)])
        try:
            with ConfigWatch(destination, topic, wanted) as watch:
                mirror.create()
                mirror.await_states(MirrorState.MIRRORING, topic)
                mirror.await_copied(topic)
            assert watch.looks > 20
            assert watch.wrong == []
            wait_until(lambda: _is_emptied(destination, control), 40, what="defaults deleted old records")
            assert log_range(destination, topic) == (0, 1_000)
            mirror.compare(topic)
        finally:
            clusters.destination_proxy.reset()
            mirror.delete()


class ConfigWatch:
    """Looks at a topic's configurations in a tight loop, from before it exists.

    Attributes:
        looks: how often they were seen.
        wrong: what was seen that was not as wanted.
    """

    def __init__(self, bootstrap: str, topic: str, wanted: dict[str, str]) -> None:
        self.looks = 0
        self.wrong: list[dict[str, str | None]] = []
        self._client = admin(bootstrap)
        self._resource = ConfigResource(ConfigResource.Type.TOPIC, topic)
        self._wanted = wanted
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> "ConfigWatch":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopped.set()
        self._thread.join(DEADLINE_S)

    def _run(self) -> None:
        while not self._stopped.is_set():
            try:
                entries = self._client.describe_configs([self._resource])[self._resource].result(DEADLINE_S)
            except KafkaException:
                continue  # it does not exist yet
            self.looks += 1
            seen = {key: entries[key].value for key in self._wanted}
            if seen != self._wanted:
                self.wrong.append(seen)


class retention_by_default:
    """The destination deletes by default what is older than so many milliseconds, while the block runs."""

    def __init__(self, bootstrap: str, retention_ms: int) -> None:
        self._client = admin(bootstrap)
        self._retention_ms = retention_ms

    def __enter__(self) -> None:
        self._alter(AlterConfigOpType.SET)

    def __exit__(self, *_: object) -> None:
        self._alter(AlterConfigOpType.DELETE)

    def _alter(self, operation: AlterConfigOpType) -> None:
        entry = ConfigEntry("log.retention.ms", str(self._retention_ms), incremental_operation=operation)
        resource = ConfigResource(ConfigResource.Type.BROKER, "1", incremental_configs=[entry])
        self._client.incremental_alter_configs([resource])[resource].result(DEADLINE_S)


def _is_emptied(bootstrap: str, topic: str) -> bool:
    start, end = log_range(bootstrap, topic)
    return start == end


# --- C21 (a): one cluster at both ends


@pytest.mark.case("C21")
def test_two_listeners_of_one_cluster_are_refused(clusters: Clusters, node: NodeProcess) -> None:
    """Source and destination are two addresses of one broker: refused by cluster id before anything is written."""
    cluster = clusters.destination
    topic = unique_name("loop")
    create_topic(cluster.bootstrap, topic)
    produce(cluster.bootstrap, topic, numbered(10))
    addresses = cluster.bootstrap, clusters.destination_proxy.bootstrap
    assert len(set(addresses)) == 2
    before = everything(cluster.bootstrap)
    for source, destination in (addresses, addresses[::-1]):
        mirror = NodeMirror(node, source, destination, include=[".*"])
        with pytest.raises(SameClusterError, match=cluster.cluster_id):
            mirror.create()
        with pytest.raises(UnknownMirrorError):
            node.client.mirror(mirror.name)
    assert everything(cluster.bootstrap) == before
    assert before[topic] == {0: (0, 10)}


def everything(bootstrap: str) -> dict[str, dict[int, tuple[int, int]]]:
    """All topics with their log ranges; what brokers write about groups by themselves is left out."""
    client = admin(bootstrap)
    topics = client.list_topics(timeout=DEADLINE_S).topics.values()
    targets = [
        TopicPartition(topic.topic, partition)
        for topic in topics
        if topic.topic != "__consumer_offsets"
        for partition in topic.partitions
    ]
    starts = client.list_offsets({target: OffsetSpec.earliest() for target in targets})
    ends = client.list_offsets({target: OffsetSpec.latest() for target in targets})
    found: dict[str, dict[int, tuple[int, int]]] = {}
    for each in targets:
        log = starts[each].result(DEADLINE_S).offset, ends[each].result(DEADLINE_S).offset
        found.setdefault(each.topic, {})[each.partition] = log
    return found
