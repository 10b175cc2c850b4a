"""The source as the destination numbers it, where a mirror translates offsets: looked at and read so.

Everything else of a comparison then goes on as if both sides had the same offsets.
"""

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import replace

from kmirror_dagster.broker.admin import ClusterAdmin
from kmirror_dagster.broker.admin_types import Answers, CommittedOffset, ListedOffset, OffsetKind, Partition
from kmirror_dagster.broker.log_records import OFFSET, Chunk, LogRange
from kmirror_dagster.broker.reader import RangeReader
from kmirror_dagster.errors import KmirrorError
from kmirror_dagster.offset_map import OffsetMap
from kmirror_dagster.settings import ClusterSettings

Maps = Mapping[Partition, OffsetMap]
MapsLookup = Callable[[], Maps]


class TranslatedAdmin(ClusterAdmin):
    """A source whose offsets are told as the destination has them.

    Args:
        settings: of the source.
        maps: looks up the maps as they are now; they grow while a mirror copies.
    """

    def __init__(self, settings: ClusterSettings, maps: MapsLookup) -> None:
        super().__init__(settings)
        self._maps = maps

    def list_offsets(
        self,
        partitions: Iterable[Partition],
        at: OffsetKind | int,
        *,
        read_committed: bool = False,
        timeout_s: float | None = None,
    ) -> Answers[Partition, ListedOffset]:
        """Look up one offset in each partition."""
        answers = super().list_offsets(partitions, at, read_committed=read_committed, timeout_s=timeout_s)
        maps = self._maps()
        values = {
            key: replace(found, offset=maps[key].to_destination(found.offset))
            if key in maps and found.offset >= 0
            else found
            for key, found in answers.values.items()
        }
        return Answers(values, answers.errors)

    def group_offsets(
        self, groups: Iterable[str], *, timeout_s: float | None = None
    ) -> Answers[str, Mapping[Partition, CommittedOffset]]:
        """All committed positions of groups."""
        answers = super().group_offsets(groups, timeout_s=timeout_s)
        maps = self._maps()
        return Answers(
            {group: _positions(committed, maps) for group, committed in answers.values.items()},
            answers.errors,
        )


def _positions(
    committed: Mapping[Partition, CommittedOffset], maps: Maps
) -> Mapping[Partition, CommittedOffset]:
    return {
        key: replace(found, offset=maps[key].to_destination(found.offset))
        if key in maps and found.offset >= 0
        else found
        for key, found in committed.items()
    }


class TranslatedReader:
    """Reads ranges of a source, given and told by the destination's offsets.

    Args:
        settings: of the source.
        ranges: at most one per partition.
        isolation: "read_uncommitted" or "read_committed".
        maps: of partitions whose offsets differ.
    """

    def __init__(
        self, settings: ClusterSettings, ranges: Iterable[LogRange], *, isolation: str, maps: Maps
    ) -> None:
        self._maps = maps
        self._reader = RangeReader(
            settings, [self._at_source(wanted) for wanted in ranges], isolation=isolation
        )

    @property
    def unreadable_headers(self) -> int:
        """Records whose headers the client library cannot give."""
        return self._reader.unreadable_headers

    def failure(self) -> KmirrorError | None:
        """What keeps it from its cluster, None when nothing does."""
        return self._reader.failure()

    def read(self, timeout_s: float) -> list[Chunk]:
        """Next chunks; an empty list when none came in time."""
        return [self._at_destination(chunk) for chunk in self._reader.read(timeout_s)]

    def pause(self, partitions: Collection[Partition]) -> None:
        """Stop fetching these partitions."""
        self._reader.pause(partitions)

    def resume(self, partitions: Collection[Partition]) -> None:
        """Fetch paused partitions again."""
        self._reader.resume(partitions)

    def close(self) -> None:
        """End reading."""
        self._reader.close()

    def _at_source(self, wanted: LogRange) -> LogRange:
        offsets = self._maps.get((wanted.topic, wanted.partition))
        if offsets is None or wanted.start >= wanted.end:
            return wanted
        # behind the last record: what is left out there belongs to what follows
        end = offsets.to_source(wanted.end - 1) + 1
        return LogRange(wanted.topic, wanted.partition, offsets.to_source(wanted.start), end)

    def _at_destination(self, chunk: Chunk) -> Chunk:
        offsets = self._maps.get((chunk.topic, chunk.partition))
        if offsets is None:
            return chunk
        records = [(offsets.to_destination(record[OFFSET]), *record[1:]) for record in chunk.records]
        return replace(chunk, records=records)
