"""Copies whose offsets are translated: where their maps are kept in tests, and whether they are exact."""

import asyncio
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from kmirror_dagster.errors import NotLeaderError
from kmirror_dagster.offset_map import OffsetMap
from tests.helpers.comparison import RawRead, consume_all, log_ranges, raw_records
from tests.helpers.kafka import READ_COMMITTED, READ_UNCOMMITTED, ReadRecord


@dataclass
class KeptOffsets:
    """Keeps the map of one partition as the state topic does: for its next owner (`OffsetStore`).

    Attributes:
        hit: set when the `crash_at`th save is reached.
        crash_at: save that does not return, before or after the map is kept; 0: none.
        after: after it.
    """

    topic_id: str | None = None
    offsets: OffsetMap = field(default_factory=OffsetMap)
    saves: int = 0
    crash_at: int = 0
    after: bool = False
    hit: threading.Event = field(default_factory=threading.Event)

    @property
    def is_empty(self) -> bool:
        """Whether nothing was ever kept."""
        return self.saves == 0

    def load(self, destination_topic_id: str | None) -> OffsetMap:
        """What is kept of a copy."""
        return self.offsets if destination_topic_id == self.topic_id else OffsetMap()

    async def save(self, destination_topic_id: str | None, offsets: OffsetMap) -> None:
        """Keep a map."""
        reached = self.saves + 1 == self.crash_at and not self.hit.is_set()
        if reached and not self.after:
            await self._crash()
        self.topic_id, self.offsets = destination_topic_id, offsets
        self.saves += 1
        if reached:
            await self._crash()

    async def _crash(self) -> None:
        self.hit.set()
        await asyncio.sleep(3600)
        raise NotLeaderError("crashed")


def translated_differences(
    source: str, destination: str, topic: str, maps: Mapping[int, OffsetMap]
) -> dict[int, str]:
    """What is not the same, by partition, once the map is applied: log ranges, and records at both isolation levels."""
    partitions = list(maps)
    theirs, ours = log_ranges(source, topic, partitions), log_ranges(destination, topic, partitions)
    found: dict[int, str] = {}
    for partition, offsets in maps.items():
        wanted = tuple(map(offsets.to_destination, theirs[partition]))
        if wanted != ours[partition]:
            found[partition] = f"range {theirs[partition]} became {ours[partition]} instead of {wanted}"
    raw = raw_records(source, topic, theirs), raw_records(destination, topic, ours)
    _compare(found, maps, *raw)
    for isolation in (READ_COMMITTED, READ_UNCOMMITTED):
        expected = consume_all(source, topic, partitions, isolation)
        _compare(found, maps, expected, consume_all(destination, topic, partitions, isolation))
    return found


def _compare(
    found: dict[int, str],
    maps: Mapping[int, OffsetMap],
    theirs: Mapping[int, Sequence[ReadRecord]] | Mapping[int, Sequence[RawRead]],
    ours: Mapping[int, Sequence[ReadRecord]] | Mapping[int, Sequence[RawRead]],
) -> None:
    for partition, offsets in maps.items():
        expected = [replace(each, offset=offsets.to_destination(each.offset)) for each in theirs[partition]]
        if expected != list(ours[partition]):
            found.setdefault(partition, f"{len(expected)} records became {len(ours[partition])} others")
        elif any(
            offsets.to_source(our.offset) != their.offset
            for our, their in zip(ours[partition], theirs[partition], strict=True)
        ):
            found.setdefault(partition, "an offset does not lead back")
