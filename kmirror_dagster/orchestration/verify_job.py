"""Verify job: both clusters of a mirror compared record by record, as `kmirror verify` does."""

from collections.abc import Callable, Mapping
from typing import TypeAlias

import dagster as dg
from pydantic import BaseModel, ConfigDict

from kmirror_dagster.errors import KmirrorError
from kmirror_dagster.lifecycle import DesiredState
from kmirror_dagster.offset_map import OffsetMap
from kmirror_dagster.orchestration.figures import seconds
from kmirror_dagster.orchestration.job_parts import JobParts, mirrors_field, name_run, topics_field
from kmirror_dagster.orchestration.node_api import NodeApi
from kmirror_dagster.orchestration.resources import resource_of
from kmirror_dagster.orchestration.targets import MirrorTarget
from kmirror_dagster.settings import MirrorSettings, load_mirror, mirror_from_document, name_matcher
from kmirror_dagster.verification.report import VerifyReport

OffsetMaps: TypeAlias = Mapping[tuple[str, int], OffsetMap]

_CALL_BUDGET_S = 30.0
_SHOWN = 100


class VerifyConfig(BaseModel):
    """Configuration of a verify run; the fields' texts are in the launchpad."""

    model_config = ConfigDict(frozen=True)
    mirrors: list[str]
    topics: list[str]
    last_offsets: int


def verify_job(parts: JobParts) -> dg.JobDefinition:
    """Build the verify job. It reads both clusters itself, so it needs the mirror's credentials."""
    name = f"{parts.prefix}_verify"

    @dg.op(
        name=f"{name}_op",
        required_resource_keys={parts.resource_key},
        config_schema={
            "mirrors": mirrors_field(parts),
            "topics": topics_field(),
            "last_offsets": dg.Field(
                dg.Int,
                default_value=0,
                description="Compare only so many offsets at the end of each partition. 0: all of them.",
            ),
        },
        out=dg.Out(dg.Nothing),
        pool=f"{parts.prefix}_verify",
    )
    def verify(context: dg.OpExecutionContext) -> dg.Output[None]:
        config = VerifyConfig.model_validate(context.op_config)
        name_run(context, config.mirrors, config.topics)
        differing: list[str] = []
        for mirror in config.mirrors:
            view = parts.view(mirror)
            try:
                with resource_of(context, parts.resource_key).connect(budget_s=_CALL_BUDGET_S) as node:
                    settings, topics = _subject(node, view.target, config.topics)
                    translates = not settings.policies.never_translates or node.offset_maps(view.target.name)

                def offset_maps(
                    name: str = view.target.name, translates: bool = bool(translates)
                ) -> OffsetMaps:
                    if not translates:
                        return {}
                    with resource_of(context, parts.resource_key).connect(budget_s=_CALL_BUDGET_S) as node:
                        return node.offset_maps(name)

                report = _compare(settings, topics, config, offset_maps)
            except KmirrorError as error:
                raise dg.Failure(f"verify {mirror}: {error}", allow_retries=False) from error
            context.log_event(dg.AssetObservation(asset_key=view.asset_key, metadata=verify_metadata(report)))
            if not report.ok:
                differing.append(
                    f"{mirror}: {report.differences_total} differences, {report.duplicates} repeated"
                )
        if differing:
            raise dg.Failure("; ".join(differing), allow_retries=False)
        return dg.Output(None)

    return parts.job(verify, name, "Compare both clusters record by record, and committed group offsets.")


def _subject(node: NodeApi, target: MirrorTarget, patterns: list[str]) -> tuple[MirrorSettings, list[str]]:
    """Settings and topics to compare: those that are mirrored now."""
    # as it stands here, or as it was created; a file names the line of what is wrong with it
    settings = (
        load_mirror(target.document)
        if target.document
        else mirror_from_document(target.settings or node.document(target.name))
    )
    is_wanted = name_matcher(patterns or None)
    topics = [
        topic.topic
        for topic in node.mirror(target.name).topics
        if topic.desired is not DesiredState.STOPPED and not topic.error and is_wanted(topic.topic)
    ]
    return settings, topics


def _compare(
    settings: MirrorSettings, topics: list[str], config: VerifyConfig, offset_maps: Callable[[], OffsetMaps]
) -> VerifyReport:
    # both Kafka clients come with it, which loading of definitions need not wait for
    from kmirror_dagster.verification.compare import VerifyLimits, compare_mirror

    return compare_mirror(
        settings,
        topics,
        limits=VerifyLimits(last_offsets=config.last_offsets or None),
        offset_maps=offset_maps,
    )


def verify_metadata(report: VerifyReport) -> dict[str, dg.MetadataValue]:
    """Figures of a comparison, and its first differences."""
    metadata: dict[str, dg.MetadataValue] = {
        "verified_partitions": dg.MetadataValue.int(report.partitions),
        "verified_records": dg.MetadataValue.int(max(report.records.values(), default=0)),
        "verified_group_offsets": dg.MetadataValue.int(report.groups),
        "differences": dg.MetadataValue.int(report.differences_total),
        "repeated_records": dg.MetadataValue.int(report.duplicates),
        "verify_seconds": seconds(report.duration_s),
    }
    if report.differences:
        rows = [
            dg.TableRecord(
                {
                    "kind": str(difference.kind),
                    "partition": f"{difference.topic}/{difference.partition}",
                    "offset": "" if difference.offset is None else str(difference.offset),
                    "detail": difference.detail,
                }
            )
            for difference in report.differences[:_SHOWN]
        ]
        metadata["first_differences"] = dg.MetadataValue.table(records=rows)
    return metadata
