"""Planning of consumer group positions."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kmirror_dagster.broker.admin_types import (
    CommittedOffset,
    GroupListing,
    GroupType,
)
from kmirror_dagster.metadata.groups import (
    SHARE_TYPES,
    Bounds,
    GroupChange,
    GroupMemory,
    clamp,
    live_part,
    occupied,
    passed_over,
    plan_group,
    remember,
    select_groups,
)

KEY = ("t", 0)
OFFSETS = st.integers(0, 60)
BOUNDS = st.tuples(OFFSETS, OFFSETS).map(lambda pair: Bounds(min(pair), max(pair)))
COMMITS = st.builds(
    CommittedOffset,
    st.integers(-1, 60),
    st.sampled_from([None, "", "text"]),
    st.sampled_from([None, 3]),
)
POSITIONS = st.dictionaries(st.tuples(st.just("t"), st.integers(0, 3)), COMMITS)
PARTITION_BOUNDS = st.dictionaries(st.tuples(st.just("t"), st.integers(0, 3)), BOUNDS)


def plan_one(
    source: CommittedOffset | None,
    destination: CommittedOffset | None,
    bounds: Bounds,
    memory: GroupMemory | None = None,
) -> CommittedOffset | None:
    """Position planned for one partition."""
    change = plan_group(
        "g",
        source={KEY: source} if source else {},
        destination={KEY: destination} if destination else {},
        bounds={KEY: bounds},
        memory=memory or GroupMemory(),
    )
    return change.offsets[KEY] if change else None


@given(source=POSITIONS, destination=POSITIONS, bounds=PARTITION_BOUNDS, before=POSITIONS)
def test_a_plan_applied_leaves_nothing_to_do(
    source: dict[tuple[str, int], CommittedOffset],
    destination: dict[tuple[str, int], CommittedOffset],
    bounds: dict[tuple[str, int], Bounds],
    before: dict[tuple[str, int], CommittedOffset],
) -> None:
    """Planning again after committing is empty."""
    memory = remember(GroupMemory({k: v.offset for k, v in before.items()}), source, destination)
    first = plan_group("g", source=source, destination=destination, bounds=bounds, memory=memory)
    after = {**destination, **(first.offsets if first else {})}

    again = remember(memory, source, after)
    assert plan_group("g", source=source, destination=after, bounds=bounds, memory=again) is None


@given(source=POSITIONS, destination=POSITIONS, bounds=PARTITION_BOUNDS)
def test_positions_stay_within_the_log_of_mirroring_partitions(
    source: dict[tuple[str, int], CommittedOffset],
    destination: dict[tuple[str, int], CommittedOffset],
    bounds: dict[tuple[str, int], Bounds],
) -> None:
    """Whatever is committed lies in [start, end], is of a mirroring partition, and carries no leader epoch."""
    change = plan_group("g", source=source, destination=destination, bounds=bounds, memory=GroupMemory())
    for key, committed in change.offsets.items() if change else ():
        assert bounds[key].start <= committed.offset <= bounds[key].end
        assert committed.leader_epoch is None
        assert source[key].offset >= 0


@given(offset=OFFSETS, bounds=BOUNDS)
def test_clamping_keeps_what_fits_and_moves_the_rest_to_the_nearest_end(offset: int, bounds: Bounds) -> None:
    """Inside nothing changes; clamping twice is clamping once."""
    clamped = clamp(offset, bounds)
    assert clamped == clamp(clamped, bounds)
    assert (clamped == offset) is (bounds.start <= offset <= bounds.end)


@pytest.mark.case("C26")
@given(
    steps=st.lists(st.tuples(st.integers(0, 20), st.integers(0, 20)), min_size=1, max_size=20),
    restarts=st.frozensets(st.integers(0, 19)),
)
def test_positions_are_exact_and_never_fall_back(
    steps: list[tuple[int, int]], restarts: frozenset[int]
) -> None:
    """While source and copy only grow, the position is min(source, copy's end) at every refresh, over restarts."""
    source = end = previous = 0
    destination: dict[tuple[str, int], CommittedOffset] = {}
    memory = GroupMemory()
    for index, (read, copied) in enumerate(steps):
        source, end = source + read, end + copied
        committed = {KEY: CommittedOffset(source)}
        memory = remember(GroupMemory() if index in restarts else memory, committed, destination)
        bounds = {KEY: Bounds(0, end)}
        change = plan_group("g", source=committed, destination=destination, bounds=bounds, memory=memory)
        destination = {**destination, **(change.offsets if change else {})}
        assert destination[KEY].offset == min(source, end) >= previous
        previous = destination[KEY].offset


@pytest.mark.case("C24")
def test_zero_minus_one_and_no_commit_are_told_apart() -> None:
    """0 is a position; -1 and no commit are none, and change nothing that is there."""
    bounds = Bounds(0, 10)
    there = CommittedOffset(5)

    assert plan_one(CommittedOffset(0), None, bounds) == CommittedOffset(0)
    assert plan_one(CommittedOffset(-1), None, bounds) is None
    assert plan_one(None, None, bounds) is None
    assert plan_one(CommittedOffset(-1), there, bounds) is None
    assert plan_one(None, there, bounds) is None


@pytest.mark.case("C23")
def test_an_expired_source_partition_is_at_the_copy_s_end() -> None:
    """All 100 records expired and the group at 100: start, end and position are 100, without a change later."""
    bounds = Bounds(100, 100)

    assert plan_one(CommittedOffset(100), None, bounds) == CommittedOffset(100)
    assert plan_one(CommittedOffset(100), CommittedOffset(100), bounds) is None


def test_a_position_goes_back_only_with_the_source() -> None:
    """A mirror's own position follows a reset; a destination consumer's is kept unless the reset is seen."""
    bounds = Bounds(0, 100)
    back = remember(GroupMemory({KEY: 50}), {KEY: CommittedOffset(10)}, {KEY: CommittedOffset(60, None, 4)})

    assert plan_one(CommittedOffset(10), CommittedOffset(50), bounds) == CommittedOffset(10)
    assert plan_one(CommittedOffset(10), CommittedOffset(60, None, 4), bounds) is None
    assert plan_one(CommittedOffset(10), CommittedOffset(60, None, 4), bounds, back) == CommittedOffset(10)


def test_a_reset_is_not_forgotten_while_it_could_not_be_followed() -> None:
    """A source that went back while the group was in use here is followed when it is not any more."""
    busy = {KEY: CommittedOffset(60, None, 4)}
    memory = remember(GroupMemory({KEY: 50}), {KEY: CommittedOffset(10)}, busy)

    memory = remember(memory, {KEY: CommittedOffset(10)}, busy)

    assert memory.going_back == {KEY}
    assert remember(memory, {KEY: CommittedOffset(10)}, {KEY: CommittedOffset(10)}).going_back == frozenset()


def test_a_position_behind_the_copy_s_end_is_brought_back() -> None:
    """After a copy was made anew no position may point behind its end."""
    assert plan_one(CommittedOffset(90), CommittedOffset(80), Bounds(0, 30)) == CommittedOffset(30)


@pytest.mark.case("E5")
def test_metadata_is_kept_and_compared() -> None:
    """A changed text at an unchanged offset is committed."""
    bounds = Bounds(0, 10)

    assert plan_one(CommittedOffset(5, "new", 3), CommittedOffset(5, "old"), bounds) == CommittedOffset(
        5, "new"
    )
    assert plan_one(CommittedOffset(5, "", 3), CommittedOffset(5), bounds) is None


@pytest.mark.case("E7")
def test_keeping_alive_commits_unchanged_positions() -> None:
    """Positions that are in step are committed again when it is time."""
    offsets = {KEY: CommittedOffset(5)}

    change = plan_group(
        "g",
        source=offsets,
        destination=offsets,
        bounds={KEY: Bounds(0, 9)},
        memory=GroupMemory(),
        keep_alive=True,
    )

    assert change is not None
    assert (change.offsets, change.kept_alive) == (offsets, 1)


@pytest.mark.case("E2")
def test_groups_are_chosen_by_name_and_type() -> None:
    """Share groups are apart, streams groups are named and never altered; the filter has its say on all."""
    listings = tuple(
        GroupListing(name, kind, "Empty")
        for name, kind in (
            ("a", GroupType.CLASSIC),
            ("b", GroupType.CONSUMER),
            ("c", GroupType.SHARE),
            ("d", GroupType.STREAMS),
            ("x", GroupType.SHARE),
        )
    )

    def selects(name: str) -> bool:
        return name != "x"

    assert select_groups(listings, selects) == ("a", "b")
    assert select_groups(listings, selects, SHARE_TYPES) == ("c",)
    assert passed_over(listings, selects) == ("group d is a streams group: its positions are not mirrored",)


def test_a_group_in_use_is_occupied() -> None:
    """Empty and unlisted groups may be written; those in use or of another type not."""

    def reason(state: str, kind: GroupType = GroupType.CLASSIC) -> str:
        return occupied(GroupListing("g", kind, state)) or ""

    assert occupied(None) is None
    assert reason("Empty") == reason("Dead") == reason("Unknown") == ""
    assert "(Stable)" in reason("Stable")
    assert "(PreparingRebalance)" in reason("PreparingRebalance", GroupType.CONSUMER)
    assert "share group" in reason("Empty", GroupType.SHARE)
    assert occupied(GroupListing("g", GroupType.SHARE, "Empty"), SHARE_TYPES) is None
    assert "classic group" in (occupied(GroupListing("g", GroupType.CLASSIC, "Empty"), SHARE_TYPES) or "")


def test_a_share_group_goes_back_only_with_the_source() -> None:
    """A position of which nobody knows who put it there is not taken back, unless the source's was seen going back."""
    bounds = {KEY: Bounds(0, 100)}

    def planned(memory: GroupMemory) -> GroupChange | None:
        source, there = {KEY: CommittedOffset(5, None, 0)}, {KEY: CommittedOffset(9, None, 0)}
        memory = remember(memory, source, there)
        return plan_group("g", source=source, destination=there, bounds=bounds, memory=memory)

    assert planned(GroupMemory()) is None
    assert planned(GroupMemory({KEY: 9})) == GroupChange("g", {KEY: CommittedOffset(5)})


def test_partitions_stopped_meanwhile_drop_out_of_a_change() -> None:
    """Right before committing, what is no longer MIRRORING is left out."""
    change = plan_group(
        "g",
        source={("t", 0): CommittedOffset(1), ("t", 1): CommittedOffset(1)},
        destination={},
        bounds={("t", 0): Bounds(0, 5), ("t", 1): Bounds(0, 5)},
        memory=GroupMemory(),
    )
    assert change is not None

    live = live_part(change, lambda key: key == ("t", 1))

    assert live is not None
    assert set(live.offsets) == {("t", 1)}
    assert live_part(change, lambda _key: False) is None
