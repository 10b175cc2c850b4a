"""Exact map between source and destination offsets of one mirror partition: runs of equal distance. Pure.

A mirror keeps every offset. Only where it is told to (`offsets: translated`) does it leave out long stretches that hold
no record at the source; behind each of them a new run begins, and the offsets of both sides differ by what was left
out so far. In front of the first run they are equal.
"""

from bisect import bisect_right
from dataclasses import dataclass
from typing import NamedTuple


class Run(NamedTuple):
    """From these two offsets on, both sides count on together."""

    destination: int
    source: int


@dataclass(frozen=True)
class OffsetMap:
    """Runs in the order of their offsets; none at all: both sides are equal.

    Both kinds of offset grow from run to run, and a run's source offset is never below its destination offset.
    """

    runs: tuple[Run, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.runs)

    def __len__(self) -> int:
        return len(self.runs)

    def to_source(self, destination: int) -> int:
        """Source offset of what is, or will be, at a destination offset."""
        if not self.runs:
            return destination
        index = bisect_right(self.runs, destination, key=lambda run: run.destination) - 1
        if index < 0:
            return destination
        run = self.runs[index]
        return run.source + destination - run.destination

    def to_destination(self, source: int) -> int:
        """Destination offset of the first record at or behind a source offset.

        An offset in a stretch that was left out becomes that of the record behind it, so a position keeps what it
        means: the next record to be read.
        """
        if not self.runs:
            return source
        index = bisect_right(self.runs, source, key=lambda run: run.source) - 1
        offset = source if index < 0 else self.runs[index].destination + source - self.runs[index].source
        return min(offset, self.runs[index + 1].destination) if index + 1 < len(self.runs) else offset

    def left_out(self, source: int) -> bool:
        """Whether a source offset lies in a stretch that was left out."""
        return self.to_source(self.to_destination(source)) != source

    def with_skip(self, destination: int, source: int) -> "OffsetMap":
        """The map once everything up to `source` is left out at the destination's end.

        Args:
            destination: log end of the destination; runs from there on have never been used.
            source: offset of the next record.

        Raises:
            ValueError: when the source would go back.
        """
        kept = OffsetMap(tuple(run for run in self.runs if run.destination < destination))
        reached = kept.to_source(destination)
        if source < reached:
            raise ValueError(f"source offset {source} lies before {reached}, which the destination has")
        return OffsetMap((*kept.runs, Run(destination, source))) if source > reached else kept

    def truncated(self, destination: int) -> "OffsetMap":
        """The map of a log that was cut at a destination offset; a run that begins right there stays."""
        return OffsetMap(tuple(run for run in self.runs if run.destination <= destination))

    def since(self, destination: int) -> "OffsetMap":
        """What is needed for a log that begins at a destination offset."""
        index = bisect_right(self.runs, destination, key=lambda run: run.destination) - 1
        return OffsetMap(self.runs[index:]) if index > 0 else self
