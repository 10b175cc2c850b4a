"""Reads two clusters side by side into comparisons, with bounded memory."""

import time
from collections.abc import Callable, Collection, Mapping
from typing import Protocol

from kmirror_dagster.broker.log_records import Chunk
from kmirror_dagster.errors import DeadlineError, KmirrorError
from kmirror_dagster.verification.streams import PartitionComparison, Side

# Read but not yet compared bytes of one side; above it the side waits.
PENDING_LIMIT_BYTES = 64 * 1024 * 1024
# Longest wait for one side while the other has nothing either.
_POLL_S = 0.05

TopicPartitionKey = tuple[str, int]


class ChunkReader(Protocol):
    """What `broker.reader.RangeReader` does."""

    def failure(self) -> KmirrorError | None:
        """What keeps it from its cluster, None when nothing does."""
        ...

    def read(self, timeout_s: float) -> list[Chunk]:
        """Next chunks; an empty list when none came in time."""
        ...

    def pause(self, partitions: Collection[TopicPartitionKey]) -> None:
        """Stop fetching these partitions."""
        ...

    def resume(self, partitions: Collection[TopicPartitionKey]) -> None:
        """Fetch paused partitions again."""
        ...


class Lockstep:
    """Feeds comparisons from a reader of each side until all of them are finished.

    A side whose unmatched records exceed the limit is not read until the other has caught up. Brokers serve
    partitions in any order, so both sides can come to hold records of different partitions only; then the
    partitions each side is ahead in are paused, which lets the others through.

    Args:
        readers: of the source and of the destination.
        comparisons: one per partition, all that the readers were given.
        stall_s: longest time without a single chunk from either side.
        deadline: monotonic time to end at in any case, None for no end.
    """

    def __init__(
        self,
        readers: tuple[ChunkReader, ChunkReader],
        comparisons: Mapping[TopicPartitionKey, PartitionComparison],
        *,
        stall_s: float = 60.0,
        deadline: float | None = None,
        limit_bytes: int = PENDING_LIMIT_BYTES,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._readers = readers
        self._comparisons = comparisons
        self._open = set(comparisons)
        self._pending = [0, 0]
        self._paused: tuple[set[TopicPartitionKey], set[TopicPartitionKey]] = (set(), set())
        self._stall_s = stall_s
        self._deadline = deadline
        self._limit = limit_bytes
        self._clock = clock

    def run(self, progress: Callable[[int], None]) -> None:
        """Compare until both sides have ended.

        Args:
            progress: told the number of offsets compared since it was last called.

        Raises:
            ClusterUnreachableError, AuthenticationError: when nothing came for `stall_s` and that is why.
            DeadlineError: when nothing came for `stall_s`, or the deadline passed.
        """
        latest = self._clock()
        while self._open:
            self._balance()
            compared = self._step()
            now = self._clock()
            if compared is not None:
                latest = now
                progress(compared)
            elif now - latest > self._stall_s:
                raise self._stalled()
            if self._deadline is not None and now > self._deadline:
                raise DeadlineError(f"comparison did not end in time: {len(self._open)} partitions are left")

    def _step(self) -> int | None:
        """Read each side that may be read once; offsets compared, None when neither side had anything."""
        chunks = {side: self._readers[side].read(0) for side in self._readable()}
        if not any(chunks.values()):
            # wait for the side that is behind: the other one's records cannot be compared without it
            behind = min(Side, key=lambda side: (self._pending[side], side))
            chunks = {behind: self._readers[behind].read(_POLL_S)}
            if not any(chunks.values()):
                return None
        return sum(self._feed(side, chunk) for side, found in chunks.items() for chunk in found)

    def _readable(self) -> list[Side]:
        return [side for side in Side if self._pending[side] <= self._limit]

    def _feed(self, side: Side, chunk: Chunk) -> int:
        key = (chunk.topic, chunk.partition)
        comparison = self._comparisons[key]
        compared = comparison.compared
        before = [comparison.pending_bytes(s) for s in Side]
        comparison.feed(side, chunk.records, chunk.size, done=chunk.done)
        for s in Side:
            self._pending[s] += comparison.pending_bytes(s) - before[s]
        if comparison.finished:
            self._open.discard(key)
        return comparison.compared - compared

    def _balance(self) -> None:
        """Pause what each side is ahead in once both hold too much; resume what has been compared."""
        if all(pending > self._limit for pending in self._pending):
            for side in Side:
                ahead = {k for k in self._open if self._comparisons[k].pending_bytes(side) > 0}
                self._readers[side].pause(ahead - self._paused[side])
                self._paused[side].update(ahead)
        for side in Side:
            caught_up = {k for k in self._paused[side] if self._comparisons[k].pending_bytes(side) == 0}
            if caught_up:
                self._readers[side].resume(caught_up)
                self._paused[side].difference_update(caught_up)

    def _stalled(self) -> KmirrorError:
        for reader in self._readers:
            failure = reader.failure()
            if failure is not None:
                return failure
        topic, partition = min(self._open)
        return DeadlineError(
            f"no record came for {self._stall_s:.0f} s; {len(self._open)} partitions are not compared yet, "
            f"first {topic}-{partition}"
        )
