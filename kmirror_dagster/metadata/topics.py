"""Which topics are mirrored, and what has to happen to their copies: pure decisions, one topic at a time.

Nothing here deletes a topic, at either side: a topic that is gone from the source is reported, its copy is
kept.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from kmirror_dagster.broker import codes
from kmirror_dagster.broker.admin_types import NewTopic, TopicDescription
from kmirror_dagster.errors import AuthorizationError, BrokerError, KmirrorError
from kmirror_dagster.lifecycle import DesiredState
from kmirror_dagster.metadata.configs import DesiredConfigs, desired_configs
from kmirror_dagster.metadata.outcome import Step, TopicIntent
from kmirror_dagster.metadata.snapshot import ClusterSnapshot, head_missing
from kmirror_dagster.records import TopicRecord
from kmirror_dagster.settings import FilterSettings, PolicySettings


@dataclass(frozen=True)
class Growth:
    """Partitions to add to a destination topic."""

    topic: str
    present: int
    wanted: int


@dataclass(frozen=True)
class Verdict:
    """Decision about one topic.

    Attributes:
        step: step that reports `error` and `note`.
        intent: what to store; None leaves the topic as it is.
        create, configs: the topic to create and what its configurations mean.
        grow: partitions to add.
        in_step: configurations, groups and log starts may be kept equal.
        adopted: an empty destination topic that becomes the mirror's.
        missing: not at the source in this refresh; the next one decides.
    """

    step: Step
    intent: TopicIntent | None = None
    create: NewTopic | None = None
    configs: DesiredConfigs | None = None
    grow: Growth | None = None
    in_step: bool = False
    adopted: bool = False
    missing: bool = False
    error: str | None = None
    note: str | None = None


@dataclass(frozen=True)
class TopicWorld:
    """Everything the decision about a topic rests on.

    Attributes:
        known: topic records of the mirror.
        missing_before: topics the refresh before did not find at the source.
        loops: topics the source mirrors from our destination, with the reason to refuse them.
    """

    filters: FilterSettings
    policies: PolicySettings
    known: Mapping[str, TopicRecord]
    source: ClusterSnapshot
    destination: ClusterSnapshot
    missing_before: frozenset[str] = frozenset()
    loops: Mapping[str, str] = field(default_factory=dict[str, str])


@dataclass(frozen=True)
class TopicsPlan:
    """Verdicts of all topics of interest, by name."""

    verdicts: Mapping[str, Verdict] = field(default_factory=dict[str, Verdict])

    @property
    def in_step(self) -> frozenset[str]:
        """Topics whose configurations, groups and log starts are kept equal in this refresh."""
        return frozenset(name for name, verdict in self.verdicts.items() if verdict.in_step)

    @property
    def missing(self) -> frozenset[str]:
        """Topics not found at the source, for the next refresh to decide."""
        return frozenset(name for name, verdict in self.verdicts.items() if verdict.missing)


def topics_of_interest(
    names: frozenset[str], filters: FilterSettings, known: Mapping[str, TopicRecord]
) -> frozenset[str]:
    """Topics to look at: those the filters select and those the mirror already has an intent for."""
    return frozenset(name for name in names if filters.selects_topic(name)) | frozenset(known)


def plan_topics(world: TopicWorld) -> TopicsPlan:
    """Decide about every topic of interest."""
    names = topics_of_interest(world.source.names, world.filters, world.known)
    verdicts: dict[str, Verdict] = {}
    taken = {_metric_name(name): name for name in sorted(world.destination.names)}
    for name in sorted(names):
        verdict = judge(world, name)
        if verdict is None:
            continue
        if verdict.create is not None:
            other = taken.setdefault(_metric_name(name), name)
            if other != name:
                verdict = _collision(verdict, name, other)
        verdicts[name] = verdict
    return TopicsPlan(verdicts)


def judge(world: TopicWorld, name: str) -> Verdict | None:
    """Decide about one topic; None when it is none of the mirror's business."""
    record = world.known.get(name)
    if record is not None and record.desired is DesiredState.STOPPED:
        # what a person stopped stays stopped; what a filter stopped comes back with the filter
        if record.stopped_by != "filter" or not world.filters.selects_topic(name):
            return None
    elif record is not None and _deselected(world.filters, record):
        return Verdict(Step.DISCOVERY, replace(unchanged_intent(record), stop=True))
    source = world.source.topics.get(name)
    if source is None:
        return _judge_absent(world, name, record)
    if source.internal:
        return None
    if name in world.loops:
        return _refused(name, record, Step.DISCOVERY, world.loops[name])
    if record is not None and record.desired is DesiredState.PAUSED:
        return _judge_paused(world, source, record)
    return _judge_present(world, source, record)


