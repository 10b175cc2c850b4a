"""Steps about positions: consumer group offsets and log starts."""

from collections.abc import Mapping

from kmirror_dagster.broker.admin_types import (
    CommittedOffset,
    OffsetKind,
    Partition,
)
from kmirror_dagster.errors import BrokerError, KmirrorError
from kmirror_dagster.metadata.context import RefreshContext
from kmirror_dagster.metadata.groups import (
    Bounds,
    GroupChange,
    GroupMemory,
    live_part,
    occupied,
    plan_group,
    remember,
    select_groups,
)
from kmirror_dagster.metadata.log_starts import plan_log_starts
from kmirror_dagster.metadata.outcome import Step
from kmirror_dagster.metadata.reader import read_offsets
from kmirror_dagster.metadata.steps import WHOLE_STEP, StepReport

# What brokers answer when a group got a member between our look and our commit: UNKNOWN_MEMBER_ID,
# REBALANCE_IN_PROGRESS, NON_EMPTY_GROUP, STALE_MEMBER_EPOCH.
_OCCUPIED_CODES = frozenset({25, 27, 68, 113})

_Offsets = Mapping[Partition, CommittedOffset]


def sync_groups(context: RefreshContext) -> None:
    """Keep consumer group positions equal; no request when there is no difference."""
    with context.reports.running(Step.GROUPS) as report:
        if not _mirroring_partitions(context):
            return
        listings = context.source.groups(timeout_s=context.timeout())
        for error in listings.errors:
            report.errors[WHOLE_STEP] = str(error)  # groups of one broker are missing, the others go on
        selection = select_groups(listings.groups, context.settings.filters.selects_group)
        report.notes.extend(selection.notes)
        changes = _plan_groups(context, report, selection.groups)
        if not listings.errors and not context.dry_run:
            context.memory.forget_groups(frozenset(selection.groups))
        changes = _vacant(context, report, changes)
        for change in changes:
            context.note_change(Step.GROUPS, change.group, _change_text(change))
        if not context.dry_run:
            _commit(context, report, changes)


def _mirroring_partitions(context: RefreshContext) -> frozenset[Partition]:
    view = context.destination_view
    keys = ((topic, index) for topic in context.topics.in_step for index in view.partitions_of(topic))
    return frozenset(key for key in keys if context.is_mirroring(key))


def _bounds(
    context: RefreshContext, report: StepReport, partitions: frozenset[Partition]
) -> dict[Partition, Bounds]:
    """What the destination has of partitions, read after the positions: never less than they were at then."""
    starts = read_offsets(context.destination, partitions, OffsetKind.EARLIEST, context.deadline)
    ends = read_offsets(context.destination, partitions, OffsetKind.LATEST, context.deadline)
    for (topic, _), error in (*starts.errors.items(), *ends.errors.items()):
        report.errors[topic] = str(error)
    return {
        key: Bounds(start, ends.values[key]) for key, start in starts.values.items() if key in ends.values
    }


def _plan_groups(context: RefreshContext, report: StepReport, groups: tuple[str, ...]) -> list[GroupChange]:
    mirroring = _mirroring_partitions(context)
    source = context.source.group_offsets(groups, timeout_s=context.timeout())
    report.errors.update((group, str(error)) for group, error in source.errors.items())
    relevant = {
        group: offsets for group, offsets in source.values.items() if not mirroring.isdisjoint(offsets)
    }
    committed = frozenset(key for offsets in relevant.values() for key in offsets) & mirroring
    bounds = _bounds(context, report, committed)
    destination = context.destination.group_offsets(relevant, timeout_s=context.timeout())
    report.errors.update((group, str(error)) for group, error in destination.errors.items())
    changes: list[GroupChange] = []
    for group in sorted(destination.values):
        change = _plan_one(context, group, relevant[group], destination.values[group], bounds)
        if change is not None:
            changes.append(change)
    return changes


def _plan_one(
    context: RefreshContext,
    group: str,
    source: _Offsets,
    destination: _Offsets,
    bounds: Mapping[Partition, Bounds],
) -> GroupChange | None:
    memory = remember(context.memory.groups.get(group, GroupMemory()), source, destination)
    keep_alive = False
    if not context.dry_run:
        context.memory.groups[group] = memory
        keep_alive = context.memory.keep_alive_due(group, context.clock(), context.rng)
    return plan_group(
        group, source=source, destination=destination, bounds=bounds, memory=memory, keep_alive=keep_alive
    )


def _vacant(context: RefreshContext, report: StepReport, changes: list[GroupChange]) -> list[GroupChange]:
    """Leave out groups somebody consumes with at the destination.

    A group that a listing does not show is new, or of a broker that did not answer: the broker that commits
    has the last word, it refuses to for a group with members.
    """
    if not changes:
        return []
    listings = context.destination.groups(timeout_s=context.timeout())
    states = {item.group: item for item in listings.groups}
    vacant: list[GroupChange] = []
    for change in changes:
        reason = occupied(states.get(change.group))
        if reason is None:
            vacant.append(change)
        else:
            report.notes.append(reason)
    return vacant


def _commit(context: RefreshContext, report: StepReport, changes: list[GroupChange]) -> None:
    live = [part for change in changes if (part := live_part(change, context.is_mirroring)) is not None]
    if not live:
        return
    answers = context.destination.alter_group_offsets(
        {change.group: change.offsets for change in live}, timeout_s=context.timeout()
    )
    report.errors.update((group, str(error)) for group, error in answers.errors.items())
    kept_alive = {change.group for change in live if change.kept_alive}
    for group, outcomes in answers.values.items():
        errors = [error for error in outcomes.values() if error is not None]
        if not errors:
            report.changes += 1
            if group in kept_alive:
                context.memory.kept_alive(group, context.clock())
        elif all(_is_occupied(error) for error in errors):
            report.notes.append(f"group {group} got a member at the destination meanwhile: left alone")
        else:
            report.errors[group] = "; ".join(sorted({str(error) for error in errors}))


def _is_occupied(error: KmirrorError) -> bool:
    return isinstance(error, BrokerError) and error.code in _OCCUPIED_CODES


def _change_text(change: GroupChange) -> str:
    positions = ", ".join(
        f"{topic}/{partition}={committed.offset}"
        for (topic, partition), committed in sorted(change.offsets.items())
    )
    return f"commit {positions}"


def follow_log_starts(context: RefreshContext) -> None:
    """Delete at the destination what the source has deleted at its head."""
    with context.reports.running(Step.LOG_STARTS) as report:
        plan = plan_log_starts(
            context.topics.in_step,
            source=context.source_view,
            destination=context.destination_view,
            mirroring=context.is_mirroring,
        )
        report.errors.update(plan.errors)
        report.notes.extend(plan.notes)
        for (topic, partition), offset in plan.cuts.items():
            text = f"delete records before offset {offset}"
            context.note_change(Step.LOG_STARTS, f"{topic}/{partition}", text)
        cuts = {key: offset for key, offset in plan.cuts.items() if context.is_mirroring(key)}
        if context.dry_run or not cuts:
            return
        answers = context.destination.delete_records(cuts, timeout_s=context.timeout())
        report.changes += len(answers.values)
        for (topic, partition), error in answers.errors.items():
            report.errors[topic] = f"partition {partition}: {error}"
