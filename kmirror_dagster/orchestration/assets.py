"""The asset of a mirror. Materializing a partition brings that mirror partition to where it is wanted."""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import dagster as dg

from kmirror_dagster.broker.deadlines import Deadline
from kmirror_dagster.coordination.models import AdvanceRequest, PartitionStatus
from kmirror_dagster.errors import KmirrorError
from kmirror_dagster.lifecycle import SETTLED_FOR, DesiredState, MirrorState
from kmirror_dagster.orchestration.figures import partition_metadata
from kmirror_dagster.orchestration.history import state_event
from kmirror_dagster.orchestration.job_parts import name_run
from kmirror_dagster.orchestration.keys import PartitionKey
from kmirror_dagster.orchestration.node_api import NodeApi
from kmirror_dagster.orchestration.resources import resource_of
from kmirror_dagster.orchestration.views import MirrorView

# Aligning a new partition takes seconds; one with a long head to fill takes minutes, with or without the run.
DEFAULT_WAIT_S = 120.0
# The node holds a request this long at most, so that a run can be terminated in between.
_ADVANCE_WAIT_S = 2.0
_PAUSE_S = 0.1
# Dagster copies the metadata of all partitions of a run for each of them, which grows with the square.
PARTITIONS_PER_RUN = 200


@dataclass(frozen=True)
class Advance:
    """What became of one partition.

    Attributes:
        key: Dagster's partition key.
        status: where it is, None when that could not be had.
        advanced: whether something was done.
        problem: why it is not where it is wanted.
    """

    key: str
    status: PartitionStatus | None
    advanced: bool = False
    problem: str | None = None

    def __str__(self) -> str:
        state = self.status.state if self.status else None
        if self.problem:
            return f"{self.key}: {self.problem}"
        if not self.advanced:
            return f"{self.key}: nothing to do, it is {state or 'not mirrored'} as wanted"
        return f"{self.key}: now {state}"


def mirror_asset(view: MirrorView) -> dg.AssetsDefinition:
    """Build the asset of one mirror."""

    @dg.multi_asset(
        name=f"{view.name}_mirror",
        specs=[view.spec],
        required_resource_keys={view.resource_key},
        config_schema={
            "wait_seconds": dg.Field(
                dg.Float,
                default_value=DEFAULT_WAIT_S,
                description="How long to wait for the next settled state before the step fails.",
            )
        },
        backfill_policy=dg.BackfillPolicy.multi_run(PARTITIONS_PER_RUN),
        pool=view.prefix,
    )
    def advance_mirror(context: dg.AssetExecutionContext) -> Iterator[dg.MaterializeResult[Any]]:
        name_run(context.op_execution_context, [view.mirror])
        wait_s = float(context.op_execution_context.op_config["wait_seconds"])
        with resource_of(context, view.resource_key).connect(budget_s=wait_s) as node:
            outcomes = advance_all(node, view.mirror, context.partition_keys, wait_s=wait_s)
        for outcome in outcomes:
            context.log.info(str(outcome))
        if any(outcome.problem for outcome in outcomes):
            _log_reached(context, view, outcomes)
            raise _failure(view, outcomes)
        _add_metadata(context, view, outcomes)
        yield dg.MaterializeResult(asset_key=view.asset_key)

    return advance_mirror


def advance_all(node: NodeApi, mirror: str, keys: Sequence[str], *, wait_s: float) -> list[Advance]:
    """Advance several partitions, one after the other within one budget; one's trouble is not another's."""
    deadline = Deadline(wait_s)
    return [advance_one(node, mirror, key, deadline) for key in keys]


def advance_one(node: NodeApi, mirror: str, key: str, deadline: Deadline) -> Advance:
    """Ask for steps and wait until the partition is where it is wanted, is FAILED, or the time is over."""
    advanced = False
    while True:
        try:
            name = PartitionKey.parse(key)
            wait_ms = round(deadline.remaining(at_most=_ADVANCE_WAIT_S) * 1000)
            request = AdvanceRequest(topic=name.topic, partition=name.partition, wait_ms=wait_ms)
            result = node.advance(mirror, request)
        except KmirrorError as error:
            return Advance(key, None, problem=str(error))
        status, advanced = result.status, advanced or result.advanced
        if status.state is MirrorState.FAILED:
            return Advance(key, status, advanced, f"FAILED: {status.error or 'no reason is stored'}")
        if is_settled(status):
            return Advance(key, status, advanced)
        if deadline.remaining() <= 0:
            problem = (
                f"still {status.state or 'without a state'}; it goes on, materialize again to wait for it"
            )
            return Advance(key, status, advanced, problem)
        time.sleep(_PAUSE_S)


def is_settled(status: PartitionStatus) -> bool:
    """Whether a partition is where it is wanted; what never was mirrored has nothing to stop."""
    return status.state is SETTLED_FOR[status.desired] or (
        status.state is None and status.desired is not DesiredState.MIRRORING
    )


def _log_reached(context: dg.AssetExecutionContext, view: MirrorView, outcomes: Sequence[Advance]) -> None:
    """Log the states of a run that fails: the other partitions got where they are all the same."""
    for outcome in outcomes:
        if outcome.status is not None:
            context.log_event(state_event(view.asset_key, outcome.status, outcome.status))


def _add_metadata(context: dg.AssetExecutionContext, view: MirrorView, outcomes: Sequence[Advance]) -> None:
    for outcome in outcomes:
        if outcome.status is not None:
            metadata = {
                **partition_metadata(outcome.status),
                "advanced": dg.MetadataValue.bool(outcome.advanced),
                "run": dg.MetadataValue.dagster_run(context.run.run_id),
            }
            context.add_asset_metadata(metadata, asset_key=view.asset_key, partition_key=outcome.key)


def _failure(view: MirrorView, outcomes: Sequence[Advance]) -> dg.Failure:
    problems = [outcome for outcome in outcomes if outcome.problem]
    more = f" (and {len(problems) - 1} more of {len(outcomes)} partitions)" if len(problems) > 1 else ""
    first = problems[0]
    # a step tried again at once meets the same state; what can be retried, the node retries by itself
    return dg.Failure(
        f"mirror {view.mirror}, {first}{more}",
        metadata=dict(partition_metadata(first.status)) if first.status else {},
        allow_retries=False,
    )
