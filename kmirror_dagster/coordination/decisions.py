"""What to do next with one mirror partition, and with one topic's intent. Pure: no I/O, no clock."""

from dataclasses import dataclass
from typing import TypeAlias

from kmirror_dagster.errors import IllegalTransitionError, KmirrorError, UsageError
from kmirror_dagster.lifecycle import (
    ALIGNING_STATES,
    DesiredState,
    MirrorState,
    completion_of,
    next_state,
)
from kmirror_dagster.metadata.outcome import TopicIntent
from kmirror_dagster.records import PartitionRecord, TopicRecord

VERBS = ("start", "pause", "resume", "stop", "recover")


@dataclass(frozen=True)
class Go:
    """Store the next state."""

    target: MirrorState


@dataclass(frozen=True)
class Fail:
    """Store FAILED with its reason."""

    error: str
    retriable: bool


@dataclass(frozen=True)
class Assert:
    """Store the same state again under this leader's epoch, before anything is done about it."""


@dataclass(frozen=True)
class Act:
    """Do the work of the state it is in."""

    state: MirrorState


@dataclass(frozen=True)
class Halt:
    """Stop copying: somebody else stored a state in which nothing is copied."""


@dataclass(frozen=True)
class AwaitRetry:
    """FAILED: retry when its time has come."""


@dataclass(frozen=True)
class Forget:
    """Its mirror or topic is gone: stop copying and delete its records."""


Decision: TypeAlias = Go | Fail | Assert | Act | Halt | AwaitRetry | Forget | None

_AT_REST = frozenset({MirrorState.PAUSED, MirrorState.STOPPED, MirrorState.FAILED})


def decide(
    record: PartitionRecord | None,
    topic: TopicRecord | None,
    *,
    epoch: int,
    running: bool,
    failure: KmirrorError | None = None,
) -> Decision:
    """Decide what a partition's leader does next.

    Args:
        record: stored state, None when there is none yet.
        topic: stored intent, None when it was deleted.
        epoch: this leader's epoch.
        running: whether the partition is being copied here now.
        failure: why copying ended by itself, None when it did not.
    """
    if topic is None:
        return Forget() if record is not None else None
    state = record.state if record else None
    if running and state in _AT_REST:
        return Halt()
    target = next_state(state, topic.desired, previous=record.previous_state if record else None)
    if topic.error is not None and topic.desired is not DesiredState.STOPPED:
        if record is not None and _fails_with_topic(record):
            return Fail(topic.error, retriable=False)
        if target in (MirrorState.LOG_ALIGNMENT, MirrorState.MIRRORING):
            return None  # it starts when its topic can be mirrored
    if target is not None:
        return Go(target)
    if record is None:
        return None
    if failure is not None and record.state is MirrorState.MIRRORING:
        return Fail(str(failure), failure.retriable)
    if record.state is MirrorState.FAILED:
        return AwaitRetry() if record.retriable else None
    if record.state is MirrorState.MIRRORING and running:
        return None
    if record.state is MirrorState.MIRRORING or completion_of(record.state) is not None:
        return Act(record.state) if record.leader_epoch == epoch else Assert()
    return None


def _fails_with_topic(record: PartitionRecord) -> bool:
    """Whether a partition cannot stay as it is when its topic cannot be mirrored (any more)."""
    if record.state is MirrorState.FAILED:
        return record.retriable
    return record.state is MirrorState.MIRRORING or record.state in ALIGNING_STATES


def intent_after_verb(verb: str, topic: TopicRecord, now_ms: int) -> TopicRecord | None:
    """Intent after an operator's verb; None when it stands already.

    Raises:
        IllegalTransitionError: when the verb does not fit the stored intent (KIP-1279, preconditions).
    """
    wanted = {
        "start": DesiredState.MIRRORING,
        "resume": DesiredState.MIRRORING,
        "pause": DesiredState.PAUSED,
        "stop": DesiredState.STOPPED,
    }.get(verb)
    if wanted is None:
        raise UsageError(f"unknown verb {verb!r}; there are {', '.join(VERBS)}")
    if topic.desired is wanted:
        if wanted is not DesiredState.STOPPED or topic.stopped_by == "operator":
            return None
    elif (problem := _VERB_PROBLEMS.get((verb, topic.desired))) is not None:
        raise IllegalTransitionError(f"{topic.mirror}/{topic.topic} is {topic.desired}: {problem}")
    return topic.model_copy(
        update={
            "desired": wanted,
            "stopped_by": "operator" if wanted is DesiredState.STOPPED else None,
            "started_by": "operator" if verb == "start" else topic.started_by,
            "revision": topic.revision + 1,
            "since_ms": now_ms,
        }
    )


_VERB_PROBLEMS = {
    ("start", DesiredState.PAUSED): "use 'resume'",
    ("resume", DesiredState.STOPPED): "use 'start'",
    ("pause", DesiredState.STOPPED): "only a topic that is mirrored can be paused; use 'start' first",
}


def intent_after_refresh(
    mirror: str, topic: TopicRecord | None, intent: TopicIntent, now_ms: int
) -> TopicRecord | None:
    """Intent after a refresh; None when what is stored stands.

    Made against what is stored now, not against what the refresh began with: a verb given meanwhile is kept.
    """
    if intent.settled:
        return _after_settling(topic, intent)
    if topic is None:
        if intent.stop:
            return None
        base = TopicRecord(mirror=mirror, topic=intent.topic, partitions=0, since_ms=now_ms)
    else:
        base = topic
    changed: dict[str, object] = {
        # never shrinks: what was copied stays known; 0 stands for "not the mirror's (any more)"
        "partitions": max(base.partitions, intent.partitions),
        "source_topic_id": intent.source_topic_id or base.source_topic_id,
        "destination_topic_id": intent.destination_topic_id or base.destination_topic_id,
        "error": intent.error,
        "source_configs": dict(intent.held),
        "synced_configs": list(intent.synced),
        "held_acls": base.held_acls if intent.held_acls is None else intent.held_acls,
        "read_only_acl": base.read_only_acl if intent.read_only_acl is None else intent.read_only_acl,
    }
    if intent.error is not None and topic is not None:
        # a refused topic keeps the identity it had: that is what tells a recreated one apart
        for kept in ("source_topic_id", "destination_topic_id", "source_configs", "synced_configs"):
            changed[kept] = getattr(topic, kept)
    if intent.stop and base.desired is not DesiredState.STOPPED:
        changed |= {"desired": DesiredState.STOPPED, "stopped_by": "filter", "since_ms": now_ms}
    elif not intent.stop and base.desired is DesiredState.STOPPED and base.stopped_by == "filter":
        changed |= {"desired": DesiredState.MIRRORING, "stopped_by": None, "since_ms": now_ms}
    after = base.model_copy(update=changed)
    if after == topic:
        return None
    return after.model_copy(update={"revision": base.revision + 1})


def _after_settling(topic: TopicRecord | None, intent: TopicIntent) -> TopicRecord | None:
    if topic is None or topic.desired is not DesiredState.STOPPED:
        return None  # started again meanwhile: the next refresh holds back what is to be held back
    update = {"held_acls": intent.held_acls or (), "read_only_acl": bool(intent.read_only_acl)}
    after = topic.model_copy(update=update)
    return None if after == topic else after.model_copy(update={"revision": topic.revision + 1})
