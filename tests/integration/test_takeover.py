"""Two nodes share a mirror; one of them is killed, or sleeps for longer than its session."""

import signal
import threading
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from kmirror_dagster.lifecycle import MirrorState
from kmirror_dagster.verification.report import Isolation
from tests.conftest import Clusters
from tests.helpers.kafka import DEADLINE_S, Record, create_topic, produce, producer, write
from tests.helpers.nodes import NodeMirror, NodeProcess
from tests.helpers.waiting import unique_name, wait_until

pytestmark = [pytest.mark.integration, pytest.mark.timeout(240)]

# so many that no one of two nodes leads all of them by chance
PARTITIONS = 16


@dataclass(frozen=True)
class Pair:
    """Two nodes of one group, and a mirror whose partitions they share."""

    first: NodeProcess
    second: NodeProcess
    mirror: NodeMirror

    def leaders(self, asked: NodeProcess) -> dict[int, str | None]:
        """Node that each partition of the mirror belongs to, as one of the nodes knows it."""
        found = asked.client.iter_partitions(self.mirror.name)
        return {each.partition: each.node_id for each in found}

    def await_all_led_by(self, node: NodeProcess) -> None:
        """Wait until one node leads everything."""
        own = node.client.node().node_id
        wait_until(
            lambda: set(node.client.cluster().leaders.values()) == {own},
            30,
            what=f"all led by one node; see {node.log}",
        )

    def await_shared(self) -> None:
        """Wait until both lead some of it."""
        wait_until(
            lambda: (
                len(set(self.first.client.cluster().leaders.values())) == 2
                and self.first.client.ready()
                and self.second.client.ready()
            ),
            30,
            what=f"both nodes lead; see {self.first.log}",
        )


@pytest.fixture(scope="module")
def nodes(clusters: Clusters, tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[NodeProcess]]:
    """Two nodes of one group."""
    home = tmp_path_factory.mktemp("nodes")
    environ = {"KMIRROR_TOKEN": unique_name("token")}  # the nodes of a group talk to each other
    destination = clusters.destination.bootstrap
    made = [NodeProcess(home / name, destination, environ=environ) for name in ("first", "second")]
    try:
        yield [node.start() for node in made]
    finally:
        for node in made:
            node.stop()


@pytest.fixture
def pair(clusters: Clusters, nodes: list[NodeProcess]) -> Iterator[Pair]:
    mirror = NodeMirror(nodes[0], clusters.source.bootstrap, clusters.destination.bootstrap)
    made = Pair(nodes[0], nodes[1], mirror)
    try:
        made.await_shared()
        mirror.create()
        yield made
    finally:
        for node in nodes:
            if node.endpoint is not None:
                node.signal(signal.SIGCONT)
        mirror.delete()


class Traffic:
    """Writes to all partitions of a topic until it is stopped.

    Attributes:
        written: records so far.
    """

    def __init__(self, bootstrap: str, topic: str) -> None:
        self.written = 0
        self._client = producer(bootstrap)
        self._topic = topic
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> "Traffic":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopped.set()
        self._thread.join(DEADLINE_S)

    def _run(self) -> None:
        while not self._stopped.wait(0.02):
            count = 10 * PARTITIONS
            records = [Record(b"v-%d" % (self.written + n), partition=n % PARTITIONS) for n in range(count)]
            write(self._client, self._topic, records)
            assert self._client.flush(DEADLINE_S) == 0
            self.written += count


def test_a_killed_node_s_work_goes_on_at_the_other(pair: Pair) -> None:
    """One of two nodes is killed under writes: the other takes all its partitions over; the copy is identical."""
    mirror, topic = pair.mirror, pair.mirror.topic()
    create_topic(mirror.source, topic, PARTITIONS)
    produce(
        mirror.source, topic, [Record(b"backlog-%d" % n, partition=n % PARTITIONS) for n in range(30_000)]
    )
    mirror.await_states(MirrorState.MIRRORING, topic, partitions=PARTITIONS)
    assert len(set(pair.leaders(pair.first).values())) == 2
    with Traffic(mirror.source, topic) as traffic:
        wait_until(lambda: traffic.written > 1_000, what="traffic")
        pair.second.kill()
        pair.await_all_led_by(pair.first)
        reached = traffic.written
        wait_until(lambda: traffic.written > reached + 1_000, what="more traffic")
    mirror.await_copied(topic)
    report = mirror.compare(topic)
    assert report.records[Isolation.READ_COMMITTED] == 30_000 + traffic.written
    mirror.await_states(MirrorState.MIRRORING, topic, partitions=PARTITIONS)
    assert mirror.errors() == {}
    # the killed one comes back and gets its share again
    pair.second.start()
    pair.await_shared()
    produce(mirror.source, topic, [Record(b"last", partition=n % PARTITIONS) for n in range(600)])
    mirror.await_copied(topic)
    mirror.compare(topic)


@pytest.mark.case("C08")
def test_a_node_that_slept_too_long_writes_nothing_more(pair: Pair) -> None:
    """A node stopped for longer than its session is fenced when it wakes up: it says so and shares the work again."""
    mirror, topic = pair.mirror, pair.mirror.topic()
    create_topic(mirror.source, topic, PARTITIONS)
    mirror.await_states(MirrorState.MIRRORING, topic, partitions=PARTITIONS)
    with Traffic(mirror.source, topic) as traffic:
        for sleeper, other in ((pair.second, pair.first), (pair.first, pair.second)):
            led = set(pair.leaders(other).values())
            assert len(led) == 2
            reached = traffic.written
            wait_until(lambda r=reached: traffic.written > r + 600, what="traffic")
            sleeper.signal(signal.SIGSTOP)
            pair.await_all_led_by(other)
            reached = traffic.written
            wait_until(lambda r=reached: traffic.written > r + 600, what="traffic")
            sleeper.signal(signal.SIGCONT)
            wait_until(lambda s=sleeper: s.metric("kmirror_pauses_total") == 1, 30, what="it noticed")
            assert "did not run for" in sleeper.log.read_text()
            pair.await_shared()
    mirror.await_copied(topic)
    report = mirror.compare(topic)
    assert report.records[Isolation.READ_COMMITTED] == traffic.written
    mirror.await_states(MirrorState.MIRRORING, topic, partitions=PARTITIONS)
    assert mirror.errors() == {}
