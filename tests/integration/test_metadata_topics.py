"""Topics kept equal, against real brokers: discovery, creation, growth, deletion, recreation."""

from collections.abc import Callable, Iterable, Iterator

import pytest

from kmirror_dagster.broker.admin import ClusterAdmin
from kmirror_dagster.broker.admin_types import Answers, ConfigChange, Configs, ConfigValue, NewTopic
from kmirror_dagster.errors import KmirrorError
from kmirror_dagster.metadata.outcome import Step
from kmirror_dagster.settings import ClusterSettings, FilterSettings, PolicySettings
from tests.conftest import Clusters
from tests.helpers import kafka
from tests.helpers.refreshing import RefreshedMirror, changes_of, commit, errors_of, step_of
from tests.helpers.secured import own_settings
from tests.helpers.waiting import unique_name, wait_until

pytestmark = pytest.mark.integration

MirrorMaker = Callable[..., RefreshedMirror]


@pytest.fixture
def mirror_of(clusters: Clusters) -> Iterator[MirrorMaker]:
    """Makes mirrors of the session's clusters: ``mirror_of("orders-.*", topics_exclude=...)``."""
    made: list[RefreshedMirror] = []

    def make(
        *include: str,
        policies: PolicySettings | None = None,
        source_admin: Callable[[ClusterSettings], ClusterAdmin] = ClusterAdmin,
        **filters: tuple[str, ...],
    ) -> RefreshedMirror:
        mirror = RefreshedMirror(
            source=clusters.source.settings(),
            destination=clusters.destination.settings(),
            filters=FilterSettings(topics_include=include, **filters),
            source_cluster_id=clusters.source.cluster_id,
            policies=policies or PolicySettings(),
            source_admin=source_admin,
        )
        made.append(mirror)
        return mirror

    yield make
    for mirror in made:
        mirror.close()


@pytest.fixture
def destination(clusters: Clusters) -> Iterator[ClusterAdmin]:
    """Admin client of the destination."""
    admin = ClusterAdmin(own_settings(clusters.destination))
    yield admin
    admin.close()


def overrides_of(admin: ClusterAdmin, topic: str) -> dict[str, str | None]:
    """Values set on the topic itself."""
    configs = admin.topic_configs([topic]).values[topic]
    return {key: entry.value for key, entry in configs.items() if entry.is_override}


def gone(admin: ClusterAdmin, topic: str) -> bool:
    """Whether a topic is no longer described."""
    return topic in admin.topics([topic]).errors


def test_selected_topics_are_created_with_the_source_s_partitions(
    clusters: Clusters, mirror_of: MirrorMaker, destination: ClusterAdmin
) -> None:
    """A topic the filters select appears at the destination within one refresh, others do not."""
    wanted, other = unique_name("orders"), unique_name("other")
    kafka.create_topic(clusters.source.bootstrap, wanted, partitions=3)
    kafka.create_topic(clusters.source.bootstrap, other)
    mirror = mirror_of(wanted)

    outcome = mirror.refresh()

    assert [(t.topic, t.partitions, t.created, t.error) for t in outcome.topics] == [(wanted, 3, True, None)]
    assert destination.topics([wanted]).values[wanted].partitions == 3
    assert gone(destination, other)
    assert outcome.topics[0].destination_topic_id == destination.topics([wanted]).values[wanted].topic_id
    assert changes_of(mirror.refresh()) == 0


@pytest.mark.case("C18")
def test_configurations_are_part_of_the_creation(
    clusters: Clusters, mirror_of: MirrorMaker, destination: ClusterAdmin
) -> None:
    """A compacted source topic is compacted from its first moment, with what the copy needs held back."""
    topic = unique_name("compacted")
    own = {"cleanup.policy": "compact", "retention.ms": "-1", "segment.bytes": "2000000"}
    own |= {
        "message.timestamp.type": "LogAppendTime",
        "max.message.bytes": "3000000",
        "compression.type": "zstd",
    }
    kafka.create_topic(clusters.source.bootstrap, topic, configs=own)
    mirror = mirror_of(topic)
    planned = mirror.planned()

    outcome = mirror.refresh()

    assert [change.step for change in planned] == [Step.CREATION]
    assert "cleanup.policy=compact" in planned[0].text
    assert step_of(outcome, Step.CONFIGS).changes == 0  # nothing was left for a later request
    assert overrides_of(destination, topic) == {
        "cleanup.policy": "compact",
        "retention.ms": "-1",
        "segment.bytes": "2000000",
        "max.message.bytes": "3000000",
        "compression.type": "producer",
        "message.timestamp.type": "CreateTime",
        "message.timestamp.before.max.ms": str(2**63 - 1),
        "message.timestamp.after.max.ms": str(2**63 - 1),
    }
    assert outcome.topics[0].held == {
        "max.message.bytes": "3000000",
        "compression.type": "zstd",
        "message.timestamp.type": "LogAppendTime",
        "message.timestamp.before.max.ms": None,
        "message.timestamp.after.max.ms": None,
    }


