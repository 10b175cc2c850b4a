"""Which offsets are compared, and what log starts and ends alone tell; decisions apart from the look-ups."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol

from kmirror_dagster.broker.admin_types import Answers, ListedOffset, OffsetKind, Partition
from kmirror_dagster.broker.log_records import LogRange
from kmirror_dagster.errors import KmirrorError
from kmirror_dagster.verification.report import Difference, DifferenceKind, Isolation


@dataclass(frozen=True)
class LogEnds:
    """Ends of one log.

    Attributes:
        start: log start offset.
        end: end for read_uncommitted readers (high watermark).
        stable_end: end for read_committed readers (last stable offset).
    """

    start: int
    end: int
    stable_end: int

    def at(self, isolation: Isolation) -> int:
        """End for readers of that level."""
        return self.stable_end if isolation is Isolation.READ_COMMITTED else self.end


class OffsetLookup(Protocol):
    """The part of `broker.admin.ClusterAdmin` that looks up offsets."""

    def list_offsets(
        self, partitions: Iterable[Partition], at: OffsetKind | int, *, read_committed: bool = False
    ) -> Answers[Partition, ListedOffset]:
        """Look up one offset in each partition."""
        ...


def read_ends(
    admin: OffsetLookup, partitions: Iterable[Partition]
) -> tuple[dict[Partition, LogEnds], dict[Partition, KmirrorError]]:
    """Look up the ends of partitions; those that cannot be looked up are in the second answer.

    The high watermark is asked for first: a stable end above it only means that the log has grown since.
    """
    wanted = list(partitions)
    ends = admin.list_offsets(wanted, OffsetKind.LATEST)
    stable = admin.list_offsets(wanted, OffsetKind.LATEST, read_committed=True)
    starts = admin.list_offsets(wanted, OffsetKind.EARLIEST)
    errors = {**starts.errors, **stable.errors, **ends.errors}
    found = {
        key: LogEnds(starts.values[key].offset, ends.values[key].offset, stable.values[key].offset)
        for key in wanted
        if key not in errors
    }
    return found, errors


def is_settled(source: LogEnds, destination: LogEnds) -> bool:
    """Whether waiting longer cannot bring the destination nearer to what the source was.

    It has to reach the source's stable end only: what follows belongs to a transaction nobody has decided
    yet, and a mirror does not copy that.
    """
    reached = min(destination.end, destination.stable_end) >= source.stable_end
    return reached and destination.start >= source.start


def range_differences(
    partition: Partition, source: LogEnds, destination: LogEnds, waited_s: float
) -> Iterator[Difference]:
    """What differs in log start and ends.

    Args:
        partition: which one.
        source: the source's `start` as it is now, its ends as they were before those of the destination.
        destination: ends of the destination.
        waited_s: seconds the destination was given to catch up, for the message.
    """
    topic, number = partition

    def difference(isolation: Isolation | None, detail: str) -> Difference:
        return Difference(
            kind=DifferenceKind.OFFSET_RANGE,
            topic=topic,
            partition=number,
            isolation=isolation,
            detail=detail,
        )

    if destination.start != source.start:
        yield difference(
            None, f"log start: source {source.start}, destination {destination.start} after {waited_s:.0f} s"
        )
    for isolation in Isolation:
        if destination.at(isolation) < source.stable_end:
            yield difference(
                isolation,
                f"log end: source {source.stable_end}, destination {destination.at(isolation)} "
                f"after {waited_s:.0f} s",
            )


def beyond_source(partition: Partition, source: LogEnds, destination: LogEnds) -> Iterator[Difference]:
    """What the destination has behind the source's end; `source` is to be looked up after `destination`."""
    topic, number = partition
    for isolation in Isolation:
        if destination.at(isolation) > source.end:
            yield Difference(
                kind=DifferenceKind.OFFSET_RANGE,
                topic=topic,
                partition=number,
                isolation=isolation,
                detail=f"log end: source {source.end}, destination {destination.at(isolation)}",
            )


def compared_range(
    partition: Partition,
    source: LogEnds,
    destination: LogEnds,
    isolation: Isolation,
    *,
    last_offsets: int | None = None,
) -> LogRange:
    """Offsets that can be compared at one level: what both sides hold, or only the end of that."""
    end = min(source.at(isolation), destination.at(isolation))
    start = max(source.start, destination.start)
    if last_offsets is not None:
        start = max(start, end - last_offsets)
    return LogRange(*partition, start, max(start, end))


def waves(ranges: Mapping[Partition, LogRange], size: int) -> Iterator[dict[Partition, LogRange]]:
    """Split the ranges that hold anything into groups of at most `size`, by topic and partition."""
    keys = sorted(key for key, wanted in ranges.items() if wanted.start < wanted.end)
    for index in range(0, len(keys), size):
        yield {key: ranges[key] for key in keys[index : index + size]}
