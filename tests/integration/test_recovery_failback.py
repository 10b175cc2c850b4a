"""Failback on real clusters: A->B, failover, writes on both sides, B->A."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from kmirror_dagster.lifecycle import MirrorState
from kmirror_dagster.recovery.quarantine import read_tail
from tests.conftest import Clusters
from tests.helpers.command_line import kmirror
from tests.helpers.kafka import Record, commit_offsets, committed_offsets, consume, create_topic, produce
from tests.helpers.nodes import NodeMirror, NodeProcess, mirrored, ranges
from tests.helpers.waiting import wait_until

pytestmark = pytest.mark.integration


def numbered(count: int, first: int, side: str) -> list[Record]:
    return [Record(b"%s-%04d" % (side.encode(), n), b"k-%04d" % n) for n in range(first, first + count)]


@pytest.fixture(scope="module")
def back_node(clusters: Clusters, tmp_path_factory: pytest.TempPathFactory) -> Iterator[NodeProcess]:
    """A node that writes to the source cluster."""
    process = NodeProcess(tmp_path_factory.mktemp("back") / "state", clusters.source.bootstrap)
    try:
        yield process.start()
    finally:
        process.stop()


@dataclass
class Pair:
    """A mirror from A to B, and the nodes of both."""

    forward: NodeMirror
    back_node: NodeProcess
    quarantine: Path

    @property
    def back(self) -> NodeMirror:
        """The mirror from B to A."""
        forward = self.forward
        name = f"{forward.name}-back"
        return NodeMirror(self.back_node, forward.destination, forward.source, name=name)

    def failback(self, *more: str) -> dict[str, object]:
        """Run the command; what it answers as JSON."""
        result = kmirror(
            "--state-dir",
            str(self.forward.node.state_dir),
            "failback",
            self.forward.name,
            "--to-state-dir",
            str(self.back_node.state_dir),
            "--quarantine",
            str(self.quarantine),
            "--json",
            *more,
        )
        assert result.exit_code == 0, result.output
        document: dict[str, object] = json.loads(result.stdout)
        return document

    def fail_over(self, *topics: str) -> None:
        """Stop the mirror; B takes over."""
        self.forward.node.client.verb(self.forward.name, "stop")
        self.forward.await_states(MirrorState.STOPPED, *topics)


@pytest.fixture
def pair(clusters: Clusters, node: NodeProcess, back_node: NodeProcess, tmp_path: Path) -> Iterator[Pair]:
    with mirrored(node, clusters.source.bootstrap, clusters.destination.bootstrap) as forward:
        made = Pair(forward, back_node, tmp_path / "quarantine")
        yield made
        made.back.delete()


@pytest.mark.case("C31")
def test_failback_after_writes_on_both_sides(pair: Pair) -> None:
    """A->B to 100; A writes 20 unseen; B writes 50: A ends like B (150), the 20 are in quarantine, groups follow."""
    forward = pair.forward
    diverged, clean = forward.topic("diverged"), forward.topic("clean")
    for topic in (diverged, clean):
        create_topic(forward.source, topic)
        produce(forward.source, topic, numbered(100, 0, "a"))
    forward.await_states(MirrorState.MIRRORING, diverged, clean)
    forward.await_copied(diverged, clean)
    pair.fail_over(diverged, clean)
    produce(forward.source, diverged, numbered(20, 100, "a"))
    for topic in (diverged, clean):
        produce(forward.destination, topic, numbered(50, 100, "b"))
    group = f"{forward.name}.readers"
    commit_offsets(forward.destination, group, [(diverged, 0, 130)])

    planned = pair.failback("--plan")
    plan = planned["plan"]
    assert isinstance(plan, dict)
    actions = {topic["topic"]: (topic["action"], topic["copy_offsets"]) for topic in plan["topics"]}
    assert actions == {diverged: ("recreate", 150), clean: ("continue", 50)}
    assert plan["tail"] == 20
    assert not pair.quarantine.exists()
    assert ranges(forward.source, diverged) == {0: (0, 120)}

    done = pair.failback("--yes")
    assert done["finished"]
    saved = done["saved"]
    assert isinstance(saved, list)
    assert [(tail["topic"], tail["first"], tail["end"], tail["records"]) for tail in saved] == [
        (diverged, 100, 120, 20)
    ]
    rescued = read_tail(Path(saved[0]["file"]))
    assert [record["value"] for record in rescued] == [b"a-%04d" % n for n in range(100, 120)]

    back = pair.back
    back.await_copied(diverged, clean)
    back.compare(diverged, clean)
    values = [record.value for record in consume(forward.source, diverged)]
    assert values == [b"a-%04d" % n for n in range(100)] + [b"b-%04d" % n for n in range(100, 150)]
    wait_until(
        lambda: committed_offsets(forward.source, group) == {(diverged, 0): 130}, 30, what="group follows"
    )
    assert all(each.state is MirrorState.STOPPED for each in forward.partitions())

    again = pair.failback("--yes")
    assert again["finished"]
    assert again["saved"] == saved
    produce(forward.destination, clean, numbered(5, 150, "b"))
    back.await_copied(clean)
    assert ranges(forward.source, clean) == {0: (0, 155)}
