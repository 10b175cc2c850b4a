"""Leads that move between nodes: fencing, taking over, giving up, pauses."""

import asyncio

import pytest

from kmirror_dagster.coordination.keys import PartitionKey
from kmirror_dagster.coordination.models import CreateMirror, VerbRequest
from kmirror_dagster.coordination.pauses import PauseGuard
from kmirror_dagster.errors import ConnectionLostError, NotLeaderError, ReplicationError
from kmirror_dagster.lifecycle import MirrorState
from kmirror_dagster.records import LeaderRecord, TopicRecord, encode_key
from tests.helpers.coordination import MemoryNode, World, document, eventually, led_world, mirrored, run

S = MirrorState
ALL = range(5)


def leaders(node: MemoryNode) -> set[str]:
    return {record.node_id for record in node.view.leaders.values()}


def test_epoch_grows_with_every_take_over() -> None:
    """Each leader announces itself with a higher epoch than any record has."""

    async def work() -> None:
        world = World()
        async with MemoryNode(world, "n1") as one, MemoryNode(world, "n2") as two:
            await one.lead(0)
            assert two.view.leaders[0].epoch == 1
            await one.leadership.revoke([0])
            await two.lead(0)
            assert (one.view.leaders[0].epoch, one.view.leaders[0].node_id) == (2, "n2")

    run(work)


def test_take_over_reads_what_came_in_between() -> None:
    """A leader whose view lags announces itself again, above everything that was stored meanwhile."""

    async def work() -> None:
        world = World()
        async with MemoryNode(world, "n1") as node:
            late = LeaderRecord(coordinator_partition=0, node_id="old", endpoint="x", epoch=9, since_ms=0)
            world.topic.held_back = True
            world.topic.put(0, late.key(), late.value())
            node.leadership.assign([0])
            await eventually(lambda: len(world.topic.logs[0]) == 2)
            await asyncio.sleep(0.01)
            assert node.leadership.shard(0) is None
            world.topic.held_back = False
            world.topic.deliver()
            await eventually(lambda: node.leadership.shard(0))
            assert node.view.leaders[0].epoch == 10

    run(work)


def test_take_over_that_ends_while_it_is_given_up_serves_nothing() -> None:
    """What a take-over waits for arrives as it is cancelled: nothing is led, and giving up ends."""

    async def work() -> None:
        world = World()
        async with MemoryNode(world, "n1") as node:
            late = LeaderRecord(coordinator_partition=0, node_id="old", endpoint="x", epoch=9, since_ms=0)
            world.topic.held_back = True
            world.topic.put(0, late.key(), late.value())
            node.leadership.assign([0])
            await eventually(lambda: len(world.topic.logs[0]) == 2)
            await eventually(lambda: node.view._waiters)
            world.topic.held_back = False
            world.topic.deliver()
            await asyncio.wait_for(node.leadership.revoke([0]), 5)
            assert node.leadership.shard(0) is None
            assert not node.leadership.assigned

    run(work)


def test_crashed_node_is_taken_over_and_everything_is_copied_again() -> None:
    """After a crash the others assert the states under their epochs, align, and copy; no state changes."""

    async def work() -> None:
        world = World()
        async with MemoryNode(world, "n1") as one, MemoryNode(world, "n2") as two:
            await one.lead()
            await mirrored(one, t=20)
            epochs = {name: record.state_epoch for name, record in two.view.states.items()}
            await one.crash()
            await two.lead()
            await eventually(lambda: len(two.partitions.running()) == 20)
            assert leaders(two) == {"n2"}
            assert {name: record.state_epoch for name, record in two.view.states.items()} == epochs
            assert {record.leader_epoch for record in two.view.states.values()} == {2}
            assert len(two.link().aligned) == 20  # each read the log end before it wrote

    run(work)


