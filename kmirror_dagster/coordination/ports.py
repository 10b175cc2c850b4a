"""What the coordinator needs of the rooms below: structural types, so that tests can stand in for them."""

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol, TypeVar

from kmirror_dagster.broker.admin_types import Acl, Quota
from kmirror_dagster.errors import KmirrorError, ReplicationError
from kmirror_dagster.lifecycle import MirrorState
from kmirror_dagster.metadata.offsets import OffsetMaps
from kmirror_dagster.metadata.outcome import RefreshOutcome, RefreshPlan
from kmirror_dagster.records import PartitionRecord, TopicRecord
from kmirror_dagster.replication.alignment import Alignment
from kmirror_dagster.replication.link import Position, ProbeResult
from kmirror_dagster.replication.progress import Progress
from kmirror_dagster.replication.translation import OffsetStore

Held = TypeVar("Held", contravariant=True)


class AppendLog(Protocol):
    """Fenced appends to the state topic (`broker.state_log.StateLog`)."""

    async def acquire(self, partition: int) -> int: ...

    async def append(self, partition: int, records: Sequence[tuple[bytes, bytes | None]]) -> int: ...

    async def release(self, partition: int) -> None: ...


class Link(Protocol):
    """All copying of one mirror on this node (`replication.link.MirrorLink`)."""

    async def align(
        self, topic: str, partition: int, record: PartitionRecord, store: OffsetStore
    ) -> Alignment: ...

    def start(
        self,
        topic: str,
        partition: int,
        alignment: Alignment,
        on_failure: Callable[[ReplicationError], None],
        *,
        owner_epoch: int,
    ) -> None: ...

    async def stop(
        self, topic: str, partition: int, deadline_s: float, *, final: bool = False
    ) -> Position: ...

    def progress(self, topic: str, partition: int) -> Progress | None: ...

    async def probe(self) -> tuple[ProbeResult, ProbeResult]: ...

    async def close(self, deadline_s: float) -> None: ...


class Release(Protocol[Held]):
    """Ends the holding back (of configurations, of ACLs) for topics at the destination; blocking."""

    def __call__(self, held: Mapping[str, Held], /) -> Mapping[str, KmirrorError | None]: ...


class MetadataRefresher(Protocol):
    """Keeps the rest of one mirror equal (`metadata.refresh.Refresher`); blocking, runs in a thread."""

    def run(
        self,
        known: Mapping[str, TopicRecord],
        mirroring: Mapping[tuple[str, int], MirrorState],
        deadline_s: float,
        *,
        synced_acls: frozenset[Acl] = ...,
        synced_quotas: frozenset[Quota] = ...,
        offset_maps: OffsetMaps | None = ...,
    ) -> RefreshOutcome: ...

    def plan(
        self,
        known: Mapping[str, TopicRecord],
        mirroring: Mapping[tuple[str, int], MirrorState],
        deadline_s: float,
        *,
        synced_acls: frozenset[Acl] = ...,
        synced_quotas: frozenset[Quota] = ...,
        offset_maps: OffsetMaps | None = ...,
    ) -> RefreshPlan: ...

    def close(self) -> None: ...
