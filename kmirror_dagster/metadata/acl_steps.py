"""Steps about ACLs: keep them equal, keep writers out of copies, let them in where mirroring has ended."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from kmirror_dagster.broker import codes
from kmirror_dagster.broker.admin import ClusterAdmin
from kmirror_dagster.broker.admin_types import Acl
from kmirror_dagster.broker.missing_rights import principal_of
from kmirror_dagster.errors import AuthorizationError, BrokerError, KmirrorError
from kmirror_dagster.lifecycle import DesiredState, MirrorState
from kmirror_dagster.metadata.acl_release import release_acls
from kmirror_dagster.metadata.acls import (
    DENY,
    EVERYBODY,
    AclsPlan,
    AclsWorld,
    TopicAcls,
    acl_text,
    freeze_of,
    patterns_of,
    plan_acls,
    plan_release,
    writer_text,
    writers,
)
from kmirror_dagster.metadata.context import RefreshContext
from kmirror_dagster.metadata.outcome import Step
from kmirror_dagster.metadata.steps import WHOLE_STEP, StepReport
from kmirror_dagster.metadata.topic_steps import check_destination
from kmirror_dagster.metadata.topics import unchanged_intent

# A principal rarely becomes a super user: that takes a restart of brokers.
_EXEMPT_S = 3600.0
_SETTLE_S = 20.0
# a super user is one for all topics, so a few tell
_ASKED = 3


@dataclass(frozen=True)
class _Freezes:
    """ACLs that deny everybody to write: what to do about them, and what to store, by topic."""

    creates: frozenset[Acl] = frozenset()
    deletes: frozenset[Acl] = frozenset()
    stored: frozenset[str] = frozenset()
    exempt: bool = False


def sync_acls(context: RefreshContext) -> None:
    """Keep ACLs equal by their difference; no altering request when there is none."""
    with context.reports.running(Step.ACLS) as report:
        mirrored = _mirrored(context)
        if not mirrored:
            return
        destination = _list_acls(context, report, context.destination, "destination")
        if destination is None:
            return
        source = None
        if context.settings.filters.acls_include:
            source = _list_acls(context, report, context.source, "source")
        freezes = _plan_freezes(context, report, destination, mirrored)
        plan = None
        if source is not None:
            plan = plan_acls(_world(context, source, destination, mirrored, exempt=freezes.exempt))
            report.notes.extend(plan.notes)
        failed = _apply(context, report, plan or AclsPlan(), freezes)
        _store(context, plan, freezes, mirrored, failed)
        creates = freezes.creates | frozenset(plan.creates if plan else ())
        deletes = freezes.deletes | frozenset(plan.deletes if plan else ())
        _audit(context, report, (destination - deletes) | (creates - failed), mirrored)


def _mirrored(context: RefreshContext) -> frozenset[str]:
    """Topics whose copies are the mirror's and go on being so."""
    kept = {
        name
        for name, record in context.known.items()
        if record.partitions > 0 and record.desired is not DesiredState.STOPPED
    }
    for name, intent in context.intents.items():
        if intent.stop:
            kept.discard(name)
        elif intent.partitions > 0:
            kept.add(name)
    return frozenset(kept)


def _list_acls(
    context: RefreshContext, report: StepReport, admin: ClusterAdmin, side: str
) -> frozenset[Acl] | None:
    """All ACLs of a cluster; None, with the reason in the report, when there are none to be had."""
    try:
        return admin.acls(timeout_s=context.timeout())
    except BrokerError as error:
        if error.code != codes.SECURITY_DISABLED:
            raise
        report.notes.append(f"the {side} has no authorizer: ACLs are not mirrored")
    except AuthorizationError as error:
        report.errors[WHOLE_STEP] = f"{error}; or set filters.acls.include to [] to leave ACLs alone"
    return None


