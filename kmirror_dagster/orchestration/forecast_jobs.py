"""RPO as a contract: what a failover now would cost, as a check, as a table, and logged by a job."""

from typing import TYPE_CHECKING

import dagster as dg
from pydantic import BaseModel, ConfigDict

from kmirror_dagster.coordination.recovery_ports import known_partitions
from kmirror_dagster.errors import KmirrorError
from kmirror_dagster.orchestration.contents import settings_of
from kmirror_dagster.orchestration.figures import MAX_TABLE_ROWS, seconds
from kmirror_dagster.orchestration.job_parts import JobParts, mirrors_field
from kmirror_dagster.orchestration.resources import KMirrorResource, resource_of
from kmirror_dagster.orchestration.views import MirrorView

if TYPE_CHECKING:
    from kmirror_dagster.recovery.forecast import Forecast

RPO = "rpo_kept"

_CALL_BUDGET_S = 30.0
_TABLE_COLUMNS = (
    ("group", "string"),
    ("re_reads", "int"),
    ("loses", "int"),
    ("read_ahead", "int"),
    ("without_position", "int"),
    ("resumes_at", "string"),
)
_NAMED_POSITIONS = 3


class ForecastConfig(BaseModel):
    """Configuration of a forecast run; the fields' texts are in the launchpad."""

    model_config = ConfigDict(frozen=True)
    mirrors: list[str]


def forecast(resource: KMirrorResource, view: MirrorView) -> "Forecast":
    """Look at both clusters of a mirror.

    Raises:
        KmirrorError: when the node or the destination cannot be asked.
    """
    # both Kafka clients come with it, which loading of definitions need not wait for
    from kmirror_dagster.recovery.forecast import look_ahead

    with resource.connect(budget_s=_CALL_BUDGET_S) as node:
        known = known_partitions(node, view.mirror)
        settings = settings_of(node, view)
    return look_ahead(settings, known)


def told(found: "Forecast") -> str:
    """A forecast in one line."""
    source = "" if found.source_reachable else "; the source does not answer, its ends are as last seen"
    return (
        f"a failover now would lose {found.loses_records} records, {found.loses_seconds:.1f} s "
        f"(allowed: {found.rpo_seconds:g} s){source}"
    )


def forecast_metadata(found: "Forecast") -> dict[str, dg.MetadataValue]:
    """Figures to plot, and a table of groups, those that lose most first."""
    groups = sorted(found.groups, key=lambda each: (-each.loses, -each.re_reads, each.group))
    rows = [
        dg.TableRecord(
            {
                "group": each.group,
                "re_reads": each.re_reads if found.source_reachable else None,
                "loses": each.loses,
                "read_ahead": each.read_ahead if found.source_reachable else None,
                "without_position": each.without_position,
                "resumes_at": ", ".join(
                    f"{p.topic}/{p.partition}@{p.resumes_at}"
                    for p in each.partitions[:_NAMED_POSITIONS]
                    if p.resumes_at is not None
                ),
            }
        )
        for each in groups[:MAX_TABLE_ROWS]
    ]
    schema = dg.TableSchema(columns=[dg.TableColumn(name, kind) for name, kind in _TABLE_COLUMNS])
    figures: dict[str, dg.MetadataValue] = {
        "forecast_loses_records": dg.MetadataValue.int(found.loses_records),
        "forecast_loses_seconds": seconds(found.loses_seconds),
        "forecast_re_reads": dg.MetadataValue.int(sum(each.re_reads for each in found.groups)),
        "if_failed_over_now": dg.MetadataValue.table(records=rows, schema=schema),
    }
    if found.problems:
        figures["not_known"] = dg.MetadataValue.text("; ".join(found.problems))
    return figures


def rpo_check(view: MirrorView) -> dg.AssetChecksDefinition:
    """Build the check of one mirror's promise: no more than `policies.rpo_seconds` would be lost."""

    @dg.asset_check(
        asset=view.asset_key,
        name=RPO,
        description="A failover now would lose no more than policies.rpo_seconds (kmirror forecast).",
        required_resource_keys={view.resource_key},
    )
    def check_rpo(context: dg.AssetCheckExecutionContext) -> dg.AssetCheckResult:
        try:
            found = forecast(resource_of(context, view.resource_key), view)
        except KmirrorError as error:
            return dg.AssetCheckResult(
                passed=False, severity=dg.AssetCheckSeverity.WARN, description=f"not known: {error}"
            )
        return dg.AssetCheckResult(
            passed=found.within_rpo, description=told(found), metadata=forecast_metadata(found)
        )

    return check_rpo


def forecast_job(parts: JobParts) -> dg.JobDefinition:
    """Build the job that logs forecasts; a mirror that breaks its promise fails the run."""
    name = f"{parts.prefix}_forecast"

    @dg.op(
        name=f"{name}_op",
        required_resource_keys={parts.resource_key},
        config_schema={"mirrors": mirrors_field(parts)},
        out=dg.Out(dg.Nothing),
        pool=parts.prefix,
    )
    def look(context: dg.OpExecutionContext) -> dg.Output[None]:
        config = ForecastConfig.model_validate(context.op_config)
        broken: list[str] = []
        for mirror in config.mirrors:
            view = parts.view(mirror)
            try:
                found = forecast(resource_of(context, parts.resource_key), view)
            except KmirrorError as error:
                raise dg.Failure(f"forecast {mirror}: {error}", allow_retries=False) from error
            metadata = forecast_metadata(found)
            context.log_event(dg.AssetObservation(asset_key=view.asset_key, metadata=metadata))
            evaluation = dg.AssetCheckEvaluation(
                asset_key=view.asset_key,
                check_name=RPO,
                passed=found.within_rpo,
                description=told(found),
                metadata=metadata,
            )
            context.log_event(evaluation)  # pyright: ignore[reportArgumentType] - its annotation lags behind
            if not found.within_rpo:
                broken.append(f"{mirror}: {told(found)}")
        if broken:
            raise dg.Failure("; ".join(broken), allow_retries=False)
        return dg.Output(None)

    return parts.job(look, name, "Say what a failover right now would cost, group by group.")
