"""What is appended for fetched batches: every offset exactly once, in order, of the right kind."""

import struct
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kmirror_dagster.broker import batches
from kmirror_dagster.broker.batches import RawRecord
from kmirror_dagster.broker.fetch import AbortedTransaction
from kmirror_dagster.errors import UnsupportedDataError
from kmirror_dagster.replication.plan import NO_LIMITS, Append, Hole, Marker, plan


@dataclass(frozen=True)
class Built:
    """One batch of a made-up log; `offsets` are those of its records."""

    base: int
    last: int
    offsets: tuple[int, ...]
    kind: str = "plain"  # plain, committed, aborted, marker
    append_time: bool = False

    def bytes(self) -> bytes:
        """The batch as a broker would hold it."""
        if self.kind == "marker":
            items = [RawRecord(self.base, 5, batches.encode_payload(b"\0\0\0\0", b"\0\0\0\0\0\0"))]
        else:
            items = [RawRecord(o, 100 + o, batches.encode_payload(b"k", b"%d" % o)) for o in self.offsets]
        data = bytearray(
            batches.encode_batch(items or [RawRecord(self.base, 5, batches.encode_payload(None, None))])
        )
        if items:
            data = bytearray(_with_offsets(data, items, self.base))
        header = next(batches.headers(memoryview(data)))
        attributes = header.attributes
        attributes |= batches.TRANSACTIONAL if self.kind != "plain" else 0
        attributes |= batches.CONTROL if self.kind == "marker" else 0
        attributes |= batches.LOG_APPEND_TIME if self.append_time else 0
        struct.pack_into(">q", data, 0, self.base)
        struct.pack_into(">h", data, 21, attributes)
        struct.pack_into(">i", data, 23, self.last - self.base)
        struct.pack_into(">q", data, 43, {"plain": -1, "committed": 1, "aborted": 2, "marker": 2}[self.kind])
        struct.pack_into(">i", data, 57, len(items))
        struct.pack_into(">I", data, 17, batches.crc32c(bytes(data[21:])))
        return bytes(data)


def _with_offsets(data: bytearray, items: list[RawRecord], base: int) -> bytes:
    """Encode records with the offset deltas they have after compaction."""
    body = b""
    for record in items:
        inner = b"\0" + batches.write_varint(record.timestamp - items[0].timestamp)
        inner += batches.write_varint(record.offset - base) + record.payload
        body += batches.write_varint(len(inner)) + inner
    head = bytearray(data[: batches.HEADER_BYTES])
    struct.pack_into(">i", head, 8, batches.HEADER_BYTES - 12 + len(body))
    return bytes(head) + body


@st.composite
def logs(draw: st.DrawFn) -> list[Built]:
    """A log with plain, committed and aborted batches, markers, batches with inner holes and gaps between."""
    built: list[Built] = []
    offset = draw(st.integers(0, 1_000))
    for _ in range(draw(st.integers(1, 12))):
        offset += draw(st.sampled_from([0, 0, 0, 1, 7]))
        kind = draw(st.sampled_from(["plain", "plain", "committed", "aborted", "marker"]))
        if kind == "marker":
            built.append(Built(offset, offset, (offset,), kind))
            offset += 1
            continue
        width = draw(st.integers(1, 9))
        kept = tuple(sorted(draw(st.sets(st.integers(offset, offset + width - 1)))))
        if draw(st.booleans()):
            kept = tuple(range(offset, offset + width))
        built.append(Built(offset, offset + width - 1, kept, kind, draw(st.booleans()) and bool(kept)))
        offset += width
    return built


def aborted_list(log: list[Built]) -> list[AbortedTransaction]:
    """The list a broker would send: producer 2 aborts at each marker behind records of its own."""
    found: list[AbortedTransaction] = []
    first: int | None = None
    for batch in log:
        if batch.kind == "aborted" and first is None:
            first = batch.base
        if batch.kind == "marker" and first is not None:
            found.append(AbortedTransaction(2, first))
            first = None
    if first is not None:
        found.append(AbortedTransaction(2, first))
    return found


