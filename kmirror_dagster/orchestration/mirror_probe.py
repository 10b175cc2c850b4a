"""Evidence for a failover: what the nodes saw, and one look of our own at the source."""

import os
from collections.abc import Sequence
from dataclasses import dataclass

import dagster as dg

from kmirror_dagster.broker.probe import look
from kmirror_dagster.coordination.models import MirrorSummary, ProbeHistory, ProbeObservation
from kmirror_dagster.lifecycle import MirrorState
from kmirror_dagster.orchestration.clocks import epoch_ms
from kmirror_dagster.orchestration.failover import Evidence, Incident
from kmirror_dagster.orchestration.figures import NO_STATE
from kmirror_dagster.orchestration.node_api import NodeApi
from kmirror_dagster.orchestration.resources import KMirrorResource
from kmirror_dagster.settings import parse_address

FAILOVER_TAG = "kmirror/failover"

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


def gather(resource: KMirrorResource, mirror: str, incident: Incident) -> tuple[Evidence, MirrorSummary]:
    """Collect what a decision needs, within `NODE_BUDGET_S` and `LOOK_BUDGET_S`.

    Raises:
        KmirrorError: when no node answers; nobody then knows how the destination is.
    """
    sight = resource.ask(lambda node: _sight(node, mirror), budget_s=NODE_BUDGET_S, what="the node")
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
    )
    return evidence, sight.summary


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
    return Sight(summary, node.probes(mirror), os.path.expandvars(protocol).upper().endswith("SSL"))