def _deselected(filters: FilterSettings, record: TopicRecord) -> bool:
    if filters.excludes_topic(record.topic):
        return True
    return record.started_by == "filter" and not filters.selects_topic(record.topic)


def unchanged_intent(record: TopicRecord) -> TopicIntent:
    """Intent that leaves a topic as its record has it."""
    return TopicIntent(
        topic=record.topic,
        partitions=record.partitions,
        source_topic_id=record.source_topic_id,
        destination_topic_id=record.destination_topic_id,
        error=record.error,
        held=dict(record.source_configs),
        synced=tuple(record.synced_configs),
    )


def _refused(name: str, record: TopicRecord | None, step: Step, error: str) -> Verdict:
    intent = unchanged_intent(record) if record is not None else TopicIntent(name, 0)
    return Verdict(step, replace(intent, error=error), error=error)


# not at the source


def _judge_absent(world: TopicWorld, name: str, record: TopicRecord | None) -> Verdict | None:
    error = world.source.topic_errors.get(name)
    if isinstance(error, AuthorizationError):
        return _refused(name, record, Step.DISCOVERY, str(error))
    if error is not None and not _is_unknown(error):
        return Verdict(Step.DISCOVERY, error=str(error))  # not known this time: everything stays as it is
    if name in world.source.names:
        return Verdict(Step.DISCOVERY, note=f"{name}: listed and not described, looked at again next time")
    if record is None:
        return None
    # One look may be at a broker that has not caught up, so it takes two refreshes, and listing and
    # description must agree.
    if name not in world.missing_before and record.error != _deleted(name):
        note = f"{name}: not found at the source, looked at again next time"
        return Verdict(Step.DELETIONS, unchanged_intent(record), missing=True, note=note)
    return replace(_refused(name, record, Step.DELETIONS, _deleted(name)), missing=True)


def _is_unknown(error: KmirrorError) -> bool:
    return isinstance(error, BrokerError) and error.code == codes.UNKNOWN_TOPIC_OR_PARTITION


def _deleted(name: str) -> str:
    return (
        f"{name} was deleted at the source and the copy is kept as it is: "
        "stop mirroring it to make the copy writable"
    )


# at the source


def _judge_paused(world: TopicWorld, source: TopicDescription, record: TopicRecord) -> Verdict:
    error = _recreated(source, record)
    copy = world.destination.topics.get(source.name)
    if error is not None and copy is not None:
        return _refused(source.name, record, Step.DELETIONS, error)
    return Verdict(
        Step.DISCOVERY, unchanged_intent(record)
    )  # neither configurations nor partitions change while paused


def _judge_present(world: TopicWorld, source: TopicDescription, record: TopicRecord | None) -> Verdict:
    name = source.name
    copy = world.destination.topics.get(name)
    if copy is None:
        error = world.destination.topic_errors.get(name)
        if error is not None and not _is_unknown(error):
            if isinstance(error, AuthorizationError):
                return _refused(name, record, Step.CREATION, str(error))
            return Verdict(Step.CREATION, error=str(error))
        if name in world.destination.names:
            return Verdict(Step.CREATION, note=f"{name}: listed and not described, looked at again next time")
        return _plan_creation(world, source, record)
    ours = record is not None and record.partitions > 0
    fresh = ours and _differs(record.destination_topic_id if record else None, copy.topic_id)
    if ours and not fresh and record is not None:
        error = _recreated(source, record)
        if error is not None:
            return _refused(name, record, Step.DELETIONS, error)
    elif error := _foreign(world, source, copy):
        return _refused(name, record, Step.CREATION, error)
    return _keep(world, source, copy, record, adopted=not ours or fresh)


