"""How a partition's leader drives it: write first, act after the commit, retry, stop, give up."""

import asyncio

import pytest

from kmirror_dagster.coordination.keys import PartitionKey
from kmirror_dagster.coordination.models import CreateMirror, VerbRequest
from kmirror_dagster.errors import (
    BrokerError,
    ConnectionLostError,
    ForeignWriteError,
    ReplicationError,
    SourceLossError,
    StaleEpochError,
)
from kmirror_dagster.lifecycle import DesiredState, MirrorState, RetryPolicy
from kmirror_dagster.metadata.outcome import TopicIntent
from kmirror_dagster.records import PartitionRecord, TopicRecord
from tests.helpers.coordination import (
    MemoryNode,
    World,
    document,
    eventually,
    led_world,
    mirrored,
    run,
)

S = MirrorState
T0 = PartitionKey("m", "t", 0)
NEVER = RetryPolicy(initial_ms=3_600_000, max_ms=3_600_000)


def stored(node: MemoryNode, name: PartitionKey = T0) -> PartitionRecord:
    return node.view.states[name]


def history(world: World, name: PartitionKey = T0) -> list[MirrorState]:
    """States of a partition in the order they were stored."""
    states: list[MirrorState] = []
    changes = world.nodes["n1"].view.changes(cursor=None, mirror=None, limit=10_000, now_ms=0).changes
    for change in changes:
        if (change.mirror, change.topic, change.partition) == name and change.state is not None:
            states.append(change.state)
    return states


def test_new_topic_is_aligned_and_mirrored() -> None:
    """A discovered topic's partitions go from nothing by LOG_ALIGNMENT to MIRRORING and are copied."""

    async def test(world: World, node: MemoryNode) -> None:
        await mirrored(node, t=3)
        assert history(world) == [S.LOG_ALIGNMENT, S.MIRRORING]
        record = stored(node)
        assert (record.producer_id, record.source_leader_epoch, record.state_epoch) == (100, 4, 2)
        assert len(node.link().running) == 3

    led_world(test)


def test_nothing_is_done_before_its_write_is_stored() -> None:
    """While nothing can be stored nothing is begun; once it can, the partition goes on by itself."""

    async def test(world: World, node: MemoryNode) -> None:
        await mirrored(node, t=1)
        world.topic.fail_before = [ConnectionLostError("gone")] * 1_000
        node.link().fail("t", 0, ReplicationError("away"))
        await asyncio.sleep(0.1)
        assert (node.state(), len(node.link().aligned)) == (S.MIRRORING, 1)
        world.topic.fail_before.clear()
        await eventually(lambda: node.state() is S.MIRRORING and node.link().running)

    led_world(test)


def test_write_of_unknown_outcome_is_read_again() -> None:
    """A write that was stored although its answer was lost is neither doubled nor forgotten."""

    async def test(world: World, node: MemoryNode) -> None:
        await mirrored(node, t=1)
        world.topic.fail_after = [ConnectionLostError("answer lost")]
        node.link().fail("t", 0, ReplicationError("away"))
        await eventually(lambda: node.link().running)
        assert history(world)[2:] == [S.FAILED, S.LOG_ALIGNMENT, S.MIRRORING]

    led_world(test)


def test_pause_stops_copying_and_resume_goes_on() -> None:
    """PAUSING ends the copy, PAUSED stays, and a resume copies again without LOG_ALIGNMENT."""

    async def test(world: World, node: MemoryNode) -> None:
        await mirrored(node, t=1)
        await node.operations.verb("m", "pause", VerbRequest())
        await eventually(lambda: node.state() is S.PAUSED)
        assert not node.link().running
        await node.operations.verb("m", "resume", VerbRequest())
        await eventually(lambda: node.link().running)
        assert history(world) == [S.LOG_ALIGNMENT, S.MIRRORING, S.PAUSING, S.PAUSED, S.MIRRORING]

    led_world(test)


def test_stop_records_the_position_and_releases_the_topic_once() -> None:
    """STOPPED follows the recorded position and the release of held configurations, once for the topic."""

    async def test(world: World, node: MemoryNode) -> None:
        held = {"message.timestamp.type": "LogAppendTime"}
        world.intents = [TopicIntent("t", 3, destination_topic_id="c", held=held)]
        await node.operations.create(CreateMirror(document=document()))
        await eventually(lambda: node.states() == {S.MIRRORING})
        await node.operations.verb("m", "stop", VerbRequest())
        await eventually(lambda: node.states() == {S.STOPPED})
        position = node.view.positions[T0]
        assert (position.offset, position.source_leader_epoch) == (10, 4)
        assert position.source_cluster_id == "source-cluster"
        assert sorted(node.link().finals) == [("t", 0), ("t", 1), ("t", 2)]
        assert world.released
        assert all(topics == {"t": held} for topics in world.released)

    led_world(test)


