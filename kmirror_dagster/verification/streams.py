"""Comparison of two record streams of one mirror partition, chunk by chunk. Pure, no I/O.

Records are plain tuples and a run of equal records is one list comparison, which Python does in C: at
hundreds of thousands of records a second one cannot afford an object with named fields each. They are
looked into only once a run differs.
"""

import hashlib
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import IntEnum
from typing import TypeAlias

from kmirror_dagster.broker.log_records import (
    CREATE_TIME,
    HEADERS,
    KEY,
    LOG_APPEND_TIME,
    OFFSET,
    TIMESTAMP,
    TIMESTAMP_TYPE,
    VALUE,
    Headers,
    LogRecord,
)
from kmirror_dagster.verification.report import Difference, DifferenceKind, DifferenceLog, Isolation

# A repeated producer batch is found while it is this near: batches are 16 KiB by default, 1 MiB at most. In
# bytes that the records take in memory.
DUPLICATE_WINDOW_BYTES = 2 * 1024 * 1024
# Distinct keys of a compacted topic whose record stands on one side only and has no successor yet.
MAX_UNRESOLVED_KEYS = 200_000


class Side(IntEnum):
    """Which cluster a record was read from."""

    SOURCE = 0
    DESTINATION = 1


@dataclass(frozen=True)
class Compaction:
    """What the cleaner may have removed on one side only.

    Attributes:
        tombstones_before_ms: tombstones with an older timestamp may be gone without a successor
            (`delete.retention.ms` before now).
    """

    tombstones_before_ms: int


@dataclass
class _Stream:
    """Records of one side that wait for the other side's."""

    chunks: deque[tuple[list[LogRecord], int]] = field(default_factory=lambda: deque())
    head: int = 0
    pending_bytes: int = 0
    done: bool = False

    def append(self, records: list[LogRecord], size: int) -> None:
        if records:
            self.chunks.append((records, size))
            self.pending_bytes += size

    def drop(self, count: int) -> None:
        """Forget the first `count` records of the first chunk."""
        self.head += count
        records, size = self.chunks[0]
        if self.head == len(records):
            self.chunks.popleft()
            self.pending_bytes -= size
            self.head = 0

    def next_run(self) -> list[LogRecord]:
        records = self.chunks[0][0]
        return records[self.head :] if self.head else records