def _world(
    context: RefreshContext,
    source: frozenset[Acl],
    destination: frozenset[Acl],
    mirrored: frozenset[str],
    *,
    exempt: bool,
) -> AclsWorld:
    settings = context.settings
    return AclsWorld(
        filters=settings.filters,
        principal=principal_of(settings.destination),
        source=source,
        destination=destination,
        mirrored=mirrored,
        synced=context.synced_acls,
        recorded={name: record.held_acls for name, record in context.known.items()},
        exempt=exempt,
        hold=settings.policies.read_only == "auto",
    )


# writers are kept out


def _plan_freezes(
    context: RefreshContext, report: StepReport, destination: frozenset[Acl], mirrored: frozenset[str]
) -> _Freezes:
    """Decide about the ACLs that deny everybody to write to copies.

    One is created only when it is stored already that there is one of the mirror's, so that a stop removes it
    whatever happens in between; one that was there before is somebody else's and stays.
    """
    recorded = {name for name, record in context.known.items() if record.read_only_acl} & mirrored
    present = {name for name in mirrored if freeze_of(name) in destination}
    exempt = _exempt(context, report, recorded & present)
    if not exempt or context.settings.policies.read_only == "off":
        gone = frozenset(freeze_of(name) for name in recorded & present)
        return _Freezes(deletes=gone, exempt=exempt)
    return _Freezes(
        creates=frozenset(freeze_of(name) for name in recorded - present),
        stored=frozenset(recorded | (mirrored - present)),
        exempt=True,
    )


def _exempt(context: RefreshContext, report: StepReport, frozen: set[str]) -> bool:
    """Whether the mirror may go on writing where everybody is denied to."""
    memory, now = context.memory, context.clock()
    if frozen:
        rights = context.destination.rights(sorted(frozen)[:_ASKED], timeout_s=context.timeout())
        hit = sorted(name for name, told in rights.topics.items() if "WRITE" not in told)
        exempt = not hit  # of a copy that is gone nothing is told
        if hit:
            report.errors[hit[0]] = "the mirror is no super user (any more): writers cannot be kept out"
        memory.exempt = (exempt, now + _EXEMPT_S)
        return exempt
    if context.settings.policies.read_only == "off":
        return False
    if memory.exempt is not None and now < memory.exempt[1]:
        return memory.exempt[0]
    if context.dry_run:
        report.notes.append("whether the mirror is a super user is tried by the next refresh")
        return False
    try:
        exempt = context.destination.is_exempt(timeout_s=context.timeout())
    except AuthorizationError as error:
        report.notes.append(f"writers cannot be kept out of copies: {error}")
        exempt = False
    memory.exempt = (exempt, now + _EXEMPT_S)
    return exempt


def _audit(
    context: RefreshContext, report: StepReport, acls: Iterable[Acl], mirrored: frozenset[str]
) -> None:
    if context.settings.policies.read_only == "off":
        report.notes.append("read_only is off: whoever the ACLs allow to may write to copies")
        return
    present = frozenset(acls)
    found = writers(present, mirrored, principal=principal_of(context.settings.destination))
    report.notes.extend(writer_text(writer) for writer in found)
    if all(freeze_of(name) in present for name in mirrored):
        report.notes.append("read-only: only super users may write to copies")


# requests


def _apply(context: RefreshContext, report: StepReport, plan: AclsPlan, freezes: _Freezes) -> frozenset[Acl]:
    """Carry a plan out; returns what could not be created."""
    creates = (*sorted(freezes.creates), *plan.creates)
    deletes = (*plan.deletes, *sorted(freezes.deletes))
    for acl in creates:
        context.note_change(Step.ACLS, acl.resource_name, f"create {acl_text(acl)}")
    for acl in deletes:
        context.note_change(Step.ACLS, acl.resource_name, f"delete {acl_text(acl)}")
    if context.dry_run or not (creates or deletes):
        return frozenset()
    check_destination(context)
    failed = _create(context, report, [acl for acl in creates if acl.permission == DENY])
    # nobody is let in anywhere while a DENY that belongs to it is not in force
    barred = {acl.principal for acl in failed}
    allows = [acl for acl in creates if acl.permission != DENY]
    late = [acl for acl in allows if EVERYBODY in barred or acl.principal in barred]
    for acl in late:
        report.errors[acl_text(acl)] = "waits for a DENY that could not be created"
    failed |= _create(context, report, [acl for acl in allows if acl not in late])
    if deletes:
        answers = context.destination.delete_acls(deletes, timeout_s=context.timeout())
        _take_in(report, answers.items())
    return failed | frozenset(late)