def test_stop_that_fails_is_retried_as_a_stop() -> None:
    """A destination that refuses for a moment delays a stop; nothing is mirrored again in between."""

    async def test(world: World, node: MemoryNode) -> None:
        await mirrored(node, t=1)
        node.link().stop_errors["t"] = [ConnectionLostError("destination away")]
        await node.operations.verb("m", "stop", VerbRequest())
        await eventually(lambda: node.state() is S.STOPPED)
        assert history(world)[2:] == [S.STOPPING, S.FAILED, S.STOPPING, S.STOPPED]
        assert stored(node).retry_attempt == 0
        assert stored(node).error is None

    led_world(test)


def test_failed_copy_is_aligned_again() -> None:
    """A copy that ends by itself goes FAILED with its reason, then reads the log end before it goes on."""

    async def test(world: World, node: MemoryNode) -> None:
        await mirrored(node, t=1)
        node.link().fail("t", 0, ReplicationError("source away"))
        await eventually(lambda: node.state() is S.FAILED)
        assert (stored(node).error, stored(node).previous_state) == ("source away", S.MIRRORING)
        await eventually(lambda: node.link().running)
        assert history(world)[2:] == [S.FAILED, S.LOG_ALIGNMENT, S.MIRRORING]
        assert stored(node).retry_attempt == 1

    led_world(test, policy=RetryPolicy(initial_ms=50, max_ms=50))


def test_retry_count_is_cleared_only_by_a_good_copy() -> None:
    """MIRRORING alone does not clear the count; data that moved, or being caught up, does."""

    async def test(world: World, node: MemoryNode) -> None:
        await mirrored(node, t=1)
        link = node.link()
        link.lag = 5
        link.fail("t", 0, ReplicationError("away"))
        await eventually(lambda: node.state() is S.MIRRORING and link.running)
        await node.partitions.tick()
        assert stored(node).retry_attempt == 1
        epoch = stored(node).state_epoch
        link.copied = 3
        await node.partitions.tick()
        await eventually(lambda: stored(node).retry_attempt == 0)
        assert stored(node).state_epoch == epoch  # no transition, nothing for followers

    led_world(test)


def test_retries_end_and_recover_starts_with_a_fresh_count() -> None:
    """After the last attempt a partition stays FAILED until somebody recovers it."""

    async def test(world: World, node: MemoryNode) -> None:
        await mirrored(node, t=1)
        link = node.link()
        link.align_errors["t"] = [ReplicationError(f"no {n}") for n in range(4)]
        link.fail("t", 0, ReplicationError("away"))
        await eventually(lambda: stored(node).error == "no 2")
        await asyncio.sleep(0.05)
        assert (stored(node).state, stored(node).retry_attempt) == (S.FAILED, 3)
        assert node.partitions.next_retry_ms(T0) is None
        result = await node.service.recover("m", VerbRequest())
        assert (result.changed, result.partitions) == (["t"], 1)
        await eventually(lambda: node.state() is S.MIRRORING)
        assert stored(node).retry_attempt == 1  # the recovery met the fourth error, and one retry

    led_world(test, policy=RetryPolicy(initial_ms=1, max_ms=2, max_attempts=3))


def test_failure_that_time_does_not_help_waits_for_recover() -> None:
    """A non-retriable reason is kept until `recover`; it is never retried by itself."""

    async def test(world: World, node: MemoryNode) -> None:
        await mirrored(node, t=1)
        node.link().fail("t", 0, ForeignWriteError("somebody wrote at 7"))
        await eventually(lambda: node.state() is S.FAILED)
        await asyncio.sleep(0.03)
        assert (stored(node).retriable, node.state()) == (False, S.FAILED)
        await node.service.recover("m", VerbRequest(topics=["t"]))
        await eventually(lambda: node.link().running)

    led_world(test)


def test_fault_of_one_partition_stays_there() -> None:
    """An unforeseen exception fails its own partition; the others are mirrored."""

    async def test(world: World, node: MemoryNode) -> None:
        world.topics(bad=1, good=1)
        await mirrored(node, bad=1, good=1)
        link = node.link()
        link.align_errors["bad"] = [ZeroDivisionError("oops")]
        link.fail("bad", 0, ReplicationError("away"))
        await eventually(
            lambda: (node.view.states[PartitionKey("m", "bad", 0)].error or "").startswith("internal")
        )
        assert node.state("good") is S.MIRRORING
        await eventually(lambda: node.state("bad") is S.MIRRORING)

    led_world(test)