class TieredSource(ClusterAdmin):
    """A source whose topics are on tiered storage, which the destination does not have."""

    def topic_configs(self, names: Iterable[str], *, timeout_s: float | None = None) -> Answers[str, Configs]:
        """Effective configurations with tiering switched on."""
        answers = super().topic_configs(names, timeout_s=timeout_s)
        tiered = {"remote.storage.enable": ConfigValue("true", is_override=True)}
        return Answers({name: {**seen, **tiered} for name, seen in answers.values.items()}, answers.errors)


@pytest.mark.case("C19")
def test_a_refused_key_neither_blocks_creation_nor_stays_hidden(
    clusters: Clusters, mirror_of: MirrorMaker, destination: ClusterAdmin
) -> None:
    """The key the destination refuses is named per topic, the rest is applied; it is not tried every time."""
    topic, there = unique_name("tiered"), unique_name("tiered")
    own = {"retention.ms": "86400000", "max.message.bytes": "2000000"}
    kafka.create_topic(clusters.source.bootstrap, topic, configs=own)
    kafka.create_topic(clusters.source.bootstrap, there, configs=own)
    kafka.create_topic(clusters.destination.bootstrap, there)
    mirror = mirror_of(topic, there, source_admin=TieredSource)

    first, second, third = (mirror.refresh() for _ in range(3))

    for outcome in (first, second, third):
        for name in (topic, there):
            assert "remote.storage.enable is not mirrored" in errors_of(outcome)[name]
        assert [(t.partitions, t.error) for t in outcome.topics] == [(1, None)] * 2
    assert changes_of(first) == 2
    assert changes_of(second) == changes_of(third) == 0
    for name in (topic, there):
        assert overrides_of(destination, name).items() >= own.items()


@pytest.mark.case("C19")
def test_excluded_and_cluster_local_keys_are_not_copied_on_either_path(
    clusters: Clusters, mirror_of: MirrorMaker, destination: ClusterAdmin
) -> None:
    """Neither creation nor a later change copies an excluded key or replica throttles."""
    topic = unique_name("excluded")
    own = {"retention.ms": "70000", "max.message.bytes": "2000000"}
    own |= {"leader.replication.throttled.replicas": "0:1", "follower.replication.throttled.replicas": "*"}
    kafka.create_topic(clusters.source.bootstrap, topic, configs=own)
    mirror = mirror_of(topic, topic_properties_exclude=("retention.ms",))

    mirror.refresh()
    created = overrides_of(destination, topic)
    set_configs(own_settings(clusters.source), topic, {"retention.ms": "80000", "segment.ms": "900000"})
    mirror.refresh()
    changed = overrides_of(destination, topic)

    assert created["max.message.bytes"] == "2000000"
    assert changed["segment.ms"] == "900000"
    for seen in (created, changed):
        assert not {"retention.ms", *(key for key in own if "throttled" in key)} & seen.keys()


def set_configs(
    settings: ClusterSettings, topic: str, sets: dict[str, str], unsets: tuple[str, ...] = ()
) -> None:
    """Change overrides of a topic and wait until the broker tells them."""
    admin = ClusterAdmin(settings)
    assert admin.alter_configs({topic: ConfigChange(sets, unsets)}) == {topic: None}
    wait_until(
        lambda: (
            all(overrides_of(admin, topic).get(key) == value for key, value in sets.items())
            and not set(unsets) & overrides_of(admin, topic).keys()
        )
    )
    admin.close()


