"""Copying between real brokers: the same record at the same offset."""

import random

import pytest

from kmirror_dagster.broker.fetch import FetchSession
from tests.conftest import Clusters
from tests.helpers.copying import Copying, assert_identical, copy_once, mirror_settings, run
from tests.helpers.kafka import (
    Record,
    create_topic,
    delete_records,
    log_range,
    produce,
    produce_transaction,
)
from tests.helpers.waiting import unique_name

pytestmark = pytest.mark.integration


def both(clusters: Clusters, topic: str, partitions: int = 1, configs: dict[str, str] | None = None) -> None:
    """Create a topic on both sides."""
    create_topic(clusters.source.bootstrap, topic, partitions, configs)
    create_topic(clusters.destination.bootstrap, topic, partitions, configs)


def settings_of(clusters: Clusters):
    """Settings of a mirror of its own."""
    return mirror_settings(clusters.source.bootstrap, clusters.destination.bootstrap, unique_name("mirror"))


def numbered(count: int, *, start: int = 0, size: int = 20) -> list[Record]:
    """Records whose values tell their order."""
    return [
        Record(key=b"k%d" % (n % 17), value=(b"%08d" % n).ljust(size, b"."))
        for n in range(start, start + count)
    ]


@pytest.mark.parametrize("codec", ["none", "gzip", "snappy", "lz4", "zstd"])
def test_batches_of_every_codec_pass_through(clusters: Clusters, codec: str) -> None:
    """Records compressed with any codec arrive at the same offsets."""
    topic = unique_name("codec")
    both(clusters, topic)
    produce(clusters.source.bootstrap, topic, numbered(2_000), {"compression.type": codec})
    copy_once(settings_of(clusters), topic)
    assert_identical(clusters.source.bootstrap, clusters.destination.bootstrap, topic)


def test_transactions_keep_their_offsets_and_their_visibility(clusters: Clusters) -> None:
    """Committed and aborted records and all markers take the same offsets at both isolation levels."""
    topic = unique_name("tx")
    both(clusters, topic)
    source = clusters.source.bootstrap
    rng = random.Random(5)
    for number in range(12):
        records = numbered(rng.randint(1, 40), start=number * 100)
        if rng.random() < 0.3:
            produce(source, topic, records)
        else:
            produce_transaction(source, topic, records, commit=rng.random() < 0.5)
    copy_once(settings_of(clusters), topic)
    assert_identical(source, clusters.destination.bootstrap, topic)


def test_a_log_that_begins_late_begins_there_at_the_destination_too(clusters: Clusters) -> None:
    """A source whose head was deleted, in the middle of a batch, keeps its log start and offsets."""
    topic = unique_name("late")
    both(clusters, topic)
    source = clusters.source.bootstrap
    produce(source, topic, numbered(3_000), {"compression.type": "lz4", "linger.ms": 50})
    delete_records(source, topic, 1_234)
    copy_once(settings_of(clusters), topic)
    assert log_range(clusters.destination.bootstrap, topic) == (1_234, 3_000)
    assert_identical(source, clusters.destination.bootstrap, topic)


def test_copying_resumes_at_the_destination_end(clusters: Clusters) -> None:
    """A second run copies only what is new."""
    topic = unique_name("resume")
    both(clusters, topic, partitions=3)
    source = clusters.source.bootstrap
    settings = settings_of(clusters)
    for round_ in range(3):
        for partition in range(3):
            records = numbered(500, start=round_ * 500)
            produce(source, topic, [Record(r.value, r.key, partition=partition) for r in records])
        copy_once(settings, topic, range(3))
    assert_identical(source, clusters.destination.bootstrap, topic, range(3))


def test_new_records_flow_while_copying(clusters: Clusters) -> None:
    """Records written during copying arrive without a restart."""
    topic = unique_name("live")
    both(clusters, topic)
    source = clusters.source.bootstrap

    async def main() -> None:
        copying = Copying(settings_of(clusters))
        try:
            await copying.begin(topic)
            for round_ in range(5):
                produce(source, topic, numbered(50, start=round_ * 50))
                await copying.caught_up({(topic, 0): (round_ + 1) * 50})
        finally:
            await copying.link.close()

    run(main)
    assert_identical(source, clusters.destination.bootstrap, topic)


def test_a_source_far_away_is_read_over_several_connections(clusters: Clusters) -> None:
    """Partitions move between connections while they are copied, and those break: still the same log."""
    topic, partitions = unique_name("far"), range(6)
    both(clusters, topic, len(partitions))
    rng = random.Random(11)
    records = [Record(rng.randbytes(50_000), partition=p) for p in partitions for _ in range(200)]
    produce(clusters.source.bootstrap, topic, records)
    proxy = clusters.source_proxy
    ends = {(topic, p): log_range(clusters.source.bootstrap, topic, p)[1] for p in partitions}

    async def main() -> None:
        copying = Copying(
            mirror_settings(proxy.bootstrap, clusters.destination.bootstrap, unique_name("mirror"))
        )
        try:
            for partition in partitions:
                await copying.begin(topic, partition)
            # one for everything else, and four that fetch
            await copying.until(lambda: proxy.connections >= 5)
            proxy.cut()
            await copying.caught_up(ends)
        finally:
            await copying.link.close()

    proxy.latency_s = 0.05
    try:
        run(main)
    finally:
        proxy.reset()
    assert_identical(clusters.source.bootstrap, clusters.destination.bootstrap, topic, partitions)


def test_a_foreign_write_is_noticed(clusters: Clusters) -> None:
    """Somebody else's record at the destination fails the partition and names the offset."""
    topic = unique_name("foreign")
    both(clusters, topic)
    produce(clusters.source.bootstrap, topic, numbered(10))

    async def main() -> str:
        copying = Copying(settings_of(clusters))
        try:
            await copying.begin(topic)
            await copying.caught_up({(topic, 0): 10})
            produce(clusters.destination.bootstrap, topic, [Record(b"not ours")])
            produce(clusters.source.bootstrap, topic, numbered(1, start=10))
            with pytest.raises(Exception, match="somebody else writes"):
                await copying.until(lambda: False, 20)
            return str(copying.failures[topic, 0])
        finally:
            await copying.link.close()

    assert "offset 10" in run(main)


def test_session_names_only_what_changed() -> None:
    """An incremental request leaves unchanged partitions out (KIP-227)."""
    session = FetchSession(session_id=7, epoch=3)
    frame = session.request(
        {}, [], version=13, correlation_id=1, client_id="c", max_wait_ms=1, min_bytes=1, max_bytes=1
    )
    assert len(frame) < 60
