"""What is decided about a partition and a topic's intent, without anything being done."""

import pytest

from kmirror_dagster.coordination.decisions import (
    Act,
    Assert,
    AwaitRetry,
    Fail,
    Forget,
    Go,
    decide,
    intent_after_refresh,
    intent_after_verb,
)
from kmirror_dagster.coordination.operations import with_included_topics
from kmirror_dagster.errors import ForeignWriteError, IllegalTransitionError, UsageError
from kmirror_dagster.lifecycle import SETTLED_STATES, DesiredState, MirrorState, is_allowed
from kmirror_dagster.metadata.outcome import TopicIntent
from kmirror_dagster.records import PartitionRecord, TopicRecord
from kmirror_dagster.settings import FilterSettings

S = MirrorState
D = DesiredState


def topic(**fields: object) -> TopicRecord:
    return TopicRecord.model_validate({"mirror": "m", "topic": "t", "partitions": 1} | fields)


def record(state: MirrorState, **fields: object) -> PartitionRecord:
    values = {"mirror": "m", "topic": "t", "partition": 0, "state": state, "leader_epoch": 3}
    return PartitionRecord.model_validate(values | fields)


@pytest.mark.parametrize("desired", list(D), ids=str)
@pytest.mark.parametrize("state", [None, *S], ids=str)
@pytest.mark.parametrize("error", [None, "refused"])
def test_decisions_are_allowed_and_end(state: MirrorState | None, desired: D, error: str | None) -> None:
    """Every decision to go somewhere is an allowed transition, and a settled partition is left alone."""
    now = record(state) if state else None
    decision = decide(now, topic(desired=desired, error=error), epoch=3, running=state is S.MIRRORING)
    if isinstance(decision, Go):
        assert is_allowed(state, decision.target)
    if state in SETTLED_STATES - {S.FAILED} and str(state) == str(desired) and error is None:
        assert decision is None


def test_running_copy_is_left_alone() -> None:
    """MIRRORING and copying: nothing to do, whoever stored the state."""
    assert decide(record(S.MIRRORING, leader_epoch=1), topic(), epoch=3, running=True) is None


@pytest.mark.parametrize("state", [S.MIRRORING, S.LOG_ALIGNMENT, S.EPOCH_FENCING, S.ULE_RECOVERY])
def test_new_leader_asserts_a_state_before_it_acts(state: MirrorState) -> None:
    """A state stored by another leader is stored again under the new epoch, then worked on."""
    assert decide(record(state, leader_epoch=2), topic(), epoch=3, running=False) == Assert()
    assert decide(record(state), topic(), epoch=3, running=False) == Act(state)


def test_copy_that_ended_by_itself_fails() -> None:
    """The reason and its flag are what is stored."""
    failure = ForeignWriteError("written at 7")
    decision = decide(record(S.MIRRORING), topic(), epoch=3, running=True, failure=failure)
    assert decision == Fail("written at 7", retriable=False)


def test_stop_comes_before_a_failure() -> None:
    """A copy that failed while a stop is wanted is stopped."""
    decision = decide(
        record(S.MIRRORING), topic(desired=D.STOPPED), epoch=3, running=True, failure=ForeignWriteError("x")
    )
    assert decision == Go(S.STOPPING)


@pytest.mark.parametrize(
    ("retriable", "expected"), [(True, AwaitRetry()), (False, None)], ids=["retriable", "for good"]
)
def test_failed_partition_waits(retriable: bool, expected: object) -> None:
    """FAILED is left by a retry when time may help, otherwise by people."""
    assert decide(record(S.FAILED, retriable=retriable), topic(), epoch=3, running=False) == expected


def test_partition_of_a_deleted_topic_is_forgotten() -> None:
    """Without an intent a stored state is left over, and without a state there is nothing."""
    assert decide(record(S.STOPPED), None, epoch=3, running=False) == Forget()
    assert decide(None, None, epoch=3, running=False) is None


@pytest.mark.parametrize("state", [None, S.STOPPED, S.PAUSED], ids=str)
def test_nothing_starts_while_its_topic_cannot_be_mirrored(state: MirrorState | None) -> None:
    """A topic with an error begins no alignment and no copy."""
    now = record(state) if state else None
    assert decide(now, topic(error="refused"), epoch=3, running=False) is None


@pytest.mark.parametrize("state", [S.MIRRORING, S.LOG_ALIGNMENT], ids=str)
def test_active_partition_fails_with_its_topic(state: MirrorState) -> None:
    """What is copied or aligned fails for good with its topic's reason."""
    decision = decide(record(state), topic(error="deleted"), epoch=3, running=True)
    assert decision == Fail("deleted", retriable=False)


# verbs


def test_verbs_set_what_is_wanted() -> None:
    """Each verb leads to its desired state, and a stop notes who asked for it."""
    assert intent_after_verb("pause", topic(), 9) == topic(desired=D.PAUSED, revision=1, since_ms=9)
    stopped = intent_after_verb("stop", topic(desired=D.PAUSED), 9)
    assert stopped is not None
    assert (stopped.desired, stopped.stopped_by) == (D.STOPPED, "operator")
    started = intent_after_verb("start", stopped, 9)
    assert started is not None
    assert (started.desired, started.stopped_by, started.started_by) == (D.MIRRORING, None, "operator")


