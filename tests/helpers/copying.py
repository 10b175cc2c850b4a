"""Running the copying of one mirror without a node around it."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

from kmirror_dagster.errors import ReplicationError
from kmirror_dagster.lifecycle import MirrorState
from kmirror_dagster.records import PartitionRecord
from kmirror_dagster.replication.budget import Budget
from kmirror_dagster.replication.link import MirrorLink
from kmirror_dagster.settings import FilterSettings, MirrorSettings, PolicySettings
from tests.helpers.kafka import READ_COMMITTED, READ_UNCOMMITTED, consume, log_range
from tests.helpers.secured import client_settings, own_bootstrap
from tests.helpers.translated import KeptOffsets

T = TypeVar("T")


def mirror_settings(
    source: str, destination: str, name: str, policies: PolicySettings | None = None
) -> MirrorSettings:
    """Settings of a mirror between two bootstrap addresses."""
    return MirrorSettings(
        mirror=name,
        source=client_settings(source, "source"),
        destination=client_settings(destination, "destination"),
        filters=FilterSettings(),
        policies=policies or PolicySettings(),
    )


class Copying:
    """One mirror link and what became of its partitions."""

    def __init__(self, settings: MirrorSettings, *, memory_budget: int = 64 << 20, owner: int = 1) -> None:
        self.link = MirrorLink(
            settings, node_id="test", budget=Budget(memory_budget), transactional_prefix="kmirror-test"
        )
        self.mirror = settings.mirror
        self.failures: dict[tuple[str, int], ReplicationError] = {}
        self.records: dict[tuple[str, int], PartitionRecord] = {}
        self.owner = owner
        self.offsets: dict[tuple[str, int], KeptOffsets] = {}

    async def begin(
        self,
        topic: str,
        partition: int = 0,
        record: PartitionRecord | None = None,
        *,
        before_start: Callable[[PartitionRecord], None] = lambda _: None,
        on_failure: Callable[[ReplicationError], None] = lambda _: None,
    ) -> None:
        """Align and start one partition.

        Args:
            topic: topic.
            partition: partition.
            record: what is stored of it; by default what an earlier call found out.
            before_start: called with what is to be stored before anything is copied.
            on_failure: called with the reason when copying has failed.
        """
        tp = (topic, partition)
        known = record or self.records.get(tp)
        known = known or PartitionRecord(
            mirror=self.mirror, topic=topic, partition=partition, state=MirrorState.LOG_ALIGNMENT
        )
        store = self.offsets.setdefault(tp, KeptOffsets())
        alignment = await self.link.align(topic, partition, known, store)
        self.records[tp] = known.model_copy(
            update={
                "producer_id": alignment.producer_id,
                "producer_epoch": alignment.producer_epoch,
                "source_topic_id": alignment.source_topic_id,
                "previous_state": MirrorState.LOG_ALIGNMENT,
                "state": MirrorState.MIRRORING,
            }
        )
        self.failures.pop(tp, None)
        before_start(self.records[tp])

        def failed(error: ReplicationError) -> None:
            self.failures[tp] = error
            on_failure(error)

        self.link.start(topic, partition, alignment, failed, owner_epoch=self.owner)

    async def until(self, condition: Callable[[], bool], deadline_s: float = 60.0) -> None:
        """Wait for a condition; a failed partition ends the wait."""
        end = time.monotonic() + deadline_s
        while not condition():
            if self.failures:
                raise next(iter(self.failures.values()))
            assert time.monotonic() < end, f"not reached: {self.link.running()}"
            await asyncio.sleep(0.01)

    async def caught_up(self, ends: dict[tuple[str, int], int], deadline_s: float = 60.0) -> None:
        """Wait until partitions have reached the given log ends at the destination."""

        def reached() -> bool:
            found = {tp: self.link.progress(*tp) for tp in ends}
            return all(p is not None and p.destination_end >= ends[tp] for tp, p in found.items())

        await self.until(reached, deadline_s)


def run(main: Callable[[], Awaitable[T]]) -> T:
    """Run a coroutine function in a loop of its own."""

    async def wrapper() -> T:
        return await main()

    return asyncio.run(wrapper())


def copy_once(
    settings: MirrorSettings, topic: str, partitions: Sequence[int] = (0,), deadline_s: float = 60.0
) -> Copying:
    """Mirror the given partitions up to the source's end as of now, then stop."""
    source = own_bootstrap(settings.source.address)
    ends = {(topic, p): log_range(source, topic, p)[1] for p in partitions}

    async def main() -> Copying:
        copying = Copying(settings)
        try:
            for partition in partitions:
                await copying.begin(topic, partition)
            await copying.caught_up(ends, deadline_s)
        finally:
            await copying.link.close()
        return copying

    return run(main)


def assert_identical(source: str, destination: str, topic: str, partitions: Sequence[int] = (0,)) -> None:
    """Same log start, log end and records at both isolation levels."""
    for partition in partitions:
        assert log_range(destination, topic, partition) == log_range(source, topic, partition)
        for isolation in (READ_COMMITTED, READ_UNCOMMITTED):
            theirs = consume(source, topic, partition, isolation=isolation)
            ours = consume(destination, topic, partition, isolation=isolation)
            assert ours == theirs, f"{topic}/{partition} differs at {isolation}"
