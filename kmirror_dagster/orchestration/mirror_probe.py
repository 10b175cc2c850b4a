"""Evidence for a failover: what the nodes saw, and one look of our own at the source."""

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import dagster as dg

from kmirror_dagster.broker.probe import look
from kmirror_dagster.coordination.models import MirrorSummary, ProbeHistory, ProbeObservation
from kmirror_dagster.errors import KmirrorError, SettingsError
from kmirror_dagster.lifecycle import DesiredState, MirrorState
from kmirror_dagster.orchestration.checks import failed_partitions
from kmirror_dagster.orchestration.clocks import epoch_ms
from kmirror_dagster.orchestration.contents import settings_of
from kmirror_dagster.orchestration.failover import (
    Evidence,
    FailedPartition,
    Incident,
    Replicas,
    Verdict,
    decide,
)
from kmirror_dagster.orchestration.figures import NO_STATE
from kmirror_dagster.orchestration.node_api import NodeApi
from kmirror_dagster.orchestration.resources import KMirrorResource
from kmirror_dagster.orchestration.views import MirrorView
from kmirror_dagster.settings import MirrorSettings, parse_address

FAILOVER_TAG = "kmirror/failover"
APPROVAL_TAG = "kmirror/approved_failover"

NODE_BUDGET_S = 5.0
LOOK_BUDGET_S = 2.0

_OPEN = [
    dg.DagsterRunStatus.QUEUED,
    dg.DagsterRunStatus.NOT_STARTED,
    dg.DagsterRunStatus.STARTING,
    dg.DagsterRunStatus.STARTED,
    dg.DagsterRunStatus.CANCELING,
]
_ENDED = [dg.DagsterRunStatus.SUCCESS, dg.DagsterRunStatus.FAILURE, dg.DagsterRunStatus.CANCELED]


@dataclass(frozen=True)
class Sight:
    """What a node told of a mirror and its clusters."""

    summary: MirrorSummary
    histories: Sequence[ProbeHistory]
    tls: bool
    failed: Sequence[FailedPartition] = ()


class SupportsDecision(Protocol):
    """What a decision needs of a sensor's or an op's context."""

    @property
    def instance(self) -> dg.DagsterInstance: ...

    @property
    def log(self) -> Any: ...


def gather(resource: KMirrorResource, view: MirrorView, incident: Incident) -> tuple[Evidence, MirrorSummary]:
    """Collect what a decision needs, within `NODE_BUDGET_S` and `LOOK_BUDGET_S`; the replicas are left out.

    Raises:
        KmirrorError: when no node answers; nobody then knows how the destination is.
    """
    sight = resource.ask(lambda node: _sight(node, view.mirror), budget_s=NODE_BUDGET_S, what="the node")
    addresses = [parse_address(part.strip()) for part in sight.summary.source_bootstrap.split(",")]
    seen = look(addresses, tls=sight.tls, budget_s=LOOK_BUDGET_S)
    now_ms = epoch_ms()
    evidence = Evidence(
        now_ms=now_ms,
        histories=sight.histories,
        own_look=ProbeObservation(at_ms=now_ms, ok=seen.ok, error=seen.error),
        partitions_to_stop=partitions_to_stop(sight.summary),
        lag_seconds=sight.summary.lag_seconds,
        incident=incident,
        rpo_seconds=view.target.policies.rpo_seconds,
        failed=sight.failed,
    )
    return evidence, sight.summary


def judged(
    context: SupportsDecision, resource: KMirrorResource, view: MirrorView, evidence: Evidence
) -> Verdict:
    """Decide; replicas and approvals are looked up only once all else speaks for a failover."""
    settings = view.target.policies.failover
    verdict = decide(evidence, settings)
    if not verdict.fail_over and verdict.awaits is None:
        return verdict
    try:
        replicas = _replicas(resource, view)
    except KmirrorError as error:
        return Verdict(False, f"{verdict.reason}; but the destination's replicas are not known: {error}")
    if replicas is None:
        context.log.info("the destination's replicas are not looked at: no credentials for it here")
    approved_ms = _approved_ms(context.instance, view.mirror)
    return decide(replace(evidence, replicas=replicas, approved_ms=approved_ms), settings)


def _replicas(resource: KMirrorResource, view: MirrorView) -> Replicas | None:
    """The destination's replicas; None where this process cannot read the settings of its client.

    Raises:
        KmirrorError: when the destination does not answer.
    """
    # a Kafka client comes with it, which loading of definitions need not wait for
    from kmirror_dagster.broker.replicas import replica_health

    def read(node: NodeApi) -> tuple[MirrorSettings | None, list[str]]:
        topics = [
            topic.topic
            for topic in node.mirror(view.mirror).topics
            if topic.desired is not DesiredState.STOPPED
        ]
        try:
            return settings_of(node, view), topics
        except SettingsError:
            return None, topics

    settings, topics = resource.ask(read, budget_s=NODE_BUDGET_S, what="the node")
    if settings is None:
        return None
    found = replica_health(settings.destination, topics, timeout_s=NODE_BUDGET_S)
    return Replicas(found.leaderless, found.under_replicated)


def _approved_ms(instance: dg.DagsterInstance, mirror: str) -> int | None:
    """End of the newest run in which a person approved a failover of a mirror."""
    filters = dg.RunsFilter(tags={APPROVAL_TAG: mirror}, statuses=[dg.DagsterRunStatus.SUCCESS])
    found = instance.get_run_records(filters, limit=1)
    if not found:
        return None
    newest = found[0]
    return round((newest.end_time or newest.update_timestamp.timestamp()) * 1000)


def partitions_to_stop(summary: MirrorSummary) -> int:
    """Partitions that a failover has to stop."""
    done = (MirrorState.STOPPED.value, NO_STATE)
    return sum(count for state, count in summary.states.items() if state not in done)


def incident_of(instance: dg.DagsterInstance, mirror: str) -> tuple[Incident, str]:
    """Failovers of a mirror so far, and the id of the newest ended one ("none" when there was none)."""
    tags = {FAILOVER_TAG: mirror}
    open_runs = instance.get_run_records(dg.RunsFilter(tags=tags, statuses=_OPEN), limit=1)
    ended = instance.get_run_records(dg.RunsFilter(tags=tags, statuses=_ENDED), limit=1)
    newest = ended[0] if ended else None
    end_s = (newest.end_time or newest.update_timestamp.timestamp()) if newest else None
    incident = Incident(
        open_run=open_runs[0].dagster_run.run_id if open_runs else None,
        ended_ms=round(end_s * 1000) if end_s is not None else None,
        succeeded=newest is not None and newest.dagster_run.status is dg.DagsterRunStatus.SUCCESS,
    )
    return incident, newest.dagster_run.run_id if newest else "none"


def _sight(node: NodeApi, mirror: str) -> Sight:
    summary = node.mirror(mirror)
    source = node.document(mirror).get("source") or {}
    protocol = str(source.get("security.protocol") or source.get("security_protocol") or "PLAINTEXT")
    failed = [
        FailedPartition(f"{status.topic}/{status.partition}", status.since_ms, status.retriable)
        for status in failed_partitions(node, summary)
    ]
    tls = os.path.expandvars(protocol).upper().endswith("SSL")
    return Sight(summary, node.probes(mirror), tls, failed)
