"""Decisions about topics."""

from collections.abc import Mapping
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kmirror_dagster.broker.admin_types import ConfigValue, TopicDescription
from kmirror_dagster.errors import AuthorizationError, BrokerError, DeadlineError, KmirrorError
from kmirror_dagster.lifecycle import DesiredState
from kmirror_dagster.metadata.outcome import Step, TopicIntent
from kmirror_dagster.metadata.snapshot import ClusterSnapshot
from kmirror_dagster.metadata.topics import TopicWorld, Verdict, plan_topics
from kmirror_dagster.records import TopicRecord
from kmirror_dagster.settings import FilterSettings, PolicySettings

CONFIGS = {"cleanup.policy": ConfigValue("delete"), "max.message.bytes": ConfigValue("1048588")}
UNKNOWN = BrokerError(3, "UNKNOWN_TOPIC_OR_PARTITION", "unknown")


def cluster(*topics: TopicDescription, brokers: int = 3, end: int = 0, start: int = 0) -> ClusterSnapshot:
    """A cluster with these topics, all with the same log start and end."""
    partitions = [(topic.name, index) for topic in topics for index in range(topic.partitions)]
    return ClusterSnapshot(
        brokers=brokers,
        names=frozenset(topic.name for topic in topics),
        topics={topic.name: topic for topic in topics},
        configs={topic.name: CONFIGS for topic in topics},
        starts=dict.fromkeys(partitions, start),
        ends=dict.fromkeys(partitions, end),
    )


def topic(
    name: str = "t", partitions: int = 1, topic_id: str | None = "id", replicas: int = 1
) -> TopicDescription:
    """A topic."""
    return TopicDescription(name, topic_id, partitions, replicas)


def record(name: str = "t", **fields: object) -> TopicRecord:
    """A stored intent; the mirror's own topic unless partitions say otherwise."""
    base = {"partitions": 1, "source_topic_id": "id", "destination_topic_id": "copy"}
    return TopicRecord.model_validate({"mirror": "m", "topic": name, **base, **fields})


def world(
    source: ClusterSnapshot,
    destination: ClusterSnapshot | None = None,
    *records: TopicRecord,
    include: tuple[str, ...] = (".*",),
    missing: frozenset[str] = frozenset(),
    policies: PolicySettings | None = None,
) -> TopicWorld:
    """Everything a decision rests on."""
    return TopicWorld(
        filters=FilterSettings(topics_include=include),
        policies=policies or PolicySettings(),
        known={each.topic: each for each in records},
        source=source,
        destination=destination or cluster(),
        missing_before=missing,
    )


def verdict_of(case: TopicWorld, name: str = "t") -> Verdict:
    """The decision about one topic."""
    return plan_topics(case).verdicts[name]


def intent_of(case: TopicWorld, name: str = "t") -> TopicIntent:
    """The intent of one topic."""
    intent = verdict_of(case, name).intent
    assert intent is not None
    return intent


def test_replicas_are_the_source_s_as_far_as_brokers_allow() -> None:
    """Replicas: the source's, at most the destination's brokers, unless a policy says a number."""
    source = cluster(topic(replicas=3))
    for brokers, policy, expected in ((1, None, 1), (5, None, 3), (5, 2, 2), (1, 4, 4)):
        case = world(source, cluster(brokers=brokers), policies=PolicySettings(replication_factor=policy))
        created = verdict_of(case).create
        assert created is not None
        assert created.replication_factor == expected


def test_internal_topics_are_never_mirrored() -> None:
    """What a broker calls internal has no verdict, whatever the filters say."""
    internal = replace(topic("strange"), internal=True)

    assert plan_topics(world(cluster(internal))).verdicts == {}