def test_stop_interrupts_an_alignment() -> None:
    """A stop does not wait for an alignment that takes long: failover must work in any state."""

    async def test(world: World, node: MemoryNode) -> None:
        await mirrored(node, t=1)
        link = node.link()
        link.gate.clear()
        link.fail("t", 0, ReplicationError("away"))
        await eventually(lambda: node.state() is S.LOG_ALIGNMENT and len(link.aligned) == 2)
        await node.operations.verb("m", "stop", VerbRequest())
        await eventually(lambda: node.state() is S.STOPPED)

    led_world(test)


def test_topic_error_fails_its_partitions_and_no_others() -> None:
    """A topic that cannot be mirrored any more fails with that reason, not retried; the rest goes on."""

    async def test(world: World, node: MemoryNode) -> None:
        await mirrored(node, t=2, u=1)
        world.intents[0] = TopicIntent("t", 2, error="t was deleted at the source")
        await node.refreshes.refresh("m")
        await eventually(lambda: {node.state("t", p) for p in (0, 1)} == {S.FAILED})
        assert (stored(node).error, stored(node).retriable) == ("t was deleted at the source", False)
        assert node.state("u") is S.MIRRORING
        # a stop stays possible, and then the partition does not fail again
        await node.operations.verb("m", "stop", VerbRequest(topics=["t"]))
        await eventually(lambda: {node.state("t", p) for p in (0, 1)} == {S.STOPPED})

    led_world(test)


def test_topic_that_was_never_made_has_no_partitions_that_fail() -> None:
    """A refused topic shows its reason as a topic; there is nothing of it to fail or to retry."""

    async def test(world: World, node: MemoryNode) -> None:
        world.intents = [TopicIntent("a.b", 0, error="collides with a_b")]
        await node.operations.create(CreateMirror(document=document()))
        await eventually(lambda: node.view.topics.get("m"))
        summary = await node.service.mirror("m")
        assert [(t.topic, t.error) for t in summary.topics] == [("a.b", "collides with a_b")]
        assert summary.states == {}

    led_world(test)


def test_replaced_destination_topic_is_aligned_again() -> None:
    """A copy that was deleted and made anew is aligned again, even one that had failed for good."""

    async def test(world: World, node: MemoryNode) -> None:
        await mirrored(node, t=2)
        node.link().fail("t", 1, ForeignWriteError("end moved"))
        await eventually(lambda: node.state("t", 1) is S.FAILED)
        world.intents = [TopicIntent("t", 2, source_topic_id="id-t", destination_topic_id="another")]
        await node.refreshes.refresh("m")
        await eventually(lambda: node.states() == {S.MIRRORING} and len(node.link().running) == 2)
        assert history(world)[2:] == [S.FAILED, S.LOG_ALIGNMENT, S.MIRRORING]

    led_world(test)


def test_grown_topic_gets_its_partitions() -> None:
    """New partitions of a topic get states of their own; the old ones are not touched."""

    async def test(world: World, node: MemoryNode) -> None:
        await mirrored(node, t=1)
        epoch = stored(node).state_epoch
        world.topics(t=3)
        await node.refreshes.refresh("m")
        await eventually(lambda: len(node.link().running) == 3)
        assert stored(node).state_epoch == epoch

    led_world(test)


def test_external_write_needs_both_epochs() -> None:
    """A state written by somebody else is refused unless it was decided by the stored epochs, then acted on."""

    async def test(world: World, node: MemoryNode) -> None:
        await mirrored(node, t=1)
        node.link().fail("t", 0, ForeignWriteError("no"))
        await eventually(lambda: node.state() is S.FAILED)
        record = stored(node)
        for expected in (
            (record.state_epoch - 1, record.leader_epoch),
            (record.state_epoch, record.leader_epoch - 1),
        ):
            with pytest.raises(StaleEpochError):
                await node.partitions.write(
                    T0, S.LOG_ALIGNMENT, expected=expected, error=None, retriable=True
                )
        right = (record.state_epoch, record.leader_epoch)
        await node.partitions.write(T0, S.LOG_ALIGNMENT, expected=right, error=None, retriable=True)
        await eventually(lambda: node.link().running)

    led_world(test, policy=NEVER)


@pytest.mark.parametrize("state", [S.EPOCH_FENCING, S.ULE_RECOVERY])
def test_states_of_brokers_that_mirror_themselves_prove_the_log_again(state: MirrorState) -> None:
    """Stored by somebody, they end the copy; it goes on once source and destination were found to be the same log."""

    async def test(_world: World, node: MemoryNode) -> None:
        await mirrored(node, t=1)
        name = PartitionKey("m", "t", 0)
        before = node.view.states[name]
        looks = len(node.link().aligned)
        node.link().gate.clear()
        await node.partitions.write(
            name, state, expected=(before.state_epoch, before.leader_epoch), error=None, retriable=True
        )
        await eventually(lambda: len(node.link().aligned) == looks + 1)
        assert node.state() is state
        assert not node.link().running
        node.link().gate.set()
        await eventually(lambda: node.partitions.is_running(name))
        assert (node.state(), node.view.states[name].previous_state) == (S.MIRRORING, state)

    led_world(test)


