"""Faults other tools have met with the data itself, tried on the copying alone (C01, C02, C03, C05, C06, C10, C12)."""

import asyncio
import gc
import logging
import random
import resource
import time
from collections.abc import Sequence
from typing import Any

import pytest
from confluent_kafka import TopicPartition
from confluent_kafka.admin import OffsetSpec

from kmirror_dagster.broker import batches, codecs
from kmirror_dagster.broker.batches import RawRecord
from kmirror_dagster.errors import ReplicationError
from tests.conftest import ClusterFactory, Clusters
from tests.helpers.comparison import differences, raw_records
from tests.helpers.copying import Copying, copy_once, mirror_settings, run
from tests.helpers.crashing import proxied_settings
from tests.helpers.histories import LONG, NOW_MS, RawWriter, alter_topic, raw_batch_records
from tests.helpers.kafka import (
    DEADLINE_S,
    Record,
    admin,
    create_topic,
    log_range,
    produce,
    produce_transaction,
)
from tests.helpers.proxy import Action, Api, Fault, When
from tests.helpers.waiting import unique_name

pytestmark = pytest.mark.integration

KEPT = {"retention.ms": "-1", "message.timestamp.after.max.ms": LONG}
# what a mirror's topic has while it is one
MIRROR = KEPT | {"message.timestamp.type": "CreateTime", "compression.type": "producer"}
_MIB = 1024 * 1024


def on_both(
    clusters: Clusters,
    source: dict[str, str] | None = None,
    destination: dict[str, str] | None = None,
    partitions: int = 1,
) -> str:
    """A topic of this test alone on both sides, as the mirror would create it."""
    name = unique_name("data")
    create_topic(clusters.source.bootstrap, name, partitions, KEPT | (source or {}))
    create_topic(clusters.destination.bootstrap, name, partitions, MIRROR | (destination or {}))
    return name


def settings_of(clusters: Clusters) -> Any:
    return mirror_settings(clusters.source.bootstrap, clusters.destination.bootstrap, unique_name("data"))


def assert_same(clusters: Clusters, topic: str, partitions: Sequence[int] = (0,)) -> None:
    """Identical at both isolation levels, and byte for byte."""
    found = differences(
        clusters.source.bootstrap, clusters.destination.bootstrap, topic, partitions, raw=True
    )
    assert found == {}


def write_raw(bootstrap: str, topic: str, *found: tuple[list[RawRecord], int]) -> None:
    """Write batches as they are: records and codec."""

    async def main() -> None:
        raw = RawWriter(bootstrap, topic)
        for content, codec in found:
            await raw.plain(topic, {0: content}, codec)
        await raw.close()

    run(main)


def raw(payloads: Sequence[bytes], at_ms: Sequence[int] | None = None) -> list[RawRecord]:
    """Records of one batch."""
    return [
        RawRecord(index, at_ms[index] if at_ms else NOW_MS, payload) for index, payload in enumerate(payloads)
    ]


# --- C01, C02: bytes of a record


@pytest.mark.case("C01")
@pytest.mark.parametrize("codec", [codecs.NONE, codecs.ZSTD], ids=["none", "zstd"])
def test_headers_of_every_kind_keep_their_bytes_and_order(clusters: Clusters, codec: int) -> None:
    """None, one, repeated, null, empty, no text in key or value, 500 of them; joined with others and re-encoded."""
    kinds: list[list[tuple[bytes, bytes | None]]] = [
        [],
        [(b"one", b"1")],
        [(b"k", b"b"), (b"k", b"a"), (b"k", b"b")],
        [(b"null", None), (b"null", b"")],
        [(b"", b""), (b"", None)],
        [(b"\xff\xfe", b"\x00\xff"), ("schlüssel".encode(), b"wert")],
        [(b"h%d" % n, b"%d" % n) for n in range(500)],
    ]
    payloads = [batches.encode_payload(b"key", b"value", headers) for headers in kinds]
    topic, other, stamped = (
        on_both(clusters),
        on_both(clusters),
        on_both(clusters, {"message.timestamp.type": "LogAppendTime"}),
    )
    source = clusters.source.bootstrap
    for name in (topic, stamped):
        write_raw(source, name, (raw(payloads), codec), *((raw([payload]), codec) for payload in payloads))
    produce(source, other, [Record(b"%d" % n) for n in range(2_000)])

    async def main() -> None:
        copying = Copying(settings_of(clusters))
        try:
            for name in (topic, stamped, other):
                await copying.begin(name)
            await copying.caught_up({(topic, 0): 14, (stamped, 0): 14, (other, 0): 2_000})
        finally:
            await copying.link.close()

    run(main)
    ends = {name: (0, log_range(source, name)[1]) for name in (topic, stamped)}
    for name, (start, end) in ends.items():
        assert log_range(clusters.destination.bootstrap, name) == (start, end)
    for name in (topic, stamped):
        expected = raw_records(source, name, {0: ends[name]})
        assert raw_records(clusters.destination.bootstrap, name, {0: ends[name]}) == expected
    assert_same(clusters, other)


