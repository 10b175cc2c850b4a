"""Keys and values of `__mirror_state`, versioned.

A key is a compact JSON array whose first element is the record type, so that compaction keeps the newest value
of each thing; a value is a JSON object with its schema version under `v`. A null value deletes. Readers ignore
fields they do not know and refuse versions above their own (the record is quarantined, never guessed at).

Which coordinator partition a record lives in: CRC-32 (zlib) of the UTF-8 bytes of `mirror`, or of
`mirror NUL topic NUL partition` for partition records, modulo the topic's partition count.
"""

import json
import zlib
from typing import Any, ClassVar, TypeAlias

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from kmirror_dagster.errors import RecordCorruptError
from kmirror_dagster.lifecycle import DesiredState, MirrorState
from kmirror_dagster.offset_map import OffsetMap, Run

STATE_TOPIC = "__mirror_state"
DEFAULT_STATE_PARTITIONS = 50
# 10,000 ACLs make about 60 KiB a record
ACL_CHUNKS = 16
QUOTA_CHUNKS = 4

# resource type, resource name, pattern type, principal, host, operation, permission
AclFields: TypeAlias = tuple[str, str, str, str, str, str, str]

# (kind, name) pairs, None for the default of a kind; key; value
QuotaFields: TypeAlias = tuple[tuple[tuple[str, str | None], ...], str, float]


