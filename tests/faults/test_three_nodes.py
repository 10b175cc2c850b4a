"""Three nodes and 1,200 mirror partitions under load: one is killed, one sleeps, all are restarted in turn.

The figures are in docs/operations.md.
"""

import logging
import signal
import threading
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from kmirror_dagster.sandbox.cluster import SandboxCluster
from tests.conftest import start_all
from tests.helpers.kafka import DEADLINE_S, Record, create_topic, producer, write
from tests.helpers.nodes import NodeMirror, NodeProcess
from tests.helpers.waiting import unique_name, wait_until

pytestmark = [pytest.mark.integration, pytest.mark.faults, pytest.mark.timeout(1200)]

logger = logging.getLogger(__name__)

TOPICS, PARTITIONS = 12, 100
ALL = TOPICS * PARTITIONS
RATE = 1_000
SLEEP_S = 60.0
JVM = ("-Xms512m", "-Xmx1g", "-XX:+UseSerialGC")


class Load:
    """Writes a steady number of records a second, to all partitions in turn, until it is stopped."""

    def __init__(self, bootstrap: str, topics: list[str]) -> None:
        self.written = 0
        self._client = producer(bootstrap)
        self._topics = topics
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> "Load":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopped.set()
        self._thread.join(DEADLINE_S)
        assert self._client.flush(DEADLINE_S) == 0

    def _run(self) -> None:
        began = time.monotonic()
        while not self._stopped.wait(0.05):
            due = int((time.monotonic() - began) * RATE)
            for number in range(self.written, due):
                place = number % ALL
                record = Record(b"v-%d" % number, partition=place // TOPICS)
                write(self._client, self._topics[place % TOPICS], [record])
            self.written = due


@dataclass
class Group:
    """Three nodes, and a mirror of all the topics."""

    nodes: list[NodeProcess]
    mirror: NodeMirror
    topics: list[str]

    def running(self, nodes: list[NodeProcess] | None = None) -> list[int]:
        """Partitions that each node copies."""
        return [node.client.node().mirror_partitions for node in nodes or self.nodes]

    def await_all(self, nodes: list[NodeProcess] | None = None) -> float:
        """Wait until everything is copied by these nodes; seconds that took."""
        began = time.monotonic()
        wait_until(lambda: sum(self.running(nodes)) == ALL, 120, what="all copied", poll_s=0.1)
        return time.monotonic() - began

    def lag_s(self) -> float:
        """Lag of the mirror as it is told."""
        return self.mirror.summary.lag_seconds

    def identical(self) -> None:
        """Everything that was written is there, the same."""
        self.mirror.await_copied(*self.topics, deadline_s=120)
        self.mirror.compare(*self.topics)
        assert self.mirror.errors() == {}


@pytest.fixture(scope="module")
def group(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Group]:
    """Own clusters of a broker each."""
    home = tmp_path_factory.mktemp("three")
    clusters = [SandboxCluster(name, home, jvm_options=JVM) for name in ("source", "destination")]
    nodes: list[NodeProcess] = []
    try:
        start_all(clusters)
        source, destination = (cluster.bootstrap for cluster in clusters)
        name = unique_name("load")
        topics = [f"{name}.{number}" for number in range(TOPICS)]
        for topic in topics:
            create_topic(source, topic, PARTITIONS)
        environ = {"KMIRROR_TOKEN": unique_name("token")}
        # coordinator partitions are what is spread: the more there are, the more even
        settings: dict[str, object] = {"mirror.topic.num.partitions": 150, "session_timeout_ms": 6_000}
        nodes += [NodeProcess(home / n, destination, environ=environ, **settings) for n in ("a", "b", "c")]
        for node in nodes:
            node.start()
        made = Group(nodes, NodeMirror(nodes[0], source, destination, name=name), topics)
        made.mirror.create()
        made.await_all()
        yield made
    finally:
        for node in nodes:
            if node.endpoint is not None:
                node.signal(signal.SIGCONT)
            node.stop()
        for cluster in clusters:
            cluster.remove()


def test_work_is_even_and_a_killed_node_is_taken_over(group: Group) -> None:
    """Coordinator partitions are spread to within one; after SIGKILL all is copied again within 15 s, identical."""
    leads = Counter(group.nodes[0].client.cluster().leaders.values())
    logger.info("coordinator partitions: %s; mirror partitions: %s", sorted(leads.values()), group.running())
    assert max(leads.values()) - min(leads.values()) <= 1
    with Load(group.mirror.source, group.topics) as load:
        wait_until(lambda: load.written > 5 * RATE, 60, what="load")
        group.nodes[2].kill()
        took = group.await_all(group.nodes[:2])
        logger.info("SIGKILL of one of three until all %d are copied again: %.1f s", ALL, took)
    group.identical()
    group.nodes[2].start()
    group.await_all()
    assert took <= 15


@pytest.mark.case("C08")
def test_a_node_that_sleeps_for_a_minute_is_fenced(group: Group) -> None:
    """SIGSTOP for a minute, then SIGCONT: it notices, gives up what it led, shares again; everything is identical."""
    with Load(group.mirror.source, group.topics) as load:
        before = group.nodes[1].metric("kmirror_pauses_total")
        group.nodes[1].signal(signal.SIGSTOP)
        began = time.monotonic()
        others = [group.nodes[0], group.nodes[2]]
        logger.info("SIGSTOP of one of three until all are copied again: %.1f s", group.await_all(others))
        wait_until(lambda: time.monotonic() - began > SLEEP_S, SLEEP_S + 5, what="a minute", poll_s=0.5)
        group.nodes[1].signal(signal.SIGCONT)
        wait_until(lambda: group.nodes[1].metric("kmirror_pauses_total") > before, 30, what="it noticed")
        wait_until(lambda: all(count > 0 for count in group.running()), 60, what="shared again")
        group.await_all()
        assert load.written > SLEEP_S * RATE / 2
    group.identical()


def test_rolling_restart_keeps_up(group: Group) -> None:
    """One node after the other is stopped and started; how far the mirror falls behind at 1,000 records a second."""
    worst = 0.0
    done = threading.Event()

    def watch() -> None:
        nonlocal worst
        while not done.wait(0.2):
            for node in group.nodes:
                if node.endpoint is None:
                    continue
                try:
                    group.mirror.node = node
                    worst = max(worst, group.lag_s())
                    break
                except Exception:  # noqa: BLE001 - the node that is being restarted; the next one is asked
                    continue

    with Load(group.mirror.source, group.topics) as load:
        wait_until(lambda: load.written > 2 * RATE, 60, what="load")
        watcher = threading.Thread(target=watch, daemon=True)
        watcher.start()
        for node in group.nodes:
            node.stop()
            node.start()
            group.await_all()
        done.set()
        watcher.join(30)
    group.mirror.node = group.nodes[0]
    logger.info("rolling restart of three nodes: lag at most %.1f s", worst)
    group.identical()
    assert worst <= 5
