"""The hot copy of the state topic, and its change feed."""

import random

import pytest

from kmirror_dagster.coordination.changes import REMOVAL_RETENTION_MS, Cursor
from kmirror_dagster.coordination.keys import PartitionKey
from kmirror_dagster.coordination.models import ChangeFeed, StateChange
from kmirror_dagster.coordination.view import Change, StateView, decode_entry
from kmirror_dagster.lifecycle import MirrorState
from kmirror_dagster.records import (
    LeaderRecord,
    MirrorRecord,
    PartitionRecord,
    PositionRecord,
    Record,
    TopicRecord,
    encode_key,
    mirror_owner,
    partition_owner,
)
from tests.helpers.coordination import run

COUNT = 4
S = MirrorState


class Log:
    """Writes records to where they belong and gives them to a view."""

    def __init__(self) -> None:
        self.view = StateView(COUNT, "topic-1")
        self.offsets = [0] * COUNT
        self.stored: list[tuple[int, bytes | None, bytes | None]] = []

    def put(
        self, key: bytes | None, value: bytes | None, partition: int, *, at_ms: int = 0, skip: int = 0
    ) -> int:
        self.offsets[partition] += skip
        offset = self.offsets[partition]
        self.offsets[partition] += 1
        self.stored.append((partition, key, value))
        self.view.apply([decode_entry(partition, offset, at_ms, key, value)])
        return offset

    def write(self, record: Record, *, at_ms: int = 0) -> None:
        self.put(record.key(), record.value(), home(record), at_ms=at_ms)

    def delete(self, record: Record, *, at_ms: int = 0) -> None:
        self.put(record.key(), None, home(record), at_ms=at_ms)


def home(record: Record) -> int:
    if isinstance(record, LeaderRecord):
        return record.coordinator_partition
    if isinstance(record, (PartitionRecord, PositionRecord)):
        return partition_owner(record.mirror, record.topic, record.partition, COUNT)
    return mirror_owner(record.mirror, COUNT)


def state(
    partition: int = 0, state: MirrorState = S.MIRRORING, epoch: int = 1, *, leader: int = 1, topic: str = "t"
) -> PartitionRecord:
    return PartitionRecord(
        mirror="m", topic=topic, partition=partition, state=state, state_epoch=epoch, leader_epoch=leader
    )


def topic(partitions: int = 2, name: str = "t") -> TopicRecord:
    return TopicRecord(mirror="m", topic=name, partitions=partitions)


MIRROR = MirrorRecord(
    mirror="m", document={}, source_cluster_id="s", destination_cluster_id="d", created_ms=1
)


def feed(
    log: Log,
    cursor: str | None = None,
    *,
    limit: int = 100,
    now_ms: int = 0,
    mirror: str | None = None,
) -> ChangeFeed:
    return log.view.changes(cursor=cursor, mirror=mirror, limit=limit, now_ms=now_ms)


def seen(changes: list[StateChange]) -> list[tuple[int, int]]:
    return [(change.partition, change.state_epoch) for change in changes]


def test_newest_value_counts() -> None:
    """Each thing has the value written last; a deleted one has none."""
    log = Log()
    for record in (MIRROR, topic(), state(), state(state=S.PAUSING, epoch=2)):
        log.write(record)
    assert log.view.states[PartitionKey("m", "t", 0)].state is S.PAUSING
    log.delete(topic())
    log.delete(MIRROR)
    assert not log.view.mirrors
    assert not log.view.topics


def test_record_told_twice_counts_once() -> None:
    """What is below the known position is passed over, so a follower may bring what was applied directly."""
    log = Log()
    log.write(state())
    changes: list[Change] = []
    log.view.subscribe(changes.extend)
    record = state(state=S.FAILED, epoch=9)
    log.view.apply([decode_entry(home(record), 0, 0, record.key(), record.value())])
    assert not changes
    assert log.view.states[PartitionKey("m", "t", 0)].state is S.MIRRORING


def test_members_follow_intents_and_states() -> None:
    """A partition is a member while it is wanted or has a state, of its owner and of its mirror."""
    log = Log()
    log.write(topic(3))
    names = {PartitionKey("m", "t", p) for p in range(3)}
    assert log.view.partitions_of("m") == names
    assert set().union(*(log.view.led_by(p) for p in range(COUNT))) == names
    log.write(state(1))
    log.delete(topic())
    assert log.view.partitions_of("m") == {PartitionKey("m", "t", 1)}
    log.delete(state(1))
    assert log.view.partitions_of("m") == set()