@given(logs(), st.data())
def test_every_offset_is_planned_once_and_as_what_it_is(log: list[Built], data: st.DataObject) -> None:
    """Steps follow each other without gap from the cursor to the end; records, markers and holes keep their offsets."""
    view = memoryview(bytearray(b"".join(batch.bytes() for batch in log)))
    source = contents(view)
    end = log[-1].last + 1
    cursor = data.draw(st.integers(max(0, log[0].base - 3), end - 1))
    # a real answer begins with the batch that holds the cursor
    steps = list(plan(view, cursor, aborted_list(log)))
    position = cursor
    records: dict[int, bool] = {}
    markers: set[int] = set()
    for step in steps:
        assert step.start == position
        position = step.end
        if isinstance(step, Marker):
            markers.add(step.start)
        elif isinstance(step, Append):
            for offset in range(step.start, step.end):
                records[offset] = step.aborted
            assert_same_records(source, step)
        else:
            assert isinstance(step, Hole)
    assert position == end
    expected = {
        o: batch.kind == "aborted"
        for batch in log
        if batch.kind != "marker"
        for o in batch.offsets
        if o >= cursor
    }
    assert records == expected
    assert markers == {batch.base for batch in log if batch.kind == "marker" and batch.base >= cursor}


def contents(view: memoryview) -> dict[int, RawRecord]:
    """All data records by their offsets."""
    return {
        record.offset: record
        for header in batches.headers(view)
        if not header.is_control
        for record in batches.decode_records(view, header)
    }


def assert_same_records(source: dict[int, RawRecord], step: Append) -> None:
    """What is sent holds the source's records of just those offsets, as passed on, joined or cut."""
    data = batches.stamp(step.view, step.header, 1, 0, 0, transactional=step.aborted)
    (sent,) = batches.headers(data)
    assert batches.is_intact(data, sent)
    records = batches.decode_records(data, sent)
    found = [record._replace(offset=record.offset + step.start) for record in records]
    assert found == [source[offset] for offset in range(step.start, step.end)]
    assert sent.max_timestamp == max(record.timestamp for record in records)
    assert not sent.attributes & batches.LOG_APPEND_TIME


def test_append_time_becomes_the_records_time() -> None:
    """Brokers refuse the append-time bit from producers: the stamp is written into each record instead."""
    view = memoryview(bytearray(Built(10, 12, (10, 11, 12), append_time=True).bytes()))
    (step,) = plan(view, 10, ())
    assert isinstance(step, Append)
    assert {each.timestamp for each in batches.decode_records(step.view, step.header)} == {112}


def test_a_damaged_batch_ends_the_plan_behind_what_is_good() -> None:
    """Steps before a damaged batch are yielded; the batch itself is refused by offset."""
    good, bad = Built(0, 1, (0, 1)).bytes(), bytearray(Built(2, 3, (2, 3)).bytes())
    bad[-1] ^= 1
    steps = plan(memoryview(bytearray(good + bad)), 0, ())
    assert next(steps).end == 2
    with pytest.raises(UnsupportedDataError, match="offset 2 of the source is damaged"):
        next(steps)


def test_a_batch_that_was_too_large_is_cut() -> None:
    """Refused for its size, a batch of many records is planned as several; what comes behind it is not."""
    built = [Built(0, 39, tuple(range(40))), Built(40, 79, tuple(range(40, 80)))]
    view = memoryview(bytearray(b"".join(each.bytes() for each in built)))
    refused = Append(0, 40, False, 0, view, next(batches.headers(view)))
    steps = list(plan(view, 0, [], NO_LIMITS.after_refusal(refused, refused.end)))
    assert [(step.start, step.end) for step in steps] == [(0, 10), (10, 20), (20, 30), (30, 40), (40, 80)]
