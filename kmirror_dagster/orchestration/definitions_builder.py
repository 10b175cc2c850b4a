"""Builds all Dagster definitions of some mirrors. Nothing is asked of a node or a cluster while they load."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import dagster as dg

from kmirror_dagster.errors import UsageError
from kmirror_dagster.orchestration.assets import mirror_asset
from kmirror_dagster.orchestration.checks import mirror_checks
from kmirror_dagster.orchestration.create_job import create_job
from kmirror_dagster.orchestration.drift_check import drift_parts
from kmirror_dagster.orchestration.failover_job import failover_job
from kmirror_dagster.orchestration.failover_sensor import failover_sensor
from kmirror_dagster.orchestration.job_parts import JobParts
from kmirror_dagster.orchestration.keeper_sensor import keeper_sensor
from kmirror_dagster.orchestration.keys import dagster_name, dagster_names
from kmirror_dagster.orchestration.recovery_jobs import recovery_parts
from kmirror_dagster.orchestration.refresh_sensor import DEFAULT_HEARTBEAT_S, refresh_sensor
from kmirror_dagster.orchestration.resources import KMirrorResource
from kmirror_dagster.orchestration.runbook import RUNBOOK, runbook
from kmirror_dagster.orchestration.schedules import mirror_schedules
from kmirror_dagster.orchestration.state_sensor import state_sensor
from kmirror_dagster.orchestration.targets import MirrorLike, MirrorTarget, mirror_target
from kmirror_dagster.orchestration.topic_assets import topic_checks
from kmirror_dagster.orchestration.translator import KMirrorTranslator, MirrorProps
from kmirror_dagster.orchestration.upkeep_jobs import reconcile_job, refresh_job
from kmirror_dagster.orchestration.verb_jobs import verb_jobs
from kmirror_dagster.orchestration.verify_job import verify_job
from kmirror_dagster.orchestration.views import MirrorView

DEFAULT_PREFIX = "kmirror"


@dataclass(frozen=True)
class _Shown:
    """A mirror's view and the external assets upstream of it."""

    view: MirrorView
    sources: Sequence[dg.AssetSpec]

    def assets(self) -> list[dg.AssetsDefinition | dg.AssetSpec]:
        """The mirror's asset, and the external ones around it."""
        return [mirror_asset(self.view), *self.sources, *self.view.topics.values()]


def build_mirror_definitions(
    *,
    mirrors: Sequence[MirrorLike],
    resource: KMirrorResource | None = None,
    translator: KMirrorTranslator | None = None,
    prefix: str = DEFAULT_PREFIX,
    heartbeat_seconds: int = DEFAULT_HEARTBEAT_S,
    executor: dg.ExecutorDefinition | None = None,
) -> dg.Definitions:
    """Build assets, checks, sensors, schedules and jobs of some mirrors of one destination cluster.

    Args:
        mirrors: names, paths of settings documents, settings, or `MirrorTarget`s. With a name alone, limits
            of checks and failover are the defaults.
        resource: how to reach the nodes; bound under `prefix`. None when the caller binds it itself.
        translator: changes keys, groups, owners and tags.
        prefix: begins the names of what the mirrors share (jobs, pools, the keeper, the resource key); give
            each destination cluster of a code location one of its own.
        heartbeat_seconds: an unchanged mirror logs an aggregate event this often.
        executor: of runs that materialize assets; None leaves the code location's own.

    Raises:
        UsageError: when no mirror or one twice is given, or the prefix is no identifier.
        SettingsError: when a document cannot be read, or the resource holds its token as text.
    """
    if dagster_name(prefix) != prefix or not prefix:
        raise UsageError(f"prefix {prefix!r}: expected letters, digits and '_'")
    if resource is not None:
        resource.refuse_literal_token()
    targets = [mirror_target(mirror) for mirror in mirrors]
    shown = _shown(targets, translator or KMirrorTranslator(), prefix)
    views = [each.view for each in shown]
    parts = JobParts({view.mirror: view for view in views}, resource_key=prefix, prefix=prefix)
    failover, refresh, verify = failover_job(parts), refresh_job(parts), verify_job(parts)
    recovery, drift = recovery_parts(parts), drift_parts(parts)
    sensors = [keeper_sensor(prefix=prefix, resource_key=prefix)]
    for view in views:
        sensors.append(refresh_sensor(view, heartbeat_s=heartbeat_seconds))
        sensors.append(state_sensor(view))
        sensors.append(failover_sensor(view, failover))
    resources: Mapping[str, object] = {prefix: resource} if resource is not None else {}
    return dg.Definitions(
        assets=[asset for each in shown for asset in each.assets()],
        asset_checks=[check for view in views for check in _checks(view)] + [*recovery.checks, *drift.checks],
        sensors=sensors,
        schedules=[*mirror_schedules(prefix, refresh, verify), *recovery.schedules, drift.schedule],
        jobs=[
            *verb_jobs(parts),
            create_job(parts),
            failover,
            refresh,
            reconcile_job(parts),
            verify,
            *recovery.jobs,
        ],
        resources=resources,
        executor=executor,
    )


def _checks(view: MirrorView) -> list[dg.AssetChecksDefinition]:
    return [mirror_checks(view), topic_checks(view)] if view.topics else [mirror_checks(view)]


def _shown(targets: Sequence[MirrorTarget], translator: KMirrorTranslator, prefix: str) -> list[_Shown]:
    names = [target.name for target in targets]
    if not names:
        raise UsageError("no mirror given: name at least one")
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise UsageError(f"mirror {twice[0]} is given more than once")
    identifiers = dagster_names(names)
    return [_show(target, identifiers[target.name], translator, prefix) for target in targets]


def _show(target: MirrorTarget, name: str, translator: KMirrorTranslator, prefix: str) -> _Shown:
    props = MirrorProps(target, name)
    sources = [translator.get_source_spec(props)]
    sources += [translator.get_source_topic_spec(props, topic) for topic in target.source_topics]
    partitions_name = f"{prefix}/{target.name}"
    told = dg.MetadataValue.md(runbook(target, name=name, prefix=prefix))
    spec = (
        translator.get_mirror_spec(props, sources)
        .replace_attributes(partitions_def=dg.DynamicPartitionsDefinition(name=partitions_name))
        .merge_attributes(metadata={RUNBOOK: told})
    )
    topics = {
        topic: translator.get_mirrored_topic_spec(props, topic, spec) for topic in target.mirrored_topics
    }
    view = MirrorView(target, name, spec, partitions_name, resource_key=prefix, prefix=prefix, topics=topics)
    return _Shown(view, sources)