class PartitionComparison:
    """Compares the records of one partition as they arrive from both sides, in any interleaving.

    Attributes:
        compared: offsets compared so far.
        duplicates: see `VerifyReport.duplicates`.
        superseded: see `VerifyReport.superseded`.
        timestamp_types: see `VerifyReport.timestamp_types`.
    """

    def __init__(
        self,
        topic: str,
        partition: int,
        *,
        isolation: Isolation,
        differences: DifferenceLog,
        compaction: Compaction | None = None,
        window_bytes: int = DUPLICATE_WINDOW_BYTES,
    ) -> None:
        self.topic = topic
        self.partition = partition
        self.compared = 0
        self.duplicates = 0
        self.timestamp_types = 0
        self._isolation = isolation
        self._differences = differences
        self._streams = (_Stream(), _Stream())
        self._recent = _RecentRecords(window_bytes)
        self._orphans = _Orphans(compaction) if compaction else None
        self._finished = False

    @property
    def superseded(self) -> int:
        """Records that the cleaner of one side removed already."""
        return self._orphans.superseded if self._orphans else 0

    @property
    def finished(self) -> bool:
        """Whether both streams have ended and everything is compared."""
        return self._finished

    def pending_bytes(self, side: Side) -> int:
        """Bytes read from `side` that wait for the other side."""
        return self._streams[side].pending_bytes

    def feed(self, side: Side, records: list[LogRecord], size: int, *, done: bool = False) -> None:
        """Take the next records of one side and compare what both sides have.

        Args:
            side: where they were read.
            records: in ascending order of offset, all above those fed before.
            size: bytes they hold, for the accounting of memory.
            done: no more will follow from this side.
        """
        stream = self._streams[side]
        stream.append(records, size)
        stream.done = stream.done or done
        source, destination = self._streams
        while source.chunks and destination.chunks:
            self._compare_run(source, destination)
        if source.done:
            self._drain(destination, Side.DESTINATION)
        if destination.done:
            self._drain(source, Side.SOURCE)
        if source.done and destination.done and not self._finished:
            self._finished = True
            self._settle_orphans()
            self._recent = _RecentRecords(0)  # many partitions may still be compared

    def _compare_run(self, source: _Stream, destination: _Stream) -> None:
        left, right = source.next_run(), destination.next_run()
        count = min(len(left), len(right))
        if len(left) > count:
            left = left[:count]
        if len(right) > count:
            right = right[:count]
        if left == right:
            self.compared += count
            self._recent.add_equal(left, destination.chunks[0])
            if self._orphans:
                self._orphans.see_matched(left)
            source.drop(count)
            destination.drop(count)
            return
        taken_left, taken_right = self._walk(left, right)
        if taken_left:
            source.drop(taken_left)
        if taken_right:
            destination.drop(taken_right)

    def _walk(self, left: list[LogRecord], right: list[LogRecord]) -> tuple[int, int]:
        """Compare two runs record by record until one is used up; return how many were taken of each."""
        i = j = 0
        while i < len(left) and j < len(right):
            mine, theirs = left[i], right[j]
            if mine[OFFSET] < theirs[OFFSET]:
                self._one_sided(Side.SOURCE, mine)
                i += 1
            elif mine[OFFSET] > theirs[OFFSET]:
                self._one_sided(Side.DESTINATION, theirs)
                j += 1
            else:
                self._compare_pair(mine, theirs)
                i += 1
                j += 1
        return i, j

    def _compare_pair(self, mine: LogRecord, theirs: LogRecord) -> None:
        self.compared += 1
        kinds = list(_differing(mine, theirs))
        if not kinds and mine != theirs:
            self.timestamp_types += 1
        for kind in kinds:
            self._report(kind, mine[OFFSET], mine, theirs)
        if kinds and self._recent.is_repeat(theirs, mine):
            self.duplicates += 1
        self._recent.add_pair(mine, theirs)
        if self._orphans and not kinds:
            self._orphans.see_matched([mine])

    def _one_sided(self, side: Side, record: LogRecord) -> None:
        """Take a record that the other side has not."""
        self.compared += 1
        kind = DifferenceKind.MISSING if side is Side.SOURCE else DifferenceKind.EXTRA
        if self._orphans and self._orphans.adopt(record, kind):
            return
        source, destination = (record, None) if side is Side.SOURCE else (None, record)
        if destination is not None and self._recent.is_repeat(destination, None):
            self.duplicates += 1
        self._recent.add_pair(source, destination)
        self._report(kind, record[OFFSET], source, destination)

    def _drain(self, stream: _Stream, side: Side) -> None:
        while stream.chunks:
            run = stream.next_run()
            for record in run:
                self._one_sided(side, record)
            stream.drop(len(run))

    def _settle_orphans(self) -> None:
        for kind, offset, count in self._orphans.unexplained() if self._orphans else ():
            self._differences.add(
                Difference(
                    kind=kind,
                    topic=self.topic,
                    partition=self.partition,
                    offset=offset,
                    isolation=self._isolation,
                    detail="on one side only, and no newer record of its key stands on both",
                )
            )
            for _ in range(count - 1):
                self._differences.count(kind)

    def _report(
        self, kind: DifferenceKind, offset: int, source: LogRecord | None, destination: LogRecord | None
    ) -> None:
        if self._differences.is_full:
            self._differences.count(kind)
            return
        self._differences.add(
            Difference(
                kind=kind,
                topic=self.topic,
                partition=self.partition,
                offset=offset,
                isolation=self._isolation,
                detail=_describe(kind, source, destination),
            )
        )


class _RecentRecords:
    """The newest records of both sides, for telling a repeated record from a wrong one.

    Runs are kept as they came; only a difference makes an index of them.
    """

    def __init__(self, window_bytes: int) -> None:
        self._window = window_bytes
        self._runs: deque[tuple[list[LogRecord], int]] = deque()
        self._bytes = 0
        self._source: dict[int, _Content] = {}
        self._destination: dict[_Content, int] = {}
        self._indexed = False

    def add_equal(self, run: list[LogRecord], chunk: tuple[list[LogRecord], int]) -> None:
        """Remember a run that is the same on both sides; its size is its share of the chunk it came in."""
        if self._indexed:
            self._source.clear()
            self._destination.clear()
            self._indexed = False
        size = chunk[1] * len(run) // len(chunk[0])
        self._runs.append((run, size))
        self._bytes += size
        while self._bytes > self._window and len(self._runs) > 1:
            self._bytes -= self._runs.popleft()[1]

    def add_pair(self, source: LogRecord | None, destination: LogRecord | None) -> None:
        """Remember one compared record, while a stretch of differences lasts."""
        self._index()
        if source is not None:
            self._source[source[OFFSET]] = _content(source)
        if destination is not None:
            self._destination[_content(destination)] = destination[OFFSET]
        if len(self._source) + len(self._destination) > MAX_UNRESOLVED_KEYS:
            self._source.clear()
            self._destination.clear()

    def is_repeat(self, destination: LogRecord, source: LogRecord | None) -> bool:
        """Whether `destination` repeats an earlier record there, and the source has no such repetition."""
        self._index()
        earlier = self._destination.get(_content(destination))
        if earlier is None:
            return False
        return source is None or self._source.get(earlier) != _content(source)

    def _index(self) -> None:
        if self._indexed:
            return
        self._indexed = True
        for run, _ in self._runs:
            for record in run:
                content = _content(record)
                self._source[record[OFFSET]] = content
                self._destination[content] = record[OFFSET]


