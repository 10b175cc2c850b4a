"""What the coordinator needs of the rooms below: structural types, so that tests can stand in for them."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from kmirror_dagster.errors import ReplicationError
from kmirror_dagster.lifecycle import MirrorState
from kmirror_dagster.metadata.outcome import RefreshOutcome
from kmirror_dagster.records import PartitionRecord, TopicRecord
from kmirror_dagster.replication.progress import Progress


# TEMPORARY stand-ins until replication.link and metadata.refresh land
@dataclass(frozen=True)
class Alignment:
    producer_id: int
    producer_epoch: int
    source_topic_id: str | None
    source_leader_epoch: int
    start_offset: int


@dataclass(frozen=True)
class Position:
    offset: int
    source_leader_epoch: int


@dataclass(frozen=True)
class ProbeResult:
    ok: bool
    error: str | None = None


class AppendLog(Protocol):
    """Fenced appends to the state topic (`broker.state_log.StateLog`)."""

    async def acquire(self, partition: int) -> int: ...

    async def append(self, partition: int, records: Sequence[tuple[bytes, bytes | None]]) -> int: ...

    async def release(self, partition: int) -> None: ...


class Link(Protocol):
    """All copying of one mirror on this node (`replication.link.MirrorLink`)."""

    async def align(self, topic: str, partition: int, record: PartitionRecord) -> Alignment: ...

    def start(
        self,
        topic: str,
        partition: int,
        alignment: Alignment,
        on_failure: Callable[[ReplicationError], None],
    ) -> None: ...

    async def stop(self, topic: str, partition: int, deadline_s: float) -> Position: ...

    async def position(self, topic: str, partition: int) -> Position: ...

    def progress(self, topic: str, partition: int) -> Progress | None: ...

    def running(self) -> set[tuple[str, int]]: ...

    async def probe(self) -> tuple[ProbeResult, ProbeResult]: ...

    async def close(self, deadline_s: float) -> None: ...


class MetadataRefresher(Protocol):
    """Keeps the rest of one mirror equal (`metadata.refresh.Refresher`); blocking, runs in a thread."""

    def run(
        self,
        known: Mapping[str, TopicRecord],
        mirroring: Mapping[tuple[str, int], MirrorState],
        deadline_s: float,
    ) -> RefreshOutcome: ...

    def close(self) -> None: ...
