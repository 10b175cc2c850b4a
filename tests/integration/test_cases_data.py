"""Faults other tools have met with records and offsets, tried on a whole mirror: a real node between real clusters.

The node runs with its most verbose logging: a log line that formats a null must not end the copying.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime, timezone

import pytest
from confluent_kafka import Producer

from kmirror_dagster.coordination.models import VerbRequest
from kmirror_dagster.lifecycle import MirrorState
from kmirror_dagster.verification.report import Isolation
from tests.conftest import Clusters
from tests.helpers.kafka import (
    READ_COMMITTED,
    READ_UNCOMMITTED,
    ReadRecord,
    Record,
    commit_offsets,
    committed_offsets,
    consume,
    create_topic,
    log_range,
    produce,
    produce_transaction,
    producer,
    write,
)
from tests.helpers.nodes import NodeMirror, NodeProcess, mirrored
from tests.helpers.waiting import wait_until

pytestmark = pytest.mark.integration

_NOW_MS = time.time_ns() // 1_000_000


@pytest.fixture
def mirror(clusters: Clusters, node: NodeProcess) -> Iterator[NodeMirror]:
    with mirrored(node, clusters.source.bootstrap, clusters.destination.bootstrap) as made:
        yield made


def copied(mirror: NodeMirror, topic: str) -> list[ReadRecord]:
    """Records of the destination, once it has all of them; the same at both isolation levels as at the source."""
    mirror.await_copied(topic)
    for level in (READ_UNCOMMITTED, READ_COMMITTED):
        theirs = consume(mirror.source, topic, isolation=level)
        assert consume(mirror.destination, topic, isolation=level) == theirs, level
    mirror.compare(topic)
    return consume(mirror.destination, topic)


# --- C01, C02: what is in a record


HEADERS = [
    (),
    (("one", b"1"),),
    (("same", b"2"), ("same", b"1"), ("same", b"3")),
    (("null", None),),
    (("empty", b""), ("", b"no name"), ("", b"")),
    (("bytes", b"\xff\xfe\x00"), ("gr\u00fc\u00df", "\u00e4".encode())),
    tuple((f"h{number % 7}", b"%d" % number) for number in range(500)),
]


@contextmanager
def held_back(mirror: NodeMirror, topic: str) -> Iterator[None]:
    """A topic is paused while the block runs: what is written then comes as many small batches at once."""
    selected = VerbRequest(topics=[topic.replace(".", "\\.")])
    mirror.node.client.verb(mirror.name, "pause", selected)
    mirror.await_states(MirrorState.PAUSED, topic)
    yield
    mirror.node.client.verb(mirror.name, "resume", selected)
    mirror.await_states(MirrorState.MIRRORING, topic)


@pytest.mark.case("C01")
def test_headers_arrive_as_the_list_they_are(clusters: Clusters, mirror: NodeMirror) -> None:
    """Order, repetition, null and empty of headers are kept; a topic without headers beside it never slows.

    So they are where batches have to be encoded again: brokers take no LogAppendTime from a producer.
    """
    odd, stamped, plain = mirror.topic("odd"), mirror.topic("stamped"), mirror.topic("plain")
    create_topic(mirror.source, odd)
    create_topic(mirror.source, stamped, configs={"message.timestamp.type": "LogAppendTime"})
    create_topic(mirror.source, plain)
    mirror.await_states(MirrorState.MIRRORING, odd, stamped, plain)
    clients = [producer(mirror.source, {"compression.type": name}) for name in ("none", "zstd")]
    for headers in HEADERS:
        record = Record(b"v", b"k", headers)
        for client in clients:
            # alone in its batch, and in one with others
            write_batches(client, odd, [record], [Record(b"before"), record, Record(b"behind")])
            write_batches(client, stamped, [record])
        write_batches(clients[0], plain, [Record(b"plain")] * 100)
        mirror.await_copied(plain, deadline_s=10)
    with held_back(mirror, odd):
        for client in clients:
            write_batches(client, odd, *([Record(b"v", b"k", headers)] for headers in HEADERS))
    found = copied(mirror, odd)
    wanted = [headers for headers in HEADERS for _ in range(4)] + HEADERS * 2
    assert [record.headers for record in found if record.value == b"v"] == wanted
    assert len(found) == 10 * len(HEADERS)
    assert [record.headers for record in copied(mirror, stamped)] == [h for h in HEADERS for _ in range(2)]
    copied(mirror, plain)
    assert mirror.errors() == {}
    assert all(status.retry_attempt == 0 for status in mirror.partitions())


def write_batches(client: Producer, topic: str, *batches: list[Record]) -> None:
    """Write each list of records as a batch of its own."""
    for batch in batches:
        write(client, topic, batch)
        assert client.flush(30) == 0


@pytest.mark.case("C02")
def test_null_and_empty_stay_apart(clusters: Clusters, mirror: NodeMirror) -> None:
    """Null and empty keys and values arrive as they are: alone, among others, and in batches that are joined."""
    topic = mirror.topic("nulls")
    create_topic(clusters.source.bootstrap, topic)
    mirror.await_states(MirrorState.MIRRORING, topic)
    pairs = [(None, b"v"), (None, None), (b"", b"v"), (b"k", None), (b"k", b""), (b"", b""), (b"", None)]
    records = [Record(value, key) for key, value in pairs]
    client = producer(mirror.source)
    write_batches(client, topic, records, *([record] for record in records))
    with held_back(mirror, topic):
        write_batches(client, topic, *([record] for record in records))
    assert [(record.key, record.value) for record in copied(mirror, topic)] == pairs * 3


@pytest.mark.case("C02")
def test_a_tombstone_deletes_on_both_sides(clusters: Clusters, mirror: NodeMirror) -> None:
    """On a compacted topic a deleted key goes from both sides and an empty value stays on both."""
    topic = mirror.topic("table")
    compacted = {
        "cleanup.policy": "compact",
        "min.cleanable.dirty.ratio": "0.01",
        "delete.retention.ms": "100",
        "segment.ms": "500",
    }
    create_topic(clusters.source.bootstrap, topic, configs=compacted)
    mirror.await_states(MirrorState.MIRRORING, topic)
    table = [
        Record(b"v", b"k1"),
        Record(None, b"k1"),
        Record(b"", b"k2"),
        Record(b" v", b""),
        Record(b"v", b"k3"),
    ]
    produce(mirror.source, topic, table)
    found = copied(mirror, topic)
    assert [(r.key, r.value) for r in found[:5]] == [(r.key, r.value) for r in table]

    def cleaned(bootstrap: str) -> bool:
        # a closed segment is cleaned, and a record that comes later closes it
        produce(mirror.source, topic, [Record(b"tick", b"tick")])
        keys = {record.key: record.value for record in consume(bootstrap, topic)}
        return b"k1" not in keys and keys[b"k2"] == b"" and keys[b""] == b" v"

    for bootstrap in (mirror.source, mirror.destination):
        wait_until(lambda b=bootstrap: cleaned(b), 60, what=f"{topic} cleaned", poll_s=0.5)
    mirror.await_copied(topic)
    mirror.compare(topic)
    assert mirror.errors() == {}


# --- C10: a marker at the tail


@pytest.mark.case("C10")
def test_a_marker_at_the_tail_is_no_lag(clusters: Clusters, node: NodeProcess, mirror: NodeMirror) -> None:
    """One record and its commit marker: lag 0, caught up, groups kept as they are, stopped at once."""
    topic = mirror.topic("marker")
    create_topic(clusters.source.bootstrap, topic)
    produce_transaction(mirror.source, topic, [Record(b"v", b"k")])
    wait_until(lambda: log_range(mirror.source, topic) == (0, 2), what="the marker is there")
    groups = {f"{mirror.name}-at-record": 1, f"{mirror.name}-at-end": 2}
    for group, offset in groups.items():
        commit_offsets(mirror.source, group, [(topic, 0, offset)])
    mirror.await_states(MirrorState.MIRRORING, topic)
    mirror.await_copied(topic)
    # status
    wait_until(lambda: mirror.summary.lag_records == 0, 10, what="lag 0 in the summary")
    (status,) = mirror.partitions(topic)
    assert (status.source_end_offset, status.destination_end_offset, status.lag_records) == (2, 2, 0)
    assert status.lag_seconds == 0
    # wait until caught up: the comparison waits for the destination, and for the groups
    began = time.monotonic()
    report = mirror.compare(topic, groups=True, deadline_s=30)
    assert report.records == {Isolation.READ_UNCOMMITTED: 1, Isolation.READ_COMMITTED: 1}
    assert report.groups == 2
    assert time.monotonic() - began < 20
    for group, offset in groups.items():
        assert committed_offsets(mirror.destination, group) == {(topic, 0): offset}
    # planned promotion
    began = time.monotonic()
    node.client.verb(mirror.name, "stop", VerbRequest())
    mirror.await_states(MirrorState.STOPPED, topic, deadline_s=10)
    assert time.monotonic() - began < 5
    assert log_range(mirror.destination, topic) == (0, 2)
    assert mirror.partitions(topic)[0].last_mirror_offset == 2
    for group, offset in groups.items():
        assert committed_offsets(mirror.destination, group) == {(topic, 0): offset}
    produce(mirror.destination, topic, [Record(b"promoted")])
    assert log_range(mirror.destination, topic) == (0, 3)


# --- C14: where mirroring begins


@pytest.mark.case("C14")
@pytest.mark.parametrize("kind", ["later than the last record", "inside the log", "empty topic"])
def test_start_at_a_time(clusters: Clusters, node: NodeProcess, kind: str) -> None:
    """Mirroring from a time on begins at that offset; what comes next arrives at the source's own offsets."""
    start_ms = _NOW_MS if kind == "inside the log" else _NOW_MS + 3_600_000
    start = datetime.fromtimestamp(start_ms / 1000, tz=timezone.utc).isoformat()
    source, destination = clusters.source.bootstrap, clusters.destination.bootstrap
    mirror = NodeMirror(node, source, destination, policies={"start": {"timestamp": start}})
    topic = mirror.topic("from-time")
    create_topic(source, topic)
    before = 0 if kind == "empty topic" else 1_000
    old = [Record(b"old-%d" % n, timestamp=_NOW_MS - 500 + n) for n in range(before)]
    produce(source, topic, old)
    # the first record at or after the start; without one, the log end
    first = {"later than the last record": 1_000, "inside the log": 500, "empty topic": 0}[kind]
    try:
        mirror.create()
        mirror.await_states(MirrorState.MIRRORING, topic)
        wait_until(lambda: log_range(destination, topic) == (first, before), 30, what=f"{first} to {before}")
        # older than the start, so that no record of the source is ever looked for by its time again
        produce(source, topic, [Record(b"new-%d" % n, timestamp=_NOW_MS - 500) for n in range(100)])
        wait_until(lambda: log_range(destination, topic) == (first, before + 100), 30, what="new ones copied")
        expected = [record for record in consume(source, topic) if record.offset >= first]
        assert len(expected) == before - first + 100
        for level in (READ_UNCOMMITTED, READ_COMMITTED):
            assert consume(destination, topic, isolation=level) == expected
        assert mirror.errors() == {}
        assert mirror.summary.lag_records == 0
    finally:
        mirror.delete()
