"""Consumer group positions and log starts kept equal, against real brokers; records are written to both sides."""

import time
from collections.abc import Callable, Iterator

import pytest
from confluent_kafka import Consumer, TopicPartition

from kmirror_dagster.broker.admin import ClusterAdmin
from kmirror_dagster.broker.admin_types import CommittedOffset, GroupType
from kmirror_dagster.lifecycle import MirrorState
from kmirror_dagster.metadata.memory import KEEP_ALIVE_S
from kmirror_dagster.metadata.outcome import Step
from kmirror_dagster.settings import FilterSettings
from tests.conftest import Clusters
from tests.helpers import kafka
from tests.helpers.refreshing import RefreshedMirror, changes_of, commit, errors_of, step_of
from tests.helpers.secured import own_settings
from tests.helpers.waiting import unique_name, wait_until

pytestmark = pytest.mark.integration

MirrorMaker = Callable[..., RefreshedMirror]


@pytest.fixture
def mirrored(clusters: Clusters) -> Iterator[MirrorMaker]:
    """Makes a mirror of topics that are on both sides and MIRRORING; groups are chosen by their prefix."""
    made: list[RefreshedMirror] = []

    def make(
        *topics: str, groups: str, partitions: int = 1, configs: dict[str, str] | None = None
    ) -> RefreshedMirror:
        for topic in topics:
            kafka.create_topic(clusters.source.bootstrap, topic, partitions, configs)
        mirror = RefreshedMirror(
            source=clusters.source.settings(),
            destination=clusters.destination.settings(),
            filters=FilterSettings(topics_include=topics, groups_include=(groups,)),
            source_cluster_id=clusters.source.cluster_id,
        )
        made.append(mirror)
        mirror.refresh()
        return mirror

    yield make
    for mirror in made:
        mirror.close()


def write_both(clusters: Clusters, topic: str, count: int, partition: int = 0) -> None:
    """Write the same records to both clusters."""
    records = [kafka.Record(b"%d" % index, key=b"k", partition=partition) for index in range(count)]
    for cluster in (clusters.source, clusters.destination):
        kafka.produce(cluster.bootstrap, topic, records)


def positions(clusters: Clusters, group: str) -> dict[tuple[str, int], int]:
    """Committed positions at the destination."""
    return kafka.committed_offsets(clusters.destination.bootstrap, group)


@pytest.mark.case("C24")
def test_zero_no_commit_and_a_number_stay_apart(clusters: Clusters, mirrored: MirrorMaker) -> None:
    """Commit 0 is copied as 0, a partition without a commit gets none, a group without any changes nothing."""
    topic, group = unique_name("zero"), unique_name("zero")
    mirror = mirrored(topic, groups=f"{group}.*", partitions=3)
    for partition in range(3):
        write_both(clusters, topic, 10, partition)
    commit(clusters.source.bootstrap, group, [(topic, 0, 0), (topic, 1, 5)])

    outcome = mirror.refresh()

    assert positions(clusters, group) == {(topic, 0): 0, (topic, 1): 5}
    assert step_of(outcome, Step.GROUPS).changes == 1
    assert changes_of(mirror.refresh()) == 0


@pytest.mark.case("C24")
def test_a_commit_deleted_at_the_source_is_left_at_the_destination(
    clusters: Clusters, mirrored: MirrorMaker
) -> None:
    """The stated rule: what was committed here stays; other groups go on."""
    topic, group = unique_name("gone"), unique_name("gone")
    mirror = mirrored(topic, groups=f"{group}.*")
    write_both(clusters, topic, 10)
    commit(clusters.source.bootstrap, f"{group}-1", [(topic, 0, 4)])
    commit(clusters.source.bootstrap, f"{group}-2", [(topic, 0, 4)])
    mirror.refresh()
    source = ClusterAdmin(own_settings(clusters.source))
    assert source.delete_group_offsets(f"{group}-1", [(topic, 0)]) == {(topic, 0): None}
    commit(clusters.source.bootstrap, f"{group}-2", [(topic, 0, 7)])

    outcome = mirror.refresh()
    source.close()

    assert errors_of(outcome) == {}
    assert positions(clusters, f"{group}-1") == {(topic, 0): 4}
    assert positions(clusters, f"{group}-2") == {(topic, 0): 7}


