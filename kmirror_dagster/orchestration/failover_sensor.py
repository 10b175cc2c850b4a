"""Failover sensor: STOPPED until somebody arms it. It decides on what was seen; the job it starts acts."""

import dagster as dg

from kmirror_dagster.errors import KmirrorError
from kmirror_dagster.orchestration.failover_job import failover_config
from kmirror_dagster.orchestration.mirror_probe import FAILOVER_TAG, gather, incident_of, judged
from kmirror_dagster.orchestration.resources import KMirrorResource, resource_of
from kmirror_dagster.orchestration.views import MirrorView

# As often as the daemon looks: of the minute a failover may take, none is to be spent waiting.
FAILOVER_INTERVAL_S = 5


def failover_sensor(view: MirrorView, job: dg.JobDefinition) -> dg.SensorDefinition:
    """Build the failover sensor of one mirror; `job` is the failover job it starts."""

    @dg.sensor(
        name=f"{view.name}_failover",
        job=job,
        minimum_interval_seconds=FAILOVER_INTERVAL_S,
        required_resource_keys={view.resource_key},
        default_status=dg.DefaultSensorStatus.STOPPED,
        description=(
            f"Arm it to fail mirror {view.mirror} over by itself once the source is down. "
            "Nothing is ever failed back by itself."
        ),
    )
    def failover(context: dg.SensorEvaluationContext) -> dg.SkipReason | dg.RunRequest:
        return evaluate(context, view, resource_of(context, view.resource_key), job.name)

    return failover


def evaluate(
    context: dg.SensorEvaluationContext, view: MirrorView, resource: KMirrorResource, job_name: str
) -> dg.SkipReason | dg.RunRequest:
    """One tick: gather evidence and decide."""
    incident, newest = incident_of(context.instance, view.mirror)
    try:
        evidence, summary = gather(resource, view, incident)
    except KmirrorError as error:
        return dg.SkipReason(f"not known how the mirror is: {error}")
    verdict = judged(context, resource, view, evidence)
    context.log.info(verdict.reason)
    if not verdict.fail_over:
        return dg.SkipReason(verdict.reason)
    return dg.RunRequest(
        # the epoch of a failover is the one before it: ticks that overlap ask for the same run, and once that
        # has ended the next incident has a key of its own
        run_key=f"failover {view.mirror} created {summary.created_ms} after {newest}",
        job_name=job_name,
        run_config=failover_config(job_name, view.mirror, first_bad_ms=verdict.first_bad_ms),
        tags={FAILOVER_TAG: view.mirror},
    )
