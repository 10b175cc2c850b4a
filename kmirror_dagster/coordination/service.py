"""What the API answers: this node's own knowledge, completed by what the other nodes know."""

import asyncio
import contextlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from pydantic import TypeAdapter

from kmirror_dagster.coordination.keys import PartitionKey
from kmirror_dagster.coordination.models import (
    AdvanceRequest,
    AdvanceResult,
    ChangeFeed,
    ClusterInfo,
    LocalMirror,
    MirrorPlan,
    MirrorSummary,
    Page,
    PartitionOffsets,
    PartitionRef,
    PartitionStatus,
    PlannedItem,
    ProbeHistory,
    StateWrite,
    StateWriteResult,
    VerbRequest,
    VerbResult,
)
from kmirror_dagster.coordination.operations import MirrorOperations, recoverable
from kmirror_dagster.coordination.partitions import PartitionCoordinator
from kmirror_dagster.coordination.peers import Peers
from kmirror_dagster.coordination.probes import Prober
from kmirror_dagster.coordination.refreshes import RefreshCoordinator
from kmirror_dagster.coordination.shard import Shard
from kmirror_dagster.coordination.statuses import StatusReader, page_cursor, page_position
from kmirror_dagster.coordination.stored_offsets import stored_offsets
from kmirror_dagster.coordination.view import StateView
from kmirror_dagster.errors import KmirrorError, NotLeaderError, UnknownMirrorError, UsageError
from kmirror_dagster.lifecycle import SETTLED_FOR, DesiredState, MirrorState, retry_target
from kmirror_dagster.records import MirrorRecord, PartitionRecord

_STATUSES = TypeAdapter(list[PartitionStatus])
_RESULTS = TypeAdapter(list[StateWriteResult])
_LOCAL_MIRRORS = TypeAdapter(list[LocalMirror])
_REFS = TypeAdapter(list[PartitionRef])
_WRITES = TypeAdapter(list[StateWrite])

MAX_PAGE = 2_000
_SEEN_DEADLINE_S = 2.0
_MAX_ADVANCE_S = 120.0


@dataclass(frozen=True)
class Parts:
    """What the service puts together."""

    view: StateView
    shard_of: Callable[[int], Shard | None]
    partitions: PartitionCoordinator
    refreshes: RefreshCoordinator
    operations: MirrorOperations
    prober: Prober
    peers: Peers


