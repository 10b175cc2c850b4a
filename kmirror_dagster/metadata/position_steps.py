"""Steps about positions: those of consumer groups and share groups, and log starts."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TypeAlias

from kmirror_dagster.broker.admin import SHARE_READ_API, SHARE_SET_API, ClusterAdmin
from kmirror_dagster.broker.admin_types import (
    OFFSET_GROUP_TYPES,
    Answers,
    CommittedOffset,
    GroupListings,
    GroupType,
    OffsetKind,
    Partition,
)
from kmirror_dagster.errors import BrokerError, KmirrorError
from kmirror_dagster.metadata.context import RefreshContext
from kmirror_dagster.metadata.groups import (
    SHARE_TYPES,
    Bounds,
    GroupChange,
    GroupMemory,
    live_part,
    occupied,
    passed_over,
    plan_group,
    remember,
    select_groups,
)
from kmirror_dagster.metadata.log_starts import plan_log_starts
from kmirror_dagster.metadata.offsets import current_maps, translated_positions
from kmirror_dagster.metadata.outcome import Step
from kmirror_dagster.metadata.reader import read_offsets
from kmirror_dagster.metadata.steps import WHOLE_STEP, StepReport

# What brokers answer when a group got a member between our look and our commit: UNKNOWN_MEMBER_ID,
# REBALANCE_IN_PROGRESS, NON_EMPTY_GROUP, STALE_MEMBER_EPOCH.
_OCCUPIED_CODES = frozenset({25, 27, 68, 113})

_Offsets: TypeAlias = Mapping[Partition, CommittedOffset]
_Outcomes: TypeAlias = Mapping[Partition, KmirrorError | None]


@dataclass(frozen=True)
class _Kind:
    """One kind of groups: where its positions are read and set.

    Attributes:
        expires: positions go where nobody consumes for long.
    """

    step: Step
    types: frozenset[GroupType]
    read: Callable[[ClusterAdmin, Iterable[str], float], Answers[str, _Offsets]]
    write: Callable[[ClusterAdmin, Mapping[str, _Offsets], float], Answers[str, _Outcomes]]
    expires: bool = True


_CONSUMERS = _Kind(
    Step.GROUPS,
    OFFSET_GROUP_TYPES,
    lambda admin, groups, timeout_s: admin.group_offsets(groups, timeout_s=timeout_s),
    lambda admin, offsets, timeout_s: admin.alter_group_offsets(offsets, timeout_s=timeout_s),
)
_SHARES = _Kind(
    Step.SHARE_GROUPS,
    SHARE_TYPES,
    lambda admin, groups, timeout_s: admin.share_group_offsets(groups, timeout_s=timeout_s),
    lambda admin, offsets, timeout_s: admin.alter_share_group_offsets(offsets, timeout_s=timeout_s),
    expires=False,
)


def sync_groups(context: RefreshContext) -> None:
    """Keep positions of consumer groups and share groups equal; no request when there is no difference."""
    listings = _source_groups(context)
    if listings is None:
        return
    for kind in (_CONSUMERS, _SHARES):
        groups = select_groups(listings.groups, context.settings.filters.selects_group, kind.types)
        if groups:
            with context.reports.running(kind.step) as report:
                _sync(context, report, kind, groups)


def _source_groups(context: RefreshContext) -> GroupListings | None:
    """Groups of the source; None, with the reason in the report, when there is nothing to be done with them."""
    found = None
    with context.reports.running(Step.GROUPS) as report:
        if not _mirroring_partitions(context):
            return None
        found = context.source.groups(timeout_s=context.timeout())
        for error in found.errors:
            report.errors[WHOLE_STEP] = str(error)  # groups of one broker are missing, the others go on
        report.notes.extend(passed_over(found.groups, context.settings.filters.selects_group))
        if not found.errors and not context.dry_run:
            context.memory.forget_groups(frozenset(item.group for item in found.groups))
    return found


def _sync(context: RefreshContext, report: StepReport, kind: _Kind, groups: tuple[str, ...]) -> None:
    if kind is _SHARES and not _tells_shares(context, report):
        return
    changes = _vacant(context, report, kind, _plan_groups(context, report, kind, groups))
    for change in changes:
        context.note_change(kind.step, change.group, _change_text(change))
    if not context.dry_run:
        _commit(context, report, kind, changes)


def _tells_shares(context: RefreshContext, report: StepReport) -> bool:
    """Whether brokers know the calls about share groups' positions (Apache Kafka 4.1 and later)."""
    sides = (("source", context.source, SHARE_READ_API), ("destination", context.destination, SHARE_SET_API))
    for side, admin, api in sides:
        if api not in admin.api_versions(timeout_s=context.timeout()):
            report.notes.append(
                f"positions of share groups are not mirrored: the {side}'s brokers do not tell"
            )
            return False
    return True


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


def _plan_groups(
    context: RefreshContext, report: StepReport, kind: _Kind, groups: tuple[str, ...]
) -> list[GroupChange]:
    mirroring = _mirroring_partitions(context)
    source = kind.read(context.source, groups, context.timeout())
    report.errors.update((group, str(error)) for group, error in source.errors.items())
    relevant = {
        group: offsets for group, offsets in source.values.items() if not mirroring.isdisjoint(offsets)
    }
    committed = frozenset(key for offsets in relevant.values() for key in offsets) & mirroring
    bounds = _bounds(context, report, committed)
    maps = current_maps(context)
    relevant = {group: translated_positions(offsets, maps, bounds) for group, offsets in relevant.items()}
    destination = kind.read(context.destination, relevant, context.timeout())
    report.errors.update((group, str(error)) for group, error in destination.errors.items())
    changes: list[GroupChange] = []
    for group in sorted(destination.values):
        change = _plan_one(context, kind, group, relevant[group], destination.values[group], bounds)
        if change is not None:
            changes.append(change)
    return changes


def _plan_one(
    context: RefreshContext,
    kind: _Kind,
    group: str,
    source: _Offsets,
    destination: _Offsets,
    bounds: Mapping[Partition, Bounds],
) -> GroupChange | None:
    memory = remember(context.memory.groups.get(group, GroupMemory()), source, destination)
    keep_alive = False
    if not context.dry_run:
        context.memory.groups[group] = memory
        keep_alive = kind.expires and context.memory.keep_alive_due(group, context.clock(), context.rng)
    return plan_group(
        group, source=source, destination=destination, bounds=bounds, memory=memory, keep_alive=keep_alive
    )


def _vacant(
    context: RefreshContext, report: StepReport, kind: _Kind, changes: list[GroupChange]
) -> list[GroupChange]:
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
        reason = occupied(states.get(change.group), kind.types)
        if reason is None:
            vacant.append(change)
        else:
            report.notes.append(reason)
    return vacant


def _commit(context: RefreshContext, report: StepReport, kind: _Kind, changes: list[GroupChange]) -> None:
    live = [part for change in changes if (part := live_part(change, context.is_mirroring)) is not None]
    if not live:
        return
    offsets = {change.group: change.offsets for change in live}
    answers = kind.write(context.destination, offsets, context.timeout())
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
