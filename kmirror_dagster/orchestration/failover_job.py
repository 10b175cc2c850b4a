"""Failover job: check again, stop all topics, wait until they are STOPPED, report what is lost at most."""

import time
from collections.abc import Sequence
from typing import Any

import dagster as dg
from pydantic import BaseModel, ConfigDict

from kmirror_dagster.broker.deadlines import Deadline
from kmirror_dagster.coordination.models import MirrorSummary, PartitionStatus, VerbRequest
from kmirror_dagster.errors import KmirrorError
from kmirror_dagster.lifecycle import MirrorState
from kmirror_dagster.orchestration.clocks import epoch_ms
from kmirror_dagster.orchestration.failover import Incident
from kmirror_dagster.orchestration.figures import by_need, partition_table, seconds
from kmirror_dagster.orchestration.job_parts import JobParts, confirm_field, mirror_field, topics_field
from kmirror_dagster.orchestration.mirror_probe import (
    APPROVAL_TAG,
    FAILOVER_TAG,
    gather,
    judged,
    partitions_to_stop,
)
from kmirror_dagster.orchestration.node_api import NodeApi
from kmirror_dagster.orchestration.resources import KMirrorResource, resource_of
from kmirror_dagster.orchestration.views import MirrorView
from kmirror_dagster.settings import name_matcher

DEFAULT_STOP_WAIT_S = 120.0
_POLL_S = 0.5
_CALL_BUDGET_S = 15.0


class FailoverConfig(BaseModel):
    """Configuration of a failover run; the fields' texts are in the launchpad."""

    model_config = ConfigDict(frozen=True)
    mirror: str
    confirm: str
    topics: list[str]
    force: bool
    wait_seconds: float
    dry_run: bool
    first_bad_ms: int


def failover_config(job_name: str, mirror: str, *, first_bad_ms: int | None = None) -> dict[str, Any]:
    """Run configuration of a failover of all topics of a mirror."""
    config = {"mirror": mirror, "confirm": mirror, "first_bad_ms": first_bad_ms or 0}
    return {"ops": {f"{job_name}_op": {"config": config}}}


def failover_job(parts: JobParts) -> dg.JobDefinition:
    """Build the failover job; it has a pool of its own, so that it never waits behind other work."""
    name = f"{parts.prefix}_failover"

    @dg.op(
        name=f"{name}_op",
        required_resource_keys={parts.resource_key},
        config_schema={
            "mirror": mirror_field(parts),
            "confirm": confirm_field(),
            "topics": topics_field(),
            "force": dg.Field(
                dg.Bool,
                default_value=False,
                description="Do it although the source is not seen down (what is not mirrored yet is lost).",
            ),
            "wait_seconds": dg.Field(
                dg.Float, default_value=DEFAULT_STOP_WAIT_S, description="How long to wait for STOPPED."
            ),
            "dry_run": dg.Field(
                dg.Bool, default_value=False, description="Check and report only; nothing is stopped."
            ),
            "first_bad_ms": dg.Field(
                dg.Int,
                default_value=0,
                description="When the source was first seen down (set by the sensor).",
            ),
        },
        out=dg.Out(dg.Nothing),
        pool=f"{parts.prefix}_failover",
    )
    def fail_over(context: dg.OpExecutionContext) -> dg.Output[None]:
        config = FailoverConfig.model_validate(context.op_config)
        view = parts.confirmed_view(config.mirror, config.confirm)
        context.instance.add_run_tags(context.run_id, {FAILOVER_TAG: config.mirror})
        try:
            report = run_failover(context, view, config)
        except KmirrorError as error:
            raise dg.Failure(f"failover of {config.mirror}: {error}") from error
        context.log_event(dg.AssetObservation(asset_key=view.asset_key, metadata=report))
        return dg.Output(None, metadata=report)

    return parts.job(
        fail_over, name, "Fail a mirror over: stop its topics so that they can be written to.", "100"
    )


def approve_failover_job(parts: JobParts) -> dg.JobDefinition:
    """Build the job by which a person approves a failover that the sensor waits with."""
    name = f"{parts.prefix}_approve_failover"

    @dg.op(
        name=f"{name}_op",
        config_schema={"mirror": mirror_field(parts), "confirm": confirm_field()},
        out=dg.Out(dg.Nothing),
    )
    def approve(context: dg.OpExecutionContext) -> None:
        view = parts.confirmed_view(context.op_config["mirror"], context.op_config["confirm"])
        context.instance.add_run_tags(context.run_id, {APPROVAL_TAG: view.mirror})
        context.log.info(f"failover of {view.mirror} approved, for the outage under way only")

    return parts.job(
        approve, name, "Approve a failover that the sensor has found right (failover.approval: required)."
    )


