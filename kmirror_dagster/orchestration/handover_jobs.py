"""Jobs that change roles: switchover and failback. Both ask for the mirror's name, both go on where one ended."""

import os
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import dagster as dg
from pydantic import BaseModel, ConfigDict

from kmirror_dagster.broker.deadlines import Deadline
from kmirror_dagster.coordination.client import NodeClient
from kmirror_dagster.errors import DeadlineError, KmirrorError, UsageError
from kmirror_dagster.orchestration.contents import state_directory
from kmirror_dagster.orchestration.figures import seconds
from kmirror_dagster.orchestration.job_parts import JobParts, mirror_field, topics_field
from kmirror_dagster.orchestration.resources import KMirrorResource, resource_of
from kmirror_dagster.orchestration.verb_jobs import wait_settled
from kmirror_dagster.orchestration.views import MirrorView
from kmirror_dagster.recovery.formats import QuarantineFormat

if TYPE_CHECKING:
    from kmirror_dagster.coordination.recovery_runs import WayBack
    from kmirror_dagster.records import RecoveryRecord
    from kmirror_dagster.recovery.failback_plan import FailbackPlan

_CALL_BUDGET_S = 30.0
_STOP_WAIT_S = 60.0
_SHOWN = 100


class HandoverConfig(BaseModel):
    """What both jobs take; the fields' texts are in the launchpad."""

    model_config = ConfigDict(frozen=True)
    mirror: str
    confirm: str
    topics: list[str]
    to_endpoint: str
    to_state_dir: str
    name: str
    follow_seconds: float


class FailbackConfig(HandoverConfig):
    """Configuration of a failback run."""

    plan_only: bool
    quarantine: str
    format: QuarantineFormat


class SwitchoverConfig(HandoverConfig):
    """Configuration of a switchover run."""

    quiet_seconds: float
    drain_seconds: float


def _fields(parts: JobParts, *, ends: str) -> dict[str, dg.Field]:
    return {
        "mirror": mirror_field(parts),
        "confirm": dg.Field(
            dg.String, default_value="", description=f"Type the mirror's name again: {ends}."
        ),
        "topics": topics_field(),
        "to_endpoint": dg.Field(
            dg.String,
            default_value="",
            description="API of a node that writes to the source; its token is KMIRROR_TO_TOKEN. Empty: "
            "KMIRROR_TO_ENDPOINT.",
        ),
        "to_state_dir": dg.Field(
            dg.String,
            default_value="",
            description="State directory of that node, where it is on this machine.",
        ),
        "name": dg.Field(
            dg.String, default_value="", description="Name of the mirror back. Empty: MIRROR-back."
        ),
        "follow_seconds": dg.Field(
            dg.Float, default_value=300.0, description="Longest wait for the mirror back to take over."
        ),
    }


def failback_job(parts: JobParts) -> dg.JobDefinition:
    """Build the failback job; without a confirmation it makes the plan and ends."""
    name = f"{parts.prefix}_failback"

    @dg.op(
        name=f"{name}_op",
        required_resource_keys={parts.resource_key},
        config_schema={
            **_fields(parts, ends="topics of the old source are deleted once their tails are saved"),
            "plan_only": dg.Field(
                dg.Bool, default_value=False, description="Show what would be done and end; asks for no name."
            ),
            "quarantine": dg.Field(
                dg.String,
                default_value="",
                description="Directory for records that were never mirrored. Empty: below the state directory.",
            ),
            "format": dg.Field(
                dg.Enum("QuarantineFormat", [dg.EnumValue(each.value) for each in QuarantineFormat]),
                default_value=QuarantineFormat.JSONL.value,
                description="jsonl or parquet files, or a topic of the new source.",
            ),
        },
        out=dg.Out(dg.Nothing),
        pool=f"{parts.prefix}_failover",
    )
    def fail_back(context: dg.OpExecutionContext) -> dg.Output[None]:
        config = FailbackConfig.model_validate(context.op_config)
        is_plan = config.plan_only
        view = parts.view(config.mirror) if is_plan else parts.confirmed_view(config.mirror, config.confirm)
        try:
            return _failed_back(context, view, config)
        except KmirrorError as error:
            raise dg.Failure(f"failback of {config.mirror}: {error}", allow_retries=False) from error

    return parts.job(
        fail_back, name, "Mirror back: the old source becomes the copy of the cluster that took over.", "50"
    )


