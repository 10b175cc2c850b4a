"""What the node's HTTP API takes and gives (JSON). Times are epoch milliseconds, lags records and seconds."""

from typing import Any, Generic, TypeVar

from pydantic import BaseModel, ConfigDict, Field

from kmirror_dagster.lifecycle import DesiredState, MirrorState
from kmirror_dagster.metadata.outcome import RefreshStatus as RefreshStatus
from kmirror_dagster.metadata.outcome import StepStatus as StepStatus


class ApiModel(BaseModel):
    """Base of all models of the API: frozen, unknown fields ignored by readers."""

    model_config = ConfigDict(frozen=True, extra="ignore")


T = TypeVar("T")


class Page(ApiModel, Generic[T]):
    """One page of a listing; `next_cursor` is None on the last one."""

    items: list[T]
    next_cursor: str | None = None


class PartitionRef(ApiModel):
    """A mirror partition's name."""

    mirror: str
    topic: str
    partition: int


class PartitionStatus(ApiModel):
    """State and progress of one mirror partition. Offsets are None while unknown.

    Attributes:
        last_mirror_offset, last_mirror_epoch, last_mirror_ms: last mirror position that a stop recorded (offset,
            leader epoch at the source, time); of a former stop while the partition is not STOPPED.
        lost_offsets: offsets that the source deleted before they were mirrored; `lost_from` to `lost_to` (exclusive)
            were the last ones.
        last_mirror_source_offset: the source's offset there where offsets are translated; None: the same one.
    """

    mirror: str
    topic: str
    partition: int
    state: MirrorState | None
    desired: DesiredState
    previous_state: MirrorState | None = None
    state_epoch: int = 0
    leader_epoch: int = 0
    since_ms: int = 0
    error: str | None = None
    retriable: bool = True
    retry_attempt: int = 0
    next_retry_ms: int | None = None
    source_start_offset: int | None = None
    source_end_offset: int | None = None
    destination_start_offset: int | None = None
    destination_end_offset: int | None = None
    lag_records: int | None = None
    lag_seconds: float | None = None
    records_per_second: float = 0.0
    bytes_per_second: float = 0.0
    node_id: str | None = None
    source_topic_id: str | None = None
    lost_offsets: int = 0
    lost_from: int = 0
    lost_to: int = 0
    last_mirror_offset: int | None = None
    last_mirror_epoch: int | None = None
    last_mirror_ms: int | None = None
    last_mirror_source_offset: int | None = None


class PartitionOffsets(ApiModel):
    """Offsets of one mirror partition at both sides.

    Attributes:
        runs: destination and source offset from which on both count on together; in front of the first, and where
            there is none, they are equal.
        status: of the partition, when it was asked for alone.
    """

    topic: str
    partition: int
    runs: list[tuple[int, int]] = Field(default_factory=list[tuple[int, int]])
    status: PartitionStatus | None = None


class ProbeObservation(ApiModel):
    """One look at a cluster by a node; taken every second."""

    at_ms: int
    ok: bool
    error: str | None = None


class ProbeHistory(ApiModel):
    """Looks of one node at the source and destination of a mirror, oldest first, at most the last 120 s."""

    node_id: str
    source: list[ProbeObservation]
    destination: list[ProbeObservation]


class TopicStatus(ApiModel):
    """Intent for one topic of a mirror."""

    topic: str
    partitions: int
    desired: DesiredState
    error: str | None = None


class MirrorSummary(ApiModel):
    """A mirror at a glance. `states` counts partitions per state, those without one under "NONE"."""

    mirror: str
    source_bootstrap: str
    source_cluster_id: str
    destination_cluster_id: str
    created_ms: int
    topics: list[TopicStatus]
    partitions: int
    states: dict[str, int]
    lag_records: int
    lag_seconds: float
    records_per_second: float
    bytes_per_second: float
    refresh: RefreshStatus | None = None
    coordinator_node: str | None = None


class CreateMirror(ApiModel):
    """Body of `POST /v1/mirrors`: the settings document as written, `${ENV}` references unresolved."""

    document: dict[str, Any]
    replace: bool = False


