"""What recovery asks of nodes, over their API; shared by the command line and Dagster."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

from kmirror_dagster.broker.admin_types import Partition
from kmirror_dagster.coordination.models import (
    CreateMirror,
    MirrorSummary,
    PartitionStatus,
    VerbRequest,
    VerbResult,
)
from kmirror_dagster.errors import KmirrorError, UnknownMirrorError, UsageError
from kmirror_dagster.lifecycle import DesiredState, MirrorState
from kmirror_dagster.recovery.positions import KnownPartition
from kmirror_dagster.settings import name_matcher

_MAX_SHADOW_PARTITIONS = 64


class MirrorCalls(Protocol):
    """The part of `coordination.client.NodeClient` that makes, stops and deletes mirrors."""

    def mirror(self, name: str) -> MirrorSummary: ...

    def create(self, request: CreateMirror) -> MirrorSummary: ...

    def delete(self, name: str, *, force: bool = False) -> None: ...

    def verb(self, name: str, verb: str, request: VerbRequest | None = None) -> VerbResult: ...

    def iter_partitions(
        self, name: str, *, topic: str | None = None, state: MirrorState | None = None, limit: int = 500
    ) -> Iterator[PartitionStatus]: ...


class NodeShadows:
    """Shadow mirrors of drills at a node (`recovery.drill.ShadowMirrors`)."""

    def __init__(self, client: MirrorCalls) -> None:
        self._client = client

    def exists(self, mirror: str) -> bool:
        """Whether there is a mirror of that name."""
        try:
            self._client.mirror(mirror)
        except UnknownMirrorError:
            return False
        return True

    def create(self, document: Mapping[str, Any]) -> None:
        """Create a mirror; harmless when it exists with this document."""
        self._client.create(CreateMirror(document=dict(document)))

    def delete(self, mirror: str) -> None:
        """Delete a mirror, whatever its state; harmless when there is none."""
        try:
            self._client.delete(mirror, force=True)
        except UnknownMirrorError:
            return

    def are_mirroring(self, mirror: str, partitions: int) -> bool:
        """Whether so many partitions are there and all are MIRRORING.

        Raises:
            KmirrorError: when one of them has failed for good, or a topic cannot be mirrored.
        """
        summary = self._client.mirror(mirror)
        for topic in summary.topics:
            if topic.error:
                raise KmirrorError(f"shadow topic {topic.topic} cannot be mirrored: {topic.error}")
        if summary.states.get(MirrorState.FAILED.value):
            for status in self._client.iter_partitions(mirror, state=MirrorState.FAILED):
                if not status.retriable:
                    raise KmirrorError(f"{status.topic}/{status.partition} is FAILED: {status.error}")
        return summary.states.get(MirrorState.MIRRORING.value, 0) == summary.partitions == partitions

    def stop(self, mirror: str) -> None:
        """Ask for a stop of all topics."""
        self._client.verb(mirror, "stop")

    def stopped_at(self, mirror: str) -> Mapping[Partition, int] | None:
        """Last mirror positions once all partitions are STOPPED; None before."""
        summary = self._client.mirror(mirror)
        if summary.states.get(MirrorState.STOPPED.value, 0) != summary.partitions:
            return None
        found: dict[Partition, int] = {}
        for status in self._client.iter_partitions(mirror):
            if status.last_mirror_offset is None:
                return None
            found[status.topic, status.partition] = status.last_mirror_offset
        return found if len(found) == summary.partitions else None


def shadow_shape(summary: MirrorSummary, topics: int) -> Sequence[int]:
    """Partition counts of a drill's topics: those of the mirror's first topics, at most 64 each.

    Raises:
        UsageError: when the mirror has no topics yet.
    """
    counts = [
        min(topic.partitions, _MAX_SHADOW_PARTITIONS) for topic in summary.topics if topic.partitions > 0
    ]
    if not counts:
        raise UsageError(f"mirror {summary.mirror} has no topics yet: there is nothing to rehearse")
    return counts[:topics]


class PartitionCalls(Protocol):
    """The part of `coordination.client.NodeClient` that lists partitions."""

    def iter_partitions(
        self, name: str, *, topic: str | None = None, state: MirrorState | None = None, limit: int = 500
    ) -> Iterator[PartitionStatus]: ...


def known_partitions(
    client: PartitionCalls, mirror: str, patterns: Sequence[str] | None = None
) -> list[KnownPartition]:
    """What a node knows of the partitions a failover would stop.

    Raises:
        UsageError: when a pattern is malformed, or nothing is mirrored.
    """
    try:
        selects = name_matcher(patterns)
    except ValueError as error:
        raise UsageError(str(error)) from error
    found = [
        KnownPartition(
            topic=status.topic,
            partition=status.partition,
            source_end=status.source_end_offset,
            lag_seconds=status.lag_seconds or 0.0,
        )
        for status in client.iter_partitions(mirror)
        if selects(status.topic) and status.desired is not DesiredState.STOPPED and status.state is not None
    ]
    if not found:
        raise UsageError(f"mirror {mirror} has no topic to fail over; see 'kmirror describe {mirror}'")
    return found
