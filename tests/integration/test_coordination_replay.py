"""The state topic read anew from a copy that holds everything it should not."""

import asyncio
import json

import pytest
from confluent_kafka import Producer

from kmirror_dagster.broker.follower import TopicFollower
from kmirror_dagster.coordination.feed import StateFeed
from kmirror_dagster.coordination.keys import PartitionKey
from kmirror_dagster.coordination.view import StateView
from kmirror_dagster.lifecycle import MirrorState
from kmirror_dagster.records import (
    STATE_TOPIC,
    LeaderRecord,
    MirrorRecord,
    PartitionRecord,
    Record,
    TopicRecord,
    encode_key,
    mirror_owner,
)
from kmirror_dagster.settings import ClusterSettings
from tests.conftest import Clusters
from tests.helpers.kafka import DEADLINE_S, create_topic, producer
from tests.helpers.waiting import unique_name

pytestmark = [pytest.mark.integration, pytest.mark.timeout(120)]

COUNT = 3
COMPACTED = {"cleanup.policy": "compact", "segment.bytes": "1048576"}


class Copy:
    """A topic that is written like the state topic, and otherwise."""

    def __init__(self, bootstrap: str) -> None:
        self.bootstrap = bootstrap
        self.topic = unique_name("state-copy")
        create_topic(bootstrap, self.topic, COUNT, COMPACTED)
        self._plain = producer(bootstrap)

    def put(self, key: bytes, value: bytes | None, partition: int, client: Producer | None = None) -> None:
        writer = client or self._plain
        writer.produce(self.topic, key=key, value=value, partition=partition)
        assert writer.flush(DEADLINE_S) == 0

    def write(self, record: Record, client: Producer | None = None) -> None:
        self.put(record.key(), record.value(), home(record), client)

    def transaction(self) -> Producer:
        """A foreign writer with a transaction that has begun."""
        client = producer(self.bootstrap, {"transactional.id": unique_name("foreign")})
        client.init_transactions(DEADLINE_S)
        client.begin_transaction()
        return client

    def load(self) -> StateView:
        """What a node that starts knows afterwards."""

        async def read() -> StateView:
            view = StateView(COUNT, "copy")
            settings = ClusterSettings(bootstrap_servers=(self.bootstrap,))
            feed = StateFeed(
                view,
                lambda on_records: TopicFollower(
                    settings, self.topic, COUNT, group_id="replay", on_records=on_records
                ),
            )
            try:
                await feed.load(60)
            finally:
                await feed.close(10)
            return view

        return asyncio.run(read())


def home(record: Record) -> int:
    if isinstance(record, LeaderRecord):
        return record.coordinator_partition
    if isinstance(record, PartitionRecord):
        return PartitionKey.of(record).owner(COUNT)
    return mirror_owner(record.mirror, COUNT)


def state(
    partition: int, *, epoch: int, leader: int, to: MirrorState = MirrorState.MIRRORING
) -> PartitionRecord:
    return PartitionRecord(
        mirror="m", topic="t", partition=partition, state=to, state_epoch=epoch, leader_epoch=leader
    )


def leader(partition: int, epoch: int, node: str) -> LeaderRecord:
    return LeaderRecord(coordinator_partition=partition, node_id=node, endpoint="x", epoch=epoch, since_ms=0)


def test_everything_readable_is_replayed_and_the_rest_is_named(clusters: Clusters) -> None:
    """Unknown versions and types, tombstones, aborted and late transactions, epochs out of order: one right view."""
    copy = Copy(clusters.destination.bootstrap)
    mirror = MirrorRecord(
        mirror="m", document={}, source_cluster_id="s", destination_cluster_id="d", created_ms=1
    )
    copy.write(mirror)
    copy.write(TopicRecord(mirror="m", topic="t", partitions=6))
    copy.write(TopicRecord(mirror="m", topic="gone", partitions=1))
    for partition in range(6):
        copy.write(state(partition, epoch=2, leader=2))
    # tombstones: of what is there, of what never was
    copy.put(encode_key("topic", "m", "gone"), None, home(mirror))
    copy.put(encode_key("topic", "m", "never"), None, home(mirror))
    # records of another program version, or of another program
    newer = json.loads(state(1, epoch=9, leader=2).value()) | {"v": 99, "new": {"shape": True}}
    copy.put(state(1, epoch=9, leader=2).key(), json.dumps(newer).encode(), home(state(1, epoch=9, leader=2)))
    copy.put(encode_key("invention", "m"), b'{"v":1}', 0)
    copy.put(b"\xff\x00", b"junk", 1)
    copy.put(
        state(0, epoch=3, leader=3).key(),
        state(0, epoch=3, leader=3).value(),
        (home(state(0, epoch=3, leader=3)) + 1) % COUNT,
    )
    known_plus = json.loads(state(2, epoch=3, leader=2).value()) | {"added_later": 1}
    copy.put(
        state(2, epoch=3, leader=2).key(), json.dumps(known_plus).encode(), home(state(2, epoch=3, leader=2))
    )
    # epochs out of order: a deposed leader's record that slipped in behind its successor's
    copy.write(leader(home(state(3, epoch=1, leader=1)), 5, "successor"))
    copy.write(state(3, epoch=4, leader=5))
    copy.write(state(3, epoch=3, leader=2, to=MirrorState.FAILED))
    # a transaction that was aborted, and one whose writer is gone in the middle
    aborted = copy.transaction()
    copy.write(state(4, epoch=8, leader=8, to=MirrorState.STOPPED), aborted)
    aborted.abort_transaction(DEADLINE_S)
    half = copy.transaction()
    copy.write(state(5, epoch=8, leader=8, to=MirrorState.STOPPED), half)
    copy.write(state(5, epoch=3, leader=2))
    half.abort_transaction(DEADLINE_S)
    view = copy.load()
    assert set(view.mirrors) == {"m"}
    assert set(view.topics["m"]) == {"t"}
    epochs = {name.partition: (record.state, record.state_epoch) for name, record in view.states.items()}
    mirroring = MirrorState.MIRRORING
    assert epochs == {n: (mirroring, epoch) for n, epoch in enumerate((2, 2, 3, 4, 2, 3))}
    assert view.highest_epoch(home(state(3, epoch=1, leader=1))) == 5
    assert len(view.quarantined) == 4
    told = "\n".join(view.quarantined.values())
    assert f"{STATE_TOPIC}/" in told
    for part in ("schema version 99", "unknown record type 'invention'", "is not JSON", "does not belong"):
        assert part in told, told


def test_open_transaction_hides_only_until_it_ends(clusters: Clusters) -> None:
    """A foreign transaction that is left open holds back what comes behind it, and nothing is lost when it ends."""
    copy = Copy(clusters.destination.bootstrap)
    first = state(0, epoch=1, leader=1)
    copy.write(first)
    left_open = copy.transaction()
    copy.put(encode_key("invention", "x"), b"{}", home(first), left_open)
    copy.write(state(0, epoch=2, leader=1))
    name = PartitionKey("m", "t", 0)
    assert copy.load().states[name].state_epoch == 1
    left_open.abort_transaction(DEADLINE_S)
    view = copy.load()
    assert view.states[name].state_epoch == 2
    assert not view.quarantined
