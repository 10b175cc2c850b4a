"""State sensor: the state changes that nodes make on their own become events of the asset's partitions."""

from collections.abc import Sequence
from dataclasses import dataclass

import dagster as dg

from kmirror_dagster.coordination.models import PartitionRef, PartitionStatus, StateChange
from kmirror_dagster.errors import KmirrorError
from kmirror_dagster.orchestration.history import LOGGED_STATES, is_news, logged_states, state_event
from kmirror_dagster.orchestration.keys import PartitionKey
from kmirror_dagster.orchestration.node_api import NodeApi
from kmirror_dagster.orchestration.resources import KMirrorResource, resource_of
from kmirror_dagster.orchestration.views import MirrorView

STATE_INTERVAL_S = 10
STATE_BUDGET_S = 8.0
# 6 to 25 ms each in the event log, which the daemon writes after the tick
MAX_EVENTS = 200
_MAX_PAGES = 20


@dataclass(frozen=True)
class Following:
    """Settled states behind the cursor, the newest of each partition, and figures of those partitions."""

    changes: Sequence[StateChange]
    statuses: Sequence[PartitionStatus]
    cursor: str
    reset: bool
    more: bool


def state_sensor(view: MirrorView) -> dg.SensorDefinition:
    """Build the state-following sensor of one mirror."""

    @dg.sensor(
        name=f"{view.name}_states",
        minimum_interval_seconds=STATE_INTERVAL_S,
        required_resource_keys={view.resource_key},
        default_status=dg.DefaultSensorStatus.RUNNING,
        description=f"Logs each new state of a partition of mirror {view.mirror}.",
    )
    def states(context: dg.SensorEvaluationContext) -> dg.SensorResult:
        return evaluate(context, view, resource_of(context, view.resource_key))

    return states


def evaluate(
    context: dg.SensorEvaluationContext, view: MirrorView, resource: KMirrorResource
) -> dg.SensorResult:
    """One tick: read changes behind the cursor and log those that the event log does not have.

    The daemon stores the events before the cursor. A tick that dies in between is repeated, and what it had
    logged is then no news any more.
    """
    try:
        read = resource.ask(
            lambda node: follow(node, view.mirror, context.cursor), budget_s=STATE_BUDGET_S, what="the node"
        )
    except KmirrorError as error:
        return dg.SensorResult(skip_reason=str(error), cursor=context.cursor)
    keys = {_key(change): change for change in read.changes}
    logged = logged_states(context.instance, view.asset_key, keys)
    statuses = {_key(status): status for status in read.statuses}
    events = [
        state_event(view.asset_key, change, statuses.get(key))
        for key, change in keys.items()
        if is_news(change, logged.get(key))
    ]
    seen = f"{len(read.changes)} partitions changed state, {len(events)} events logged"
    seen += "; the whole state is read anew" if read.reset else ""
    seen += "; more follow at the next tick" if read.more else ""
    return dg.SensorResult(skip_reason=seen, asset_events=events, cursor=read.cursor)


def follow(node: NodeApi, mirror: str, cursor: str | None) -> Following:
    """Read changes of at most `MAX_EVENTS` partitions, and the figures of those partitions.

    Of several settled states of one partition the newest counts: the event log is history for people, and
    what lasted less than a tick is in the node's log. So a storm of retries is read as fast as it is made.
    """
    newest: dict[str, StateChange] = {}
    is_reset, more = False, True
    for _ in range(_MAX_PAGES):
        feed = node.changes(cursor=cursor, mirror=mirror, limit=MAX_EVENTS)
        page = {_key(change): change for change in feed.changes if _is_logged(change, mirror)}
        if len(newest.keys() | page.keys()) > MAX_EVENTS:
            break  # read again at the next tick
        newest.update(page)
        cursor, is_reset, more = feed.cursor, is_reset or feed.reset, feed.more
        if not more:
            break
    refs = [
        PartitionRef(mirror=mirror, topic=change.topic, partition=change.partition)
        for change in newest.values()
    ]
    statuses = node.read_states(refs) if refs else []
    return Following(list(newest.values()), statuses, cursor or "", is_reset, more)


def _is_logged(change: StateChange, mirror: str) -> bool:
    # removed partitions have no state to tell; the refresh sensor takes their keys away
    return change.mirror == mirror and not change.removed and change.state in LOGGED_STATES


def _key(item: StateChange | PartitionStatus) -> str:
    return str(PartitionKey(item.topic, item.partition))