@pytest.mark.case("C02")
def test_null_and_empty_stay_apart_with_everything_logged(
    clusters: Clusters, caplog: pytest.LogCaptureFixture
) -> None:
    """Keys and values, null and empty, in every position, with the most verbose logging."""
    caplog.set_level(logging.DEBUG)
    topic = on_both(clusters)
    records = [Record(value, key) for key in (None, b"", b"k") for value in (None, b"", b"v")]
    produce(clusters.source.bootstrap, topic, records)
    produce_transaction(clusters.source.bootstrap, topic, records)
    produce_transaction(clusters.source.bootstrap, topic, records, commit=False)
    copy_once(settings_of(clusters), topic)
    assert_same(clusters, topic)


# --- C03: timestamps


@pytest.mark.case("C03")
@pytest.mark.parametrize("codec", [codecs.NONE, codecs.LZ4], ids=["none", "lz4"])
@pytest.mark.parametrize("kind", ["CreateTime", "LogAppendTime"])
def test_timestamps_and_look_ups_by_time_are_the_sources(clusters: Clusters, kind: str, codec: int) -> None:
    """A year old, unordered, zero, in the future, or stamped by the broker: same values, same offsets for times."""
    topic = on_both(clusters, {"message.timestamp.type": kind})
    year = 365 * 86_400_000
    rng = random.Random(3)
    shapes = (
        [NOW_MS - year + n for n in range(300)],
        [NOW_MS - rng.randint(0, year) for _ in range(300)],
        [0] * 20,
        [NOW_MS + 30 * 86_400_000],
        [NOW_MS - 5, NOW_MS, NOW_MS - 5],
        [NOW_MS],
        [NOW_MS - 1],
    )
    payload = batches.encode_payload(b"k", b"v" * 90)
    write_raw(
        clusters.source.bootstrap, topic, *((raw([payload] * len(times), times), codec) for times in shapes)
    )
    copy_once(settings_of(clusters), topic)
    assert_same(clusters, topic)
    stamps = sorted({record.timestamp for record in _all_raw(clusters, topic)})
    wanted = [
        0,
        1,
        *rng.sample(stamps, min(20, len(stamps))),
        stamps[0],
        stamps[-1],
        stamps[-1] + 1,
        NOW_MS + 7,
    ]
    looked_up = [
        [_offset_at(cluster.bootstrap, topic, time_ms) for time_ms in wanted]
        for cluster in (clusters.source, clusters.destination)
    ]
    assert looked_up[0] == looked_up[1]


def _all_raw(clusters: Clusters, topic: str) -> Any:
    return raw_records(clusters.source.bootstrap, topic, {0: log_range(clusters.source.bootstrap, topic)})[0]


def _offset_at(bootstrap: str, topic: str, time_ms: int) -> int:
    target = TopicPartition(topic, 0)
    client = admin(bootstrap)
    found = client.list_offsets({target: OffsetSpec.for_timestamp(time_ms)})[target].result(DEADLINE_S)
    return int(found.offset)


# --- C05: sizes


