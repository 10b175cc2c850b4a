"""Change feed of partition states: what a follower with a cursor has not seen yet.

A cursor names the state topic and one offset per coordinator partition, so it is valid at every node. The log
kept here is compacted like the topic itself: the newest change of a partition stays, older ones go when there
are many.
"""

import base64
import heapq
import json
from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass

from kmirror_dagster.coordination.models import ChangeFeed, StateChange

# Removals are kept this long, like the topic keeps its tombstones (delete.retention.ms, a day by default); a
# cursor that is older may have missed one, so it starts anew.
REMOVAL_RETENTION_MS = 24 * 3_600_000
_SLACK = 256


@dataclass(frozen=True)
class _Entry:
    offset: int
    at_ms: int
    change: StateChange


@dataclass(frozen=True)
class Cursor:
    """Where a follower is.

    Attributes:
        topic_id: id of the state topic that the offsets are of.
        read_ms: when it was given out.
        offsets: next offset to read, per coordinator partition.
    """

    topic_id: str
    read_ms: int
    offsets: tuple[int, ...]

    def encode(self) -> str:
        """Opaque text of this cursor."""
        document = json.dumps([self.topic_id, self.read_ms, list(self.offsets)], separators=(",", ":"))
        return base64.urlsafe_b64encode(document.encode()).decode()

    @classmethod
    def decode(cls, text: str) -> "Cursor | None":
        """Cursor from its text; None when it is none."""
        try:
            topic_id, read_ms, offsets = json.loads(base64.urlsafe_b64decode(text.encode()))
            return cls(str(topic_id), int(read_ms), tuple(int(offset) for offset in offsets))
        except (ValueError, TypeError):
            return None


class ChangeLog:
    """Changes of one coordinator partition, by offset."""

    def __init__(self) -> None:
        self._entries: list[_Entry] = []
        self._keys: set[tuple[str, str, int]] = set()

    def append(self, offset: int, at_ms: int, change: StateChange) -> None:
        """Add the change stored at an offset; offsets only grow."""
        self._entries.append(_Entry(offset, at_ms, change))
        self._keys.add((change.mirror, change.topic, change.partition))
        if len(self._entries) > 2 * len(self._keys) + _SLACK:
            self._compact(at_ms)

    def behind(self, offset: int) -> Iterator[_Entry]:
        """Entries at and behind an offset, in order."""
        first = bisect_left(self._entries, offset, key=lambda entry: entry.offset)
        for index in range(first, len(self._entries)):
            yield self._entries[index]

    def _compact(self, now_ms: int) -> None:
        newest = {(e.change.mirror, e.change.topic, e.change.partition): e for e in self._entries}
        kept = [
            entry
            for entry in newest.values()
            if not (entry.change.removed and now_ms - entry.at_ms > REMOVAL_RETENTION_MS)
        ]
        self._entries = sorted(kept, key=lambda entry: entry.offset)
        self._keys = {(e.change.mirror, e.change.topic, e.change.partition) for e in kept}


def read_changes(
    logs: list[ChangeLog],
    ends: list[int],
    *,
    topic_id: str,
    cursor: str | None,
    mirror: str | None,
    limit: int,
    now_ms: int,
) -> ChangeFeed:
    """Read what is behind a cursor, oldest first over all coordinator partitions.

    Args:
        logs: change log per coordinator partition.
        ends: next offset to be stored there, per coordinator partition.
        topic_id: id of the state topic.
        cursor: text given out earlier, None to begin with the current state.
        mirror: only changes of this mirror; None for all.
        limit: most changes to return, at least 1.
        now_ms: epoch milliseconds.
    """
    since = Cursor.decode(cursor) if cursor else None
    valid = (
        since is not None
        and since.topic_id == topic_id
        and len(since.offsets) == len(logs)
        and now_ms - since.read_ms <= REMOVAL_RETENTION_MS
    )
    offsets = list(since.offsets) if since is not None and valid else [0] * len(logs)

    def entries(index: int) -> Iterator[tuple[int, int, _Entry]]:
        return ((entry.at_ms, index, entry) for entry in logs[index].behind(offsets[index]))

    changes: list[StateChange] = []
    more = False
    # equal times are told apart by the partition; within one partition the offset's order is kept by merge
    for _, index, entry in heapq.merge(*(entries(i) for i in range(len(logs))), key=lambda item: item[:2]):
        if mirror is None or entry.change.mirror == mirror:
            if len(changes) >= limit:
                more = True
                break
            changes.append(entry.change)
        offsets[index] = entry.offset + 1
    if not more:
        # a cursor from another node may be ahead of this one: it must not go back
        offsets = [max(offset, end) for offset, end in zip(offsets, ends, strict=True)]
    return ChangeFeed(
        changes=changes,
        cursor=Cursor(topic_id, now_ms, tuple(offsets)).encode(),
        reset=cursor is not None and not valid,
        more=more,
    )
