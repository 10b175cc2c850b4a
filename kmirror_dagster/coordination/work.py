"""The work of each state of one mirror partition, and the writes that go with it."""

import asyncio
import functools
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

from kmirror_dagster.coordination.keys import PartitionKey
from kmirror_dagster.coordination.links import LinkPool
from kmirror_dagster.coordination.live import LivePartition
from kmirror_dagster.coordination.ports import Alignment, Link, Progress
from kmirror_dagster.coordination.shard import Shard, Write
from kmirror_dagster.coordination.stops import StopWork
from kmirror_dagster.coordination.stored_offsets import LedOffsets
from kmirror_dagster.coordination.view import StateView
from kmirror_dagster.errors import (
    FencedError,
    KmirrorError,
    NotLeaderError,
    ReplicationError,
    SourceLossError,
)
from kmirror_dagster.lifecycle import MirrorState
from kmirror_dagster.records import OffsetMapRecord, PartitionRecord, PositionRecord, encode_key

logger = logging.getLogger(__name__)

_T = TypeVar("_T")

# alignments of one mirror at a time. Their requests travel together: more at once are fewer requests, not more.
_CONCURRENT_ALIGNMENTS = 5_000
_STOP_DEADLINE_S = 20.0
_ERROR_LENGTH = 1_000


@dataclass
class PartitionCounters:
    """Totals since the node started."""

    transitions: dict[MirrorState, int] = field(default_factory=dict[MirrorState, int])
    failures: int = 0
    retries: int = 0


@dataclass
class CopyTotals:
    """Sums over copies of partitions."""

    records: int = 0
    bytes: int = 0
    batches: int = 0
    resyncs: int = 0

    def add(self, progress: Progress) -> None:
        """Add what one copy has done since it began."""
        self.records += progress.records_total
        self.bytes += progress.bytes_total
        self.batches += progress.batches_total
        self.resyncs += progress.resyncs_total


