"""Steps about clients: quotas are kept equal, users that cannot be copied are listed."""

from kmirror_dagster.broker import codes
from kmirror_dagster.broker.admin_types import Quota, Quotas, entity_text
from kmirror_dagster.broker.connection import CLIENT_SOFTWARE
from kmirror_dagster.broker.missing_rights import principal_of
from kmirror_dagster.errors import AuthorizationError, BrokerError
from kmirror_dagster.metadata.context import RefreshContext
from kmirror_dagster.metadata.outcome import Step
from kmirror_dagster.metadata.quotas import QuotasPlan, QuotasWorld, change_text, plan_quotas
from kmirror_dagster.metadata.steps import WHOLE_STEP, StepReport
from kmirror_dagster.metadata.topic_steps import check_destination


def sync_quotas(context: RefreshContext) -> None:
    """Keep client quotas equal by their difference; no altering request when there is none."""
    if context.settings.policies.client_quotas == "off":
        return
    with context.reports.running(Step.QUOTAS) as report:
        source = _source_quotas(context, report)
        if source is None or not (source or context.synced_quotas):
            return
        try:
            destination = context.destination.client_quotas(timeout_s=context.timeout())
        except AuthorizationError as error:
            report.errors[WHOLE_STEP] = f"{error}; or set policies.client_quotas to off"
            return
        settings = context.settings.destination
        plan = plan_quotas(
            QuotasWorld(
                source=source,
                destination=destination,
                synced=context.synced_quotas,
                user=principal_of(settings).removeprefix("User:"),
                client_id=settings.client_id or CLIENT_SOFTWARE,
            )
        )
        report.notes.extend(plan.notes)
        _apply(context, report, plan)


def _source_quotas(context: RefreshContext, report: StepReport) -> Quotas | None:
    """Quotas of the source; None, with a note, where they may not be read or do not exist yet."""
    try:
        return context.source.client_quotas(timeout_s=context.timeout())
    except AuthorizationError as error:
        report.notes.append(f"client quotas are not mirrored: {error}")
    except BrokerError as error:
        if error.code != codes.UNSUPPORTED_VERSION:
            raise
        report.notes.append("client quotas are not mirrored: the source's brokers do not tell them")
    return None


def _apply(context: RefreshContext, report: StepReport, plan: QuotasPlan) -> None:
    for entity, values in plan.changes.items():
        context.note_change(Step.QUOTAS, entity_text(entity), change_text(values))
    if context.dry_run:
        return
    failed: set[Quota] = set()
    if plan.changes:
        check_destination(context)
        answers = context.destination.alter_client_quotas(plan.changes, timeout_s=context.timeout())
        for entity, error in answers.items():
            if error is None:
                report.changes += 1
                continue
            report.errors[entity_text(entity)] = str(error)
            failed |= {q for q in plan.synced | context.synced_quotas if q.entity == entity}
    # what could not be changed is remembered as it was
    context.quotas = (plan.synced - failed) | (failed & context.synced_quotas)


def list_users(context: RefreshContext) -> None:
    """List users that have to be made at the destination by hand: no broker tells their credentials."""
    with context.reports.running(Step.USERS) as report:
        try:
            missing = context.source.scram_users(timeout_s=context.timeout())
            if missing:
                missing -= context.destination.scram_users(timeout_s=context.timeout())
        except (AuthorizationError, BrokerError) as error:
            report.notes.append(f"SCRAM users, which are not mirrored, are not known: {error}")
            return
        if missing:
            report.notes.append(f"SCRAM users to be made at the destination: {', '.join(sorted(missing))}")
