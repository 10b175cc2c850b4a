"""Comparison of committed group offsets."""

from collections.abc import Iterable, Mapping

from kmirror_dagster.broker.admin_types import (
    Answers,
    CommittedOffset,
    GroupDescription,
    GroupListing,
    GroupListings,
    GroupMember,
    GroupType,
    Partition,
)
from kmirror_dagster.errors import AuthorizationError, KmirrorError
from kmirror_dagster.verification.groups import GroupFindings, compare_groups
from kmirror_dagster.verification.ranges import LogEnds

P0, P1 = ("orders", 0), ("orders", 1)
ENDS = {P0: LogEnds(0, 100, 100), P1: LogEnds(10, 20, 20)}


class FakeGroups:
    """Groups of one cluster; each look takes the next of the given offsets, the last one again and again."""

    def __init__(
        self,
        *looks: Mapping[str, Mapping[Partition, int]],
        members: Iterable[str] = (),
        errors: Mapping[str, KmirrorError] | None = None,
    ) -> None:
        self._looks = list(looks)
        self._members = set(members)
        self._errors = errors or {}

    def groups(self) -> GroupListings:
        return GroupListings(tuple(GroupListing(g, GroupType.CLASSIC, "Empty") for g in self._looks[0]))

    def describe_groups(self, groups: Iterable[str]) -> Answers[str, GroupDescription]:
        member = GroupMember("m", "c", "h")
        return Answers(
            {g: GroupDescription(g, "Stable", (member,) if g in self._members else ()) for g in groups}
        )

    def group_offsets(self, groups: Iterable[str]) -> Answers[str, Mapping[Partition, CommittedOffset]]:
        look = self._looks.pop(0) if len(self._looks) > 1 else self._looks[0]
        known = [g for g in groups if g not in self._errors]
        return Answers(
            {g: {p: CommittedOffset(o) for p, o in look.get(g, {}).items()} for g in known},
            {g: self._errors[g] for g in groups if g in self._errors},
        )


def compare(source: FakeGroups, destination: FakeGroups, *, looks: int = 1) -> GroupFindings:
    left = iter(range(looks - 1))
    return compare_groups(
        source,
        destination,
        selects=lambda name: not name.startswith("other"),
        partitions=list(ENDS),
        ends=lambda: ENDS,
        go_on=lambda: next(left, None) is not None,
    )


def test_equal_offsets_are_right() -> None:
    """Equal offsets of selected groups are compared; other groups and other topics are left out."""
    offsets = {"a": {P0: 5, ("elsewhere", 0): 7}, "b": {P1: 15}, "other": {P0: 1}, "c": {("elsewhere", 0): 1}}
    found = compare(FakeGroups(offsets), FakeGroups({"a": {P0: 5}, "b": {P1: 15}}))
    assert (found.compared, found.differences, found.skipped) == (2, [], {})


def test_offsets_are_clamped_to_the_destination() -> None:
    """An offset outside the destination's log has to be its nearest end there."""
    source = FakeGroups({"a": {P0: 150, P1: 3}})
    assert not compare(source, FakeGroups({"a": {P0: 100, P1: 10}})).differences
    found = compare(source, FakeGroups({"a": {P0: 150, P1: 3}}))
    assert [d.detail for d in found.differences] == [
        "group a: expected 100, destination has 150",
        "group a: expected 10, destination has 3",
    ]


def test_a_missing_offset_is_a_difference() -> None:
    """A group that committed at the source only is a difference."""
    found = compare(FakeGroups({"a": {P0: 5}}), FakeGroups({}))
    assert [(d.topic, d.partition) for d in found.differences] == [P0]
    assert found.differences[0].detail == "group a: expected 5, destination has no committed offset"


def test_the_destination_gets_time() -> None:
    """Looking goes on until the offsets agree or the time is up."""
    late = FakeGroups({"a": {P0: 1}}, {"a": {P0: 1}}, {"a": {P0: 5}})
    assert not compare(FakeGroups({"a": {P0: 5}}), late, looks=3).differences
    late = FakeGroups({"a": {P0: 1}}, {"a": {P0: 1}}, {"a": {P0: 5}})
    assert compare(FakeGroups({"a": {P0: 5}}), late, looks=2).differences


def test_a_group_that_goes_on_consuming_is_compared_with_what_it_was() -> None:
    """Between two refreshes the destination holds an offset that the source has left behind already."""
    source = FakeGroups({"a": {P0: 5}}, {"a": {P0: 9}})
    destination = FakeGroups({"a": {P0: 1}}, {"a": {P0: 7}})
    assert not compare(source, destination, looks=2).differences
    assert compare(FakeGroups({"a": {P0: 5}}), FakeGroups({"a": {P0: 7}})).differences


def test_a_group_in_use_at_the_destination_is_skipped() -> None:
    """A group with members at the destination has offsets of its own."""
    found = compare(FakeGroups({"a": {P0: 5}}), FakeGroups({"a": {P0: 1}}, members=["a"]))
    assert (found.differences, found.compared) == ([], 0)
    assert found.skipped == {"a": "has members at the destination"}


def test_a_group_that_cannot_be_read_is_told() -> None:
    """A group whose offsets nobody may read is a difference, never left out silently."""
    denied = AuthorizationError("not allowed to DESCRIBE group a")
    found = compare(FakeGroups({"a": {P0: 5}}, errors={"a": denied}), FakeGroups({}))
    assert [d.detail for d in found.differences] == [f"groups cannot be compared: {denied}"]
