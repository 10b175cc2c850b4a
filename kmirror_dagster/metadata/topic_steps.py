"""Steps about topics: look, decide, create, grow, keep configurations equal."""

import time
from collections.abc import Mapping
from dataclasses import replace

from kmirror_dagster.broker.admin_types import ConfigChange
from kmirror_dagster.broker.deadlines import Deadline
from kmirror_dagster.errors import KmirrorError
from kmirror_dagster.metadata import application
from kmirror_dagster.metadata.application import Applied
from kmirror_dagster.metadata.configs import ConfigPlan, desired_configs, plan_configs, replicas_problem
from kmirror_dagster.metadata.context import RefreshContext
from kmirror_dagster.metadata.identity import destination_problem
from kmirror_dagster.metadata.loops import read_other_mirrors
from kmirror_dagster.metadata.memory import Refusal
from kmirror_dagster.metadata.outcome import Step
from kmirror_dagster.metadata.snapshot import head_missing
from kmirror_dagster.metadata.steps import StepReport
from kmirror_dagster.metadata.topics import TopicWorld, Verdict, plan_topics
from kmirror_dagster.records import STATE_TOPIC

_IDS_S = 3.0
_IDS_PAUSE_S = (0.05, 0.15)


def decide(context: RefreshContext) -> None:
    """Decide about every topic and report what stands in the way, each under its own step."""
    loops = _loops(context)
    context.topics = plan_topics(
        TopicWorld(
            filters=context.settings.filters,
            policies=context.settings.policies,
            known=context.known,
            source=context.source_view,
            destination=context.destination_view,
            missing_before=context.memory.missing,
            loops=loops,
        )
    )
    for name, verdict in context.topics.verdicts.items():
        report = context.reports[verdict.step]
        if verdict.error is not None:
            report.errors[name] = verdict.error
        if verdict.note is not None:
            report.notes.append(verdict.note)
        if verdict.intent is not None and verdict.create is None:
            context.intents[name] = verdict.intent
    internal = sorted(name for name in context.source_view.names if name.startswith("__"))
    if internal:
        context.reports[Step.DISCOVERY].notes.append(f"never mirrored: {', '.join(internal)}")


def _loops(context: RefreshContext) -> Mapping[str, str]:
    """Topics that the source mirrors from our destination; what it does not tell is left open, and noted."""
    if context.destination_cluster_id is None or STATE_TOPIC not in context.source_view.names:
        return {}
    others = context.memory.others
    try:
        read_other_mirrors(others, context.source, context.settings.source, timeout_s=context.timeout())
    except KmirrorError as error:
        note = f"loops are not recognised: {STATE_TOPIC} of the source cannot be read: {error}"
        context.reports[Step.DISCOVERY].notes.append(note)
    return others.loops(context.destination_cluster_id)


def create(context: RefreshContext) -> None:
    """Create the topics that are missing at the destination, with all their configurations in the request."""
    verdicts = {name: v for name, v in context.topics.verdicts.items() if v.create is not None}
    if not verdicts:
        return
    with context.reports.running(Step.CREATION) as report:
        new = [verdict.create for verdict in verdicts.values() if verdict.create is not None]
        for topic in new:
            text = f"create with {topic.partitions} partition(s), {topic.replication_factor} replica(s)"
            context.note_change(Step.CREATION, topic.name, f"{text}, {_settings_text(topic.configs)}")
        if context.dry_run:
            return
        check_destination(context)
        outcomes = application.create_topics(context.destination, new, timeout=context.timeout)
        made = [name for name, outcome in outcomes.items() if outcome.error is None]
        ids = _topic_ids(context, made)
        for name, outcome in outcomes.items():
            _store_creation(context, report, verdicts[name], outcome, ids.get(name))


def check_destination(context: RefreshContext) -> None:
    """Make sure right before a request that it goes to the cluster it is meant for.

    Raises:
        KmirrorError: another cluster answers at the destination's address.
    """
    # looked at again: nothing in a creation request says which cluster it is meant for
    expected = context.destination_cluster_id
    if expected is None:
        return
    now = context.destination.cluster_id(timeout_s=context.timeout())
    problem = destination_problem(expected=expected, destination=now)
    if problem is not None:
        raise KmirrorError(problem)


def _topic_ids(context: RefreshContext, names: list[str]) -> Mapping[str, str | None]:
    """Ids of topics just created: librdkafka's answer lacks them, and brokers take a moment to tell.

    One that is not told in time is filled in by the next refresh.
    """
    ids: dict[str, str | None] = {}
    patience = Deadline(_IDS_S)
    while True:
        pending = [name for name in names if name not in ids]
        described = context.destination.topics(pending, timeout_s=context.timeout())
        ids.update((name, topic.topic_id) for name, topic in described.values.items())
        if len(ids) == len(names) or patience.remaining() <= 0:
            return ids
        time.sleep(context.rng.uniform(*_IDS_PAUSE_S))


def _store_creation(
    context: RefreshContext, report: StepReport, verdict: Verdict, outcome: Applied, topic_id: str | None
) -> None:
    assert verdict.intent is not None  # noqa: S101 - a creation always has an intent
    name = verdict.intent.topic
    if application.is_existing(outcome.error):
        report.notes.append(f"{name}: somebody else created it meanwhile, looked at again next time")
        return
    if outcome.error is not None:
        report.errors[name] = str(outcome.error)
        context.intents[name] = replace(
            verdict.intent, partitions=0, created=False, error=str(outcome.error), held={}, synced=()
        )
        return
    report.changes += 1
    context.look_again = True  # its positions and permissions come once it is being mirrored
    synced = tuple(key for key in verdict.intent.synced if key not in outcome.refused)
    context.intents[name] = replace(verdict.intent, destination_topic_id=topic_id, synced=synced)
    unsupported = dict(verdict.configs.unsupported) if verdict.configs is not None else {}
    assert verdict.create is not None  # noqa: S101 - checked by the caller
    _remember_refusals(context, name, verdict.create.configs, outcome.refused)
    problems = unsupported | dict(outcome.refused)
    if problems:
        report.errors[name] = _problems_text(problems)