def _failed_back(context: dg.OpExecutionContext, view: MirrorView, config: FailbackConfig) -> dg.Output[None]:
    from kmirror_dagster.coordination import recovery_runs as runs
    from kmirror_dagster.recovery import failback

    resource = resource_of(context, view.resource_key)
    with _connected(resource) as client:
        stored = runs.stored_recovery(client, view.mirror, failback.OPERATION)
        patterns = list(config.topics) or None
        if stored is not None and not stored.finished:
            context.log.info(f"going on with the failback under way, at step {stored.step}")
            record = stored
        elif stored is not None and runs.is_failed_back(client, view.mirror, stored, patterns):
            context.log.info("has been failed back already")
            record = stored
        else:
            way = _way(resource, view, config.name, config.quarantine, QuarantineFormat(config.format))
            record = runs.planned_failback(client, view.mirror, stored, patterns, way)
        if not config.plan_only and not record.finished:
            record = _carried_out(context, client, record, config)
    return dg.Output(None, metadata=_outcome(record))


def switchover_job(parts: JobParts) -> dg.JobDefinition:
    """Build the switchover job."""
    name = f"{parts.prefix}_switchover"

    @dg.op(
        name=f"{name}_op",
        required_resource_keys={parts.resource_key},
        config_schema={
            **_fields(parts, ends="writers are shut out at the source and the destination takes over"),
            "quiet_seconds": dg.Field(
                dg.Float,
                default_value=3.0,
                description="Rest that counts as no writers, where none can be fenced.",
            ),
            "drain_seconds": dg.Field(
                dg.Float, default_value=60.0, description="Longest wait for equal ends."
            ),
        },
        out=dg.Out(dg.Nothing),
        pool=f"{parts.prefix}_failover",
    )
    def switch_over(context: dg.OpExecutionContext) -> dg.Output[None]:
        config = SwitchoverConfig.model_validate(context.op_config)
        view = parts.confirmed_view(config.mirror, config.confirm)
        try:
            return _switched_over(context, view, config)
        except KmirrorError as error:
            raise dg.Failure(f"switchover of {config.mirror}: {error}", allow_retries=False) from error

    return parts.job(
        switch_over,
        name,
        "Change roles on purpose: fence, drain, verify, sync groups, stop, mirror back.",
        "50",
    )


def _switched_over(
    context: dg.OpExecutionContext, view: MirrorView, config: SwitchoverConfig
) -> dg.Output[None]:
    from kmirror_dagster.coordination import recovery_runs as runs
    from kmirror_dagster.recovery import switchover

    resource = resource_of(context, view.resource_key)
    with _connected(resource) as client:
        stored = runs.stored_recovery(client, view.mirror, switchover.OPERATION)
        record = stored
        if record is None or record.finished:
            record = runs.begun_switchover(
                client,
                view.mirror,
                stored,
                list(config.topics) or None,
                quiet_s=config.quiet_seconds,
                drain_s=config.drain_seconds,
            )
        else:
            context.log.info(f"going on with the switchover under way, at step {record.step}")
        with _other(client, view.mirror, config):
            pass  # a node for the way back is there: only then are writers shut out
        record, downtime_s = runs.until_stopped(
            client, record, wait=_waiter(client, view.mirror), tell=_tell(context)
        )
        way = _way(resource, view, config.name, "", QuarantineFormat.JSONL)
        record = runs.planned_way_back(client, record, way)
        record = _carried_out(context, client, record, config)
    metadata = _outcome(record)
    if downtime_s is not None:
        metadata["writer_downtime_seconds"] = seconds(downtime_s)
    return dg.Output(None, metadata=metadata)


