"""Logs that are not the same any more, and sources of old formats: by name, and nothing copied wrongly."""

import asyncio
import struct
import time
import zlib
from collections.abc import Iterator

import pytest

from kmirror_dagster.broker import batches
from kmirror_dagster.broker.admin import ClusterAdmin
from kmirror_dagster.errors import ReplicationError, SourceLossError, UnsupportedDataError
from kmirror_dagster.lifecycle import MirrorState
from kmirror_dagster.records import PartitionRecord
from kmirror_dagster.replication.alignment import DivergedError, RecreatedError
from kmirror_dagster.sandbox.cluster import SandboxCluster
from kmirror_dagster.settings import PolicySettings
from tests.conftest import Clusters
from tests.helpers.comparison import differences, log_ranges
from tests.helpers.copying import Copying, copy_once, mirror_settings, run
from tests.helpers.crashing import proxied_settings
from tests.helpers.histories import LONG, NOW_MS
from tests.helpers.kafka import (
    Record,
    create_topic,
    delete_records,
    delete_topic,
    log_range,
    produce,
    producer,
    write,
)
from tests.helpers.secured import own_settings
from tests.helpers.waiting import unique_name

pytestmark = pytest.mark.integration

_CONFIGS = {"retention.ms": "-1", "message.timestamp.after.max.ms": LONG}


def numbered(start: int, end: int, size: int = 20) -> list[Record]:
    """Records that tell their number."""
    return [Record((b"%08d" % n).ljust(size, b"."), b"k%d" % (n % 5)) for n in range(start, end)]


def both(source: str, destination: str, partitions: int = 1) -> str:
    """A topic on both sides."""
    topic = unique_name("diverged")
    create_topic(source, topic, partitions, _CONFIGS)
    create_topic(destination, topic, partitions, _CONFIGS)
    return topic


async def outcome(
    copying: Copying, topic: str, partition: int = 0, deadline_s: float = 90.0
) -> ReplicationError:
    """Copy as a node does until it fails for good; what time may heal is tried again."""
    end = time.monotonic() + deadline_s
    while True:
        error: ReplicationError
        try:
            if (topic, partition) not in copying.link.running():
                await copying.begin(topic, partition)
            while (topic, partition) not in copying.failures:
                assert time.monotonic() < end, f"{topic} is still copied"
                await asyncio.sleep(0.01)
            error = copying.failures[topic, partition]
        except ReplicationError as refused:
            error = refused
        if not error.retriable:
            return error
        assert time.monotonic() < end, f"{topic}: {error}"
        await asyncio.sleep(0.1)


# --- a source whose files were changed while it was down


def _legacy(offset: int, magic: int, key: bytes, value: bytes) -> bytes:
    """One record of message format v0 or v1 (Kafka protocol guide, "Message sets")."""
    stamp = struct.pack(">q", NOW_MS + offset) if magic else b""
    body = struct.pack(">bb", magic, 0) + stamp
    body += struct.pack(">i", len(key)) + key + struct.pack(">i", len(value)) + value
    message = struct.pack(">I", zlib.crc32(body)) + body
    return struct.pack(">qi", offset, len(message)) + message


def _rewrite(cluster: SandboxCluster, topic: str, partition: int, content: bytes) -> None:
    """Replace the log of a partition whose broker is down."""
    folder = cluster.brokers[0].data / f"{topic}-{partition}"
    for path in folder.glob("0*"):
        if path.suffix != ".log":
            path.unlink()
    (log,) = folder.glob("*.log")
    log.write_bytes(content)


def _content(cluster: SandboxCluster, topic: str, partition: int = 0) -> bytes:
    (log,) = (cluster.brokers[0].data / f"{topic}-{partition}").glob("*.log")
    return log.read_bytes()


def _up_to(content: bytes, offset: int) -> bytes:
    """Batches in front of an offset."""
    end = next(h.start for h in batches.headers(memoryview(content)) if h.base_offset == offset)
    return content[:end]


@pytest.fixture(scope="module")
def fragile(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SandboxCluster]:
    """A source of this module's own."""
    with SandboxCluster("fragile", tmp_path_factory.mktemp("fragile")) as cluster:
        yield cluster


