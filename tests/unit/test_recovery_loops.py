"""A topic that the source mirrors from our destination is not mirrored back to it."""

import pytest

from kmirror_dagster.lifecycle import DesiredState
from kmirror_dagster.metadata.loops import OtherMirrors
from kmirror_dagster.metadata.topics import judge
from kmirror_dagster.records import MirrorRecord, PartitionRecord, TopicRecord, encode_key
from tests.unit.test_plan_topics import cluster, topic, world

MIRROR = MirrorRecord(
    mirror="back", document={}, source_cluster_id="ours", destination_cluster_id="theirs", created_ms=1
)
TOPIC = TopicRecord(mirror="back", topic="t", partitions=1)


def told(*records: MirrorRecord | TopicRecord) -> OtherMirrors:
    """What a state topic with these records says."""
    others = OtherMirrors()
    entries = [(offset, 1, 0, r.key(), r.value(), None) for offset, r in enumerate(records)]
    others.take(0, entries, len(entries))
    return others


def test_topics_mirrored_from_our_destination_are_loops() -> None:
    """Mirrored or paused there from our destination: a loop; from another cluster: a chain, which is fine."""
    paused = TOPIC.model_copy(update={"topic": "p", "desired": DesiredState.PAUSED})
    others = told(MIRROR, TOPIC, paused)
    assert set(others.loops("ours")) == {"t", "p"}
    assert "mirror 'back' there" in others.loops("ours")["t"]
    assert others.loops("another") == {}
    assert others.loops(None) == {}


@pytest.mark.parametrize("order", [1, -1])
def test_records_come_in_any_order(order: int) -> None:
    """Mirror and topic are in partitions of their own choice."""
    assert set(told(*[MIRROR, TOPIC][::order]).loops("ours")) == {"t"}


def test_stopped_or_deleted_is_no_loop() -> None:
    """After promotion there the way back is free."""
    stopped = TOPIC.model_copy(update={"desired": DesiredState.STOPPED})
    assert told(MIRROR, TOPIC, stopped).loops("ours") == {}
    others = told(MIRROR, TOPIC)
    others.take(0, [(2, 1, 0, encode_key("topic", "back", "t"), None, None)], 3)
    assert others.loops("ours") == {}
    others = told(MIRROR, TOPIC)
    others.take(0, [(2, 1, 0, MIRROR.key(), None, None)], 3)
    assert others.loops("ours") == {}


def test_what_cannot_be_read_says_nothing() -> None:
    """Other records, corrupt ones and those of later versions are passed over."""
    others = told(MIRROR, TOPIC)
    partition = PartitionRecord.model_validate(
        {"mirror": "m", "topic": "t", "partition": 0, "state": "STOPPED"}
    )
    junk = [(None, None), (b"x", b"y"), (TOPIC.key(), b'{"v":99}'), (partition.key(), partition.value())]
    others.take(0, [(offset, 1, 0, key, value, None) for offset, (key, value) in enumerate(junk, 2)], 6)
    assert set(others.loops("ours")) == {"t"}
    assert others.positions == {0: 6}


def test_a_loop_is_refused_by_topic() -> None:
    """The topic gets an error and nothing happens to it; others are mirrored."""
    case = world(cluster(topic("t"), topic("u")))
    case = type(case)(**{**case.__dict__, "loops": {"t": "would be a loop"}})
    refused, free = judge(case, "t"), judge(case, "u")
    assert refused is not None
    assert free is not None
    assert (refused.error, refused.create) == ("would be a loop", None)
    assert free.error is None
    assert free.create is not None