class _Record(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore")
    VERSION: ClassVar[int] = 1
    TYPE: ClassVar[str] = ""

    def key_parts(self) -> tuple[str | int, ...]:
        """Parts of the key behind the record type."""
        raise NotImplementedError

    def key(self) -> bytes:
        """Key bytes of this record."""
        return encode_key(self.TYPE, *self.key_parts())

    def value(self) -> bytes:
        """Value bytes of this record, with the schema version under `v`."""
        document = {"v": self.VERSION, **self.model_dump(mode="json")}
        return json.dumps(document, separators=(",", ":"), sort_keys=True).encode()


class MirrorRecord(_Record):
    """A mirror: its settings document (secrets only as `${ENV}` references) and identity of both clusters."""

    TYPE = "mirror"
    mirror: str
    document: dict[str, Any]
    source_cluster_id: str
    destination_cluster_id: str
    created_ms: int
    revision: int = 0

    def key_parts(self) -> tuple[str | int, ...]:
        return (self.mirror,)


class HeldAcl(BaseModel):
    """A permission to write to topics that the source gives and the destination holds back while mirroring.

    Always an ALLOW on topics, in Kafka's names ("LITERAL", "User:alice", "*").

    Attributes:
        operation: "WRITE", or "ALL" where the operations besides WRITE are given one by one.
        instead: those operations, without what the source gives by ACLs of their own; given up with the hold.
        granted: of a stopped topic: given to this topic by its name, and as it is once all others have stopped.
    """

    model_config = ConfigDict(frozen=True, extra="ignore")

    resource_name: str
    pattern_type: str
    principal: str
    host: str
    operation: str
    instead: tuple[str, ...] = ()
    granted: bool = False


class TopicRecord(_Record):
    """Intent for one topic of a mirror, written by the mirror's coordinator, followed by every node.

    Attributes:
        partitions: partition count at the source that the destination has as well; 0 while the destination
            topic is not the mirror's (not created yet, refused, or somebody else's).
        source_topic_id: topic id at the source (KIP-516), None when the source has none.
        desired: what the operator wants.
        error: why the topic cannot be mirrored (creation refused, name collision, ...), None when it can.
        stopped_by: "operator" or "filter" when desired is STOPPED; discovery restarts only what a filter
            stopped.
        started_by: "filter" or "operator"; what was started by name goes on though no filter selects it.
        destination_topic_id: topic id of the copy; another one means that the copy was deleted meanwhile.
        source_configs: the source's own value of each configuration held back while mirroring (None: it has
            none); put in place at stop, which must not need the source.
        synced_configs: configuration keys that the mirror has put at the destination.
        held_acls: write permissions held back while mirroring, granted at stop, which must not need the source.
        read_only_acl: an ACL of the mirror denies everybody to write to the copy; removed at stop.
    """

    TYPE = "topic"
    mirror: str
    topic: str
    partitions: int
    source_topic_id: str | None = None
    desired: DesiredState = DesiredState.MIRRORING
    error: str | None = None
    stopped_by: str | None = None
    started_by: str = "filter"
    destination_topic_id: str | None = None
    source_configs: dict[str, str | None] = Field(default_factory=dict)
    synced_configs: list[str] = Field(default_factory=list)
    held_acls: tuple[HeldAcl, ...] = ()
    read_only_acl: bool = False
    revision: int = 0
    since_ms: int = 0

    def key_parts(self) -> tuple[str | int, ...]:
        return (self.mirror, self.topic)


class AclsRecord(_Record):
    """ACLs at the destination that are there because of the mirror: one of `ACL_CHUNKS` parts of them.

    One that leaves the source is removed only when it is one of these.

    Attributes:
        acls: sorted.
    """

    TYPE = "acls"
    mirror: str
    chunk: int
    acls: tuple[AclFields, ...] = ()

    def key_parts(self) -> tuple[str | int, ...]:
        return (self.mirror, self.chunk)


class QuotasRecord(_Record):
    """Client quotas at the destination that are there because of the mirror: one of `QUOTA_CHUNKS` parts.

    One that leaves the source is removed only when it is one of these, with the value it has here.

    Attributes:
        quotas: whom each is for, its key and its value; sorted.
    """

    TYPE = "quotas"
    mirror: str
    chunk: int
    quotas: tuple[QuotaFields, ...] = ()

    def key_parts(self) -> tuple[str | int, ...]:
        return (self.mirror, self.chunk)


class PartitionRecord(_Record):
    """Actual state of one mirror partition, written by the node that leads its coordinator partition.

    Attributes:
        leader_epoch: epoch of the coordinator that wrote it.
        state_epoch: grows by one with every transition.
        retry_attempt: automatic retries since the last good state.
        retriable: False when only `recover` (or a stop) leads out of FAILED.
        producer_id: idempotent producer id all its data is appended with, -1 before the first alignment.
        lost_from, lost_to: offsets the source deleted last before they were mirrored, the end exclusive.
        lost_offsets: how many it were in all.
    """

    TYPE = "partition"
    mirror: str
    topic: str
    partition: int
    state: MirrorState
    previous_state: MirrorState | None = None
    leader_epoch: int = 0
    state_epoch: int = 0
    error: str | None = None
    retriable: bool = True
    retry_attempt: int = 0
    source_topic_id: str | None = None
    source_leader_epoch: int = -1
    since_ms: int = 0
    producer_id: int = -1
    producer_epoch: int = -1
    lost_from: int = 0
    lost_to: int = 0
    lost_offsets: int = 0

    def with_loss(self, loss: tuple[int, int]) -> dict[str, int]:
        """Fields that take in a loss; one that begins where the last did is the same, grown."""
        begin, end = loss
        known = self.lost_to if self.lost_from == begin else begin
        return {
            "lost_from": begin,
            "lost_to": max(end, known),
            "lost_offsets": self.lost_offsets + max(end - known, 0),
        }

    def key_parts(self) -> tuple[str | int, ...]:
        return (self.mirror, self.topic, self.partition)


class PositionRecord(_Record):
    """Last mirror position: written while STOPPING, read by failback (KIP-1279 LastMirrorEpochs).

    Attributes:
        source_leader_epoch: leader epoch of the last mirrored batch at the source, -1 when unknown.
        offset: log end offset up to which source and destination are the same log.
        source_offset: the source's offset there; None: the same one.
    """

    TYPE = "position"
    mirror: str
    topic: str
    partition: int
    source_cluster_id: str
    source_leader_epoch: int
    offset: int
    recorded_ms: int
    source_offset: int | None = None

    def key_parts(self) -> tuple[str | int, ...]:
        return (self.mirror, self.topic, self.partition)


class OffsetMapRecord(_Record):
    """Offsets of a mirror partition that differ between source and destination (`offsets: translated`).

    Stored before the first record of a new run is appended, so that whoever reads the destination's log end knows the
    source offset it stands for.

    Attributes:
        destination_topic_id: of the copy it describes; another one has another map. None where there are no ids.
        runs: destination and source offset from which on both count on together.
    """

    TYPE = "offsets"
    mirror: str
    topic: str
    partition: int
    destination_topic_id: str | None = None
    runs: tuple[tuple[int, int], ...] = ()

    def key_parts(self) -> tuple[str | int, ...]:
        return (self.mirror, self.topic, self.partition)

    @property
    def offsets(self) -> OffsetMap:
        """The map."""
        return OffsetMap(tuple(Run(*run) for run in self.runs))


class RecoveryRecord(_Record):
    """How far the recovery of a mirror is, so that whoever comes next goes on with it.

    Attributes:
        operation: "failback" or "switchover".
        operation_id: one attempt; another one begins only when this one is finished.
        step: the step that is to be done next, or that was the last.
        document: what the steps need to know, theirs alone to read.
        error: why the step did not end; None when nothing is wrong.
        revision: grows by one with every write; a write names the one it was decided by.
    """

    TYPE = "recovery"
    mirror: str
    operation: str
    operation_id: str
    step: str
    document: dict[str, Any] = Field(default_factory=dict)
    error: str | None = None
    finished: bool = False
    started_ms: int = 0
    updated_ms: int = 0
    revision: int = 0

    def key_parts(self) -> tuple[str | int, ...]:
        return (self.mirror,)


class LeaderRecord(_Record):
    """Who leads a coordinator partition; writing it is what fences the former leader."""

    TYPE = "leader"
    coordinator_partition: int
    node_id: str
    endpoint: str
    epoch: int
    since_ms: int

    def key_parts(self) -> tuple[str | int, ...]:
        return (self.coordinator_partition,)


Record: TypeAlias = (
    MirrorRecord
    | TopicRecord
    | AclsRecord
    | QuotasRecord
    | PartitionRecord
    | PositionRecord
    | OffsetMapRecord
    | RecoveryRecord
    | LeaderRecord
)
Key: TypeAlias = tuple[str | int, ...]

_TYPES: dict[str, type[_Record]] = {
    cls.TYPE: cls
    for cls in (
        MirrorRecord,
        TopicRecord,
        AclsRecord,
        QuotasRecord,
        PartitionRecord,
        PositionRecord,
        OffsetMapRecord,
        RecoveryRecord,
        LeaderRecord,
    )
}


def encode_key(record_type: str, *parts: str | int) -> bytes:
    """Key bytes of a record type and its identifying parts."""
    return json.dumps([record_type, *parts], separators=(",", ":"), ensure_ascii=False).encode()


def decode_key(data: bytes) -> Key:
    """Parts of a key, the record type first.

    Raises:
        RecordCorruptError: when the bytes are no key of this format.
    """
    try:
        parts = json.loads(data)
    except ValueError as error:
        raise RecordCorruptError(f"key {data!r} is not JSON: {error}") from error
    if not isinstance(parts, list) or not parts or not all(isinstance(p, (str, int)) for p in parts):
        raise RecordCorruptError(f"key {data!r} is not an array of strings and numbers")
    return tuple(parts)


def decode(key: bytes, value: bytes) -> Record:
    """Read one record.

    Raises:
        RecordCorruptError: when key or value cannot be read, disagree, or are of a newer schema version.
    """
    parts = decode_key(key)
    cls = _TYPES.get(str(parts[0]))
    if cls is None:
        raise RecordCorruptError(f"unknown record type {parts[0]!r}")
    try:
        document = json.loads(value)
        version = document.get("v") if isinstance(document, dict) else None
        if type(version) is not int or not 1 <= version <= cls.VERSION:
            raise RecordCorruptError(
                f"record {parts} has schema version {version!r}, readable: 1..{cls.VERSION}"
            )
        record = cls.model_validate(document)
    except (ValueError, ValidationError) as error:
        reason = str(error).splitlines()[0]
        raise RecordCorruptError(f"value of record {parts} cannot be read: {reason}") from error
    if (cls.TYPE, *record.key_parts()) != parts:
        raise RecordCorruptError(f"record {parts} names another thing in its value: {record.key_parts()}")
    return record  # pyright: ignore[reportReturnType]


def acl_chunk(fields: AclFields) -> int:
    """Which of a mirror's `AclsRecord`s an ACL is listed in."""
    return zlib.crc32("\0".join(fields).encode()) % ACL_CHUNKS


def quota_chunk(fields: QuotaFields) -> int:
    """Which of a mirror's `QuotasRecord`s a client quota is listed in."""
    return zlib.crc32(json.dumps(fields[:2]).encode()) % QUOTA_CHUNKS


def mirror_owner(mirror: str, count: int) -> int:
    """Coordinator partition that leads a mirror's own work (discovery, configs, groups, ACLs)."""
    return zlib.crc32(mirror.encode()) % count


def partition_owner(mirror: str, topic: str, partition: int, count: int) -> int:
    """Coordinator partition that leads one mirror partition's state and copying."""
    return zlib.crc32(f"{mirror}\0{topic}\0{partition}".encode()) % count
