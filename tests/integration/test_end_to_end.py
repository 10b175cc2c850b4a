"""The main job from end to end, with a node in a process of its own between two real clusters."""

import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from confluent_kafka import Producer, TopicPartition
from confluent_kafka.admin import AdminClient, OffsetSpec

from kmirror_dagster.lifecycle import MirrorState
from kmirror_dagster.verification.report import Isolation
from tests.conftest import Clusters
from tests.helpers.comparison import consume_all
from tests.helpers.kafka import (
    DEADLINE_S,
    Record,
    admin,
    create_topic,
    grow_topic,
    produce,
    producer,
    write,
)
from tests.helpers.nodes import NodeMirror, NodeProcess, mirrored
from tests.helpers.waiting import wait_until

pytestmark = pytest.mark.integration

RECORDS = 500_000
# Written before the mirror begins; the rest is written while it is killed.
BACKLOG = 400_000
# Shares of the backlog at the destination that a kill waits for.
KILLS = (0.1, 0.35, 0.6)
_PADDING = bytes(range(256)) * 2
_TRANSACTION = 200


class Writer:
    """Writes numbered records: large batches, batches of a few records, and transactions of which some abort.

    Attributes:
        numbers: records so far by topic and partition, those of aborted transactions not counted.
        total: all records so far.
    """

    def __init__(self, bootstrap: str, plain: str, small: str, transactional: str) -> None:
        self.numbers: Counter[tuple[str, int]] = Counter()
        self.total = 0
        self._plain = [(plain, partition) for partition in range(3)]
        self._small = [(small, 0)]
        self._transactional = [(transactional, partition) for partition in range(2)]
        self._large = producer(bootstrap, {"compression.type": "lz4", "linger.ms": 50})
        self._few = producer(bootstrap, {"batch.num.messages": 20, "linger.ms": 1})
        self._atomic = producer(bootstrap, {"transactional.id": transactional, "compression.type": "zstd"})
        self._atomic.init_transactions(DEADLINE_S)
        self._transactions = 0

    def write(self, count: int) -> None:
        """Write about so many records, and wait until they are acknowledged."""
        goal = self.total + count
        self._put(self._large, self._plain, count * 7 // 10)
        self._put(self._few, self._small, count * 15 // 100)
        while self.total < goal:
            self._transact(min(_TRANSACTION, goal - self.total))
        assert self._large.flush(DEADLINE_S) == self._few.flush(DEADLINE_S) == 0

    def _put(self, client: Producer, targets: list[tuple[str, int]], count: int) -> None:
        for index in range(count):
            topic, partition = targets[index % len(targets)]
            write(client, topic, [self._record(topic, partition)])
        self.total += count

    def _transact(self, count: int) -> None:
        self._transactions += 1
        is_kept = self._transactions % 4 != 0
        before = self.numbers.copy()
        self._atomic.begin_transaction()
        self._put(self._atomic, self._transactional, count)
        assert self._atomic.flush(DEADLINE_S) == 0
        if is_kept:
            self._atomic.commit_transaction(DEADLINE_S)
        else:
            self._atomic.abort_transaction(DEADLINE_S)
            self.numbers = before

    def _record(self, topic: str, partition: int) -> Record:
        number = self.numbers[topic, partition]
        self.numbers[topic, partition] += 1
        padding = _PADDING[number % 256 : number % 256 + 60 + number % 97]
        return Record(b"%09d" % number + padding, b"k%d" % (number % 1_000), partition=partition)


class Ends:
    """Sum of the log ends of topics, asked quickly."""

    def __init__(self, bootstrap: str, partitions: list[tuple[str, int]]) -> None:
        self._client: AdminClient = admin(bootstrap)
        self._request = {TopicPartition(*each): OffsetSpec.latest() for each in partitions}

    def __call__(self) -> int:
        answers = self._client.list_offsets(self._request)
        return sum(answer.result(DEADLINE_S).offset for answer in answers.values())


@pytest.mark.timeout(300)
def test_three_kills_in_mid_copy_lose_and_repeat_nothing(clusters: Clusters, tmp_path: Path) -> None:
    """A node killed three times amid 500,000 records that are still being written leaves an identical copy."""
    source, destination = clusters.source.bootstrap, clusters.destination.bootstrap
    node = NodeProcess(tmp_path / "state", destination)
    mirror = NodeMirror(node, source, destination)
    plain, small, transactional = mirror.topic("plain"), mirror.topic("small"), mirror.topic("txn")
    for topic, partitions in ((plain, 3), (small, 1), (transactional, 2)):
        create_topic(source, topic, partitions)
    writer = Writer(source, plain, small, transactional)
    writer.write(BACKLOG)
    partitions = list(writer.numbers)
    written, copied = Ends(source, partitions), Ends(destination, partitions)
    backlog = written()
    stop = threading.Event()
    live = threading.Thread(target=_write_on, args=(writer, stop), daemon=True)
    seen: list[tuple[int, int]] = []
    with ExitStack() as stack:
        stack.callback(node.stop)
        stack.callback(mirror.delete)
        stack.callback(stop.set)
        node.start()
        mirror.create()
        mirror.await_states(MirrorState.MIRRORING, plain, small, transactional)
        live.start()
        for share in KILLS:
            wait_until(lambda s=share: copied() >= s * backlog, 60, what=f"{share} copied", poll_s=0.001)
            node.kill()
            seen.append((copied(), written()))
            node.start()
        stop.set()
        live.join(DEADLINE_S)
        assert writer.total < RECORDS
        writer.write(RECORDS - writer.total)
        mirror.await_copied(plain, small, transactional, deadline_s=90)
        report = mirror.compare(plain, small, transactional)
        mirror.await_states(MirrorState.MIRRORING, plain, small, transactional)
    assert all(there < here for there, here in seen), f"not in mid-copy: {seen}"
    assert sorted(there for there, _ in seen) == [there for there, _ in seen]
    assert report.records[Isolation.READ_UNCOMMITTED] == RECORDS
    assert report.records[Isolation.READ_COMMITTED] == sum(writer.numbers.values())
    for topic in (plain, small, transactional):
        _assert_numbered(destination, topic, writer.numbers)


def _write_on(writer: Writer, stop: threading.Event) -> None:
    while not stop.wait(0.1) and writer.total < RECORDS - 10_000:
        writer.write(400)


def _assert_numbered(bootstrap: str, topic: str, numbers: Counter[tuple[str, int]]) -> None:
    """Committed records carry each number once, in order: nothing is missing, repeated or in another place."""
    partitions = [partition for name, partition in numbers if name == topic]
    found = consume_all(bootstrap, topic, partitions, "read_committed")
    for partition, records in found.items():
        values = [int((record.value or b"")[:9]) for record in records]
        assert values == list(range(numbers[topic, partition])), (topic, partition)


# --- what appears at the source


@pytest.fixture
def mirror(clusters: Clusters, node: NodeProcess) -> Iterator[NodeMirror]:
    with mirrored(node, clusters.source.bootstrap, clusters.destination.bootstrap) as made:
        yield made


def refreshes_until(mirror: NodeMirror, topic: str, partitions: int, since_ms: int) -> int:
    """Wait until a topic has so many partitions in the mirror; refreshes begun since a moment that it took."""
    began: set[int] = set()

    def known() -> bool:
        summary = mirror.summary
        if summary.refresh is not None and summary.refresh.started_ms > since_ms:
            began.add(summary.refresh.started_ms)
        return any(each.topic == topic and each.partitions == partitions for each in summary.topics)

    wait_until(known, 30, what=f"{topic} with {partitions} partitions", poll_s=0.01)
    return len(began)


@pytest.mark.case("C14")
@pytest.mark.case("C17")
def test_new_topics_and_partitions_are_mirrored_within_one_refresh(
    clusters: Clusters, node: NodeProcess, mirror: NodeMirror
) -> None:
    """A topic and partitions that appear at the source are mirrored by the next refresh, without a restart."""
    source = clusters.source.bootstrap
    topic, pid = mirror.topic(), node.process.pid
    wait_until(lambda: mirror.summary.refresh is not None, what="first refresh")
    create_topic(source, topic)
    created_ms = _now_ms()
    produce(source, topic, [Record(b"first-%d" % number) for number in range(100)])
    assert refreshes_until(mirror, topic, 1, created_ms) <= 1
    mirror.await_states(MirrorState.MIRRORING, topic, partitions=1)
    mirror.await_copied(topic)
    assert mirror.compare(topic).records[Isolation.READ_COMMITTED] == 100

    grow_topic(source, topic, 3)
    grown_ms = _now_ms()
    produce(source, topic, [Record(b"more-%d" % n, partition=n % 3) for n in range(300)])
    assert refreshes_until(mirror, topic, 3, grown_ms) <= 1
    mirror.await_states(MirrorState.MIRRORING, topic, partitions=3)
    mirror.await_copied(topic)
    assert mirror.compare(topic).records[Isolation.READ_COMMITTED] == 400
    assert node.process.pid == pid


def _now_ms() -> int:
    return time.time_ns() // 1_000_000