@pytest.mark.case("C20")
def test_removed_overrides_go_and_the_destination_s_own_stay(
    clusters: Clusters, mirror_of: MirrorMaker, destination: ClusterAdmin
) -> None:
    """An override removed at the source is removed here, even after a restart; one set here only is kept."""
    topic = unique_name("overrides")
    kafka.create_topic(clusters.source.bootstrap, topic, configs={"retention.ms": "60000"})
    mirror = mirror_of(topic)
    mirror.refresh()
    set_configs(own_settings(clusters.destination), topic, {"segment.ms": "700000"})
    set_configs(own_settings(clusters.source), topic, {}, ("retention.ms",))
    mirror.restart()

    outcome = mirror.refresh()

    wait_until(lambda: "retention.ms" not in overrides_of(destination, topic))
    assert overrides_of(destination, topic)["segment.ms"] == "700000"
    assert step_of(outcome, Step.CONFIGS).changes == 1
    assert any("segment.ms" in note for note in step_of(outcome, Step.CONFIGS).notes)
    assert [changes_of(mirror.refresh()) for _ in range(20)] == [0] * 20


@pytest.mark.case("C17")
def test_added_partitions_appear_within_one_refresh(
    clusters: Clusters, mirror_of: MirrorMaker, destination: ClusterAdmin
) -> None:
    """Partitions added at the source are added at the destination by the next refresh."""
    topic = unique_name("growing")
    kafka.create_topic(clusters.source.bootstrap, topic)
    mirror = mirror_of(topic)
    mirror.refresh()
    kafka.grow_topic(clusters.source.bootstrap, topic, 3)

    outcome = mirror.refresh()

    assert outcome.topics[0].partitions == 3
    assert not outcome.topics[0].created
    wait_until(lambda: destination.topics([topic]).values[topic].partitions == 3)
    assert changes_of(mirror.refresh()) == 0


@pytest.mark.case("C17")
def test_more_partitions_at_the_destination_are_refused(clusters: Clusters, mirror_of: MirrorMaker) -> None:
    """A destination topic with more partitions than the source's is an error of that topic, nothing is changed."""
    topic = unique_name("wider")
    kafka.create_topic(clusters.source.bootstrap, topic, partitions=1)
    kafka.create_topic(clusters.destination.bootstrap, topic, partitions=2)
    mirror = mirror_of(topic)

    outcome = mirror.refresh()

    assert changes_of(outcome) == 0
    assert "2 partitions at the destination and 1 at the source" in (outcome.topics[0].error or "")
    assert outcome.topics[0].partitions == 0


def test_a_destination_topic_with_records_is_not_taken_over(
    clusters: Clusters, mirror_of: MirrorMaker
) -> None:
    """A topic that exists and has been written to is refused, also at the next refresh; an empty one is adopted."""
    used, empty = unique_name("used"), unique_name("empty")
    for topic in (used, empty):
        kafka.create_topic(clusters.source.bootstrap, topic)
        kafka.create_topic(clusters.destination.bootstrap, topic)
    kafka.produce(clusters.destination.bootstrap, used, [kafka.Record(b"x")])
    mirror = mirror_of(used, empty)

    mirror.refresh()
    outcome = mirror.refresh()

    by_name = {intent.topic: intent for intent in outcome.topics}
    assert "has been written to" in (by_name[used].error or "")
    assert by_name[used].partitions == 0
    assert by_name[empty].error is None
    assert by_name[empty].partitions == 1


@pytest.mark.case("C22")
def test_a_topic_deleted_at_the_source_is_kept_and_never_made_again(
    clusters: Clusters, mirror_of: MirrorMaker, destination: ClusterAdmin
) -> None:
    """After two refreshes the deletion is the topic's error; the copy stays, and looking does not create the topic."""
    topic = unique_name("deleted")
    kafka.create_topic(clusters.source.bootstrap, topic)
    source = ClusterAdmin(own_settings(clusters.source))
    mirror = mirror_of(topic)
    mirror.refresh()
    kafka.delete_topic(clusters.source.bootstrap, topic)
    wait_until(lambda: topic not in source.topic_names())

    first, second, third = (mirror.refresh() for _ in range(3))

    assert first.topics[0].error is None
    for outcome in (second, third):
        assert "was deleted at the source" in (outcome.topics[0].error or "")
    assert topic in destination.topic_names()
    assert topic not in source.topic_names()
    source.close()


