"""How far a recovery is: stored by the mirror's leader, one writer at a time."""

import pytest

from kmirror_dagster.coordination.models import VerbRequest
from kmirror_dagster.errors import IllegalTransitionError, StaleEpochError, UsageError
from kmirror_dagster.lifecycle import MirrorState
from kmirror_dagster.records import RecoveryRecord, decode
from tests.helpers.coordination import MemoryNode, World, eventually, led_world, mirrored

PLANNED = RecoveryRecord(
    mirror="m", operation="failback", operation_id="a", step="save", document={"topics": [1]}
)


def test_record_reads_back() -> None:
    """A record is what it was."""
    assert decode(PLANNED.key(), PLANNED.value()) == PLANNED


def test_steps_follow_each_other() -> None:
    """Each write names the revision it was decided by; one decided by an older one is refused."""

    async def test(_world: World, node: MemoryNode) -> None:
        await mirrored(node, t=1)
        operations = node.operations
        assert operations.recovery("m") is None
        first = await operations.record_recovery("m", PLANNED)
        assert first.revision == 1
        second = await operations.record_recovery("m", first.model_copy(update={"step": "remove"}))
        assert operations.recovery("m") == second
        with pytest.raises(StaleEpochError, match="somebody else goes on with its failback"):
            await operations.record_recovery("m", first.model_copy(update={"step": "other"}))

    led_world(test)


def test_repeated_write_is_harmless() -> None:
    """The same step sent again after a lost answer is answered alike."""

    async def test(_world: World, node: MemoryNode) -> None:
        await mirrored(node, t=1)
        first = await node.operations.record_recovery("m", PLANNED)
        assert await node.operations.record_recovery("m", PLANNED) == first

    led_world(test)


def test_one_recovery_at_a_time() -> None:
    """Another recovery begins only when the last one is finished."""

    async def test(_world: World, node: MemoryNode) -> None:
        await mirrored(node, t=1)
        first = await node.operations.record_recovery("m", PLANNED)
        another = first.model_copy(update={"operation_id": "b"})
        with pytest.raises(IllegalTransitionError, match="a failback is under way"):
            await node.operations.record_recovery("m", another)
        done = await node.operations.record_recovery("m", first.model_copy(update={"finished": True}))
        begun = another.model_copy(update={"revision": done.revision})
        assert (await node.operations.record_recovery("m", begun)).operation_id == "b"

    led_world(test)


def test_record_too_large_for_a_message_is_refused() -> None:
    """A document that does not fit a record is refused with the remedy."""

    async def test(_world: World, node: MemoryNode) -> None:
        await mirrored(node, t=1)
        large = PLANNED.model_copy(update={"document": {"x": "y" * 600_000}})
        with pytest.raises(UsageError, match="do it by topics"):
            await node.operations.record_recovery("m", large)
        with pytest.raises(UsageError, match="sent to mirror 'm'"):
            await node.operations.record_recovery("m", PLANNED.model_copy(update={"mirror": "other"}))

    led_world(test)


def test_deleted_mirror_leaves_no_recovery() -> None:
    """A mirror's recovery goes with it."""

    async def test(_world: World, node: MemoryNode) -> None:
        await mirrored(node, t=1)
        await node.operations.record_recovery("m", PLANNED)
        await node.operations.verb("m", "stop", VerbRequest())
        await eventually(lambda: node.states() == {MirrorState.STOPPED})
        await node.operations.delete("m", force=False)
        assert node.view.recoveries == {}

    led_world(test)


def test_recovery_over_the_api() -> None:
    """GET answers null or the record, PUT stores it."""

    async def test(_world: World, node: MemoryNode) -> None:
        await mirrored(node, t=1)
        async with node.http() as http:
            path = "/v1/mirrors/m/recovery"
            assert (await http.get(path)).json() is None
            stored = await http.put(path, json=PLANNED.model_dump(mode="json"))
            assert stored.json()["revision"] == 1
            assert (await http.get(path)).json() == stored.json()
            stale = await http.put(
                path, json=PLANNED.model_copy(update={"step": "x"}).model_dump(mode="json")
            )
            assert (stale.status_code, stale.json()["code"]) == (409, "StaleEpochError")

    led_world(test)
