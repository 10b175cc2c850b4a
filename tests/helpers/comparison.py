"""Comparing whole topics of two clusters: many partitions by one consumer, and the batches themselves."""

import asyncio
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from confluent_kafka import OFFSET_BEGINNING, Consumer, KafkaError, KafkaException, TopicPartition
from confluent_kafka.admin import OffsetSpec

from kmirror_dagster.broker import batches
from kmirror_dagster.broker.reads import fetch_once
from kmirror_dagster.broker.wire import READ_UNCOMMITTED, WireCluster
from kmirror_dagster.settings import ClusterSettings
from tests.helpers.kafka import (
    DEADLINE_S,
    READ_COMMITTED,
    ReadRecord,
    _read,
    admin,
    logger,
)
from tests.helpers.kafka import READ_UNCOMMITTED as UNCOMMITTED

_LEADER_MOVED = (
    KafkaError.NOT_LEADER_FOR_PARTITION,
    KafkaError.LEADER_NOT_AVAILABLE,
    KafkaError.UNKNOWN_TOPIC_OR_PART,
    KafkaError.UNKNOWN_LEADER_EPOCH,
    KafkaError.FENCED_LEADER_EPOCH,
)


def _log_ranges(bootstrap: str, topic: str, partitions: Iterable[int]) -> dict[int, tuple[int, int]]:
    """Log start and log end (high watermark) of partitions."""
    targets = [TopicPartition(topic, partition) for partition in partitions]
    client = admin(bootstrap)
    starts = client.list_offsets({target: OffsetSpec.earliest() for target in targets})
    ends = client.list_offsets({target: OffsetSpec.latest() for target in targets})
    return {
        target.partition: (starts[target].result(DEADLINE_S).offset, ends[target].result(DEADLINE_S).offset)
        for target in targets
    }


def log_ranges(bootstrap: str, topic: str, partitions: Iterable[int]) -> dict[int, tuple[int, int]]:
    """Log start and log end of partitions; waits out a leader that has just been made or moved."""
    chosen = list(partitions)
    deadline = time.monotonic() + DEADLINE_S
    while True:
        try:
            return _log_ranges(bootstrap, topic, chosen)
        except KafkaException as error:
            if error.args[0].code() not in _LEADER_MOVED or time.monotonic() > deadline:
                raise
        time.sleep(0.05)


def consume_all(
    bootstrap: str, topic: str, partitions: Sequence[int], isolation: str, deadline_s: float = 60.0
) -> dict[int, list[ReadRecord]]:
    """All records of partitions, from log start to the end as of now, that an isolation level shows.

    Fails when none comes for `deadline_s` seconds.
    """
    client = Consumer(
        {
            "bootstrap.servers": bootstrap,
            "group.id": "test-reader",
            "enable.auto.commit": False,
            "isolation.level": isolation,
            "enable.partition.eof": True,
            "fetch.wait.max.ms": 20,
            "check.crcs": True,
        },
        logger=logger,
    )
    found: dict[int, list[ReadRecord]] = {partition: [] for partition in partitions}
    missing = set(partitions)
    try:
        client.list_topics(topic, timeout=deadline_s)
        client.assign([TopicPartition(topic, partition, OFFSET_BEGINNING) for partition in partitions])
        deadline = time.monotonic() + deadline_s
        while missing:
            assert time.monotonic() < deadline, f"ends of {topic}/{sorted(missing)} not reached"
            for message in client.consume(1_000, 0.2):
                error = message.error()
                deadline = time.monotonic() + deadline_s
                if error is None:
                    found[message.partition() or 0].append(_read(message))
                elif error.code() == KafkaError._PARTITION_EOF:
                    missing.discard(message.partition() or 0)
                else:
                    raise AssertionError(f"cannot read {topic}: {error}")
    finally:
        client.close()
    return found


@dataclass(frozen=True)
class RawRead:
    """A data record as it lies in the log: key, value and headers in wire form."""

    offset: int
    timestamp: int
    payload: bytes


async def _raw(cluster: WireCluster, topic: str, partition: int, start: int, end: int) -> list[RawRead]:
    found: list[RawRead] = []
    while start < end:
        fetched = await fetch_once(cluster, topic, partition, start, isolation=READ_UNCOMMITTED)
        for header in batches.headers(fetched.records):
            if not header.is_control:
                found += [
                    RawRead(record.offset, record.timestamp, record.payload)
                    for record in batches.decode_records(fetched.records, header)
                    if record.offset >= start
                ]
            start = header.next_offset
    return found


def raw_records(bootstrap: str, topic: str, ranges: dict[int, tuple[int, int]]) -> dict[int, list[RawRead]]:
    """All data records, aborted ones too, byte for byte."""

    async def main() -> dict[int, list[RawRead]]:
        cluster = WireCluster(ClusterSettings(bootstrap_servers=tuple(bootstrap.split(","))), role="source")
        try:
            return {
                partition: await _raw(cluster, topic, partition, start, end)
                for partition, (start, end) in ranges.items()
            }
        finally:
            await cluster.close()

    return asyncio.run(main())


def differences(
    source: str, destination: str, topic: str, partitions: Sequence[int], *, raw: bool = False
) -> dict[int, str]:
    """What is not identical, by partition: log start, log end, records at both isolation levels."""
    theirs, ours = log_ranges(source, topic, partitions), log_ranges(destination, topic, partitions)
    found = {
        partition: f"range {theirs[partition]} became {ours[partition]}"
        for partition in partitions
        if ours[partition] != theirs[partition]
    }
    for isolation in (READ_COMMITTED, UNCOMMITTED):
        expected = consume_all(source, topic, partitions, isolation)
        actual = consume_all(destination, topic, partitions, isolation)
        for partition in partitions:
            if expected[partition] != actual[partition]:
                reason = f"{isolation}: {_first_difference(expected[partition], actual[partition])}"
                found.setdefault(partition, reason)
    if raw:
        mine, copied = raw_records(source, topic, theirs), raw_records(destination, topic, ours)
        for partition in partitions:
            if mine[partition] != copied[partition]:
                reason = f"raw: {_first_difference(mine[partition], copied[partition])}"
                found.setdefault(partition, reason)
    return found


def _first_difference(expected: Sequence[object], actual: Sequence[object]) -> str:
    for one, other in zip(expected, actual, strict=False):
        if one != other:
            return f"{str(one)[:300]} became {str(other)[:300]}"
    return f"{len(expected)} records became {len(actual)}"
