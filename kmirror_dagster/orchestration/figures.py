"""Metadata of events. A figure has one label, unit and type wherever it is shown, so it can be plotted."""

from collections.abc import Mapping, Sequence

import dagster as dg

from kmirror_dagster.coordination.models import MirrorSummary, PartitionStatus, StateChange
from kmirror_dagster.lifecycle import MirrorState
from kmirror_dagster.orchestration.keys import PartitionKey

Metadata = Mapping[str, dg.MetadataValue]

STATE = "state"
STATE_EPOCH = "state_epoch"
SINCE = "since"
ERROR = "error"
NO_STATE = "NONE"

# rows of a table in one event: the UI renders them all, and the event log stores them each time
MAX_TABLE_ROWS = 200

_TABLE_COLUMNS = (
    ("partition", "string"),
    ("state", "string"),
    ("lag_records", "int"),
    ("lag_seconds", "float"),
    ("error", "string"),
)
_STATE_COUNTS = (*(state.value for state in MirrorState), NO_STATE)


def rate(per_second: float) -> dg.FloatMetadataValue:
    """Something per second, to one decimal."""
    return dg.MetadataValue.float(float(round(per_second, 1)))


def seconds(duration: float) -> dg.FloatMetadataValue:
    """Seconds, to the millisecond."""
    return dg.MetadataValue.float(float(round(duration, 3)))


def state_metadata(change: StateChange | PartitionStatus) -> dict[str, dg.MetadataValue]:
    """State, where it came from and since when."""
    figures: dict[str, dg.MetadataValue] = {
        STATE: dg.MetadataValue.text(change.state.value if change.state else NO_STATE),
        STATE_EPOCH: dg.MetadataValue.int(change.state_epoch),
        SINCE: dg.MetadataValue.timestamp(change.since_ms / 1000),
    }
    if change.previous_state is not None:
        figures["previous_state"] = dg.MetadataValue.text(change.previous_state.value)
    if change.error:
        figures[ERROR] = dg.MetadataValue.text(change.error)
    return figures


def partition_metadata(status: PartitionStatus) -> dict[str, dg.MetadataValue]:
    """All figures of one mirror partition; what is not known is left out, never shown as zero."""
    figures = state_metadata(status)
    figures["desired_state"] = dg.MetadataValue.text(status.desired.value)
    figures["leader_epoch"] = dg.MetadataValue.int(status.leader_epoch)
    figures["records_per_second"] = rate(status.records_per_second)
    figures["bytes_per_second"] = rate(status.bytes_per_second)
    whole_numbers = {
        "source_start_offset": status.source_start_offset,
        "source_end_offset": status.source_end_offset,
        "destination_start_offset": status.destination_start_offset,
        "destination_end_offset": status.destination_end_offset,
        "last_mirror_offset": status.last_mirror_offset,
        "lag_records": status.lag_records,
        "lost_offsets": status.lost_offsets or None,
    }
    for label, number in whole_numbers.items():
        if number is not None:
            figures[label] = dg.MetadataValue.int(number)
    if status.lag_seconds is not None:
        figures["lag_seconds"] = seconds(status.lag_seconds)
    if status.node_id:
        figures["node"] = dg.MetadataValue.text(status.node_id)
    return figures


def mirror_metadata(
    summary: MirrorSummary, worst: Sequence[PartitionStatus], *, now_ms: int
) -> dict[str, dg.MetadataValue]:
    """Figures of a whole mirror: counts per state, lag, throughput, refresh, the worst partitions."""
    figures: dict[str, dg.MetadataValue] = {
        "topics": dg.MetadataValue.int(len(summary.topics)),
        "partitions": dg.MetadataValue.int(summary.partitions),
        "lag_records": dg.MetadataValue.int(summary.lag_records),
        "lag_seconds": seconds(summary.lag_seconds),
        "records_per_second": rate(summary.records_per_second),
        "bytes_per_second": rate(summary.bytes_per_second),
        "topics_in_error": dg.MetadataValue.int(sum(1 for topic in summary.topics if topic.error)),
    }
    for state in _STATE_COUNTS:
        figures[f"partitions_{state.lower()}"] = dg.MetadataValue.int(summary.states.get(state, 0))
    if summary.refresh is not None:
        age_s = max(0, now_ms - summary.refresh.finished_ms) / 1000
        figures["refresh_age_seconds"] = seconds(age_s)
        errors = sum(len(step.errors) for step in summary.refresh.steps)
        figures["refresh_errors"] = dg.MetadataValue.int(errors)
    if worst:
        figures["worst_partitions"] = partition_table(worst)
    return figures


def partition_table(statuses: Sequence[PartitionStatus]) -> dg.TableMetadataValue:
    """Table of mirror partitions, at most `MAX_TABLE_ROWS` of them."""
    schema = dg.TableSchema(columns=[dg.TableColumn(name, kind) for name, kind in _TABLE_COLUMNS])
    records = [dg.TableRecord(_row(status)) for status in statuses[:MAX_TABLE_ROWS]]
    return dg.MetadataValue.table(records=records, schema=schema)


def _row(status: PartitionStatus) -> dict[str, str | int | float | bool | None]:
    return {
        "partition": str(PartitionKey(status.topic, status.partition)),
        "state": status.state.value if status.state else NO_STATE,
        "lag_records": status.lag_records,
        "lag_seconds": status.lag_seconds,
        "error": status.error,
    }


def by_need(statuses: Sequence[PartitionStatus]) -> list[PartitionStatus]:
    """Partitions that need somebody first: FAILED ones, then by lag."""
    return sorted(
        statuses,
        key=lambda status: (
            status.state is not MirrorState.FAILED,
            -(status.lag_seconds or 0.0),
            -(status.lag_records or 0),
            status.topic,
            status.partition,
        ),
    )
