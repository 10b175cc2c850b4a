"""What recovery and proof add to a code location: checks, jobs and schedules."""

from collections.abc import Sequence
from dataclasses import dataclass

import dagster as dg

from kmirror_dagster.orchestration.contents_jobs import certify_job, contents_check, reverify_job
from kmirror_dagster.orchestration.drill_job import drill_job
from kmirror_dagster.orchestration.failover_job import approve_failover_job
from kmirror_dagster.orchestration.forecast_jobs import forecast_job, rpo_check
from kmirror_dagster.orchestration.handover_jobs import failback_job, switchover_job
from kmirror_dagster.orchestration.job_parts import JobParts

CERTIFY_CRON = "*/10 * * * *"
FORECAST_CRON = "*/5 * * * *"
DRILL_CRON = "13 4 * * 0"


@dataclass(frozen=True)
class RecoveryParts:
    """Definitions of recovery and proof of one builder call."""

    checks: Sequence[dg.AssetChecksDefinition]
    jobs: Sequence[dg.JobDefinition]
    schedules: Sequence[dg.ScheduleDefinition]


def recovery_parts(parts: JobParts) -> RecoveryParts:
    """Build them for all mirrors of a code location."""
    certify, forecast, drill = certify_job(parts), forecast_job(parts), drill_job(parts)
    return RecoveryParts(
        checks=[make(view) for view in parts.views.values() for make in (contents_check, rpo_check)],
        jobs=[
            certify,
            reverify_job(parts),
            forecast,
            drill,
            approve_failover_job(parts),
            switchover_job(parts),
            failback_job(parts),
        ],
        schedules=[
            dg.ScheduleDefinition(
                name=f"{parts.prefix}_certify_schedule",
                job=certify,
                cron_schedule=CERTIFY_CRON,
                # it reads every record once on both sides: whoever pays for the traffic decides
                default_status=dg.DefaultScheduleStatus.STOPPED,
                description="Certifies what is new by digests, every ten minutes.",
            ),
            dg.ScheduleDefinition(
                name=f"{parts.prefix}_forecast_schedule",
                job=forecast,
                cron_schedule=FORECAST_CRON,
                # it needs the credentials of both clusters where Dagster's runs are
                default_status=dg.DefaultScheduleStatus.STOPPED,
                description="Logs what a failover would cost, every five minutes.",
            ),
            dg.ScheduleDefinition(
                name=f"{parts.prefix}_drill_schedule",
                job=drill,
                cron_schedule=DRILL_CRON,
                # it makes topics on both clusters
                default_status=dg.DefaultScheduleStatus.STOPPED,
                description="Rehearses a failover on shadow topics each Sunday night.",
            ),
        ],
    )