class VerbRequest(ApiModel):
    """Body of `POST /v1/mirrors/{mirror}/{verb}`.

    Attributes:
        topics: whole-name RE2 patterns, None for all topics of the mirror.
        operation_id: makes a repeated call harmless.
        dry_run: only tell what would be changed.
    """

    topics: list[str] | None = None
    operation_id: str | None = None
    dry_run: bool = False


class VerbResult(ApiModel):
    """What a verb did: topics it changed, topics that were in that state already."""

    mirror: str
    verb: str
    changed: list[str]
    unchanged: list[str]
    partitions: int


class AdvanceRequest(ApiModel):
    """Body of `POST /v1/mirrors/{mirror}/advance`: bring one partition one step further and wait."""

    topic: str
    partition: int
    wait_ms: int = 10_000


class AdvanceResult(ApiModel):
    """Answer of advance: status now, and whether this call made something happen."""

    status: PartitionStatus
    advanced: bool


class StateWrite(ApiModel):
    """One write of WriteMirrorStates: refused unless both epochs are the stored ones."""

    mirror: str
    topic: str
    partition: int
    state: MirrorState
    expected_state_epoch: int
    expected_leader_epoch: int
    error: str | None = None
    retriable: bool = True


class StateWriteResult(ApiModel):
    """Answer to one write; `error_code` is None when it was stored, and `status` what is stored now."""

    ref: PartitionRef
    error_code: str | None = None
    message: str | None = None
    status: PartitionStatus | None = None


class StateChange(ApiModel):
    """One stored state of a mirror partition as a follower sees it.

    `state_epoch` orders the changes of one partition. A follower may meet the same one twice (another node
    answers, or a new leader stored the state again): what has no newer `state_epoch` is not news.
    """

    mirror: str
    topic: str
    partition: int
    state: MirrorState | None
    previous_state: MirrorState | None
    state_epoch: int
    since_ms: int
    error: str | None = None
    removed: bool = False


class ChangeFeed(ApiModel):
    """Changes behind a cursor, oldest first; at most the limit asked for.

    Attributes:
        reset: the cursor given was too old or of another state topic; what follows is all current state.
        more: there are further changes to be read at once.
    """

    changes: list[StateChange]
    cursor: str
    reset: bool = False
    more: bool = False


class NodeInfo(ApiModel):
    """One node: identity, what it leads and how it is. `max_retry_attempts`: of its FAILED partitions."""

    node_id: str
    endpoint: str
    version: str
    started_ms: int
    destination_cluster_id: str
    coordinator_partitions: list[int]
    mirror_partitions: int
    cpu_seconds: float
    memory_bytes: int
    quarantined_records: list[str] = Field(default_factory=list)
    max_retry_attempts: int | None = None


class ClusterInfo(ApiModel):
    """All nodes as known by the answering one: coordinator partition -> node id."""

    node_id: str
    destination_cluster_id: str
    state_partitions: int
    leaders: dict[int, str]
    endpoints: dict[str, str]


class PlannedItem(ApiModel):
    """One altering request that a refresh would make: what to which topic, group or partition."""

    step: str
    subject: str
    text: str


class MirrorPlan(ApiModel):
    """What a metadata refresh of a mirror would change now; nothing was changed.

    Attributes:
        status: of the look taken: errors and notes per step, what could not be looked at included.
    """

    mirror: str
    status: RefreshStatus
    changes: list[PlannedItem]


class ErrorBody(ApiModel):
    """Body of every answer above 399."""

    code: str
    message: str
    leader_endpoint: str | None = None


class LocalMirror(ApiModel):
    """What one node contributes to a mirror's figures: the partitions it copies, the refresh it leads."""

    mirror: str
    running: int = 0
    lag_records: int = 0
    lag_seconds: float = 0.0
    records_per_second: float = 0.0
    bytes_per_second: float = 0.0
    refresh: RefreshStatus | None = None
    probes: ProbeHistory | None = None