def test_corrupt_records_are_quarantined_and_the_others_load() -> None:
    """Junk, unknown versions and types are listed with partition and offset; all else is there."""
    log = Log()
    good, bad = state(0), state(1)
    log.write(good)
    log.put(bad.key(), b'{"v":1,"state":', home(bad))
    log.put(bad.key().replace(b"partition", b"offset-map"), b"{}", 0)
    log.put(b"\xff\xfe", b"{}", 1)
    log.put(None, b"{}", 2)
    log.put(topic().key(), topic().value().replace(b'"v":1', b'"v":7'), home(topic()))
    log.write(state(2))
    assert set(log.view.states) == {PartitionKey("m", "t", 0), PartitionKey("m", "t", 2)}
    assert not log.view.topics
    texts = list(log.view.quarantined.values())
    assert len(texts) == 5
    assert all(text.startswith("__mirror_state/") and " offset " in text for text in texts)


def test_corrupt_record_leaves_the_former_value_and_a_good_one_ends_the_quarantine() -> None:
    """A corrupt value changes nothing; the next good one of the same key is taken."""
    log = Log()
    log.write(state())
    log.put(state().key(), b"junk", home(state()))
    assert log.view.states[PartitionKey("m", "t", 0)].state is S.MIRRORING
    assert log.view.quarantined
    log.write(state(state=S.PAUSING, epoch=2))
    assert not log.view.quarantined


def test_record_in_a_foreign_coordinator_partition_is_quarantined() -> None:
    """A record where its key does not belong decides nothing: its owner does not write there."""
    log = Log()
    record = state()
    log.put(record.key(), record.value(), (home(record) + 1) % COUNT)
    assert not log.view.states
    assert "does not belong" in next(iter(log.view.quarantined.values()))


def test_state_of_a_deposed_leader_is_passed_over() -> None:
    """A record with an older leader epoch behind a newer one decides nothing."""
    log = Log()
    log.write(state(epoch=5, leader=3))
    log.write(state(state=S.FAILED, epoch=6, leader=2))
    assert log.view.states[PartitionKey("m", "t", 0)].state is S.MIRRORING


def test_highest_epoch_survives_a_lost_leader_record() -> None:
    """The epoch a new leader must exceed is known from any record of the partition."""
    log = Log()
    record = state(leader=7)
    log.write(record)
    log.put(encode_key("leader", home(record)), b"junk", home(record))
    assert log.view.highest_epoch(home(record)) == 7


def test_replay_in_any_batching_gives_the_same_view() -> None:
    """However a log is cut into batches, and with tombstones and junk in it, the outcome is one."""
    rng = random.Random(3)
    log = Log()
    for _ in range(400):
        some_state = state(rng.randrange(6), rng.choice(list(S)), rng.randrange(9))
        record: Record = rng.choice([some_state, topic(rng.randrange(5)), MIRROR])
        kind = rng.random()
        if kind < 0.1:
            log.delete(record)
        elif kind < 0.2:
            log.put(record.key(), b"junk", home(record))
        else:
            log.write(record)
    other = StateView(COUNT, "topic-1")
    offsets = [0] * COUNT
    entries = []
    for partition, key, value in log.stored:
        entries.append(decode_entry(partition, offsets[partition], 0, key, value))
        offsets[partition] += 1
    while entries:
        size = rng.randrange(1, 50)
        other.apply(entries[:size])
        del entries[:size]
    for attribute in ("mirrors", "topics", "states", "quarantined"):
        assert getattr(other, attribute) == getattr(log.view, attribute)
    assert other.partitions_of("m") == log.view.partitions_of("m")


def test_waiting_for_a_position_ends_when_it_is_reached() -> None:
    """A waiter is woken by records and by the end of a partition alike."""

    async def work() -> None:
        log = Log()
        log.write(state())
        await log.view.reached(home(state()), 1)
        log.view.advance(0, 9)
        await log.view.reached(0, 9)

    run(work)


# change feed


