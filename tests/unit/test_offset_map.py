"""The map of translated offsets: exact in both directions, whatever was left out."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kmirror_dagster.offset_map import OffsetMap, Run

# a log as it comes about: records copied, then offsets left out, again and again
STRETCHES = st.lists(st.tuples(st.integers(0, 30), st.integers(0, 50)), max_size=12)


def copied(stretches: list[tuple[int, int]]) -> tuple[OffsetMap, list[int]]:
    """Map of a log, and the source offset of each destination offset."""
    made = OffsetMap()
    pairs: list[int] = []
    source = 0
    for records, gap in stretches:
        pairs += range(source, source + records)
        source += records + gap
        made = made.with_skip(len(pairs), source)
    pairs += range(source, source + 5)
    return made, pairs


@given(stretches=STRETCHES)
def test_every_record_is_found_from_both_sides(stretches: list[tuple[int, int]]) -> None:
    """Each destination offset leads to its source offset, and back."""
    made, pairs = copied(stretches)
    for destination, source in enumerate(pairs):
        assert made.to_source(destination) == source
        assert made.to_destination(source) == destination
        assert not made.left_out(source)


@given(stretches=STRETCHES)
def test_an_offset_that_was_left_out_becomes_that_of_the_next_record(
    stretches: list[tuple[int, int]],
) -> None:
    """A position means the next record to be read, and goes on meaning that one."""
    made, pairs = copied(stretches)
    held = set(pairs)
    for source in range(pairs[-1]):
        expected = next(index for index, offset in enumerate(pairs) if offset >= source)
        assert made.to_destination(source) == expected
        assert made.left_out(source) == (source not in held)


@given(stretches=STRETCHES, cut=st.integers(0, 200))
def test_a_cut_log_keeps_the_map_of_what_is_left(stretches: list[tuple[int, int]], cut: int) -> None:
    """Everything before the cut leads where it led, and what is copied again can be mapped anew."""
    made, pairs = copied(stretches)
    left = made.truncated(cut)
    for destination in range(min(cut, len(pairs))):
        assert left.to_source(destination) == pairs[destination]
    assert all(run.destination <= cut for run in left.runs)


@given(stretches=STRETCHES, start=st.integers(0, 200))
def test_what_lies_before_the_log_start_is_not_needed(stretches: list[tuple[int, int]], start: int) -> None:
    """A map without the runs before the log start is the same from there on, in both directions."""
    made, pairs = copied(stretches)
    short = made.since(start)
    for destination in range(start, len(pairs)):
        assert short.to_source(destination) == pairs[destination]
        assert short.to_destination(pairs[destination]) == destination
    assert len(short) <= len(made)


def test_a_stretch_that_grows_before_it_is_used_replaces_the_former_run() -> None:
    """Left out up to 100, then, with nothing copied in between, up to 150: one run."""
    assert OffsetMap().with_skip(10, 100).with_skip(10, 150) == OffsetMap((Run(10, 150),))


def test_nothing_left_out_is_no_run() -> None:
    """A map of equal offsets stays empty."""
    assert OffsetMap().with_skip(10, 10) == OffsetMap()
    assert not OffsetMap()


def test_a_source_that_goes_back_is_refused() -> None:
    """What the destination holds already cannot be left out."""
    with pytest.raises(ValueError, match="source offset 99 lies before 105"):
        OffsetMap().with_skip(10, 100).with_skip(15, 99)
