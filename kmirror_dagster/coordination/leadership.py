"""Taking over, holding and giving up coordinator partitions."""

import asyncio
import logging
import random
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from kmirror_dagster.coordination.ports import AppendLog
from kmirror_dagster.coordination.shard import Shard
from kmirror_dagster.coordination.view import Change, Entry, StateView
from kmirror_dagster.errors import DeadlineError, FencedError, KmirrorError, NotLeaderError
from kmirror_dagster.records import LeaderRecord, decode_key

logger = logging.getLogger(__name__)

_RETRY_INITIAL_S = 0.1
_RETRY_CAP_S = 5.0
_NOTABLE_DELAY_S = 0.5
_VIEW_DEADLINE_S = 15.0
# appends need no more connections than brokers, but each take-over waits for several answers in turn
_CONCURRENT_TAKE_OVERS = 32
# a shard that held this long starts its back-off anew when it breaks
_SETTLED_S = 30.0


@dataclass(frozen=True)
class Identity:
    """Who this node is to the others."""

    node_id: str
    endpoint: str


class Leadership:
    """Coordinator partitions this node was assigned by the group, and the shards of those it has taken over.

    Taking one over: become its fenced writer, append a leader record (from then on the broker refuses the
    former leader), have everything before that record in the view, then serve.

    Args:
        view: fed by the follower.
        log: fenced appends.
        identity: announced in leader records.
        now_ms: epoch milliseconds.
        on_gained: called in the loop when a shard serves.
        on_losing: awaited before shards are forgotten; stops all work that depends on them.
    """

    def __init__(
        self,
        view: StateView,
        log: AppendLog,
        identity: Identity,
        *,
        now_ms: Callable[[], int],
        rng: random.Random,
        on_gained: Callable[[int], None],
        on_losing: Callable[[frozenset[int]], Awaitable[None]],
    ) -> None:
        self._view = view
        self._log = log
        self._identity = identity
        self._now_ms = now_ms
        self._rng = rng
        self._on_gained = on_gained
        self._on_losing = on_losing
        self._shards: dict[int, Shard] = {}
        self._holders: dict[int, asyncio.Task[None]] = {}
        self._endings: dict[int, asyncio.Future[None]] = {}
        self._take_overs = asyncio.Semaphore(_CONCURRENT_TAKE_OVERS)
        self.take_overs_total = 0
        view.subscribe(self._changed)

    @property
    def shards(self) -> Mapping[int, Shard]:
        """Shards that serve, by coordinator partition."""
        return MappingProxyType(self._shards)

    @property
    def assigned(self) -> frozenset[int]:
        """What the group assigned, whether it serves already or not."""
        return frozenset(self._holders)

    def shard(self, partition: int) -> Shard | None:
        """Shard of a coordinator partition; None when this node does not serve it."""
        shard = self._shards.get(partition)
        return shard if shard is not None and shard.is_open else None

    def assign(self, partitions: Iterable[int]) -> None:
        """Begin to take partitions over."""
        for partition in partitions:
            if partition not in self._holders:
                # one that is still being given up is taken over when that has ended, or it would end the new lead
                ending = self._endings.get(partition)
                self._holders[partition] = asyncio.create_task(
                    self._hold(partition, ending), name=f"lead-{partition}"
                )

    async def revoke(self, partitions: Iterable[int]) -> None:
        """Give partitions up: stop the work first, then forget. Callers bound the wait."""
        given_up = frozenset(partitions) & self.assigned
        earlier = {ending for partition in given_up if (ending := self._endings.get(partition)) is not None}
        ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._endings.update(dict.fromkeys(given_up, ended))
        try:
            await self._give_up(given_up)
            if earlier:
                await asyncio.wait(earlier)
        finally:
            for partition in given_up:
                if self._endings.get(partition) is ended:
                    del self._endings[partition]
            ended.set_result(None)

    async def _give_up(self, partitions: frozenset[int]) -> None:
        holders = [self._holders.pop(partition) for partition in partitions]
        for holder in holders:
            holder.cancel()
        await asyncio.gather(*holders, return_exceptions=True)
        # from here on this node answers no more for them, whoever asks
        served = {p: self._shards.pop(p) for p in partitions if p in self._shards}
        try:
            if served:
                await self._on_losing(frozenset(served))
        finally:
            for partition, shard in served.items():
                shard.close(NotLeaderError(f"coordinator partition {partition} was given up"))
        await asyncio.gather(*(self._log.release(partition) for partition in partitions))

    async def revoke_all(self) -> None:
        """Give everything up."""
        await self.revoke(self.assigned)

    async def _hold(self, partition: int, ending: "asyncio.Future[None] | None") -> None:
        """Take over, serve, and take over again when an append failed; ends by cancellation."""
        loop = asyncio.get_running_loop()
        if ending is not None:
            await asyncio.shield(ending)
        delay = _RETRY_INITIAL_S
        # Cancelling is not enough: before Python 3.12 a wait with a time limit that ends at the same moment passes the
        # cancellation over, and whoever gives this partition up would wait for ever.
        while self._is_held(partition):
            broken: asyncio.Future[KmirrorError] = loop.create_future()
            began, deposed = loop.time(), False
            try:
                async with self._take_overs:
                    shard = await self._take_over(partition, broken)
            except KmirrorError as error:
                # the first tries meet what is normal at a take-over: coordinators load, a former leader's
                # transaction ends
                level = logging.WARNING if delay > _NOTABLE_DELAY_S else logging.INFO
                logger.log(level, "cannot lead coordinator partition %d yet: %s", partition, error)
            except Exception:
                # a partition that nobody leads stands still: whatever it was, try again
                logger.exception("taking over coordinator partition %d failed", partition)
            else:
                if not self._is_held(partition):
                    return
                self._shards[partition] = shard
                self.take_overs_total += 1
                logger.info(
                    "leading coordinator partition %d, epoch %d, after %.1f s",
                    partition,
                    shard.epoch,
                    loop.time() - began,
                )
                self._on_gained(partition)
                deposed = await self._until_broken(partition, broken)
            if loop.time() - began > _SETTLED_S:
                delay = _RETRY_INITIAL_S
            if deposed:
                # the group will tell soon whose it is; taking it back at once would only fence the successor
                delay = _RETRY_CAP_S
            await asyncio.sleep(self._rng.uniform(delay / 2, delay))
            delay = min(delay * 2, _RETRY_CAP_S)

    def _changed(self, changes: Sequence[Change]) -> None:
        """Learn from the state topic of a successor, before the first refused append tells so."""
        for change in changes:
            record = change.after
            if not isinstance(record, LeaderRecord):
                continue
            shard = self._shards.get(record.coordinator_partition)
            if shard is not None and record.epoch > shard.epoch:
                shard.depose(
                    FencedError(
                        f"coordinator partition {record.coordinator_partition} was taken over by node {record.node_id}"
                    )
                )

    def _is_held(self, partition: int) -> bool:
        """Whether the running task is the one that holds a partition; not when it was given up meanwhile."""
        return self._holders.get(partition) is asyncio.current_task()

    async def _until_broken(self, partition: int, broken: "asyncio.Future[KmirrorError]") -> bool:
        """Serve until the lead is lost; whether that is to somebody else."""
        error = await asyncio.shield(broken)
        deposed = isinstance(error, FencedError)
        if deposed:
            # somebody else may be at work already; otherwise copying goes on, safe by its own fencing
            await self._on_losing(frozenset({partition}))
        self._shards.pop(partition, None)
        return deposed

    async def _take_over(self, partition: int, broken: "asyncio.Future[KmirrorError]") -> Shard:
        await self._log.acquire(partition)
        while True:
            seen = self._view.position(partition)
            record = LeaderRecord(
                coordinator_partition=partition,
                node_id=self._identity.node_id,
                endpoint=self._identity.endpoint,
                epoch=self._view.highest_epoch(partition) + 1,
                since_ms=self._now_ms(),
            )
            offset = await self._log.append(partition, [(record.key(), record.value())])
            if offset == seen:
                break
            # Records of the former leader came in between, maybe its leader record with the same epoch. It is
            # fenced now: read up to here and announce again with an epoch above all of them.
            try:
                await asyncio.wait_for(self._view.reached(partition, offset + 1), _VIEW_DEADLINE_S)
            except asyncio.TimeoutError:
                raise DeadlineError(
                    f"coordinator partition {partition} was not read up to offset {offset} "
                    f"within {_VIEW_DEADLINE_S:.0f} s"
                ) from None
        self._view.apply(
            [Entry(partition, offset, record.since_ms, decode_key(record.key()), record)],
        )

        def on_broken(_shard: Shard, error: KmirrorError) -> None:
            if not broken.done():
                broken.set_result(error)

        return Shard(partition, record.epoch, self._view, self._log, now_ms=self._now_ms, on_broken=on_broken)
