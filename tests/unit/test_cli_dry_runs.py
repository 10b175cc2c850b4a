"""Dry runs of commands about processes: what they would start, end or delete is told, and left alone."""

import json
from pathlib import Path

import pytest

from kmirror_dagster.coordination.state_directory import StateDirectory
from kmirror_dagster.sandbox.pair import Sandbox
from kmirror_dagster.sandbox.status import ClusterState, ClusterStatus, SandboxStatus
from tests.helpers.command_line import kmirror, refused


def test_starting_a_node(tmp_path: Path) -> None:
    """Settings are read, and refused where they are wrong; nothing is started or written."""
    settings, state = tmp_path / "node.yaml", tmp_path / "state"
    words = ("--state-dir", str(state), "node", "start", "--dry-run", "--config", str(settings))
    settings.write_text("destination: {bootstrap.servers: 'destination:9092'}\n")
    assert kmirror(*words).stdout == f"would start a node on {state} for the destination destination:9092\n"
    assert json.loads(kmirror(*words, "--json").stdout)["dry_run"] is True
    settings.write_text("destination: {bootstrap.server: 'destination:9092'}\n")
    assert "bootstrap.servers" in refused(kmirror(*words))
    assert not state.exists()


def test_starting_and_stopping_where_a_node_runs(tmp_path: Path) -> None:
    """The one that runs is named; it is neither ended nor told to."""
    settings, state = tmp_path / "node.yaml", tmp_path / "state"
    settings.write_text("destination: {bootstrap.servers: 'destination:9092'}\n")
    directory = StateDirectory(state)
    directory.acquire()
    try:
        directory.ensure_token({})
        directory.write_endpoint(endpoint="http://127.0.0.1:5", node_id="n-1")
        files = sorted(state.iterdir())
        start = kmirror("--state-dir", str(state), "node", "start", "--dry-run", "--config", str(settings))
        stop = kmirror("--state-dir", str(state), "node", "stop", "--dry-run")
        assert "node n-1 (pid " in refused(start, code=start.exit_code)
        assert stop.stdout.startswith("would stop the node n-1 (pid ")
        assert sorted(state.iterdir()) == files
        assert not directory.is_stopped
    finally:
        directory.release()


def test_stopping_where_no_node_runs(tmp_path: Path) -> None:
    """The same line as without a dry run."""
    told = kmirror("node", "stop", "--state-dir", str(tmp_path)).stdout
    assert kmirror("node", "stop", "--dry-run", "--state-dir", str(tmp_path)).stdout == told


@pytest.fixture
def sandbox(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A sandbox of which one cluster runs; whoever ends or deletes it fails."""

    def forbidden(*_: object) -> None:
        raise AssertionError("a dry run changed something")

    def status(_: Sandbox) -> SandboxStatus:
        clusters = tuple(
            ClusterStatus(name=name, state=state, bootstrap_servers=None, cluster_id=None, brokers=())
            for name, state in (("source", ClusterState.STOPPED), ("destination", ClusterState.RUNNING))
        )
        return SandboxStatus(home=tmp_path, clusters=clusters, mirror_file=None, node_file=None)

    monkeypatch.setenv("KMIRROR_SANDBOX_HOME", str(tmp_path))
    monkeypatch.setattr(Sandbox, "status", status)
    for name in ("stop", "reset", "start"):
        monkeypatch.setattr(Sandbox, name, forbidden)
    return tmp_path


def test_stopping_and_resetting_the_sandbox(sandbox: Path) -> None:
    """What runs is named, and what would be deleted; nobody is asked."""
    stop, reset = kmirror("sandbox", "stop", "--dry-run"), kmirror("sandbox", "reset", "--dry-run")
    assert stop.stdout == "would stop the cluster destination\n"
    assert reset.stdout == f"{stop.stdout}would delete all data of the sandbox in {sandbox}\n"
    assert (stop.exit_code, reset.exit_code) == (0, 0)
