"""Many events of one run written in few statements: on Postgres a thousand take about as long as thirty alone."""

import importlib
import logging
import time
from collections.abc import Callable, Sequence
from itertools import groupby
from typing import Any

import dagster as dg

from kmirror_dagster.orchestration.history import StateEvent, chunks

# the statement of a batch is held in memory as a whole, by Dagster and by the database
BATCH_SIZE = 500


def log_states(context: dg.OpExecutionContext, events: Sequence[StateEvent]) -> None:
    """Log the states of a mirror's partitions as events of this run.

    They go to the event log's batch call, which Dagster itself uses for the partitions of one materialization and
    not for events that an op logs. Storage without one (SQLite) writes them one by one, as logging them would.
    """
    entries = _entry_maker(context)
    if entries is None:
        for event in events:
            context.log_event(event)
        return
    for _, same in groupby(sorted(events, key=_kind), key=_kind):  # a batch is of one kind
        for batch in chunks(list(same), BATCH_SIZE):
            context.instance.event_log_storage.store_event_batch([entries(event) for event in batch])


def _kind(event: StateEvent) -> str:
    if isinstance(event, dg.AssetMaterialization):
        return dg.DagsterEventType.ASSET_MATERIALIZATION.value
    return dg.DagsterEventType.ASSET_OBSERVATION.value


def _entry_maker(context: dg.OpExecutionContext) -> Callable[[StateEvent], dg.EventLogEntry] | None:
    """Makes entries of the event log; None where this Dagster has not the two classes that it does not export."""
    module = importlib.import_module("dagster._core.events")
    materialized: Any = getattr(module, "StepMaterializationData", None)
    observed: Any = getattr(module, "AssetObservationData", None)
    if materialized is None or observed is None:
        return None
    step_key = str(context.op_handle)

    def entry(event: StateEvent) -> dg.EventLogEntry:
        data = materialized(event) if isinstance(event, dg.AssetMaterialization) else observed(event)
        return dg.EventLogEntry(
            error_info=None,
            level=logging.DEBUG,
            user_message="",
            run_id=context.run_id,
            timestamp=time.time(),
            step_key=step_key,
            job_name=context.job_name,
            dagster_event=dg.DagsterEvent(
                event_type_value=_kind(event),
                job_name=context.job_name,
                step_key=step_key,
                event_specific_data=data,
            ),
        )

    return entry
