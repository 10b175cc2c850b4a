"""Reading ranges of many logs of one cluster to their ends."""

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass

from kmirror_dagster.broker.admin_types import Partition
from kmirror_dagster.broker.log_records import Chunk, LogRange
from kmirror_dagster.broker.reader import RangeReader
from kmirror_dagster.errors import DeadlineError, KmirrorError
from kmirror_dagster.settings import ClusterSettings
from kmirror_dagster.verification.ranges import waves
from kmirror_dagster.verification.report import Isolation

# Partitions one consumer reads at a time.
_WAVE = 500
_POLL_S = 0.5


@dataclass(frozen=True)
class ReadLimits:
    """Longest time without a single record, and for everything (None: no limit), in seconds."""

    stall_s: float = 60.0
    deadline_s: float | None = None


ProgressCallback = Callable[[str, int, int], None]


def read_ranges(
    settings: ClusterSettings,
    ranges: Mapping[Partition, LogRange],
    *,
    isolation: Isolation,
    limits: ReadLimits,
    progress: ProgressCallback,
    whole: bool = False,
    unreadable: Callable[[int], None] = lambda _: None,
    phase: str = "reading the unmirrored tail",
) -> Iterator[Chunk]:
    """Read ranges of many partitions; chunks of one partition come in order.

    Args:
        settings: cluster to read.
        ranges: at most one per partition.
        isolation: level to read at.
        limits: of time.
        progress: told phase, offsets done and offsets in all.
        whole: refuse records whose headers the client library cannot give (a name in them is no UTF-8).
        unreadable: told how many such records there were.
        phase: what `progress` is told.

    Raises:
        KmirrorError: when `whole` and there is such a record.
        ClusterUnreachableError, AuthenticationError, BrokerError: when a partition cannot be read.
        DeadlineError: when nothing came for `stall_s`, or the deadline passed.
    """
    began = latest = time.monotonic()
    total = sum(wanted.end - wanted.start for wanted in ranges.values())
    done = 0
    for wave in waves(ranges, _WAVE):
        left = set(wave)
        with closing(RangeReader(settings, wave.values(), isolation=isolation.value)) as reader:
            while left:
                now = time.monotonic()
                if limits.deadline_s is not None and now - began > limits.deadline_s:
                    raise DeadlineError(f"reading did not end within {limits.deadline_s:g} s: {_left(left)}")
                chunks = reader.read(_POLL_S)
                if not chunks and now - latest > limits.stall_s:
                    raise reader.failure() or DeadlineError(
                        f"no record came for {limits.stall_s:g} s: {_left(left)}"
                    )
                if whole and reader.unreadable_headers:
                    raise KmirrorError(
                        f"{chunks[0].topic}/{chunks[0].partition}: a record has a header whose name is no UTF-8, which "
                        "the client library does not give: copy this tail by other means, then delete the topic"
                    )
                for chunk in chunks:
                    latest = now
                    if chunk.done:
                        left.discard((chunk.topic, chunk.partition))
                    done += len(chunk.records)
                    progress(phase, min(done, total), total)
                    yield chunk
            unreadable(reader.unreadable_headers)


def _left(partitions: set[Partition]) -> str:
    topic, number = min(partitions)
    return f"{len(partitions)} partitions are left, first {topic}/{number}"
