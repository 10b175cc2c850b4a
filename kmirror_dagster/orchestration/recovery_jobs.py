"""What recovery and proof add to a code location: checks, jobs and schedules."""

from collections.abc import Sequence
from dataclasses import dataclass

import dagster as dg

from kmirror_dagster.orchestration.contents_jobs import certify_job, contents_check, reverify_job
from kmirror_dagster.orchestration.job_parts import JobParts

CERTIFY_CRON = "*/10 * * * *"


@dataclass(frozen=True)
class RecoveryParts:
    """Definitions of recovery and proof of one builder call."""

    checks: Sequence[dg.AssetChecksDefinition]
    jobs: Sequence[dg.JobDefinition]
    schedules: Sequence[dg.ScheduleDefinition]


def recovery_parts(parts: JobParts) -> RecoveryParts:
    """Build them for all mirrors of a code location."""
    certify = certify_job(parts)
    return RecoveryParts(
        checks=[contents_check(view) for view in parts.views.values()],
        jobs=[certify, reverify_job(parts)],
        schedules=[
            dg.ScheduleDefinition(
                name=f"{parts.prefix}_certify_schedule",
                job=certify,
                cron_schedule=CERTIFY_CRON,
                # it reads every record once on both sides: whoever pays for the traffic decides
                default_status=dg.DefaultScheduleStatus.STOPPED,
                description="Certifies what is new by digests, every ten minutes.",
            )
        ],
    )
