"""Drill job: a failover rehearsed on shadow topics, its figures logged, its report kept. On a schedule, once armed."""

from pathlib import Path
from typing import TYPE_CHECKING

import dagster as dg
from pydantic import BaseModel, ConfigDict

from kmirror_dagster.coordination.client import NodeClient
from kmirror_dagster.coordination.recovery_ports import NodeShadows, shadow_shape
from kmirror_dagster.errors import KmirrorError, UsageError
from kmirror_dagster.files import lock_file
from kmirror_dagster.orchestration.contents import settings_of, state_directory
from kmirror_dagster.orchestration.figures import seconds
from kmirror_dagster.orchestration.job_parts import JobParts, mirrors_field
from kmirror_dagster.orchestration.resources import KMirrorResource, resource_of
from kmirror_dagster.orchestration.views import MirrorView

if TYPE_CHECKING:
    from kmirror_dagster.recovery.drill_report import DrillReport

_CALL_BUDGET_S = 30.0


class DrillConfig(BaseModel):
    """Configuration of a drill run; the fields' texts are in the launchpad."""

    model_config = ConfigDict(frozen=True)
    mirrors: list[str]
    topics: int
    rate: float
    seconds: float
    max_rto_seconds: float
    directory: str


def drill_job(parts: JobParts) -> dg.JobDefinition:
    """Build the drill job. It writes shadow topics to both clusters, so it needs the mirror's credentials."""
    name = f"{parts.prefix}_drill"

    @dg.op(
        name=f"{name}_op",
        required_resource_keys={parts.resource_key},
        config_schema={
            "mirrors": mirrors_field(parts),
            "topics": dg.Field(
                dg.Int, default_value=5, description="Shadow topics, at most as many as the mirror has."
            ),
            "rate": dg.Field(dg.Float, default_value=500.0, description="Records written per second in all."),
            "seconds": dg.Field(
                dg.Float, default_value=10.0, description="Time to write before the failover."
            ),
            "max_rto_seconds": dg.Field(
                dg.Float,
                default_value=0.0,
                description="A failover that takes longer fails the drill. 0: only measured.",
            ),
            "directory": dg.Field(
                dg.String,
                default_value="",
                description="Where reports are kept. Empty: drills/MIRROR in the state directory.",
            ),
        },
        out=dg.Out(dg.Nothing),
        pool=f"{parts.prefix}_verify",
    )
    def rehearse(context: dg.OpExecutionContext) -> dg.Output[None]:
        config = DrillConfig.model_validate(context.op_config)
        failed: list[str] = []
        for mirror in config.mirrors:
            view = parts.view(mirror)
            resource = resource_of(context, parts.resource_key)
            try:
                report, path = run_drill(context, resource, view, config)
            except KmirrorError as error:
                raise dg.Failure(f"drill of {mirror}: {error}", allow_retries=False) from error
            metadata = drill_metadata(report, path)
            context.log_event(dg.AssetObservation(asset_key=view.asset_key, metadata=metadata))
            if not report.passed:
                failed.append(f"{mirror}: {'; '.join(report.failures)}")
        if failed:
            raise dg.Failure("; ".join(failed), allow_retries=False)
        return dg.Output(None)

    return parts.job(rehearse, name, "Rehearse a failover on shadow topics, measure it, undo it.")


def run_drill(
    context: dg.OpExecutionContext, resource: KMirrorResource, view: MirrorView, config: DrillConfig
) -> tuple["DrillReport", Path]:
    """One drill; its report, and where it is kept.

    Raises:
        KmirrorError: when it cannot be begun, or what it made cannot be cleared.
    """
    # both Kafka clients come with it, which loading of definitions need not wait for
    from kmirror_dagster.recovery.drill import Drill, DrillWish
    from kmirror_dagster.recovery.drill_report import keep

    directory = (
        Path(config.directory) if config.directory else state_directory(resource) / "drills" / view.mirror
    )
    busy = f"another drill of {view.mirror} is under way"
    with resource.connect(budget_s=_CALL_BUDGET_S) as client, lock_file(directory / ".lock", busy):
        if not isinstance(client, NodeClient):
            raise UsageError("a drill needs a real node")
        settings = settings_of(client, view)
        wish = DrillWish(
            partitions=shadow_shape(client.mirror(view.mirror), config.topics),
            rate=config.rate,
            seconds=config.seconds,
            rpo_s=settings.policies.rpo_seconds,
            rto_s=config.max_rto_seconds or None,
        )
        drill = Drill(
            settings, client.document(view.mirror), NodeShadows(client), wish, tell=context.log.debug
        )
        report = drill.run()
    _, as_html = keep(report, directory)
    return report, as_html


def drill_metadata(report: "DrillReport", path: Path) -> dict[str, dg.MetadataValue]:
    """Figures of a drill, to plot, and its report."""
    figures: dict[str, dg.MetadataValue] = {
        "drill_passed": dg.MetadataValue.bool(report.passed),
        "drill_records_written": dg.MetadataValue.int(report.records_written),
        "drill_records_verified": dg.MetadataValue.int(report.verified_records),
        "drill_report": dg.MetadataValue.path(str(path)),
    }
    if report.rto_s is not None and report.rpo_s is not None and report.rpo_records is not None:
        figures["drill_rto_seconds"] = seconds(report.rto_s)
        figures["drill_rpo_seconds"] = seconds(report.rpo_s)
        figures["drill_rpo_records"] = dg.MetadataValue.int(report.rpo_records)
    if report.failures:
        figures["drill_failures"] = dg.MetadataValue.text("; ".join(report.failures))
    return figures
