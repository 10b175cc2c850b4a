"""Unmirrored tails in a topic of the new source: whole, once, checked before anything is deleted."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kmirror_dagster.broker.admin import ClusterAdmin
from kmirror_dagster.errors import UsageError
from kmirror_dagster.lifecycle import MirrorState
from kmirror_dagster.recovery import quarantine_topic as room
from kmirror_dagster.recovery.quarantine_topic import TopicQuarantine, quarantine_topic
from kmirror_dagster.verification.ranges import LogEnds, read_ends
from tests.conftest import Clusters
from tests.helpers.kafka import Record, consume, create_topic, produce, produce_transaction
from tests.helpers.nodes import NodeProcess, mirrored
from tests.helpers.pairs import Pair, numbered
from tests.helpers.secured import own_settings
from tests.helpers.waiting import unique_name, wait_until

pytestmark = [pytest.mark.integration, pytest.mark.usefixtures("turnable")]


def tails(clusters: Clusters, topic: str, first: int, end: int) -> dict[tuple[str, int], tuple[int, LogEnds]]:
    """What is to be saved, once the log ends there: the marker of an abort follows the call."""
    admin = ClusterAdmin(own_settings(clusters.source))

    def look() -> dict[tuple[str, int], LogEnds]:
        ends, _ = read_ends(admin, [(topic, 0)])
        return ends if all(each.end == each.stable_end == end for each in ends.values()) else {}

    try:
        return {key: (first, each) for key, each in wait_until(look, 30).items()}
    finally:
        admin.close()


def test_tail_is_saved_once_however_often_it_is_begun(
    clusters: Clusters, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Interrupted in mid-tail and begun again: each record once, aborted ones marked, and the check holds."""
    topic, target = unique_name("diverged"), quarantine_topic(unique_name("m"))
    create_topic(clusters.source.bootstrap, topic)
    odd = [Record(None, b"k", (("h", None), ("h", b"")))]
    produce(clusters.source.bootstrap, topic, [*numbered(30, 0, "a"), *odd])
    produce_transaction(clusters.source.bootstrap, topic, numbered(3, 31, "x"), commit=False)
    wanted = tails(clusters, topic, 10, 35)
    made = TopicQuarantine(clusters.destination.settings(), target, "f1")
    whole = room.tail_pieces

    def broken(*arguments: Any) -> Iterator[Any]:
        for key, records, committed in whole(*arguments):
            yield key, records[:15], committed
            raise KeyboardInterrupt

    monkeypatch.setattr(room, "_CHUNK", 10)
    monkeypatch.setattr(room, "tail_pieces", broken)
    with pytest.raises(KeyboardInterrupt):
        made.save(clusters.source.settings(), wanted)
    monkeypatch.setattr(room, "tail_pieces", whole)
    for _ in range(2):
        (tail,) = made.save(clusters.source.settings(), wanted)
        made.check([tail])
    assert (tail.first, tail.end, tail.records, tail.file) == (10, 35, 24, f"topic:{target}")
    found = consume(clusters.destination.bootstrap, target)
    offsets = [int(dict(record.headers)["kmirror.offset"] or b"") for record in found]
    assert sorted(offsets) == [*range(10, 34)]
    assert [dict(record.headers)["kmirror.committed"] for record in found].count(b"false") == 3
    with pytest.raises(UsageError, match="does not hold the 24 quarantined records"):
        TopicQuarantine(clusters.destination.settings(), target, "f2").check([tail])


@pytest.mark.case("C31")
def test_failback_saves_into_a_topic(clusters: Clusters, node: NodeProcess, tmp_path: Path) -> None:
    """`kmirror failback --format topic`: the tail is in the topic of the new source, both sides are equal."""
    back_node = NodeProcess(tmp_path / "state", clusters.source.bootstrap)
    try:
        back_node.start()
        with mirrored(node, clusters.source.bootstrap, clusters.destination.bootstrap) as forward:
            pair = Pair(forward, back_node, tmp_path / "quarantine")
            topic = forward.topic()
            create_topic(forward.source, topic)
            produce(forward.source, topic, numbered(10, 0, "a"))
            forward.await_states(MirrorState.MIRRORING, topic)
            forward.await_copied(topic)
            pair.fail_over(topic)
            produce(forward.source, topic, numbered(5, 10, "a"))
            produce(forward.destination, topic, numbered(7, 10, "b"))
            done = pair.failback("--yes", "--format", "topic")
            assert done["finished"]
            target = quarantine_topic(forward.name)
            values = [record.value for record in consume(forward.destination, target)]
            assert values == [b"a-%04d" % n for n in range(10, 15)]
            assert not pair.quarantine.exists()
            pair.back.await_copied(topic)
            pair.back.compare(topic)
            pair.back.delete()
    finally:
        back_node.stop()
