"""Drives the mirror partitions this node leads towards what is wanted: write first, act after the commit."""

import asyncio
import logging
import random
from collections.abc import Callable, Sequence

from kmirror_dagster.coordination.decisions import (
    Act,
    Assert,
    AwaitRetry,
    Decision,
    Fail,
    Forget,
    Go,
    Halt,
    decide,
)
from kmirror_dagster.coordination.keys import PartitionKey
from kmirror_dagster.coordination.links import LinkPool
from kmirror_dagster.coordination.live import LivePartition
from kmirror_dagster.coordination.ports import Progress
from kmirror_dagster.coordination.shard import Shard
from kmirror_dagster.coordination.stops import StopWork
from kmirror_dagster.coordination.view import Change, StateView
from kmirror_dagster.coordination.work import CopyTotals, PartitionCounters, PartitionWork
from kmirror_dagster.errors import (
    FencedError,
    KmirrorError,
    NotLeaderError,
    ReplicationError,
    StaleEpochError,
)
from kmirror_dagster.lifecycle import MirrorState, RetryPolicy, retry_target
from kmirror_dagster.records import PartitionRecord, TopicRecord

logger = logging.getLogger(__name__)

_CLOSE_DEADLINE_S = 20.0
# after a fault of our own in one partition
_FAULT_PAUSE_S = 5.0
# a state without an intent is deleted only when no intent has turned up for this long: the two are read from
# different coordinator partitions, in no particular order
_ORPHAN_GRACE_S = 30.0


