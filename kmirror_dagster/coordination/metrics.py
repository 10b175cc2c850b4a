"""Prometheus metrics of a node, read from its state when they are asked for."""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import Metric
from prometheus_client.process_collector import ProcessCollector
from prometheus_client.registry import Collector
from pydantic import ValidationError

from kmirror_dagster.coordination import metric_catalogue as names
from kmirror_dagster.coordination.keys import PartitionKey
from kmirror_dagster.coordination.leadership import Leadership
from kmirror_dagster.coordination.metric_catalogue import MetricSpec
from kmirror_dagster.coordination.partitions import PartitionCoordinator
from kmirror_dagster.coordination.refreshes import RefreshCoordinator
from kmirror_dagster.coordination.view import StateView
from kmirror_dagster.lifecycle import MirrorState
from kmirror_dagster.metadata.outcome import Step
from kmirror_dagster.records import PartitionRecord
from kmirror_dagster.replication.budget import Budget
from kmirror_dagster.settings import PolicySettings
from kmirror_dagster.version import __version__

# A reason is a text of its own for each partition: enough to see what is wrong, too few to harm a scraper.
_MAX_REASONS = 50
_REASON_LENGTH = 200
# what a refresh that failed as a whole is counted under, see RefreshCoordinator
_WHOLE_REFRESH = "refresh"

Samples: TypeAlias = Mapping[tuple[str, ...], float]


@dataclass(frozen=True)
class MetricSources:
    """Where the figures come from."""

    view: StateView
    leadership: Leadership
    partitions: PartitionCoordinator
    refreshes: RefreshCoordinator
    budget: Budget


@dataclass
class NodeCounters:
    """Totals of the process since it started."""

    rebalances: int = 0
    pauses: int = 0


class NodeCollector(Collector):
    """All metrics of one node. Topic figures are sums (records, bytes) or maxima (seconds) over partitions."""

    def __init__(
        self, sources: Callable[[], MetricSources | None], counters: NodeCounters, *, node_id: str
    ) -> None:
        self._sources = sources
        self._counters = counters
        self._node_id = node_id

    def collect(self) -> Iterable[Metric]:
        """Metrics as of now."""
        yield _metric(names.NODE_INFO, {(self._node_id, __version__): 1})
        yield _value(names.REBALANCES, self._counters.rebalances)
        yield _value(names.PAUSES, self._counters.pauses)
        sources = self._sources()
        if sources is None:
            return
        yield _value(names.COORDINATOR_PARTITIONS, sources.view.count)
        yield _value(names.LED, len(sources.leadership.shards))
        yield _value(names.TAKE_OVERS, sources.leadership.take_overs_total)
        yield _value(names.QUARANTINED, len(sources.view.quarantined))
        yield _value(names.MEMORY_BUDGET, sources.budget.limit)
        yield _value(names.MEMORY_USED, sources.budget.used)
        yield from _partition_metrics(sources)
        yield from _lag_metrics(sources.partitions)
        yield from _copy_metrics(sources.partitions)
        yield from _mirror_metrics(sources)
        yield from _refresh_metrics(sources.refreshes)


class MetricsExporter:
    """Renders a node's metrics from a registry of its own, and with them what Linux knows of the process."""

    def __init__(
        self, sources: Callable[[], MetricSources | None], counters: NodeCounters, *, node_id: str = ""
    ) -> None:
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(NodeCollector(sources, counters, node_id=node_id))
        ProcessCollector(registry=self._registry)

    def render(self) -> bytes:
        """Prometheus text format."""
        return generate_latest(self._registry)


def _metric(spec: MetricSpec, samples: Samples) -> Metric:
    family = spec.family()
    for labels, value in sorted(samples.items()):
        family.add_metric(labels, value)
    return family


def _value(spec: MetricSpec, value: float) -> Metric:
    return _metric(spec, {(): value})


def _partition_metrics(sources: MetricSources) -> Iterator[Metric]:
    counts: Counter[tuple[str, ...]] = Counter()
    failures: Counter[tuple[str, ...]] = Counter()
    failed: list[tuple[PartitionKey, PartitionRecord]] = []
    for partition in sources.leadership.shards:
        for name in sources.view.led_by(partition):
            record = sources.view.states.get(name)
            counts[name.mirror, str(record.state) if record else "NONE"] += 1
            if record is not None and record.state is MirrorState.FAILED:
                failures[name.mirror, _flag(record.retriable)] += 1
                failed.append((name, record))
    yield _metric(names.PARTITIONS, counts)
    yield _metric(names.FAILED, failures)
    yield _metric(names.FAILED_INFO, _reasons(failed))
    counters = sources.partitions.counters
    yield _metric(names.TRANSITIONS, {(str(s),): counters.transitions.get(s, 0) for s in MirrorState})
    yield _value(names.RETRIES, counters.retries)