class PartitionWork:
    """What is done to one partition at a time; which partition, and when, is the coordinator's business.

    Args:
        view: hot copy of the state topic.
        links: links of the node.
        stop_work: what STOPPING does.
        on_failed: called in the loop when a copy ended by itself.
    """

    def __init__(
        self,
        view: StateView,
        links: LinkPool,
        stop_work: StopWork,
        on_failed: Callable[[PartitionKey, LivePartition, ReplicationError], None],
    ) -> None:
        self._view = view
        self._links = links
        self._stop_work = stop_work
        self._on_failed = on_failed
        self._aligning: dict[str, asyncio.Semaphore] = {}
        self.counters = PartitionCounters()
        self.ended: dict[str, CopyTotals] = {}

    async def go(self, name: PartitionKey, live: LivePartition, shard: Shard, target: MirrorState) -> None:
        record = shard.state(name)
        retry = record is not None and record.state is MirrorState.FAILED and live.due
        live.due = False
        live.disarm()
        fields: dict[str, Any] = {"error": None, "retriable": True}
        if record is not None and retry:
            fields["retry_attempt"] = record.retry_attempt + 1
            self.counters.retries += 1
        elif target is not MirrorState.MIRRORING:
            fields["retry_attempt"] = 0
        await self.transition(name, shard, target, fields)

    async def fail(
        self,
        name: PartitionKey,
        live: LivePartition,
        shard: Shard,
        error: str,
        retriable: bool,
        seen: PartitionRecord | None = None,
    ) -> None:
        await self.halt(name, live)
        failure, live.failure = live.failure, None
        live.disarm()
        live.due = False
        self.counters.failures += 1
        text = error.strip()[:_ERROR_LENGTH] or "failed without a reason"
        logger.warning("%s failed: %s", name, text, extra=name._asdict())
        fields: dict[str, Any] = {"error": text, "retriable": retriable}
        stored = seen or shard.state(name)
        if isinstance(failure, SourceLossError) and stored is not None:
            fields |= stored.with_loss(failure.loss)
        await self.transition(name, shard, MirrorState.FAILED, fields, seen)

    async def copy(self, name: PartitionKey, live: LivePartition, shard: Shard) -> None:
        """Align, then copy, unless the record has changed in between."""
        record = shard.state(name)
        if record is None:
            return
        await self.halt(name, live)
        limit = self._aligning.setdefault(name.mirror, asyncio.Semaphore(_CONCURRENT_ALIGNMENTS))
        try:
            link = self._links.get(name.mirror)
            await live.settled()
            offsets = LedOffsets(name, self._view, shard, live)
            async with limit:
                alignment = await self._interruptible(
                    live, link.align(name.topic, name.partition, record, offsets)
                )
        except KmirrorError as error:
            live.failure = error
            await self.fail(name, live, shard, str(error), error.retriable, record)
            return
        except Exception as error:
            logger.exception("%s: alignment failed", name, extra=name._asdict())
            await self.fail(name, live, shard, f"internal error: {error!r}", True, record)
            return
        if alignment is None:
            return
        fields = _identity(alignment)
        if record.state is not MirrorState.MIRRORING or any(
            getattr(record, k) != v for k, v in fields.items()
        ):
            await self.transition(name, shard, MirrorState.MIRRORING, fields, record)
        if self._links.peek(name.mirror) is not link:
            return  # closed meanwhile, to be opened with other settings
        live.failure = None
        live.running = True
        failed = functools.partial(self._on_failed, name, live)
        link.start(name.topic, name.partition, alignment, failed, owner_epoch=shard.epoch)

    async def end(self, name: PartitionKey, live: LivePartition, shard: Shard, state: MirrorState) -> None:
        """PAUSING and STOPPING: stop copying, and for a stop leave an ordinary topic behind."""
        record = shard.state(name)
        if record is None:
            return
        try:
            link = self._links.get(name.mirror)
            self._count(name, live, link)
            live.running = False
            if state is MirrorState.PAUSING:
                await link.stop(name.topic, name.partition, _STOP_DEADLINE_S)
            else:
                await self._stop_work.run(name, record, shard, link)
        except (NotLeaderError, FencedError):
            raise
        except KmirrorError as error:
            await self.fail(name, live, shard, str(error), error.retriable, record)
            return
        except Exception as error:
            logger.exception("%s: %s failed", name, state, extra=name._asdict())
            await self.fail(name, live, shard, f"internal error: {error!r}", True, record)
            return
        target = MirrorState.PAUSED if state is MirrorState.PAUSING else MirrorState.STOPPED
        await self.transition(name, shard, target, {"retry_attempt": 0, "error": None}, record)

    async def forget(self, name: PartitionKey, live: LivePartition, shard: Shard) -> None:
        await self.halt(name, live)
        live.disarm()
        keys = [encode_key(kind.TYPE, *name) for kind in (PartitionRecord, PositionRecord, OffsetMapRecord)]
        await shard.write([Write.tombstone(key) for key in keys])

    async def transition(
        self,
        name: PartitionKey,
        shard: Shard,
        target: MirrorState,
        fields: dict[str, Any],
        seen: PartitionRecord | None = None,
    ) -> None:
        """Store the next state, decided by the record `seen` (the current one when not given)."""
        record = seen or shard.state(name)
        before = record.state if record else None
        epoch = record.state_epoch if record else 0
        await shard.transition(name, target, expected_state_epoch=epoch, **fields)
        if before is not target:
            self.counters.transitions[target] = self.counters.transitions.get(target, 0) + 1
            logger.info("%s: %s -> %s", name, before or "NONE", target, extra=name._asdict())

    async def halt(self, name: PartitionKey, live: LivePartition) -> None:
        """Stop copying, whatever the state; never fails."""
        link = self._links.peek(name.mirror)
        if not live.running or link is None:
            live.running = False
            return
        self._count(name, live, link)
        live.running = False
        try:
            await link.stop(name.topic, name.partition, _STOP_DEADLINE_S)
        except KmirrorError as error:
            # its writes are fenced by their sequence; what is not known now is read when it aligns again
            logger.warning("%s: stopping the copy: %s", name, error, extra=name._asdict())

    def _count(self, name: PartitionKey, live: LivePartition, link: Link) -> None:
        """Keep the totals of a copy that ends."""
        done = link.progress(name.topic, name.partition) or live.seen
        live.seen = None
        if live.running and done is not None:
            self.ended.setdefault(name.mirror, CopyTotals()).add(done)

    async def _interruptible(self, live: LivePartition, work: Awaitable[_T]) -> _T | None:
        """Await work that `wake` may cut short when something else is wanted; None when it was."""
        live.preempted = False
        live.action = asyncio.ensure_future(work)
        try:
            return await live.action
        except asyncio.CancelledError:
            if live.preempted and live.action.cancelled():
                return None
            raise
        finally:
            live.action = None


def _identity(alignment: Alignment) -> dict[str, Any]:
    return {
        "producer_id": alignment.producer_id,
        "producer_epoch": alignment.producer_epoch,
        "source_topic_id": alignment.source_topic_id,
        "source_leader_epoch": alignment.source_leader_epoch,
    }