class PartitionCoordinator:
    """All mirror partitions led by this node, one task for each that is in transition.

    Args:
        view: hot copy of the state topic.
        shard_of: the shard of a coordinator partition while this node leads it.
        links: links of the node.
        stop_work: what STOPPING does.
        policy: back-off of FAILED partitions.
        rng: jitter.
        now_ms: epoch milliseconds.
    """

    def __init__(
        self,
        view: StateView,
        shard_of: Callable[[int], Shard | None],
        links: LinkPool,
        stop_work: StopWork,
        policy: RetryPolicy,
        *,
        rng: random.Random,
        now_ms: Callable[[], int],
    ) -> None:
        self._view = view
        self._shard_of = shard_of
        self._links = links
        self._work = PartitionWork(view, links, stop_work, self._failed)
        self._policy = policy
        self._rng = rng
        self._now_ms = now_ms
        self._live: dict[PartitionKey, LivePartition] = {}
        self._leaving: set[int] = set()

    @property
    def counters(self) -> PartitionCounters:
        """Totals since the node started."""
        return self._work.counters

    # what others tell

    def gained(self, coordinator_partition: int) -> None:
        """Begin with all partitions of a coordinator partition that now serves."""
        self._leaving.discard(coordinator_partition)
        for name in tuple(self._view.led_by(coordinator_partition)):
            self.wake(name)

    async def losing(self, coordinator_partitions: frozenset[int]) -> None:
        """Stop all work that depends on these coordinator partitions; callers bound the wait."""
        self._leaving |= coordinator_partitions
        names = [name for name in self._live if self._view.owner(name) in coordinator_partitions]
        tasks = [task for name in names if (task := self._live[name].task) is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.gather(*(self._work.halt(name, self._live[name]) for name in names))
        for name in names:
            self._live.pop(name).disarm()

    def changed(self, changes: Sequence[Change]) -> None:
        """React to what the view has taken in: intents of topics, deleted ones, changed mirrors."""
        for change in changes:
            if change.key[0] != "topic":
                continue
            before, after = change.before, change.after
            mirror, topic = str(change.key[1]), str(change.key[2])
            counts = [record.partitions for record in (before, after) if isinstance(record, TopicRecord)]
            for partition in range(max(counts, default=0)):
                name = PartitionKey(mirror, topic, partition)
                if self._shard(name) is None:
                    continue
                live = self._live.setdefault(name, LivePartition())
                live.deleted = after is None
                if _copy_was_replaced(before, after):
                    self._note_replaced(name, live)
                self.wake(name)

    def wake(self, name: PartitionKey) -> None:
        """Look at a partition again: something about it may have changed."""
        shard = self._shard(name)
        if shard is None:
            return
        live = self._live.setdefault(name, LivePartition())
        if live.task is None:
            if self._decide(name, live, shard) is not None:
                live.task = asyncio.create_task(self._drive(name, live), name=f"drive-{name}")
        elif live.action is not None and not isinstance(self._decide(name, live, shard), Act):
            live.preempted = True
            live.action.cancel()

    def retry_now(self, name: PartitionKey) -> None:
        """Retry a FAILED partition without waiting for its time."""
        live = self._live.setdefault(name, LivePartition())
        live.due = True
        self.wake(name)

    async def write(
        self,
        name: PartitionKey,
        target: MirrorState,
        *,
        expected: tuple[int, int],
        error: str | None,
        retriable: bool,
    ) -> PartitionRecord:
        """Store a state somebody else decided on (WriteMirrorStates), and act on it.

        Args:
            name: a mirror partition led here.
            target: state to go to.
            expected: state epoch and leader epoch the decision was made by.
            error: reason of a FAILED.
            retriable: whether a FAILED is retried.

        Raises:
            NotLeaderError: when another node leads it.
            StaleEpochError, IllegalTransitionError: as `Shard.transition`.
        """
        shard = self._shard(name)
        if shard is None:
            raise NotLeaderError(f"{name} is led by another node")
        record = await shard.transition(
            name,
            target,
            expected_state_epoch=expected[0],
            expected_leader_epoch=expected[1],
            error=error,
            retriable=retriable,
            retry_attempt=0,
        )
        live = self._live.setdefault(name, LivePartition())
        live.due = False
        live.disarm()
        self.wake(name)
        return record

    async def reconnect(self, mirror: str) -> None:
        """Close a mirror's link and begin anew with the settings stored now."""
        names = [name for name in self._live if name.mirror == mirror]
        for name in names:
            live = self._live[name]
            if live.action is not None:
                live.preempted = True
                live.action.cancel()
        await asyncio.gather(*(self._work.halt(name, self._live[name]) for name in names))
        await self._links.close([mirror], deadline_s=_CLOSE_DEADLINE_S)
        for name in names:
            self.wake(name)

    async def tick(self) -> None:
        """Once a second: clear the retry count of what copies well, close idle links, confirm orphans."""
        now = asyncio.get_running_loop().time()
        active: set[str] = set()
        for name, live in tuple(self._live.items()):
            shard = self._shard(name)
            record = shard.state(name) if shard is not None else None
            if shard is None or record is None:
                continue
            if record.state is not MirrorState.STOPPED:
                active.add(name.mirror)
            if live.orphan_since is not None and now - live.orphan_since > _ORPHAN_GRACE_S:
                live.deleted = True
                self.wake(name)
            if record.retry_attempt and live.running and live.task is None and self._copies_well(name, live):
                live.task = asyncio.create_task(self._clear_attempts(name, live, shard, record))
        idle = [mirror for mirror in self._links.open_mirrors() if mirror not in active]
        await self._links.close(idle, deadline_s=_CLOSE_DEADLINE_S)

    # what others ask

    def is_running(self, name: PartitionKey) -> bool:
        """Whether a partition is being copied here now."""
        live = self._live.get(name)
        return live is not None and live.running and live.failure is None

    def running(self) -> list[PartitionKey]:
        """Partitions that are being copied here."""
        return [name for name, live in self._live.items() if live.running]

    def copied(self) -> dict[str, CopyTotals]:
        """What was copied here since the node started, by mirror."""
        totals = {mirror: CopyTotals(**vars(total)) for mirror, total in self._work.ended.items()}
        for name, live in self._live.items():
            if live.running:
                live.seen = self.progress(name) or live.seen
                if live.seen is not None:
                    totals.setdefault(name.mirror, CopyTotals()).add(live.seen)
        return totals

    def next_retry_ms(self, name: PartitionKey) -> int | None:
        """When a FAILED partition is retried, epoch milliseconds; None when it is not."""
        live = self._live.get(name)
        return live.retry_at_ms if live else None

    def progress(self, name: PartitionKey) -> Progress | None:
        """Progress of a partition that is copied here."""
        link = self._links.peek(name.mirror)
        return link.progress(name.topic, name.partition) if link is not None else None

    def active_mirrors(self) -> set[str]:
        """Mirrors of which this node leads a partition that is not stopped."""
        states = self._view.states
        return {
            name.mirror
            for name in self._live
            if (record := states.get(name)) is not None and record.state is not MirrorState.STOPPED
        }

    # one partition

    def _shard(self, name: PartitionKey) -> Shard | None:
        owner = self._view.owner(name)
        return None if owner in self._leaving else self._shard_of(owner)

    def _decide(self, name: PartitionKey, live: LivePartition, shard: Shard) -> Decision:
        record = shard.state(name)
        decision = decide(
            record, self._view.topic(name), epoch=shard.epoch, running=live.running, failure=live.failure
        )
        if isinstance(decision, Forget) and not live.deleted:
            if live.orphan_since is None:
                live.orphan_since = asyncio.get_running_loop().time()
            return None
        live.orphan_since = None
        if (
            record is None
            or record.state is not MirrorState.FAILED
            or isinstance(decision, (Go, Fail, Forget, Halt))
        ):
            return decision
        topic = self._view.topic(name)
        if live.due and topic is not None and topic.error is None:
            return Go(retry_target(record.previous_state))
        if isinstance(decision, AwaitRetry):
            self._arm(name, live, record)
        return None

    async def _drive(self, name: PartitionKey, live: LivePartition) -> None:
        """Take steps until nothing is left to do; one such task per partition."""
        try:
            while True:
                shard = self._shard(name)
                if shard is None:
                    return
                decision = self._decide(name, live, shard)
                if decision is None:
                    return
                try:
                    await self._take(name, live, shard, decision)
                except StaleEpochError as error:
                    logger.info("%s: %s; deciding again", name, error)
        except (NotLeaderError, FencedError) as error:
            logger.info("%s: %s", name, error)
        except KmirrorError as error:
            # the append failed: the shard is closed, and taking it over again wakes this partition
            logger.warning("%s: state not stored: %s", name, error)
        except Exception:
            # a fault of ours in one partition must neither end the others nor leave this one behind
            logger.exception("%s: step failed", name, extra=name._asdict())
            asyncio.get_running_loop().call_later(_FAULT_PAUSE_S, self.wake, name)
        finally:
            live.task = None

    async def _take(self, name: PartitionKey, live: LivePartition, shard: Shard, decision: Decision) -> None:
        match decision:
            case Go(target):
                await self._work.go(name, live, shard, target)
            case Fail(error, retriable):
                await self._work.fail(name, live, shard, error, retriable)
            case Assert():
                record = shard.state(name)
                if record is not None:
                    await shard.transition(name, record.state, expected_state_epoch=record.state_epoch)
            case Act(MirrorState.PAUSING | MirrorState.STOPPING as state):
                await self._work.end(name, live, shard, state)
            case Act():
                await self._work.copy(name, live, shard)
            case Halt():
                await self._work.halt(name, live)
            case Forget():
                await self._work.forget(name, live, shard)
            case _:
                return

    async def _clear_attempts(
        self, name: PartitionKey, live: LivePartition, shard: Shard, record: PartitionRecord
    ) -> None:
        try:
            await shard.transition(
                name, record.state, expected_state_epoch=record.state_epoch, retry_attempt=0, error=None
            )
        except KmirrorError as error:
            logger.info("%s: retry count not cleared: %s", name, error)
        finally:
            live.task = None
            self.wake(name)

    def _failed(self, name: PartitionKey, live: LivePartition, error: ReplicationError) -> None:
        """Called by the link, in the loop, when copying ended by itself."""
        if self._live.get(name) is not live or not live.running:
            return
        live.failure = error
        self.wake(name)

    def _note_replaced(self, name: PartitionKey, live: LivePartition) -> None:
        record = self._view.states.get(name)
        if record is None:
            return
        if record.state is MirrorState.FAILED:
            live.due = True  # whatever it failed of is gone with the former copy
        elif live.running:
            live.failure = ReplicationError(
                "the destination topic was deleted and created anew: aligning again"
            )

    def _copies_well(self, name: PartitionKey, live: LivePartition) -> bool:
        """Whether data has moved, or there is none to move, since copying began; its totals start at 0."""
        now = self.progress(name)
        if now is None or live.failure is not None:
            return False
        return now.records_total > 0 or (now.source_end >= 0 and now.lag_records == 0)

    def _arm(self, name: PartitionKey, live: LivePartition, record: PartitionRecord) -> None:
        attempt = record.retry_attempt + 1
        if live.timer is not None or self._policy.is_exhausted(attempt):
            return
        delay_ms = self._policy.delay_ms(attempt, self._rng)
        live.retry_at_ms = self._now_ms() + int(delay_ms)
        live.timer = asyncio.get_running_loop().call_later(delay_ms / 1000, self._fire, name, live)

    def _fire(self, name: PartitionKey, live: LivePartition) -> None:
        live.disarm()
        if self._live.get(name) is live:
            self.retry_now(name)


def _copy_was_replaced(before: object, after: object) -> bool:
    return (
        isinstance(before, TopicRecord)
        and isinstance(after, TopicRecord)
        and before.destination_topic_id is not None
        and before.destination_topic_id != after.destination_topic_id
    )