@given(
    source=st.integers(1, 4),
    present=st.integers(0, 4),
    known=st.booleans(),
    same_source=st.booleans(),
    same_copy=st.booleans(),
    end=st.sampled_from([0, 5]),
)
def test_a_plan_applied_leaves_nothing_to_do(
    source: int, present: int, known: bool, same_source: bool, same_copy: bool, end: int
) -> None:
    """After creating, growing and storing, the next plan neither creates nor grows, and errors stay errors."""
    here = cluster(topic(partitions=source, topic_id="id" if same_source else "other"))
    copies = [topic(partitions=present, topic_id="copy" if same_copy else "else")] if present else []
    destination = cluster(*copies, end=end)
    records = [record(partitions=max(1, min(present, source)))] if known else []
    first = verdict_of(world(here, destination, *records))
    assert first.intent is not None
    intent = first.intent
    if first.create is not None:
        destination = cluster(topic(partitions=source, topic_id="new"))
        intent = replace(intent, destination_topic_id="new")
    if first.grow is not None:
        destination = cluster(topic(partitions=source, topic_id=copies[0].topic_id), end=end)
        intent = replace(intent, partitions=source)
    stored = record(
        partitions=intent.partitions,
        source_topic_id=intent.source_topic_id,
        destination_topic_id=intent.destination_topic_id,
        error=intent.error,
    )

    second = verdict_of(world(here, destination, stored))

    assert second.create is None
    assert second.grow is None
    assert second.intent is not None
    assert second.intent.error == intent.error
    assert (second.intent.partitions, second.intent.created) == (intent.partitions, False)


@pytest.mark.case("C16")
def test_a_missing_copy_is_made_again_unless_it_is_paused_or_stopped() -> None:
    """Only what should be mirroring is created again."""
    for desired, creates in (
        (DesiredState.MIRRORING, True),
        (DesiredState.PAUSED, False),
        (DesiredState.STOPPED, False),
    ):
        plan = plan_topics(world(cluster(topic()), cluster(), record(desired=desired, stopped_by="operator")))
        verdict = plan.verdicts.get("t")
        assert (verdict is not None and verdict.create is not None) is creates


def test_deletion_takes_two_looks_that_agree() -> None:
    """Gone once: nothing happens; gone twice: an error that stays; a listing that still has it: nothing."""
    gone = replace(cluster(), topic_errors={"t": UNKNOWN})
    listed = replace(gone, names=frozenset({"t"}))
    copy = cluster(topic(topic_id="copy"))

    first = verdict_of(world(gone, copy, record()))
    second = verdict_of(world(gone, copy, record(), missing=frozenset({"t"})))
    after_restart = verdict_of(world(gone, copy, record(error=second.error)))

    assert (first.error, first.missing, first.in_step) == (None, True, False)
    assert "was deleted at the source" in (second.error or "")
    assert after_restart.error == second.error
    assert verdict_of(world(listed, copy, record(), missing=frozenset({"t"}))).error is None
    assert second.create is None
    assert second.grow is None


@pytest.mark.case("C30")
def test_a_topic_that_may_not_be_described_is_not_taken_for_deleted() -> None:
    """A missing right is the topic's error; a lost answer leaves everything as it is."""
    for error, reported in (
        (AuthorizationError("lacks DESCRIBE on topic t"), True),
        (DeadlineError("slow"), False),
    ):
        source = replace(cluster(), topic_errors={"t": error})
        verdict = verdict_of(
            world(source, cluster(topic(topic_id="copy")), record(), missing=frozenset({"t"}))
        )
        assert verdict.error == str(error)
        assert (verdict.intent is not None) is reported
        assert not verdict.missing


@pytest.mark.case("C30")
def test_a_topic_whose_configurations_may_not_be_read_is_not_created() -> None:
    """Without them the copy would be wrong from its first record; a running copy goes on."""
    denied: Mapping[str, KmirrorError] = {"t": AuthorizationError("lacks DESCRIBE_CONFIGS on topic t")}
    source = replace(cluster(topic()), configs={}, config_errors=denied)

    new = verdict_of(world(source))
    running = verdict_of(world(source, cluster(topic(topic_id="copy"), end=5), record()))

    assert new.create is None
    assert "DESCRIBE_CONFIGS" in (new.error or "")
    assert running.in_step
    assert running.error is None


def test_a_recreated_source_topic_stops_its_copy() -> None:
    """Another topic id is an error that names both; the record keeps the former id."""
    intent = intent_of(world(cluster(topic(topic_id="new")), cluster(topic(topic_id="copy")), record()))

    assert "topic id id became new" in (intent.error or "")
    assert intent.source_topic_id == "id"