class NodeService:
    """Answers of one node.

    Args:
        parts: the node's rooms.
        node_id: this node.
        destination_cluster_id: the cluster it writes to.
        now_ms: epoch milliseconds.
    """

    def __init__(
        self, parts: Parts, *, node_id: str, destination_cluster_id: str, now_ms: Callable[[], int]
    ) -> None:
        self.operations = parts.operations
        self.refreshes = parts.refreshes
        self.peers = parts.peers
        self._view = parts.view
        self._shard_of = parts.shard_of
        self._partitions = parts.partitions
        self._node_id = node_id
        self._destination_cluster_id = destination_cluster_id
        self._now_ms = now_ms
        self._statuses = StatusReader(parts.view, parts.partitions, parts.refreshes, parts.prober)

    def ends(self) -> dict[int, int]:
        """Next offset of each coordinator partition led here."""
        view = self._view
        return {p: view.position(p) for p in range(view.count) if self._shard_of(p) is not None}

    async def seen(self, ends: Mapping[int, int]) -> None:
        """Wait, for moments at most, until this node has read what another one had written."""
        reached = [self._view.reached(p, end) for p, end in ends.items() if 0 <= p < self._view.count]
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(asyncio.gather(*reached), _SEEN_DEADLINE_S)

    # who leads

    def leader_of_mirror(self, mirror: str) -> str | None:
        """Endpoint of the node that leads a mirror; None when it is this one.

        Raises:
            NotLeaderError: when nobody does at the moment.
        """
        return self._leader(self._view.mirror_owner(mirror))

    def leader_of(self, name: PartitionKey) -> str | None:
        """Endpoint of the node that leads a mirror partition, as `leader_of_mirror`."""
        return self._leader(self._view.owner(name))

    def _leader(self, coordinator_partition: int) -> str | None:
        if self._shard_of(coordinator_partition) is not None:
            return None
        record = self._view.leaders.get(coordinator_partition)
        if record is None or record.node_id == self._node_id:
            raise NotLeaderError(
                f"coordinator partition {coordinator_partition} is being taken over: try again"
            )
        return record.endpoint

    def cluster(self) -> ClusterInfo:
        """All nodes as seen from here."""
        leaders = self._view.leaders
        return ClusterInfo(
            node_id=self._node_id,
            destination_cluster_id=self._destination_cluster_id,
            state_partitions=self._view.count,
            leaders={partition: record.node_id for partition, record in sorted(leaders.items())},
            endpoints={record.node_id: record.endpoint for record in leaders.values()},
        )

    def _other_endpoints(self) -> list[str]:
        return sorted(
            {record.endpoint for record in self._view.leaders.values() if record.node_id != self._node_id}
        )

    # mirrors

    async def mirrors(self) -> list[MirrorSummary]:
        """All mirrors, by name."""
        figures = await self._figures()
        return [
            self._statuses.summary(self._view.mirrors[name], figures) for name in sorted(self._view.mirrors)
        ]

    async def mirror(self, name: str) -> MirrorSummary:
        """One mirror.

        Raises:
            UnknownMirrorError: when there is none.
        """
        record = self.known(name)
        return self._statuses.summary(record, await self._figures())

    def known(self, name: str) -> MirrorRecord:
        """Stored mirror of a name.

        Raises:
            UnknownMirrorError: when there is none.
        """
        record = self._view.mirrors.get(name)
        if record is None:
            existing = ", ".join(sorted(self._view.mirrors)) or "none yet"
            raise UnknownMirrorError(f"mirror {name!r} does not exist; there are: {existing}")
        return record

    def local_mirrors(self, *, probes: bool = False) -> list[LocalMirror]:
        """What this node contributes to each mirror."""
        return self._statuses.local_mirrors(probes=probes)

    async def plan(self, name: str) -> MirrorPlan:
        """What a refresh of a mirror led here would change now.

        Raises:
            UnknownMirrorError: when there is none.
            NotLeaderError: when another node leads it.
        """
        self.known(name)
        planned = await self.refreshes.plan(name)
        changes = [
            PlannedItem(step=str(change.step), subject=change.subject, text=change.text)
            for change in planned.changes
        ]
        return MirrorPlan(mirror=name, status=planned.status, changes=changes)

    async def probes(self, name: str) -> list[ProbeHistory]:
        """What each node that works for a mirror saw of its clusters.

        Raises:
            UnknownMirrorError: when there is none.
        """
        self.known(name)
        figures = await self._figures(probes=True)
        return [item.probes for item in figures.get(name, []) if item.probes is not None]

    async def _figures(self, *, probes: bool = False) -> dict[str, list[LocalMirror]]:
        path = f"/v1/local/mirrors?probes={str(probes).lower()}"
        others = await self.peers.gather(self._other_endpoints(), "GET", path, {}, _LOCAL_MIRRORS)
        figures: dict[str, list[LocalMirror]] = {}
        for items in (self.local_mirrors(probes=probes), *others.values()):
            for item in items:
                figures.setdefault(item.mirror, []).append(item)
        return figures

    async def recover(self, mirror: str, request: VerbRequest) -> VerbResult:
        """Retry FAILED partitions with a fresh count, also those that are not retried by themselves.

        Raises:
            UnknownMirrorError, UsageError, NotLeaderError.
        """
        topics = self.operations.select(mirror, request.topics)
        if any(topic.error for topic in topics) and not request.dry_run:
            # what the topic failed of may have been put right: only a refresh can tell
            await self.refreshes.refresh(mirror)
            topics = self.operations.select(mirror, request.topics)
        names = recoverable(self._view, [topic for topic in topics if topic.error is None])
        writes = [_recovery(record) for name in names if (record := self._view.states.get(name)) is not None]
        results = await self.write_states([] if request.dry_run else writes)
        accepted = [result.ref for result in results if result.error_code is None]
        if request.dry_run:
            accepted = [PartitionRef(mirror=w.mirror, topic=w.topic, partition=w.partition) for w in writes]
        changed = sorted({ref.topic for ref in accepted})
        return VerbResult(
            mirror=mirror,
            verb="recover",
            changed=changed,
            unchanged=[topic.topic for topic in topics if topic.topic not in changed],
            partitions=len(accepted),
        )

    # partitions

    def changes(self, *, cursor: str | None, mirror: str | None, limit: int) -> ChangeFeed:
        """State changes behind a cursor."""
        return self._view.changes(cursor=cursor, mirror=mirror, limit=limit, now_ms=self._now_ms())

    async def partitions(
        self, mirror: str, *, topic: str | None, state: MirrorState | None, cursor: str | None, limit: int
    ) -> Page[PartitionStatus]:
        """One page of a mirror's partitions, by topic and partition.

        Raises:
            UnknownMirrorError: when there is no such mirror.
            UsageError: when the cursor is none of ours.
        """
        self.known(mirror)
        after = page_position(cursor)
        states = self._view.states
        names = sorted(
            name
            for name in self._view.partitions_of(mirror)
            if (topic is None or name.topic == topic)
            and (state is None or (name in states and states[name].state is state))
            and (after is None or (name.topic, name.partition) > after)
        )
        page = names[:limit]
        items = await self.read_states(page)
        last = page[-1] if len(names) > len(page) else None
        return Page(items=items, next_cursor=page_cursor(last) if last else None)

    async def read_states(
        self, names: Sequence[PartitionKey], *, local: bool = False
    ) -> list[PartitionStatus]:
        """States of partitions, with the live figures of whoever leads them.

        Args:
            names: partitions, answered in this order.
            local: only what this node knows.
        """
        elsewhere: dict[str, list[PartitionKey]] = {}
        if not local:
            for name in names:
                endpoint = self._leader_or_none(name)
                if endpoint is not None:
                    elsewhere.setdefault(endpoint, []).append(name)
        answers = await self.peers.gather(
            elsewhere,
            "POST",
            "/v1/states/read?local=true",
            {endpoint: _REFS.dump_json(_refs(group)) for endpoint, group in elsewhere.items()},
            _STATUSES,
        )
        told = {
            PartitionKey(status.mirror, status.topic, status.partition): status
            for statuses in answers.values()
            for status in statuses
        }
        return [told.get(name) or self._statuses.partition(name) for name in names]

    async def write_states(
        self, writes: Sequence[StateWrite], *, local: bool = False
    ) -> list[StateWriteResult]:
        """Write states, each on its own; those led elsewhere are handed on.

        Args:
            writes: answered in this order.
            local: refuse what is led elsewhere.
        """
        elsewhere: dict[str, list[StateWrite]] = {}
        here: list[StateWrite] = []
        for write in writes:
            endpoint = None if local else self._leader_or_none(_name(write))
            if endpoint is None:
                here.append(write)
            else:
                elsewhere.setdefault(endpoint, []).append(write)
        handed_on = self.peers.gather(
            elsewhere,
            "POST",
            "/v1/states/write?local=true",
            {endpoint: _WRITES.dump_json(group) for endpoint, group in elsewhere.items()},
            _RESULTS,
        )
        own, answers = await asyncio.gather(
            asyncio.gather(*(self._write_one(write) for write in here)), handed_on
        )
        results = {_key(result.ref): result for group in (own, *answers.values()) for result in group}
        return [results.get(_name(write)) or self._unanswered(write) for write in writes]

    def offsets(self, mirror: str) -> list[PartitionOffsets]:
        """Partitions of a mirror whose offsets are not the source's."""
        self.known(mirror)
        return [
            PartitionOffsets(topic=name.topic, partition=name.partition, runs=list(found.runs))
            for name in sorted(self._view.offset_maps)
            if name.mirror == mirror and (found := stored_offsets(self._view, name))
        ]

    def offsets_of(self, name: PartitionKey) -> PartitionOffsets:
        """Offsets of a partition led here.

        Raises:
            UnknownMirrorError: when there is no such mirror.
            UsageError: when the mirror has no such partition.
        """
        self._check_partition(name)
        return PartitionOffsets(
            topic=name.topic,
            partition=name.partition,
            runs=list(stored_offsets(self._view, name).runs),
            status=self._statuses.partition(name),
        )

    def _check_partition(self, name: PartitionKey) -> None:
        self.known(name.mirror)
        if name not in self._view.partitions_of(name.mirror):
            raise UsageError(
                f"mirror {name.mirror!r} has no partition {name.topic}/{name.partition}; "
                f"see 'kmirror describe {name.mirror}'"
            )

    async def advance(self, mirror: str, request: AdvanceRequest) -> AdvanceResult:
        """Bring a partition led here a step towards its desired state and wait until it is settled.

        Raises:
            UnknownMirrorError: when there is no such mirror.
            UsageError: when the mirror has no such partition.
            NotLeaderError: when another node leads it.
        """
        name = PartitionKey(mirror, request.topic, request.partition)
        self._check_partition(name)
        if self._shard_of(self._view.owner(name)) is None:
            raise NotLeaderError(f"{name} is led by another node")
        before = self._view.states.get(name)
        if not self._has_arrived(name, before):
            if before is not None and before.state is MirrorState.FAILED:
                self._partitions.retry_now(name)
            else:
                self._partitions.wake(name)
            await self._until_settled(name, before, min(request.wait_ms / 1000, _MAX_ADVANCE_S))
        after = self._view.states.get(name)
        advanced = (after.state_epoch if after else 0) != (before.state_epoch if before else 0)
        return AdvanceResult(status=self._statuses.partition(name), advanced=advanced)

    def _has_arrived(self, name: PartitionKey, record: PartitionRecord | None) -> bool:
        """Whether there is nothing to wait for: it is where it should be, or cannot get there by itself."""
        topic = self._view.topic(name)
        desired = topic.desired if topic else DesiredState.STOPPED
        if record is None:
            return desired is not DesiredState.MIRRORING or (topic is not None and topic.error is not None)
        if record.state is MirrorState.FAILED and desired is not DesiredState.STOPPED:
            return not record.retriable
        settled = record.state is SETTLED_FOR[desired]
        return settled and (record.state is not MirrorState.MIRRORING or self._partitions.is_running(name))

    async def _until_settled(self, name: PartitionKey, before: PartitionRecord | None, wait_s: float) -> None:
        moved = asyncio.Event()
        unsubscribe = self._view.subscribe(lambda _changes: moved.set())
        loop = asyncio.get_running_loop()
        deadline = loop.time() + wait_s
        try:
            while not self._is_settled(name, before):
                moved.clear()
                left = deadline - loop.time()
                if left <= 0:
                    return
                try:
                    await asyncio.wait_for(moved.wait(), left)
                except asyncio.TimeoutError:
                    return
        finally:
            unsubscribe()

    def _is_settled(self, name: PartitionKey, before: PartitionRecord | None) -> bool:
        record = self._view.states.get(name)
        if record is None:
            return False
        if record.state is MirrorState.FAILED:
            return before is None or record.state_epoch != before.state_epoch
        return self._has_arrived(name, record)

    async def _write_one(self, write: StateWrite) -> StateWriteResult:
        name = _name(write)
        ref = PartitionRef(mirror=write.mirror, topic=write.topic, partition=write.partition)
        try:
            await self._partitions.write(
                name,
                write.state,
                expected=(write.expected_state_epoch, write.expected_leader_epoch),
                error=write.error,
                retriable=write.retriable,
            )
        except KmirrorError as error:
            return StateWriteResult(
                ref=ref,
                error_code=type(error).__name__,
                message=str(error),
                status=self._statuses.partition(name),
            )
        return StateWriteResult(ref=ref, status=self._statuses.partition(name))

    def _unanswered(self, write: StateWrite) -> StateWriteResult:
        name = _name(write)
        return StateWriteResult(
            ref=PartitionRef(mirror=write.mirror, topic=write.topic, partition=write.partition),
            error_code=NotLeaderError.__name__,
            message=f"the node that leads {name} did not answer: try again",
            status=self._statuses.partition(name),
        )

    def _leader_or_none(self, name: PartitionKey) -> str | None:
        try:
            return self.leader_of(name)
        except NotLeaderError:
            return None


def _recovery(record: PartitionRecord) -> StateWrite:
    return StateWrite(
        mirror=record.mirror,
        topic=record.topic,
        partition=record.partition,
        state=retry_target(record.previous_state),
        expected_state_epoch=record.state_epoch,
        expected_leader_epoch=record.leader_epoch,
    )


def _name(write: StateWrite) -> PartitionKey:
    return PartitionKey(write.mirror, write.topic, write.partition)


def _key(ref: PartitionRef) -> PartitionKey:
    return PartitionKey.of(ref)


def _refs(names: Iterable[PartitionKey]) -> list[PartitionRef]:
    return [PartitionRef(mirror=n.mirror, topic=n.topic, partition=n.partition) for n in names]