@pytest.mark.parametrize(
    ("state", "verb", "settled"),
    [(S.PAUSING, "pause", S.PAUSED), (S.STOPPING, "stop", S.STOPPED)],
)
def test_half_done_work_is_finished_by_the_next_leader(
    state: MirrorState, verb: str, settled: MirrorState
) -> None:
    """A node that dies while it pauses or stops leaves a stored state, and the next leader goes on from there."""

    async def work() -> None:
        world = World()
        async with MemoryNode(world, "n1") as one, MemoryNode(world, "n2") as two:
            await one.lead()
            await mirrored(one, t=4)
            one.link().stop_errors["t"] = [ConnectionLostError("hangs")] * 100
            for name in one.view.states:
                one.partitions._live[name].running = True
            one.link().stop = _hang  # type: ignore[method-assign]
            await one.operations.verb("m", verb, VerbRequest())
            await eventually(lambda: one.states() == {state})
            await one.crash()
            await two.lead()
            await eventually(lambda: two.states() == {settled})

    run(work)


async def _hang(*_: object, **__: object) -> None:
    await asyncio.sleep(3_600)


def test_deposed_leader_stops_its_work_and_writes_nothing() -> None:
    """A node that is fenced while it believes to lead ends its copies and leaves the stored state alone."""

    async def work() -> None:
        world = World()
        async with MemoryNode(world, "n1") as one, MemoryNode(world, "n2") as two:
            await one.lead()
            await mirrored(one, t=3)
            world.topic.views.remove(one.view)
            await two.lead()  # the group moved everything, the first node has not heard of it
            await eventually(lambda: len(two.partitions.running()) == 3)
            for partition in range(3):
                one.link().fail("t", partition, ReplicationError("fenced producer"))
            await eventually(lambda: not one.link().running)
            await asyncio.sleep(0.02)
            assert two.states() == {S.MIRRORING}

    run(work)


def test_leader_that_reads_of_its_successor_stops_at_once() -> None:
    """A successor's announcement ends the copies of whoever led before, and is not answered with another one."""

    async def work() -> None:
        world = World()
        async with MemoryNode(world, "n1") as one, MemoryNode(world, "n2") as two:
            await one.lead()
            await mirrored(one, t=3)
            await two.lead()
            await eventually(lambda: not one.link().running)
            await eventually(lambda: len(two.partitions.running()) == 3)
            assert leaders(two) == {"n2"}
            assert two.states() == {S.MIRRORING}

    run(work)


def test_given_up_partitions_end_their_copies_first() -> None:
    """When leads are given up, copies have ended before the shards are forgotten; the rest goes on."""

    async def work() -> None:
        world = World()
        async with MemoryNode(world, "n1") as one:
            await one.lead()
            await mirrored(one, t=20)
            gone = {name for name in one.view.states if one.view.owner(name) in (0, 1)}
            assert gone
            await one.leadership.revoke([0, 1])
            running = set(one.partitions.running())
            assert running == set(one.view.states) - gone
            assert {(name.topic, name.partition) for name in running} == set(one.link().running)
            with pytest.raises(NotLeaderError):
                name = next(iter(gone))
                await one.partitions.write(name, S.FAILED, expected=(2, 1), error=None, retriable=True)

    run(work)


def test_lead_is_taken_again_after_a_failed_append_without_ending_copies() -> None:
    """A destination that loses an append does not interrupt data; the lead is announced anew."""

    async def test(world: World, node: MemoryNode) -> None:
        await mirrored(node, t=3)
        owner = node.view.mirror_owner("m")
        epoch = node.view.leaders[owner].epoch
        world.topic.fail_before = [ConnectionLostError("connection lost")]
        with pytest.raises(ConnectionLostError):
            await node.operations.verb("m", "pause", VerbRequest())
        assert len(node.link().running) == 3
        await eventually(lambda: node.leadership.shard(owner))
        assert node.view.leaders[owner].epoch == epoch + 1
        await node.operations.verb("m", "pause", VerbRequest())
        await eventually(lambda: node.states() == {S.PAUSED})

    led_world(test)