def test_feed_tells_every_change_once_in_order() -> None:
    """A follower with a cursor gets each stored state once, oldest first."""
    log = Log()
    log.write(state(0, S.LOG_ALIGNMENT, 1), at_ms=1)
    log.write(state(1, S.LOG_ALIGNMENT, 1), at_ms=2)
    log.write(state(0, S.MIRRORING, 2), at_ms=3)
    first = feed(log)
    assert seen(first.changes) == [(0, 1), (1, 1), (0, 2)]
    assert not first.reset
    assert feed(log, first.cursor).changes == []
    log.write(state(1, S.MIRRORING, 2), at_ms=4)
    assert seen(feed(log, first.cursor).changes) == [(1, 2)]


def test_feed_is_cut_into_pages() -> None:
    """No answer is longer than asked for, and the pages together are the whole."""
    log = Log()
    for partition in range(25):
        log.write(state(partition), at_ms=partition)
    got: list[StateChange] = []
    cursor: str | None = None
    more = True
    while more:
        page = feed(log, cursor, limit=10)
        assert len(page.changes) <= 10
        got += page.changes
        cursor, more = page.cursor, page.more
    assert sorted(change.partition for change in got) == list(range(25))


def test_new_leader_alone_is_no_change() -> None:
    """A state that was only asserted again under another leader is not told."""
    log = Log()
    log.write(state())
    cursor = feed(log).cursor
    log.write(state(leader=2))
    assert feed(log, cursor).changes == []


def test_removal_is_told() -> None:
    """A deleted state is told as removed, also to a follower that knows it from another node."""
    log = Log()
    log.write(state())
    cursor = feed(log).cursor
    log.delete(state())
    (change,) = feed(log, cursor).changes
    assert (change.removed, change.state, change.previous_state) == (True, None, S.MIRRORING)
    fresh = Log()
    fresh.delete(state())
    assert [c.removed for c in feed(fresh).changes] == [True]


def test_cursor_of_another_state_topic_starts_anew() -> None:
    """A cursor of a topic that was deleted and made again is answered with all there is, and says so."""
    log = Log()
    log.write(state())
    foreign = Cursor("topic-0", 0, (9, 9, 9, 9)).encode()
    answer = feed(log, foreign)
    assert answer.reset
    assert len(answer.changes) == 1
    assert not feed(log, answer.cursor).reset


@pytest.mark.parametrize("text", ["", "x", "bm9wZQ==", "W10=", "8J+YgA=="])
def test_malformed_cursor_starts_anew(text: str) -> None:
    """A cursor that is none is no error: its owner gets the current state."""
    log = Log()
    log.write(state())
    assert len(feed(log, text or "%").changes) == 1


def test_cursor_older_than_removals_are_kept_starts_anew() -> None:
    """A follower that was away for so long that it may have missed a removal gets everything."""
    log = Log()
    log.write(state())
    cursor = feed(log, now_ms=1_000).cursor
    assert not feed(log, cursor, now_ms=1_000 + REMOVAL_RETENTION_MS).reset
    assert feed(log, cursor, now_ms=1_001 + REMOVAL_RETENTION_MS).reset


def test_cursor_of_a_node_that_is_ahead_does_not_go_back() -> None:
    """A node that lags behind the one that gave the cursor tells nothing twice later on."""
    ahead, behind = Log(), Log()
    for log in (ahead, behind):
        log.write(state(0, S.LOG_ALIGNMENT, 1))
    ahead.write(state(0, S.MIRRORING, 2))
    cursor = feed(behind, feed(ahead).cursor).cursor
    behind.write(state(0, S.MIRRORING, 2))
    assert feed(behind, cursor).changes == []


def test_feed_of_one_mirror_passes_over_the_others() -> None:
    """Changes of other mirrors are left out and not offered again."""
    log = Log()
    log.write(state())
    other = state().model_copy(update={"mirror": "other"})
    log.write(other)
    answer = feed(log, mirror="other")
    assert [change.mirror for change in answer.changes] == ["other"]
    assert feed(log, answer.cursor).changes == []


def test_long_history_keeps_the_newest_of_each_partition() -> None:
    """The log of changes is bounded: old ones go, the newest of every partition stays."""
    log = Log()
    for epoch in range(1, 3_000):
        log.write(state(0, rng_state(epoch), epoch))
    log.write(state(1))
    changes = feed(log, limit=10_000).changes
    assert len(changes) < 1_000
    assert (0, 2_999) in seen(changes)
    assert (1, 1) in seen(changes)


def rng_state(epoch: int) -> MirrorState:
    return S.MIRRORING if epoch % 2 else S.FAILED
