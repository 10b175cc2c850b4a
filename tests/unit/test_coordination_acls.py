"""What the coordinator keeps of ACLs: what the mirror has put there, what is held back, what a stop grants."""

import asyncio

import pytest

from kmirror_dagster.broker.admin_types import Acl, Quota
from kmirror_dagster.coordination import refreshes
from kmirror_dagster.coordination.decisions import intent_after_refresh
from kmirror_dagster.coordination.models import CreateMirror, VerbRequest
from kmirror_dagster.coordination.refreshes import changed_acls, stored_acls
from kmirror_dagster.coordination.stored_quotas import changed_quotas, stored_quotas
from kmirror_dagster.errors import AuthorizationError
from kmirror_dagster.lifecycle import DesiredState, MirrorState
from kmirror_dagster.metadata.acls import TopicAcls, bare
from kmirror_dagster.metadata.outcome import PlannedChange, Step, TopicIntent
from kmirror_dagster.records import HeldAcl, TopicRecord
from tests.helpers.coordination import MemoryNode, World, document, eventually, led_world

S = MirrorState
PREFIX = HeldAcl(
    resource_name="", pattern_type="PREFIXED", principal="User:a", host="*", operation="WRITE", instead=()
)
LITERAL = PREFIX.model_copy(update={"resource_name": "t", "pattern_type": "LITERAL"})


def acls(count: int) -> frozenset[Acl]:
    return frozenset(
        Acl("TOPIC", f"t{index}", "LITERAL", "User:a", "*", "READ", "ALLOW") for index in range(count)
    )


def intents(**held: tuple[HeldAcl, ...]) -> list[TopicIntent]:
    return [
        TopicIntent(topic, 1, destination_topic_id="c", held_acls=items, read_only_acl=True)
        for topic, items in held.items()
    ]


def test_acls_of_the_mirror_are_stored_in_parts_and_only_where_they_changed() -> None:
    """A thousand ACLs come back as they were; one more is one record; deletion of the mirror removes them."""

    async def test(world: World, node: MemoryNode) -> None:
        world.acls = acls(1_000)
        world.intents = []
        await node.operations.create(CreateMirror(document=document()))
        await eventually(lambda: stored_acls(node.view, "m") == acls(1_000))
        assert changed_acls(node.view, "m", acls(1_000)) == []
        assert len(changed_acls(node.view, "m", acls(1_001))) == 1
        assert len(changed_acls(node.view, "m", frozenset())) == 16
        await node.operations.delete("m", force=True)
        await eventually(lambda: not node.view.mirrors)
        assert stored_acls(node.view, "m") == frozenset()

    led_world(test)


def test_quotas_of_the_mirror_are_stored_and_only_where_they_changed() -> None:
    """Names, defaults and values come back as they were; deletion of the mirror removes them."""
    some = frozenset(
        Quota((("client-id", None), ("user", f"u{index}")), "producer_byte_rate", 1.5 + index)
        for index in range(100)
    )

    async def test(world: World, node: MemoryNode) -> None:
        world.quotas = some
        world.intents = []
        await node.operations.create(CreateMirror(document=document()))
        await eventually(lambda: stored_quotas(node.view, "m") == some)
        assert changed_quotas(node.view, "m", some) == []
        assert len(changed_quotas(node.view, "m", some | {Quota((("user", None),), "k", 1.0)})) == 1
        await node.operations.delete("m", force=True)
        await eventually(lambda: not node.view.mirrors)
        assert stored_quotas(node.view, "m") == frozenset()

    led_world(test)


def test_what_has_to_be_seen_twice_is_looked_at_again_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """The refresh that asks for it is followed by one more long before the next is due, and by no further."""
    monkeypatch.setattr(refreshes, "_LOOK_AGAIN_S", 0.05)

    async def test(world: World, node: MemoryNode) -> None:
        world.look_again = [True, True, False]
        await node.operations.create(CreateMirror(document=document()))
        await eventually(lambda: world.refreshes >= 3)
        await asyncio.sleep(0.2)
        assert world.refreshes == 3

    led_world(test)


