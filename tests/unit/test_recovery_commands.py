"""`kmirror failback` and `kmirror switchover` around the steps themselves."""

from typing import Any

import pytest

from kmirror_dagster.lifecycle import DesiredState, MirrorState
from kmirror_dagster.records import RecoveryRecord
from kmirror_dagster.recovery.failback import FailbackState
from kmirror_dagster.recovery.failback_plan import FailbackPlan, TopicAction, TopicPlan
from tests.helpers.command_line import FakeNode, install, kmirror, refused, set_states


class RecoveringNode(FakeNode):
    """A node whose mirror has a recovery."""

    stored: RecoveryRecord | None = None

    def recovery(self, _name: str) -> RecoveryRecord | None:
        return self.stored


@pytest.fixture
def node(monkeypatch: pytest.MonkeyPatch) -> RecoveringNode:
    """The node every command of the test talks to."""
    monkeypatch.setattr("tests.helpers.command_line.FakeNode", RecoveringNode)
    monkeypatch.delenv("KMIRROR_TO_ENDPOINT", raising=False)
    made = install(monkeypatch)
    assert isinstance(made, RecoveringNode)
    return made


def under_way(operation: str, step: str, **more: Any) -> RecoveryRecord:
    """A recovery that is not finished."""
    return RecoveryRecord(mirror="orders", operation=operation, operation_id="x", step=step, **more)


def test_failback_wants_a_stopped_mirror(node: RecoveringNode) -> None:
    """A mirror that is mirrored would become a loop."""
    assert "has no stopped topic" in refused(kmirror("failback", "orders"))
    set_states(node, MirrorState.STOPPED, desired=DesiredState.STOPPED, last_mirror_offset=5)
    first = node.partitions[0].model_copy(update={"topic": "more", "state": MirrorState.MIRRORING})
    node.partitions.append(first)
    line = refused(kmirror("failback", "orders"))
    assert "more is not stopped" in line
    assert "--topics" in line


def test_one_operation_at_a_time(node: RecoveringNode) -> None:
    """A failback does not begin while a switchover is under way, nor the other way round."""
    node.stored = under_way("switchover", "drain")
    assert "a switchover is under way (step drain)" in refused(kmirror("failback", "orders"))
    node.stored = under_way("failback", "save")
    assert "a failback is under way (step save)" in refused(kmirror("switchover", "orders"))


@pytest.mark.parametrize("command", ["failback", "switchover"])
def test_nothing_to_give_up(node: RecoveringNode, command: str) -> None:
    """Giving up what is not under way is harmless."""
    result = kmirror(command, "orders", "--abort")
    assert result.exit_code == 0
    assert f"no {command} is under way" in result.stdout


def test_too_late_to_give_a_failback_up(node: RecoveringNode) -> None:
    """Once topics may be deleted there is only the way on."""
    node.stored = under_way("failback", "remove")
    assert "topics may have been deleted" in refused(kmirror("failback", "orders", "--abort"))


def test_switchover_wants_topics_that_are_mirrored(node: RecoveringNode) -> None:
    """A topic that is not MIRRORING cannot be drained."""
    set_states(node, MirrorState.PAUSED)
    assert "orders-eu, orders-us is not MIRRORING" in refused(kmirror("switchover", "orders"))
    set_states(node, MirrorState.STOPPED, desired=DesiredState.STOPPED)
    assert "no topic is mirrored" in refused(kmirror("switchover", "orders"))


def test_the_other_node_has_to_be_named(node: RecoveringNode) -> None:
    """Without a node at the source there is no way back: said before anything is done."""
    line = refused(kmirror("switchover", "orders", "--yes"))
    assert "--to-state-dir or --to-endpoint" in line


def test_switched_over_twice_is_said(node: RecoveringNode) -> None:
    """A switchover that is done is not begun again; one of topics that were started since is."""
    plan = FailbackPlan(
        mirror="orders",
        reverse="orders-back",
        old_source_id="a",
        new_source_id="b",
        stopped_ms=1,
        quarantine="q",
        topics=[TopicPlan(topic=name, action=TopicAction.CONTINUE) for name in ("orders-eu", "orders-us")],
    )
    document = FailbackState(plan=plan, document={}).model_dump(mode="json")
    node.stored = under_way("switchover", "done", finished=True, document=document)
    set_states(node, MirrorState.STOPPED, desired=DesiredState.STOPPED)
    result = kmirror("switchover", "orders", "--yes")
    assert result.exit_code == 0, result.output
    assert "has been switched over already" in result.stderr
    set_states(node, MirrorState.PAUSED, desired=DesiredState.PAUSED)
    assert "is not MIRRORING" in refused(kmirror("switchover", "orders", "--yes"))