@pytest.mark.parametrize(
    ("verb", "desired"), [("start", D.MIRRORING), ("resume", D.MIRRORING), ("pause", D.PAUSED)]
)
def test_verb_that_is_fulfilled_changes_nothing(verb: str, desired: D) -> None:
    """Running a verb twice is harmless."""
    assert intent_after_verb(verb, topic(desired=desired), 9) is None


def test_operators_stop_outlives_the_filter_that_stopped_before() -> None:
    """A topic that only a filter stopped becomes the operator's stop: discovery then leaves it alone."""
    by_filter = topic(desired=D.STOPPED, stopped_by="filter")
    changed = intent_after_verb("stop", by_filter, 9)
    assert changed is not None
    assert intent_after_verb("stop", changed, 10) is None


@pytest.mark.parametrize(
    ("verb", "desired"), [("start", D.PAUSED), ("resume", D.STOPPED), ("pause", D.STOPPED)]
)
def test_verb_that_does_not_fit_is_refused(verb: str, desired: D) -> None:
    """Preconditions of KIP-1279: start from STOPPED, pause from MIRRORING, resume from PAUSED."""
    with pytest.raises(IllegalTransitionError, match=f"m/t is {desired}"):
        intent_after_verb(verb, topic(desired=desired), 9)


def test_unknown_verb_is_a_usage_error() -> None:
    """A verb that is none names those there are."""
    with pytest.raises(UsageError, match="start, pause, resume, stop, recover"):
        intent_after_verb("explode", topic(), 9)


# refreshes


def test_discovered_topic_becomes_an_intent() -> None:
    """A new topic is wanted MIRRORING with what the refresh found out."""
    intent = TopicIntent("t", 3, "s1", "d1", held={"a": None}, synced=("b",))
    stored = intent_after_refresh("m", None, intent, 9)
    assert stored is not None
    assert (stored.partitions, stored.desired, stored.revision) == (3, D.MIRRORING, 1)
    assert (stored.source_configs, stored.synced_configs) == ({"a": None}, ["b"])


def test_refresh_without_news_stores_nothing() -> None:
    """An idle refresh writes no record."""
    intent = TopicIntent("t", 3, "s1", "d1")
    stored = intent_after_refresh("m", None, intent, 9)
    assert intent_after_refresh("m", stored, intent, 10) is None


def test_verb_given_during_a_refresh_is_kept() -> None:
    """The outcome is merged into what is stored now; what an operator wants stays."""
    paused = topic(desired=D.PAUSED, revision=4)
    stored = intent_after_refresh("m", paused, TopicIntent("t", 5), 9)
    assert stored is not None
    assert (stored.partitions, stored.desired) == (5, D.PAUSED)


def test_refused_topic_keeps_its_identity() -> None:
    """An error changes neither ids nor kept configurations: they tell a recreated topic apart."""
    known = topic(source_topic_id="s1", destination_topic_id="d1", source_configs={"a": "1"})
    stored = intent_after_refresh("m", known, TopicIntent("t", 1, "s2", "d2", error="recreated"), 9)
    assert stored == known.model_copy(update={"error": "recreated", "revision": 1})


def test_filter_stops_and_starts_again_only_what_it_stopped() -> None:
    """A topic that leaves the filter is stopped and comes back with it; an operator's stop stays."""
    stop = TopicIntent("t", 1, stop=True)
    stopped = intent_after_refresh("m", topic(), stop, 9)
    assert stopped is not None
    assert (stopped.desired, stopped.stopped_by) == (D.STOPPED, "filter")
    back = intent_after_refresh("m", stopped, TopicIntent("t", 1), 10)
    assert back is not None
    assert (back.desired, back.stopped_by) == (D.MIRRORING, None)
    by_operator = topic(desired=D.STOPPED, stopped_by="operator")
    assert intent_after_refresh("m", by_operator, TopicIntent("t", 1), 10) is None
    assert intent_after_refresh("m", None, stop, 9) is None


def test_partitions_never_shrink() -> None:
    """What was copied stays known while the topic is refused or looks smaller for a moment."""
    stored = intent_after_refresh("m", topic(partitions=6), TopicIntent("t", 0, error="gone"), 9)
    assert stored is not None
    assert stored.partitions == 6


@pytest.mark.parametrize("section", [None, {}, {"topics_include": ["a"]}, {"topics.include": "a"}])
def test_pattern_is_added_to_the_stored_filter(section: dict[str, object] | None) -> None:
    """Whichever way the filter was written, the document then names all patterns once."""
    document = {"mirror": "m", "filters": section}
    filters = FilterSettings(topics_include=("a",))
    changed = with_included_topics(document, filters, ["b.*"])
    assert changed["filters"] == {"topics.include": ["a", "b.*"]}
    assert document["filters"] == section
