"""Reference of a node's metrics."""

from kmirror_dagster.coordination.metric_catalogue import CATALOGUE, MetricSpec

_HEAD = """\
# Metrics of a node

`GET /metrics` of every node, Prometheus text format, with the API's bearer token. This page is written by
`make docs` from `kmirror_dagster/coordination/metric_catalogue.py`.

What belongs to a mirror partition is told by the node that leads it, what belongs to a mirror as a whole (topics,
limits, refreshes) by the node that leads the mirror: sum or take the maximum over the nodes. Counters begin at 0 when
a node starts. Until the state topic is loaded a node exports only `kmirror_node_info`, `kmirror_rebalances_total` and
`kmirror_pauses_total`.

| metric | kind | labels | meaning |
|---|---|---|---|
"""

_TAIL = """
On Linux the process itself is described by `process_cpu_seconds_total`, `process_resident_memory_bytes`,
`process_virtual_memory_bytes`, `process_open_fds`, `process_max_fds` and `process_start_time_seconds`.

The dashboard (`docker/grafana/dashboards/kmirror.json`) and the alert rules (`docker/prometheus/alerts.yaml`) use
nothing else; tests keep that so.
"""


def page() -> str:
    """The whole page."""
    return _HEAD + "".join(_row(spec) for spec in sorted(CATALOGUE, key=lambda spec: spec.name)) + _TAIL


def _row(spec: MetricSpec) -> str:
    labels = ", ".join(f"`{label}`" for label in spec.labels)
    return f"| `{spec.name}` | {spec.kind} | {labels} | {spec.text} |\n"
