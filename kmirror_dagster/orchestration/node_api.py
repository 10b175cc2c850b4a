"""What Dagster asks of a node: the part of `NodeClient` used here, so that tests can stand in for it."""

from collections.abc import Iterator, Sequence
from typing import Any, Protocol

from kmirror_dagster.coordination.models import (
    AdvanceRequest,
    AdvanceResult,
    ChangeFeed,
    ClusterInfo,
    CreateMirror,
    MirrorPlan,
    MirrorSummary,
    PartitionRef,
    PartitionStatus,
    ProbeHistory,
    RefreshStatus,
    VerbRequest,
    VerbResult,
)
from kmirror_dagster.lifecycle import MirrorState
from kmirror_dagster.offset_map import OffsetMap


class NodeApi(Protocol):
    """Blocking calls to a node; each raises subclasses of `KmirrorError`."""

    def ready(self) -> bool: ...

    def cluster(self) -> ClusterInfo: ...

    def mirror(self, name: str) -> MirrorSummary: ...

    def create(self, request: CreateMirror) -> MirrorSummary: ...

    def document(self, name: str) -> dict[str, Any]: ...

    def verb(self, name: str, verb: str, request: VerbRequest | None = None) -> VerbResult: ...

    def refresh(self, name: str) -> RefreshStatus: ...

    def plan(self, name: str) -> MirrorPlan: ...

    def iter_partitions(
        self, name: str, *, topic: str | None = None, state: MirrorState | None = None, limit: int = 500
    ) -> Iterator[PartitionStatus]: ...

    def advance(self, name: str, request: AdvanceRequest) -> AdvanceResult: ...

    def changes(
        self, *, cursor: str | None = None, mirror: str | None = None, limit: int = 200
    ) -> ChangeFeed: ...

    def offset_maps(self, name: str) -> dict[tuple[str, int], OffsetMap]: ...

    def probes(self, name: str) -> list[ProbeHistory]: ...

    def read_states(self, refs: Sequence[PartitionRef]) -> list[PartitionStatus]: ...

    def close(self) -> None: ...
