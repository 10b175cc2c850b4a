"""All copying of one mirror on one node: readers, appenders and the life of each partition's copier.

Runs in one event loop. Data never waits for anything but the two clusters.
"""

import asyncio
import logging
import random
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any

from kmirror_dagster.broker import codes
from kmirror_dagster.broker.fetch import FetchedPartition
from kmirror_dagster.broker.transactions import TransactionalProducer
from kmirror_dagster.broker.wire import EARLIEST, LATEST, ProducerState, TopicPartition, WireCluster, retrying
from kmirror_dagster.errors import (
    ForeignWriteError,
    KmirrorError,
    ReplicationError,
    SourceLossError,
)
from kmirror_dagster.records import DEFAULT_STATE_PARTITIONS, PartitionRecord, partition_owner
from kmirror_dagster.replication.alignment import (
    Alignment,
    DivergedError,
    RecreatedError,
    align,
    destination_end,
)
from kmirror_dagster.replication.appender import DestinationAppender
from kmirror_dagster.replication.copier import Copier, Phase, Sequence
from kmirror_dagster.replication.markers import MarkerWriter
from kmirror_dagster.replication.plan import Append, Hole, Marker
from kmirror_dagster.replication.progress import Progress
from kmirror_dagster.replication.reader import Budget, SourceReader
from kmirror_dagster.settings import MirrorSettings

log = logging.getLogger(__name__)

_GIVE_UP_AFTER_S = 15.0
_FUTILE_RESYNCS = 10
_PROBE_S = 1.0
_HOUSEKEEPING_S = 30.0


@dataclass(frozen=True)
class Position:
    """Where a partition's copying ended: log end, and the source's leader epoch of the last batch (-1: unknown)."""

    offset: int
    source_leader_epoch: int


@dataclass(frozen=True)
class ProbeResult:
    """One look at one cluster."""

    ok: bool
    error: str | None = None


