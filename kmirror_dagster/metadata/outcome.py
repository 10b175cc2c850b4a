"""What one metadata refresh reports, and what of it the coordinator is to store."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum

from pydantic import BaseModel, ConfigDict, Field

from kmirror_dagster.broker.admin_types import Acl, Quota
from kmirror_dagster.records import HeldAcl


class Step(str, Enum):
    """Steps of a refresh, in their order."""

    CLUSTER_IDS = "cluster-ids"
    DISCOVERY = "discovery"
    DELETIONS = "deletions"
    CREATION = "creation"
    GROWTH = "growth"
    CONFIGS = "configs"
    GROUPS = "groups"
    SHARE_GROUPS = "share-groups"
    ACLS = "acls"
    QUOTAS = "quotas"
    USERS = "users"
    LOG_STARTS = "log-starts"

    def __str__(self) -> str:
        return self.value


class StepStatus(BaseModel):
    """Outcome of one step of the newest refresh.

    Attributes:
        step: name of the step, see `Step`.
        ok: no errors.
        changes: altering requests made (topics, groups or partitions changed).
        errors: topic or group -> reason; the step's own failure stands under "*".
        notes: what was left alone on purpose, and why.
    """

    model_config = ConfigDict(frozen=True, extra="ignore")

    step: str
    ok: bool
    changes: int = 0
    duration_ms: int = 0
    errors: dict[str, str] = Field(default_factory=dict)
    notes: list[str] = Field(default_factory=list)


class RefreshStatus(BaseModel):
    """Newest metadata refresh of a mirror; times in epoch milliseconds."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    started_ms: int
    finished_ms: int
    steps: list[StepStatus]
    source_reachable: bool = True

    @property
    def ok(self) -> bool:
        """Whether every step ended without an error."""
        return all(step.ok for step in self.steps)


@dataclass(frozen=True)
class TopicIntent:
    """What the coordinator is to store about one topic (a `TopicRecord`).

    Attributes:
        partitions: partitions that source and destination both have; 0 while the destination topic is not
            the mirror's (not created, refused or somebody else's).
        source_topic_id: topic id at the source the copy is of.
        destination_topic_id: topic id of the copy; another one later means that it was deleted there.
        error: why the topic cannot be mirrored now, None when it can.
        stop: the filters no longer select it.
        created: the destination topic is new and empty: its partitions start with LOG_ALIGNMENT, whatever
            they were.
        held: the source's own value of each configuration held back while mirroring, None where the source
            has none; what `release` puts in place at stop.
        synced: configuration keys that are at the destination because of the mirror; a key that leaves the
            source is removed only when it is one of them.
        held_acls: write permissions held back; None keeps those that are stored.
        read_only_acl: whether an ACL of the mirror denies to write to the copy; None keeps what is stored.
        settled: of a STOPPED topic: only `held_acls` and `read_only_acl` are to be stored, what is left of them.
    """

    topic: str
    partitions: int
    source_topic_id: str | None = None
    destination_topic_id: str | None = None
    error: str | None = None
    stop: bool = False
    created: bool = False
    held: Mapping[str, str | None] = field(default_factory=dict[str, str | None])
    synced: tuple[str, ...] = ()
    held_acls: tuple[HeldAcl, ...] | None = None
    read_only_acl: bool | None = None
    settled: bool = False


@dataclass(frozen=True)
class PlannedChange:
    """One altering request that a refresh makes, or would make: what to which topic, group or partition."""

    step: Step
    subject: str
    text: str


@dataclass(frozen=True)
class RefreshPlan:
    """What a refresh would do now; nothing was changed."""

    status: RefreshStatus
    changes: tuple[PlannedChange, ...]


@dataclass(frozen=True)
class RefreshOutcome:
    """Result of one refresh.

    Attributes:
        status: per step, for people and checks.
        topics: intents to store. A topic that is known and missing here is to be left as it is.
        source_replaced: the reason when another cluster answers at the source's address; then every topic's
            intent carries it as its error and nothing was changed.
        acls: ACLs that are at the destination because of the mirror; None when that was not looked at.
        quotas: client quotas of which the same holds.
        look_again: the next refresh should come soon: something has to be seen twice before it is believed, or
            what was made now has positions and permissions to get.
    """

    status: RefreshStatus
    topics: list[TopicIntent]
    source_replaced: str | None = None
    acls: frozenset[Acl] | None = None
    quotas: frozenset[Quota] | None = None
    look_again: bool = False