def test_a_source_that_lost_its_tail_or_holds_old_formats(
    clusters: Clusters, fragile: SandboxCluster
) -> None:
    """Lost offsets end in FAILED by their numbers, copied live or begun anew; old formats too, behind the rest.

    The logs are cut and written anew while the broker is down, as an unclean leader election or a lost disk does.
    """
    source, destination = fragile.bootstrap, clusters.destination.bootstrap
    live, resumed = both(source, destination), both(source, destination)
    old = both(source, destination, 3)
    for topic in (live, resumed):
        produce(source, topic, numbered(0, 60))
        produce(source, topic, numbered(60, 100))
    produce(source, old, [Record(r.value, r.key, partition=1) for r in numbered(0, 10)])

    def change_files() -> None:
        fragile.stop_broker(1)
        for topic in (live, resumed):
            _rewrite(fragile, topic, 0, _up_to(_content(fragile, topic), 60))
        _rewrite(fragile, old, 0, b"".join(_legacy(n, 1, b"k", b"v%d" % n) for n in range(5)))
        mixed = b"".join(_legacy(n, 1, b"k", b"v%d" % n) for n in range(10, 15))
        _rewrite(fragile, old, 1, _content(fragile, old, 1) + mixed)
        _rewrite(fragile, old, 2, b"".join(_legacy(n, 0, b"k", b"v%d" % n) for n in range(5)))
        fragile.start_broker(1)

    copy_once(mirror_settings(source, destination, resumed), resumed)

    async def main() -> tuple[ReplicationError, ReplicationError]:
        copying = Copying(mirror_settings(source, destination, live))
        again = Copying(mirror_settings(source, destination, resumed), owner=2)
        try:
            await copying.begin(live)
            await copying.caught_up({(live, 0): 100})
            failing = asyncio.create_task(outcome(copying, live))
            await asyncio.to_thread(change_files)
            for topic in (live, resumed):  # the source goes on, with other records at those offsets
                await asyncio.to_thread(produce, source, topic, numbered(1_060, 1_160))
            return await failing, await outcome(again, resumed)
        finally:
            await copying.link.close()
            await again.link.close()

    for topic, error in zip((live, resumed), run(main), strict=True):
        assert isinstance(error, DivergedError), error
        assert "60 to 99 (40)" in str(error) or "offset 99 differs" in str(error), error
        assert log_range(destination, topic) == (0, 100)

    async def formats() -> list[ReplicationError]:
        copying = Copying(mirror_settings(source, destination, old))
        try:
            return [await outcome(copying, old, partition) for partition in range(3)]
        finally:
            await copying.link.close()

    for error, magic, offset in zip(run(formats), (1, 1, 0), (0, 10, 0), strict=True):
        assert isinstance(error, UnsupportedDataError), error
        assert f"message format v{magic} at offset {offset}" in str(error)
    # everything in front of it is mirrored, and nothing of it
    assert log_ranges(destination, old, range(3)) == {0: (0, 0), 1: (0, 10), 2: (0, 0)}


# --- a source that deleted what was not mirrored yet


def test_a_topic_made_anew_at_the_source_is_not_taken_for_the_former_one(clusters: Clusters) -> None:
    """Deleted and created again, while copied and before: FAILED naming both, and the copy is left as it is."""
    source, destination = clusters.source.bootstrap, clusters.destination.bootstrap
    topic = both(source, destination)
    produce(source, topic, numbered(0, 20))

    async def main() -> list[ReplicationError]:
        copying = Copying(mirror_settings(source, destination, topic))
        try:
            await copying.begin(topic)
            await copying.caught_up({(topic, 0): 20})
            failing = asyncio.create_task(outcome(copying, topic))
            await asyncio.to_thread(delete_topic, source, topic)
            await asyncio.to_thread(create_topic, source, topic, 1, _CONFIGS)
            await asyncio.to_thread(produce, source, topic, numbered(500, 530))
            return [await failing, await outcome(copying, topic)]
        finally:
            await copying.link.close()

    for error in run(main):
        assert isinstance(error, RecreatedError), error
        assert topic in str(error)
    assert log_range(destination, topic) == (0, 20)


