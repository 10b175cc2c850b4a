"""What a node tells Prometheus."""

import pytest

from kmirror_dagster.coordination.metric_catalogue import CATALOGUE
from kmirror_dagster.coordination.metrics import MetricsExporter, NodeCounters
from kmirror_dagster.errors import ForeignWriteError
from kmirror_dagster.lifecycle import MirrorState
from kmirror_dagster.metadata.outcome import Step
from kmirror_dagster.records import PartitionRecord
from tests.helpers.coordination import MemoryNode, World, document, eventually, led_world, mirrored
from tests.helpers.exposition import Exposition, busy_exposition, exporter_of, refresh_status


@pytest.fixture(scope="module")
def busy() -> Exposition:
    return busy_exposition()


def test_everything_in_the_catalogue_is_exported(busy: Exposition) -> None:
    """Each metric of the catalogue has samples, of its kind and with its labels; nothing else is exported."""
    own = {name for name in busy.kinds if not name.startswith("process_")}
    assert own == {spec.name for spec in CATALOGUE}
    for spec in CATALOGUE:
        assert busy.kinds[spec.name] == str(spec.kind), spec.name
        assert busy.labels[spec.name] == set(spec.labels), spec.name


def test_process_figures_are_exported(busy: Exposition) -> None:
    """CPU and memory of the process are there, which the dashboard shows."""
    assert busy.value("process_cpu_seconds_total") > 0
    assert busy.value("process_resident_memory_bytes") > 10_000_000


def test_states_are_counted_with_reasons(busy: Exposition) -> None:
    """States are counted by mirror; a FAILED partition comes with its reason and whether it is retried."""
    assert busy.value("kmirror_partitions", mirror="m", state="MIRRORING") == 1
    assert busy.value("kmirror_partitions", mirror="m", state="FAILED") == 1
    assert busy.value("kmirror_failed_partitions", mirror="m", retriable="false") == 1
    assert busy.samples("kmirror_failed_partition_info") == [
        {
            "mirror": "m",
            "topic": "t",
            "partition": "1",
            "retriable": "false",
            "reason": "somebody wrote at offset 12",
        }
    ]
    assert busy.value("kmirror_transitions_total", state="MIRRORING") == 2
    assert busy.value("kmirror_transitions_total", state="PAUSED") == 0


def test_copying_is_counted(busy: Exposition) -> None:
    """Lag is a topic's, what was copied a mirror's, and a copy that ended stays counted."""
    assert busy.value("kmirror_lag_records", mirror="m", topic="t") == 7
    assert busy.value("kmirror_lag_seconds", mirror="m", topic="t") == 0.5
    assert busy.value("kmirror_copied_batches_total", mirror="m") == 1
    assert busy.value("kmirror_copied_records_total", mirror="m") == 30
    assert busy.value("kmirror_copied_resyncs_total", mirror="m") == 0
    assert busy.value("kmirror_memory_budget_bytes") == 1_000
    assert busy.value("kmirror_memory_used_bytes") == 200


def test_refreshes_are_told_step_by_step(busy: Exposition) -> None:
    """Errors of the newest refresh by step, its duration and its end; steps without an error count 0."""
    assert busy.value("kmirror_refresh_step_errors", mirror="m", step="groups") == 2
    assert busy.value("kmirror_refresh_step_errors", mirror="m", step="configs") == 0
    assert busy.value("kmirror_refresh_step_duration_seconds", mirror="m", step="groups") == 0.04
    assert busy.value("kmirror_refresh_duration_seconds", mirror="m") == 0.5
    assert busy.value("kmirror_refresh_finished_timestamp_seconds", mirror="m") == 1_700_000_000.5
    assert busy.value("kmirror_refresh_interval_seconds") == 3_600
    assert busy.value("kmirror_source_reachable", mirror="m") == 1
    assert {s["step"] for s in busy.samples("kmirror_refresh_errors_total")} == {*map(str, Step), "refresh"}


def test_leadership_is_told(busy: Exposition) -> None:
    """A scraper can see that no coordinator partition is without a leader, and how restless the group is."""
    total = busy.value("kmirror_coordinator_partitions")
    assert total == busy.value("kmirror_led_coordinator_partitions") == 5
    assert busy.value("kmirror_take_overs_total") == 5
    assert busy.value("kmirror_rebalances_total") == 2
    assert busy.value("kmirror_pauses_total") == 1
    assert busy.value("kmirror_quarantined_records") == 0


