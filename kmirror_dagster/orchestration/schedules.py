"""Schedules: a full refresh each hour, a comparison of both clusters each night (off until switched on)."""

import dagster as dg

FULL_REFRESH_CRON = "17 * * * *"
VERIFY_CRON = "43 2 * * *"


def mirror_schedules(
    prefix: str, refresh: dg.JobDefinition, verify: dg.JobDefinition
) -> list[dg.ScheduleDefinition]:
    """Build the schedules of one builder call."""
    return [
        dg.ScheduleDefinition(
            name=f"{prefix}_full_refresh_schedule",
            job=refresh,
            cron_schedule=FULL_REFRESH_CRON,
            default_status=dg.DefaultScheduleStatus.RUNNING,
            description="Runs a metadata refresh and brings the event log up to date.",
        ),
        dg.ScheduleDefinition(
            name=f"{prefix}_verify_schedule",
            job=verify,
            cron_schedule=VERIFY_CRON,
            # it reads all data of both clusters: whoever pays for the traffic decides
            default_status=dg.DefaultScheduleStatus.STOPPED,
            description="Compares both clusters record by record.",
        ),
    ]