@pytest.mark.case("E6")
def test_positions_do_not_depend_on_timestamps(clusters: Clusters, mirrored: MirrorMaker) -> None:
    """Equal and unordered timestamps: each position is the very offset, nothing is translated by time."""
    topic, group = unique_name("times"), unique_name("times")
    mirror = mirrored(topic, groups=f"{group}.*")
    now = int(time.time() * 1000)
    times = [now, now, now, now - 5_000, now + 5_000, now - 9_000, now, now]
    for cluster in (clusters.source, clusters.destination):
        kafka.produce(cluster.bootstrap, topic, [kafka.Record(b"x", timestamp=each) for each in times])
    for offset in range(len(times) + 1):
        commit(clusters.source.bootstrap, f"{group}-{offset}", [(topic, 0, offset)])

    mirror.refresh()

    for offset in range(len(times) + 1):
        assert positions(clusters, f"{group}-{offset}") == {(topic, 0): offset}


@pytest.mark.case("C23")
def test_a_position_is_never_ahead_of_the_copy(clusters: Clusters, mirrored: MirrorMaker) -> None:
    """With 60 of 100 records copied the group is at 60; it rises to 100 with the copy."""
    topic, group = unique_name("ahead"), unique_name("ahead")
    mirror = mirrored(topic, groups=group)
    write_both(clusters, topic, 60)
    kafka.produce(clusters.source.bootstrap, topic, [kafka.Record(b"more")] * 40)
    commit(clusters.source.bootstrap, group, [(topic, 0, 100)], "here")

    mirror.refresh()
    held = positions(clusters, group)
    kafka.produce(clusters.destination.bootstrap, topic, [kafka.Record(b"more")] * 40)
    mirror.refresh()

    assert held == {(topic, 0): 60}
    assert positions(clusters, group) == {(topic, 0): 100}


@pytest.mark.case("C23")
def test_a_position_before_the_log_start_moves_up_to_it(clusters: Clusters, mirrored: MirrorMaker) -> None:
    """Where the destination's log starts above the source's position, the position is that start."""
    topic, group = unique_name("below"), unique_name("below")
    mirror = mirrored(topic, groups=group)
    write_both(clusters, topic, 30)
    for cluster in (clusters.source, clusters.destination):
        kafka.delete_records(cluster.bootstrap, topic, 20)
    commit(clusters.source.bootstrap, group, [(topic, 0, 3)])

    mirror.refresh()

    assert positions(clusters, group) == {(topic, 0): 20}


@pytest.mark.case("E5")
def test_metadata_is_kept_and_no_leader_epoch_is_carried_over(
    clusters: Clusters, mirrored: MirrorMaker
) -> None:
    """The committer's text arrives; the source's leader epoch does not, it would mislead validation."""
    topic, group = unique_name("text"), unique_name("text")
    mirror = mirrored(topic, groups=group)
    write_both(clusters, topic, 10)
    source, destination = (
        ClusterAdmin(own_settings(each)) for each in (clusters.source, clusters.destination)
    )
    commit_with_epoch(clusters.source.bootstrap, topic, group, 5)

    mirror.refresh()

    original = source.group_offsets([group]).values[group][topic, 0]
    copy = destination.group_offsets([group]).values[group][topic, 0]
    assert original.leader_epoch is not None
    assert (copy.offset, copy.metadata, copy.leader_epoch) == (5, original.metadata, None)
    source.close()
    destination.close()


def commit_with_epoch(bootstrap: str, topic: str, group: str, offset: int) -> None:
    """Commit as a consumer does: with the leader epoch of what it read."""
    consumer = Consumer({"bootstrap.servers": bootstrap, "group.id": group, "enable.auto.commit": False})
    target = TopicPartition(topic, 0, offset, "a text", 0)
    wait_until(lambda: consumer.commit(offsets=[target], asynchronous=False)[0].error is None)
    consumer.close()


