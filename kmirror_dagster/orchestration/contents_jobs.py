"""Runs that verify contents: the check, the job that goes on with the certificates, and windows of time read again."""

from datetime import datetime, timedelta, timezone
from typing import TYPE_CHECKING, Any

import dagster as dg
from pydantic import BaseModel, ConfigDict

from kmirror_dagster.errors import KmirrorError
from kmirror_dagster.orchestration.contents import (
    CERTIFY_BUDGET_S,
    CONTENTS,
    certificate_path,
    contents_metadata,
    go_on,
    read_again,
    subject_of,
    verdict,
    window_metadata,
)
from kmirror_dagster.orchestration.job_parts import JobParts, mirror_field, mirrors_field, topics_field
from kmirror_dagster.orchestration.resources import resource_of
from kmirror_dagster.orchestration.views import MirrorView

if TYPE_CHECKING:
    from kmirror_dagster.verification.certificate import Certificate

# Days before this one are re-verified by the job's `since` and `until` instead of a backfill.
FIRST_DAY = "2025-01-01"
# A backfill takes tags for all of its runs, but no configuration.
TOPICS_TAG = "kmirror/topics"
MIRROR_TAG = "kmirror/mirror"


class CertifyConfig(BaseModel):
    """Configuration of a certify run; the fields' texts are in the launchpad."""

    model_config = ConfigDict(frozen=True)
    mirrors: list[str]
    topics: list[str]
    seconds: float
    restart: bool


class ReverifyConfig(BaseModel):
    """Configuration of a reverify run; the fields' texts are in the launchpad."""

    model_config = ConfigDict(frozen=True)
    mirror: str = ""
    topics: list[str] = []
    since: str = ""
    until: str = ""


def contents_check(view: MirrorView) -> dg.AssetChecksDefinition:
    """Build the check of one mirror's contents; running it reads what the certificate does not cover yet."""

    @dg.asset_check(
        asset=view.asset_key,
        name=CONTENTS,
        description="Everything read so far by digests is the same on both sides (kmirror certify).",
        required_resource_keys={view.resource_key},
        pool=f"{view.prefix}_verify",
    )
    def check_contents(context: dg.AssetCheckExecutionContext) -> dg.AssetCheckResult:
        resource = resource_of(context, view.resource_key)
        try:
            subject = subject_of(resource, view, [])
            made = go_on(subject, certificate_path(resource, view.mirror), budget_s=CERTIFY_BUDGET_S)
        except KmirrorError as error:
            return dg.AssetCheckResult(
                passed=False, severity=dg.AssetCheckSeverity.WARN, description=f"not known: {error}"
            )
        return dg.AssetCheckResult(
            passed=made.ok, description=verdict(made), metadata=contents_metadata(made)
        )

    return check_contents


def certify_job(parts: JobParts) -> dg.JobDefinition:
    """Build the job that goes on with certificates, reports the check and logs figures to plot."""
    name = f"{parts.prefix}_certify"

    @dg.op(
        name=f"{name}_op",
        required_resource_keys={parts.resource_key},
        config_schema={
            "mirrors": mirrors_field(parts),
            "topics": topics_field(),
            "seconds": dg.Field(
                dg.Float,
                default_value=CERTIFY_BUDGET_S,
                description="Longest time to read for each mirror; the next run goes on where this one ended.",
            ),
            "restart": dg.Field(
                dg.Bool, default_value=False, description="Begin the certificates of these topics anew."
            ),
        },
        out=dg.Out(dg.Nothing),
        pool=f"{parts.prefix}_verify",
    )
    def certify(context: dg.OpExecutionContext) -> dg.Output[None]:
        config = CertifyConfig.model_validate(context.op_config)
        wrong: list[str] = []
        resource = resource_of(context, parts.resource_key)
        for mirror in config.mirrors:
            view = parts.view(mirror)
            try:
                subject = subject_of(resource, view, config.topics)
                path = certificate_path(resource, mirror)
                made = go_on(subject, path, budget_s=config.seconds, restart=config.restart)
            except KmirrorError as error:
                raise dg.Failure(f"certify {mirror}: {error}", allow_retries=False) from error
            _report(context, view, made)
            if not made.ok:
                wrong.append(f"{mirror}: {verdict(made)}")
        if wrong:
            raise dg.Failure("; ".join(wrong), allow_retries=False)
        return dg.Output(None)

    return parts.job(certify, name, "Certify by digests up to which offset both sides are the same.")


