"""Leaving out long stretches: what a copier plans, and what ends it."""

import asyncio
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kmirror_dagster.broker import batches
from kmirror_dagster.broker.batches import RawRecord
from kmirror_dagster.broker.connection import BufferPool
from kmirror_dagster.broker.fetch import FetchedPartition
from kmirror_dagster.errors import KmirrorError, ReplicationError
from kmirror_dagster.offset_map import OffsetMap
from kmirror_dagster.replication import translation
from kmirror_dagster.replication.copier import Copier, Lease, Sequence
from kmirror_dagster.replication.plan import Append, Hole, Skip
from kmirror_dagster.replication.translation import NoStore, Translation
from tests.helpers.translated import KeptOffsets

_LONGEST = 5
STRETCHES = st.lists(st.tuples(st.integers(1, 4), st.integers(0, 12)), min_size=1, max_size=10)


def source_log(stretches: list[tuple[int, int]]) -> tuple[bytes, list[int]]:
    """Batches with gaps between them, and the offsets of their records."""
    data, offsets, base = b"", list[int](), 0
    for count, gap in stretches:
        # each tells its offset; too large to be joined with others
        payloads = [batches.encode_payload(b"%d" % (base + n), b"v" * 5_000) for n in range(count)]
        batch = bytearray(
            batches.encode_batch([RawRecord(n, 100, payload) for n, payload in enumerate(payloads)])
        )
        struct.pack_into(">q", batch, 0, base)
        data += bytes(batch)
        offsets += range(base, base + count)
        base += count + gap
    return data, offsets


def _key(payload: bytes) -> bytes:
    length, at = batches.read_varint(payload, 0)
    return payload[at : at + length]


class Destination:
    """A copier whose steps are done by hand; `log` holds the source offset of each destination offset."""

    def __init__(self) -> None:
        self.kept = KeptOffsets(topic_id="copy")
        self.log: list[int] = []
        self.own()

    def own(self) -> None:
        """Another owner takes over: all it knows is the log's end and the kept map."""
        offsets = self.kept.load("copy").truncated(len(self.log))
        translating = Translation(offsets, _LONGEST, self.kept, "copy")
        self.copier = Copier(
            topic="t",
            partition=0,
            plain=Sequence(1, 0),
            acked=len(self.log),
            topic_id=bytes(16),
            on_failure=lambda _: None,
            fenced_lane=0,
            owner_epoch=1,
            translation=translating,
        )

    def take(self, data: bytes) -> None:
        """Fetch from where the copier wants to go on."""
        copier = self.copier
        wanted = copier.planned_source
        start = next(
            (h.start for h in batches.headers(memoryview(data)) if h.next_offset > wanted), len(data)
        )
        view = memoryview(bytearray(data[start:]))
        end = max((h.next_offset for h in batches.headers(memoryview(data))), default=0)
        copier.take(
            FetchedPartition("t", 0, 0, end, end, 0, (), view, -1),
            wanted,
            Lease(BufferPool(), None, 0, lambda _: None),
        )

    async def do(self, steps: int) -> bool:
        """Do at most so many steps; whether some are left."""
        copier = self.copier
        for _ in range(steps):
            step = copier.head
            if step is None:
                return False
            assert step.start == len(self.log)
            if isinstance(step, Skip):
                await copier.translation.leave_out("t/0", step.start, step.source)
            elif isinstance(step, Append):
                self.log += [
                    int(_key(record.payload)) for record in batches.decode_records(step.view, step.header)
                ]
            else:
                assert not isinstance(step, Hole) or step.end - step.start <= _LONGEST
                self.log += [-1] * (step.end - step.start)
            copier.pop()
            copier.acked = copier.sent = len(self.log)
        return bool(copier.queue)


