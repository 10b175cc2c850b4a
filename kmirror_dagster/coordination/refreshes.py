"""Metadata refresh of the mirrors this node leads: one loop each, the work in threads, the outcome stored."""

import asyncio
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, Future
from dataclasses import dataclass, field

from kmirror_dagster.broker.admin_types import Acl
from kmirror_dagster.coordination.decisions import intent_after_refresh
from kmirror_dagster.coordination.keys import PartitionKey
from kmirror_dagster.coordination.ports import MetadataRefresher
from kmirror_dagster.coordination.shard import Shard, Write
from kmirror_dagster.coordination.stored_offsets import MirrorOffsets
from kmirror_dagster.coordination.stored_quotas import changed_quotas, stored_quotas
from kmirror_dagster.coordination.view import Change, StateView
from kmirror_dagster.errors import KmirrorError, NotLeaderError
from kmirror_dagster.lifecycle import MirrorState
from kmirror_dagster.metadata.outcome import RefreshOutcome, RefreshPlan, RefreshStatus, StepStatus
from kmirror_dagster.records import ACL_CHUNKS, AclFields, AclsRecord, MirrorRecord, acl_chunk

logger = logging.getLogger(__name__)

RefresherFactory = Callable[[MirrorRecord], MetadataRefresher]

# one refresh, all steps; a source that does not answer must not hold it for longer
_DEADLINE_S = 120.0
_PLAN_DEADLINE_S = 60.0
# until what was not found at the source is looked for a second time
_LOOK_AGAIN_S = 3.0


class LiveStates(Mapping[tuple[str, int], MirrorState]):
    """States of a mirror's partitions as they are at each look-up: a refresh under way must see a stop.

    Read from the refresh's thread while the loop changes the view; a look-up is a single step.
    """

    def __init__(self, view: StateView, mirror: str) -> None:
        self._view = view
        self._mirror = mirror

    def __getitem__(self, key: tuple[str, int]) -> MirrorState:
        return self._view.states[PartitionKey(self._mirror, *key)].state

    def __iter__(self) -> Iterator[tuple[str, int]]:
        names = tuple(self._view.partitions_of(self._mirror))
        return iter([(name.topic, name.partition) for name in names if name in self._view.states])

    def __len__(self) -> int:
        return sum(1 for _ in self)


def stored_acls(view: StateView, mirror: str) -> frozenset[Acl]:
    """ACLs that are at the destination because of a mirror, as stored."""
    chunks = (view.acls.get((mirror, chunk)) for chunk in range(ACL_CHUNKS))
    return frozenset(Acl(*fields) for record in chunks if record is not None for fields in record.acls)


def changed_acls(view: StateView, mirror: str, acls: frozenset[Acl]) -> list[Write]:
    """Writes that store ACLs; those parts only that are others than before."""
    parts: dict[int, list[AclFields]] = {}
    for acl in sorted(acls):
        fields = _fields(acl)
        parts.setdefault(acl_chunk(fields), []).append(fields)
    writes: list[Write] = []
    for chunk in range(ACL_CHUNKS):
        stored = view.acls.get((mirror, chunk))
        wanted = tuple(parts.get(chunk, ()))
        if wanted != (stored.acls if stored is not None else ()):
            writes.append(Write.of(AclsRecord(mirror=mirror, chunk=chunk, acls=wanted)))
    return writes


def _fields(acl: Acl) -> AclFields:
    return (
        acl.resource_type,
        acl.resource_name,
        acl.pattern_type,
        acl.principal,
        acl.host,
        acl.operation,
        acl.permission,
    )


@dataclass
class _Runner:
    """One led mirror."""

    task: asyncio.Task[None] | None = None
    wanted: asyncio.Event = field(default_factory=asyncio.Event)
    waiting: list[asyncio.Future[RefreshStatus]] = field(default_factory=list[asyncio.Future[RefreshStatus]])
    served: list[asyncio.Future[RefreshStatus]] = field(default_factory=list[asyncio.Future[RefreshStatus]])
    refresher: MetadataRefresher | None = None
    revision: int = -1
    work: Future[RefreshOutcome] | None = None
    look_again: bool = False


