"""Comparison of committed group offsets."""

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from kmirror_dagster.broker.admin_types import (
    Answers,
    CommittedOffset,
    GroupDescription,
    GroupListings,
    Partition,
)
from kmirror_dagster.errors import KmirrorError
from kmirror_dagster.verification.ranges import LogEnds
from kmirror_dagster.verification.report import Difference, DifferenceKind

Committed = Mapping[Partition, CommittedOffset]


class GroupLookup(Protocol):
    """The part of `broker.admin.ClusterAdmin` that reads groups."""

    def groups(self) -> GroupListings:
        """List groups."""
        ...

    def describe_groups(self, groups: Iterable[str]) -> Answers[str, GroupDescription]:
        """Describe groups with their live members."""
        ...

    def group_offsets(self, groups: Iterable[str]) -> Answers[str, Committed]:
        """All committed positions of groups."""
        ...


@dataclass
class GroupFindings:
    """What a comparison of groups found; see `VerifyReport`."""

    compared: int = 0
    skipped: dict[str, str] = field(default_factory=lambda: dict[str, str]())
    differences: list[Difference] = field(default_factory=lambda: list[Difference]())


class GroupComparison:
    """Decides whether committed offsets are those they should be, look by look. Pure.

    The destination's offset is right when it is the source's, clamped to the destination's log. A group that
    goes on consuming at the source commits between two refreshes of the mirror, so any offset within what the
    source showed since the first look is right as well.
    """

    def __init__(self) -> None:
        self._range: dict[tuple[str, Partition], tuple[int, int]] = {}
        self._wrong: dict[tuple[str, Partition], int | None] = {}

    @property
    def is_settled(self) -> bool:
        """Whether every offset was right at the newest look."""
        return not self._wrong

    @property
    def compared(self) -> int:
        """Offsets compared: one per group and partition."""
        return len(self._range)

    def look(
        self,
        source: Mapping[str, Committed],
        destination: Mapping[str, Committed],
        ends: Mapping[Partition, LogEnds],
    ) -> None:
        """Take one look at both sides.

        Args:
            source: committed offsets of the groups to compare.
            destination: those of the same groups there.
            ends: the destination's log ends of the partitions to compare; others are left out.
        """
        self._wrong = {}
        for group, positions in source.items():
            for partition in positions.keys() & ends.keys():
                expected = _clamp(positions[partition].offset, ends[partition])
                low, high = self._range.get((group, partition), (expected, expected))
                low, high = min(low, expected), max(high, expected)
                self._range[group, partition] = low, high
                there = destination.get(group, {}).get(partition)
                if there is None or not low <= there.offset <= high:
                    self._wrong[group, partition] = there.offset if there is not None else None

    def differences(self) -> list[Difference]:
        """Offsets that were wrong at the newest look."""
        found: list[Difference] = []
        for (group, (topic, partition)), offset in sorted(self._wrong.items()):
            low, high = self._range[group, (topic, partition)]
            expected = str(high) if low == high else f"{low} to {high}"
            actual = "no committed offset" if offset is None else str(offset)
            detail = f"group {group}: expected {expected}, destination has {actual}"
            found.append(_difference(topic, partition, detail))
        return found


def compare_groups(
    source: GroupLookup,
    destination: GroupLookup,
    *,
    selects: Callable[[str], bool],
    partitions: Collection[Partition],
    ends: Callable[[], Mapping[Partition, LogEnds]],
    go_on: Callable[[], bool],
) -> GroupFindings:
    """Compare the committed offsets of the selected groups until they agree.

    Args:
        source: the source's groups.
        destination: the destination's groups.
        selects: which groups the mirror covers.
        partitions: partitions to compare.
        ends: looks up the destination's current log ends of these partitions.
        go_on: waits a little before another look; False when the time is up.

    Raises:
        KmirrorError: when a cluster cannot be asked.
    """
    findings = GroupFindings()
    wanted = frozenset(partitions)
    comparison = GroupComparison()
    while True:
        errors: dict[str, KmirrorError] = {}
        listed = source.groups()
        names = sorted(group.group for group in listed.groups if selects(group.group))
        positions = source.group_offsets(names)
        covered = {
            group: committed for group, committed in positions.values.items() if wanted & committed.keys()
        }
        described = destination.describe_groups(covered)
        findings.skipped = {
            group: "has members at the destination"
            for group, description in described.values.items()
            if description.members
        }
        compared = {group: committed for group, committed in covered.items() if group not in findings.skipped}
        there = destination.group_offsets(compared)
        for answers in (positions, described, there):
            errors.update(answers.errors)
        known = {group: committed for group, committed in compared.items() if group not in errors}
        comparison.look(known, there.values, ends())
        failures = [*listed.errors, *errors.values()]
        if (comparison.is_settled and not failures) or not go_on():
            break
    findings.compared = comparison.compared
    findings.differences = comparison.differences() + [
        _difference("-", -1, f"groups cannot be compared: {error}") for error in failures
    ]
    return findings


def _clamp(offset: int, ends: LogEnds) -> int:
    return max(ends.start, min(offset, ends.end))


def _difference(topic: str, partition: int, detail: str) -> Difference:
    return Difference(kind=DifferenceKind.GROUP_OFFSET, topic=topic, partition=partition, detail=detail)
