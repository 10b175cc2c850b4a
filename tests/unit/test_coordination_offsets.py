"""Maps of translated offsets in the state topic: stored by the leader, found by the next one."""

import asyncio

import pytest

from kmirror_dagster.coordination.keys import PartitionKey
from kmirror_dagster.coordination.models import VerbRequest
from kmirror_dagster.coordination.stored_offsets import MirrorOffsets, stored_offsets
from kmirror_dagster.errors import (
    ConnectionLostError,
    DeadlineError,
    FencedError,
    KmirrorError,
    NotLeaderError,
    ReplicationError,
)
from kmirror_dagster.lifecycle import MirrorState as S
from kmirror_dagster.offset_map import OffsetMap, Run
from tests.helpers.coordination import MemoryNode, World, eventually, led_world, mirrored, run

MAP = OffsetMap((Run(3, 1_000), Run(8, 5_000)))
COPY = "copy-t"  # topic id of the destination, as `World.topics` gives it
T0 = PartitionKey("m", "t", 0)


async def save(node: MemoryNode, offsets: OffsetMap, copy: str = COPY) -> None:
    """Store a map as the copier of t/0 does."""
    await node.link().stores["t", 0].save(copy, offsets)


def test_a_map_is_found_by_the_next_owner() -> None:
    """What a leader has stored is what the node that takes over loads, and what is told about the partition."""

    async def work() -> None:
        world = World()
        async with MemoryNode(world, "n1") as one, MemoryNode(world, "n2") as two:
            await one.lead()
            await mirrored(one, t=1)
            assert one.link().stores["t", 0].is_empty
            await save(one, MAP)
            assert one.link().stores["t", 0].load(COPY) == MAP
            await one.crash()
            await two.lead()
            await eventually(lambda: two.partitions.running())
            assert two.link().stores["t", 0].load(COPY) == MAP
            assert two.service.offsets_of(T0).runs == [(3, 1_000), (8, 5_000)]
            assert [told.partition for told in two.service.offsets("m")] == [0]

    run(work)


def test_a_deposed_owner_cannot_store_a_map() -> None:
    """Its write is refused: the next owner's map is the only one."""

    async def work() -> None:
        world = World()
        async with MemoryNode(world, "n1") as one, MemoryNode(world, "n2") as two:
            await one.lead()
            await mirrored(one, t=1)
            deposed = one.link().stores["t", 0]
            await two.lead()
            await eventually(lambda: two.partitions.running())
            with pytest.raises((FencedError, NotLeaderError)):
                await deposed.save(COPY, MAP)
            assert two.link().stores["t", 0].load(COPY) == OffsetMap()

    run(work)


@pytest.mark.parametrize("stored", [True, False])
def test_a_map_of_unknown_outcome_is_read_again_before_anything_is_copied(stored: bool) -> None:
    """Whether it was stored or not, copying goes on with what the state topic says."""

    async def test(world: World, node: MemoryNode) -> None:
        await mirrored(node, t=1)
        failures = world.topic.fail_after if stored else world.topic.fail_before
        failures.append(ConnectionLostError("answer lost"))
        before = len(node.link().aligned)
        with pytest.raises(KmirrorError):
            await save(node, MAP)
        node.link().fail("t", 0, ReplicationError("map not stored"))
        await eventually(lambda: len(node.link().aligned) > before and node.link().running)
        assert node.link().stores["t", 0].load(COPY) == (MAP if stored else OffsetMap())

    led_world(test)


def test_a_partition_is_not_aligned_while_its_map_is_being_stored() -> None:
    """A copy that ends in mid-write begins anew behind that write, not beside it."""

    async def test(world: World, node: MemoryNode) -> None:
        await mirrored(node, t=1)
        live = node.partitions._live[T0]
        live.storing = asyncio.get_running_loop().create_future()
        before = len(node.link().aligned)
        node.link().fail("t", 0, ReplicationError("away"))
        await eventually(lambda: node.state() is S.LOG_ALIGNMENT)
        await asyncio.sleep(0.02)
        assert len(node.link().aligned) == before
        live.storing.set_result(None)
        await eventually(lambda: node.link().running)

    led_world(test)


def test_the_map_of_a_former_copy_is_none() -> None:
    """A destination topic that was made anew begins with equal offsets."""

    async def test(world: World, node: MemoryNode) -> None:
        await mirrored(node, t=1)
        await save(node, MAP, "another-copy")
        assert node.link().stores["t", 0].load(COPY) == OffsetMap()
        assert stored_offsets(node.view, T0) == OffsetMap()
        assert node.service.offsets("m") == []

    led_world(test)


def test_a_stop_records_the_sources_offset_too() -> None:
    """The last mirror position of a translated partition has both offsets; its map goes with its mirror."""

    async def test(world: World, node: MemoryNode) -> None:
        await mirrored(node, t=2)
        await save(node, MAP)
        await node.operations.verb("m", "stop", VerbRequest())
        await eventually(lambda: node.states() == {S.STOPPED})
        position = node.view.positions[T0]
        assert (position.offset, position.source_offset) == (10, 5_002)
        assert node.view.positions[PartitionKey("m", "t", 1)].source_offset is None
        await node.operations.delete("m", force=True)
        await eventually(lambda: not node.view.offset_maps)

    led_world(test)


def test_a_refresh_gets_maps_as_new_as_the_state_topic() -> None:
    """It waits until everything below the ends it has seen is read, and ends with an error when that takes too long."""

    async def test(world: World, node: MemoryNode) -> None:
        await mirrored(node, t=1)
        await save(node, MAP)
        loop = asyncio.get_running_loop()
        maps = MirrorOffsets(node.view, "m", loop)
        ends = {number: node.view.position(number) for number in range(maps.coordinator_partitions)}
        found = await loop.run_in_executor(None, maps.at_least, ends, 5.0)
        assert found == {("t", 0): MAP}
        assert not maps.is_empty
        assert MirrorOffsets(node.view, "other", loop).is_empty
        with pytest.raises(DeadlineError, match="state topic"):
            await loop.run_in_executor(None, maps.at_least, {0: ends[0] + 1}, 0.01)

    led_world(test)
