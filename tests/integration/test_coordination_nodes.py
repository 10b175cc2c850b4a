"""Three nodes share many mirror partitions; one is killed, one joins, one leaves."""

import logging
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import pytest

from kmirror_dagster.errors import KmirrorError
from kmirror_dagster.lifecycle import MirrorState
from tests.conftest import Clusters
from tests.helpers.kafka import Record, create_topic, produce
from tests.helpers.nodes import NodeMirror, NodeProcess
from tests.helpers.waiting import wait_until

logger = logging.getLogger(__name__)

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300)]

TOPICS, PARTITIONS = 3, 60
TOTAL = TOPICS * PARTITIONS
SESSION_MS = 6_000
# of the issue: everything copied again after a node was killed
TAKE_OVER_S = 15.0


@dataclass
class Group:
    """Nodes of one group, and a mirror they share."""

    nodes: list[NodeProcess]
    mirror: NodeMirror
    topics: list[str]

    def copied(self) -> list[int]:
        """Partitions that each running node copies."""
        return [node.client.node().mirror_partitions for node in self.running()]

    def led(self) -> list[int]:
        """Coordinator partitions that each running node leads."""
        return [len(node.client.node().coordinator_partitions) for node in self.running()]

    def running(self) -> list[NodeProcess]:
        return [node for node in self.nodes if node.endpoint is not None]

    def await_all_copied(self, deadline_s: float) -> None:
        """Wait until every partition is copied by some node."""
        wait_until(
            lambda: sum(self.copied()) == TOTAL,
            deadline_s,
            what=f"{TOTAL} partitions copied, now {self.copied()}; see {self.nodes[0].log}",
        )


@pytest.fixture(scope="module")
def group(clusters: Clusters, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Group]:
    """Three nodes, and a mirror of three topics with sixty partitions each."""
    home = tmp_path_factory.mktemp("group")
    bootstrap = clusters.destination.bootstrap
    nodes = [
        NodeProcess(
            home / f"node{number}",
            bootstrap,
            environ={"KMIRROR_TOKEN": "shared-by-the-group"},
            session_timeout_ms=SESSION_MS,
        )
        for number in range(3)
    ]
    mirror = NodeMirror(nodes[0], clusters.source.bootstrap, bootstrap)
    try:
        with ThreadPoolExecutor(3) as pool:
            list(pool.map(NodeProcess.start, nodes))
        topics = [mirror.topic(f"t{number}") for number in range(TOPICS)]
        for topic in topics:
            create_topic(clusters.source.bootstrap, topic, PARTITIONS)
        mirror.create()
        made = Group(nodes, mirror, topics)
        made.await_all_copied(120)
        yield made
        mirror.node = made.running()[0]
        mirror.delete()
    finally:
        for node in nodes:
            node.stop()


def write_everywhere(clusters: Clusters, group: Group) -> None:
    for topic in group.topics:
        records = [Record(value=b"%d" % n, partition=n % PARTITIONS) for n in range(PARTITIONS * 5)]
        produce(clusters.source.bootstrap, topic, records)


def test_work_is_spread_and_every_node_answers_for_all(clusters: Clusters, group: Group) -> None:
    """Coordinator partitions are spread evenly, and each node lists everything with live figures."""
    count = sum(group.led())
    wait_until(lambda: max(group.led()) - min(group.led()) <= 1, 30, what="an even spread")
    assert count == group.nodes[0].client.cluster().state_partitions
    write_everywhere(clusters, group)
    group.mirror.await_copied(*group.topics)
    for node in group.nodes:
        listed = list(node.client.iter_partitions(group.mirror.name))
        assert len(listed) == TOTAL
        assert {each.state for each in listed} == {MirrorState.MIRRORING}
        assert all(each.lag_records is not None for each in listed)
        assert len(Counter(each.node_id for each in listed)) == 3
        summary = node.client.mirror(group.mirror.name)
        assert summary.states == {"MIRRORING": TOTAL}
        assert summary.refresh is not None


def test_killed_node_is_taken_over_in_time(clusters: Clusters, group: Group) -> None:
    """After SIGKILL everything is copied again within 15 s, states unchanged, and nothing differs."""
    victim = group.nodes[2]
    before = {(p.topic, p.partition): p.state_epoch for p in group.mirror.partitions()}
    victim.kill()
    killed = time.monotonic()
    group.await_all_copied(TAKE_OVER_S)
    logger.info("%d partitions copied again %.1f s after SIGKILL", TOTAL, time.monotonic() - killed)
    write_everywhere(clusters, group)
    after = {(p.topic, p.partition): p.state_epoch for p in group.mirror.partitions()}
    assert after == before
    group.mirror.await_copied(*group.topics)
    victim.start()
    group.await_all_copied(60)


def test_leaving_node_hands_its_work_on(clusters: Clusters, group: Group) -> None:
    """A node that is stopped in order leaves its work to the others sooner than a killed one."""
    leaver = group.nodes[1]
    left = time.monotonic()
    leaver.stop()
    group.await_all_copied(TAKE_OVER_S)
    logger.info(
        "%d partitions copied again %.1f s after a node was told to leave", TOTAL, time.monotonic() - left
    )
    write_everywhere(clusters, group)
    assert all(_can_be_asked(node, group.mirror.name) for node in group.running())
    group.mirror.await_copied(*group.topics)
    leaver.start()
    group.await_all_copied(60)
    group.mirror.compare(group.topics[0])


def _can_be_asked(node: NodeProcess, mirror: str) -> bool:
    try:
        return bool(node.client.refresh(mirror).steps)
    except KmirrorError:
        return False
