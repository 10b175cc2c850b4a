"""Jobs of the verbs: start, pause, resume, stop, recover. Each says what it wants and waits for it."""

import time
from collections.abc import Sequence

import dagster as dg
from pydantic import BaseModel, ConfigDict

from kmirror_dagster.broker.deadlines import Deadline
from kmirror_dagster.coordination.models import PartitionStatus, VerbRequest
from kmirror_dagster.errors import KmirrorError
from kmirror_dagster.orchestration.assets import is_settled
from kmirror_dagster.orchestration.figures import by_need, partition_table
from kmirror_dagster.orchestration.job_parts import (
    JobParts,
    confirm_field,
    mirror_field,
    name_run,
    topics_field,
)
from kmirror_dagster.orchestration.node_api import NodeApi
from kmirror_dagster.orchestration.resources import resource_of

DEFAULT_VERB_WAIT_S = 60.0
_CALL_BUDGET_S = 30.0
_POLL_S = 0.5

VERBS = {
    "start": "Start mirroring topics, also such as were stopped.",
    "pause": "Pause topics: they stay read-only and keep their position.",
    "resume": "Resume paused topics.",
    "stop": "Stop topics: they become ordinary, writable topics and are no mirrors any more.",
    "recover": "Retry FAILED partitions, with their attempts counted anew.",
}
# what was written to a stopped topic stands in the way of mirroring it again
_CONFIRMED = frozenset({"stop"})


class VerbConfig(BaseModel):
    """Configuration of a verb's run; the fields' texts are in the launchpad."""

    model_config = ConfigDict(frozen=True)
    mirror: str
    topics: list[str]
    wait_seconds: float
    confirm: str | None = None


def verb_jobs(parts: JobParts) -> list[dg.JobDefinition]:
    """Build the jobs of all verbs."""
    return [_verb_job(parts, verb, description) for verb, description in VERBS.items()]


def _verb_job(parts: JobParts, verb: str, description: str) -> dg.JobDefinition:
    name = f"{parts.prefix}_{verb}"
    fields = {
        "mirror": mirror_field(parts),
        "topics": topics_field(),
        "wait_seconds": dg.Field(
            dg.Float,
            default_value=DEFAULT_VERB_WAIT_S,
            description="How long to wait until the partitions are there; 0: do not wait.",
        ),
    }
    if verb in _CONFIRMED:
        fields["confirm"] = confirm_field()

    @dg.op(
        name=f"{name}_op",
        required_resource_keys={parts.resource_key},
        config_schema=fields,
        out=dg.Out(dg.Nothing),
        pool=parts.prefix,
    )
    def run_verb(context: dg.OpExecutionContext) -> dg.Output[None]:
        config = VerbConfig.model_validate(context.op_config)
        name_run(context, [config.mirror], config.topics)
        view = parts.view(config.mirror)
        if config.confirm is not None:
            view = parts.confirmed_view(config.mirror, config.confirm)
        request = VerbRequest(topics=config.topics or None, operation_id=context.run_id)
        try:
            with resource_of(context, parts.resource_key).connect(budget_s=_CALL_BUDGET_S) as node:
                result = node.verb(view.mirror, verb, request)
                context.log.info(f"changed: {result.changed}; as wanted before: {result.unchanged}")
                topics = {*result.changed, *result.unchanged}
                left = wait_settled(node, view.mirror, topics, Deadline(config.wait_seconds))
        except KmirrorError as error:
            raise dg.Failure(f"{verb} {config.mirror}: {error}", allow_retries=False) from error
        if left and config.wait_seconds > 0:
            raise _not_there(verb, view.mirror, left)
        return dg.Output(
            None,
            metadata={
                "topics_changed": len(result.changed),
                "topics_unchanged": len(result.unchanged),
                "partitions": result.partitions,
            },
        )

    return parts.job(run_verb, name, description)


def wait_settled(node: NodeApi, mirror: str, topics: set[str], deadline: Deadline) -> list[PartitionStatus]:
    """Wait until partitions of these topics are where they are wanted; returns those that are not in time."""
    while True:
        left = [
            status
            for status in node.iter_partitions(mirror)
            if status.topic in topics and not is_settled(status)
        ]
        if not left or deadline.remaining() <= 0:
            return left
        time.sleep(min(_POLL_S, deadline.remaining()))


def _not_there(verb: str, mirror: str, left: Sequence[PartitionStatus]) -> dg.Failure:
    first = by_need(left)[0]
    example = f"{first.topic}/{first.partition} ({first.state}: {first.error or 'no error'})"
    return dg.Failure(
        f"{verb} {mirror}: {len(left)} partitions are not {first.desired} yet, such as {example}",
        metadata={"partitions_not_there": partition_table(by_need(left))},
        allow_retries=False,
    )
