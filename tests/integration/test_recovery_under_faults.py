"""The short form of the campaign of faults: one cycle of everything, another fault in each phase."""

import json
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest

from kmirror_dagster.lifecycle import MirrorState
from tests.conftest import Clusters
from tests.helpers.campaign import run_campaign
from tests.helpers.command_line import kmirror
from tests.helpers.kafka import create_topic
from tests.helpers.nodes import NodeProcess, mirrored
from tests.helpers.recovery_faults import (
    DESTINATION_STALLS,
    NODE_KILLED,
    SOURCE_FROZEN,
    SOURCE_SLOW,
    Side,
)

pytestmark = [pytest.mark.integration, pytest.mark.usefixtures("turnable")]

_SHORT_S = 2.0


@pytest.fixture(scope="module")
def sides(clusters: Clusters, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Side, Side]]:
    """The session's clusters, each with one node that reaches them through the proxies."""
    home = tmp_path_factory.mktemp("sides")
    with ExitStack() as stack:
        made = (
            Side("A", clusters.source, clusters.source_proxy, []),
            Side("B", clusters.destination, clusters.destination_proxy, []),
        )
        for side in made:
            stack.callback(side.proxy.reset)
            node = NodeProcess(home / f"node-{side.name}", side.proxy.bootstrap)
            stack.callback(node.stop)
            side.nodes.append(node.start())
        yield made


@pytest.mark.timeout(600)
def test_one_fault_in_each_phase(sides: tuple[Side, Side], tmp_path: Path) -> None:
    """A node killed while it copies, a frozen source, a stalling line, a slow one: no anomaly, both sides equal."""
    faults = {
        "copying": replace(NODE_KILLED, heals_itself=False, hold_s=_SHORT_S),  # there is no other node
        "failover": replace(SOURCE_FROZEN, hold_s=_SHORT_S),
        "failback": replace(DESTINATION_STALLS, hold_s=_SHORT_S),
        "switchover": replace(SOURCE_SLOW, hold_s=_SHORT_S),
    }
    outcome = run_campaign(*sides, tmp_path, faults, seed=1)
    assert outcome.quarantined > 0
    assert outcome.anomalies == 0


def test_faults_command_on_real_clusters(sides: tuple[Side, Side], tmp_path: Path) -> None:
    """`kmirror faults` with commands that freeze the node and let it go on: times of each fault, no anomaly."""
    first, second = sides
    node = second.nodes[0]
    with mirrored(node, first.proxy.bootstrap, second.proxy.bootstrap) as mirror:
        topic = mirror.topic()
        create_topic(first.bootstrap, topic, 2)
        mirror.await_states(MirrorState.MIRRORING, topic, partitions=2)
        result = kmirror(
            *("--state-dir", str(node.state_dir), "faults", mirror.name, "--topic", topic, "--json"),
            *("--break", f"kill -STOP {node.process.pid}", "--mend", f"kill -CONT {node.process.pid}"),
            *("--seconds", "4", "--hold", "1", "--every", "1", "--history", str(tmp_path / "history.jsonl")),
        )
    assert result.exit_code == 0, result.output
    told = json.loads(result.stdout)
    assert told["ok"]
    assert told["faults"]
    assert all(fault["lasted_s"] >= 1 for fault in told["faults"])
    assert told["history"]["acknowledged"] * 2 == told["history"]["polled"] > 0