def test_a_topic_recreated_at_the_source_is_an_error_until_the_copy_is_gone(
    clusters: Clusters, mirror_of: MirrorMaker, destination: ClusterAdmin
) -> None:
    """Another topic id at the source stops the topic; with the old copy deleted the new one is mirrored."""
    topic = unique_name("recreated")
    kafka.create_topic(clusters.source.bootstrap, topic)
    source = ClusterAdmin(own_settings(clusters.source))
    mirror = mirror_of(topic)
    former = mirror.refresh().topics[0].source_topic_id
    kafka.delete_topic(clusters.source.bootstrap, topic)
    wait_until(lambda: topic not in source.topic_names())
    kafka.create_topic(clusters.source.bootstrap, topic)

    refused = mirror.refresh().topics[0]
    kafka.delete_topic(clusters.destination.bootstrap, topic)
    wait_until(lambda: topic not in destination.topic_names())
    fresh = mirror.refresh().topics[0]

    assert "recreated at the source" in (refused.error or "")
    assert refused.source_topic_id == former
    assert fresh.error is None
    assert fresh.created
    assert fresh.source_topic_id == source.topics([topic]).values[topic].topic_id != former
    source.close()


@pytest.mark.case("C16")
def test_a_copy_deleted_at_the_destination_is_made_again(
    clusters: Clusters, mirror_of: MirrorMaker, destination: ClusterAdmin
) -> None:
    """A deleted copy is noticed and created anew, and its partitions are told to start over."""
    topic = unique_name("lost")
    kafka.create_topic(clusters.source.bootstrap, topic, partitions=2)
    mirror = mirror_of(topic)
    before = mirror.refresh().topics[0]
    kafka.delete_topic(clusters.destination.bootstrap, topic)
    wait_until(lambda: topic not in destination.topic_names())

    after = mirror.refresh().topics[0]

    assert after.created
    assert after.partitions == 2
    assert after.destination_topic_id != before.destination_topic_id
    assert not mirror.refresh().topics[0].created


@pytest.mark.case("C16")
def test_a_copy_that_somebody_else_made_again_starts_over(
    clusters: Clusters, mirror_of: MirrorMaker, destination: ClusterAdmin
) -> None:
    """A copy deleted and created between two refreshes is noticed by its topic id and configured again."""
    topic = unique_name("swapped")
    kafka.create_topic(clusters.source.bootstrap, topic)
    mirror = mirror_of(topic)
    mirror.refresh()
    kafka.delete_topic(clusters.destination.bootstrap, topic)
    wait_until(lambda: topic not in destination.topic_names())
    kafka.create_topic(clusters.destination.bootstrap, topic)

    after = mirror.refresh().topics[0]

    assert after.created
    assert after.error is None
    wait_until(lambda: overrides_of(destination, topic)["compression.type"] == "producer")


@pytest.mark.case("C22")
def test_names_that_collide_fail_alone(clusters: Clusters, mirror_of: MirrorMaker) -> None:
    """Only the topic whose name collides is refused, naming the other; odd names are mirrored."""
    stem = unique_name("n").replace("-", "")
    names = [f"{stem}.b", f"{stem}-1", stem, stem + "x" * (249 - len(stem))]
    for name in names:
        kafka.create_topic(clusters.source.bootstrap, name)
    kafka.create_topic(clusters.destination.bootstrap, f"{stem}_b")
    mirror = mirror_of(f"{stem}.*")

    outcome = mirror.refresh()

    errors = {intent.topic: intent.error for intent in outcome.topics}
    assert f"collides with {stem}_b" in (errors.pop(f"{stem}.b") or "")
    assert errors == dict.fromkeys(names[1:])


def test_patterns_match_whole_names_and_internal_topics_are_listed_as_left_out(
    clusters: Clusters, mirror_of: MirrorMaker
) -> None:
    """A pattern is no prefix, and internal topics are never mirrored even when selected."""
    topic = unique_name("whole")
    kafka.create_topic(clusters.source.bootstrap, topic)
    kafka.create_topic(clusters.source.bootstrap, f"{topic}-longer")
    commit(clusters.source.bootstrap, unique_name("g"), [(topic, 0, 0)])
    mirror = mirror_of(topic, "__consumer_offsets", topics_exclude=())

    outcome = mirror.refresh()

    assert [intent.topic for intent in outcome.topics] == [topic]
    assert any("__consumer_offsets" in note for note in step_of(outcome, Step.DISCOVERY).notes)


