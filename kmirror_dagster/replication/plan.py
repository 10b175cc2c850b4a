"""What to append for the batches that were fetched: pure, no I/O.

Reads at read_committed see every transaction decided, with the list of aborted ones. From that, the batches of one
partition become steps, each of which takes an exact run of offsets at the destination:

- `Append`: a data batch as it is, several small ones made into one, or re-encoded when it cannot be passed on;
- `Append` with `aborted`: records of an aborted transaction, to be appended inside an own transaction;
- `Marker`: one control record (a transaction marker at the source);
- `Hole`: offsets without any record at the source (compaction).

Where offsets are translated, a copier makes a `Skip` of a long hole (see translation.py).
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from kmirror_dagster.broker import batches
from kmirror_dagster.broker.batches import BatchHeader, RawRecord
from kmirror_dagster.broker.fetch import AbortedTransaction
from kmirror_dagster.errors import UnsupportedDataError

# A batch up to this size costs more to send alone than to join with its neighbours: one partition's batches go
# one per request (see appender.py).
_SMALL_BYTES = 4 * 1024
_FEW_BYTES = 32 * 1024
_FEW_RECORDS = 32
# Joined batches stay far below the smallest usual max.message.bytes (1 MB).
JOINED_BYTES = 256 * 1024
_JOINED_BATCHES = 4_096
_NOT_AS_IT_IS = batches.CONTROL | batches.LOG_APPEND_TIME


@dataclass(frozen=True)
class Limits:
    """What the destination takes as one batch, as found out by its refusals.

    Attributes:
        joined_bytes: small batches are joined up to this size; 0: each stays as it is.
        records: most records of a batch; larger ones are decoded and cut.
        records_before: offset up to which `records` counts.
    """

    joined_bytes: int = JOINED_BYTES
    records: int = batches.MAX_SEQUENCE
    records_before: int = 0

    def allows(self, header: BatchHeader) -> bool:
        """Whether a batch can be passed on as it is."""
        return header.record_count <= self.records or header.base_offset >= self.records_before

    def after_refusal(self, step: "Append", source_end: int) -> "Limits":
        """Smaller ones, after a batch of more than one record, up to a source offset, was too large."""
        if step.joined > 1:
            # the topic allows less than joined batches usually have: join less, down to not at all
            return replace(self, joined_bytes=step.size // 4 if step.size > _SMALL_BYTES else 0)
        return replace(self, records=max(step.count // 4, 1), records_before=source_end)


@dataclass(slots=True)
class Append:
    """One batch for offsets `start` to `end` (exclusive): as fetched, or made anew; it lacks only its producer.

    Attributes:
        aborted: whether its records are to be appended as aborted ones.
        leader_epoch: the source's leader epoch that it was written under.
        view: what `header` lies in.
        joined: fetched batches it was made of; 0: of records of one that could not be passed on.
        count: number of records.
        size: bytes.
    """

    start: int
    end: int
    aborted: bool
    leader_epoch: int
    view: memoryview
    header: BatchHeader
    joined: int = 1
    count: int = field(init=False)
    size: int = field(init=False)

    def __post_init__(self) -> None:
        """Looked at several times each: reckoned once."""
        self.count = self.end - self.start
        self.size = self.header.end - self.header.start


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


@dataclass(slots=True, frozen=True)
class Skip:
    """A hole that is left out: destination offset `start` stands for source offset `source` from then on."""

    start: int
    source: int
    leader_epoch: int

    @property
    def end(self) -> int:
        """It takes no offset."""
        return self.start


Step = Append | Marker | Hole | Skip
NO_LIMITS = Limits()


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


@dataclass(slots=True)
class _Run:
    """Whole data batches behind each other that may become one: small, of one codec and one visibility."""

    view: memoryview
    limit: int
    headers: list[BatchHeader] = field(default_factory=list[BatchHeader])
    aborted: bool = False
    codec: int = 0
    size: int = 0

    def takes(self, header: BatchHeader, aborted: bool, size: int) -> bool:
        """Whether a batch can join, before it does."""
        return (
            self.codec == header.attributes & batches.COMPRESSION_MASK
            and self.aborted == aborted
            and self.size + size <= self.limit
            and len(self.headers) < _JOINED_BATCHES
        )

    def end(self) -> Append:
        """The step of what has joined; the run is empty then."""
        found, first, last = self.headers, self.headers[0], self.headers[-1]
        self.headers = []
        self.size = 0
        if len(found) == 1:
            return _alone(self.view, first, self.aborted)
        # done here rather than when it is sent: there is time for it while answers are waited for
        joined = batches.join(self.view, found)
        return _made(
            joined, first.base_offset, last.next_offset, self.aborted, last.leader_epoch, joined=len(found)
        )


def plan(
    view: memoryview, cursor: int, aborted: Sequence[AbortedTransaction], limits: Limits = NO_LIMITS
) -> Iterator[Step]:
    """Steps for the records of one Fetch answer, from `cursor` on.

    Args:
        view: records field of one partition.
        cursor: next offset the destination needs; what lies before is left out.
        aborted: aborted transactions of the same answer.
        limits: what the destination takes as one batch.

    Raises:
        UnsupportedDataError: a batch to be written anew is damaged, or of a message format that is not mirrored;
            steps before it were yielded.
    """
    index = AbortedIndex.of(aborted)
    run = _Run(view, limits.joined_bytes)
    unlimited = not limits.records_before  # asked for each batch
    try:
        for header in batches.headers(view):
            if index.pending:
                index.advance(header.last_offset)
            if header.base_offset + header.last_offset_delta < cursor:
                if header.attributes & batches.CONTROL:
                    index.active.discard(header.producer_id)
                continue
            is_aborted = bool(index.active) and header.is_transactional and header.producer_id in index.active
            if (
                header.base_offset == cursor
                and not header.attributes & _NOT_AS_IT_IS
                and _is_whole(header)
                and (unlimited or limits.allows(header))
            ):
                size = header.end - header.start
                if run.headers and not run.takes(header, is_aborted, size):
                    yield run.end()
                cursor += header.record_count
                small = _is_small(header, size)
                if not small and not run.headers:
                    # goes alone, and is checked by the destination: see batches.stamp
                    yield _alone(view, header, is_aborted)
                    continue
                _check(view, header)
                run.headers.append(header)
                run.size += size
                run.aborted, run.codec = is_aborted, header.attributes & batches.COMPRESSION_MASK
                if not small:
                    yield run.end()
                continue
            _check(view, header)
            if run.headers:
                yield run.end()
            if header.base_offset > cursor:
                yield Hole(cursor, header.base_offset, header.leader_epoch)
                cursor = header.base_offset
            yield from _other_steps(view, header, cursor, is_aborted, index, limits)
            cursor = header.next_offset
    except UnsupportedDataError:
        if run.headers:
            yield run.end()  # what is good is mirrored before the partition fails
        raise
    if run.headers:
        yield run.end()


def _is_small(header: BatchHeader, size: int) -> bool:
    """Whether joining a batch with its neighbours costs less than sending it alone."""
    if size <= _SMALL_BYTES:
        return True
    # nothing to decompress, few records to write anew
    return size <= _FEW_BYTES and header.record_count <= _FEW_RECORDS and not header.codec


def _alone(view: memoryview, header: BatchHeader, aborted: bool) -> Append:
    return Append(header.base_offset, header.next_offset, aborted, header.leader_epoch, view, header)


def _made(data: bytes, start: int, end: int, aborted: bool, leader_epoch: int, *, joined: int) -> Append:
    view = memoryview(bytearray(data))
    return Append(start, end, aborted, leader_epoch, view, next(batches.headers(view)), joined)


def _check(view: memoryview, header: BatchHeader) -> None:
    """Refuse a damaged batch before its records get a new CRC."""
    if not batches.is_intact(view, header):
        raise UnsupportedDataError(
            f"batch at offset {header.base_offset} of the source is damaged: its CRC-32C does not match"
        )


def _is_whole(header: BatchHeader) -> bool:
    return header.record_count == header.last_offset_delta + 1


def _other_steps(
    view: memoryview, header: BatchHeader, cursor: int, aborted: bool, index: AbortedIndex, limits: Limits
) -> Iterator[Step]:
    """Steps of a batch that is not passed on as it is: a marker, or records to be encoded again."""
    if header.is_control:
        index.active.discard(header.producer_id)
        for offset in range(cursor, header.next_offset):
            yield Marker(offset, header.leader_epoch)
    else:
        yield from _recoded(view, header, cursor, aborted, limits)


def _recoded(
    view: memoryview, header: BatchHeader, cursor: int, aborted: bool, limits: Limits
) -> Iterator[Step]:
    """Runs of consecutive offsets of a batch that cannot be passed on as it is, and the holes between them."""
    run: list[RawRecord] = []
    most = batches.MAX_SEQUENCE if limits.allows(header) else limits.records

    def flush() -> Append:
        data = batches.encode_batch(run, codec=header.codec)
        return _made(data, run[0].offset, run[-1].offset + 1, aborted, header.leader_epoch, joined=0)

    for record in batches.decode_records(view, header):
        if record.offset < cursor:
            continue
        if run and (record.offset > cursor or len(run) >= most):
            yield flush()
            run.clear()
        if record.offset > cursor:
            yield Hole(cursor, record.offset, header.leader_epoch)
        run.append(record)
        cursor = record.offset + 1
    if run:
        yield flush()
    if cursor < header.next_offset:
        yield Hole(cursor, header.next_offset, header.leader_epoch)
