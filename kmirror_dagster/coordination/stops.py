"""What STOPPING does: end copying, record the last mirror position, leave an ordinary topic behind."""

import asyncio
import logging
from collections.abc import Callable, Mapping
from concurrent.futures import Executor

from kmirror_dagster.coordination.keys import PartitionKey
from kmirror_dagster.coordination.ports import ConfigRelease, Link
from kmirror_dagster.coordination.shard import Shard, Write
from kmirror_dagster.coordination.view import StateView
from kmirror_dagster.errors import KmirrorError
from kmirror_dagster.lifecycle import ALIGNING_STATES, MirrorState
from kmirror_dagster.records import PartitionRecord, PositionRecord

logger = logging.getLogger(__name__)

_STOP_DEADLINE_S = 20.0
# how long one partition waits for the others of its topic to have ended too; the last one does the work
# anyway
_SIBLINGS_DEADLINE_S = 5.0
_SIBLINGS_POLL_S = 0.05
# states in which somebody may still append to the copy
_COPYING = ALIGNING_STATES | {MirrorState.MIRRORING, MirrorState.PAUSING}

HeldConfigs = Mapping[str, str | None]


class TopicReleaser:
    """Releases held-back configurations, many topics in one request; each caller waits for its own topic.

    Args:
        release: blocking, one call for many topics.
        executor: where it runs.
    """

    def __init__(self, release: ConfigRelease, executor: Executor) -> None:
        self._release = release
        self._executor = executor
        self._waiting: dict[str, tuple[HeldConfigs, asyncio.Future[None]]] = {}
        self._worker: asyncio.Task[None] | None = None

    async def release(self, topic: str, held: HeldConfigs) -> None:
        """Put a topic's own configurations in place.

        Raises:
            KmirrorError: when the destination refuses.
        """
        known = self._waiting.get(topic)
        future = known[1] if known else asyncio.get_running_loop().create_future()
        self._waiting[topic] = (held, future)
        if self._worker is None:
            self._worker = asyncio.create_task(self._work(), name="config-release")
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
        releaser: of the destination's topics.
        now_ms: epoch milliseconds.
    """

    def __init__(self, view: StateView, releaser: TopicReleaser, *, now_ms: Callable[[], int]) -> None:
        self._view = view
        self._releaser = releaser
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
                    )
                )
            ]
        )
        topic = self._view.topic(name)
        if topic is not None and topic.source_configs and await self._siblings_ended(name):
            await self._releaser.release(name.topic, topic.source_configs)

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
