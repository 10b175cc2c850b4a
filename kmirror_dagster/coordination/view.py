"""Hot copy of `__mirror_state` at one node: mirrors, intents, states, positions and leaders.

Fed in two ways: by a follower of the topic (everybody's writes) and, for what this node leads, directly with
each committed append, so that it reads its own writes at once. Offsets make the second telling of a record
harmless. Lives in the node's loop; only decoding happens elsewhere.
"""

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from kmirror_dagster.coordination.changes import ChangeLog, read_changes
from kmirror_dagster.coordination.keys import PartitionKey
from kmirror_dagster.coordination.models import ChangeFeed, StateChange
from kmirror_dagster.errors import RecordCorruptError
from kmirror_dagster.records import (
    AclsRecord,
    Key,
    LeaderRecord,
    MirrorRecord,
    OffsetMapRecord,
    PartitionRecord,
    PositionRecord,
    QuotasRecord,
    Record,
    RecoveryRecord,
    TopicRecord,
    decode,
    decode_key,
    mirror_owner,
    partition_owner,
)

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Entry:
    """One record of the state topic, decoded.

    Attributes:
        key: parts of its key, the record type first; None when even that cannot be read.
        record: None deletes the key, or the record is corrupt.
        corrupt: why it cannot be read; None when it can.
    """

    partition: int
    offset: int
    at_ms: int
    key: Key | None
    record: Record | None = None
    corrupt: str | None = None


@dataclass(frozen=True)
class Change:
    """What an entry did to the view."""

    key: Key
    before: Record | None
    after: Record | None


Listener = Callable[[Sequence[Change]], None]


def decode_entry(partition: int, offset: int, at_ms: int, key: bytes | None, value: bytes | None) -> Entry:
    """Decode one record; what cannot be read becomes an entry that says why."""
    if key is None:
        return Entry(partition, offset, at_ms, None, corrupt="record has no key")
    parts: Key | None = None
    try:
        parts = decode_key(key)
        record = decode(key, value) if value is not None else None
    except RecordCorruptError as error:
        return Entry(partition, offset, at_ms, parts, corrupt=str(error))
    return Entry(partition, offset, at_ms, parts, record)


def home_of(key: Key, count: int) -> int | None:
    """Coordinator partition a key belongs to; None when the key is of no known shape."""
    match key:
        case ("mirror" | "topic" | "acls" | "quotas" | "recovery", str(mirror), *_):
            return mirror_owner(mirror, count)
        case ("partition" | "position" | "offsets", str(mirror), str(topic), int(partition)):
            return partition_owner(mirror, topic, partition, count)
        case ("leader", int(partition)) if 0 <= partition < count:
            return partition
        case _:
            return None


@dataclass
class _Slot:
    """What is kept per coordinator partition."""

    position: int = 0
    highest_epoch: int = 0
    changes: ChangeLog = field(default_factory=ChangeLog)
    members: set[PartitionKey] = field(default_factory=lambda: set[PartitionKey]())