def _reasons(failed: list[tuple[PartitionKey, PartitionRecord]]) -> Samples:
    """Reasons of some FAILED partitions: first those that only a person can help, then the oldest."""
    failed.sort(key=lambda item: (item[1].retriable, item[1].since_ms, item[0]))
    return {
        (
            name.mirror,
            name.topic,
            str(name.partition),
            _flag(record.retriable),
            (record.error or "")[:_REASON_LENGTH],
        ): 1
        for name, record in failed[:_MAX_REASONS]
    }


def _flag(value: bool) -> str:
    return str(value).lower()


def _lag_metrics(partitions: PartitionCoordinator) -> Iterator[Metric]:
    records: Counter[tuple[str, ...]] = Counter()
    seconds: dict[tuple[str, ...], float] = {}
    for name in partitions.running():
        progress = partitions.progress(name)
        if progress is None:
            continue
        key = (name.mirror, name.topic)
        records[key] += max(progress.lag_records, 0)
        seconds[key] = max(seconds.get(key, 0.0), progress.lag_seconds)
    yield _metric(names.LAG_RECORDS, records)
    yield _metric(names.LAG_SECONDS, seconds)


def _copy_metrics(partitions: PartitionCoordinator) -> Iterator[Metric]:
    totals = partitions.copied()
    yield _metric(names.COPIED_RECORDS, {(mirror,): total.records for mirror, total in totals.items()})
    yield _metric(names.COPIED_BYTES, {(mirror,): total.bytes for mirror, total in totals.items()})
    yield _metric(names.COPIED_BATCHES, {(mirror,): total.batches for mirror, total in totals.items()})
    yield _metric(names.COPIED_RESYNCS, {(mirror,): total.resyncs for mirror, total in totals.items()})


def _mirror_metrics(sources: MetricSources) -> Iterator[Metric]:
    """What the leader of a mirror tells of it, so that it is told once."""
    view, shards = sources.view, sources.leadership.shards
    led = [mirror for mirror in view.mirrors if view.mirror_owner(mirror) in shards]
    topics = {mirror: view.topics.get(mirror, {}) for mirror in led}
    yield _metric(names.TOPICS, {(mirror,): len(known) for mirror, known in topics.items()})
    errors = {(mirror,): sum(1 for t in known.values() if t.error) for mirror, known in topics.items()}
    yield _metric(names.TOPIC_ERRORS, errors)
    limits = {mirror: _rpo_seconds(view.mirrors[mirror].document) for mirror in led}
    yield _metric(names.RPO_SECONDS, {(m,): limit for m, limit in limits.items() if limit is not None})


def _rpo_seconds(document: Mapping[str, Any]) -> float | None:
    """A mirror's limit; None when its policies cannot be read as stored (`${ENV}` references among them)."""
    try:
        return PolicySettings.model_validate(document.get("policies") or {}).rpo_seconds
    except ValidationError:
        return None


def _refresh_metrics(refreshes: RefreshCoordinator) -> Iterator[Metric]:
    totals = {(str(step),): 0 for step in (*Step, _WHOLE_REFRESH)}
    totals |= {(step,): count for step, count in refreshes.errors_by_step.items()}
    yield _metric(names.REFRESH_ERRORS, totals)
    yield _value(names.REFRESH_INTERVAL, refreshes.interval_s)
    statuses = refreshes.statuses
    steps = [(mirror, step) for mirror, status in statuses.items() for step in status.steps]
    yield _metric(names.REFRESH_STEP_ERRORS, {(m, step.step): len(step.errors) for m, step in steps})
    yield _metric(names.REFRESH_STEP_SECONDS, {(m, step.step): step.duration_ms / 1000 for m, step in steps})
    durations = {(m,): (status.finished_ms - status.started_ms) / 1000 for m, status in statuses.items()}
    yield _metric(names.REFRESH_SECONDS, durations)
    yield _metric(names.REFRESH_FINISHED, {(m,): s.finished_ms / 1000 for m, s in statuses.items()})
    yield _metric(names.SOURCE_REACHABLE, {(m,): float(s.source_reachable) for m, s in statuses.items()})