@given(stretches=STRETCHES, lives=st.lists(st.integers(0, 6), max_size=6))
def test_the_map_fits_the_log_whoever_has_written_it(
    stretches: list[tuple[int, int]], lives: list[int]
) -> None:
    """Owners that end after any number of steps leave a log and a map that agree on each record, in both directions."""
    data, offsets = source_log(stretches)

    async def main() -> Destination:
        destination = Destination()
        for steps in (*lives, 1_000):
            destination.own()
            destination.take(data)
            await destination.do(steps)
            destination.copier.drop_queue()
        return destination

    made = asyncio.run(main())
    assert [offset for offset in made.log if offset >= 0] == offsets
    for place, offset in enumerate(made.log):
        if offset >= 0:
            assert made.kept.offsets.to_source(place) == offset
            assert made.kept.offsets.to_destination(offset) == place
    assert made.copier.planned_source == offsets[-1] + 1
    assert made.copier.progress().lag_records == 0


def test_short_stretches_are_filled_and_exact_offsets_left_alone() -> None:
    """Up to the limit nothing is left out; where nothing may be left out, nothing ever is."""
    data, _ = source_log([(2, _LONGEST), (2, _LONGEST + 1), (1, 0)])
    destination = Destination()
    destination.take(data)
    kinds = [type(entry.step) for entry in destination.copier.queue]
    assert kinds == [Append, Hole, Append, Skip, Append]
    destination.own()
    destination.copier.translation.longest = Translation().longest
    destination.take(data)
    assert [type(entry.step) for entry in destination.copier.queue] == [Append, Hole, Append, Hole, Append]


def test_a_map_of_too_many_runs_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """FAILED with the figure and the setting, not retried, and nothing is stored."""
    monkeypatch.setattr(translation, "MOST_RUNS", 2)
    kept = KeptOffsets(topic_id="copy")
    translating = Translation(OffsetMap(), 5, kept, "copy")

    async def main() -> None:
        await translating.leave_out("t/0", 10, 100)
        await translating.leave_out("t/0", 20, 200)
        with pytest.raises(ReplicationError, match=r"3 runs, more than 2.*max_hole_records") as caught:
            await translating.leave_out("t/0", 30, 300)
        assert not caught.value.retriable

    asyncio.run(main())
    assert (kept.saves, len(kept.offsets)) == (2, 2)


def test_runs_before_the_log_start_are_not_kept() -> None:
    """A log whose head is deleted again and again does not run out of runs."""
    kept = KeptOffsets(topic_id="copy")
    translating = Translation(OffsetMap(), 5, kept, "copy", destination_start=25)

    async def main() -> None:
        for number in range(1, 6):
            await translating.leave_out("t/0", 10 * number, 100 * number)

    asyncio.run(main())
    assert [run.destination for run in kept.offsets.runs] == [20, 30, 40, 50]


def test_a_map_that_cannot_be_stored_ends_the_copy() -> None:
    """What is not known to be stored is not used."""
    translating = Translation(OffsetMap(), 5, NoStore(), "copy")
    with pytest.raises(ReplicationError, match="t/0: the map of its offsets is not stored") as caught:
        asyncio.run(translating.leave_out("t/0", 10, 100))
    assert isinstance(caught.value.__cause__, KmirrorError)
    assert translating.offsets == OffsetMap()


def test_a_hole_through_emptied_batches_counts_as_one() -> None:
    """Compaction leaves a batch's header and none of its records: what lies in front and behind is the same hole."""
    data, _ = source_log([(1, 3), (4, 3), (1, 0)])
    middle = list(batches.headers(memoryview(data)))[1]
    emptied = bytearray(data[middle.start : middle.start + batches.HEADER_BYTES])
    struct.pack_into(">i", emptied, 8, batches.HEADER_BYTES - 12)
    struct.pack_into(">i", emptied, 57, 0)
    struct.pack_into(">I", emptied, 17, batches.crc32c(bytes(emptied[21:])))
    data = data[: middle.start] + bytes(emptied) + data[middle.end :]
    destination = Destination()
    destination.take(data)
    steps = [entry.step for entry in destination.copier.queue]
    assert [type(step) for step in steps] == [Append, Skip, Append]
    assert steps[1] == Skip(1, 11, -1)