class MirrorLink:
    """Copies the partitions of one mirror that this node owns.

    Args:
        settings: the mirror.
        node_id: of this node, for logs.
        memory_budget: bytes that may be held in receive buffers.
        transactional_prefix: what the transactional ids of this mirror begin with; the nodes of a group share it.
        state_partitions: partition count of the state topic.
        may_send: asked before every write; False while this node is not sure to be the owner.
    """

    def __init__(
        self,
        settings: MirrorSettings,
        *,
        node_id: str,
        memory_budget: int,
        transactional_prefix: str,
        state_partitions: int = DEFAULT_STATE_PARTITIONS,
        may_send: Callable[[], bool] = lambda: True,
    ) -> None:
        self.settings = settings
        self.node_id = node_id
        self.source = WireCluster(settings.source, role="source")
        self.destination = WireCluster(settings.destination, role="destination")
        self._prefix = f"{transactional_prefix}-{settings.mirror}"
        self._state_partitions = state_partitions
        self._may_send = may_send
        self._budget = Budget(memory_budget)
        self._copiers: dict[TopicPartition, Copier] = {}
        self._readers: dict[int, SourceReader] = {}
        self._appenders: dict[int, DestinationAppender] = {}
        self._reading: dict[Copier, SourceReader] = {}
        self._writing: dict[Copier, DestinationAppender] = {}
        self._markers: MarkerWriter | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._housekeeper = asyncio.get_running_loop().create_task(self._keep_house())

    # lifecycle of partitions

    async def align(self, topic: str, partition: int, record: PartitionRecord) -> Alignment:
        """Do the work of LOG_ALIGNMENT.

        Raises:
            ReplicationError: with the reason to store.
        """
        del topic, partition  # the record names them
        return await align(self.source, self.destination, record, self.settings.policies)

    def start(
        self,
        topic: str,
        partition: int,
        alignment: Alignment,
        on_failure: Callable[[ReplicationError], None],
        *,
        owner_epoch: int = 0,
    ) -> None:
        """Copy from the alignment's cursor on until stopped or failed.

        Args:
            topic: topic.
            partition: partition.
            alignment: outcome of `align`, not older than the last stop.
            on_failure: called once, in the loop, with the reason; copying has ended then.
            owner_epoch: leader epoch of the coordinator partition this mirror partition belongs to.
        """
        tp = (topic, partition)
        if tp in self._copiers:
            raise ReplicationError(f"{topic}/{partition} is being copied already")
        leader = self.source.known_leader(topic, partition)
        copier = Copier(
            topic=topic,
            partition=partition,
            plain=Sequence(alignment.producer_id, alignment.producer_epoch, alignment.next_sequence),
            acked=alignment.start_offset,
            topic_id=leader.topic_id.bytes if leader and leader.topic_id else bytes(16),
            on_failure=lambda error: self._fail(copier, error, on_failure),
            fenced_lane=partition_owner(self.settings.mirror, topic, partition, self._state_partitions),
            owner_epoch=owner_epoch,
            last_epoch=alignment.source_leader_epoch,
            acked_epoch=alignment.source_leader_epoch,
            source_start=alignment.source_start,
            source_end=alignment.source_end,
            destination_start=alignment.destination_start,
        )
        if alignment.open_transaction is not None:
            self._inherit(copier, alignment.open_transaction)
        self._copiers[tp] = copier
        self._spawn(self._locate(copier))

    async def stop(self, topic: str, partition: int, deadline_s: float, *, final: bool = False) -> Position:
        """End copying; the source need not answer.

        Args:
            topic: topic.
            partition: partition.
            deadline_s: seconds to wait for what is in flight.
            final: the topic becomes writable: a transaction of ours that is open is aborted.

        Raises:
            KmirrorError: the destination did not say where its log ends.
        """
        copier = self._copiers.pop((topic, partition), None)
        if copier is None:
            return await self.position(topic, partition, final=final, deadline_s=deadline_s)
        running = copier.phase is Phase.RUNNING
        copier.phase = Phase.STOPPED
        self._detach(copier)
        copier.drop_queue()
        end = time.monotonic() + deadline_s
        while copier.in_flight and time.monotonic() < end:
            await asyncio.sleep(0.002)
        copier.doubtful = copier.doubtful or bool(copier.in_flight) or not running or copier.blocked
        if copier.doubtful or (final and copier.transaction_open):
            left = max(end - time.monotonic(), 1.0)
            return await self.position(
                topic, partition, final=final, deadline_s=left, source_leader_epoch=copier.acked_epoch
            )
        return Position(copier.acked, copier.acked_epoch)

    async def position(
        self,
        topic: str,
        partition: int,
        *,
        final: bool = False,
        deadline_s: float = 30.0,
        source_leader_epoch: int = -1,
    ) -> Position:
        """Where the destination's log ends, of a partition that is not being copied."""

        async def read() -> Position:
            end = await destination_end(self.destination, (topic, partition), -1)
            if final and end.open_transaction is not None:
                # its records were all mirrored as aborted ones: aborting hides nothing that was visible
                producer = TransactionalProducer(self.destination, self._transactional_id(topic, partition))
                producer.inherit(end.open_transaction.producer_id, end.open_transaction.producer_epoch)
                await producer.abort(deadline_s=deadline_s)
                log.warning(
                    "%s/%d: an aborted transaction of the source was cut at %d", topic, partition, end.offset
                )
            return Position(end.offset, source_leader_epoch)

        try:
            return await asyncio.wait_for(retrying(read, deadline_s=deadline_s), deadline_s + 5)
        except asyncio.TimeoutError:
            raise ReplicationError(
                f"{topic}/{partition}: the destination did not say within {deadline_s:g} s where its log ends"
            ) from None

    def progress(self, topic: str, partition: int) -> Progress | None:
        """How far a partition is; None when it is not being copied here."""
        copier = self._copiers.get((topic, partition))
        return copier.progress() if copier is not None else None

    def running(self) -> set[TopicPartition]:
        """Partitions being copied."""
        return set(self._copiers)

    async def probe(self) -> tuple[ProbeResult, ProbeResult]:
        """One cheap request to each cluster, source first; each bounded to a second."""
        source, destination = await asyncio.gather(_probe(self.source), _probe(self.destination))
        return source, destination

    async def close(self, deadline_s: float = 10.0) -> None:
        """Stop everything within the deadline; harmless when closed."""
        keys = list(self._copiers)
        await asyncio.gather(
            *(self.stop(topic, partition, deadline_s) for topic, partition in keys), return_exceptions=True
        )
        tasks = [*self._tasks, self._housekeeper]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.gather(
            *(reader.close() for reader in self._readers.values()),
            *(appender.close() for appender in self._appenders.values()),
        )
        if self._markers is not None:
            await self._markers.close()
        await self.source.close()
        await self.destination.close()

    # where to read and write

    async def _locate(self, copier: Copier) -> None:
        """Attach a copier to the brokers that lead its partition now."""
        since = copier.trouble_since or time.monotonic()
        ceiling = 0.05
        while copier.phase is Phase.RUNNING:
            try:
                leader = await self.source.leader(*copier.key)
                target = await self.destination.leader(*copier.key)
                break
            except KmirrorError as error:
                if time.monotonic() - since > _GIVE_UP_AFTER_S or not error.retriable:
                    copier.on_failure(ReplicationError(str(error)))
                    return
            copier.trouble_since = since
            await asyncio.sleep(random.uniform(0, ceiling))  # noqa: S311 - jitter, no secret
            ceiling = min(ceiling * 2, 1.0)
        else:
            return
        topic_id = leader.topic_id.bytes if leader.topic_id else bytes(16)
        if any(copier.topic_id) and topic_id != copier.topic_id:
            copier.on_failure(
                RecreatedError(
                    f"source topic {copier.topic} was deleted and created again: delete it at the destination and "
                    "run recover to mirror the new one"
                )
            )
            return
        copier.topic_id, copier.leader_epoch = topic_id, leader.epoch
        self._writing[copier] = self._appender(target.node_id)
        reader = self._reader(leader.node_id)
        self._reading[copier] = reader
        reader.add(copier)
        self._advance(copier)

    def _reader(self, node_id: int) -> SourceReader:
        if node_id not in self._readers:
            self._readers[node_id] = SourceReader(
                self.source,
                node_id,
                self._budget,
                on_ready=self._advance,
                on_moved=self._moved,
                on_refused=self._refused,
            )
        return self._readers[node_id]

    def _appender(self, node_id: int) -> DestinationAppender:
        if node_id not in self._appenders:
            self._appenders[node_id] = DestinationAppender(
                self.destination,
                node_id,
                on_progress=self._advance,
                on_doubt=self._doubt,
                may_send=self._may_send,
            )
        return self._appenders[node_id]

    def _detach(self, copier: Copier) -> None:
        reader = self._reading.pop(copier, None)
        if reader is not None:
            reader.remove(copier)
        appender = self._writing.pop(copier, None)
        if appender is not None:
            appender.remove(copier)

    def _moved(self, copier: Copier) -> None:
        self.source.forget(*copier.key)
        self._reading.pop(copier, None)
        self._spawn(self._locate(copier))

    # driving a copier

    def _advance(self, copier: Copier) -> None:
        """Do what a copier needs next: send its head, work at a barrier, fetch more, or end with its error."""
        if copier.phase is not Phase.RUNNING:
            return
        if copier.can_append:
            self._writing[copier].ready(copier)
        elif copier.needs_barrier_work:
            copier.blocked = True
            self._spawn(self._at_barrier(copier))
        elif copier.error is not None and not copier.queue and not copier.in_flight:
            copier.on_failure(copier.error)
            return
        reader = self._reading.get(copier)
        if reader is not None:
            reader.resume(copier)

    async def _at_barrier(self, copier: Copier) -> None:
        """Work that needs everything before it acknowledged: control records, and opening a transaction."""
        step = copier.head
        try:
            if not self._may_send():
                raise KmirrorError("this node is not sure of its leadership")
            if isinstance(step, Append):
                await self._open_transaction(copier)
            elif isinstance(step, Marker) and copier.transaction_open and copier.transaction is not None:
                await copier.transaction.abort()
                await self._await_end(copier, step.end)
                copier.transaction_open = False
            elif isinstance(step, (Marker, Hole)):
                self._refuse_long_hole(copier, step)
                await self._marker_writer().write(copier, step.start, step.end)
        except ReplicationError as error:
            copier.on_failure(error)
            return
        except KmirrorError as error:
            copier.blocked = False
            self._doubt(copier, str(error))
            return
        if copier.phase is not Phase.RUNNING:
            return
        copier.blocked = False
        if isinstance(step, (Marker, Hole)):
            copier.pop().lease.drop()
            copier.acked = copier.sent = step.end
            copier.acked_epoch = step.leader_epoch
            copier.futile = 0
        self._advance(copier)

    def _refuse_long_hole(self, copier: Copier, step: "Marker | Hole") -> None:
        length, limit = step.end - step.start, self.settings.policies.max_hole_records
        if length > limit:
            raise _final(
                ReplicationError(
                    f"{copier.name}: {length} offsets from {step.start} on hold no record at the source, more than "
                    f"policies.max_hole_records ({limit}): raise it to fill them"
                )
            )

    async def _open_transaction(self, copier: Copier) -> None:
        if copier.transaction is None:
            copier.transaction = TransactionalProducer(self.destination, self._transactional_id(*copier.key))
        # each run of this owner begins with a bumped epoch unless its own producer is still the newest one
        if not copier.transaction.ready or copier.aborting is None:
            await copier.transaction.start()
            copier.aborting = Sequence(copier.transaction.producer_id, copier.transaction.producer_epoch)
        await copier.transaction.add_partitions([copier.key])
        copier.transaction_open = True

    def _inherit(self, copier: Copier, state: ProducerState) -> None:
        """Go on with a transaction the former owner left open, under its identity."""
        copier.transaction = TransactionalProducer(self.destination, self._transactional_id(*copier.key))
        copier.transaction.inherit(state.producer_id, state.producer_epoch)
        copier.aborting = Sequence(state.producer_id, state.producer_epoch, state.last_sequence + 1)
        copier.transaction_open = True
        copier.inherited = True

    async def _await_end(self, copier: Copier, wanted: int) -> None:
        """Wait until a transaction's marker is the last record of the log."""
        end = time.monotonic() + _GIVE_UP_AFTER_S
        while True:
            reached = (await self.destination.list_offsets([copier.key], LATEST))[copier.key].value()
            if reached == wanted:
                break
            if reached > wanted:
                raise _foreign(copier, reached, wanted)
            if time.monotonic() > end:
                raise KmirrorError(f"{copier.name}: the marker at {wanted - 1} did not show")
            await asyncio.sleep(0.002)
        if copier.inherited:
            # the former owner's identity ends with its transaction: a late request of its is refused from now on
            copier.inherited = False
            copier.aborting = None

    def _transactional_id(self, topic: str, partition: int) -> str:
        return f"{self._prefix}-{topic}-{partition}"

    def _marker_writer(self) -> MarkerWriter:
        if self._markers is None:
            self._markers = MarkerWriter(self.destination, self._prefix)
        return self._markers

    # doubt and failure

    def _doubt(self, copier: Copier, reason: str) -> None:
        if copier.phase is not Phase.RUNNING:
            return
        log.info("%s: %s; reading the destination's log end again", copier.name, reason)
        copier.phase = Phase.RESYNCING
        copier.generation += 1
        copier.meter.resyncs += 1
        copier.futile += 1
        self._detach(copier)
        copier.drop_queue()
        self._spawn(self._resync(copier, reason))

    async def _resync(self, copier: Copier, reason: str) -> None:
        """After an uncertain answer: read log end and producer state before anything is sent again."""
        try:
            while copier.in_flight:
                await asyncio.sleep(0.002)
            # the first time at once, then with full jitter
            ceiling = min(0.01 * (2**copier.futile - 2), 2.0)
            await asyncio.sleep(random.uniform(0, ceiling))  # noqa: S311 - jitter, no secret
            await retrying(self.destination.refresh, deadline_s=_GIVE_UP_AFTER_S)
            end = await destination_end(self.destination, copier.key, copier.plain.producer_id)
        except KmirrorError as error:
            if copier.phase is Phase.RESYNCING:
                copier.on_failure(ReplicationError(f"destination: {error}"))
            return
        if copier.phase is not Phase.RESYNCING:
            return
        if copier.futile > _FUTILE_RESYNCS:
            copier.on_failure(
                ReplicationError(f"{copier.name}: the destination does not take offset {end.offset}: {reason}")
            )
            return
        if end.offset > copier.sent + 1:  # one marker may have been on its way
            copier.on_failure(_foreign(copier, end.offset, copier.sent))
            return
        if end.offset < copier.acked:
            log.warning(
                "%s: the destination lost offsets %d to %d (unclean leader election?); they are mirrored again",
                copier.name,
                end.offset,
                copier.acked - 1,
            )
        log.info("%s: goes on at %d after: %s", copier.name, end.offset, reason)
        copier.plain.next = end.next_sequence
        copier.aborting = None
        copier.transaction_open = False
        if end.open_transaction is not None:
            self._inherit(copier, end.open_transaction)
        copier.last_epoch = -1
        copier.error = None
        copier.restart_at(end.offset)
        copier.phase = Phase.RUNNING
        await self._locate(copier)

    def _refused(self, copier: Copier, fetched: FetchedPartition) -> None:
        self._reading.pop(copier, None)
        self._spawn(self._explain(copier, fetched))

    async def _explain(self, copier: Copier, fetched: FetchedPartition) -> None:
        """Say why the source refuses a position, and end with that."""
        if fetched.diverging_end_offset >= 0:
            lost = copier.planned - fetched.diverging_end_offset
            copier.on_failure(
                DivergedError(
                    f"{copier.name}: the source lost its offsets {fetched.diverging_end_offset} to "
                    f"{copier.planned - 1} ({lost}) in an unclean leader election, the destination holds them; "
                    "delete the topic at the destination to mirror the source anew"
                )
            )
            return
        if fetched.error_code != codes.OFFSET_OUT_OF_RANGE:
            name = codes.error_name(fetched.error_code)
            copier.on_failure(ReplicationError(f"{copier.name}: the source refuses to be read: {name}"))
            return
        try:
            first = (await self.source.list_offsets([copier.key], EARLIEST))[copier.key].value()
            last = (await self.source.list_offsets([copier.key], LATEST))[copier.key].value()
        except KmirrorError as error:
            copier.on_failure(ReplicationError(f"{copier.name}: source: {error}"))
            return
        copier.on_failure(self._out_of_range(copier, first, last))

    def _out_of_range(self, copier: Copier, first: int, last: int) -> ReplicationError:
        if copier.planned < first:
            loss = SourceLossError(
                f"{copier.name}: offsets {copier.planned} to {first - 1} ({first - copier.planned}) were deleted at the "
                "source before they were mirrored: set policies.source_log_start_beyond_cursor to skip-to-start to "
                "go on without them"
            )
            # alignment goes on at the source's first offset when the policy says so
            loss.retriable = self.settings.policies.source_log_start_beyond_cursor == "skip-to-start"
            return loss
        return ReplicationError(
            f"{copier.name}: the source ends at {last}, before the destination's end {copier.planned}: it lost its "
            "tail; delete the topic at the destination to mirror the source anew"
        )

    def _fail(
        self, copier: Copier, error: ReplicationError, on_failure: Callable[[ReplicationError], None]
    ) -> None:
        if copier.phase in (Phase.FAILED, Phase.STOPPED):
            return
        log.warning("%s: %s", copier.name, error)
        copier.phase = Phase.FAILED
        copier.generation += 1
        self._detach(copier)
        copier.drop_queue()
        if self._copiers.get(copier.key) is copier:
            del self._copiers[copier.key]
        on_failure(error)

    # background

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._finished)

    def _finished(self, task: "asyncio.Task[None]") -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            log.error("mirror %s: background work failed", self.settings.mirror, exc_info=task.exception())

    async def _keep_house(self) -> None:
        while True:
            await asyncio.sleep(_HOUSEKEEPING_S)
            self.source.close_idle()
            self.destination.close_idle()


async def _probe(cluster: WireCluster) -> ProbeResult:
    try:
        await asyncio.wait_for(cluster.ping(), _PROBE_S)
    except asyncio.TimeoutError:
        return ProbeResult(ok=False, error=f"no answer within {_PROBE_S:g} s")
    except KmirrorError as error:
        return ProbeResult(ok=False, error=str(error))
    return ProbeResult(ok=True)


def _foreign(copier: Copier, found: int, expected: int) -> ForeignWriteError:
    return ForeignWriteError(
        f"{copier.name}: the destination ends at {found} instead of {expected}: somebody else writes to this topic; "
        "stop the other writer, delete the topic at the destination and run recover"
    )


def _final(error: ReplicationError) -> ReplicationError:
    error.retriable = False
    return error
