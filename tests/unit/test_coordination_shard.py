"""Authority over a coordinator partition: checks, group commit, and what a failed append means."""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from kmirror_dagster.coordination.keys import PartitionKey
from kmirror_dagster.coordination.shard import Shard, Write
from kmirror_dagster.coordination.view import StateView
from kmirror_dagster.errors import (
    ConnectionLostError,
    FencedError,
    IllegalTransitionError,
    KmirrorError,
    NotLeaderError,
    StaleEpochError,
)
from kmirror_dagster.lifecycle import MirrorState
from kmirror_dagster.records import MirrorRecord, PartitionRecord
from tests.helpers.coordination import MemoryLog, MemoryTopic, run

S = MirrorState
NAME = PartitionKey("m", "t", 0)


class Bench:
    """One shard that leads everything there is."""

    def __init__(self) -> None:
        self.topic = MemoryTopic(count=1)
        self.view = StateView(1, self.topic.topic_id)
        self.topic.views.append(self.view)
        self.log = MemoryLog(self.topic)
        self.broken: list[KmirrorError] = []

    async def shard(self, epoch: int = 1) -> Shard:
        await self.log.acquire(0)
        return Shard(
            0,
            epoch,
            self.view,
            self.log,
            now_ms=lambda: 5,
            on_broken=lambda _shard, error: self.broken.append(error),
        )


def on_bench(test: Callable[[Bench, Shard], Any]) -> None:
    async def work() -> None:
        bench = Bench()
        await test(bench, await bench.shard())

    run(work)


async def aligned(shard: Shard, name: PartitionKey = NAME) -> PartitionRecord:
    return await shard.transition(name, S.LOG_ALIGNMENT, expected_state_epoch=0)


def test_transition_is_stored_with_both_epochs() -> None:
    """A stored state carries its leader's epoch and a state epoch one higher than before."""

    async def test(bench: Bench, shard: Shard) -> None:
        first = await aligned(shard)
        assert (first.state_epoch, first.leader_epoch, first.previous_state) == (1, 1, None)
        second = await shard.transition(NAME, S.MIRRORING, expected_state_epoch=1, producer_id=7)
        assert (second.state_epoch, second.previous_state, second.producer_id) == (2, S.LOG_ALIGNMENT, 7)
        assert bench.view.states[NAME] == second

    on_bench(test)


def test_illegal_transition_is_refused_with_the_state_it_is_in() -> None:
    """Nothing is stored, and the error names both states."""

    async def test(bench: Bench, shard: Shard) -> None:
        await aligned(shard)
        with pytest.raises(IllegalTransitionError, match="PAUSED cannot follow LOG_ALIGNMENT"):
            await shard.transition(NAME, S.PAUSED, expected_state_epoch=1)
        assert bench.topic.appends == 1

    on_bench(test)


def test_older_state_epoch_is_refused() -> None:
    """A decision made by an older state is not stored."""

    async def test(bench: Bench, shard: Shard) -> None:
        await aligned(shard)
        with pytest.raises(StaleEpochError, match="state epoch 0 was expected, 1 is stored"):
            await shard.transition(NAME, S.FAILED, expected_state_epoch=0)

    on_bench(test)


def test_older_leader_epoch_is_refused() -> None:
    """A decision made by a record of another leader is not stored."""

    async def test(bench: Bench, shard: Shard) -> None:
        await aligned(shard)
        with pytest.raises(StaleEpochError, match="leader epoch"):
            await shard.transition(NAME, S.FAILED, expected_state_epoch=1, expected_leader_epoch=0)

    on_bench(test)


def test_decision_counts_what_waits_to_be_stored() -> None:
    """Of two decisions made by the same state only the first is stored, even while it still waits."""

    async def test(bench: Bench, shard: Shard) -> None:
        await aligned(shard)
        outcomes = await asyncio.gather(
            shard.transition(NAME, S.MIRRORING, expected_state_epoch=1),
            shard.transition(NAME, S.STOPPING, expected_state_epoch=1),
            return_exceptions=True,
        )
        assert isinstance(outcomes[0], PartitionRecord)
        assert isinstance(outcomes[1], StaleEpochError)

    on_bench(test)