def test_a_position_follows_a_reset_of_the_source_group(clusters: Clusters, mirrored: MirrorMaker) -> None:
    """A source group that is set back takes the destination's with it, also when the node was restarted meanwhile."""
    topic, group = unique_name("reset"), unique_name("reset")
    mirror = mirrored(topic, groups=group)
    write_both(clusters, topic, 50)
    commit(clusters.source.bootstrap, group, [(topic, 0, 50)])
    mirror.refresh()
    commit(clusters.source.bootstrap, group, [(topic, 0, 10)])
    mirror.restart()

    mirror.refresh()

    assert positions(clusters, group) == {(topic, 0): 10}


def test_a_position_of_a_destination_consumer_is_not_taken_back(
    clusters: Clusters, mirrored: MirrorMaker
) -> None:
    """What a consumer of the destination has committed beyond the source's position stays, until the source resets."""
    topic, group = unique_name("beyond"), unique_name("beyond")
    mirror = mirrored(topic, groups=group)
    write_both(clusters, topic, 50)
    commit(clusters.source.bootstrap, group, [(topic, 0, 20)])
    mirror.refresh()
    commit_with_epoch(clusters.destination.bootstrap, topic, group, 40)

    kept = mirror.refresh()
    beyond = positions(clusters, group)
    commit(clusters.source.bootstrap, group, [(topic, 0, 5)])
    mirror.refresh()

    assert changes_of(kept) == 0
    assert beyond == {(topic, 0): 40}
    assert positions(clusters, group) == {(topic, 0): 5}


def test_a_group_with_members_at_the_destination_is_left_alone(
    clusters: Clusters, mirrored: MirrorMaker
) -> None:
    """While somebody consumes with the group here its position is not touched; afterwards it follows."""
    topic, group = unique_name("busy"), unique_name("busy")
    mirror = mirrored(topic, groups=group)
    write_both(clusters, topic, 30)
    commit(clusters.source.bootstrap, group, [(topic, 0, 25)])
    consumer = Consumer(
        {"bootstrap.servers": clusters.destination.bootstrap, "group.id": group, "enable.auto.commit": False}
    )
    consumer.subscribe([topic])
    wait_until(lambda: consumer.poll(0.1) is None and bool(consumer.assignment()))

    outcome = mirror.refresh()
    consumer.close()
    destination = ClusterAdmin(own_settings(clusters.destination))
    wait_until(lambda: destination.describe_groups([group]).values[group].state in ("Empty", "Dead"))
    mirror.refresh()
    destination.close()

    assert errors_of(outcome) == {}
    assert any("in use at the destination" in note for note in step_of(outcome, Step.GROUPS).notes)
    assert positions(clusters, group) == {(topic, 0): 25}


def test_positions_of_topics_that_are_not_mirroring_are_left_alone(
    clusters: Clusters, mirrored: MirrorMaker
) -> None:
    """Neither before MIRRORING nor after a stop is a position written, not even when the stop comes in between."""
    topic, group = unique_name("stopped"), unique_name("stopped")
    mirror = mirrored(topic, groups=group)
    write_both(clusters, topic, 30)
    commit(clusters.source.bootstrap, group, [(topic, 0, 25)])

    class StoppedMeanwhile(dict[tuple[str, int], MirrorState]):
        """MIRRORING at the first look, STOPPED at every later one."""

        looks = 0

        def get(self, key: object, default: object = None) -> object:  # type: ignore[override]
            self.looks += 1
            return MirrorState.MIRRORING if self.looks == 1 else MirrorState.STOPPED

    for states in (
        {(topic, 0): MirrorState.PAUSED},
        {(topic, 0): MirrorState.STOPPED},
        {},
        StoppedMeanwhile(),
    ):
        mirror.states = states
        assert changes_of(mirror.refresh()) == 0
    assert positions(clusters, group) == {}


@pytest.mark.case("C22")
def test_odd_group_names_are_synced(clusters: Clusters, mirrored: MirrorMaker) -> None:
    """Slashes, blanks, commas and letters beyond ASCII are part of a name."""
    topic, stem = unique_name("odd"), unique_name("odd")
    groups = [f"{stem}a/b", f"{stem}a b", f"{stem}g,1", f"{stem}ü"]
    mirror = mirrored(topic, groups=f"{stem}.*")
    write_both(clusters, topic, 5)
    for group in groups:
        commit(clusters.source.bootstrap, group, [(topic, 0, 3)])

    mirror.refresh()

    assert [positions(clusters, group) for group in groups] == [{(topic, 0): 3}] * 4


