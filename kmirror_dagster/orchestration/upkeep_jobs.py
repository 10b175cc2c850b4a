"""Jobs that schedules run: a full refresh, and reconciling the event log with `__mirror_state`."""

import dagster as dg

from kmirror_dagster.errors import KmirrorError
from kmirror_dagster.orchestration.clocks import epoch_ms
from kmirror_dagster.orchestration.event_batches import log_states
from kmirror_dagster.orchestration.figures import by_need, mirror_metadata
from kmirror_dagster.orchestration.history import (
    is_news,
    logged_states,
    state_event,
    sync_partitions,
)
from kmirror_dagster.orchestration.job_parts import JobParts, mirrors_field, name_run
from kmirror_dagster.orchestration.keys import PartitionKey
from kmirror_dagster.orchestration.node_api import NodeApi
from kmirror_dagster.orchestration.refresh_sensor import partition_keys
from kmirror_dagster.orchestration.resources import resource_of
from kmirror_dagster.orchestration.views import MirrorView

_CALL_BUDGET_S = 60.0
_WORST_ROWS = 50


def reconcile_job(parts: JobParts) -> dg.JobDefinition:
    """Build the job that reads all states and logs those the event log lacks.

    It mends a purged event log at any size: unlike the state sensor it is not held to 200 events at a time.
    """
    return _upkeep_job(
        parts,
        "reconcile",
        "Read all states from the nodes and log those that the event log does not have.",
        refresh=False,
    )


def refresh_job(parts: JobParts) -> dg.JobDefinition:
    """Build the job that runs a full metadata refresh and then reconciles."""
    return _upkeep_job(
        parts,
        "full_refresh",
        "Run a metadata refresh now, then bring the event log up to date.",
        refresh=True,
    )


def _upkeep_job(parts: JobParts, kind: str, description: str, *, refresh: bool) -> dg.JobDefinition:
    name = f"{parts.prefix}_{kind}"

    @dg.op(
        name=f"{name}_op",
        required_resource_keys={parts.resource_key},
        config_schema={"mirrors": mirrors_field(parts)},
        out=dg.Out(dg.Nothing),
        pool=parts.prefix,
    )
    def upkeep(context: dg.OpExecutionContext) -> dg.Output[None]:
        problems: list[str] = []
        name_run(context, context.op_config["mirrors"])
        with resource_of(context, parts.resource_key).connect(budget_s=_CALL_BUDGET_S) as node:
            for mirror in context.op_config["mirrors"]:
                try:
                    _upkeep(context, node, parts.view(mirror), refresh=refresh)
                except KmirrorError as error:  # the other mirrors have their turn all the same
                    problems.append(f"{mirror}: {error}")
        if problems:
            raise dg.Failure("; ".join(problems), allow_retries=False)
        return dg.Output(None)

    return parts.job(upkeep, name, description)


def _upkeep(context: dg.OpExecutionContext, node: NodeApi, view: MirrorView, *, refresh: bool) -> None:
    problem = None
    if refresh:
        status = node.refresh(view.mirror)
        errors = [f"{what}: {why}" for step in status.steps for what, why in step.errors.items()]
        context.log.info(f"{view.mirror}: refreshed, {len(errors)} errors")
        if not status.source_reachable:
            problem = "the source was not reachable"
        elif not status.ok:
            failed = [step.step for step in status.steps if not step.ok]
            problem = f"steps with errors: {', '.join(failed)}; {'; '.join(errors[:5])}"
    reconcile(context, node, view)
    if problem:
        raise KmirrorError(f"refresh: {problem}")


def reconcile(context: dg.OpExecutionContext, node: NodeApi, view: MirrorView) -> None:
    """Bring partition keys and event log in line with the states the nodes hold."""
    summary = node.mirror(view.mirror)
    statuses = {
        str(PartitionKey(status.topic, status.partition)): status
        for status in node.iter_partitions(view.mirror)
    }
    diff = sync_partitions(context.instance, view.partitions_name, partition_keys(summary))
    logged = logged_states(context.instance, view.asset_key, statuses)
    missing = [status for key, status in statuses.items() if is_news(status, logged.get(key))]
    context.log.info(f"{view.mirror}: {len(missing)} of {len(statuses)} states were not logged; {diff}")
    log_states(context, [state_event(view.asset_key, status, status) for status in missing])
    worst = by_need(list(statuses.values()))[:_WORST_ROWS]
    figures = mirror_metadata(summary, worst, now_ms=epoch_ms())
    context.log_event(dg.AssetObservation(asset_key=view.asset_key, metadata=figures))