def test_asserting_a_state_again_keeps_its_epoch() -> None:
    """The same state under another leader is no transition; another reason of FAILED is one."""

    async def test(bench: Bench, shard: Shard) -> None:
        await aligned(shard)
        failed = await shard.transition(NAME, S.FAILED, expected_state_epoch=1, error="a")
        again = await shard.transition(NAME, S.FAILED, expected_state_epoch=2, error="a")
        other = await shard.transition(NAME, S.FAILED, expected_state_epoch=2, error="b")
        assert (failed.state_epoch, again.state_epoch, other.state_epoch) == (2, 2, 3)
        assert other.previous_state is S.LOG_ALIGNMENT  # survives repeated failures

    on_bench(test)


def test_writes_that_wait_are_stored_together() -> None:
    """Many decisions at once take a few appends, not one each."""

    async def test(bench: Bench, shard: Shard) -> None:
        await asyncio.gather(*(aligned(shard, PartitionKey("m", "t", n)) for n in range(1_000)))
        assert len(bench.view.states) == 1_000
        assert bench.topic.appends <= 3

    on_bench(test)


def test_large_writes_are_split_over_appends() -> None:
    """An append stays below what a broker takes by default."""

    async def test(bench: Bench, shard: Shard) -> None:
        big = [
            MirrorRecord(
                mirror=f"m{n}",
                document={"text": "x" * 200_000},
                source_cluster_id="s",
                destination_cluster_id="d",
                created_ms=0,
            )
            for n in range(9)
        ]
        await asyncio.gather(*(shard.write([Write.of(record)]) for record in big))
        assert len(bench.view.mirrors) == 9
        assert bench.topic.appends >= 4

    on_bench(test)


@pytest.mark.parametrize("error", [ConnectionLostError("lost"), FencedError("taken over")])
def test_failed_append_ends_the_authority(error: KmirrorError) -> None:
    """After an append of unknown outcome nothing waiting behind it is stored, and nothing new is taken."""

    async def test(bench: Bench, shard: Shard) -> None:
        bench.topic.fail_before = [error]
        outcomes = await asyncio.gather(
            *(aligned(shard, PartitionKey("m", "t", n)) for n in range(3)), return_exceptions=True
        )
        assert all(outcome is error for outcome in outcomes)
        assert bench.broken == [error]
        assert not shard.is_open
        assert shard.state(NAME) is None
        with pytest.raises(NotLeaderError):
            await aligned(shard)
        assert bench.topic.logs[0] == []

    on_bench(test)


def test_deposed_leader_is_refused_by_the_broker() -> None:
    """Once a newer leader has appended, the older one's writes do not land, by the broker's word."""

    async def work() -> None:
        bench = Bench()
        old = await bench.shard(1)
        await aligned(old)
        newer = MemoryLog(bench.topic)
        await newer.acquire(0)
        await newer.append(0, [(b'["leader",0]', None)])
        with pytest.raises(FencedError):
            await old.transition(NAME, S.MIRRORING, expected_state_epoch=1)
        assert bench.view.states[NAME].state is S.LOG_ALIGNMENT

    run(work)


def test_cancelled_caller_does_not_take_its_write_back() -> None:
    """A write that is under way is stored although nobody waits for it any more."""

    async def test(bench: Bench, shard: Shard) -> None:
        task = asyncio.create_task(aligned(shard))
        await asyncio.sleep(0)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await shard.drained()
        assert bench.view.states[NAME].state is S.LOG_ALIGNMENT

    on_bench(test)


def test_record_written_by_hand_is_read_before_what_comes_behind_it() -> None:
    """A record that somebody without a lead put in between is not passed over, and the write waits for it."""

    async def test(bench: Bench, shard: Shard) -> None:
        await aligned(shard)
        bench.topic.held_back = True
        bench.topic.put(0, b'["mirror","by-hand"]', b"junk")
        task = asyncio.create_task(shard.transition(NAME, S.MIRRORING, expected_state_epoch=1))
        await asyncio.sleep(0.02)
        assert not task.done()
        bench.topic.held_back = False
        bench.topic.deliver()
        await task
        assert bench.view.quarantined
        assert bench.view.states[NAME].state is S.MIRRORING

    on_bench(test)