def _carried_out(
    context: dg.OpExecutionContext, client: NodeClient, record: "RecoveryRecord", config: HandoverConfig
) -> "RecoveryRecord":
    from kmirror_dagster.coordination import recovery_runs as runs

    with _other(client, record.mirror, config) as other:
        return runs.carry_out(client, other, record, follow_s=config.follow_seconds, tell=_tell(context))


@contextmanager
def _connected(resource: KMirrorResource) -> Generator[NodeClient]:
    """The node's client with all its calls.

    Raises:
        UsageError: when the resource stands for something else.
    """
    with resource.connect(budget_s=_CALL_BUDGET_S) as client:
        if not isinstance(client, NodeClient):
            raise UsageError("a change of roles needs a real node")
        yield client


def _other(client: NodeClient, mirror: str, config: HandoverConfig) -> NodeClient:
    from kmirror_dagster.coordination.recovery_nodes import client_of_other_node

    state_dir = Path(config.to_state_dir) if config.to_state_dir else None
    source_id = client.mirror(mirror).source_cluster_id
    return client_of_other_node(os.environ, state_dir, config.to_endpoint or None, source_id)


def _way(
    resource: KMirrorResource, view: MirrorView, name: str, quarantine: str, kept_as: QuarantineFormat
) -> "WayBack":
    from kmirror_dagster.coordination.recovery_runs import WayBack

    directory = Path(quarantine) if quarantine else state_directory(resource) / "quarantine" / view.mirror
    return WayBack(directory, kept_as, name or None)


def _waiter(client: NodeClient, mirror: str) -> Callable[[Sequence[str]], None]:
    def wait(topics: Sequence[str]) -> None:
        left = wait_settled(client, mirror, set(topics), Deadline(_STOP_WAIT_S))
        if left:
            first = left[0]
            raise DeadlineError(
                f"{len(left)} partitions are not STOPPED within {_STOP_WAIT_S:g} s, such as "
                f"{first.topic}/{first.partition} ({first.state})"
            )

    return wait


def _tell(context: dg.OpExecutionContext) -> Callable[[str, int, int | None], None]:
    """Log what is being done whenever that is something new."""
    said: list[str] = []

    def tell(text: str, _done: int, _total: int | None) -> None:
        if said[-1:] != [text]:
            said.append(text)
            context.log.info(text)

    return tell


def _outcome(record: "RecoveryRecord") -> dict[str, dg.MetadataValue]:
    from kmirror_dagster.recovery.failback import FailbackState

    state = FailbackState.model_validate(record.document)
    return {
        "finished": dg.MetadataValue.bool(record.finished),
        "step": dg.MetadataValue.text(record.step),
        "mirror_back": dg.MetadataValue.text(state.plan.reverse),
        "offsets_to_quarantine": dg.MetadataValue.int(state.plan.tail),
        "records_in_quarantine": dg.MetadataValue.int(sum(tail.records for tail in state.saved)),
        "offsets_to_copy": dg.MetadataValue.int(state.plan.copy_offsets),
        "plan": _plan_table(state.plan),
    }


def _plan_table(plan: "FailbackPlan") -> dg.TableMetadataValue:
    rows: list[dg.TableRecord] = []
    for topic in plan.topics[:_SHOWN]:
        row: dict[str, Any] = {
            "topic": topic.topic,
            "partitions": len(topic.partitions),
            "action": topic.action.value,
            "to_quarantine": topic.tail,
            "to_copy": topic.copy_offsets,
            "why": topic.reason or "",
        }
        rows.append(dg.TableRecord(row))
    return dg.MetadataValue.table(records=rows)
