"""What to append for the batches that were fetched: pure, no I/O.

Reads at read_committed see every transaction decided, with the list of aborted ones. From that, the batches of one
partition become steps, each of which takes an exact run of offsets at the destination:

- `Append`: a data batch as it is, or re-encoded when it cannot be passed on;
- `Append` with `aborted`: records of an aborted transaction, to be appended inside an own transaction;
- `Marker`: one control record (a transaction marker at the source);
- `Hole`: offsets without any record at the source (compaction).
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from kmirror_dagster.broker import batches
from kmirror_dagster.broker.batches import BatchHeader, RawRecord
from kmirror_dagster.broker.fetch import AbortedTransaction
from kmirror_dagster.errors import UnsupportedDataError


@dataclass(slots=True)
class Append:
    """Records for offsets `start` to `end` (exclusive).

    Either `view` and `header` (the fetched batch, passed through) or `records` (to be encoded again) is set.
    """

    start: int
    end: int
    aborted: bool
    leader_epoch: int
    timestamp: int
    view: memoryview | None = None
    header: BatchHeader | None = None
    records: Sequence[RawRecord] = ()
    codec: int = 0

    @property
    def count(self) -> int:
        """Number of records."""
        return self.end - self.start

    @property
    def size(self) -> int:
        """Bytes, as fetched."""
        if self.header is not None:
            return self.header.end - self.header.start
        return sum(len(record.payload) + 16 for record in self.records)


@dataclass(slots=True, frozen=True)
class Marker:
    """One control record at offset `start`."""

    start: int
    leader_epoch: int

    @property
    def end(self) -> int:
        """Offset behind the marker."""
        return self.start + 1


@dataclass(slots=True, frozen=True)
class Hole:
    """Offsets `start` to `end` (exclusive) that hold nothing at the source."""

    start: int
    end: int
    leader_epoch: int


Step = Append | Marker | Hole


@dataclass
class AbortedIndex:
    """Which producers' transactions are aborted at the point reached (as consumers do it, KIP-98)."""

    pending: list[AbortedTransaction] = field(default_factory=list[AbortedTransaction])
    active: set[int] = field(default_factory=set[int])

    @classmethod
    def of(cls, aborted: Sequence[AbortedTransaction]) -> "AbortedIndex":
        """Index over the aborted transactions list of one Fetch answer."""
        return cls(sorted(aborted, key=lambda entry: entry.first_offset, reverse=True))

    def advance(self, last_offset: int) -> None:
        """Take in the transactions that begin at or before an offset."""
        while self.pending and self.pending[-1].first_offset <= last_offset:
            self.active.add(self.pending.pop().producer_id)


def plan(view: memoryview, cursor: int, aborted: Sequence[AbortedTransaction]) -> Iterator[Step]:
    """Steps for the records of one Fetch answer, from `cursor` on.

    Args:
        view: records field of one partition.
        cursor: next offset the destination needs; what lies before is left out.
        aborted: aborted transactions of the same answer.

    Raises:
        UnsupportedDataError: damaged batch, or a message format that is not mirrored; steps before it were
            yielded.
    """
    index = AbortedIndex.of(aborted)
    for header in batches.headers(view):
        index.advance(header.last_offset)
        if header.next_offset <= cursor:
            if header.is_control:
                index.active.discard(header.producer_id)
            continue
        if not batches.is_intact(view, header):
            raise UnsupportedDataError(
                f"batch at offset {header.base_offset} of the source is damaged: its CRC-32C does not match"
            )
        if header.base_offset > cursor:
            yield Hole(cursor, header.base_offset, header.leader_epoch)
            cursor = header.base_offset
        yield from _steps_of(view, header, cursor, index)
        cursor = header.next_offset


def _steps_of(view: memoryview, header: BatchHeader, cursor: int, index: AbortedIndex) -> Iterator[Step]:
    if header.is_control:
        index.active.discard(header.producer_id)
        for offset in range(cursor, header.next_offset):
            yield Marker(offset, header.leader_epoch)
        return
    aborted = header.is_transactional and header.producer_id in index.active
    whole = header.record_count == header.last_offset_delta + 1
    if whole and cursor == header.base_offset and not header.attributes & batches.LOG_APPEND_TIME:
        yield Append(
            header.base_offset,
            header.next_offset,
            aborted,
            header.leader_epoch,
            header.max_timestamp,
            view=view,
            header=header,
        )
        return
    yield from _recoded(view, header, cursor, aborted)


def _recoded(view: memoryview, header: BatchHeader, cursor: int, aborted: bool) -> Iterator[Step]:
    """Runs of consecutive offsets of a batch that cannot be passed on as it is, and the holes between them."""
    run: list[RawRecord] = []

    def flush() -> Append:
        return Append(
            run[0].offset,
            run[-1].offset + 1,
            aborted,
            header.leader_epoch,
            max(record.timestamp for record in run),
            records=tuple(run),
            codec=header.codec,
        )

    for record in batches.decode_records(view, header):
        if record.offset < cursor:
            continue
        if record.offset > cursor:
            if run:
                yield flush()
                run.clear()
            yield Hole(cursor, record.offset, header.leader_epoch)
        run.append(record)
        cursor = record.offset + 1
    if run:
        yield flush()
    if cursor < header.next_offset:
        yield Hole(cursor, header.next_offset, header.leader_epoch)