class RefreshCoordinator:
    """All mirrors led by this node.

    Args:
        view: hot copy of the state topic.
        shard_of: the shard of a coordinator partition while this node leads it.
        factory: makes the refresher of a mirror; may block, raises `SettingsError` when the stored document
            cannot be used on this node.
        executor: where refreshes run.
        interval_s: time from one refresh's start to the next one's.
        now_ms: epoch milliseconds.
    """

    def __init__(
        self,
        view: StateView,
        shard_of: Callable[[int], Shard | None],
        factory: RefresherFactory,
        executor: Executor,
        *,
        interval_s: float,
        now_ms: Callable[[], int],
    ) -> None:
        self._view = view
        self._shard_of = shard_of
        self._factory = factory
        self._executor = executor
        self.interval_s = interval_s
        self._now_ms = now_ms
        self._runners: dict[str, _Runner] = {}
        self._leaving: set[int] = set()
        self.statuses: dict[str, RefreshStatus] = {}
        self.errors_by_step: dict[str, int] = {}

    def gained(self, coordinator_partition: int) -> None:
        """Begin with the mirrors of a coordinator partition that now serves."""
        self._leaving.discard(coordinator_partition)
        for mirror in tuple(self._view.mirrors):
            if self._view.mirror_owner(mirror) == coordinator_partition:
                self._ensure(mirror)
                self.request(mirror)  # one that runs already may not have been able to store its outcome

    async def losing(self, coordinator_partitions: frozenset[int]) -> None:
        """End the loops of mirrors that other nodes lead from now on."""
        self._leaving |= coordinator_partitions
        gone = [
            mirror for mirror in self._runners if self._view.mirror_owner(mirror) in coordinator_partitions
        ]
        await asyncio.gather(*(self._end(mirror) for mirror in gone))

    def changed(self, changes: Sequence[Change]) -> None:
        """React to mirrors that were created, changed or deleted."""
        for change in changes:
            if change.key[0] != "mirror":
                continue
            mirror = str(change.key[1])
            if change.after is None:
                runner = self._runners.get(mirror)
                if runner is not None and runner.task is not None:
                    runner.task.cancel()
            else:
                self._ensure(mirror)
                self.request(mirror)

    def request(self, mirror: str) -> None:
        """Have a mirror refreshed soon."""
        runner = self._runners.get(mirror)
        if runner is not None:
            runner.wanted.set()

    async def refresh(self, mirror: str) -> RefreshStatus:
        """Refresh a mirror now and wait for it; one that is under way does not count.

        Raises:
            NotLeaderError: when this node does not lead the mirror.
        """
        runner = self._runners.get(mirror)
        if runner is None:
            raise NotLeaderError(f"mirror {mirror!r} is led by another node")
        future: asyncio.Future[RefreshStatus] = asyncio.get_running_loop().create_future()
        runner.waiting.append(future)
        runner.wanted.set()
        return await asyncio.shield(future)

    async def plan(self, mirror: str) -> RefreshPlan:
        """Tell what a refresh would change now; waits for one that is under way.

        Raises:
            NotLeaderError: when this node does not lead the mirror.
            SettingsError: when the stored document cannot be used on this node.
        """
        runner = self._runners.get(mirror)
        if runner is None:
            raise NotLeaderError(f"mirror {mirror!r} is led by another node")
        record = self._view.mirrors[mirror]
        known = dict(self._view.topics.get(mirror, {}))
        states = LiveStates(self._view, mirror)
        acls, quotas = stored_acls(self._view, mirror), stored_quotas(self._view, mirror)
        offsets = MirrorOffsets(self._view, mirror, asyncio.get_running_loop())
        # what it remembers of former refreshes belongs to the plan
        current = runner.refresher if runner.revision == record.revision else None

        def work() -> RefreshPlan:
            refresher = current or self._factory(record)
            try:
                return refresher.plan(
                    known,
                    states,
                    _PLAN_DEADLINE_S,
                    synced_acls=acls,
                    synced_quotas=quotas,
                    offset_maps=offsets,
                )
            finally:
                if current is None:
                    refresher.close()

        return await asyncio.get_running_loop().run_in_executor(self._executor, work)

    def _shard(self, mirror: str) -> Shard | None:
        owner = self._view.mirror_owner(mirror)
        return None if owner in self._leaving else self._shard_of(owner)

    def _ensure(self, mirror: str) -> None:
        if mirror in self._runners or self._shard(mirror) is None:
            return
        runner = self._runners[mirror] = _Runner()
        runner.task = asyncio.create_task(self._run(mirror, runner), name=f"refresh-{mirror}")

    async def _end(self, mirror: str) -> None:
        runner = self._runners.get(mirror)
        if runner is not None and runner.task is not None:
            runner.task.cancel()
            await asyncio.gather(runner.task, return_exceptions=True)

    async def _run(self, mirror: str, runner: _Runner) -> None:
        loop = asyncio.get_running_loop()
        try:
            while mirror in self._view.mirrors:
                began = loop.time()
                runner.wanted.clear()
                runner.served, runner.waiting = runner.waiting, []
                status = await self._refresh(mirror, runner)
                self._note(mirror, status)
                for waiter in runner.served:
                    if not waiter.done():
                        waiter.set_result(status)
                pause = min(self.interval_s, _LOOK_AGAIN_S) if runner.look_again else self.interval_s
                left = began + pause - loop.time()
                try:
                    await asyncio.wait_for(runner.wanted.wait(), max(left, 0.0))
                except asyncio.TimeoutError:
                    continue
        finally:
            self._forget(mirror, runner)

    def _note(self, mirror: str, status: RefreshStatus) -> None:
        self.statuses[mirror] = status
        for step in status.steps:
            if not step.ok:
                self.errors_by_step[step.step] = self.errors_by_step.get(step.step, 0) + 1

    def _forget(self, mirror: str, runner: _Runner) -> None:
        if self._runners.get(mirror) is runner:
            del self._runners[mirror]
        self.statuses.pop(mirror, None)
        for waiter in (*runner.served, *runner.waiting):
            if not waiter.done():
                waiter.set_exception(NotLeaderError(f"mirror {mirror!r} is led by another node now"))
                waiter.exception()
        self._close(runner)
        self._ensure(mirror)  # deleted and made again while this loop ended

    def _close(self, runner: _Runner) -> None:
        def close() -> None:
            if runner.refresher is not None:
                runner.refresher.close()

        if runner.work is not None and not runner.work.done():
            # a thread cannot be cancelled: its clients are closed when it has ended
            runner.work.add_done_callback(lambda _work: close())
        elif runner.refresher is not None:
            self._executor.submit(close)

    async def _refresh(self, mirror: str, runner: _Runner) -> RefreshStatus:
        """One pass; whatever goes wrong becomes part of its status."""
        started_ms = self._now_ms()
        runner.look_again = False
        try:
            outcome = await self._work(mirror, runner)
            runner.look_again = outcome.look_again
            await self._store(mirror, outcome)
        except KmirrorError as error:
            logger.warning("refresh of mirror %s: %s", mirror, error, extra={"mirror": mirror})
            return self._failed(started_ms, str(error))
        except Exception as error:
            # the next pass is tried all the same, and people see this one's reason
            logger.exception("refresh of mirror %s failed", mirror, extra={"mirror": mirror})
            return self._failed(started_ms, f"internal error: {error!r}")
        return outcome.status

    async def _work(self, mirror: str, runner: _Runner) -> RefreshOutcome:
        record = self._view.mirrors[mirror]
        known = dict(self._view.topics.get(mirror, {}))
        states = LiveStates(self._view, mirror)
        acls, quotas = stored_acls(self._view, mirror), stored_quotas(self._view, mirror)
        offsets = MirrorOffsets(self._view, mirror, asyncio.get_running_loop())
        previous = runner.refresher if runner.revision != record.revision else None

        def work() -> RefreshOutcome:
            if previous is not None:
                previous.close()
            if runner.refresher is None or previous is not None:
                runner.refresher = None
                runner.refresher = self._factory(record)
                runner.revision = record.revision
            return runner.refresher.run(
                known,
                states,
                _DEADLINE_S,
                synced_acls=acls,
                synced_quotas=quotas,
                offset_maps=offsets,
            )

        runner.work = self._executor.submit(work)
        return await asyncio.wrap_future(runner.work)

    async def _store(self, mirror: str, outcome: RefreshOutcome) -> None:
        shard = self._shard(mirror)
        if shard is None:
            raise NotLeaderError(f"mirror {mirror!r} is led by another node now")
        if mirror not in self._view.mirrors:
            return  # deleted meanwhile: an intent stored now would outlive it
        topics = self._view.topics.get(mirror, {})
        now = self._now_ms()
        writes = [
            Write.of(record)
            for intent in outcome.topics
            if (record := intent_after_refresh(mirror, topics.get(intent.topic), intent, now)) is not None
        ]
        if outcome.acls is not None:
            writes += changed_acls(self._view, mirror, outcome.acls)
        if outcome.quotas is not None:
            writes += changed_quotas(self._view, mirror, outcome.quotas)
        if writes:
            await shard.write(writes)

    def _failed(self, started_ms: int, reason: str) -> RefreshStatus:
        step = StepStatus(step="refresh", ok=False, errors={"*": reason})
        return RefreshStatus(started_ms=started_ms, finished_ms=self._now_ms(), steps=[step])
