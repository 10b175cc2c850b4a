"""Consumer group positions: the destination's equal the source's, within what the destination has. Pure.

Rules, for partitions that are MIRRORING:

- position = max(destination log start, min(source position, destination log end)); at a tip that is copied:
  exact.
- what the source has not committed (no commit at all, or -1) is not committed here either; what was committed
  here before stays.
- a position here goes back only when the source group's did, or when it lies behind the destination's log
  end. A position here above the source's that carries a leader epoch was committed by a consumer of the
  destination: kept, unless the source group is seen going back. One without was put there by the mirror, so
  the source did go back.
- the committer's metadata is kept; the leader epoch is not: it is the source's and would mislead the
  destination's validation (KIP-320).
- a share group's position is the start of what it has still to deliver, in each partition (KIP-932). Nothing
  tells who put it there, so it goes back only when the source's is seen going back.
- positions expire where nobody consumes, so unchanged ones are committed again once in a while.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from kmirror_dagster.broker.admin_types import (
    OFFSET_GROUP_TYPES,
    CommittedOffset,
    GroupListing,
    GroupType,
    Partition,
)

Offsets = Mapping[Partition, CommittedOffset]

SHARE_TYPES = frozenset({GroupType.SHARE})
MIRRORED_TYPES = OFFSET_GROUP_TYPES | SHARE_TYPES

# States in which nobody consumes. "Unknown": a broker before 2.6, which does not tell; it refuses to commit
# for a group with members, as all do.
_VACANT_STATES = frozenset({"Empty", "Dead", "Unknown"})


@dataclass(frozen=True)
class Bounds:
    """What the destination log of a partition holds: positions are kept within [start, end]."""

    start: int
    end: int


@dataclass(frozen=True)
class GroupChange:
    """Positions to commit for one group; `kept_alive` of them are unchanged and only committed again."""

    group: str
    offsets: Offsets
    kept_alive: int = 0


@dataclass(frozen=True)
class GroupMemory:
    """What the refreshes before have seen of one group.

    Attributes:
        source: newest source positions.
        going_back: partitions in which the source went back and the destination has not followed yet.
    """

    source: Mapping[Partition, int] = field(default_factory=dict[Partition, int])
    going_back: frozenset[Partition] = frozenset()


def select_groups(
    listings: tuple[GroupListing, ...],
    selects: Callable[[str], bool],
    types: frozenset[GroupType] = OFFSET_GROUP_TYPES,
) -> tuple[str, ...]:
    """Choose groups by name and type."""
    return tuple(sorted({item.group for item in listings if item.type in types and selects(item.group)}))


def passed_over(listings: tuple[GroupListing, ...], selects: Callable[[str], bool]) -> tuple[str, ...]:
    """What is said about groups of a type whose positions are not mirrored."""
    return tuple(
        f"group {item.group} is a {item.type} group: its positions are not mirrored"
        for item in sorted(listings, key=lambda item: item.group)
        if item.type not in MIRRORED_TYPES and selects(item.group)
    )


def clamp(offset: int, bounds: Bounds) -> int:
    """Position within what the destination has."""
    return max(bounds.start, min(offset, bounds.end))


def remember(memory: GroupMemory, source: Offsets, destination: Offsets) -> GroupMemory:
    """Take in the source positions of this refresh."""
    positions = {key: committed.offset for key, committed in source.items() if committed.offset >= 0}
    back = {key for key, offset in positions.items() if offset < memory.source.get(key, -1)}
    waiting = {
        key
        for key in memory.going_back
        if key in positions and key in destination and destination[key].offset > positions[key]
    }
    return GroupMemory(positions, frozenset(back | waiting))


def plan_group(
    group: str,
    *,
    source: Offsets,
    destination: Offsets,
    bounds: Mapping[Partition, Bounds],
    memory: GroupMemory,
    keep_alive: bool = False,
) -> GroupChange | None:
    """Positions to commit at the destination, None when it is in step.

    Args:
        group: group id.
        source: committed positions at the source.
        destination: committed positions at the destination.
        bounds: what the destination has, of partitions that are MIRRORING only; others are left alone.
        memory: as `remember` returned it for this refresh.
        keep_alive: commit unchanged positions as well.
    """
    offsets: dict[Partition, CommittedOffset] = {}
    unchanged: dict[Partition, CommittedOffset] = {}
    for key, committed in source.items():
        if committed.offset < 0 or key not in bounds:
            continue
        wanted = CommittedOffset(clamp(committed.offset, bounds[key]), committed.metadata or None)
        present = destination.get(key)
        if present is None or present.offset < 0:
            offsets[key] = wanted
        elif _may_replace(present, committed, wanted, bounds[key], key in memory.going_back):
            if present.offset != wanted.offset or (present.metadata or None) != wanted.metadata:
                offsets[key] = wanted
            else:
                unchanged[key] = wanted
    if keep_alive and unchanged:
        return GroupChange(group, offsets | unchanged, len(unchanged))
    return GroupChange(group, offsets) if offsets else None


def _may_replace(
    present: CommittedOffset,
    committed: CommittedOffset,
    wanted: CommittedOffset,
    bounds: Bounds,
    going_back: bool,
) -> bool:
    if wanted.offset >= present.offset or present.offset > bounds.end:
        return True
    if committed.offset >= present.offset:
        return False  # only the copy lags behind: the position is right as soon as the copy is
    return going_back or present.leader_epoch is None


def occupied(listing: GroupListing | None, types: frozenset[GroupType] = OFFSET_GROUP_TYPES) -> str | None:
    """Why a destination group is left alone, None when nobody consumes with it."""
    if listing is None:
        return None
    if listing.type not in types:
        return f"group {listing.group} is a {listing.type} group at the destination: left alone"
    if listing.state in _VACANT_STATES:
        return None
    return f"group {listing.group} is in use at the destination ({listing.state}): left alone"


def live_part(change: GroupChange, mirroring: Callable[[Partition], bool]) -> GroupChange | None:
    """The part of a change whose partitions are still MIRRORING; a stop may have come in between."""
    offsets = {key: value for key, value in change.offsets.items() if mirroring(key)}
    if not offsets:
        return None
    dropped = len(change.offsets) - len(offsets)
    return GroupChange(change.group, offsets, max(0, change.kept_alive - dropped))
