"""Every metric a node exports: name, kind, labels and what it says. docs/metrics.md is made from this list."""

from dataclasses import dataclass
from enum import Enum

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily


class Kind(str, Enum):
    """How a metric behaves over time."""

    GAUGE = "gauge"
    COUNTER = "counter"

    def __str__(self) -> str:
        return self.value


@dataclass(frozen=True)
class MetricSpec:
    """One metric.

    Attributes:
        name: name as it is exported; a counter's ends in `_total`.
        text: what it says, without a full stop; the help text of the exposition.
        labels: names of its labels.
    """

    name: str
    text: str
    kind: Kind = Kind.GAUGE
    labels: tuple[str, ...] = ()

    def family(self) -> GaugeMetricFamily | CounterMetricFamily:
        """An empty family to add samples to."""
        kind = CounterMetricFamily if self.kind is Kind.COUNTER else GaugeMetricFamily
        return kind(self.name, self.text, labels=self.labels)


_MIRROR = ("mirror",)
_TOPIC = ("mirror", "topic")
_STEP = ("mirror", "step")

NODE_INFO = MetricSpec(
    "kmirror_node_info", "Always 1; name and version of the node", labels=("node", "version")
)
COORDINATOR_PARTITIONS = MetricSpec(
    "kmirror_coordinator_partitions", "Partitions of the state topic; the same on every node"
)
LED = MetricSpec("kmirror_led_coordinator_partitions", "Coordinator partitions led here")
TAKE_OVERS = MetricSpec("kmirror_take_overs_total", "Coordinator partitions taken over", Kind.COUNTER)
REBALANCES = MetricSpec(
    "kmirror_rebalances_total", "Group rebalances that changed this node's share", Kind.COUNTER
)
PAUSES = MetricSpec("kmirror_pauses_total", "Times this process did not run for half a session", Kind.COUNTER)
QUARANTINED = MetricSpec("kmirror_quarantined_records", "State records that cannot be read")
MEMORY_BUDGET = MetricSpec("kmirror_memory_budget_bytes", "Record bytes that may be held in memory at a time")
MEMORY_USED = MetricSpec("kmirror_memory_used_bytes", "Record bytes held in memory now")

PARTITIONS = MetricSpec(
    "kmirror_partitions",
    "Mirror partitions led here, by state; NONE: not decided on yet",
    labels=("mirror", "state"),
)
FAILED = MetricSpec(
    "kmirror_failed_partitions",
    "FAILED partitions led here, by whether they are retried",
    labels=("mirror", "retriable"),
)
FAILED_INFO = MetricSpec(
    "kmirror_failed_partition_info",
    "Always 1; a FAILED partition led here and why, at most 50 for each node",
    labels=("mirror", "topic", "partition", "retriable", "reason"),
)
TRANSITIONS = MetricSpec("kmirror_transitions_total", "State changes made here", Kind.COUNTER, ("state",))
RETRIES = MetricSpec("kmirror_retries_total", "Automatic retries of FAILED partitions", Kind.COUNTER)

LAG_RECORDS = MetricSpec(
    "kmirror_lag_records",
    "Records the destination is behind, summed over the topic's partitions copied here",
    labels=_TOPIC,
)
LAG_SECONDS = MetricSpec(
    "kmirror_lag_seconds",
    "How long ago the source had the first record still missing, the worst of the topic's partitions copied "
    "here",
    labels=_TOPIC,
)
RPO_SECONDS = MetricSpec(
    "kmirror_rpo_seconds", "The mirror's policies.rpo_seconds, told by the node that leads it", labels=_MIRROR
)
COPIED_RECORDS = MetricSpec(
    "kmirror_copied_records_total", "Offsets appended at the destination", Kind.COUNTER, _MIRROR
)
COPIED_BYTES = MetricSpec(
    "kmirror_copied_bytes_total", "Bytes appended at the destination", Kind.COUNTER, _MIRROR
)
COPIED_BATCHES = MetricSpec(
    "kmirror_copied_batches_total", "Batches appended at the destination", Kind.COUNTER, _MIRROR
)
COPIED_RESYNCS = MetricSpec(
    "kmirror_copied_resyncs_total",
    "Times a log end was read again after an uncertain answer",
    Kind.COUNTER,
    _MIRROR,
)

TOPICS = MetricSpec("kmirror_topics", "Topics of a mirror led here", labels=_MIRROR)
TOPIC_ERRORS = MetricSpec(
    "kmirror_topic_errors", "Topics of a mirror led here that cannot be mirrored", labels=_MIRROR
)
REFRESH_ERRORS = MetricSpec(
    "kmirror_refresh_errors_total", "Refresh steps that ended with errors", Kind.COUNTER, ("step",)
)
REFRESH_STEP_ERRORS = MetricSpec(
    "kmirror_refresh_step_errors",
    "Things that went wrong in a step of the mirror's newest refresh",
    labels=_STEP,
)
REFRESH_STEP_SECONDS = MetricSpec(
    "kmirror_refresh_step_duration_seconds", "Duration of a step of the mirror's newest refresh", labels=_STEP
)
REFRESH_SECONDS = MetricSpec(
    "kmirror_refresh_duration_seconds", "Duration of the mirror's newest refresh", labels=_MIRROR
)
REFRESH_FINISHED = MetricSpec(
    "kmirror_refresh_finished_timestamp_seconds", "End of the newest refresh, epoch seconds", labels=_MIRROR
)
REFRESH_INTERVAL = MetricSpec("kmirror_refresh_interval_seconds", "Time between two refreshes of a mirror")
SOURCE_REACHABLE = MetricSpec(
    "kmirror_source_reachable",
    "1 when the mirror's newest refresh reached the source, else 0",
    labels=_MIRROR,
)

CATALOGUE: tuple[MetricSpec, ...] = tuple(
    value for value in tuple(globals().values()) if isinstance(value, MetricSpec)
)