def test_limits_are_told_by_the_leader_of_a_mirror() -> None:
    """The limit on lag is the mirror's own or the default, and missing when it cannot be read as stored."""

    async def test(_world: World, node: MemoryNode) -> Exposition:
        await mirrored(node, t=1)
        for name, policies in (("n", {"rpo_seconds": 5}), ("o", {"rpo_seconds": "${LIMIT}"})):
            record = node.view.mirrors["m"].model_copy(
                update={"mirror": name, "document": document(name, policies=policies)}
            )
            node.view.mirrors[name] = record
        return Exposition(exporter_of(node).render())

    told = led_world(test)
    limits = {
        s["mirror"]: told.value("kmirror_rpo_seconds", **s) for s in told.samples("kmirror_rpo_seconds")
    }
    assert limits == {"m": 60, "n": 5}


def test_topics_that_cannot_be_mirrored_are_counted() -> None:
    """A topic whose intent carries an error counts, though no partition of it has FAILED."""

    async def test(_world: World, node: MemoryNode) -> Exposition:
        await mirrored(node, t=1, u=1)
        topics = node.view.topics["m"]
        topics["u"] = topics["u"].model_copy(update={"error": "creation refused"})
        return Exposition(exporter_of(node).render())

    told = led_world(test)
    assert told.value("kmirror_topics", mirror="m") == 2
    assert told.value("kmirror_topic_errors", mirror="m") == 1


def test_nothing_is_told_of_what_other_nodes_lead() -> None:
    """A node that leads no coordinator partition tells neither states nor limits: others do, once."""

    async def test(_world: World, node: MemoryNode) -> Exposition:
        await mirrored(node, t=2)
        await node.leadership.revoke_all()
        return Exposition(exporter_of(node).render())

    told = led_world(test)
    for name in ("partitions", "failed_partition_info", "lag_seconds", "rpo_seconds", "topics"):
        assert told.samples(f"kmirror_{name}") == []
    assert told.value("kmirror_led_coordinator_partitions") == 0


def test_reasons_are_few_and_short() -> None:
    """At most 50 reasons of 200 characters are told: first those only a person can help, then the oldest."""

    async def test(_world: World, node: MemoryNode) -> Exposition:
        await mirrored(node, t=60)
        for partition in range(60):
            node.link().fail("t", partition, ForeignWriteError(f"{partition} " + "x" * 500))
        await eventually(lambda: node.states() == {MirrorState.FAILED})
        for name, record in node.view.states.items():
            changed: PartitionRecord = record.model_copy(
                update={"retriable": name.partition != 59, "since_ms": 1_000 - name.partition}
            )
            node.view.states[name] = changed
        return Exposition(exporter_of(node).render())

    told = led_world(test)
    reasons = told.samples("kmirror_failed_partition_info")
    assert len(reasons) == 50
    assert {int(reason["partition"]) for reason in reasons} == set(range(10, 60))
    assert {len(reason["reason"]) for reason in reasons} == {200}
    assert told.value("kmirror_failed_partitions", mirror="m", retriable="true") == 59


def test_a_node_that_loads_tells_of_itself_only() -> None:
    """Before the state topic is loaded there is a page all the same."""
    told = Exposition(MetricsExporter(lambda: None, NodeCounters(), node_id="n1").render())
    own = {name for name in told.kinds if name.startswith("kmirror_")}
    assert own == {"kmirror_node_info", "kmirror_rebalances_total", "kmirror_pauses_total"}
    assert told.samples("kmirror_node_info")[0]["node"] == "n1"


def test_texts_are_escaped() -> None:
    """A reason with quotes, line ends and backslashes is one label value."""
    text = 'topic "t":\nC:\\x'

    async def test(_world: World, node: MemoryNode) -> Exposition:
        await mirrored(node, t=1)
        node.link().fail("t", 0, ForeignWriteError(text))
        await eventually(lambda: node.state() is MirrorState.FAILED)
        node.refreshes.statuses["m"] = refresh_status()
        return Exposition(exporter_of(node).render())

    assert led_world(test).samples("kmirror_failed_partition_info")[0]["reason"] == text
