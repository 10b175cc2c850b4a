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

from kmirror_dagster.broker.gathered import GatheringCluster
from kmirror_dagster.broker.tasks import cancel_and_wait
from kmirror_dagster.broker.transactions import TransactionalProducer
from kmirror_dagster.broker.wire import TopicPartition, WireCluster, retrying
from kmirror_dagster.errors import KmirrorError, ReplicationError
from kmirror_dagster.records import DEFAULT_STATE_PARTITIONS, PartitionRecord, partition_owner
from kmirror_dagster.replication.alignment import Alignment, RecreatedError, align, destination_end
from kmirror_dagster.replication.appender import DestinationAppender
from kmirror_dagster.replication.budget import Budget
from kmirror_dagster.replication.copier import Copier, Phase, Sequence
from kmirror_dagster.replication.driver import GIVE_UP_AFTER_S, CopierDriver
from kmirror_dagster.replication.lanes import SourceLanes
from kmirror_dagster.replication.progress import Progress
from kmirror_dagster.replication.rhythm import Rhythm
from kmirror_dagster.replication.translation import OffsetStore
from kmirror_dagster.settings import MirrorSettings

log = logging.getLogger(__name__)

_PROBE_S = 1.0
_HOUSEKEEPING_S = 30.0
# filler has requests of its own for each partition: enough to fill round trips, few enough not to flood a cluster
_CONCURRENT_FILLS = 64


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
        budget: receive buffers of the node, shared by its links.
        transactional_prefix: what the transactional ids of this mirror begin with; the nodes of a group share it.
        state_partitions: partition count of the state topic.
        may_send: asked before every write; False while this node is not sure to be the owner.
    """

    def __init__(
        self,
        settings: MirrorSettings,
        *,
        node_id: str,
        budget: Budget,
        transactional_prefix: str,
        state_partitions: int = DEFAULT_STATE_PARTITIONS,
        may_send: Callable[[], bool] = lambda: True,
    ) -> None:
        self.settings = settings
        self.node_id = node_id
        self.source = GatheringCluster(settings.source, role="source")
        self.destination = GatheringCluster(settings.destination, role="destination")
        # "/" cannot be in a mirror's or a topic's name: ids of two mirrors, or of two topics, never coincide
        self._prefix = f"{transactional_prefix}/{settings.mirror}"
        self._state_partitions = state_partitions
        self._may_send = may_send
        self._budget = budget
        self._fill_slots = asyncio.Semaphore(_CONCURRENT_FILLS)
        self._copiers: dict[TopicPartition, Copier] = {}
        self._readers: dict[int, SourceLanes] = {}
        self._appenders: dict[int, DestinationAppender] = {}
        self._rhythms: dict[int, Rhythm] = {}
        self._reading: dict[Copier, SourceLanes] = {}
        self._writing: dict[Copier, DestinationAppender] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._driver = CopierDriver(
            self.source,
            self.destination,
            settings.policies,
            self,
            transactional_prefix=self._prefix,
            may_send=may_send,
        )
        self._housekeeper = asyncio.get_running_loop().create_task(self._keep_house())

    # lifecycle of partitions

    async def align(
        self, topic: str, partition: int, record: PartitionRecord, store: OffsetStore | None = None
    ) -> Alignment:
        """Do the work of LOG_ALIGNMENT.

        Args:
            topic: topic.
            partition: partition.
            record: what is stored of it.
            store: where the map of its offsets is kept, should they be translated.

        Raises:
            ReplicationError: with the reason to store.
        """
        return await align(
            self.source,
            self.destination,
            record,
            self.settings.policies,
            filler_id=f"{self._prefix}/{topic}/{partition}/filler",
            fill_slots=self._fill_slots,
            store=store,
        )

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
            plain=Sequence(
                alignment.producer_id,
                alignment.producer_epoch,
                alignment.next_sequence,
                known=alignment.next_sequence > 0,
            ),
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
            translation=alignment.translation,
        )
        if alignment.open_transaction is not None:
            self._driver.inherit(copier, alignment.open_transaction)
        self._copiers[tp] = copier
        self.spawn(self.locate(copier))

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
        self.detach(copier)
        copier.drop_queue()
        end = time.monotonic() + deadline_s
        # also for control records: the next owner must not read the log's end while one is on its way
        while (copier.in_flight or (running and copier.blocked)) and time.monotonic() < end:
            await asyncio.sleep(0.002)
        copier.doubtful = (
            copier.doubtful or bool(copier.in_flight) or not running or copier.blocked or copier.unproven
        )
        if copier.doubtful or (final and copier.transaction_open):
            left = max(end - time.monotonic(), 1.0)
            return await self.position(
                topic,
                partition,
                final=final,
                deadline_s=left,
                source_leader_epoch=copier.acked_epoch,
                opened=copier.transaction if copier.transaction_open else None,
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
        opened: TransactionalProducer | None = None,
    ) -> Position:
        """Where the destination's log ends, of a partition that is not being copied.

        Args:
            topic: topic.
            partition: partition.
            final: the topic becomes writable: a transaction of ours that is open is aborted.
            deadline_s: seconds until it must be known.
            source_leader_epoch: of the source's last mirrored batch, for the answer.
            opened: an own transaction that nothing may have been written in yet.
        """

        async def read() -> Position:
            end = await destination_end(self.destination, (topic, partition), -1)
            if final and end.open_transaction is not None:
                # its records were all mirrored as aborted ones: aborting hides nothing that was visible
                producer = TransactionalProducer(
                    self.destination, self._driver.transactional_id(topic, partition)
                )
                producer.inherit(end.open_transaction.producer_id, end.open_transaction.producer_epoch)
                await producer.abort(deadline_s=deadline_s)
                log.warning(
                    "%s/%d: an aborted transaction of the source was cut at %d", topic, partition, end.offset
                )
            elif final and opened is not None:
                await opened.abort(deadline_s=deadline_s)  # or it would end by its timeout, in a topic in use
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
        await cancel_and_wait([*self._tasks, self._housekeeper])
        await asyncio.gather(
            *(reader.close() for reader in self._readers.values()),
            *(appender.close() for appender in self._appenders.values()),
        )
        await self._driver.close()
        await self.source.close()
        await self.destination.close()

    # where to read and write

    async def locate(self, copier: Copier) -> None:
        """Attach a copier to the brokers that lead its partition now."""
        since = copier.trouble_since or time.monotonic()
        ceiling = 0.05
        while copier.phase is Phase.RUNNING:
            try:
                leader = await self.source.leader(*copier.key)
                target = await self.destination.leader(*copier.key)
                break
            except KmirrorError as error:
                if time.monotonic() - since > GIVE_UP_AFTER_S or not error.retriable:
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
        self._driver.advance(copier)

    def _reader(self, node_id: int) -> SourceLanes:
        if node_id not in self._readers:
            self._readers[node_id] = SourceLanes(
                self.source,
                node_id,
                self._budget,
                on_ready=self._driver.advance,
                on_moved=self._moved,
                on_refused=self._driver.refused,
            )
        return self._readers[node_id]

    def _appender(self, node_id: int) -> DestinationAppender:
        if node_id not in self._appenders:
            self._appenders[node_id] = DestinationAppender(
                self.destination,
                node_id,
                on_progress=self._driver.advance,
                on_doubt=self._driver.doubt,
                on_refusal=self._driver.turned_down,
                may_send=self._may_send,
                rhythm=self.rhythm(node_id),
            )
        return self._appenders[node_id]

    def rhythm(self, node_id: int) -> Rhythm:
        """Rhythm of the requests to a destination broker, data and control records together."""
        return self._rhythms.setdefault(node_id, Rhythm())

    def detach(self, copier: Copier) -> None:
        """Neither read nor send for a copier any more."""
        reader = self._reading.pop(copier, None)
        if reader is not None:
            reader.remove(copier)
        appender = self._writing.pop(copier, None)
        if appender is not None:
            appender.remove(copier)

    def send(self, copier: Copier) -> None:
        """Let the appender of its broker take a copier's head."""
        appender = self._writing.get(copier)
        if appender is not None:
            appender.ready(copier)

    def resume(self, copier: Copier) -> None:
        """Read on for a copier that was held back, when it has room again."""
        reader = self._reading.get(copier)
        if reader is not None:
            reader.resume(copier)

    def _moved(self, copier: Copier) -> None:
        self.source.forget(*copier.key)
        self._reading.pop(copier, None)
        self.spawn(self.locate(copier))

    def _fail(
        self, copier: Copier, error: ReplicationError, on_failure: Callable[[ReplicationError], None]
    ) -> None:
        if copier.phase in (Phase.FAILED, Phase.STOPPED):
            return
        log.warning("%s: %s", copier.name, error)
        copier.phase = Phase.FAILED
        copier.generation += 1
        self.detach(copier)
        copier.drop_queue()
        if self._copiers.get(copier.key) is copier:
            del self._copiers[copier.key]
        on_failure(error)

    # background

    def spawn(self, work: Coroutine[Any, Any, None]) -> None:
        """Run something beside the loops; a failure is logged."""
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
