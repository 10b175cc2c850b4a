"""A real drill: measured, verified, undone, run twice, and run again after it was killed."""

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from kmirror_dagster.broker.admin import ClusterAdmin
from kmirror_dagster.lifecycle import MirrorState
from tests.conftest import Clusters
from tests.helpers.command_line import kmirror
from tests.helpers.kafka import Record, create_topic, produce
from tests.helpers.nodes import NodeMirror, NodeProcess, mirrored
from tests.helpers.secured import own_settings
from tests.helpers.waiting import wait_until

pytestmark = [pytest.mark.integration, pytest.mark.usefixtures("rehearsable")]


def shadow_topics(clusters: Clusters, mirror: str) -> list[str]:
    found: list[str] = []
    for cluster in (clusters.source, clusters.destination):
        admin = ClusterAdmin(own_settings(cluster))
        try:
            found += [name for name in admin.topic_names() if name.startswith(f"__kmirror_drill.{mirror}.")]
        finally:
            admin.close()
    return found


def command(node: NodeProcess, mirror: NodeMirror, output: Path, *more: str) -> tuple[str, ...]:
    options = ("--rate", "300", "--seconds", "1", "--output", str(output), "--json", *more)
    return ("--state-dir", str(node.state_dir), "drill", mirror.name, *options)


def test_drill_measures_verifies_and_undoes(clusters: Clusters, node: NodeProcess, tmp_path: Path) -> None:
    """RPO and RTO are measured, the copies are the same, nothing is left, the mirror goes on; twice."""
    with mirrored(node, clusters.source.bootstrap, clusters.destination.bootstrap) as mirror:
        topic = mirror.topic()
        create_topic(mirror.source, topic, 3)
        produce(mirror.source, topic, [Record(b"v")] * 10)
        mirror.await_states(MirrorState.MIRRORING, topic)
        for number in (1, 2):
            done = kmirror(*command(node, mirror, tmp_path))
            assert done.exit_code == 0, done.output
            made = json.loads(done.stdout)
            assert made["passed"]
            assert made["rto_s"] >= made["rto_stopped_s"] > 0
            assert made["records_written"] >= 100
            assert made["verified_records"] + made["unmirrored_records"] == made["records_written"]
            assert len(list(tmp_path.glob("*.json"))) == len(list(tmp_path.glob("*.html"))) == number
            assert shadow_topics(clusters, mirror.name) == []
            assert f"{mirror.name}-drill" not in [each.mirror for each in node.client.mirrors()]
        mirror.await_states(MirrorState.MIRRORING, topic)
        # a limit nothing can keep fails the drill, which undoes itself all the same
        failed = kmirror(*command(node, mirror, tmp_path, "--max-rto", "0.1", "--seconds", "0.1"))
        made = json.loads(failed.stdout)
        assert made["undone"]
        assert (failed.exit_code == 1) == (made["rto_s"] > 0.1)
        assert shadow_topics(clusters, mirror.name) == []


def test_killed_drill_is_cleared_by_the_next(clusters: Clusters, node: NodeProcess, tmp_path: Path) -> None:
    """A drill that is killed while it writes leaves topics and a mirror; the next one clears them and passes."""
    with mirrored(node, clusters.source.bootstrap, clusters.destination.bootstrap) as mirror:
        topic = mirror.topic()
        create_topic(mirror.source, topic)
        mirror.await_states(MirrorState.MIRRORING, topic)
        arguments = list(command(node, mirror, tmp_path))
        arguments[arguments.index("--seconds") + 1] = "60"
        other = subprocess.Popen(
            [sys.executable, "-m", "kmirror_dagster.cli.main", *arguments],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        try:
            shadow = f"{mirror.name}-drill"
            wait_until(lambda: shadow in [each.mirror for each in node.client.mirrors()], 60)
            busy = kmirror(*command(node, mirror, tmp_path))
            assert (busy.exit_code, "another drill" in busy.stderr) == (2, True)
        finally:
            other.send_signal(signal.SIGKILL)
            other.wait(30)
        assert shadow_topics(clusters, mirror.name)
        done = kmirror(*command(node, mirror, tmp_path))
        assert done.exit_code == 0, done.output
        assert shadow_topics(clusters, mirror.name) == []