@pytest.mark.case("E2")
def test_positions_of_share_groups_are_kept_equal(clusters: Clusters, mirrored: MirrorMaker) -> None:
    """A share group goes on where the source's would, also after a reset; consumer groups are synced beside it."""
    topic, group = unique_name("share"), unique_name("share")
    mirror = mirrored(topic, groups=f"{group}.*")
    write_both(clusters, topic, 5)
    commit(clusters.source.bootstrap, f"{group}-classic", [(topic, 0, 3)])
    source, destination = (
        ClusterAdmin(own_settings(clusters.source)),
        ClusterAdmin(own_settings(clusters.destination)),
    )

    def moved(offset: int) -> bool:
        answers = source.alter_share_group_offsets({group: {(topic, 0): CommittedOffset(offset)}})
        return answers.values.get(group) == {(topic, 0): None}

    def there() -> dict[tuple[str, int], int]:
        found = destination.share_group_offsets([group]).values.get(group, {})
        return {key: committed.offset for key, committed in found.items()}

    wait_until(lambda: moved(3))
    wait_until(lambda: mirror.refresh() and there() == {(topic, 0): 3})
    at_rest = mirror.refresh()
    wait_until(lambda: moved(1))
    wait_until(lambda: mirror.refresh() and there() == {(topic, 0): 1})
    listed = {item.group: item.type for item in destination.groups().groups}
    for admin in (source, destination):
        admin.close()

    assert (changes_of(at_rest), errors_of(at_rest)) == (0, {})
    assert listed[group] is GroupType.SHARE
    assert positions(clusters, f"{group}-classic") == {(topic, 0): 3}


@pytest.mark.case("E2")
def test_a_share_group_in_use_is_left_alone(clusters: Clusters, mirrored: MirrorMaker) -> None:
    """As long as somebody consumes with it at the destination nothing is set, and that is said."""
    from confluent_kafka import ShareConsumer

    topic, group = unique_name("share"), unique_name("share")
    mirror = mirrored(topic, groups=group)
    write_both(clusters, topic, 5)
    source, destination = (
        ClusterAdmin(own_settings(clusters.source)),
        ClusterAdmin(own_settings(clusters.destination)),
    )
    position = {group: {(topic, 0): CommittedOffset(2)}}
    wait_until(lambda: source.alter_share_group_offsets(position).values.get(group) == {(topic, 0): None})
    consumer = ShareConsumer({"bootstrap.servers": clusters.destination.bootstrap, "group.id": group})
    consumer.subscribe([topic])

    def in_use() -> bool:
        consumer.poll(0.2)
        return any(item.group == group and item.state == "Stable" for item in destination.groups().groups)

    wait_until(in_use, 60)
    outcome = mirror.refresh()
    consumer.close()
    for admin in (source, destination):
        admin.close()

    assert changes_of(outcome) == 0
    assert any("in use at the destination" in note for note in step_of(outcome, Step.SHARE_GROUPS).notes)


@pytest.mark.case("E7")
def test_unchanged_positions_are_committed_again_once_a_day(
    clusters: Clusters, mirrored: MirrorMaker
) -> None:
    """Nobody consumes on a standby: positions are kept from expiring, without a request in between."""
    topic, group = unique_name("expire"), unique_name("expire")
    mirror = mirrored(topic, groups=group)
    write_both(clusters, topic, 5)
    commit(clusters.source.bootstrap, group, [(topic, 0, 3)])
    mirror.refresh()
    idle = sum(changes_of(mirror.refresh()) for _ in range(5))

    mirror.clock.advance(KEEP_ALIVE_S)
    renewed, after = changes_of(mirror.refresh()), changes_of(mirror.refresh())

    assert (idle, renewed, after) == (0, 1, 0)


