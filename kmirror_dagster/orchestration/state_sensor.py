"""State sensor: the state changes that nodes make on their own become events of the asset's partitions."""

from dataclasses import dataclass, field

import dagster as dg

from kmirror_dagster.broker.deadlines import Deadline
from kmirror_dagster.coordination.models import ChangeFeed, PartitionRef, PartitionStatus, StateChange
from kmirror_dagster.errors import KmirrorError
from kmirror_dagster.orchestration.history import LOGGED_STATES, is_news, logged_states, state_event
from kmirror_dagster.orchestration.keys import PartitionKey
from kmirror_dagster.orchestration.resources import KMirrorResource, resource_of
from kmirror_dagster.orchestration.views import MirrorView

STATE_INTERVAL_S = 10
STATE_BUDGET_S = 8.0
# 6 to 25 ms each in the event log, which the daemon writes after the tick
MAX_EVENTS = 200
# Reading goes on while so much of the budget is left; a page takes a twentieth of a second.
_RESERVE_S = 4.0


@dataclass
class _News:
    """What a tick has read so far; of several states of one partition the newest counts.

    The event log is history for people, and what lasted less than a tick is in the node's log. So a storm of
    retries is read through as fast as it is made.
    """

    changes: dict[str, StateChange] = field(default_factory=dict[str, StateChange])
    read: int = 0
    is_reset: bool = False
    more: bool = False

    def add(self, instance: dg.DagsterInstance, view: MirrorView, feed: ChangeFeed) -> None:
        """Take over what the event log does not have."""
        # removed partitions have no state to tell; the refresh sensor takes their keys away
        settled = {
            _key(change): change
            for change in feed.changes
            if change.mirror == view.mirror and not change.removed and change.state in LOGGED_STATES
        }
        logged = logged_states(instance, view.asset_key, settled)
        for key, change in settled.items():
            self.changes.pop(key, None)
            if is_news(change, logged.get(key)):
                self.changes[key] = change
        self.read += len(feed.changes)
        self.is_reset, self.more = self.is_reset or feed.reset, feed.more

    def __str__(self) -> str:
        text = f"{self.read} changes read, {len(self.changes)} states logged"
        text += "; all states are read anew" if self.is_reset else ""
        return text + ("; more follow at the next tick" if self.more else "")


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
    deadline = Deadline(STATE_BUDGET_S)
    news, cursor = _News(), context.cursor
    try:
        while True:
            feed = _read(resource, view, cursor, MAX_EVENTS - len(news.changes), deadline)
            news.add(context.instance, view, feed)
            cursor = feed.cursor
            # the last few events are not worth as many small pages
            if not feed.more or len(news.changes) > MAX_EVENTS // 2 or deadline.remaining() < _RESERVE_S:
                break
        statuses = _figures(resource, news, deadline)
    except KmirrorError as error:
        return dg.SensorResult(skip_reason=str(error), cursor=context.cursor)
    events = [state_event(view.asset_key, change, statuses.get(key)) for key, change in news.changes.items()]
    return dg.SensorResult(skip_reason=str(news), asset_events=events, cursor=cursor)


def _read(
    resource: KMirrorResource, view: MirrorView, cursor: str | None, limit: int, deadline: Deadline
) -> ChangeFeed:
    return resource.ask(
        lambda node: node.changes(cursor=cursor, mirror=view.mirror, limit=limit),
        budget_s=deadline.remaining(),
        what="the node",
    )


def _figures(resource: KMirrorResource, news: _News, deadline: Deadline) -> dict[str, PartitionStatus]:
    """Offsets, lag and the like of the partitions with news."""
    if not news.changes:
        return {}
    refs = [
        PartitionRef(mirror=change.mirror, topic=change.topic, partition=change.partition)
        for change in news.changes.values()
    ]
    statuses = resource.ask(
        lambda node: node.read_states(refs), budget_s=deadline.remaining(), what="the node"
    )
    return {_key(status): status for status in statuses}


def _key(item: StateChange | PartitionStatus) -> str:
    return str(PartitionKey(item.topic, item.partition))