def _recreated(source: TopicDescription, record: TopicRecord) -> str | None:
    if record.partitions == 0 or not _differs(record.source_topic_id, source.topic_id):
        return None
    return (
        f"{source.name} was recreated at the source (topic id {record.source_topic_id} became "
        f"{source.topic_id}) and the copy is of the former topic: delete the copy to mirror the new one, "
        "or stop mirroring it"
    )


def _differs(before: str | None, now: str | None) -> bool:
    return before is not None and now is not None and before != now


def _foreign(world: TopicWorld, source: TopicDescription, copy: TopicDescription) -> str | None:
    """Why a destination topic that is not the mirror's cannot become so; None when nothing is in the way."""
    if copy.name in world.policies.adopt_topics:
        return None  # alignment compares the last records of both sides before anything is written
    destination = world.destination
    for partition in range(copy.partitions):
        key = (copy.name, partition)
        start, end = destination.starts.get(key), destination.ends.get(key)
        if start is None or end is None:
            reason = destination.offset_errors.get(key)
            where = f"partition {partition} at the destination"
            return f"{copy.name} exists already and {where} cannot be looked into: {reason}"
        # offsets behind the end are handed out once: an emptied log must not end above the source's start
        if end > start or end > world.source.starts.get((source.name, partition), 0):
            return (
                f"{copy.name} exists at the destination, is not this mirror's and has been written to "
                f"(partition {partition}: offsets {start} to {end}): delete it there or exclude the topic"
            )
    return None


def _keep(
    world: TopicWorld,
    source: TopicDescription,
    copy: TopicDescription,
    record: TopicRecord | None,
    *,
    adopted: bool,
) -> Verdict:
    name = source.name
    if copy.partitions > source.partitions:
        error = (
            f"{name} has {copy.partitions} partitions at the destination and {source.partitions} at the "
            "source, partitions cannot be removed: delete the copy or add partitions at the source"
        )
        return _refused(name, record, Step.GROWTH, error)
    unreadable = world.source.config_errors.get(name)
    if adopted and unreadable is not None:
        return _refused(name, record, Step.CREATION, str(unreadable))
    intent = TopicIntent(
        topic=name,
        partitions=copy.partitions,
        source_topic_id=source.topic_id,
        destination_topic_id=copy.topic_id,
        created=adopted,
        held=dict(record.source_configs) if record and not adopted else {},
        synced=tuple(record.synced_configs) if record and not adopted else (),
    )
    grow = None
    if copy.partitions < source.partitions:
        grow = Growth(name, copy.partitions, source.partitions)
    return Verdict(Step.GROWTH, intent, grow=grow, in_step=True, adopted=adopted)


def _plan_creation(world: TopicWorld, source: TopicDescription, record: TopicRecord | None) -> Verdict:
    name = source.name
    unreadable = world.source.config_errors.get(name)
    if unreadable is not None:
        return _refused(name, record, Step.CREATION, str(unreadable))
    configs = world.source.configs.get(name)
    if configs is None:
        return Verdict(Step.CREATION, error=f"configurations of {name} were not answered by the source")
    replicas = world.policies.replication_factor or min(
        source.replication_factor, max(1, world.destination.brokers)
    )
    desired = desired_configs(
        configs,
        excludes=world.filters.excludes_property,
        replication_factor=replicas,
        aligning=head_missing(world.source, ClusterSnapshot(), name),
        destination_keys=world.destination.config_keys,
    )
    new = NewTopic(name, source.partitions, replicas, desired.values)
    intent = TopicIntent(
        topic=name,
        partitions=source.partitions,
        source_topic_id=source.topic_id,
        created=True,
        held=desired.held,
        synced=tuple(sorted(desired.values)),
    )
    note = f"{name}: gone from the destination, made again" if record and record.partitions > 0 else None
    return Verdict(Step.CREATION, intent, create=new, configs=desired, note=note)


def _collision(verdict: Verdict, name: str, other: str) -> Verdict:
    error = (
        f"{name} collides with {other} at the destination (Kafka refuses names that differ only in '.' and "
        f"'_'): exclude one of them or delete {other} there"
    )
    assert verdict.intent is not None  # noqa: S101 - a creation always has an intent
    intent = replace(verdict.intent, partitions=0, created=False, error=error, held={}, synced=())
    return Verdict(Step.CREATION, intent, error=error)


def _metric_name(name: str) -> str:
    return name.replace(".", "_")
