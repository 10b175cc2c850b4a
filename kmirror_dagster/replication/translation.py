"""Leaving out long stretches without records, where a mirror is told to (`offsets: translated`).

The map of offsets is stored before anything behind a stretch is appended, by a write that a deposed owner cannot make.
So a log end always stands for one source offset: that of the newest run that begins at or before it. A crash before the
write leaves the former map, by which the stretch is met again; one after it leaves the run, with nothing in it yet.
"""

from dataclasses import dataclass, field
from typing import Protocol

from kmirror_dagster.errors import KmirrorError, ReplicationError
from kmirror_dagster.offset_map import OffsetMap
from kmirror_dagster.replication.plan import Hole

# about 24 bytes each, in one record of the state topic
MOST_RUNS = 8_192
_NEVER = 1 << 63


class OffsetStore(Protocol):
    """Where the map of one mirror partition is kept, for its next owner."""

    @property
    def is_empty(self) -> bool:
        """Whether no map is stored, of whichever copy."""
        ...

    def load(self, destination_topic_id: str | None) -> OffsetMap:
        """The stored map of a copy; an empty one when none is stored, or that of another copy."""
        ...

    async def save(self, destination_topic_id: str | None, offsets: OffsetMap) -> None:
        """Store the map; returns when it is.

        Raises:
            KmirrorError: it is not, or not known to be; this owner's lead is over.
        """
        ...


class NoStore:
    """For copies without a place to keep a map: their offsets are never translated."""

    @property
    def is_empty(self) -> bool:
        """Nothing is."""
        return True

    def load(self, destination_topic_id: str | None) -> OffsetMap:
        """Nothing."""
        del destination_topic_id
        return OffsetMap()

    async def save(self, destination_topic_id: str | None, offsets: OffsetMap) -> None:
        """Refuse."""
        raise KmirrorError(f"no place to keep a map of {len(offsets)} runs of topic {destination_topic_id}")


@dataclass
class Translation:
    """Offsets of one copy that is running.

    Attributes:
        offsets: as stored.
        longest: longest stretch that is filled; none is left out by default.
        destination_topic_id: of the copy.
        destination_start: its log start; runs before it are not kept.
    """

    offsets: OffsetMap = field(default_factory=OffsetMap)
    longest: int = _NEVER
    store: OffsetStore = field(default_factory=NoStore)
    destination_topic_id: str | None = None
    destination_start: int = 0

    def leaves_out(self, hole: Hole) -> bool:
        """Whether a stretch is left out instead of filled."""
        return hole.end - hole.start > self.longest

    async def leave_out(self, name: str, destination: int, source: int) -> None:
        """Begin a new run: the destination's log end stands for a later source offset from now on.

        Raises:
            ReplicationError: it is not stored: nothing may be appended before the partition has been aligned again.
        """
        changed = self.offsets.with_skip(destination, source).since(self.destination_start)
        if len(changed) > MOST_RUNS:
            error = ReplicationError(
                f"{name}: the map of its offsets has {len(changed)} runs, more than {MOST_RUNS}: raise "
                "policies.max_hole_records to leave out fewer stretches"
            )
            error.retriable = False
            raise error
        try:
            await self.store.save(self.destination_topic_id, changed)
        except KmirrorError as error:
            raise ReplicationError(f"{name}: the map of its offsets is not stored: {error}") from error
        self.offsets = changed
