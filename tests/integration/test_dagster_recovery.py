"""Recovery steered from Dagster over real nodes and clusters: drill, certify, forecast, switchover, failback."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import dagster as dg
import pytest

from kmirror_dagster.lifecycle import MirrorState
from kmirror_dagster.orchestration import KMirrorResource, build_mirror_definitions
from kmirror_dagster.recovery.quarantine import read_tail
from tests.conftest import Clusters
from tests.helpers.dagster_ticks import Ticker
from tests.helpers.kafka import create_topic, produce
from tests.helpers.nodes import NodeMirror, NodeProcess, mirrored
from tests.helpers.pairs import numbered

pytestmark = [pytest.mark.integration, pytest.mark.usefixtures("turnable", "rehearsable")]


@pytest.fixture
def back_node(clusters: Clusters, tmp_path: Path) -> Iterator[NodeProcess]:
    """A node that writes to the source cluster."""
    process = NodeProcess(tmp_path / "back", clusters.source.bootstrap)
    try:
        yield process.start()
    finally:
        process.stop()


def on(node: NodeProcess, mirror: str, instance: dg.DagsterInstance) -> Ticker:
    resource = KMirrorResource(state_dir=str(node.state_dir))
    return Ticker(instance, build_mirror_definitions(mirrors=[mirror], resource=resource), resource)


def outcome(result: dg.ExecuteInProcessResult) -> dict[str, Any]:
    (output,) = [event for event in result.all_node_events if event.is_successful_output]
    return {name: value.value for name, value in output.step_output_data.metadata.items()}


def test_roles_are_changed_and_rehearsed_from_dagster(
    clusters: Clusters, node: NodeProcess, back_node: NodeProcess
) -> None:
    """Drill, certificate and forecast of a live mirror; switched over; failed over back with a tail saved."""
    with (
        mirrored(node, clusters.source.bootstrap, clusters.destination.bootstrap) as forward,
        dg.DagsterInstance.ephemeral() as instance,
    ):
        back = NodeMirror(back_node, forward.destination, forward.source, name=f"{forward.name}-back")
        topic = forward.topic()
        create_topic(forward.source, topic, configs={"retention.ms": "-1"})
        produce(forward.source, topic, numbered(50, 0, "a"))
        forward.await_states(MirrorState.MIRRORING, topic)
        forward.await_copied(topic)
        made = on(node, forward.name, instance)
        assert made.run("kmirror_drill", {"seconds": 0.3, "rate": 200.0}).success
        assert list((node.state_dir / "drills" / forward.name).glob("*.html"))
        assert made.run("kmirror_certify").success
        assert made.run("kmirror_forecast").success

        to_back = {"confirm": forward.name, "to_state_dir": str(back_node.state_dir)}
        result = made.run("kmirror_switchover", {**to_back, "quiet_seconds": 0.5})
        assert result.success
        told = outcome(result)
        assert (told["finished"], told["offsets_to_quarantine"], told["offsets_to_copy"]) == (True, 0, 0)
        assert told["writer_downtime_seconds"] > 0
        produce(forward.destination, topic, numbered(10, 50, "b"))
        back.await_copied(topic)

        back_node.client.verb(back.name, "stop")
        back.await_states(MirrorState.STOPPED, topic)
        produce(back.source, topic, numbered(5, 60, "tail"))
        turned = on(back_node, back.name, instance)
        there = {"to_state_dir": str(node.state_dir)}
        plan = outcome(turned.run("kmirror_failback", {**there, "plan_only": True}))
        assert (plan["finished"], plan["offsets_to_quarantine"]) == (False, 5)
        done = outcome(turned.run("kmirror_failback", {**there, "confirm": back.name}))
        assert (done["finished"], done["records_in_quarantine"]) == (True, 5)
        again = outcome(turned.run("kmirror_failback", {**there, "confirm": back.name}))
        assert again["finished"]
        (tail,) = (back_node.state_dir / "quarantine" / back.name).glob("*.jsonl")
        assert [record["value"] for record in read_tail(tail)] == [b"tail-%04d" % n for n in range(60, 65)]
        forward.await_copied(topic)
        forward.compare(topic)
        back.delete()
