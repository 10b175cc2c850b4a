"""Failback and switchover killed before and after every call by which they change something, again and again."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from kmirror_dagster.lifecycle import MirrorState
from kmirror_dagster.recovery.quarantine import read_tail
from tests.conftest import Clusters
from tests.helpers.faults_page import record_figure
from tests.helpers.kafka import create_topic, produce
from tests.helpers.nodes import NodeProcess, mirrored, ranges
from tests.helpers.pairs import Pair, numbered

pytestmark = [pytest.mark.integration, pytest.mark.faults, pytest.mark.timeout(1_800)]

_POINTS = 100  # more than there are


@pytest.fixture(scope="module")
def nodes(
    clusters: Clusters, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[NodeProcess, NodeProcess]]:
    """A node at either cluster: the one that writes to the destination, and the one that writes to the source."""
    home = tmp_path_factory.mktemp("nodes")
    made = (
        NodeProcess(home / "forward", clusters.destination.bootstrap),
        NodeProcess(home / "back", clusters.source.bootstrap),
    )
    try:
        for each in made:
            each.start()
        yield made
    finally:
        for each in made:
            each.stop()


@pytest.fixture
def pair(clusters: Clusters, nodes: tuple[NodeProcess, NodeProcess], tmp_path: Path) -> Iterator[Pair]:
    with mirrored(nodes[0], clusters.source.bootstrap, clusters.destination.bootstrap) as forward:
        made = Pair(forward, nodes[1], tmp_path / "quarantine")
        yield made
        made.back.delete()


def test_failback_killed_at_every_point(pair: Pair, capsys: pytest.CaptureFixture[str]) -> None:
    """Failover, writes on both sides, failback killed at one point and run again; there and back, point by point."""
    diverged, clean = pair.forward.topic("diverged"), pair.forward.topic("clean")
    for topic in (diverged, clean):
        create_topic(pair.forward.source, topic)
        produce(pair.forward.source, topic, numbered(20, 0, "start"))
    pair.forward.await_states(MirrorState.MIRRORING, diverged, clean)
    pair.forward.await_copied(diverged, clean)
    end, steps, way = 20, [], pair
    for point in range(1, _POINTS):
        way.fail_over(diverged, clean)
        side = f"p{point}"
        produce(way.forward.source, diverged, numbered(3, end, f"tail-{side}"))
        for topic in (diverged, clean):
            produce(way.forward.destination, topic, numbered(5, end, f"kept-{side}"))
        killed = way.killed(point, "failback", "--yes")
        steps.append(way.step())
        done = way.failback("--yes")
        saved = done["saved"]
        assert isinstance(saved, list)
        tails = [record["value"] for tail in saved for record in read_tail(Path(tail["file"]))]
        assert set(tails) == {b"tail-%s-%04d" % (side.encode(), n) for n in range(end, end + 3)}, point
        end += 5
        way.back.await_copied(diverged, clean)
        way.back.compare(diverged, clean)
        assert ranges(pair.forward.source, diverged) == {0: (0, end)}
        way = way.turned
        if not killed:
            break
    with capsys.disabled():
        record_figure(
            "failback, killed",
            f"{point - 1} points, before and after every call that changes something; each time run again, all "
            f"divergent records in quarantine and both clusters identical; stored steps found: {in_order(steps)}",
        )
    assert {"save", "remove", "reverse", "follow"} <= set(steps)


def test_switchover_killed_at_every_point(pair: Pair, capsys: pytest.CaptureFixture[str]) -> None:
    """Switchover killed at one point and run again, there and back: nothing lost, nothing copied anew."""
    topic = pair.forward.topic()
    create_topic(pair.forward.source, topic)
    produce(pair.forward.source, topic, numbered(20, 0, "start"))
    pair.forward.await_states(MirrorState.MIRRORING, topic)
    end, steps, way = 20, [], pair
    for point in range(1, _POINTS):
        killed = way.killed(point, "switchover", "--yes")
        steps.append(way.step())
        if killed:
            done = way.run("switchover", "--yes")
            assert done["finished"]
            assert done["saved"] == []
        produce(way.forward.destination, topic, numbered(5, end, f"p{point}"))
        end += 5
        way.back.await_copied(topic)
        way.back.compare(topic)
        assert ranges(pair.forward.source, topic) == {0: (0, end)}
        way = way.turned
        way.forward.await_states(MirrorState.MIRRORING, topic)
        if not killed:
            break
    with capsys.disabled():
        record_figure(
            "switchover, killed",
            f"{point - 1} points likewise, both clusters identical; stored steps found: {in_order(steps)}",
        )
    assert {"fence", "drain", "verify", "sync", "stop", "stopped", "reverse"} <= set(steps)


def in_order(steps: list[str]) -> str:
    """Each step once."""
    return ", ".join(dict.fromkeys(steps))
