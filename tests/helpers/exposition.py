"""What a node exports, read back from its Prometheus text."""

from prometheus_client.parser import text_string_to_metric_families

from kmirror_dagster.coordination.metrics import MetricsExporter, MetricSources, NodeCounters
from kmirror_dagster.errors import ForeignWriteError
from kmirror_dagster.lifecycle import MirrorState
from kmirror_dagster.metadata.outcome import RefreshStatus, Step, StepStatus
from kmirror_dagster.replication.budget import Budget
from tests.helpers.coordination import MemoryNode, World, eventually, led_world, mirrored


class Exposition:
    """Samples by name and labels; label names and kind of each metric that has samples."""

    def __init__(self, text: bytes) -> None:
        self.values: dict[tuple[str, frozenset[tuple[str, str]]], float] = {}
        self.labels: dict[str, set[str]] = {}
        self.kinds: dict[str, str] = {}
        for family in text_string_to_metric_families(text.decode()):
            for sample in family.samples:
                self.values[sample.name, frozenset(sample.labels.items())] = sample.value
                self.labels.setdefault(sample.name, set()).update(sample.labels)
                self.kinds[sample.name] = family.type

    def value(self, name: str, **labels: str) -> float:
        """One sample."""
        return self.values[name, frozenset(labels.items())]

    def samples(self, name: str) -> list[dict[str, str]]:
        """Labels of each sample of a metric."""
        return [dict(labels) for known, labels in self.values if known == name]


def exporter_of(node: MemoryNode, *, used: int = 0) -> MetricsExporter:
    """An exporter over a node in memory, of whose 1,000 bytes of budget some are used."""
    budget = Budget(1_000)
    budget.take(used)
    sources = MetricSources(node.view, node.leadership, node.partitions, node.refreshes, budget)
    return MetricsExporter(lambda: sources, NodeCounters(rebalances=2, pauses=1), node_id="n1")


def busy_exposition() -> Exposition:
    """A node that leads everything; of topic `t` of mirror `m` partition 0 copies and partition 1 has FAILED."""

    async def busy(_world: World, node: MemoryNode) -> Exposition:
        await mirrored(node, t=2)
        node.link().lag = 7
        node.link().copied = 30
        node.link().fail("t", 1, ForeignWriteError("somebody wrote at offset 12"))
        await eventually(lambda: node.state("t", 1) is MirrorState.FAILED)
        node.refreshes.statuses["m"] = refresh_status(Step.GROUPS)
        return Exposition(exporter_of(node, used=200).render())

    return led_world(busy)


def refresh_status(*failing: Step) -> RefreshStatus:
    """A refresh of half a second in which some steps had two errors each."""
    steps = [
        StepStatus(
            step=str(step),
            ok=step not in failing,
            duration_ms=40,
            errors={"a": "no", "b": "no"} if step in failing else {},
        )
        for step in Step
    ]
    return RefreshStatus(started_ms=1_700_000_000_000, finished_ms=1_700_000_000_500, steps=steps)