class StateView:
    """Newest value of each thing in the state topic.

    Args:
        count: coordinator partitions.
        topic_id: id of the state topic; part of every change cursor.
    """

    def __init__(self, count: int, topic_id: str) -> None:
        self.count = count
        self.topic_id = topic_id
        self.mirrors: dict[str, MirrorRecord] = {}
        self.topics: dict[str, dict[str, TopicRecord]] = {}
        self.acls: dict[tuple[str, int], AclsRecord] = {}
        self.quotas: dict[tuple[str, int], QuotasRecord] = {}
        self.states: dict[PartitionKey, PartitionRecord] = {}
        self.positions: dict[PartitionKey, PositionRecord] = {}
        self.offset_maps: dict[PartitionKey, OffsetMapRecord] = {}
        self.recoveries: dict[str, RecoveryRecord] = {}
        self.leaders: dict[int, LeaderRecord] = {}
        self.quarantined: dict[tuple[int, Key | int], str] = {}
        self._slots = [_Slot() for _ in range(count)]
        self._by_mirror: dict[str, set[PartitionKey]] = {}
        self._listeners: list[Listener] = []
        self._waiters: list[tuple[int, int, asyncio.Future[None]]] = []

    def subscribe(self, listener: Listener) -> Callable[[], None]:
        """Call `listener` with the changes of each applied batch; returns what ends it."""
        self._listeners.append(listener)
        return lambda: self._listeners.remove(listener)

    def position(self, partition: int) -> int:
        """Next offset this view expects of a coordinator partition."""
        return self._slots[partition].position

    def highest_epoch(self, partition: int) -> int:
        """Highest leader epoch that any record of a coordinator partition carries; 0 when none does."""
        return self._slots[partition].highest_epoch

    def led_by(self, partition: int) -> set[PartitionKey]:
        """Mirror partitions, wanted or with a state, of a coordinator partition. Not to be changed."""
        return self._slots[partition].members

    def partitions_of(self, mirror: str) -> set[PartitionKey]:
        """Mirror partitions of a mirror, wanted or with a state. Not to be changed."""
        return self._by_mirror.get(mirror, set())

    def topic(self, key: PartitionKey) -> TopicRecord | None:
        """Intent for a partition's topic."""
        return self.topics.get(key.mirror, {}).get(key.topic)

    def owner(self, key: PartitionKey) -> int:
        """Coordinator partition that leads a mirror partition."""
        return key.owner(self.count)

    def mirror_owner(self, mirror: str) -> int:
        """Coordinator partition that leads a mirror."""
        return mirror_owner(mirror, self.count)

    def changes(self, *, cursor: str | None, mirror: str | None, limit: int, now_ms: int) -> ChangeFeed:
        """Changes of partition states behind a cursor, see `read_changes`."""
        return read_changes(
            [slot.changes for slot in self._slots],
            [slot.position for slot in self._slots],
            topic_id=self.topic_id,
            cursor=cursor,
            mirror=mirror,
            limit=limit,
            now_ms=now_ms,
        )

    def apply(self, entries: Sequence[Entry]) -> None:
        """Take entries in, by offset within a coordinator partition; what is known already is passed over."""
        changes: list[Change] = []
        for entry in entries:
            slot = self._slots[entry.partition]
            if entry.offset < slot.position:
                continue
            slot.position = entry.offset + 1
            change = self._take(entry, slot)
            if change is not None:
                changes.append(change)
        self._wake_waiters()
        if changes:
            for listener in tuple(self._listeners):
                listener(changes)

    def advance(self, partition: int, position: int) -> None:
        """Note that there is nothing to be read below an offset (end of the partition)."""
        slot = self._slots[partition]
        slot.position = max(slot.position, position)
        self._wake_waiters()

    async def reached(self, partition: int, position: int) -> None:
        """Wait until everything below an offset has been taken in. Callers bound the wait."""
        if self.position(partition) >= position:
            return
        future = asyncio.get_running_loop().create_future()
        self._waiters.append((partition, position, future))
        await future

    def _wake_waiters(self) -> None:
        if not self._waiters:
            return
        still: list[tuple[int, int, asyncio.Future[None]]] = []
        for waiter in self._waiters:
            partition, position, future = waiter
            if future.done():
                continue
            if self._slots[partition].position >= position:
                future.set_result(None)
            else:
                still.append(waiter)
        self._waiters = still

    def _take(self, entry: Entry, slot: _Slot) -> Change | None:
        problem = entry.corrupt
        if problem is None and entry.key is not None:
            home = home_of(entry.key, self.count)
            if home != entry.partition:
                problem = f"record {entry.key} does not belong to coordinator partition {entry.partition}"
        label = (entry.partition, entry.key if entry.key is not None else entry.offset)
        if problem is not None or entry.key is None:
            text = f"__mirror_state/{entry.partition} offset {entry.offset}: {problem}"
            self.quarantined[label] = text
            logger.error("state record quarantined: %s", text)
            return None
        self.quarantined.pop(label, None)
        return self._store(entry, entry.key, slot)

    def _store(self, entry: Entry, key: Key, slot: _Slot) -> Change | None:
        record = entry.record
        match key[0]:
            case "mirror":
                return self._swap(self.mirrors, str(key[1]), record, key)
            case "topic":
                return self._store_topic(str(key[1]), str(key[2]), record, key)
            case "acls":
                return self._swap(self.acls, (str(key[1]), int(key[2])), record, key)
            case "quotas":
                return self._swap(self.quotas, (str(key[1]), int(key[2])), record, key)
            case "recovery":
                return self._swap(self.recoveries, str(key[1]), record, key)
            case "leader":
                if isinstance(record, LeaderRecord):
                    slot.highest_epoch = max(slot.highest_epoch, record.epoch)
                return self._swap(self.leaders, entry.partition, record, key)
            case "position":
                name = PartitionKey(str(key[1]), str(key[2]), int(key[3]))
                return self._swap(self.positions, name, record, key)
            case "offsets":
                name = PartitionKey(str(key[1]), str(key[2]), int(key[3]))
                return self._swap(self.offset_maps, name, record, key)
            case _:
                return self._store_state(
                    entry, PartitionKey(str(key[1]), str(key[2]), int(key[3])), key, slot
                )

    def _swap(self, table: dict[Any, Any], name: object, record: Record | None, key: Key) -> Change:
        before = table.get(name)
        if record is None:
            table.pop(name, None)
        else:
            table[name] = record
        return Change(key, before, record)

    def _store_topic(self, mirror: str, topic: str, record: Record | None, key: Key) -> Change:
        topics = self.topics.setdefault(mirror, {})
        change = self._swap(topics, topic, record, key)
        if not topics:
            del self.topics[mirror]
        before = change.before.partitions if isinstance(change.before, TopicRecord) else 0
        after = record.partitions if isinstance(record, TopicRecord) else 0
        for partition in range(min(before, after), max(before, after)):
            name = PartitionKey(mirror, topic, partition)
            if partition < after:
                self._join(name)
            elif name not in self.states:
                self._leave(name)
        return change

    def _store_state(self, entry: Entry, name: PartitionKey, key: Key, slot: _Slot) -> Change | None:
        record = entry.record
        before = self.states.get(name)
        if isinstance(record, PartitionRecord):
            if before is not None and record.leader_epoch < before.leader_epoch:
                # the broker refuses deposed leaders; a record that slipped in all the same decides nothing
                logger.warning("stale state of %s ignored: leader epoch %d", name, record.leader_epoch)
                return None
            slot.highest_epoch = max(slot.highest_epoch, record.leader_epoch)
            self._join(name)
        change = self._swap(self.states, name, record, key)
        if record is None:
            topic = self.topic(name)
            if topic is None or name.partition >= topic.partitions:
                self._leave(name)
        news = state_change(name, before, record if isinstance(record, PartitionRecord) else None)
        if news is not None:
            slot.changes.append(entry.offset, entry.at_ms, news)
        return change

    def _join(self, name: PartitionKey) -> None:
        self._slots[self.owner(name)].members.add(name)
        self._by_mirror.setdefault(name.mirror, set()).add(name)

    def _leave(self, name: PartitionKey) -> None:
        self._slots[self.owner(name)].members.discard(name)
        members = self._by_mirror.get(name.mirror)
        if members is not None:
            members.discard(name)
            if not members:
                del self._by_mirror[name.mirror]


def state_change(
    name: PartitionKey, before: PartitionRecord | None, after: PartitionRecord | None
) -> StateChange | None:
    """What followers are told about a stored state; None when only its leader changed."""
    if after is None:
        return StateChange(
            mirror=name.mirror,
            topic=name.topic,
            partition=name.partition,
            state=None,
            # the state may be compacted away already when only the removal is read
            previous_state=before.state if before else None,
            state_epoch=before.state_epoch + 1 if before else 0,
            since_ms=before.since_ms if before else 0,
            removed=True,
        )
    if before is not None and (before.state_epoch, before.error) == (after.state_epoch, after.error):
        return None
    return StateChange(
        mirror=name.mirror,
        topic=name.topic,
        partition=name.partition,
        state=after.state,
        previous_state=after.previous_state,
        state_epoch=after.state_epoch,
        since_ms=after.since_ms,
        error=after.error,
    )