@pytest.mark.parametrize("live", [True, False], ids=["while-copying", "while-away"])
def test_records_deleted_before_they_were_mirrored_are_named(clusters: Clusters, live: bool) -> None:
    """Policy stop: FAILED with the lost offsets; skip-to-start: the loss is recorded first, then the rest is copied."""
    source, destination = clusters.source.bootstrap, clusters.destination.bootstrap
    topic = both(source, destination)
    produce(source, topic, numbered(0, 50))
    copy_once(mirror_settings(source, destination, topic), topic)

    async def main(policies: PolicySettings, owner: int) -> Copying:
        copying = Copying(mirror_settings(source, destination, topic, policies), owner=owner)
        try:
            if live:
                await copying.begin(topic)
                # held back as by a source that is slow: nothing of the next records has been read
                copying.link.detach(copying.link._copiers[topic, 0])
            produce(source, topic, numbered(50, 150))
            delete_records(source, topic, 120)
            if live:
                copying.link.spawn(copying.link.locate(copying.link._copiers[topic, 0]))
            error = await outcome(copying, topic)
            assert isinstance(error, SourceLossError), error
            assert error.loss == (50, 120)
            assert "offsets 50 to 119 (70)" in str(error)
            assert "skip-to-start" in str(error)
        finally:
            await copying.link.close()
        return copying

    stopped = run(lambda: main(PolicySettings(), 2))
    assert log_range(destination, topic) == (0, 50)

    async def skip() -> None:
        policies = PolicySettings(source_log_start_beyond_cursor="skip-to-start")
        copying = Copying(mirror_settings(source, destination, topic, policies), owner=3)
        copying.records = dict(stopped.records)
        try:
            with pytest.raises(SourceLossError) as caught:
                await copying.begin(topic)
            assert caught.value.retriable
            assert log_range(destination, topic) == (0, 50)  # not before it is recorded
            known = copying.records.get((topic, 0)) or PartitionRecord(
                mirror=topic, topic=topic, partition=0, state=MirrorState.FAILED
            )
            copying.records[topic, 0] = known.model_copy(update=known.with_loss(caught.value.loss))
            await copying.begin(topic)
            await copying.caught_up({(topic, 0): 150})
            assert copying.records[topic, 0].lost_offsets == 70
        finally:
            await copying.link.close()

    run(skip)
    assert differences(source, destination, topic, [0]) == {}


# --- fairness, throttling


def test_a_busy_partition_starves_no_other(clusters: Clusters) -> None:
    """A long backlog in one partition with little memory: records of the others arrive while most of it is left."""
    source, destination = clusters.source.bootstrap, clusters.destination.bootstrap
    topic = both(source, destination, 21)
    padding = bytes(range(256)) * 4
    busy = [Record(b"%08d" % n + padding, partition=0) for n in range(60_000)]
    produce(source, topic, busy, {"batch.size": 65_536, "linger.ms": 20})
    left: list[int] = []
    client = producer(source)

    async def main() -> None:
        copying = Copying(mirror_settings(source, destination, topic), memory_budget=4 << 20)
        try:
            for partition in (*range(1, 21), 0):
                await copying.begin(topic, partition)
            for round_ in range(1, 4):
                await copying.until(lambda r=round_: _end(copying, topic, 0) >= r * 1_000)
                write(client, topic, [Record(b"q", partition=partition) for partition in range(1, 21)])
                assert client.flush(30) == 0
                await copying.caught_up({(topic, partition): round_ for partition in range(1, 21)})
                left.append(60_000 - _end(copying, topic, 0))
            await copying.caught_up({(topic, 0): 60_000})
        finally:
            await copying.link.close()

    run(main)
    assert left[0] > 0, left
    assert differences(source, destination, topic, range(21)) == {}


def _end(copying: Copying, topic: str, partition: int) -> int:
    progress = copying.link.progress(topic, partition)
    return progress.destination_end if progress is not None else -1


def test_a_throttled_mirror_slows_down_and_changes_nothing(clusters: Clusters) -> None:
    """A quota on the mirror's client at the destination: slower, without a doubt about anything, identical."""
    source, destination = clusters.source.bootstrap, clusters.destination.bootstrap
    topic = both(source, destination)
    client = f"{topic}-throttled"
    payload = bytes(range(256)) * 16
    produce(source, topic, [Record(b"%06d" % n + payload) for n in range(300)], {"batch.size": 32_768})
    admin = ClusterAdmin(own_settings(clusters.destination))
    entity = (("client-id", client),)
    try:
        assert admin.alter_client_quotas({entity: {"producer_byte_rate": 80_000.0}}) == {entity: None}
        resyncs, seconds = run(lambda: _throttled(clusters, topic, client))
    finally:
        admin.alter_client_quotas({entity: {"producer_byte_rate": None}})
        admin.close()
    assert resyncs == 0
    assert seconds > 1.0, "the quota did not apply"
    assert differences(source, destination, topic, [0]) == {}


async def _throttled(clusters: Clusters, topic: str, client: str) -> tuple[int, float]:
    """Copy 1.2 MB at once, more than the quota's window allows; how long what follows takes."""
    copying = Copying(proxied_settings(clusters, topic, client))
    try:
        await copying.begin(topic)
        await copying.caught_up({(topic, 0): 300}, 120)
        began = time.monotonic()
        await asyncio.to_thread(produce, clusters.source.bootstrap, topic, numbered(0, 10))
        await copying.caught_up({(topic, 0): 310}, 120)
        progress = copying.link.progress(topic, 0)
        assert progress is not None
        return progress.resyncs_total, time.monotonic() - began
    finally:
        await copying.link.close()