def test_topic_ids_that_are_not_told_are_not_compared() -> None:
    """Clusters before 2.8 have no topic ids: nothing is concluded from that."""
    case = world(cluster(topic(topic_id=None)), cluster(topic(topic_id=None), end=5), record())

    assert intent_of(case).error is None


@given(start=st.integers(0, 10), length=st.integers(0, 10), source_start=st.integers(0, 20))
def test_only_a_log_that_can_still_be_aligned_is_adopted(start: int, length: int, source_start: int) -> None:
    """A destination topic of unknown origin: empty, and not ahead of where the source begins."""
    destination = cluster(topic(topic_id="copy"), start=start, end=start + length)
    source = cluster(topic(), start=source_start, end=100)

    verdict = verdict_of(world(source, destination))

    assert verdict.adopted is (length == 0 and start <= source_start)
    assert (verdict.error is None) is verdict.adopted


def test_a_topic_named_for_it_is_gone_on_with() -> None:
    """A log that a failback has compared already is adopted with its records; others of the kind are refused."""
    destination = cluster(topic("t", topic_id="copy"), topic("u", topic_id="copy"), end=7)
    policies = PolicySettings(adopt_topics=["t"])
    case = world(cluster(topic("t"), topic("u"), end=9), destination, policies=policies)

    assert verdict_of(case, "t").adopted
    assert "has been written to" in (verdict_of(case, "u").error or "")


def test_a_refused_topic_is_not_taken_for_the_mirror_s_own_later() -> None:
    """A stored error with no partitions does not make somebody else's topic ours."""
    case = world(cluster(topic()), cluster(topic(topic_id="copy"), end=7), record(partitions=0, error="x"))

    assert "has been written to" in (intent_of(case).error or "")


def test_a_stopped_topic_comes_back_only_with_its_filter() -> None:
    """What a person stopped is left alone; what a filter stopped is looked at again once it is selected."""
    source, copy = cluster(topic()), cluster(topic(topic_id="copy"), end=3)
    by_person = record(desired=DesiredState.STOPPED, stopped_by="operator")
    by_filter = record(desired=DesiredState.STOPPED, stopped_by="filter")

    assert plan_topics(world(source, copy, by_person)).verdicts == {}
    assert plan_topics(world(source, copy, by_filter, include=("other",))).verdicts == {}
    again = intent_of(world(source, copy, by_filter))
    assert (again.stop, again.created, again.error) == (False, False, None)


def test_the_filters_stop_what_they_found_and_exclusions_stop_everything() -> None:
    """Started by name: only an exclusion stops it; found by a filter: no longer being selected does as well."""
    source, copy = cluster(topic()), cluster(topic(topic_id="copy"), end=3)

    assert intent_of(world(source, copy, record(), include=("other",))).stop
    named = record(started_by="operator")
    assert not intent_of(world(source, copy, named, include=("other",))).stop
    excluded = replace(world(source, copy, named), filters=FilterSettings(topics_exclude=("t",)))
    assert intent_of(excluded).stop


@pytest.mark.case("C22")
def test_names_that_differ_in_dot_and_underscore_collide() -> None:
    """The one that would be refused is named together with the other; both new: the first by name wins."""
    two = cluster(topic("a.b"), topic("a_b"), topic("c.d"))
    plan = plan_topics(world(two, cluster(topic("c_d"))))

    assert plan.verdicts["a.b"].error is None
    assert "collides with a.b" in (plan.verdicts["a_b"].error or "")
    assert "collides with c_d" in (plan.verdicts["c.d"].error or "")
    assert plan.verdicts["c.d"].step is Step.CREATION


def test_a_paused_topic_neither_grows_nor_changes() -> None:
    """Paused: no partitions are added and nothing else is kept equal."""
    verdict = verdict_of(
        world(
            cluster(topic(partitions=3)), cluster(topic(topic_id="copy")), record(desired=DesiredState.PAUSED)
        )
    )

    assert verdict.grow is None
    assert not verdict.in_step
    assert verdict.intent is not None
    assert verdict.intent.partitions == 1
