"""`kmirror plan`, `kmirror check` and the drift they share."""

import json
from pathlib import Path

import pytest

from kmirror_dagster.coordination.drift import find_drift
from kmirror_dagster.coordination.models import MirrorPlan, PlannedItem, RefreshStatus, StepStatus
from kmirror_dagster.errors import KmirrorError
from kmirror_dagster.metadata import preflight
from kmirror_dagster.metadata.preflight import Finding, MissingRight, PreflightReport
from tests.helpers.command_line import FakeNode, install, kmirror

CHANGES = [
    PlannedItem(step="creation", subject="orders", text="create with 3 partition(s), 1 replica(s)"),
    PlannedItem(step="configs", subject="orders", text="set retention.ms=1"),
    PlannedItem(step="acls", subject="orders", text="delete ALLOW User:a READ on topic orders"),
]


def planned(*changes: PlannedItem, errors: dict[str, str] | None = None) -> MirrorPlan:
    steps = [
        StepStatus(step=step, ok=not errors, errors=errors or {} if step == "acls" else {}, notes=notes)
        for step, notes in (("creation", []), ("configs", ["left alone"]), ("groups", []), ("acls", []))
    ]
    status = RefreshStatus(started_ms=1, finished_ms=2, steps=steps)
    return MirrorPlan(mirror="orders", status=status, changes=list(changes))


@pytest.fixture
def node(monkeypatch: pytest.MonkeyPatch) -> FakeNode:
    """The node every command of the test talks to."""
    return install(monkeypatch)


def test_a_plan_is_shown_as_a_difference(node: FakeNode) -> None:
    """Step by step: what is created, changed, deleted; notes behind; steps without anything are left out."""
    node.planned = planned(*CHANGES)

    result = kmirror("plan", "orders")

    assert result.exit_code == 0
    assert result.stdout.splitlines() == [
        "creation",
        "  + orders: create with 3 partition(s), 1 replica(s)",
        "configs",
        "  ~ orders: set retention.ms=1",
        "    left alone",
        "acls",
        "  - orders: delete ALLOW User:a READ on topic orders",
        "3 change(s)",
    ]


def test_a_plan_tells_by_its_exit_code_when_asked(node: FakeNode) -> None:
    """--check ends with 1 when there is a change, and with 0 when there is none."""
    node.planned = planned(*CHANGES)
    assert kmirror("plan", "orders", "--check").exit_code == 1
    node.planned = planned()
    result = kmirror("plan", "orders", "--check")
    assert result.exit_code == 0
    assert result.stdout.splitlines()[-1] == "nothing to change"


def test_a_plan_that_could_not_look_everywhere_is_exit_code_1(node: FakeNode) -> None:
    """What stood in the way is named; with --json the document is all there is on stdout."""
    node.planned = planned(errors={"*": "User:mirror lacks DESCRIBE on the cluster"})

    result = kmirror("plan", "orders", "--json")

    assert result.exit_code == 1
    assert json.loads(result.stdout)["changes"] == []
    assert "acls: *: User:mirror lacks DESCRIBE on the cluster" in result.stderr


def test_drift_is_an_empty_plan_or_its_changes(node: FakeNode) -> None:
    """For an asset check: in step, or what differs; what could not be looked at is not taken for being in step."""
    node.planned = planned()
    assert find_drift(node, "orders").in_step
    node.planned = planned(*CHANGES)
    drift = find_drift(node, "orders")
    assert not drift.in_step
    assert drift.changes == tuple(CHANGES)
    assert drift.summary == "3 change(s): creation 1, configs 1, acls 1"
    node.planned = planned(errors={"*": "no"})
    assert not find_drift(node, "orders").in_step
    assert find_drift(node, "orders").summary == "not known: acls: *: no"


DOCUMENT = """\
mirror: orders
source: {bootstrap.servers: "127.0.0.1:9"}
destination: {bootstrap.servers: "127.0.0.1:10"}
"""


def test_a_check_prints_what_is_missing_and_how_to_grant_it(
    node: FakeNode, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Findings, each missing right with its purpose, and the commands as they can be pasted; exit code 1."""
    right = MissingRight(
        side="source",
        principal="User:m",
        operation="READ",
        resource_type="TOPIC",
        resource_name="t",
        why="fetch records",
    )
    report = PreflightReport(
        mirror="orders",
        topics=["t"],
        findings=[Finding(level="ok", subject="source", text="cluster abc, 1 broker(s)")],
        missing=[right],
        commands=["kafka-acls --add"],
    )
    monkeypatch.setattr(preflight, "run_preflight", lambda *_args, **_more: report)
    file = tmp_path / "orders.yaml"
    file.write_text(DOCUMENT)

    result = kmirror("check", str(file))

    assert result.exit_code == 1
    lines = result.stdout.splitlines()
    assert lines[0].split() == ["ok", "source:", "cluster", "abc,", "1", "broker(s)"]
    assert "source: User:m lacks READ on topic t (to fetch records)" in lines[1]
    assert lines[-1] == "kafka-acls --add"
    assert "1 right(s) missing" in result.stderr


def test_a_check_of_a_file_that_does_not_exist_is_refused(node: FakeNode) -> None:
    """A name with a file's ending is not taken for a mirror."""
    result = kmirror("check", "missing.yaml")

    assert result.exit_code == 2
    assert "missing.yaml does not exist" in result.stderr


def test_errors_of_the_node_reach_the_caller(node: FakeNode) -> None:
    """A plan that the node cannot make is one line."""

    def fail(_fake: FakeNode) -> None:
        raise KmirrorError("no")

    node.on_look = fail
    assert kmirror("plan", "orders").exit_code == 1