def test_mirror_is_refreshed_by_its_leader_only() -> None:
    """The refresh loop of a mirror moves with the lead of its coordinator partition."""

    async def work() -> None:
        world = World()
        async with MemoryNode(world, "n1") as one, MemoryNode(world, "n2") as two:
            await one.lead()
            await mirrored(one, t=1)
            assert list(one.refreshes.statuses) == ["m"]
            owner = one.view.mirror_owner("m")
            await one.leadership.revoke([owner])
            assert not one.refreshes.statuses
            await two.lead(owner)
            await eventually(lambda: "m" in two.refreshes.statuses)

    run(work)


def test_intents_stored_by_one_node_are_acted_on_by_all() -> None:
    """The mirror's leader writes intents; leaders of its partitions follow them from their views."""

    async def work() -> None:
        world = World()
        async with MemoryNode(world, "n1") as one, MemoryNode(world, "n2") as two:
            await one.lead(0, 1, 2)
            await two.lead(3, 4)
            leader = one if one.leadership.shard(one.view.mirror_owner("m")) else two
            await mirrored_by_all(leader, (one, two), t=20)
            await leader.operations.verb("m", "stop", VerbRequest())
            await eventually(lambda: one.states() == two.states() == {S.STOPPED})
            assert {len(node.link().finals) for node in (one, two)} != {0}

    run(work)


async def mirrored_by_all(leader: MemoryNode, nodes: tuple[MemoryNode, ...], **partitions: int) -> None:
    leader.world.topics(**partitions)
    await leader.operations.create(CreateMirror(document=document()))
    total = sum(partitions.values())
    await eventually(lambda: sum(len(node.partitions.running()) for node in nodes) == total)


def test_orphaned_state_of_a_mirror_deleted_meanwhile_is_removed() -> None:
    """A node that leads again sees the tombstones of intents and removes the states that are left."""

    async def test(world: World, node: MemoryNode) -> None:
        await mirrored(node, t=2)
        await node.operations.verb("m", "stop", VerbRequest())
        await eventually(lambda: node.states() == {S.STOPPED})
        owner = node.view.mirror_owner("m")
        world.topic.put(owner, encode_key(TopicRecord.TYPE, "m", "t"), None)
        await eventually(lambda: PartitionKey("m", "t", 0) not in node.view.states)

    led_world(test)


def test_guard_notices_a_pause_before_anything_is_sent() -> None:
    """Between waking up and noticing it, nothing may be sent; after giving up, leads are sure again."""
    now = [100.0]
    guard = PauseGuard(3.0, clock=lambda: now[0])
    now[0] += 2
    assert guard.is_sure()
    assert guard.tick() == 0
    now[0] += 10
    assert not guard.is_sure()
    assert guard.tick() == 10
    assert not guard.is_sure()
    guard.clear()
    assert guard.is_sure()


def test_lead_that_returns_while_it_is_given_up_begins_afterwards() -> None:
    """A partition assigned again while its work is still ending is led once that has ended, and wholly."""

    async def test(world: World, node: MemoryNode) -> None:
        await mirrored(node, t=10)
        gate = asyncio.Event()
        losing = node.leadership._on_losing

        async def slow(partitions: frozenset[int]) -> None:
            await gate.wait()
            await losing(partitions)

        node.leadership._on_losing = slow
        first = asyncio.create_task(node.leadership.revoke_all())
        await asyncio.sleep(0.01)
        node.leadership.assign(ALL)
        second = asyncio.create_task(node.leadership.revoke_all())
        await asyncio.sleep(0.01)
        node.leadership.assign(ALL)
        await asyncio.sleep(0.01)
        assert {record.epoch for record in node.view.leaders.values()} == {1}
        gate.set()
        await asyncio.gather(first, second)
        await eventually(lambda: len(node.partitions.running()) == 10)
        assert all(node.leadership.shard(partition) for partition in ALL)
        world.topics(t=12)
        await node.refreshes.refresh("m")
        await eventually(lambda: len(node.partitions.running()) == 12)

    led_world(test)
