"""Kinds of work a mirror can be interrupted in, each a log that one partition after the other is copied from."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from types import ModuleType

import pytest

from kmirror_dagster.broker import codecs
from kmirror_dagster.replication import alignment, markers
from tests.conftest import Clusters
from tests.helpers.copying import Copying
from tests.helpers.histories import (
    RawWriter,
    alter_topic,
    raw_batch_records,
    wait_until_cleaned,
)
from tests.helpers.kafka import delete_records
from tests.helpers.proxy import Api

_BATCH = 60  # records, more bytes than a batch that is joined with others has


@dataclass(frozen=True)
class Scenario:
    """One kind of work.

    Attributes:
        name: for the report.
        write: fills all partitions of a source topic alike.
        writes: requests that change the destination; faults are aimed at all of their occurrences.
        prepare: done to every link.
        configs: of the source topic.
        limits: constants of the package that are made smaller, so that there is more to interrupt.
    """

    name: str
    write: Callable[[RawWriter, Clusters, str, Sequence[int]], Awaitable[None]]
    writes: tuple[Api, ...]
    prepare: Callable[[Copying], None] = lambda _: None
    configs: dict[str, str] = field(default_factory=dict)
    limits: tuple[tuple[ModuleType, str, int], ...] = ()

    def apply_limits(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Make the limits smaller while a test runs."""
        for module, name, value in self.limits:
            monkeypatch.setattr(module, name, value)


def by_transactions(copying: Copying) -> None:
    """Let a link write control records as it does without the right to write them in bulk."""
    copying.link._driver._marker_writer()._bulk = False


async def _plain(
    raw: RawWriter, topic: str, partitions: Sequence[int], seed: int, count: int = _BATCH
) -> None:
    content = raw_batch_records(seed, count)
    await raw.plain(topic, dict.fromkeys(partitions, content), codecs.LZ4)


async def _transaction(
    raw: RawWriter,
    topic: str,
    partitions: Sequence[int],
    seed: int,
    *,
    commit: bool,
    batches: int = 1,
    count: int = _BATCH,
) -> None:
    for number in range(batches):
        content = raw_batch_records(seed + number, count)
        await raw.transactional(1, topic, dict.fromkeys(partitions, content), codecs.LZ4)
    await raw.end(1, commit=commit)
    await raw.settled(topic, [partitions[-1]])


async def _write_data(raw: RawWriter, clusters: Clusters, topic: str, partitions: Sequence[int]) -> None:
    for seed in range(9):
        await _plain(raw, topic, partitions, seed)


async def _write_markers(raw: RawWriter, clusters: Clusters, topic: str, partitions: Sequence[int]) -> None:
    for seed in range(4):
        await _transaction(raw, topic, partitions, seed, commit=True, count=5)
    await _plain(raw, topic, partitions, 9)
    await _transaction(raw, topic, partitions, 10, commit=True, batches=2)


async def write_mixed(
    raw: RawWriter, topic: str, partitions: Sequence[int], rounds: int, seed: int = 0
) -> None:
    """Plain batches, committed and aborted transactions, over and over."""
    for number in range(seed, seed + rounds):
        await _plain(raw, topic, partitions, number)
        await _transaction(raw, topic, partitions, number, commit=True, count=8)
        await _plain(raw, topic, partitions, number + 1, 3)
        await _transaction(raw, topic, partitions, number, commit=False, batches=2, count=40)


async def _write_aborted(raw: RawWriter, clusters: Clusters, topic: str, partitions: Sequence[int]) -> None:
    await _plain(raw, topic, partitions, 1)
    await _transaction(raw, topic, partitions, 2, commit=False, batches=3)
    await _transaction(raw, topic, partitions, 5, commit=False, count=2)
    await _plain(raw, topic, partitions, 6)
    await _transaction(raw, topic, partitions, 7, commit=True)
    # two producers at once, one of which aborts
    ours = {partition: raw_batch_records(8, _BATCH) for partition in partitions}
    await raw.transactional(1, topic, ours, codecs.LZ4)
    await raw.transactional(2, topic, ours, codecs.ZSTD)
    await raw.transactional(1, topic, ours, codecs.NONE)
    await raw.end(2, commit=True)
    await raw.transactional(1, topic, ours, codecs.GZIP)
    await raw.end(1, commit=False)
    await raw.settled(topic, partitions)


async def _write_holes(raw: RawWriter, clusters: Clusters, topic: str, partitions: Sequence[int]) -> None:
    # of 600 and 300 records of each key one stays, so that two long holes and one in a batch are left
    await raw.plain(topic, {p: raw_batch_records(1, 20, keys=5) for p in partitions})
    for _ in range(2):
        content = raw_batch_records(2, 600, keys=1)
        await raw.plain(topic, dict.fromkeys(partitions, content), codecs.LZ4)
        content = raw_batch_records(3, 40, keys=1_000_000)
        await raw.plain(topic, dict.fromkeys(partitions, content), codecs.LZ4)
    await asyncio.to_thread(alter_topic, clusters.source.bootstrap, topic, {"internal.segment.bytes": "1000"})
    await raw.plain(topic, {p: raw_batch_records(4, 1, keys=5) for p in partitions})
    await asyncio.to_thread(wait_until_cleaned, clusters.source, topic, partitions)
    await asyncio.to_thread(alter_topic, clusters.source.bootstrap, topic, {"cleanup.policy": "delete"})


async def _write_late(raw: RawWriter, clusters: Clusters, topic: str, partitions: Sequence[int]) -> None:
    for number in range(5):
        await _plain(raw, topic, partitions, number, 1_000)
    for partition in partitions:
        await asyncio.to_thread(delete_records, clusters.source.bootstrap, topic, 4_700, partition)


DATA = Scenario("data", _write_data, (Api.PRODUCE,))
BULK_MARKERS = Scenario("markers in bulk", _write_markers, (Api.PRODUCE, Api.WRITE_TXN_MARKERS))
TRANSACTION_MARKERS = Scenario(
    "markers by transactions",
    _write_markers,
    (Api.PRODUCE, Api.INIT_PRODUCER_ID, Api.ADD_PARTITIONS_TO_TXN, Api.END_TXN),
    by_transactions,
)
ABORTED = Scenario(
    "aborted runs",
    _write_aborted,
    (Api.PRODUCE, Api.WRITE_TXN_MARKERS, Api.INIT_PRODUCER_ID, Api.ADD_PARTITIONS_TO_TXN, Api.END_TXN),
)
BULK_HOLES = Scenario(
    "holes in bulk",
    _write_holes,
    (Api.PRODUCE, Api.WRITE_TXN_MARKERS),
    configs={
        "cleanup.policy": "compact",
        "min.cleanable.dirty.ratio": "0.0",
        "internal.segment.bytes": "2000000",
    },
    limits=((markers, "_BULK_ENTRIES", 200),),
)
LOG_START = Scenario(
    "log start",
    _write_late,
    (Api.PRODUCE, Api.DELETE_RECORDS),
    limits=((alignment, "BATCH_RECORDS", 1_000),),
)
SCENARIOS = (DATA, BULK_MARKERS, TRANSACTION_MARKERS, ABORTED, BULK_HOLES, LOG_START)
