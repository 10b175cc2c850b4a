"""Drift: is everything besides the records in step? As an asset check, and as a job on a schedule."""

from collections.abc import Sequence
from dataclasses import dataclass

import dagster as dg

from kmirror_dagster.coordination.drift import Drift, find_drift
from kmirror_dagster.errors import KmirrorError
from kmirror_dagster.orchestration.figures import MAX_TABLE_ROWS
from kmirror_dagster.orchestration.job_parts import JobParts
from kmirror_dagster.orchestration.resources import resource_of
from kmirror_dagster.orchestration.views import MirrorView

DRIFT = "drift"
DRIFT_CRON = "37 * * * *"

# the node itself gives a plan a minute
_BUDGET_S = 75.0


@dataclass(frozen=True)
class DriftParts:
    """What definitions get: a check of each mirror, and a schedule, which brings the job that runs them."""

    checks: Sequence[dg.AssetChecksDefinition]
    schedule: dg.ScheduleDefinition


def drift_parts(parts: JobParts) -> DriftParts:
    """Build them for all mirrors of a code location."""
    views = list(parts.views.values())
    job = dg.define_asset_job(
        name=f"{parts.prefix}_drift",
        selection=dg.AssetSelection.checks(*(dg.AssetCheckKey(view.asset_key, DRIFT) for view in views)),
        description="Ask the nodes what a metadata refresh would change now.",
        executor_def=dg.in_process_executor,
        tags={"dagster/priority": "10", "kmirror/job": DRIFT},
    )
    schedule = dg.ScheduleDefinition(
        name=f"{parts.prefix}_drift_schedule",
        job=job,
        cron_schedule=DRIFT_CRON,
        # refreshes level drift out by themselves; this tells people of what stays
        default_status=dg.DefaultScheduleStatus.STOPPED,
        description="Checks each hour whether topics, configurations, groups, ACLs and quotas are in step.",
    )
    return DriftParts([drift_check(view) for view in views], schedule)


def drift_check(view: MirrorView) -> dg.AssetChecksDefinition:
    """Build the check of one mirror."""

    @dg.asset_check(
        asset=view.asset_key,
        name=DRIFT,
        description="A metadata refresh now would change nothing (kmirror plan).",
        required_resource_keys={view.resource_key},
    )
    def check_drift(context: dg.AssetCheckExecutionContext) -> dg.AssetCheckResult:
        resource = resource_of(context, view.resource_key)
        try:
            drift = resource.ask(
                lambda node: find_drift(node, view.mirror), budget_s=_BUDGET_S, what="the node"
            )
        except KmirrorError as error:
            drift = Drift(errors=(str(error),))
        return dg.AssetCheckResult(
            passed=drift.in_step,
            # it is levelled out by the next refresh, or named by the step that cannot
            severity=dg.AssetCheckSeverity.WARN,
            description=drift.summary,
            metadata=drift_metadata(drift),
        )

    return check_drift


def drift_metadata(drift: Drift) -> dict[str, dg.MetadataValue]:
    """How much differs, and what, as a table."""
    metadata: dict[str, dg.MetadataValue] = {"changes": dg.MetadataValue.int(len(drift.changes))}
    if drift.changes:
        rows = [
            dg.TableRecord({"step": change.step, "subject": change.subject, "change": change.text})
            for change in drift.changes[:MAX_TABLE_ROWS]
        ]
        metadata["would_be_changed"] = dg.MetadataValue.table(records=rows)
    return metadata
