"""What STOPPING does: end copying, record the last mirror position, leave an ordinary topic behind."""

import asyncio
import logging
from collections.abc import Callable, Mapping
from concurrent.futures import Executor
from typing import Generic, TypeVar

from kmirror_dagster.broker.admin_types import Acl
from kmirror_dagster.coordination.keys import PartitionKey
from kmirror_dagster.coordination.ports import Link, Release
from kmirror_dagster.coordination.shard import Shard, Write
from kmirror_dagster.coordination.stored_offsets import stored_offsets
from kmirror_dagster.coordination.view import StateView
from kmirror_dagster.errors import AuthorizationError, KmirrorError
from kmirror_dagster.lifecycle import ALIGNING_STATES, MirrorState
from kmirror_dagster.metadata.acls import TopicAcls, patterns_of
from kmirror_dagster.records import PartitionRecord, PositionRecord, TopicRecord

logger = logging.getLogger(__name__)

_STOP_DEADLINE_S = 20.0
# how long one partition waits for the others of its topic to have ended too; the last one does the work
# anyway
_SIBLINGS_DEADLINE_S = 5.0
_SIBLINGS_POLL_S = 0.05
# states in which somebody may still append to the copy
_COPYING = ALIGNING_STATES | {MirrorState.MIRRORING, MirrorState.PAUSING}

HeldConfigs = Mapping[str, str | None]
Held = TypeVar("Held")


class TopicReleaser(Generic[Held]):
    """Releases what was held back of topics, many in one request; each caller waits for its own topic.

    Args:
        release: blocking, one call for many topics.
        executor: where it runs.
    """

    def __init__(self, release: Release[Held], executor: Executor) -> None:
        self._release = release
        self._executor = executor
        self._waiting: dict[str, tuple[Held, asyncio.Future[None]]] = {}
        self._worker: asyncio.Task[None] | None = None

    async def release(self, topic: str, held: Held) -> None:
        """End the holding back for a topic.

        Raises:
            KmirrorError: when the destination refuses.
        """
        known = self._waiting.get(topic)
        future = known[1] if known else asyncio.get_running_loop().create_future()
        self._waiting[topic] = (held, future)
        if self._worker is None:
            self._worker = asyncio.create_task(self._work(), name="topic-release")
        await asyncio.shield(future)

    async def _work(self) -> None:
        loop = asyncio.get_running_loop()
        try:
            while self._waiting:
                batch, self._waiting = self._waiting, {}
                request = {topic: held for topic, (held, _) in batch.items()}
                errors: Mapping[str, KmirrorError | None]
                try:
                    errors = await loop.run_in_executor(self._executor, self._release, request)
                except KmirrorError as error:
                    errors = dict.fromkeys(batch, error)
                for topic, (_, future) in batch.items():
                    _resolve(future, errors.get(topic))
        finally:
            self._worker = None


def _resolve(future: "asyncio.Future[None]", error: KmirrorError | None) -> None:
    if future.done():
        return
    if error is None:
        future.set_result(None)
    else:
        future.set_exception(error)
        # whoever waited may have been cancelled
        future.exception()


class StopWork:
    """The work of STOPPING; needs no contact with the source.

    Args:
        view: hot copy of the state topic.
        releaser: of held-back configurations.
        acl_releaser: of held-back permissions to write.
        now_ms: epoch milliseconds.
    """

    def __init__(
        self,
        view: StateView,
        releaser: TopicReleaser[HeldConfigs],
        acl_releaser: TopicReleaser[TopicAcls],
        *,
        now_ms: Callable[[], int],
    ) -> None:
        self._view = view
        self._releaser = releaser
        self._acl_releaser = acl_releaser
        self._now_ms = now_ms
        self._watches: dict[tuple[str, str], asyncio.Task[bool]] = {}

    async def run(self, name: PartitionKey, record: PartitionRecord, shard: Shard, link: Link) -> None:
        """Bring a partition to where STOPPED may be stored; may be run again after any failure.

        Raises:
            KmirrorError: when the destination does not answer or refuses.
        """
        position = await link.stop(name.topic, name.partition, _STOP_DEADLINE_S, final=True)
        mirror = self._view.mirrors.get(name.mirror)
        epoch = position.source_leader_epoch
        offsets = stored_offsets(self._view, name)
        await shard.write(
            [
                Write.of(
                    PositionRecord(
                        mirror=name.mirror,
                        topic=name.topic,
                        partition=name.partition,
                        source_cluster_id=mirror.source_cluster_id if mirror else "",
                        source_leader_epoch=epoch if epoch >= 0 else record.source_leader_epoch,
                        offset=position.offset,
                        recorded_ms=self._now_ms(),
                        source_offset=offsets.to_source(position.offset) if offsets else None,
                    )
                )
            ]
        )
        topic = self._view.topic(name)
        if topic is None or not (topic.source_configs or topic.held_acls or topic.read_only_acl):
            return
        if await self._siblings_ended(name):
            if topic.source_configs:
                await self._releaser.release(name.topic, topic.source_configs)
            await self._let_writers_in(topic)

    async def _let_writers_in(self, topic: TopicRecord) -> None:
        """Grant what was held back, the last thing of a stop; a missing right does not undo the stop."""
        shared = frozenset(acl for acl in patterns_of(topic.held_acls) if self._is_held(acl, topic))
        acls = TopicAcls(topic.held_acls, topic.read_only_acl, shared)
        if not acls:
            return
        try:
            await self._acl_releaser.release(topic.topic, acls)
        except AuthorizationError as error:
            # refreshes go on trying, and say so to people
            logger.warning("stop of %s/%s: %s", topic.mirror, topic.topic, error)

    def _is_held(self, acl: Acl, besides: TopicRecord) -> bool:
        """Whether another topic that is still copied needs a permission held back."""
        return any(
            acl in patterns_of(other.held_acls) and self._is_copied(other.mirror, other.topic)
            for other in self._view.topics.get(besides.mirror, {}).values()
            if other.topic != besides.topic and other.held_acls
        )

    async def _siblings_ended(self, name: PartitionKey) -> bool:
        """Whether no partition of the topic is copied any more: held-back values are the whole topic's.

        All partitions of a topic that stop here share one watch: it looks at each of them again and again.
        """
        key = (name.mirror, name.topic)
        watch = self._watches.get(key)
        if watch is None:
            watch = self._watches[key] = asyncio.create_task(self._watch(*key), name=f"stop-{name.topic}")
            watch.add_done_callback(lambda _watch: self._watches.pop(key, None))
        return await asyncio.shield(watch)

    async def _watch(self, mirror: str, topic: str) -> bool:
        loop = asyncio.get_running_loop()
        deadline = loop.time() + _SIBLINGS_DEADLINE_S
        while self._is_copied(mirror, topic):
            if loop.time() >= deadline:
                logger.info(
                    "%s/%s: some partitions are still copied; the last one releases it", mirror, topic
                )
                return False
            await asyncio.sleep(_SIBLINGS_POLL_S)
        return True

    def _is_copied(self, mirror: str, topic: str) -> bool:
        record = self._view.topics.get(mirror, {}).get(topic)
        for partition in range(record.partitions if record else 0):
            state = self._view.states.get(PartitionKey(mirror, topic, partition))
            if state is None:
                continue
            if state.state in _COPYING or (state.state is MirrorState.STOPPING and not self._ended(state)):
                return True
        return False

    def _ended(self, state: PartitionRecord) -> bool:
        """Whether a STOPPING partition has recorded its position since the stop began."""
        position = self._view.positions.get(PartitionKey.of(state))
        return position is not None and position.recorded_ms >= state.since_ms