def big_records() -> list[tuple[list[RawRecord], int]]:
    """3 MiB that do not compress, 3 MiB that do, then small ones."""
    rng = random.Random(5)
    dense = batches.encode_payload(b"dense", rng.randbytes(3 * _MIB))
    sparse = batches.encode_payload(b"sparse", b"0123456789abcdef" * (3 * _MIB // 16))
    small = [batches.encode_payload(b"small", b"%d" % n) for n in range(100)]
    return [(raw([dense]), codecs.NONE), (raw([sparse]), codecs.GZIP), (raw(small), codecs.NONE)]


@pytest.mark.case("C05")
def test_large_records_need_no_tuning(clusters: Clusters) -> None:
    """Records far above the fetch size, up to 20 MB, arrive, and other partitions go on."""
    limit = {"max.message.bytes": str(24 * _MIB)}
    topic, other = on_both(clusters, limit, limit), on_both(clusters)
    huge = batches.encode_payload(b"huge", random.Random(6).randbytes(20_000_000))
    write_raw(clusters.source.bootstrap, topic, *big_records(), (raw([huge]), codecs.NONE), *big_records())
    produce(clusters.source.bootstrap, other, [Record(b"%d" % n) for n in range(1_000)])

    async def main() -> None:
        copying = Copying(settings_of(clusters), memory_budget=8 << 20)
        try:
            await copying.begin(topic)
            await copying.begin(other)
            await copying.caught_up({(topic, 0): 205, (other, 0): 1_000})
        finally:
            await copying.link.close()

    run(main)
    assert_same(clusters, topic)
    assert_same(clusters, other)


@pytest.mark.case("C05")
def test_a_record_too_large_for_the_destination_stops_only_its_partition(clusters: Clusters) -> None:
    """FAILED with offset, size and limit; nothing is appended by retries; goes on when the limit is raised."""
    limit = {"max.message.bytes": str(5 * _MIB)}
    topic, other = on_both(clusters, limit, {"max.message.bytes": str(_MIB)}), on_both(clusters)
    first = [batches.encode_payload(b"first", b"%d" % n) for n in range(7)]
    source, destination = clusters.source.bootstrap, clusters.destination.bootstrap
    write_raw(source, topic, (raw(first), codecs.LZ4), *big_records())

    async def main() -> None:
        copying = Copying(settings_of(clusters))
        try:
            await copying.begin(other)
            for _ in range(3):
                await copying.begin(topic)
                while (topic, 0) not in copying.failures:
                    await asyncio.sleep(0.01)
                error = copying.failures.pop((topic, 0))
                assert isinstance(error, ReplicationError)
                assert error.retriable
                for part in (f"{topic}/0", "offset 7", "max.message.bytes", str(_MIB)):
                    assert part in str(error)
                assert await asyncio.to_thread(log_range, destination, topic) == (0, 7)
                await asyncio.to_thread(produce, source, other, [Record(b"x")] * 10)
            await copying.caught_up({(other, 0): 30})
            await asyncio.to_thread(alter_topic, destination, topic, limit)
            await copying.begin(topic)
            await copying.caught_up({(topic, 0): 109})
        finally:
            await copying.link.close()

    run(main)
    assert_same(clusters, topic)
    assert_same(clusters, other)


@pytest.mark.case("C05")
@pytest.mark.parametrize("kind", ["CreateTime", "LogAppendTime"])
def test_batches_too_large_for_the_destination_are_cut(clusters: Clusters, kind: str) -> None:
    """Only records have to fit: batches of many, also of aborted transactions, are made smaller without a failure."""
    topic = on_both(
        clusters,
        {"max.message.bytes": str(5 * _MIB), "message.timestamp.type": kind},
        {"max.message.bytes": "20000"},
    )
    rng = random.Random(7)
    content = raw([batches.encode_payload(b"%d" % n, rng.randbytes(2_000)) for n in range(300)])

    async def main() -> None:
        writer = RawWriter(clusters.source.bootstrap, topic)
        for codec in (codecs.NONE, codecs.ZSTD):
            await writer.plain(topic, {0: content}, codec)
            await writer.plain(topic, {0: raw_batch_records(1, 5)})
            await writer.transactional(1, topic, {0: content}, codec)
            await writer.end(1, commit=False)
        await writer.settled(topic, [0])
        await writer.close()

    run(main)
    copy_once(settings_of(clusters), topic)
    assert_same(clusters, topic)


# --- C06: order and doubles when a broker bounces


@pytest.mark.case("C06")
def test_lost_answers_neither_double_nor_reorder(clusters: Clusters) -> None:
    """Connections cut at full speed, many times, after a write was applied and before its answer came."""
    topic = on_both(clusters, partitions=3)
    proxy = clusters.destination_proxy
    proxy.reset()

    async def main() -> None:
        writer = RawWriter(clusters.source.bootstrap, topic)
        client = f"{topic}-cut"
        copying = Copying(proxied_settings(clusters, topic, client))
        for nth in range(3, 60, 4):
            how = (Action.CLOSE, When.AFTER) if nth % 8 == 3 else (Action.BEHIND_BACK, When.BEFORE)
            proxy.arm(Fault(how[0], Api.PRODUCE, nth, how[1], client))
        try:
            for partition in range(3):
                await copying.begin(topic, partition)
            for seed in range(40):
                content = raw_batch_records(seed, 700)
                await writer.plain(topic, dict.fromkeys(range(3), content), codecs.LZ4)
            await copying.caught_up({(topic, partition): 28_000 for partition in range(3)})
            resyncs = [copying.link.progress(topic, partition) for partition in range(3)]
            assert sum(found.resyncs_total for found in resyncs if found) >= 10
        finally:
            await copying.link.close()
            await writer.close()

    run(main)
    assert_same(clusters, topic, range(3))


@pytest.mark.case("C06")
def test_a_bouncing_destination_broker_neither_doubles_nor_reorders(
    clusters: Clusters, cluster_factory: ClusterFactory
) -> None:
    """200,000 numbered records at full speed while the destination's only broker is killed and stopped."""
    bouncing = cluster_factory("bouncing")
    topic = unique_name("bounce")
    create_topic(clusters.source.bootstrap, topic, 1, KEPT)
    create_topic(bouncing.bootstrap, topic, 1, MIRROR)

    async def main() -> None:
        writer = RawWriter(clusters.source.bootstrap, topic)
        for start in range(0, 200_000, 500):
            numbered = [
                batches.encode_payload(b"k%d" % (n % 7), b"%08d" % n) for n in range(start, start + 500)
            ]
            await writer.plain(topic, {0: raw(numbered)}, codecs.NONE)
        await writer.close()
        copying = Copying(mirror_settings(clusters.source.bootstrap, bouncing.bootstrap, topic))
        try:
            for bounce in (bouncing.kill_broker, bouncing.stop_broker):
                await keep_going(copying, topic, at_least=20_000)
                await asyncio.to_thread(bounce)
                await asyncio.to_thread(bouncing.start_broker)
            await keep_going(copying, topic, at_least=200_000)
        finally:
            await copying.link.close()

    async def keep_going(copying: Copying, topic: str, *, at_least: int) -> None:
        """Copy some more; what time heals is tried again, as a node does."""
        end = time.monotonic() + 90
        goal: int | None = None
        while time.monotonic() < end:
            if (topic, 0) not in copying.link.running():
                try:
                    await copying.begin(topic)
                except ReplicationError as error:
                    assert error.retriable, error
                    await asyncio.sleep(0.2)
                    continue
            progress = copying.link.progress(topic, 0)
            if progress is not None:
                goal = min(progress.destination_end + at_least, 200_000) if goal is None else goal
                if progress.destination_end >= goal:
                    return
            failure = copying.failures.get((topic, 0))
            assert failure is None or failure.retriable, failure
            await asyncio.sleep(0.01)
        raise AssertionError(f"{topic} did not reach {goal}")

    run(main)
    found = differences(clusters.source.bootstrap, bouncing.bootstrap, topic, [0])
    assert found == {}


# --- C10, C12: control records and aborted stretches


@pytest.mark.case("C10")
def test_a_marker_at_the_tail_leaves_no_lag(clusters: Clusters) -> None:
    """One record and its commit marker: log end 2, lag 0, and a final stop is done at once."""
    topic = on_both(clusters)
    produce_transaction(clusters.source.bootstrap, topic, [Record(b"only")])

    async def main() -> None:
        copying = Copying(settings_of(clusters))
        try:
            await copying.begin(topic)
            await copying.caught_up({(topic, 0): 2}, 10)
            progress = copying.link.progress(topic, 0)
            assert progress is not None
            assert (progress.destination_end, progress.lag_records, progress.lag_seconds) == (2, 0, 0.0)
            began = time.monotonic()
            position = await copying.link.stop(topic, 0, 10, final=True)
            assert position.offset == 2
            assert time.monotonic() - began < 2
        finally:
            await copying.link.close()

    run(main)
    assert_same(clusters, topic)


@pytest.mark.case("C12")
def test_a_long_stretch_of_aborted_records_is_passed_in_bounded_memory(clusters: Clusters) -> None:
    """300,000 small aborted records, then one committed: steady progress, identical, little memory."""
    topic = on_both(clusters)
    payload = batches.encode_payload(b"k", b"x" * 40)

    async def main() -> None:
        writer = RawWriter(clusters.source.bootstrap, topic)
        content = raw([payload] * 5_000)
        for _ in range(6):
            for _ in range(10):
                await writer.transactional(1, topic, {0: content})
            await writer.end(1, commit=False)
        await writer.transactional(1, topic, {0: content[:1]})
        await writer.end(1, commit=True)
        await writer.settled(topic, [0])
        await writer.close()
        gc.collect()
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        copying = Copying(settings_of(clusters), memory_budget=4 << 20)
        seen: list[int] = []
        try:
            await copying.begin(topic)

            def reached() -> bool:
                progress = copying.link.progress(topic, 0)
                if progress is not None and (not seen or progress.destination_end > seen[-1]):
                    seen.append(progress.destination_end)
                return bool(seen) and seen[-1] == 300_008

            await copying.until(reached)
        finally:
            await copying.link.close()
        grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
        assert grown < 100 * 1024, f"{grown} KiB"
        assert len(seen) >= 6

    run(main)
    assert_same(clusters, topic)
