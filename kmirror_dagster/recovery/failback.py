"""Failback: the old source becomes the copy. Steps that can be interrupted anywhere and gone on with by anybody.

1. `save`: unmirrored tails of topics that have to be made anew go to quarantine, until their logs end no more.
2. `remove`: those topics are deleted, each only while it is the one that was saved.
3. `reverse`: the mirror back is created; it makes what is missing and goes on with the topics that were proven.
4. `follow`: wait until all of them are mirrored.

How far it is stands in the state topic (`records.RecoveryRecord`), written before anything depends on it.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any, Protocol

from pydantic import BaseModel, ConfigDict, Field

from kmirror_dagster.broker.admin import ClusterAdmin
from kmirror_dagster.broker.admin_types import Partition, TopicDescription
from kmirror_dagster.errors import DeadlineError, KmirrorError, UsageError
from kmirror_dagster.records import RecoveryRecord
from kmirror_dagster.recovery.failback_plan import FailbackPlan, TopicAction, TopicPlan
from kmirror_dagster.recovery.fences import fence, unfence
from kmirror_dagster.recovery.formats import QuarantineFormat
from kmirror_dagster.recovery.journal import Journal, StepRunner
from kmirror_dagster.recovery.positions import same_topic_id
from kmirror_dagster.recovery.quarantine import Quarantine, SavedTail, check_saved
from kmirror_dagster.recovery.quarantine_topic import TopicQuarantine
from kmirror_dagster.settings import ClusterSettings
from kmirror_dagster.verification.ranges import LogEnds, read_ends

OPERATION = "failback"

_POLL_S = 0.5
_DELETION_S = 30.0
# how often a tail may have grown while it was saved before somebody is asked to stop the writers
_SAVE_ROUNDS = 10


class FailbackStep(str, Enum):
    """What is to be done next."""

    SAVE = "save"
    REMOVE = "remove"
    REVERSE = "reverse"
    FOLLOW = "follow"
    DONE = "done"

    def __str__(self) -> str:
        return self.value


class FailbackState(BaseModel):
    """Document of a failback's record.

    Attributes:
        saved: tails in quarantine.
        document: settings of the mirror back, `${ENV}` references unresolved.
        unfenced: why the old source's topics could not be fenced against writers; None when they were.
    """

    model_config = ConfigDict(frozen=True)

    plan: FailbackPlan
    document: dict[str, Any]
    saved: list[SavedTail] = Field(default_factory=list[SavedTail])
    unfenced: str | None = None


@dataclass(frozen=True)
class ReverseProgress:
    """How far the mirror back is.

    Attributes:
        waiting: partitions that are not mirrored yet.
        total: partitions it knows.
        errors: topics and partitions that cannot be mirrored, with the reasons.
        missing: topics it does not know yet.
    """

    waiting: int
    total: int
    errors: Mapping[str, str]
    missing: Sequence[str] = ()


class ReverseMirrors(Protocol):
    """Mirrors of the node that writes to the old source."""

    def document(self, mirror: str) -> Mapping[str, Any] | None:
        """Settings document of a mirror; None when there is none of that name."""
        ...

    def is_idle(self, mirror: str) -> bool:
        """Whether all its topics are stopped."""
        ...

    def create(self, document: Mapping[str, Any]) -> None:
        """Create a mirror; harmless when it exists with this document."""
        ...

    def delete(self, mirror: str) -> None:
        """Delete a mirror that is stopped; topics and data stay."""
        ...

    def progress(self, mirror: str, topics: Sequence[str]) -> ReverseProgress:
        """How far these topics are."""
        ...


Tell = Callable[[str, int, int | None], None]


class Failback(StepRunner):
    """Carries out a plan from whatever step it is at.

    Args:
        old_source: cluster the mirror copied from.
        journal: where the steps are stored.
        reverse: mirrors of the node that writes there.
        new_source: cluster that has taken over; needed where quarantine is a topic of it.
        tell: told what is being done, how much of it is done and how much there is.
        follow_s: longest wait for the mirror back to have taken all topics over.
    """

    def __init__(
        self,
        old_source: ClusterSettings,
        journal: Journal,
        reverse: ReverseMirrors,
        *,
        new_source: ClusterSettings | None = None,
        tell: Tell = lambda _text, _done, _total: None,
        follow_s: float = 300.0,
    ) -> None:
        super().__init__(journal)
        self._old_source = old_source
        self._new_source = new_source
        self._reverse = reverse
        self._tell = tell
        self._follow_s = follow_s

    def run(self, record: RecoveryRecord) -> RecoveryRecord:
        """Do all that is left; the answer is the finished record.

        Args:
            record: as stored, or a first one of revision 0.

        Raises:
            StaleEpochError: when somebody else goes on with it.
            KmirrorError: when a step does not end; run it again once the reason is gone.
        """
        return self.run_until(record, lambda current: current.finished)

    def step(self, record: RecoveryRecord) -> RecoveryRecord:
        """One step; the record that says so."""
        state = FailbackState.model_validate(record.document)
        step = FailbackStep(record.step)
        with closing(ClusterAdmin(self._old_source)) as admin:
            match step:
                case FailbackStep.SAVE:
                    return self._save(admin, record, state)
                case FailbackStep.REMOVE:
                    return self._remove(admin, record, state)
                case FailbackStep.REVERSE:
                    self._create_reverse(admin, state)
                    return self._next(record, state, FailbackStep.FOLLOW)
                case _:
                    self._follow(state.plan)
                    return self._next(record, state, FailbackStep.DONE)

    def _next(self, record: RecoveryRecord, state: FailbackState, step: FailbackStep) -> RecoveryRecord:
        update = {
            "step": step.value,
            "document": state.model_dump(mode="json"),
            "error": None,
            "finished": step is FailbackStep.DONE,
        }
        return self.store(record.model_copy(update=update))

    # save

    def _save(self, admin: ClusterAdmin, record: RecoveryRecord, state: FailbackState) -> RecoveryRecord:
        topics = [topic for topic in state.plan.topics if topic.deletes]
        state = state.model_copy(update={"unfenced": fence(admin, [topic.topic for topic in topics])})
        quarantine = self._quarantine(record, state)
        tails = self._unsaved(admin, topics, state.saved)
        for _ in range(_SAVE_ROUNDS):
            if not tails:
                return self._next(record, state, FailbackStep.REMOVE)
            saved = quarantine.save(self._old_source, tails, progress=self._tell)
            state = state.model_copy(update={"saved": [*state.saved, *saved]})
            record = self._next(record, state, FailbackStep.SAVE)
            tails = self._unsaved(admin, topics, state.saved)
        raise _still_written_to(next(iter(tails)))

    def _unsaved(
        self, admin: ClusterAdmin, topics: Sequence[TopicPlan], saved: Sequence[SavedTail]
    ) -> dict[Partition, tuple[int, LogEnds]]:
        """What is not in quarantine yet: first offset and ends of each partition that has more."""
        present = _present(admin, topics)
        ends, errors = read_ends(
            admin, [(name, number) for name, topic in present.items() for number in range(topic.partitions)]
        )
        for error in errors.values():
            raise KmirrorError(f"ends of the old source's logs cannot be looked up: {error}") from error
        first = {(t.topic, p.partition): p.keep_to for t in topics for p in t.partitions}
        for tail in saved:
            key = (tail.topic, tail.partition)
            first[key] = max(first.get(key, 0), tail.end)
        return {
            key: (first.get(key, each.start), each)
            for key, each in ends.items()
            if each.end > max(first.get(key, each.start), each.start)
        }

    def _quarantine(self, record: RecoveryRecord, state: FailbackState) -> Quarantine | TopicQuarantine:
        kept_as = QuarantineFormat(state.plan.quarantine_format)
        if kept_as is not QuarantineFormat.TOPIC:
            return Quarantine(Path(state.plan.quarantine), kept_as)
        if self._new_source is None:
            raise UsageError("quarantine is a topic of the new source, which is not known here")
        return TopicQuarantine(self._new_source, state.plan.quarantine, record.operation_id)

    # remove

    def _remove(self, admin: ClusterAdmin, record: RecoveryRecord, state: FailbackState) -> RecoveryRecord:
        topics = [topic for topic in state.plan.topics if topic.deletes]
        quarantine = self._quarantine(record, state)
        if isinstance(quarantine, TopicQuarantine):
            quarantine.check(state.saved)
        else:
            for tail in state.saved:
                check_saved(tail)
        for number, topic in enumerate(topics):
            self._tell(f"deleting {topic.topic} at the old source", number, len(topics))
            if self._unsaved(admin, [topic], state.saved):
                return self._next(record, state, FailbackStep.SAVE)
            if topic.topic in _present(admin, [topic]):
                # whoever else goes on with this failback has stored a newer step: then nothing is deleted here
                record = self._next(record, state, FailbackStep.REMOVE)
                self._delete(admin, topic)
        return self._next(record, state, FailbackStep.REVERSE)

    def _delete(self, admin: ClusterAdmin, topic: TopicPlan) -> None:
        error = admin.delete_topics([topic.topic]).get(topic.topic)
        deadline = time.monotonic() + _DELETION_S
        while topic.topic in _present(admin, [topic]):
            if error is not None:
                raise KmirrorError(
                    f"topic {topic.topic} cannot be deleted at the old source: {error}"
                ) from error
            if time.monotonic() > deadline:
                raise DeadlineError(
                    f"topic {topic.topic} is still there {_DELETION_S:g} s after it was deleted at the old source "
                    "(are all its brokers up, and delete.topic.enable on?): run the failback again"
                )
            time.sleep(_POLL_S)

    # reverse

    def _create_reverse(self, admin: ClusterAdmin, state: FailbackState) -> None:
        name = state.plan.reverse
        self._tell(f"creating mirror {name}", 0, None)
        existing = self._reverse.document(name)
        idle = existing is None or self._reverse.is_idle(name)
        made = existing is not None and dict(existing) == state.document
        if made and (not idle or self._is_fresh(state.plan)):
            return  # what denies to write to the topics now is the mirror back
        unfence(admin, state.plan.names(TopicAction.RECREATE))
        if existing is not None:
            # one that is stopped is of an earlier round, whatever its settings: its topics would stay stopped
            if not idle:
                raise UsageError(
                    f"mirror {name!r} of the node at the old source has other settings and is not stopped: "
                    "stop and delete it there"
                )
            self._reverse.delete(name)
        self._reverse.create(state.document)

    def _is_fresh(self, plan: FailbackPlan) -> bool:
        """Whether the mirror back has just been made: it has met none of its topics yet."""
        topics = [topic.topic for topic in plan.topics]
        return len(self._reverse.progress(plan.reverse, topics).missing) == len(topics)

    def _follow(self, plan: FailbackPlan) -> None:
        topics = [topic.topic for topic in plan.topics]
        deadline = time.monotonic() + self._follow_s
        while True:
            seen = self._reverse.progress(plan.reverse, topics)
            self._tell(f"mirror {plan.reverse} takes over", seen.total - seen.waiting, seen.total or None)
            if not seen.waiting and not seen.missing:
                return
            if time.monotonic() > deadline:
                errors = "; ".join(f"{name}: {error}" for name, error in sorted(seen.errors.items())[:3])
                left = f"{seen.waiting} partitions, {len(seen.missing)} topics"
                raise DeadlineError(
                    f"mirror {plan.reverse!r} has not taken over {left} within {self._follow_s:g} s"
                    f"{': ' + errors if errors else ''}; it goes on, run the failback again to see it end"
                )
            time.sleep(_POLL_S)


def _present(admin: ClusterAdmin, topics: Sequence[TopicPlan]) -> dict[str, TopicDescription]:
    """Those of the topics that are at the old source and are still the ones that were planned for.

    Raises:
        UsageError: when somebody has made one of them anew and written to it.
    """
    names = frozenset(topic.topic for topic in topics)
    listed = names & admin.topic_names()
    answers = admin.topics(listed)
    for name, error in answers.errors.items():
        if name in admin.topic_names():
            raise KmirrorError(f"topic {name} cannot be described at the old source: {error}") from error
    present: dict[str, TopicDescription] = {}
    for topic in topics:
        found = answers.values.get(topic.topic)
        if found is None:
            continue
        if same_topic_id(topic.old_topic_id, found.topic_id):
            present[topic.topic] = found
        elif not _is_empty(admin, found):
            raise UsageError(
                f"topic {topic.topic} was made anew at the old source and written to since the plan was made: stop "
                "its writers, delete it there, then run the failback again"
            )
    return present


def _is_empty(admin: ClusterAdmin, topic: TopicDescription) -> bool:
    ends, errors = read_ends(admin, [(topic.name, number) for number in range(topic.partitions)])
    return not errors and all(each.start == each.end for each in ends.values())


def _still_written_to(key: Partition) -> UsageError:
    return UsageError(
        f"{key[0]}/{key[1]} is still written to at the old source: stop its writers there, then run the "
        "failback again"
    )


def reverse_document(
    document: Mapping[str, Any],
    plan: FailbackPlan,
    include: Sequence[str],
    *,
    replication_factor: int | None,
) -> dict[str, Any]:
    """Settings document of the mirror back: the clusters exchanged, the filters kept.

    Args:
        document: of the stopped mirror, `${ENV}` references unresolved.
        plan: names it and its topics.
        include: patterns of topics of the mirror back.
        replication_factor: of topics made at the old source; None: those of the new one.
    """
    filters = {
        key: value
        for key, value in dict(document.get("filters") or {}).items()
        if key not in ("topics.include", "topics_include")
    }
    policies = {
        key: value
        for key, value in dict(document.get("policies") or {}).items()
        # where to begin and how many replicas were said of the other cluster
        if key not in ("start", "replication_factor", "adopt_topics")
    }
    adopted = plan.names(TopicAction.CONTINUE)
    if adopted:
        policies["adopt_topics"] = adopted
    if replication_factor is not None:
        policies["replication_factor"] = replication_factor
    return {
        # a schema registry is one cluster's
        **{k: v for k, v in document.items() if k not in ("filters", "policies", "schema_registry")},
        "mirror": plan.reverse,
        "source": document["destination"],
        "destination": document["source"],
        "filters": {**filters, "topics.include": list(include)},
        "policies": policies,
    }


def give_up(
    old_source: ClusterSettings, record: RecoveryRecord, store: Callable[[RecoveryRecord], RecoveryRecord]
) -> RecoveryRecord:
    """End a failback that has deleted nothing yet: writers are let in again, quarantined tails stay.

    Raises:
        StaleEpochError: when somebody goes on with it.
        KmirrorError: when fences cannot be taken away.
    """
    record = store(record)
    state = FailbackState.model_validate(record.document)
    with closing(ClusterAdmin(old_source)) as admin:
        unfence(admin, state.plan.names(TopicAction.RECREATE))
    return store(record.model_copy(update={"finished": True, "error": "given up"}))
