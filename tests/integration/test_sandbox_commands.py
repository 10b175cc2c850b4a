"""`kmirror sandbox` as a user runs it."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from kmirror_dagster.sandbox.pair import Sandbox
from kmirror_dagster.settings import load_mirror, load_node
from tests.helpers.kafka import READ_UNCOMMITTED, committed_offsets, consume, log_range
from tests.helpers.waiting import wait_until

pytestmark = [pytest.mark.integration, pytest.mark.unsecured("about the sandbox itself")]

BASE_MS = "1790000000000"


class CommandLine:
    """Runs `kmirror sandbox` on a sandbox of the test's own."""

    def __init__(self, home: Path) -> None:
        self.home = home
        self.environ = {**os.environ, "KMIRROR_SANDBOX_HOME": str(home)}

    def popen(self, *arguments: str) -> "subprocess.Popen[str]":
        return subprocess.Popen(
            [sys.executable, "-m", "kmirror_dagster.cli.main", "sandbox", *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            stdin=subprocess.DEVNULL,
            env=self.environ,
            text=True,
        )

    def run(self, *arguments: str, code: int = 0) -> "subprocess.CompletedProcess[str]":
        with self.popen(*arguments) as process:
            output, errors = process.communicate(timeout=120)
        assert process.returncode == code, errors
        assert "Traceback" not in errors
        return subprocess.CompletedProcess(arguments, process.returncode, output, errors)

    def json(self, *arguments: str, code: int = 0) -> Any:
        return json.loads(self.run(*arguments, "--json", code=code).stdout)

    def brokers(self) -> list[psutil.Process]:
        """All processes that have to do with this sandbox."""
        found: list[psutil.Process] = []
        for process in psutil.process_iter(["cmdline"]):
            if any(str(self.home) in word for word in process.info["cmdline"] or []):
                found.append(process)
        return found


@pytest.fixture
def kmirror(tmp_path: Path) -> Iterator[CommandLine]:
    line = CommandLine(tmp_path / "sandbox")
    try:
        yield line
    finally:
        Sandbox(line.home).reset()


def test_life_of_a_sandbox(kmirror: CommandLine) -> None:
    """Start twice, look, seed, stop twice, start with the data kept, reset to nothing."""
    assert kmirror.json("status", code=1)["clusters"][0]["state"] == "absent"
    assert "kmirror sandbox start" in kmirror.run("seed", code=2).stderr
    first = kmirror.json("start")
    assert [cluster["state"] for cluster in first["clusters"]] == ["running", "running"]
    assert kmirror.json("start") == first
    assert kmirror.json("status") == first
    mirror, node = load_mirror(Path(first["mirror_file"])), load_node(Path(first["node_file"]))
    assert mirror.mirror == "sandbox"
    assert mirror.filters.selects_topic("orders")
    assert node.destination == mirror.destination
    assert "reset" in kmirror.run("start", "--brokers", "3", code=2).stderr

    report = kmirror.json("seed", "--records", "1000", "--base-time", BASE_MS)
    ends = {topic["topic"]: sum(topic["log_ends"]) for topic in report["topics"]}
    assert ends["orders"] == 350
    assert ends["empty"] == 0

    assert kmirror.run("stop").stdout == "stopped\n"
    assert kmirror.run("stop").stdout == "nothing was running\n"
    assert kmirror.brokers() == []
    assert (
        kmirror.json("start")["clusters"][0]["bootstrap_servers"] == first["clusters"][0]["bootstrap_servers"]
    )
    again = kmirror.json("seed", "--records", "1000", "--base-time", BASE_MS)
    assert {t["topic"]: sum(t["log_ends"]) for t in again["topics"]}["orders"] == 700
    assert "--yes" in kmirror.run("reset", "--help").stdout
    kmirror.run("reset", "--yes")
    assert kmirror.brokers() == []
    assert [path.name for path in kmirror.home.iterdir()] == [".lock"]


def test_seeded_data_is_what_the_report_says(kmirror: CommandLine) -> None:
    """Clusters seeded alike hold equal records; log starts, groups and aborts are as reported."""
    kmirror.run("start")
    sandbox = Sandbox(kmirror.home)
    reports = [
        kmirror.json("seed", "--records", "2000", "--base-time", BASE_MS, "--cluster", name)
        for name in ("source", "destination")
    ]
    for one, other in zip(*(report["topics"] for report in reports), strict=True):
        assert one == other
    source, destination = sandbox.source.bootstrap, sandbox.destination.bootstrap
    for topic in reports[0]["topics"]:
        for partition in range(len(topic["log_ends"])):
            name = topic["topic"]
            records = consume(source, name, partition, isolation=READ_UNCOMMITTED)
            assert records == consume(destination, name, partition, isolation=READ_UNCOMMITTED)
            assert log_range(source, name, partition) == (
                topic["log_starts"][partition],
                topic["log_ends"][partition],
            )
    by_name = {topic["topic"]: topic for topic in reports[0]["topics"]}
    assert by_name["payments"]["aborted"] > 0
    assert all(start > 0 for start in by_name["audit-log"]["log_starts"])
    for group in reports[0]["groups"]:
        found = {
            f"{topic}/{number}": at
            for (topic, number), at in committed_offsets(source, group["group"]).items()
        }
        assert found == group["offsets"]


def test_stream_goes_on_until_interrupted(kmirror: CommandLine) -> None:
    """`seed --rate` writes until Ctrl-C, then reports and ends with 0."""
    kmirror.run("start")
    bootstrap = Sandbox(kmirror.home).source.bootstrap
    kmirror.run("seed", "--records", "0")
    with kmirror.popen("seed", "--rate", "300", "--json") as process:
        wait_until(lambda: log_range(bootstrap, "orders")[1] > 50, 30, what="records")
        process.send_signal(signal.SIGINT)
        output, errors = process.communicate(timeout=30)
    assert process.returncode == 0, errors
    report = json.loads(output)
    ends = {topic["topic"]: topic["log_ends"] for topic in report["topics"]}
    assert log_range(bootstrap, "orders")[1] == ends["orders"][0]


def test_interrupted_start_leaves_nothing(kmirror: CommandLine) -> None:
    """Ctrl-C while the clusters start ends all brokers, with exit code 130."""
    with kmirror.popen("start") as process:
        wait_until(lambda: list(kmirror.home.rglob("broker.pid")), 60, what="first broker")
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=60)
    assert process.returncode == 130, errors
    assert kmirror.brokers() == []
