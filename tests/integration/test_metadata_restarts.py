"""Positions of groups while the node that keeps them is stopped and started."""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from kmirror_dagster.broker.admin import ClusterAdmin
from kmirror_dagster.broker.admin_types import CommittedOffset, OffsetKind
from tests.conftest import Clusters
from tests.helpers import kafka
from tests.helpers.nodes import NodeProcess, mirrored
from tests.helpers.refreshing import commit
from tests.helpers.secured import own_settings
from tests.helpers.waiting import wait_until

pytestmark = pytest.mark.integration

RECORDS, STEP, TAIL = 10_000, 250, 137


class Samples:
    """A group's position and the log's end at the destination, looked at again and again."""

    def __init__(self, admin: ClusterAdmin, group: str, topic: str) -> None:
        self.positions: list[int] = []
        self.beyond: list[tuple[int, int]] = []
        self._admin, self._group, self._key = admin, group, (topic, 0)
        self._done = threading.Event()

    def position(self) -> int:
        """The position now; -1: none."""
        found = self._admin.group_offsets([self._group]).values.get(self._group, {})
        return found[self._key].offset if self._key in found else -1

    @contextmanager
    def taken(self) -> Iterator[None]:
        """Sample while the block runs."""
        thread = threading.Thread(target=self._sample, daemon=True)
        thread.start()
        try:
            yield
        finally:
            self._done.set()
            thread.join(30)

    def _sample(self) -> None:
        while not self._done.wait(0.05):
            position = self.position()
            ends = self._admin.list_offsets([self._key], OffsetKind.LATEST).values
            self.positions.append(position)
            if self._key in ends and position > ends[self._key].offset:
                self.beyond.append((position, ends[self._key].offset))


@pytest.mark.case("C26")
def test_positions_neither_fall_back_nor_stop_over_a_restart(clusters: Clusters, tmp_path: Path) -> None:
    """Every sample is as high as the one before and within the copy; at the idle tail it is exact."""
    node = NodeProcess(tmp_path / "state", clusters.destination.bootstrap).start()
    source, destination = (
        ClusterAdmin(own_settings(clusters.source)),
        ClusterAdmin(own_settings(clusters.destination)),
    )
    try:
        with mirrored(node, clusters.source.bootstrap, clusters.destination.bootstrap) as mirror:
            topic, group = mirror.topic(), f"{mirror.name}-reader"
            kafka.create_topic(clusters.source.bootstrap, topic)
            samples = Samples(destination, group, topic)

            def write(count: int) -> None:
                kafka.produce(clusters.source.bootstrap, topic, [kafka.Record(b"x")] * count)

            def read(begin: int, end: int) -> None:
                for offset in range(begin, end + 1, STEP):
                    source.alter_group_offsets({group: {(topic, 0): CommittedOffset(offset)}})
                    time.sleep(0.02)  # a reader's pace

            write(RECORDS)
            commit(clusters.source.bootstrap, group, [(topic, 0, STEP)])
            wait_until(lambda: samples.position() >= STEP, 60)
            with samples.taken():
                read(2 * STEP, RECORDS // 2)
                node.stop()
                write(RECORDS)
                read(RECORDS // 2, RECORDS + 8 * STEP)
                node.start()
                read(RECORDS + 9 * STEP, 2 * RECORDS)
                wait_until(lambda: samples.position() == 2 * RECORDS, 60)
                write(TAIL)
                source.alter_group_offsets({group: {(topic, 0): CommittedOffset(2 * RECORDS + TAIL - 24)}})
                wait_until(lambda: samples.position() == 2 * RECORDS + TAIL - 24, 60)
    finally:
        for admin in (source, destination):
            admin.close()
        node.stop()

    assert samples.positions == sorted(samples.positions)
    assert samples.beyond == []
