"""--dry-run: what a command would do is told, and nothing is done."""

import json
from pathlib import Path

import pytest

from kmirror_dagster.broker.admin import ClusterAdmin
from kmirror_dagster.coordination.models import (
    CreateMirror,
    MirrorPlan,
    PlannedItem,
    RefreshStatus,
    VerbRequest,
)
from kmirror_dagster.errors import IllegalTransitionError
from kmirror_dagster.lifecycle import DesiredState, MirrorState
from kmirror_dagster.metadata import preflight
from kmirror_dagster.metadata.preflight import Finding, PreflightReport
from tests.helpers.command_line import FakeNode, install, kmirror, set_states
from tests.helpers.coordination import MemoryNode, World, document, eventually, led_world

VERBS = ("start", "pause", "resume", "stop", "recover")


@pytest.fixture
def node(monkeypatch: pytest.MonkeyPatch) -> FakeNode:
    """The node every command of the test talks to."""
    return install(monkeypatch)


@pytest.mark.parametrize("verb", VERBS)
def test_a_verb_tells_what_it_would_change_and_waits_for_nothing(node: FakeNode, verb: str) -> None:
    """The node is asked for a dry run; nobody waits for states that will not come."""
    result = kmirror(verb, "orders", "--dry-run")

    assert result.exit_code == 0
    assert node.log == [(f"would {verb}", None)]
    assert f"orders: {verb} of 1 topics" in result.stdout
    assert result.stdout.endswith("nothing was changed; topics: orders-eu\n")
    assert json.loads(kmirror(verb, "orders", "--dry-run", "--json").stdout)["dry_run"] is True


def test_a_deletion_tells_what_would_go(node: FakeNode) -> None:
    """Partitions that are not STOPPED are counted: they would be stopped first."""
    running = kmirror("delete", "orders", "--force", "--dry-run")
    set_states(node, MirrorState.STOPPED)
    stopped = kmirror("delete", "orders", "--dry-run")

    assert node.log == [("would delete", True), ("would delete", False)]
    assert "4 partitions would be stopped first" in running.stdout
    assert "stopped first" not in stopped.stdout
    assert "nothing was changed" in stopped.stdout


def test_a_refresh_shows_its_plan(node: FakeNode) -> None:
    """The same as `kmirror plan`."""
    change = PlannedItem(step="configs", subject="orders-eu", text="set retention.ms=1")
    status = RefreshStatus(started_ms=1, finished_ms=2, steps=[])
    node.planned = MirrorPlan(mirror="orders", status=status, changes=[change])

    assert kmirror("refresh", "orders", "--dry-run").stdout == kmirror("plan", "orders").stdout


def test_a_creation_checks_both_clusters_and_stores_nothing(
    node: FakeNode, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What would be mirrored is listed; a mirror with other settings needs --replace; an error ends with 1."""
    reports = [
        PreflightReport(mirror="new", topics=["a", "b"], findings=[], missing=[], commands=[]),
        PreflightReport(mirror="orders", topics=[], findings=[], missing=[], commands=[]),
        PreflightReport(
            mirror="new",
            topics=[],
            findings=[Finding(level="error", subject="source", text="not reachable")],
            missing=[],
            commands=[],
        ),
    ]
    monkeypatch.setattr(preflight, "run_preflight", lambda *_args, **_more: reports.pop(0))
    monkeypatch.setattr(ClusterAdmin, "__init__", lambda *_args, **_more: None)
    monkeypatch.setattr(ClusterAdmin, "close", lambda _self: None)

    def file(mirror: str) -> str:
        path = tmp_path / f"{mirror}.yaml"
        settings = {
            "mirror": mirror,
            "source": {"bootstrap.servers": "source:9092"},
            "destination": {"bootstrap.servers": "destination:9092"},
        }
        path.write_text(json.dumps(settings))
        return str(path)

    created = kmirror("create", file("new"), "--dry-run")
    other = kmirror("create", file("orders"), "--dry-run")
    replaced = kmirror("create", file("orders"), "--dry-run", "--replace")
    failed = kmirror("create", file("new"), "--dry-run")

    assert "mirror new would be created; topics: a, b; nothing was changed" in created.stdout
    assert (other.exit_code, "--replace" in other.stderr) == (2, True)
    assert "would get these settings" in replaced.stdout
    assert failed.exit_code == 1
    assert node.log == []


def test_a_node_stores_nothing_on_a_dry_run() -> None:
    """Each verb tells the topics it would change, a deletion whether it could be; states and intents stay."""

    async def test(world: World, node: MemoryNode) -> None:
        world.topics(orders=2, events=1)
        await node.operations.create(CreateMirror(document=document()))
        await eventually(lambda: node.states() == {MirrorState.MIRRORING})
        stop = await node.operations.verb("m", "stop", VerbRequest(dry_run=True, operation_id="once"))
        pause = await node.operations.verb("m", "pause", VerbRequest(topics=["orders"], dry_run=True))
        start = await node.operations.verb("m", "start", VerbRequest(topics=["new"], dry_run=True))
        with pytest.raises(IllegalTransitionError):
            await node.operations.delete("m", force=False, dry_run=True)
        await node.operations.delete("m", force=True, dry_run=True)

        assert (stop.changed, stop.partitions) == (["events", "orders"], 3)
        assert (pause.changed, pause.partitions) == (["orders"], 2)
        assert start.changed == ["new"]
        assert {topic.desired for topic in node.view.topics["m"].values()} == {DesiredState.MIRRORING}
        assert node.view.topics["m"].keys() == {"events", "orders"}
        # the operation's id is still free for the one that is meant
        stopped = await node.operations.verb("m", "stop", VerbRequest(operation_id="once"))
        await eventually(lambda: node.states() == {MirrorState.STOPPED})
        assert stopped.changed == stop.changed

    led_world(test)
