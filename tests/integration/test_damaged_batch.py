"""Batches that are damaged at the source: neither passed on nor made to look right."""

import os
from pathlib import Path

import pytest

from kmirror_dagster.broker import batches, codecs
from kmirror_dagster.broker.batches import RawRecord
from tests.conftest import Clusters
from tests.helpers.copying import Copying, mirror_settings, run
from tests.helpers.histories import NOW_MS, RawWriter
from tests.helpers.kafka import create_topic, log_range
from tests.helpers.waiting import unique_name

pytestmark = pytest.mark.integration

KEPT = {"retention.ms": "-1"}


def batch(first: int, value_bytes: int) -> list[RawRecord]:
    """Ten records."""
    value = os.urandom(value_bytes)
    return [
        RawRecord(offset, NOW_MS, batches.encode_payload(b"key", value))
        for offset in range(first, first + 10)
    ]


def flip_a_bit(log: Path, number: int) -> None:
    """Damage the last byte of a batch in a segment file."""
    data = log.read_bytes()
    header = list(batches.headers(memoryview(data)))[number]
    with log.open("r+b") as file:
        file.seek(header.end - 1)
        file.write(bytes([data[header.end - 1] ^ 1]))


@pytest.mark.parametrize("value_bytes", [20, 2_000], ids=["joined with others", "passed on alone"])
def test_a_damaged_batch_ends_its_partition_and_is_named(clusters: Clusters, value_bytes: int) -> None:
    """What lies before it is mirrored, the batch is not, and the partition FAILED says where and why."""
    topic = unique_name("damaged")
    for cluster in (clusters.source, clusters.destination):
        create_topic(cluster.bootstrap, topic, 1, KEPT)

    async def main() -> tuple[str, bool]:
        writer = RawWriter(clusters.source.bootstrap, topic)
        for first in (0, 10, 20):
            await writer.plain(topic, {0: batch(first, value_bytes)}, codecs.LZ4)
        await writer.close()
        flip_a_bit(clusters.source.brokers[0].data / f"{topic}-0" / f"{0:020d}.log", 1)
        settings = mirror_settings(clusters.source.bootstrap, clusters.destination.bootstrap, topic)
        copying = Copying(settings)
        try:
            await copying.begin(topic)
            await copying.until(lambda: (topic, 0) in copying.failures)
        finally:
            await copying.link.close()
        error = copying.failures[topic, 0]
        return str(error), error.retriable

    reason, retriable = run(main)
    assert "offset 10" in reason
    assert "CRC-32C does not match" in reason
    assert not retriable
    assert log_range(clusters.destination.bootstrap, topic) == (0, 10)