def run_failover(
    context: dg.OpExecutionContext, view: MirrorView, config: FailoverConfig
) -> dict[str, dg.MetadataValue]:
    """Check again, stop, wait; returns the report.

    Raises:
        Failure: when the source is not seen down any more, or partitions did not stop in time.
        KmirrorError: when the node cannot be asked.
    """
    resource = resource_of(context, view.resource_key)
    evidence, before = gather(resource, view, Incident())
    verdict = judged(context, resource, view, evidence)
    context.log.info(verdict.reason)
    # whoever types the mirror's name approves of it, and the sensor has seen an approval
    speaks_for_it = verdict.fail_over or verdict.awaits is not None
    if partitions_to_stop(before) and not speaks_for_it and not config.force:
        raise dg.Failure(f"called off, nothing was changed: {verdict.reason}", allow_retries=False)
    if config.dry_run:
        return _dry_run(resource, view, config, before)
    deadline = Deadline(config.wait_seconds)
    with resource.connect(budget_s=_CALL_BUDGET_S) as node:
        statuses = list(node.iter_partitions(view.mirror))  # lag as it was, before it is gone from sight
        request = VerbRequest(topics=config.topics or None, operation_id=context.run_id)
        result = node.verb(view.mirror, "stop", request)
        context.log.info(
            f"stop asked for: {len(result.changed)} topics, {len(result.unchanged)} were already"
        )
        topics = {*result.changed, *result.unchanged}
        left = wait_stopped(node, view.mirror, topics, deadline)
    if left:
        raise _not_stopped(view.mirror, left)
    return _report(config, before, [status for status in statuses if status.topic in topics])


def _dry_run(
    resource: KMirrorResource, view: MirrorView, config: FailoverConfig, before: MirrorSummary
) -> dict[str, dg.MetadataValue]:
    """What a failover would stop; nothing is changed."""
    is_meant = name_matcher(config.topics or None)
    with resource.connect(budget_s=_CALL_BUDGET_S) as node:
        statuses = [each for each in node.iter_partitions(view.mirror) if is_meant(each.topic)]
    statuses = [each for each in statuses if each.state not in (None, MirrorState.STOPPED)]
    return {"dry_run": dg.MetadataValue.bool(True), **_report(config, before, statuses)}


def wait_stopped(node: NodeApi, mirror: str, topics: set[str], deadline: Deadline) -> list[PartitionStatus]:
    """Wait until the partitions of these topics are STOPPED; returns those that are not when time is over."""
    while True:
        summary = node.mirror(mirror)
        if not partitions_to_stop(summary):
            return []
        is_over = deadline.remaining() <= 0
        is_part = any(topic.topic not in topics for topic in summary.topics)
        if is_over or is_part:  # ten thousand partitions are not listed twice a second for a count
            left = [status for status in node.iter_partitions(mirror) if _is_left(status, topics)]
            if is_over or not left:
                return left
        time.sleep(min(_POLL_S, deadline.remaining()))


def _is_left(status: PartitionStatus, topics: set[str]) -> bool:
    return status.topic in topics and status.state not in (None, MirrorState.STOPPED)


def _not_stopped(mirror: str, left: Sequence[PartitionStatus]) -> dg.Failure:
    first = left[0]
    example = f"{first.topic}/{first.partition} ({first.state}: {first.error or 'no error'})"
    return dg.Failure(
        f"{len(left)} partitions of mirror {mirror} are not STOPPED yet, such as {example}; "
        "they go on stopping, run this again to wait for them",
        metadata={"partitions_not_stopped": partition_table(by_need(left))},
    )


def _report(
    config: FailoverConfig, before: MirrorSummary, statuses: Sequence[PartitionStatus]
) -> dict[str, dg.MetadataValue]:
    report: dict[str, dg.MetadataValue] = {
        "failover_partitions": dg.MetadataValue.int(len(statuses)),
        "lost_records_at_most": dg.MetadataValue.int(sum(status.lag_records or 0 for status in statuses)),
        "lost_seconds_at_most": seconds(before.lag_seconds),
        "partitions_at_failover": partition_table(by_need(statuses)),
    }
    if config.first_bad_ms:
        took_s = (epoch_ms() - config.first_bad_ms) / 1000
        report["seconds_from_first_bad_look"] = seconds(took_s)
    return report
