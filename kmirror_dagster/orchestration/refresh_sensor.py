"""Refresh sensor: partition keys, one aggregate event, check results; each written only when it changed."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import dagster as dg
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from kmirror_dagster.broker.deadlines import Deadline
from kmirror_dagster.coordination.models import MirrorSummary, PartitionStatus
from kmirror_dagster.errors import DeadlineError, KmirrorError, UnknownMirrorError
from kmirror_dagster.orchestration.checks import Finding, assess, failed_partitions, unanswered
from kmirror_dagster.orchestration.clocks import epoch_ms
from kmirror_dagster.orchestration.figures import by_need, mirror_metadata
from kmirror_dagster.orchestration.history import sync_partitions
from kmirror_dagster.orchestration.keys import PartitionKey
from kmirror_dagster.orchestration.node_api import NodeApi
from kmirror_dagster.orchestration.resources import KMirrorResource, resource_of
from kmirror_dagster.orchestration.topic_assets import TopicReading, read_topics, topic_events, topic_finding
from kmirror_dagster.orchestration.views import MirrorView

REFRESH_INTERVAL_S = 30
REFRESH_BUDGET_S = 8.0
# The node refreshes by itself every 30 s; a tick asks for one only where that did not happen.
_STALE_REFRESH_MS = 45_000
# An idle mirror still says once in a while that it is well: its freshness policy counts on it. One that copies
# without falling behind says so more often, for the plots.
DEFAULT_HEARTBEAT_S = 600
_BUSY_HEARTBEAT_S = 60
_WORST_ROWS = 50
# A check has to fail on this many ticks in a row before it is reported: one slow answer is no news.
_FAILING_TICKS = 2

SensorEvent = dg.AssetMaterialization | dg.AssetObservation | dg.AssetCheckEvaluation


class CheckMemory(BaseModel):
    """What was last reported of one check, and how many ticks in a row it failed since."""

    model_config = ConfigDict(frozen=True)
    passed: bool | None = None
    failing_ticks: int = 0


class RefreshCursor(BaseModel):
    """What the last ticks reported; lost, everything is reported once more."""

    model_config = ConfigDict(frozen=True)
    figures: str = ""
    logged_ms: int = 0
    checks: dict[str, CheckMemory] = Field(default_factory=dict)
    topics: dict[str, int] = Field(default_factory=dict)
    topics_ms: int = 0

    @classmethod
    def read(cls, text: str | None) -> "RefreshCursor":
        """Cursor of the tick before; an empty one when there is none, or one of another version."""
        try:
            return cls.model_validate_json(text) if text else cls()
        except ValidationError:
            return cls()


@dataclass(frozen=True)
class Reading:
    """What the node said; `worst` is None when no aggregate event is due."""

    summary: MirrorSummary
    failed: Sequence[PartitionStatus]
    worst: Sequence[PartitionStatus] | None
    topics: Sequence[TopicReading] = ()
    note: str = ""


def refresh_sensor(view: MirrorView, *, heartbeat_s: int = DEFAULT_HEARTBEAT_S) -> dg.SensorDefinition:
    """Build the refresh sensor of one mirror.

    Args:
        heartbeat_s: an aggregate event is logged at least this often, changed or not; once a minute while
            records flow.
    """

    @dg.sensor(
        name=f"{view.name}_refresh",
        minimum_interval_seconds=REFRESH_INTERVAL_S,
        required_resource_keys={view.resource_key},
        default_status=dg.DefaultSensorStatus.RUNNING,
        description=f"Keeps partition keys, figures and checks of mirror {view.mirror} current.",
    )
    def refresh(context: dg.SensorEvaluationContext) -> dg.SensorResult:
        return evaluate(context, view, resource_of(context, view.resource_key), heartbeat_s * 1000)

    return refresh


def evaluate(
    context: dg.SensorEvaluationContext, view: MirrorView, resource: KMirrorResource, heartbeat_ms: int
) -> dg.SensorResult:
    """One tick: ask the node within the budget, then write what changed."""
    cursor = RefreshCursor.read(context.cursor)
    now_ms = epoch_ms()
    try:
        reading = resource.ask(
            lambda node: _read(node, view, cursor, now_ms, heartbeat_ms),
            budget_s=REFRESH_BUDGET_S,
            what="the node",
        )
    except KmirrorError as error:
        events, memory = _report_checks(view, unanswered(str(error)), cursor.checks)
        return _result(str(error), events, cursor.model_copy(update={"checks": memory}))
    summary = reading.summary
    diff = sync_partitions(context.instance, view.partitions_name, partition_keys(summary))
    findings = assess(summary, reading.failed, view.target.policies, now_ms=now_ms)
    findings += [topic_finding(view, topic) for topic in reading.topics]
    events, memory = _report_checks(view, findings, cursor.checks)
    if reading.worst is not None:
        events.append(_aggregate(view, summary, reading.worst, now_ms))
        cursor = cursor.model_copy(update={"figures": figures_of(summary), "logged_ms": now_ms})
    if now_ms - cursor.topics_ms >= _BUSY_HEARTBEAT_S * 1000:
        news, ends = topic_events(view, reading.topics, cursor.topics)
        events += news
        cursor = cursor.model_copy(update={"topics": ends, "topics_ms": now_ms if news else cursor.topics_ms})
    seen = f"{summary.partitions} partitions, {counts(summary)}, {summary.lag_records} records behind; {diff}"
    return _result(seen + reading.note, events, cursor.model_copy(update={"checks": memory}))


def partition_keys(summary: MirrorSummary) -> list[str]:
    """Partition keys of a mirror, by topic and number."""
    return [
        str(PartitionKey(topic.topic, number))
        for topic in sorted(summary.topics, key=lambda topic: topic.topic)
        for number in range(topic.partitions)
    ]


def counts(summary: MirrorSummary) -> str:
    """Counts per state as text."""
    parts = [f"{count} {state}" for state, count in sorted(summary.states.items()) if count]
    return ", ".join(parts) or "none has a state"


def figures_of(summary: MirrorSummary) -> str:
    """What has to change for an aggregate event to be news; throughput alone does not."""
    states = {state: count for state, count in summary.states.items() if count}
    well = summary.refresh is not None and summary.refresh.source_reachable and summary.refresh.ok
    errors = sum(1 for topic in summary.topics if topic.error)
    parts = (
        len(summary.topics),
        summary.partitions,
        sorted(states.items()),
        summary.lag_records,
        well,
        errors,
    )
    return "|".join(str(part) for part in parts)


def _read(node: NodeApi, view: MirrorView, cursor: RefreshCursor, now_ms: int, heartbeat_ms: int) -> Reading:
    deadline, mirror = Deadline(REFRESH_BUDGET_S), view.mirror
    summary, note = node.mirror(mirror), ""
    if summary.refresh is None or now_ms - summary.refresh.finished_ms > _STALE_REFRESH_MS:
        try:
            node.refresh(mirror)
            summary = node.mirror(mirror)
        except UnknownMirrorError:
            raise
        except KmirrorError as error:  # the figures are worth having without it, and the check says so too
            note = f"; refresh asked for: {error}"
    if summary.records_per_second > 0:
        heartbeat_ms = min(heartbeat_ms, _BUSY_HEARTBEAT_S * 1000)
    is_due = figures_of(summary) != cursor.figures or now_ms - cursor.logged_ms >= heartbeat_ms
    worst = _worst(node, mirror, deadline) if is_due else None
    topics = read_topics(node, view, summary)
    return Reading(summary, failed_partitions(node, summary), worst, topics, note)


def _worst(node: NodeApi, mirror: str, deadline: Deadline) -> list[PartitionStatus]:
    """The partitions that need somebody first; of the first ones only when the listing takes too long."""
    seen: list[PartitionStatus] = []
    try:
        for status in node.iter_partitions(mirror):
            seen.append(status)
            if len(seen) > 4 * _WORST_ROWS:
                seen = by_need(seen)[:_WORST_ROWS]
                deadline.check("listing partitions")
    except DeadlineError:
        return by_need(seen)[:_WORST_ROWS]
    return by_need(seen)[:_WORST_ROWS]


def _aggregate(
    view: MirrorView, summary: MirrorSummary, worst: Sequence[PartitionStatus], now_ms: int
) -> SensorEvent:
    """A materialization when the mirror was refreshed and keeps its RPO: one that does not gets stale by its policy."""
    is_refreshed = (
        summary.refresh is not None
        and summary.refresh.source_reachable
        and now_ms - summary.refresh.finished_ms <= 2 * _STALE_REFRESH_MS
    )
    is_fresh = is_refreshed and summary.lag_seconds <= view.target.policies.rpo_seconds
    kind = dg.AssetMaterialization if is_fresh else dg.AssetObservation
    return kind(asset_key=view.asset_key, metadata=mirror_metadata(summary, worst, now_ms=now_ms))


def _report_checks(
    view: MirrorView, findings: Sequence[Finding], before: Mapping[str, CheckMemory]
) -> tuple[list[SensorEvent], dict[str, CheckMemory]]:
    """Results that are news, and what to remember of all of them."""
    events: list[SensorEvent] = []
    after = dict(before)
    for finding in findings:
        last = before.get(finding.name, CheckMemory())
        streak = 0 if finding.passed else last.failing_ticks + 1
        is_certain = finding.passed or streak >= _FAILING_TICKS
        reported = last.passed
        if is_certain and finding.passed != last.passed:
            events.append(_evaluation(view, finding))
            reported = finding.passed
        after[finding.name] = CheckMemory(passed=reported, failing_ticks=min(streak, _FAILING_TICKS))
    return events, after


def _evaluation(view: MirrorView, finding: Finding) -> dg.AssetCheckEvaluation:
    return dg.AssetCheckEvaluation(
        asset_key=finding.asset_key or view.asset_key,
        check_name=finding.check,
        passed=finding.passed,
        severity=finding.severity,
        description=finding.text,
        metadata=dict(finding.metadata or {}),
    )


def _result(seen: str, events: Sequence[SensorEvent], cursor: RefreshCursor) -> dg.SensorResult:
    return dg.SensorResult(skip_reason=seen, asset_events=list(events), cursor=cursor.model_dump_json())
