"""Offsets of the source as the destination has them, where a mirror translates them.

A map is used with log ends only when it is at least as new: a run is stored before its first record is appended, so
ends are read first, then where the state topic ends, and then the map is awaited up to there.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Protocol

from kmirror_dagster.broker.admin_types import CommittedOffset, OffsetKind, Partition
from kmirror_dagster.metadata.groups import Bounds, Offsets, clamp
from kmirror_dagster.metadata.snapshot import ClusterSnapshot
from kmirror_dagster.offset_map import OffsetMap
from kmirror_dagster.records import STATE_TOPIC

if TYPE_CHECKING:
    from kmirror_dagster.metadata.context import RefreshContext

Maps = Mapping[Partition, OffsetMap]


class OffsetMaps(Protocol):
    """Maps of a mirror as the state topic has them."""

    @property
    def coordinator_partitions(self) -> int:
        """Partitions of the state topic."""
        ...

    @property
    def is_empty(self) -> bool:
        """Whether no map is known of at the moment."""
        ...

    def at_least(self, ends: Mapping[int, int], timeout_s: float) -> Maps:
        """All maps, once everything below those ends of the state topic has been read.

        Raises:
            DeadlineError: when it was not read in time.
        """
        ...


def current_maps(context: "RefreshContext") -> Maps:
    """Maps that are at least as new as whatever was read of the destination before.

    Raises:
        KmirrorError: when the state topic's ends cannot be read.
    """
    stored, policies = context.offset_maps, context.settings.policies
    if stored is None or (policies.never_translates and stored.is_empty):
        return {}
    partitions = [(STATE_TOPIC, number) for number in range(stored.coordinator_partitions)]
    listed = context.destination.list_offsets(
        partitions, OffsetKind.LATEST, read_committed=True, timeout_s=context.timeout()
    )
    for error in listed.errors.values():
        raise error
    ends = {number: found.offset for (_, number), found in listed.values.items()}
    return stored.at_least(ends, context.timeout())


def with_translated_starts(source: ClusterSnapshot, maps: Maps) -> ClusterSnapshot:
    """The source as seen from the destination: log starts have the destination's offsets."""
    if not maps:
        return source
    starts = {
        key: maps[key].to_destination(start) if key in maps else start for key, start in source.starts.items()
    }
    return replace(source, starts=starts)


def translated_positions(source: Offsets, maps: Maps, bounds: Mapping[Partition, Bounds]) -> Offsets:
    """Committed source positions as positions of the destination.

    One beyond what is copied becomes the destination's end: what lies in between may yet be left out. Partitions that
    are translated and not in `bounds` are left out.
    """
    if maps.keys().isdisjoint(source):
        return source
    found: dict[Partition, CommittedOffset] = {}
    for key, committed in source.items():
        if key not in maps or committed.offset < 0:
            found[key] = committed
        elif key in bounds:
            found[key] = replace(
                committed, offset=clamp(maps[key].to_destination(committed.offset), bounds[key])
            )
    return found
