"""What is told about partitions and mirrors, put together from stored records and live progress."""

import base64
import json
from collections import Counter
from typing import Any, cast

from kmirror_dagster.coordination.keys import PartitionKey
from kmirror_dagster.coordination.models import (
    LocalMirror,
    MirrorSummary,
    PartitionStatus,
    TopicStatus,
)
from kmirror_dagster.coordination.partitions import PartitionCoordinator
from kmirror_dagster.coordination.ports import Progress
from kmirror_dagster.coordination.probes import Prober
from kmirror_dagster.coordination.refreshes import RefreshCoordinator
from kmirror_dagster.coordination.view import StateView
from kmirror_dagster.errors import UsageError
from kmirror_dagster.lifecycle import DesiredState
from kmirror_dagster.records import MirrorRecord


class StatusReader:
    """Reads one node's knowledge; asks nobody.

    Args:
        view: hot copy of the state topic.
        partitions: those led here.
        refreshes: of the mirrors led here.
        prober: looks at the clusters of the mirrors this node works for.
    """

    def __init__(
        self,
        view: StateView,
        partitions: PartitionCoordinator,
        refreshes: RefreshCoordinator,
        prober: Prober,
    ) -> None:
        self._view = view
        self._partitions = partitions
        self._refreshes = refreshes
        self._prober = prober

    def partition(self, name: PartitionKey) -> PartitionStatus:
        """State of a partition, and its progress when it is copied here."""
        record = self._view.states.get(name)
        topic = self._view.topic(name)
        position = self._view.positions.get(name)
        leader = self._view.leaders.get(self._view.owner(name))
        status = PartitionStatus(
            mirror=name.mirror,
            topic=name.topic,
            partition=name.partition,
            state=record.state if record else None,
            desired=topic.desired if topic else DesiredState.STOPPED,
            next_retry_ms=self._partitions.next_retry_ms(name),
            node_id=leader.node_id if leader else None,
            last_mirror_offset=position.offset if position else None,
            last_mirror_epoch=position.source_leader_epoch if position else None,
            last_mirror_ms=position.recorded_ms if position else None,
            last_mirror_source_offset=position.source_offset if position else None,
        )
        update: dict[str, Any] = {}
        if record is not None:
            update = {field: getattr(record, field) for field in _FROM_RECORD}
        progress = self._partitions.progress(name)
        if progress is not None:
            update |= _figures(progress)
        return status.model_copy(update=update)

    def local_mirrors(self, *, probes: bool = False) -> list[LocalMirror]:
        """What this node contributes to each mirror; with `probes` also what it saw of its clusters."""
        progress: dict[str, list[Progress]] = {}
        for name in self._partitions.running():
            item = self._partitions.progress(name)
            if item is not None:
                progress.setdefault(name.mirror, []).append(item)
        return [self._local(mirror, progress.get(mirror, []), probes=probes) for mirror in self._view.mirrors]

    def summary(self, record: MirrorRecord, figures: dict[str, list[LocalMirror]]) -> MirrorSummary:
        """A mirror at a glance, with the figures all nodes have told."""
        parts = figures.get(record.mirror, [])
        names = self._view.partitions_of(record.mirror)
        states = self._view.states
        counts = Counter(str(states[name].state) if name in states else "NONE" for name in names)
        leader = self._view.leaders.get(self._view.mirror_owner(record.mirror))
        refreshes = [part.refresh for part in parts if part.refresh is not None]
        return MirrorSummary(
            mirror=record.mirror,
            source_bootstrap=_bootstrap(record.document),
            source_cluster_id=record.source_cluster_id,
            destination_cluster_id=record.destination_cluster_id,
            created_ms=record.created_ms,
            topics=[
                TopicStatus(
                    topic=topic.topic, partitions=topic.partitions, desired=topic.desired, error=topic.error
                )
                for _, topic in sorted(self._view.topics.get(record.mirror, {}).items())
            ],
            partitions=len(names),
            states=dict(sorted(counts.items())),
            lag_records=sum(part.lag_records for part in parts),
            lag_seconds=max((part.lag_seconds for part in parts), default=0.0),
            records_per_second=sum(part.records_per_second for part in parts),
            bytes_per_second=sum(part.bytes_per_second for part in parts),
            refresh=max(refreshes, key=lambda refresh: refresh.finished_ms, default=None),
            coordinator_node=leader.node_id if leader else None,
        )

    def _local(self, mirror: str, progress: list[Progress], *, probes: bool) -> LocalMirror:
        return LocalMirror(
            mirror=mirror,
            running=len(progress),
            lag_records=sum(max(item.lag_records, 0) for item in progress),
            lag_seconds=max((item.lag_seconds for item in progress), default=0.0),
            records_per_second=sum(item.records_per_second for item in progress),
            bytes_per_second=sum(item.bytes_per_second for item in progress),
            refresh=self._refreshes.statuses.get(mirror),
            probes=self._prober.history(mirror) if probes else None,
        )


_FROM_RECORD = (
    "previous_state",
    "state_epoch",
    "leader_epoch",
    "since_ms",
    "error",
    "retriable",
    "retry_attempt",
    "source_topic_id",
    "lost_offsets",
    "lost_from",
    "lost_to",
)


def _figures(progress: Progress) -> dict[str, int | float | None]:
    def known(offset: int) -> int | None:
        return offset if offset >= 0 else None

    return {
        "source_start_offset": known(progress.source_start),
        "source_end_offset": known(progress.source_end),
        "destination_start_offset": known(progress.destination_start),
        "destination_end_offset": known(progress.destination_end),
        "lag_records": known(progress.lag_records),
        "lag_seconds": progress.lag_seconds,
        "records_per_second": progress.records_per_second,
        "bytes_per_second": progress.bytes_per_second,
    }


def _bootstrap(document: dict[str, Any]) -> str:
    source = cast("dict[str, Any]", document.get("source") or {})
    servers = source.get("bootstrap.servers", source.get("bootstrap_servers", ""))
    return servers if isinstance(servers, str) else ",".join(str(server) for server in servers)


def page_cursor(name: PartitionKey) -> str:
    """Cursor of the page behind a partition."""
    return base64.urlsafe_b64encode(json.dumps([name.topic, name.partition]).encode()).decode()


def page_position(cursor: str | None) -> tuple[str, int] | None:
    """Topic and partition a page begins behind; None for the first page.

    Raises:
        UsageError: when the cursor is none of ours.
    """
    if cursor is None:
        return None
    try:
        topic, partition = json.loads(base64.urlsafe_b64decode(cursor.encode()))
        return str(topic), int(partition)
    except (ValueError, TypeError):
        raise UsageError("cursor: not one this API has given out; begin without one") from None
