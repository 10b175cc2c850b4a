"""Dagster's event log as history of a mirror: what it knows already, what is news, and the keys it lists.

`__mirror_state` is the truth. Events cost 6 to 25 ms each, so one is written only where the newest logged
state of a mirror partition is an older one. The same comparison rebuilds a purged log and heals lost cursors.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import dagster as dg

from kmirror_dagster.coordination.models import PartitionStatus, StateChange
from kmirror_dagster.lifecycle import SETTLED_STATES, MirrorState
from kmirror_dagster.orchestration.figures import (
    ERROR,
    SINCE,
    STATE,
    STATE_EPOCH,
    Metadata,
    partition_metadata,
    state_metadata,
)
from kmirror_dagster.orchestration.keys import PartitionKey

# SQLite takes at most 32,766 parameters in one statement, one per key (C40)
KEY_CHUNK = 5_000
# a key is deleted by one statement each, about 5 ms: the rest has time until the next tick
MAX_DELETIONS = 500

# Only settled states are logged. What a partition passes through on its way lasts seconds, would double the
# events of a start, and shows in the counts of the aggregate event when it lasts longer.
LOGGED_STATES = SETTLED_STATES
# Of those, FAILED is an observation: consumers downstream are started by materializations.
REACHED_STATES = SETTLED_STATES - {MirrorState.FAILED}

_EVENT_TYPES = (dg.DagsterEventType.ASSET_MATERIALIZATION, dg.DagsterEventType.ASSET_OBSERVATION)

_Item = TypeVar("_Item")

StateEvent = dg.AssetMaterialization | dg.AssetObservation


@dataclass(frozen=True)
class LoggedState:
    """Newest state of one mirror partition in the event log."""

    state: str
    state_epoch: int
    since_ms: int
    error: str | None = None


@dataclass(frozen=True)
class PartitionDiff:
    """What `sync_partitions` changed; `postponed` keys are removed by the next call."""

    added: int = 0
    removed: int = 0
    postponed: int = 0

    def __str__(self) -> str:
        later = f", {self.postponed} more to remove" if self.postponed else ""
        return f"{self.added} partition keys added, {self.removed} removed{later}"


def sync_partitions(instance: dg.DagsterInstance, name: str, wanted: Collection[str]) -> PartitionDiff:
    """Make the keys of a dynamic partitions definition the wanted ones; only differences are written."""
    known = set(instance.get_dynamic_partitions(name))
    target = set(wanted)
    missing = [key for key in wanted if key not in known]
    for chunk in chunks(missing, KEY_CHUNK):
        instance.add_dynamic_partitions(name, chunk)
    surplus = sorted(known - target)
    for key in surplus[:MAX_DELETIONS]:
        instance.delete_dynamic_partition(name, key)
    removed = min(len(surplus), MAX_DELETIONS)
    return PartitionDiff(len(missing), removed, len(surplus) - removed)


def logged_states(
    instance: dg.DagsterInstance, asset_key: dg.AssetKey, keys: Iterable[str]
) -> dict[str, LoggedState]:
    """Newest logged state of each of these asset partitions; those without one are left out."""
    logged: dict[str, LoggedState] = {}
    for chunk in chunks(list(keys), KEY_CHUNK):
        newest: dict[str, int] = {}
        by_type: list[tuple[dg.DagsterEventType, Mapping[str, int]]] = []
        for event_type in _EVENT_TYPES:
            ids = instance.get_latest_storage_id_by_partition(asset_key, event_type, set(chunk))
            by_type.append((event_type, ids))
            for key, storage_id in ids.items():
                newest[key] = max(storage_id, newest.get(key, -1))
        for event_type, ids in by_type:
            wanted = [storage_id for key, storage_id in ids.items() if newest[key] == storage_id]
            logged.update(_read_states(instance, asset_key, event_type, wanted))
    return logged


def is_news(change: StateChange | PartitionStatus, logged: LoggedState | None) -> bool:
    """Whether a state is to be logged: a settled one that is newer than the logged one.

    State epochs order the states of a partition; they start again when a mirror is deleted and created anew,
    so a smaller one is news when it is younger. A partition that fails again for the same reason, as each of
    its retries does while the source is away, is no news.
    """
    if change.state is None or change.state not in LOGGED_STATES:
        return False
    if logged is None:
        return True
    is_same = change.state.value == logged.state
    if is_same and change.state is MirrorState.FAILED and change.error == logged.error:
        return False
    if is_same and change.state_epoch == logged.state_epoch:
        return False  # stored again by a new leader
    return change.state_epoch > logged.state_epoch or change.since_ms > logged.since_ms


def state_event(
    asset_key: dg.AssetKey, change: StateChange | PartitionStatus, status: PartitionStatus | None = None
) -> StateEvent:
    """Event of one state: a materialization when it is a reached one, else an observation.

    Args:
        status: figures to add; those of another state epoch are left away, they would contradict the state.
    """
    metadata: Metadata = state_metadata(change)
    if status is not None and status.state_epoch == change.state_epoch:
        metadata = partition_metadata(status)
    kind = dg.AssetMaterialization if change.state in REACHED_STATES else dg.AssetObservation
    key = str(PartitionKey(change.topic, change.partition))
    return kind(asset_key=asset_key, partition=key, metadata=dict(metadata))


def _read_states(
    instance: dg.DagsterInstance,
    asset_key: dg.AssetKey,
    event_type: dg.DagsterEventType,
    storage_ids: Sequence[int],
) -> dict[str, LoggedState]:
    states: dict[str, LoggedState] = {}
    fetch = (
        instance.fetch_materializations
        if event_type is dg.DagsterEventType.ASSET_MATERIALIZATION
        else instance.fetch_observations
    )
    for chunk in chunks(storage_ids, 1_000):
        records = dg.AssetRecordsFilter(asset_key=asset_key, storage_ids=list(chunk))
        for record in fetch(records, limit=len(chunk)).records:
            event = record.asset_materialization or record.event_log_entry.asset_observation
            state = _logged_state(event.metadata) if event else None
            if state is not None and record.partition_key is not None:
                states[record.partition_key] = state
    return states


def _logged_state(metadata: Metadata) -> LoggedState | None:
    """State an event tells of; None for events that are not ours, or of another make."""
    state, epoch, since = metadata.get(STATE), metadata.get(STATE_EPOCH), metadata.get(SINCE)
    if (
        isinstance(state, dg.TextMetadataValue)
        and isinstance(epoch, dg.IntMetadataValue)
        and isinstance(since, dg.TimestampMetadataValue)
        and state.text is not None
        and epoch.value is not None
    ):
        error = metadata.get(ERROR)
        reason = error.text if isinstance(error, dg.TextMetadataValue) else None
        return LoggedState(state.text, epoch.value, round(since.value * 1000), reason)
    return None


def chunks(items: Sequence[_Item], size: int) -> Iterator[Sequence[_Item]]:
    """Parts of at most so many items."""
    for start in range(0, len(items), size):
        yield items[start : start + size]