def grow(context: RefreshContext) -> None:
    """Add the partitions that the source has and the destination has not."""
    wanted = {name: v.grow for name, v in context.topics.verdicts.items() if v.grow is not None}
    if not wanted:
        return
    with context.reports.running(Step.GROWTH) as report:
        for name, growth in wanted.items():
            text = f"grow from {growth.present} to {growth.wanted} partitions"
            context.note_change(Step.GROWTH, name, text)
        if context.dry_run:
            return
        totals = {name: growth.wanted for name, growth in wanted.items()}
        outcomes = context.destination.create_partitions(totals, timeout_s=context.timeout())
        for name, error in outcomes.items():
            if error is not None:
                report.errors[name] = str(error)
                continue
            report.changes += 1
            context.look_again = True
            context.intents[name] = replace(context.intents[name], partitions=wanted[name].wanted)


def sync_configs(context: RefreshContext) -> None:
    """Keep configurations equal by their difference; no request when there is none."""
    with context.reports.running(Step.CONFIGS) as report:
        plans: dict[str, ConfigPlan] = {}
        for name in sorted(context.topics.in_step):
            plan = _plan_configs(context, report, name)
            if plan is not None:
                plans[name] = plan
                held, synced = plan.desired.held, plan.synced
                context.intents[name] = replace(context.intents[name], held=held, synced=synced)
        changes = {name: plan.change for name, plan in plans.items() if plan.change}
        for name, change in changes.items():
            context.note_change(Step.CONFIGS, name, _change_text(change))
        if context.dry_run or not changes:
            return
        outcomes = application.alter_configs(context.destination, changes, timeout=context.timeout)
        for name, outcome in outcomes.items():
            _store_configs(context, report, name, changes[name], outcome)


def _plan_configs(context: RefreshContext, report: StepReport, name: str) -> ConfigPlan | None:
    source, copy = context.source_view.configs.get(name), context.destination_view.configs.get(name)
    if source is None or copy is None:
        view = context.source_view if source is None else context.destination_view
        reason = str(view.config_errors.get(name, "configurations were not answered"))
        _config_error(context, report, name, reason)
        return None
    replicas = context.destination_view.topics[name].replication_factor
    excludes = context.settings.filters.excludes_property
    desired = desired_configs(
        source,
        excludes=excludes,
        replication_factor=replicas,
        aligning=head_missing(context.source_view, context.destination_view, name),
        destination_keys=frozenset(copy),
    )
    lately = context.memory.refused_lately(name, context.clock())
    plan = plan_configs(
        desired,
        copy,
        excludes=excludes,
        synced=frozenset(context.intents[name].synced),
        refused={key: refusal.value for key, refusal in lately.items()},
        revert=context.settings.policies.config_drift == "revert",
    )
    problems = dict(desired.unsupported)
    problems |= {k: r.reason for k, r in lately.items() if desired.values.get(k) == r.value}
    shortage = replicas_problem(copy, replicas)
    texts = [_problems_text(problems)] if problems else []
    texts += [shortage] if shortage is not None else []
    if texts:
        report.errors[name] = "; ".join(texts)
    if plan.drift:
        report.notes.append(f"{name}: set at the destination only, kept: {', '.join(plan.drift)}")
    return plan


def _store_configs(
    context: RefreshContext, report: StepReport, name: str, change: ConfigChange, outcome: Applied
) -> None:
    intent = context.intents[name]
    if outcome.error is not None:
        kept = frozenset(intent.synced) - frozenset(change.sets) | frozenset(change.unsets)
        context.intents[name] = replace(intent, synced=tuple(sorted(kept)))
        _config_error(context, report, name, str(outcome.error))
        return
    if change.unsets or len(outcome.refused) < len(change.sets):
        report.changes += 1
    if outcome.refused:
        kept = frozenset(intent.synced) - frozenset(outcome.refused)
        context.intents[name] = replace(intent, synced=tuple(sorted(kept)))
        _remember_refusals(context, name, change.sets, outcome.refused)
        text = _problems_text(outcome.refused)
        report.errors[name] = "; ".join(filter(None, (report.errors.get(name), text)))


def _config_error(context: RefreshContext, report: StepReport, name: str, reason: str) -> None:
    report.errors[name] = reason
    if context.topics.verdicts[name].adopted:
        # not one record before the held values are in place: timestamps would be rewritten
        context.intents[name] = replace(context.intents[name], partitions=0, created=False, error=reason)


def _remember_refusals(
    context: RefreshContext, name: str, values: Mapping[str, str], refused: Mapping[str, str]
) -> None:
    known = context.memory.refused.setdefault(name, {}) if refused else {}
    for key, reason in refused.items():
        known[key] = Refusal(values.get(key, ""), reason, context.clock())


def _problems_text(problems: Mapping[str, str]) -> str:
    return "; ".join(f"{key} is not mirrored: {reason}" for key, reason in sorted(problems.items()))


def _settings_text(configs: Mapping[str, str]) -> str:
    return ", ".join(f"{key}={value}" for key, value in sorted(configs.items()))


def _change_text(change: ConfigChange) -> str:
    parts = [f"set {_settings_text(change.sets)}"] if change.sets else []
    parts += [f"unset {', '.join(change.unsets)}"] if change.unsets else []
    return "; ".join(parts)