def test_a_stop_lets_writers_in_last_and_names_what_other_topics_still_need() -> None:
    """The permission for several topics stays held back while another one is copied; the last stop grants it."""

    async def test(world: World, node: MemoryNode) -> None:
        world.intents = intents(t=(PREFIX, LITERAL), u=(PREFIX,))
        await node.operations.create(CreateMirror(document=document()))
        await eventually(lambda: node.states() == {S.MIRRORING})
        await node.operations.verb("m", "stop", VerbRequest(topics=["t"]))
        await eventually(lambda: node.states() == {S.MIRRORING, S.STOPPED})
        shared = frozenset({bare(PREFIX)})
        assert world.released_acls == [{"t": TopicAcls((PREFIX, LITERAL), frozen=True, shared=shared)}]
        await node.operations.verb("m", "stop", VerbRequest())
        await eventually(lambda: node.states() == {S.STOPPED})
        assert world.released_acls[-1] == {"u": TopicAcls((PREFIX,), frozen=True)}

    led_world(test)


def test_a_right_that_is_missing_does_not_undo_a_stop() -> None:
    """STOPPED is reached; what could not be granted stays stored, for refreshes to go on with."""

    async def test(world: World, node: MemoryNode) -> None:
        world.intents = intents(t=(LITERAL,))
        world.release_acls_error = AuthorizationError("User:mirror lacks ALTER on the cluster")
        await node.operations.create(CreateMirror(document=document()))
        await eventually(lambda: node.states() == {S.MIRRORING})
        await node.operations.verb("m", "stop", VerbRequest())
        await eventually(lambda: node.states() == {S.STOPPED})
        assert world.released_acls
        assert node.view.topics["m"]["t"].held_acls == (LITERAL,)

    led_world(test)


def test_a_plan_tells_what_a_refresh_would_change() -> None:
    """Through the service, as items of the API."""

    async def test(world: World, node: MemoryNode) -> None:
        world.changes = [PlannedChange(Step.ACLS, "t", "create ALLOW")]
        await node.operations.create(CreateMirror(document=document()))
        planned = await node.service.plan("m")
        assert [(item.step, item.subject, item.text) for item in planned.changes] == [
            ("acls", "t", "create ALLOW")
        ]

    led_world(test)


def test_an_intent_without_word_of_acls_keeps_what_is_stored() -> None:
    """A refresh that could not look at ACLs forgets nothing of them."""
    stored = TopicRecord(mirror="m", topic="t", partitions=1, held_acls=(LITERAL,), read_only_acl=True)

    kept = intent_after_refresh("m", stored, TopicIntent("t", 2), 1)
    refused = intent_after_refresh("m", stored, TopicIntent("t", 0, error="deleted"), 1)

    for after in (kept, refused):
        assert after is not None
        assert (after.held_acls, after.read_only_acl) == ((LITERAL,), True)


def test_settling_touches_nothing_but_acls_of_a_stopped_topic() -> None:
    """It neither starts what a filter stopped nor stops what was started again meanwhile."""
    stopped = TopicRecord(
        mirror="m",
        topic="t",
        partitions=1,
        desired=DesiredState.STOPPED,
        stopped_by="filter",
        held_acls=(LITERAL,),
        read_only_acl=True,
    )
    started = stopped.model_copy(update={"desired": DesiredState.MIRRORING, "stopped_by": None})
    settled = TopicIntent("t", 1, settled=True, held_acls=(), read_only_acl=False)

    after = intent_after_refresh("m", stopped, settled, 1)

    assert after == stopped.model_copy(update={"held_acls": (), "read_only_acl": False, "revision": 1})
    assert intent_after_refresh("m", started, settled, 1) is None
    assert intent_after_refresh("m", None, settled, 1) is None
    assert intent_after_refresh("m", after, settled, 1) is None
