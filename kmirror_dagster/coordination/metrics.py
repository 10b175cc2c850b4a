"""Prometheus metrics of a node, read from its state when they are asked for."""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from kmirror_dagster.coordination.leadership import Leadership
from kmirror_dagster.coordination.partitions import PartitionCoordinator
from kmirror_dagster.coordination.refreshes import RefreshCoordinator
from kmirror_dagster.coordination.view import StateView
from kmirror_dagster.lifecycle import MirrorState


@dataclass(frozen=True)
class MetricSources:
    """Where the figures come from."""

    view: StateView
    leadership: Leadership
    partitions: PartitionCoordinator
    refreshes: RefreshCoordinator


@dataclass
class NodeCounters:
    """Totals of the process since it started."""

    rebalances: int = 0
    pauses: int = 0


class NodeCollector(Collector):
    """All metrics of one node. Topic figures are sums (records, bytes) or maxima (seconds) over partitions."""

    def __init__(self, sources: Callable[[], MetricSources | None], counters: NodeCounters) -> None:
        self._sources = sources
        self._counters = counters

    def collect(self) -> Iterable[Metric]:
        """Metrics as of now."""
        yield _counter(
            "kmirror_rebalances", "Group rebalances that changed this node's share", self._counters.rebalances
        )
        yield _counter(
            "kmirror_pauses", "Times this process did not run for half a session", self._counters.pauses
        )
        sources = self._sources()
        if sources is None:
            return
        yield _gauge(
            "kmirror_led_coordinator_partitions",
            "Coordinator partitions led here",
            len(sources.leadership.shards),
        )
        yield _counter(
            "kmirror_take_overs", "Coordinator partitions taken over", sources.leadership.take_overs_total
        )
        yield _gauge(
            "kmirror_quarantined_records", "State records that cannot be read", len(sources.view.quarantined)
        )
        yield from _partition_metrics(sources)
        yield from _copy_metrics(sources)
        yield from _refresh_metrics(sources)


class MetricsExporter:
    """Renders a node's metrics from a registry of its own."""

    def __init__(self, sources: Callable[[], MetricSources | None], counters: NodeCounters) -> None:
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(NodeCollector(sources, counters))

    def render(self) -> bytes:
        """Prometheus text format."""
        return generate_latest(self._registry)


def _gauge(name: str, text: str, value: float) -> GaugeMetricFamily:
    return GaugeMetricFamily(name, text, value=value)


def _counter(name: str, text: str, value: float) -> CounterMetricFamily:
    return CounterMetricFamily(name, text, value=value)


def _partition_metrics(sources: MetricSources) -> Iterator[Metric]:
    states = GaugeMetricFamily(
        "kmirror_partitions", "Mirror partitions led here, by state", labels=["mirror", "state"]
    )
    failed = GaugeMetricFamily(
        "kmirror_failed_partitions",
        "FAILED partitions led here, by whether they are retried",
        labels=["mirror", "retriable"],
    )
    counts: Counter[tuple[str, str]] = Counter()
    failures: Counter[tuple[str, str]] = Counter()
    for partition in sources.leadership.shards:
        for name in sources.view.led_by(partition):
            record = sources.view.states.get(name)
            counts[name.mirror, str(record.state) if record else "NONE"] += 1
            if record is not None and record.state is MirrorState.FAILED:
                failures[name.mirror, str(record.retriable).lower()] += 1
    for (mirror, state), count in sorted(counts.items()):
        states.add_metric([mirror, state], count)
    for (mirror, retriable), count in sorted(failures.items()):
        failed.add_metric([mirror, retriable], count)
    yield states
    yield failed
    transitions = CounterMetricFamily("kmirror_transitions", "State changes made here", labels=["state"])
    for state, count in sorted(sources.partitions.counters.transitions.items()):
        transitions.add_metric([str(state)], count)
    yield transitions
    yield _counter(
        "kmirror_retries", "Automatic retries of FAILED partitions", sources.partitions.counters.retries
    )


def _copy_metrics(sources: MetricSources) -> Iterator[Metric]:
    labels = ["mirror", "topic"]
    lag = GaugeMetricFamily("kmirror_lag_records", "Records the destination is behind", labels=labels)
    age = GaugeMetricFamily("kmirror_lag_seconds", "Age of the oldest missing record", labels=labels)
    records: Counter[tuple[str, str]] = Counter()
    seconds: dict[tuple[str, str], float] = {}
    for name in sources.partitions.running():
        progress = sources.partitions.progress(name)
        if progress is None:
            continue
        key = (name.mirror, name.topic)
        records[key] += max(progress.lag_records, 0)
        seconds[key] = max(seconds.get(key, 0.0), progress.lag_seconds)
    for key in sorted(seconds):
        lag.add_metric(list(key), records[key])
        age.add_metric(list(key), seconds[key])
    yield lag
    yield age
    totals = sources.partitions.copied()
    for field, text in (
        ("records", "Offsets appended at the destination"),
        ("bytes", "Bytes appended at the destination"),
        ("batches", "Batches appended at the destination"),
        ("resyncs", "Times a log end was read again after an uncertain answer"),
    ):
        family = CounterMetricFamily(f"kmirror_copied_{field}", text, labels=["mirror"])
        for mirror, total in sorted(totals.items()):
            family.add_metric([mirror], getattr(total, field))
        yield family


def _refresh_metrics(sources: MetricSources) -> Iterator[Metric]:
    errors = CounterMetricFamily(
        "kmirror_refresh_errors", "Refresh steps that ended with errors", labels=["step"]
    )
    for step, count in sorted(sources.refreshes.errors_by_step.items()):
        errors.add_metric([step], count)
    yield errors
    finished = GaugeMetricFamily(
        "kmirror_refresh_finished_timestamp_seconds",
        "End of the newest refresh, epoch seconds",
        labels=["mirror"],
    )
    for mirror, status in sorted(sources.refreshes.statuses.items()):
        finished.add_metric([mirror], status.finished_ms / 1000)
    yield finished
