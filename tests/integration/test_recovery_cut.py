"""A consistent cut through a real failover in which one partition was further than the other."""

import json
import time
from pathlib import Path

import pytest

from kmirror_dagster.lifecycle import MirrorState
from kmirror_dagster.recovery.quarantine import read_tail
from tests.conftest import Clusters
from tests.helpers.command_line import kmirror
from tests.helpers.kafka import Record, create_topic, produce
from tests.helpers.nodes import NodeProcess, mirrored

pytestmark = pytest.mark.integration

BASE_MS = time.time_ns() // 1_000_000 - 600_000


def seconds(first: int, end: int) -> list[Record]:
    """One record a second, named by its second."""
    return [Record(b"s-%03d" % n, timestamp=BASE_MS + 1_000 * n) for n in range(first, end)]


def test_cut_is_where_all_topics_are_complete(clusters: Clusters, node: NodeProcess, tmp_path: Path) -> None:
    """One topic mirrored to second 40, one to 90: both are complete to 40; the surplus of the other is saved."""
    with mirrored(node, clusters.source.bootstrap, clusters.destination.bootstrap) as mirror:
        behind, ahead = mirror.topic("behind"), mirror.topic("ahead")
        for topic in (behind, ahead):
            create_topic(mirror.source, topic)
            produce(mirror.source, topic, seconds(0, 40))
        mirror.await_states(MirrorState.MIRRORING, behind, ahead)
        mirror.await_copied(behind, ahead)
        node.client.verb(mirror.name, "pause", None)
        mirror.await_states(MirrorState.PAUSED, behind, ahead)
        node.client.verb(mirror.name, "stop", None)
        mirror.await_states(MirrorState.STOPPED, behind, ahead)
        command = ("--state-dir", str(node.state_dir), "cut", mirror.name, "--json")
        complete = json.loads(kmirror(*command).stdout)
        assert (complete["latest_ms"], complete["surplus"]) == (None, 0)
        produce(mirror.source, behind, seconds(20, 60))  # what is missing begins at second 20
        files = ("--surplus", str(tmp_path / "surplus"), "--output", str(tmp_path / "cut.json"))
        made = json.loads(kmirror(*command, *files).stdout)
        assert made["at_ms"] == BASE_MS + 20_000 - 1
        cuts = {each["topic"]: (each["offset"], each["surplus"]) for each in made["partitions"]}
        assert cuts == {behind: (20, 20), ahead: (20, 20)}
        saved = {tail["topic"]: [r["value"] for r in read_tail(Path(tail["file"]))] for tail in made["saved"]}
        assert saved == {topic: [b"s-%03d" % n for n in range(20, 40)] for topic in (behind, ahead)}
        assert json.loads((tmp_path / "cut.json").read_text())["surplus"] == 40
        late = kmirror(*command, "--at", "2999-01-01T00:00:00Z")
        assert (late.exit_code, "records are missing from" in late.stderr) == (2, True)