def _create(context: RefreshContext, report: StepReport, acls: Sequence[Acl]) -> frozenset[Acl]:
    if not acls:
        return frozenset()
    answers = context.destination.create_acls(acls, timeout_s=context.timeout())
    return _take_in(report, answers.items())


def _take_in(report: StepReport, answers: Iterable[tuple[Acl, KmirrorError | None]]) -> frozenset[Acl]:
    failed: set[Acl] = set()
    for acl, error in answers:
        if error is None:
            report.changes += 1
        else:
            report.errors[acl_text(acl)] = str(error)
            failed.add(acl)
    return frozenset(failed)


def _store(
    context: RefreshContext,
    plan: AclsPlan | None,
    freezes: _Freezes,
    mirrored: frozenset[str],
    failed: frozenset[Acl],
) -> None:
    for name in mirrored & context.intents.keys():
        held = plan.held.get(name, ()) if plan is not None else None
        frozen = name in freezes.stored
        context.intents[name] = replace(context.intents[name], held_acls=held, read_only_acl=frozen)
        record = context.known.get(name)
        if (
            record is None
            or (held is not None and held != record.held_acls)
            or frozen != record.read_only_acl
        ):
            context.look_again = True  # what is stored now is acted on by the next refresh
    if plan is not None and not context.dry_run:
        context.acls = plan.synced - failed


# where mirroring has ended


def settle(context: RefreshContext) -> None:
    """Let writers in at topics that have stopped, where the stop itself could not; without the source."""
    pending = _pending(context)
    if not pending:
        return
    with context.reports.running(Step.ACLS) as report:
        if context.dry_run:
            _note_release(context, pending)
            return
        check_destination(context)
        outcomes = release_acls(
            context.destination, pending, deadline_s=context.deadline.remaining(at_most=_SETTLE_S)
        )
        for name, error in outcomes.items():
            if error is not None:
                report.errors[name] = str(error)
                continue
            intent = unchanged_intent(context.known[name])
            context.intents[name] = replace(
                intent, settled=True, held_acls=pending[name].left, read_only_acl=False
            )


def _note_release(context: RefreshContext, pending: dict[str, TopicAcls]) -> None:
    present = context.destination.acls(timeout_s=context.timeout())
    for name, acls in pending.items():
        plan = plan_release(name, acls, present)
        for acl in plan.creates:
            context.note_change(Step.ACLS, name, f"create {acl_text(acl)}")
        for acl in plan.deletes:
            context.note_change(Step.ACLS, name, f"delete {acl_text(acl)}")


def _pending(context: RefreshContext) -> dict[str, TopicAcls]:
    stopped = {name for name in context.known if _has_stopped(context, name)}
    shared = frozenset(
        acl
        for name, record in context.known.items()
        if name not in stopped
        for acl in patterns_of(record.held_acls)
    )
    pending: dict[str, TopicAcls] = {}
    for name in sorted(stopped - context.intents.keys()):
        record = context.known[name]
        acls = TopicAcls(record.held_acls, record.read_only_acl, shared)
        if acls:
            pending[name] = acls
    return pending


def _has_stopped(context: RefreshContext, name: str) -> bool:
    record = context.known[name]
    if record.desired is not DesiredState.STOPPED:
        return False
    states = (context.mirroring.get((name, partition)) for partition in range(record.partitions))
    return all(state in (None, MirrorState.STOPPED) for state in states)