def test_a_topic_the_filters_no_longer_select_is_to_be_stopped(
    clusters: Clusters, mirror_of: MirrorMaker
) -> None:
    """A discovered topic that falls out of the filters gets a stop; one started by name goes on."""
    found, named = unique_name("found"), unique_name("named")
    for topic in (found, named):
        kafka.create_topic(clusters.source.bootstrap, topic)
    mirror = mirror_of(found, named)
    mirror.refresh()
    mirror.known[named] = mirror.known[named].model_copy(update={"started_by": "operator"})
    mirror.filters = FilterSettings(topics_include=("nothing",))
    mirror.restart()

    outcome = mirror.refresh()

    assert {intent.topic: intent.stop for intent in outcome.topics} == {found: True, named: False}


@pytest.mark.case("E1")
def test_an_impossible_replication_factor_is_reported_and_tried_again(
    clusters: Clusters, mirror_of: MirrorMaker
) -> None:
    """More replicas than brokers: the topic's error says so at each refresh, others are created."""
    topic = unique_name("replicas")
    kafka.create_topic(clusters.source.bootstrap, topic)
    mirror = mirror_of(topic, policies=PolicySettings(replication_factor=3))

    outcomes = [mirror.refresh() for _ in range(2)]

    for outcome in outcomes:
        assert "replication factor of 3" in (outcome.topics[0].error or "")
        assert outcome.topics[0].partitions == 0


def test_another_cluster_at_the_source_s_address_changes_nothing(
    clusters: Clusters, mirror_of: MirrorMaker, destination: ClusterAdmin
) -> None:
    """A source with another cluster id is a hard error of every topic; nothing is created or changed."""
    topic, later = unique_name("identity"), unique_name("identity")
    kafka.create_topic(clusters.source.bootstrap, topic)
    mirror = mirror_of(topic, later)
    mirror.refresh()
    kafka.create_topic(clusters.source.bootstrap, later)
    mirror.source_cluster_id = "somebody-else"
    mirror.restart()

    outcome = mirror.refresh()

    assert "another cluster" in (outcome.source_replaced or "")
    assert [(t.topic, t.error) for t in outcome.topics] == [(topic, outcome.source_replaced)]
    assert changes_of(outcome) == 0
    assert gone(destination, later)


@pytest.mark.case("C21")
def test_one_cluster_at_both_ends_is_refused(clusters: Clusters) -> None:
    """Source and destination with the same cluster id: nothing is done."""
    topic = unique_name("loop")
    kafka.create_topic(clusters.source.bootstrap, topic)
    mirror = RefreshedMirror(
        source=clusters.source.settings(),
        destination=clusters.source.settings(),
        filters=FilterSettings(topics_include=(topic,)),
        source_cluster_id=clusters.source.cluster_id,
    )

    outcome = mirror.refresh()
    mirror.close()

    assert "same cluster" in (outcome.source_replaced or "")
    assert outcome.topics == []


def test_an_unreachable_source_is_reported_and_changes_nothing(clusters: Clusters) -> None:
    """Without the source a refresh ends in time, says so, and leaves every topic as it is."""
    mirror = RefreshedMirror(
        source=ClusterSettings(bootstrap_servers=("127.0.0.1:1",)),
        destination=clusters.destination.settings(),
        filters=FilterSettings(topics_include=(".*",)),
        source_cluster_id="x",
        deadline_s=3,
    )

    outcome = mirror.refresh()
    mirror.close()

    assert not outcome.status.source_reachable
    assert outcome.topics == []
    assert "127.0.0.1:1" in step_of(outcome, Step.CLUSTER_IDS).errors["*"]


def test_creation_errors_are_the_package_s_own(destination: ClusterAdmin) -> None:
    """An admin call's per-item error carries Kafka's name and the topic."""
    topic = unique_name("twice")
    new = NewTopic(topic, 1, 1)
    assert destination.create_topics([new]) == {topic: None}
    error = destination.create_topics([new])[topic]
    assert isinstance(error, KmirrorError)
    assert topic in str(error)
