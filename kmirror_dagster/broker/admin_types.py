"""What admin calls take and give: plain frozen values, none of the client library's own types."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Generic, TypeAlias, TypeVar

from kmirror_dagster.errors import KmirrorError

K = TypeVar("K")
V = TypeVar("V")

# (topic, partition)
Partition: TypeAlias = tuple[str, int]


@dataclass(frozen=True)
class Answers(Generic[K, V]):
    """Answers to one batched call: each item has either a value or an error."""

    values: Mapping[K, V] = field(default_factory=dict[K, V])
    errors: Mapping[K, KmirrorError] = field(default_factory=dict[K, KmirrorError])


@dataclass(frozen=True)
class ClusterDescription:
    """A cluster's id (None: older than 0.10.1) and its live brokers by node id, as host:port."""

    cluster_id: str | None
    brokers: Mapping[int, str]
    controller_id: int | None = None


@dataclass(frozen=True)
class TopicDescription:
    """One topic.

    Attributes:
        topic_id: KIP-516 id in Kafka's base64 form, None when the cluster gives none (before 2.8).
        replication_factor: replicas of partition 0.
    """

    name: str
    topic_id: str | None
    partitions: int
    replication_factor: int
    internal: bool = False


@dataclass(frozen=True)
class ConfigValue:
    """Effective value of one configuration.

    Attributes:
        value: None when sensitive or not set.
        is_override: set on the resource itself, not inherited from a broker or a default.
    """

    value: str | None
    is_override: bool = False
    sensitive: bool = False
    read_only: bool = False


Configs: TypeAlias = Mapping[str, ConfigValue]


@dataclass(frozen=True)
class NewTopic:
    """A topic to create; the configurations are part of the creation request."""

    name: str
    partitions: int
    replication_factor: int
    configs: Mapping[str, str] = field(default_factory=dict[str, str])


@dataclass(frozen=True)
class ConfigChange:
    """Incremental change of one topic's overrides (KIP-339)."""

    sets: Mapping[str, str] = field(default_factory=dict[str, str])
    unsets: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.sets or self.unsets)


class OffsetKind(str, Enum):
    """Which offset to look up (protocol guide, ListOffsets)."""

    EARLIEST = "earliest"
    LATEST = "latest"

    def __str__(self) -> str:
        return self.value


@dataclass(frozen=True)
class ListedOffset:
    """Offset found, -1 when no record is at or after the timestamp asked for; timestamp in epoch ms."""

    offset: int
    timestamp_ms: int = -1
    leader_epoch: int | None = None


class GroupType(str, Enum):
    """Protocol a group uses (KIP-848, KIP-932, KIP-1071)."""

    CLASSIC = "classic"
    CONSUMER = "consumer"
    SHARE = "share"
    STREAMS = "streams"
    UNKNOWN = "unknown"

    def __str__(self) -> str:
        return self.value


# Types whose committed offsets are those of OffsetCommit.
OFFSET_GROUP_TYPES = frozenset({GroupType.CLASSIC, GroupType.CONSUMER, GroupType.UNKNOWN})


@dataclass(frozen=True)
class GroupListing:
    """One group of a listing. `state` is Kafka's name of it ("Stable", "Empty", ...)."""

    group: str
    type: GroupType
    state: str


@dataclass(frozen=True)
class GroupListings:
    """All groups that brokers listed; `errors` are brokers that did not answer: their groups are missing."""

    groups: tuple[GroupListing, ...]
    errors: tuple[KmirrorError, ...] = ()


@dataclass(frozen=True)
class GroupMember:
    """One live member of a group."""

    member_id: str
    client_id: str
    host: str


@dataclass(frozen=True)
class GroupDescription:
    """A group and its live members; a group nobody knows is "Dead" and has none."""

    group: str
    state: str
    members: tuple[GroupMember, ...] = ()


@dataclass(frozen=True)
class CommittedOffset:
    """A group's committed position in one partition.

    Attributes:
        metadata: text the committer left with it, None when none.
        leader_epoch: source of KIP-320's validation, None when none was committed.
    """

    offset: int
    metadata: str | None = None
    leader_epoch: int | None = None


# (kind, name) pairs by kind: "user", "client-id" or "ip"; None stands for the default of its kind
QuotaEntity: TypeAlias = tuple[tuple[str, str | None], ...]
Quotas: TypeAlias = Mapping[QuotaEntity, Mapping[str, float]]


@dataclass(frozen=True)
class Quota:
    """One client quota (KIP-546): whom it is for, its key ("producer_byte_rate", ...) and value."""

    entity: QuotaEntity
    key: str
    value: float


def entity_text(entity: QuotaEntity) -> str:
    """Whom a quota is for, as "client-id=<default>, user=alice"."""
    return ", ".join(f"{kind}={'<default>' if name is None else name}" for kind, name in entity)


@dataclass(frozen=True, order=True)
class Acl:
    """One ACL binding, in Kafka's names ("TOPIC", "LITERAL", "User:alice", "*", "WRITE", "ALLOW")."""

    resource_type: str
    resource_name: str
    pattern_type: str
    principal: str
    host: str
    operation: str
    permission: str