def test_log_starts_are_followed_and_only_while_mirroring(clusters: Clusters, mirrored: MirrorMaker) -> None:
    """Records deleted at the source's head are deleted here, once, and not of a partition that was stopped."""
    topic = unique_name("head")
    mirror = mirrored(topic, groups="none")
    write_both(clusters, topic, 50)
    kafka.delete_records(clusters.source.bootstrap, topic, 20)

    mirror.states = {(topic, 0): MirrorState.STOPPED}
    stopped = changes_of(mirror.refresh())
    mirror.states = {(topic, 0): MirrorState.MIRRORING}
    followed, after = changes_of(mirror.refresh()), changes_of(mirror.refresh())

    assert (stopped, followed, after) == (0, 1, 0)
    assert kafka.log_range(clusters.destination.bootstrap, topic) == (20, 50)


def test_a_log_start_beyond_the_copy_is_not_followed(clusters: Clusters, mirrored: MirrorMaker) -> None:
    """What was not copied yet and is gone at the source is a loss for the partition to settle: nothing is cut."""
    topic = unique_name("loss")
    mirror = mirrored(topic, groups="none")
    write_both(clusters, topic, 20)
    kafka.produce(clusters.source.bootstrap, topic, [kafka.Record(b"x")] * 30)
    kafka.delete_records(clusters.source.bootstrap, topic, 40)

    outcome = mirror.refresh()

    assert changes_of(outcome) == 0
    assert kafka.log_range(clusters.destination.bootstrap, topic) == (0, 20)
    assert any("starts at 40" in note for note in step_of(outcome, Step.LOG_STARTS).notes)


def test_a_compacted_topic_with_a_cut_head_gets_its_policy_when_aligned(
    clusters: Clusters, mirrored: MirrorMaker
) -> None:
    """Until its head is cut the copy may be cut and expires nothing; then the source's own policy is in place."""
    topic = unique_name("aligned")
    source, destination = (
        ClusterAdmin(own_settings(each)) for each in (clusters.source, clusters.destination)
    )
    kafka.create_topic(clusters.source.bootstrap, topic, configs={"cleanup.policy": "delete"})
    kafka.produce(clusters.source.bootstrap, topic, [kafka.Record(b"x", key=b"k")] * 30)
    kafka.delete_records(clusters.source.bootstrap, topic, 10)
    change_policy(source, topic, "compact")
    mirror = RefreshedMirror(
        source=clusters.source.settings(),
        destination=clusters.destination.settings(),
        filters=FilterSettings(topics_include=(topic,)),
        source_cluster_id=clusters.source.cluster_id,
    )

    created = mirror.refresh().topics[0]
    while_aligning = overrides(destination, topic)
    idle = changes_of(mirror.refresh())
    kafka.produce(clusters.destination.bootstrap, topic, [kafka.Record(b"x", key=b"k")] * 30)
    kafka.delete_records(clusters.destination.bootstrap, topic, 10)  # what LOG_ALIGNMENT does
    settled = mirror.refresh()
    wait_until(lambda: "retention.bytes" not in overrides(destination, topic))
    mirror.close()

    assert (
        while_aligning.items()
        >= {
            "cleanup.policy": "compact,delete",
            "retention.ms": "-1",
            "retention.bytes": "-1",
        }.items()
    )
    assert created.held["cleanup.policy"] == "compact"
    assert created.held["retention.ms"] is None
    assert idle == 0
    assert step_of(settled, Step.CONFIGS).changes == 1
    assert overrides(destination, topic)["cleanup.policy"] == "compact"
    assert "retention.ms" not in overrides(destination, topic)
    source.close()
    destination.close()


def overrides(admin: ClusterAdmin, topic: str) -> dict[str, str | None]:
    """Values set on the topic itself."""
    configs = admin.topic_configs([topic]).values[topic]
    return {key: entry.value for key, entry in configs.items() if entry.is_override}


def change_policy(admin: ClusterAdmin, topic: str, policy: str) -> None:
    """Set the cleanup policy and wait until the broker tells it."""
    from kmirror_dagster.broker.admin_types import ConfigChange

    assert admin.alter_configs({topic: ConfigChange({"cleanup.policy": policy})}) == {topic: None}
    wait_until(lambda: overrides(admin, topic).get("cleanup.policy") == policy)