@dataclass
class _Chain:
    """Records of one key that stand on one side only and have no successor yet."""

    count: int
    kind: DifferenceKind
    first_offset: int
    may_be_expired: bool


class _Orphans:
    """Records of a compacted topic that one side lacks, until a newer record of the key shows why."""

    def __init__(self, compaction: Compaction) -> None:
        self._compaction = compaction
        self._chains: dict[bytes, _Chain] = {}
        self.superseded = 0

    def adopt(self, record: LogRecord, kind: DifferenceKind) -> bool:
        """Keep a one-sided record for later; False when compaction cannot be the reason."""
        key = record[KEY]
        if key is None:
            return False  # a cleaner refuses records without a key
        is_old = record[TIMESTAMP] < self._compaction.tombstones_before_ms
        may_be_expired = record[VALUE] is None and is_old
        chain = self._chains.get(key)
        if chain is not None:
            chain.count += 1
            chain.may_be_expired = may_be_expired
            return True
        if len(self._chains) >= MAX_UNRESOLVED_KEYS:
            return False
        self._chains[key] = _Chain(1, kind, record[OFFSET], may_be_expired)
        return True

    def see_matched(self, run: list[LogRecord]) -> None:
        """Records that stand on both sides explain why older ones of their keys do not."""
        if not self._chains:
            return
        for record in run:
            key = record[KEY]
            if key is not None and key in self._chains:
                self.superseded += self._chains.pop(key).count

    def unexplained(self) -> Iterator[tuple[DifferenceKind, int, int]]:
        """Kind, first offset and number of the records nothing explains, once both streams have ended."""
        for chain in self._chains.values():
            if chain.may_be_expired:
                self.superseded += chain.count
            else:
                yield chain.kind, chain.first_offset, chain.count


_Content: TypeAlias = tuple[int, bytes | None, bytes | None, tuple[tuple[str, bytes | None], ...] | None]


def _content(record: LogRecord) -> _Content:
    headers = record[HEADERS]
    return record[TIMESTAMP], record[KEY], record[VALUE], None if headers is None else tuple(headers)


def _differing(mine: LogRecord, theirs: LogRecord) -> Iterator[DifferenceKind]:
    if mine[KEY] != theirs[KEY]:
        yield DifferenceKind.KEY
    if mine[VALUE] != theirs[VALUE]:
        yield DifferenceKind.VALUE
    if mine[HEADERS] != theirs[HEADERS]:
        yield DifferenceKind.HEADERS
    types = (mine[TIMESTAMP_TYPE], theirs[TIMESTAMP_TYPE])
    same_type = types[0] == types[1] or types == (LOG_APPEND_TIME, CREATE_TIME)
    if mine[TIMESTAMP] != theirs[TIMESTAMP] or not same_type:
        yield DifferenceKind.TIMESTAMP


def _describe(kind: DifferenceKind, source: LogRecord | None, destination: LogRecord | None) -> str:
    if source is None or destination is None:
        where = "source" if destination is None else "destination"
        record = source or destination
        key, value = (_bytes_text(record[KEY]), _bytes_text(record[VALUE])) if record else ("?", "?")
        return f"readable at the {where} only: key {key}, value {value}"
    if kind is DifferenceKind.KEY:
        return f"source {_bytes_text(source[KEY])}, destination {_bytes_text(destination[KEY])}"
    if kind is DifferenceKind.VALUE:
        return f"source {_bytes_text(source[VALUE])}, destination {_bytes_text(destination[VALUE])}"
    if kind is DifferenceKind.HEADERS:
        return _describe_headers(source[HEADERS] or [], destination[HEADERS] or [])
    return f"source {_timestamp_text(source)}, destination {_timestamp_text(destination)}"


def _describe_headers(source: Headers, destination: Headers) -> str:
    if len(source) != len(destination):
        return f"source {len(source)} headers, destination {len(destination)}"
    for index, (mine, theirs) in enumerate(zip(source, destination, strict=True), start=1):
        if mine[0] != theirs[0]:
            keys = [_bytes_text(pair[0].encode(errors="surrogateescape")) for pair in (mine, theirs)]
            return f"header {index} of {len(source)}: source key {keys[0]}, destination key {keys[1]}"
        if mine[1] != theirs[1]:
            values = [_bytes_text(pair[1]) for pair in (mine, theirs)]
            return f"header {index} of {len(source)}: source value {values[0]}, destination value {values[1]}"
    return "headers differ"


def _bytes_text(data: bytes | None) -> str:
    if data is None:
        return "null"
    if not data:
        return "empty"
    return f"{len(data)} bytes sha256:{hashlib.sha256(data).hexdigest()[:12]}"


def _timestamp_text(record: LogRecord) -> str:
    name = {CREATE_TIME: "CreateTime", LOG_APPEND_TIME: "LogAppendTime"}.get(
        record[TIMESTAMP_TYPE], "no type"
    )
    return f"{record[TIMESTAMP]} ({name})"