def _report(context: dg.OpExecutionContext, view: MirrorView, made: "Certificate") -> None:
    context.log.info(verdict(made))
    metadata = contents_metadata(made)
    context.log_event(dg.AssetObservation(asset_key=view.asset_key, metadata=metadata))
    evaluation = dg.AssetCheckEvaluation(
        asset_key=view.asset_key,
        check_name=CONTENTS,
        passed=made.ok,
        description=verdict(made),
        metadata=metadata,
    )
    context.log_event(evaluation)  # pyright: ignore[reportArgumentType] - taken, though its annotation lags behind


def reverify_job(parts: JobParts) -> dg.JobDefinition:
    """Build the job that reads a window of time again: one day of a backfill, or `since` to `until`.

    A backfill picks days; the tags `kmirror/mirror` and `kmirror/topics` of it say which mirror and topics.
    """
    name = f"{parts.prefix}_reverify"
    days = dg.DailyPartitionsDefinition(start_date=FIRST_DAY)
    fields: dict[str, Any] = {
        # a backfill says it by a tag
        "mirror": mirror_field(parts)
        if len(parts.views) == 1
        else dg.Field(dg.String, default_value="", description=f"Mirror; else its tag {MIRROR_TAG}."),
        "topics": topics_field(),
        "since": dg.Field(
            dg.String, default_value="", description="Begin, ISO-8601 with offset from UTC. Empty: the day's."
        ),
        "until": dg.Field(
            dg.String, default_value="", description="End, not in the window. Empty: the day's, or now."
        ),
    }

    @dg.op(
        name=f"{name}_op",
        required_resource_keys={parts.resource_key},
        config_schema=fields,
        out=dg.Out(dg.Nothing),
        pool=f"{parts.prefix}_verify",
    )
    def reverify(context: dg.OpExecutionContext) -> dg.Output[None]:
        config = ReverifyConfig.model_validate(context.op_config)
        tags = context.run.tags
        view = parts.view(config.mirror or tags.get(MIRROR_TAG, ""))
        topics = config.topics or [each for each in tags.get(TOPICS_TAG, "").split(",") if each]
        since, until = window_of(config, context.partition_key if context.has_partition_key else None)
        try:
            subject = subject_of(
                resource_of(context, parts.resource_key), view, topics, with_stopped=bool(topics)
            )
            report = read_again(subject, since_ms=_ms(since), until_ms=_ms(until))
        except KmirrorError as error:
            raise dg.Failure(f"reverify {view.mirror}: {error}", allow_retries=False) from error
        told = f"{since or 'the beginning'} to {until or 'the end'}: {verdict(report.certificate)}"
        context.log.info(told)
        if not report.ok:
            raise dg.Failure(
                f"reverify {view.mirror}, {told}", metadata=window_metadata(report), allow_retries=False
            )
        return dg.Output(None, metadata=window_metadata(report))

    graph = dg.GraphDefinition(name=name, node_defs=[reverify])
    return graph.to_job(
        name=name,
        description="Read a window of time again on both sides: topics by config or tags, days as a backfill.",
        executor_def=dg.in_process_executor,
        partitions_def=days,
        tags={"dagster/priority": "0", "kmirror/job": "reverify"},
    )


def window_of(config: ReverifyConfig, day: str | None) -> tuple[datetime | None, datetime | None]:
    """The window a run is for: what its config says, else its day.

    Raises:
        Failure: when a time is none, or has no offset from UTC.
    """
    since, until = _time("since", config.since), _time("until", config.until)
    if day is not None and since is None and until is None:
        since = datetime.strptime(day, "%Y-%m-%d").replace(tzinfo=timezone.utc)
        until = since + timedelta(days=1)
    return since, until


def _time(field: str, text: str) -> datetime | None:
    if not text:
        return None
    try:
        found = datetime.fromisoformat(text.replace("Z", "+00:00"))
    except ValueError:
        found = None
    if found is None or found.tzinfo is None:
        raise dg.Failure(f"{field}: {text!r} is no time such as 2026-01-31T00:00:00Z", allow_retries=False)
    return found


def _ms(at: datetime | None) -> int | None:
    return None if at is None else round(at.timestamp() * 1_000)