def test_copy_ends_when_somebody_else_stored_that_nothing_is_copied() -> None:
    """A node that held its lead all along, as it believed, ends a copy that its successor had ended."""

    async def test(world: World, node: MemoryNode) -> None:
        await mirrored(node, t=1)
        name = PartitionKey("m", "t", 0)
        record = node.view.states[name].model_copy(
            update={"state": S.FAILED, "previous_state": S.MIRRORING, "state_epoch": 9, "retriable": False}
        )
        world.topic.put(node.view.owner(name), record.key(), record.value())
        node.partitions.wake(name)
        await eventually(lambda: not node.link().running)

    led_world(test)


def test_deleted_mirror_leaves_tombstones_for_everything() -> None:
    """Deletion removes the mirror's, its topics', its partitions' and its positions' records."""

    async def test(world: World, node: MemoryNode) -> None:
        await mirrored(node, t=2)
        await node.operations.verb("m", "stop", VerbRequest())
        await eventually(lambda: node.states() == {S.STOPPED})
        await node.operations.delete("m", force=False)
        view = node.view
        await eventually(lambda: not (view.mirrors or view.topics or view.states or view.positions))
        assert not view.partitions_of("m")
        await node.partitions.tick()
        assert node.link().closed

    led_world(test)


def test_state_without_an_intent_is_not_deleted_in_haste() -> None:
    """A state whose intent has not been read yet is kept: the two come from different partitions."""

    async def test(world: World, node: MemoryNode) -> None:
        record = PartitionRecord(mirror="x", topic="t", partition=0, state=S.MIRRORING, state_epoch=2)
        name = PartitionKey("x", "t", 0)
        world.topic.put(name.owner(5), record.key(), record.value())
        node.partitions.wake(name)
        await node.partitions.tick()
        await asyncio.sleep(0.02)
        assert name in node.view.states

    led_world(test)


def test_changed_settings_open_the_link_anew_without_a_transition() -> None:
    """Another source address closes the link and copies on through a new one; the state stays MIRRORING."""

    async def test(world: World, node: MemoryNode) -> None:
        await mirrored(node, t=2)
        old, epoch = node.link(), stored(node).state_epoch
        await node.partitions.reconnect("m")
        await eventually(lambda: node.link() is not old and len(node.link().running) == 2)
        assert old.closed
        assert stored(node).state_epoch == epoch

    led_world(test)


def test_unusable_document_fails_partitions_by_name_of_the_variable() -> None:
    """A node that lacks a variable of the mirror says so in the partition's reason, and tries again."""

    async def work() -> None:
        world = World()
        async with MemoryNode(world) as node:
            await node.lead()
            await mirrored(node, t=1)

            def refuse(_record: object) -> None:
                raise BrokerError(1, "X", "variable SECRET is not set", retriable=True)

            node.links._factory = refuse  # type: ignore[assignment]
            await node.partitions.reconnect("m")
            await eventually(lambda: stored(node).error == "variable SECRET is not set")

    run(work)


def test_desired_state_of_an_intent_is_what_counts() -> None:
    """An intent stored by another node is followed as soon as it is read, without a call."""

    async def test(world: World, node: MemoryNode) -> None:
        await mirrored(node, t=1)
        topic = node.view.topics["m"]["t"].model_copy(update={"desired": DesiredState.PAUSED})
        assert isinstance(topic, TopicRecord)
        world.topic.put(node.view.mirror_owner("m"), topic.key(), topic.value())
        await eventually(lambda: node.state() is S.PAUSED)

    led_world(test)


@pytest.mark.parametrize("copying", [True, False])
def test_a_loss_is_stored_with_the_failure_it_caused(copying: bool) -> None:
    """Offsets that the source deleted first stay in the partition's record, and add up, whenever they were found."""

    def lost(end: int) -> SourceLossError:
        error = SourceLossError(f"offsets 10 to {end - 1} were deleted", (10, end))
        error.retriable = True
        return error

    async def test(world: World, node: MemoryNode) -> None:
        await mirrored(node, t=1)
        if copying:
            node.link().fail("t", 0, lost(50))
        else:
            node.link().align_errors["t"] = [lost(50), lost(70)]
            node.link().fail("t", 0, ReplicationError("away"))
        await eventually(lambda: node.state() is S.MIRRORING and node.link().running)
        end = 50 if copying else 70
        assert (stored(node).lost_from, stored(node).lost_to, stored(node).lost_offsets) == (
            10,
            end,
            end - 10,
        )
        assert stored(node).with_loss((100, 105))["lost_offsets"] == end - 5
        assert node.service.offsets_of(T0).status.lost_offsets == end - 10

    led_world(test)
