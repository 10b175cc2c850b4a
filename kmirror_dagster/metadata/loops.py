"""Loops: a topic that the source cluster itself mirrors from our destination is not mirrored back to it.

Where mirrors run into the source cluster their state topic is there too, and says what they mirror and from which
cluster. Cluster ids decide, not names: a mirror in either direction may be called anything (KIP-1279, loop check).
"""

import time
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field

from kmirror_dagster.broker.admin import ClusterAdmin
from kmirror_dagster.broker.admin_types import OffsetKind, Partition
from kmirror_dagster.broker.log_records import KEY, OFFSET, VALUE, LogRange, LogRecord
from kmirror_dagster.broker.reader import RangeReader
from kmirror_dagster.errors import DeadlineError, RecordCorruptError
from kmirror_dagster.lifecycle import DesiredState
from kmirror_dagster.records import STATE_TOPIC, MirrorRecord, TopicRecord, decode, decode_key
from kmirror_dagster.settings import ClusterSettings

_POLL_S = 0.2


@dataclass
class OtherMirrors:
    """Mirrors into the source cluster, as its state topic tells of them; read on from where it was left.

    Attributes:
        positions: next offset to read of each partition.
        sources: mirror -> id of the cluster it copies from.
        topics: (mirror, topic) that is mirrored or paused.
    """

    positions: dict[int, int] = field(default_factory=dict[int, int])
    sources: dict[str, str] = field(default_factory=dict[str, str])
    topics: set[tuple[str, str]] = field(default_factory=set[tuple[str, str]])

    def forget(self) -> None:
        """Begin anew: the state topic is another one."""
        self.positions.clear()
        self.sources.clear()
        self.topics.clear()

    def take(self, partition: int, records: Sequence[LogRecord], end: int) -> None:
        """Take records in; what cannot be read says nothing."""
        for record in records:
            self._take(record[KEY], record[VALUE])
        self.positions[partition] = end

    def _take(self, key: bytes | None, value: bytes | None) -> None:
        try:
            parts = decode_key(key or b"")
            record = decode(key or b"", value) if value is not None and parts[0] in _TYPES else None
        except RecordCorruptError:
            return  # quarantined and reported by the nodes whose record it is
        match parts:
            case (MirrorRecord.TYPE, str(mirror)):
                self.sources.pop(mirror, None)
                if isinstance(record, MirrorRecord):
                    self.sources[mirror] = record.source_cluster_id
            case (TopicRecord.TYPE, str(mirror), str(topic)):
                self.topics.discard((mirror, topic))
                if isinstance(record, TopicRecord) and record.desired is not DesiredState.STOPPED:
                    self.topics.add((mirror, topic))
            case _:
                return

    def loops(self, destination_cluster_id: str | None) -> dict[str, str]:
        """Topics that may not be mirrored to a cluster, because they come from there: topic -> reason."""
        return {
            topic: (
                f"{topic} is mirrored from this destination to the source (mirror {mirror!r} there): mirroring it "
                "back would be a loop; stop it there first"
            )
            for mirror, topic in sorted(self.topics)
            if destination_cluster_id and self.sources.get(mirror) == destination_cluster_id
        }


_TYPES = (MirrorRecord.TYPE, TopicRecord.TYPE)


def read_other_mirrors(
    known: OtherMirrors, admin: ClusterAdmin, settings: ClusterSettings, *, timeout_s: float
) -> None:
    """Read what has been added to the source's state topic since.

    Args:
        known: brought up to date.
        admin: of the source.
        settings: of the source.
        timeout_s: seconds.

    Raises:
        KmirrorError: when it cannot be read.
    """
    deadline = time.monotonic() + timeout_s
    described = admin.topics([STATE_TOPIC], timeout_s=timeout_s)
    topic = described.values.get(STATE_TOPIC)
    if topic is None:
        raise described.errors[STATE_TOPIC]
    partitions: list[Partition] = [(STATE_TOPIC, number) for number in range(topic.partitions)]
    listed = admin.list_offsets(partitions, OffsetKind.LATEST, read_committed=True, timeout_s=timeout_s)
    for error in listed.errors.values():
        raise error
    ends = {number: listed.values[STATE_TOPIC, number].offset for _, number in partitions}
    if any(ends.get(number, 0) < position for number, position in known.positions.items()):
        known.forget()
    ranges = [
        LogRange(STATE_TOPIC, number, known.positions.get(number, 0), end)
        for number, end in ends.items()
        if known.positions.get(number, 0) < end
    ]
    if ranges:
        _read(known, settings, ranges, ends, deadline)


def _read(
    known: OtherMirrors,
    settings: ClusterSettings,
    ranges: Sequence[LogRange],
    ends: Mapping[int, int],
    deadline: float,
) -> None:
    left = {wanted.partition for wanted in ranges}
    with closing(RangeReader(settings, ranges, isolation="read_committed")) as reader:
        while left:
            for chunk in reader.read(_POLL_S):
                end = ends[chunk.partition] if chunk.done else chunk.records[-1][OFFSET] + 1
                known.take(chunk.partition, chunk.records, end)
                if chunk.done:
                    left.discard(chunk.partition)
            if left and time.monotonic() > deadline:
                raise reader.failure() or DeadlineError(
                    f"{STATE_TOPIC} of the source was not read in time: {len(left)} partitions are left"
                )
