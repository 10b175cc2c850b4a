"""Positions and log starts where offsets are translated."""

from hypothesis import given
from hypothesis import strategies as st

from kmirror_dagster.broker.admin_types import CommittedOffset
from kmirror_dagster.metadata.groups import Bounds, GroupMemory, plan_group, remember
from kmirror_dagster.metadata.offsets import translated_positions, with_translated_starts
from kmirror_dagster.metadata.snapshot import ClusterSnapshot
from kmirror_dagster.offset_map import OffsetMap, Run

TP = ("t", 0)
MAP = OffsetMap((Run(10, 110), Run(50, 1_150)))


def positions(offset: int) -> dict[tuple[str, int], CommittedOffset]:
    return {TP: CommittedOffset(offset, "kept")}


def test_a_position_goes_on_meaning_the_next_record() -> None:
    """Before, in and behind what was left out; metadata is kept."""
    bounds = {TP: Bounds(0, 60)}
    for source, destination in ((4, 4), (10, 10), (70, 10), (110, 10), (112, 12), (1_000, 50), (1_155, 55)):
        found = translated_positions(positions(source), {TP: MAP}, bounds)
        assert found == {TP: CommittedOffset(destination, "kept")}


def test_what_is_not_translated_is_left_as_it_is() -> None:
    """Partitions without a map, and positions that are none."""
    other = {("t", 1): CommittedOffset(7), TP: CommittedOffset(-1)}
    assert translated_positions(other, {TP: MAP}, {}) == other
    assert translated_positions(other, {}, {}) == other
    # not mirrored at the moment: no bounds to keep it within
    assert translated_positions(positions(5), {TP: MAP}, {}) == {}


@given(st.lists(st.tuples(st.integers(0, 20), st.integers(0, 40)), max_size=8), st.integers(0, 400))
def test_a_position_never_goes_back_because_more_is_left_out(
    stretches: list[tuple[int, int]], committed: int
) -> None:
    """A group that stays where it is is never taken for one that was reset, whatever is copied and left out."""
    made, end, reached = OffsetMap((Run(0, 1),)), 0, 1
    memory = GroupMemory()
    last = -1
    for records, gap in stretches:
        end += records
        reached += records + gap
        made = made.with_skip(end, reached)
        for log_end in (end, end + 1):
            found = translated_positions(positions(committed), {TP: made}, {TP: Bounds(0, log_end)})
            assert found[TP].offset >= last
            last = found[TP].offset
            memory = remember(memory, found, {})
            assert not memory.going_back
            change = plan_group(
                "g", source=found, destination={}, bounds={TP: Bounds(0, log_end)}, memory=memory
            )
            assert change is not None
            assert change.offsets[TP].offset <= log_end
            end = log_end
        reached += 1


def test_a_log_start_is_cut_to_at_the_destinations_offset() -> None:
    """What the source has deleted at its head is deleted at the destination, and not one record more."""
    source = ClusterSnapshot(starts={TP: 112, ("t", 1): 112})
    assert with_translated_starts(source, {TP: MAP}).starts == {TP: 12, ("t", 1): 112}
    assert with_translated_starts(source, {}) is source
