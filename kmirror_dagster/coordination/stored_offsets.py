"""Maps of translated offsets as stored: one record a mirror partition, written by whoever leads it."""

import asyncio
from collections.abc import Mapping

from kmirror_dagster.coordination.keys import PartitionKey
from kmirror_dagster.coordination.live import LivePartition
from kmirror_dagster.coordination.shard import Shard, Write
from kmirror_dagster.coordination.view import StateView
from kmirror_dagster.errors import DeadlineError
from kmirror_dagster.offset_map import OffsetMap
from kmirror_dagster.records import OffsetMapRecord
from kmirror_dagster.recovery.positions import same_topic_id


def stored_offsets(view: StateView, name: PartitionKey) -> OffsetMap:
    """Map of a partition's copy; an empty one when its offsets are the source's."""
    record = view.offset_maps.get(name)
    if record is None:
        return OffsetMap()
    topic = view.topic(name)
    known = topic.destination_topic_id if topic is not None else None
    return record.offsets if same_topic_id(record.destination_topic_id, known) else OffsetMap()


class LedOffsets:
    """Map of one partition led here (`replication.translation.OffsetStore`).

    Args:
        name: the partition.
        view: hot copy of the state topic, which reads this leader's writes at once.
        shard: authority over it.
        live: takes a write that is under way, which has to end before the partition is aligned again.
    """

    def __init__(self, name: PartitionKey, view: StateView, shard: Shard, live: LivePartition) -> None:
        self._name = name
        self._view = view
        self._shard = shard
        self._live = live

    @property
    def is_empty(self) -> bool:
        """Whether no map is stored."""
        return self._name not in self._view.offset_maps

    def load(self, destination_topic_id: str | None) -> OffsetMap:
        """The stored map of a copy; an empty one when none is stored, or that of another copy."""
        record = self._view.offset_maps.get(self._name)
        if record is None or record.destination_topic_id != destination_topic_id:
            return OffsetMap()
        return record.offsets

    async def save(self, destination_topic_id: str | None, offsets: OffsetMap) -> None:
        """Store a map; returns after the commit.

        Raises:
            NotLeaderError, FencedError, KmirrorError: as `Shard.write`.
        """
        record = OffsetMapRecord(
            **self._name._asdict(), destination_topic_id=destination_topic_id, runs=offsets.runs
        )
        write = asyncio.ensure_future(self._shard.write([Write.of(record)]))
        # whoever waits may be cancelled: its outcome is nobody's then
        write.add_done_callback(lambda done: done.cancelled() or done.exception())
        self._live.storing = write
        await asyncio.shield(write)


class MirrorOffsets:
    """Maps of a mirror's partitions, for a refresh in a thread.

    Args:
        view: hot copy of the state topic.
        mirror: whose partitions.
        loop: that of the view.
    """

    def __init__(self, view: StateView, mirror: str, loop: asyncio.AbstractEventLoop) -> None:
        self._view = view
        self._mirror = mirror
        self._loop = loop

    @property
    def coordinator_partitions(self) -> int:
        """Partitions of the state topic."""
        return self._view.count

    @property
    def is_empty(self) -> bool:
        """Whether no map is known of at the moment."""
        return not any(name.mirror == self._mirror for name in tuple(self._view.offset_maps))

    def at_least(self, ends: Mapping[int, int], timeout_s: float) -> Mapping[tuple[str, int], OffsetMap]:
        """All maps, once everything below those ends of the state topic has been read.

        Raises:
            DeadlineError: when it was not read in time.
        """
        return asyncio.run_coroutine_threadsafe(self._at_least(ends, timeout_s), self._loop).result()

    async def _at_least(
        self, ends: Mapping[int, int], timeout_s: float
    ) -> Mapping[tuple[str, int], OffsetMap]:
        reached = (self._view.reached(number, end) for number, end in ends.items())
        try:
            await asyncio.wait_for(asyncio.gather(*reached), timeout_s)
        except asyncio.TimeoutError:
            raise DeadlineError(f"the state topic was not read to its end within {timeout_s:.0f} s") from None
        return {
            (name.topic, name.partition): found
            for name in self._view.offset_maps
            if name.mirror == self._mirror and (found := stored_offsets(self._view, name))
        }
