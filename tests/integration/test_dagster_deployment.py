"""Dagster's real processes over a real mirror: what is seen, what is steered, what outlives what."""

import json
import logging
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
from confluent_kafka import KafkaException
from confluent_kafka.admin import NewPartitions

from kmirror_dagster.coordination.client import NodeClient
from kmirror_dagster.coordination.launcher import node_endpoint, stop_node
from kmirror_dagster.coordination.models import CreateMirror, VerbRequest
from kmirror_dagster.lifecycle import MirrorState
from kmirror_dagster.sandbox.cluster import SandboxCluster
from kmirror_dagster.settings import load_mirror
from kmirror_dagster.verification.compare import compare_mirror
from tests.conftest import start_all
from tests.helpers.dagster_processes import DagsterProcesses
from tests.helpers.kafka import Record, admin, create_topic, log_range, produce
from tests.helpers.secured import client_properties, new_cluster
from tests.helpers.waiting import unique_name, wait_until

logger = logging.getLogger(__name__)

pytestmark = [pytest.mark.integration, pytest.mark.timeout(900)]

_REFRESH_MS = 5_000

_LOCATION = """\
from pathlib import Path
from dagster import in_process_executor
from kmirror_dagster.orchestration import KMirrorResource, build_mirror_definitions

defs = build_mirror_definitions(
    mirrors=[Path({mirror!r})],
    resource=KMirrorResource(mode="local", node_config={node!r}, state_dir={state!r}),
    executor=in_process_executor,
)
"""


@dataclass(frozen=True)
class Deployment:
    """Two clusters, Dagster on them, and a node that its keeper started."""

    source: SandboxCluster
    destination: SandboxCluster
    dagster: DagsterProcesses
    mirror: str
    document: Path
    state_dir: Path

    @property
    def asset(self) -> tuple[str, str]:
        """Key of the mirror's asset."""
        return ("kafka_mirror", self.mirror)

    def client(self) -> NodeClient:
        """Client of the node."""
        return NodeClient.discover(self.state_dir)

    def is_ready(self) -> bool:
        """Whether the node that runs now is ready; one that took too long is replaced by its keeper."""
        running = node_endpoint(self.state_dir)
        if running is None:
            return False
        with running.client(timeout_s=5) as client:
            return client.ready()

    def kmirror(self, *arguments: str) -> int:
        """Run a command for the deployment's state directory; its exit code."""
        command = [sys.executable, "-m", "kmirror_dagster.cli.main", *arguments]
        environ = {**os.environ, "KMIRROR_STATE_DIR": str(self.state_dir)}
        return subprocess.run(command, env=environ, timeout=120, check=False).returncode

    def new_topic(self, partitions: int = 1, records: int = 0) -> str:
        """A topic at the source that the mirror's filter selects."""
        topic = unique_name(f"{self.mirror}.t")
        create_topic(self.source.bootstrap, topic, partitions)
        self.write(topic, records)
        return topic

    def write(self, topic: str, count: int) -> None:
        """Write records to partition 0 of a topic at the source."""
        produce(self.source.bootstrap, topic, [Record(b"v%d" % number) for number in range(count)])

    def await_states(self, state: MirrorState, *keys: str, deadline_s: float = 60.0) -> None:
        """Wait until Dagster shows these partitions in a state."""

        def shown() -> bool:
            seen = self.dagster.newest_states(*self.asset)
            return all(seen.get(key) == state.value for key in keys)

        wait_until(shown, deadline_s, what=f"{keys} {state} in Dagster, see {self.dagster.log}", poll_s=0.5)

    def await_equal(self, *topics: str, deadline_s: float = 60.0) -> None:
        """Wait until the destination's logs end where the source's do, and compare them."""

        def equal() -> bool:
            try:
                ends = [
                    (log_range(self.source.bootstrap, topic), log_range(self.destination.bootstrap, topic))
                    for topic in topics
                ]
            except KafkaException:  # not created at the destination yet
                return False
            return all(source == destination for source, destination in ends)

        wait_until(equal, deadline_s, what=f"{topics} equal", poll_s=0.2)
        report = compare_mirror(load_mirror(self.document), topics)
        assert report.ok, report


@pytest.fixture(scope="module")
def deployment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    home = tmp_path_factory.mktemp("deployment")
    source, destination = new_cluster("source", home, role="source"), new_cluster("destination", home)
    mirror, state_dir = unique_name("m"), home / "state"
    document, node = home / "mirror.yaml", home / "node.yaml"
    dagster = DagsterProcesses(
        home / "dagster", _LOCATION.format(mirror=str(document), node=str(node), state=str(state_dir))
    )
    try:
        start_all([source, destination])
        settings = {
            "mirror": mirror,
            "source": client_properties(source.bootstrap, "source"),
            "destination": client_properties(destination.bootstrap, "destination"),
            "filters": {"topics.include": [f"{mirror}\\..*"]},
            "policies": {"failover": {"bad_observations": 5, "cool_down_seconds": 0}},
        }
        document.write_text(json.dumps(settings))  # JSON is YAML
        node.write_text(
            json.dumps(
                {
                    "destination": settings["destination"],
                    "mirror.metadata.refresh.interval.ms": _REFRESH_MS,
                }
            )
        )
        dagster.start()
        made = Deployment(source, destination, dagster, mirror, document, state_dir)
        wait_until(made.is_ready, 120, what="node started by its keeper", poll_s=0.2)
        with made.client() as client:
            client.create(CreateMirror(document=settings))
        yield made
    finally:
        dagster.stop()
        stop_node(state_dir)
        source.remove()
        destination.remove()


@pytest.fixture(autouse=True)
def running(deployment: Deployment) -> None:
    """Every test begins with Dagster running, however the one before ended."""
    if not deployment.dagster.is_running:
        deployment.dagster.start()


class Writer:
    """Writes to a topic of the source until it is stopped."""

    def __init__(self, deployment: Deployment, topic: str) -> None:
        self._deployment, self._topic = deployment, topic
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> "Writer":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopped.set()
        self._thread.join(30)

    def _run(self) -> None:
        while not self._stopped.wait(0.2):
            self._deployment.write(self._topic, 50)


def longest_gap_s(deployment: Deployment, topic: str, during: float) -> float:
    """Longest time in which the destination's log end stood still while the source was written to."""
    end, longest, moved, last = time.monotonic() + during, 0.0, time.monotonic(), -1
    while time.monotonic() < end:
        _, now = log_range(deployment.destination.bootstrap, topic)
        if now != last:
            longest, moved, last = max(longest, time.monotonic() - moved), time.monotonic(), now
        time.sleep(0.05)
    return max(longest, time.monotonic() - moved)


def test_new_topics_and_partitions_show_by_themselves(deployment: Deployment) -> None:
    """A new topic and a new partition are mirrored within a refresh and show in Dagster, without a restart."""
    topic = deployment.new_topic(2, records=100)
    deployment.await_states(MirrorState.MIRRORING, f"{topic}/0", f"{topic}/1")
    deployment.await_equal(topic)
    client = admin(deployment.source.bootstrap)
    client.create_partitions([NewPartitions(topic, 3)])[topic].result(30)
    deployment.await_states(MirrorState.MIRRORING, f"{topic}/2")
    wait_until(
        lambda: f"{topic}/2" in deployment.dagster.partition_keys(*deployment.asset),
        60,
        what="key of the partition",
    )
    assert deployment.dagster.sensors() == {
        "kmirror_node_keeper": "RUNNING",
        f"{deployment.mirror.replace('-', '_')}_refresh": "RUNNING",
        f"{deployment.mirror.replace('-', '_')}_states": "RUNNING",
        f"{deployment.mirror.replace('-', '_')}_failover": "STOPPED",
    }


def test_steered_from_dagster(deployment: Deployment) -> None:
    """Pausing, materializing and resuming from Dagster reach the mirror; the state shows in the event log."""
    dagster, topic = deployment.dagster, deployment.new_topic(records=10)
    wide = deployment.new_topic(2)
    key, many = f"{topic}/0", [f"{wide}/0", f"{wide}/1"]
    deployment.await_states(MirrorState.MIRRORING, key, *many)
    wait_until(
        lambda: {key, *many} <= set(dagster.partition_keys(*deployment.asset)), 60, what="keys of partitions"
    )
    backfill = dagster.backfill(deployment.asset, many)  # the daemon looks at backfills twice a minute
    pause = {"ops": {"kmirror_pause_op": {"config": {"topics": [topic.replace(".", r"\.")]}}}}
    assert dagster.wait_run(dagster.launch("kmirror_pause", pause)) == "SUCCESS"
    deployment.await_states(MirrorState.PAUSED, key)
    assert dagster.wait_run(dagster.materialize(deployment.asset, key)) == "SUCCESS"  # it is as wanted
    assert dagster.newest_states(*deployment.asset)[key] == "PAUSED"
    deployment.write(topic, 10)
    assert dagster.wait_run(dagster.launch("kmirror_resume")) == "SUCCESS"
    deployment.await_states(MirrorState.MIRRORING, key)
    deployment.await_equal(topic)
    wait_until(
        lambda: dagster.backfill_runs(backfill) == ["SUCCESS"], 90, what="one run for both", poll_s=0.5
    )


@pytest.mark.case("C37")
def test_replication_outlives_reload_and_killed_processes(deployment: Deployment) -> None:
    """Reloads, a killed code server and a killed daemon leave the one node and its copying alone."""
    dagster, topic = deployment.dagster, deployment.new_topic(1, records=10)
    deployment.await_states(MirrorState.MIRRORING, f"{topic}/0")
    before = node_endpoint(deployment.state_dir)
    assert before is not None
    with Writer(deployment, topic), Watch(deployment, topic) as watch:
        for _ in range(3):
            dagster.reload()
            watch.await_more()
        for word in ("api grpc", "code-server", "dagster._daemon"):
            killed = dagster.processes(word)
            for process in killed:
                process.kill()
            psutil.wait_procs(killed, timeout=10)
            watch.await_more()
        dagster.kill()
        watch.await_more()
        dagster.start()
        watch.await_more()
    logger.info("the copy stood still for %.1f s at most", watch.gap_s)
    assert watch.nodes == {before.pid}  # one writer at all times, and always the same
    assert watch.gap_s < 5
    assert node_endpoint(deployment.state_dir) == before
    with deployment.client() as client:
        assert set(client.cluster().leaders.values()) == {before.node_id}
    deployment.await_equal(topic)


class Watch:
    """Watches a destination log, and the processes that run a node, while the block runs.

    Attributes:
        gap_s: longest time that the log stood still.
        nodes: process ids of nodes on the deployment's state directory.
    """

    def __init__(self, deployment: Deployment, topic: str) -> None:
        self.gap_s = 0.0
        self.nodes: set[int] = set()
        self._end = -1
        self._deployment, self._topic = deployment, topic
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> "Watch":
        self._thread.start()
        self.await_more()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopped.set()
        self._thread.join(30)

    def await_more(self) -> None:
        """Wait until more has been copied than was when this was called."""
        seen = self._end
        wait_until(lambda: self._end > seen >= 0 or self._end > 0 > seen, 30, what="more copied")

    def _run(self) -> None:
        moved = time.monotonic()
        while not self._stopped.wait(0.05):
            _, end = log_range(self._deployment.destination.bootstrap, self._topic)
            if end != self._end:
                moved, self._end = time.monotonic(), end
            self.gap_s = max(self.gap_s, time.monotonic() - moved)
            self.nodes |= {process.pid for process in deployment_nodes(self._deployment)}


def deployment_nodes(deployment: Deployment) -> list[psutil.Process]:
    """Processes that run a node on the deployment's state directory, found by their command line."""
    found: list[psutil.Process] = []
    for process in psutil.process_iter():
        try:
            command = process.cmdline()
        except psutil.Error:
            continue
        if "kmirror_dagster.coordination.node" in command and str(deployment.state_dir) in command:
            found.append(process)
    return found


@pytest.mark.parametrize("away_s", [20.0, pytest.param(120.0, marks=pytest.mark.faults)])
def test_event_log_catches_up_after_dagster_was_away(deployment: Deployment, away_s: float) -> None:
    """All of Dagster killed for a time: data flows on, and afterwards the event log catches up by itself."""
    dagster = deployment.dagster
    topic, paused = deployment.new_topic(1, records=10), deployment.new_topic(1, records=10)
    deployment.await_states(MirrorState.MIRRORING, f"{topic}/0", f"{paused}/0")
    dagster.kill()
    end = time.monotonic() + away_s
    with Writer(deployment, topic):
        added = deployment.new_topic(2, records=50)
        with deployment.client() as client:
            client.verb(deployment.mirror, "pause", VerbRequest(topics=[paused.replace(".", r"\.")]))
            wait_until(
                lambda: client.mirror(deployment.mirror).states.get("PAUSED") == 1, 30, what="topic paused"
            )
        deployment.await_equal(added)
        assert longest_gap_s(deployment, topic, end - time.monotonic()) < 5
    assert dagster.processes() == []
    deployment.await_equal(topic)
    dagster.start()
    deployment.await_states(MirrorState.MIRRORING, f"{added}/0", f"{added}/1", f"{topic}/0")
    deployment.await_states(MirrorState.PAUSED, f"{paused}/0")
    with deployment.client() as client:
        client.verb(deployment.mirror, "resume")


@pytest.mark.case("C37")
def test_keeper_restarts_a_killed_node_once(deployment: Deployment) -> None:
    """A killed node is started again by its keeper."""
    topic = deployment.new_topic(1, records=100)
    deployment.await_states(MirrorState.MIRRORING, f"{topic}/0")
    before = node_endpoint(deployment.state_dir)
    assert before is not None
    psutil.Process(before.pid).kill()
    deployment.write(topic, 100)
    after = wait_until(lambda: node_endpoint(deployment.state_dir), 60, what="a new node", poll_s=0.3)
    assert after.pid != before.pid
    deployment.await_equal(topic)


@pytest.mark.case("C37")
def test_a_stopped_node_leaves_no_process_and_stays_stopped(deployment: Deployment) -> None:
    """`kmirror node stop` ends the node and leaves no orphan; its keeper lets it be until it is started again."""
    topic = deployment.new_topic(1, records=100)
    deployment.await_states(MirrorState.MIRRORING, f"{topic}/0")
    stopped_s = time.time()
    assert deployment.kmirror("node", "stop") == 0
    assert deployment_nodes(deployment) == []
    deployment.write(topic, 100)
    _, end = log_range(deployment.destination.bootstrap, topic)

    def let_be() -> bool:
        tick = deployment.dagster.ticks("kmirror_node_keeper", 1)[0]
        return tick["timestamp"] > stopped_s and "stopped on purpose" in (tick["skipReason"] or "")

    wait_until(let_be, 60, what="a tick of the keeper", poll_s=0.5)
    assert deployment_nodes(deployment) == []
    assert log_range(deployment.destination.bootstrap, topic)[1] == end  # nobody writes
    assert deployment.kmirror("node", "start", "--config", str(deployment.document.parent / "node.yaml")) == 0
    assert len(deployment_nodes(deployment)) == 1
    deployment.await_equal(topic)


def test_failover_fires_once_and_again_after_a_second_set_up(deployment: Deployment) -> None:
    """The source goes: the armed sensor fires once, and within a minute the destination is written to.

    The minute counts from the first bad look. Once the mirror was set up again, the next outage fires it again.
    """
    dagster = deployment.dagster
    sensor = f"{deployment.mirror.replace('-', '_')}_failover"
    topic = deployment.new_topic(2, records=50)
    deployment.await_states(MirrorState.MIRRORING, f"{topic}/0", f"{topic}/1")
    dagster.arm(sensor)
    first_s = _outage(deployment, topic)
    assert len(dagster.runs("kmirror_failover")) == 1
    _set_up_again(deployment, topic)
    second_s = _outage(deployment, topic)
    logger.info("written to the destination %.1f s and %.1f s after the first bad look", first_s, second_s)
    assert max(first_s, second_s) < 60
    assert [run["status"] for run in dagster.runs("kmirror_failover")] == ["SUCCESS", "SUCCESS"]


def _outage(deployment: Deployment, topic: str) -> float:
    """Stop the source; seconds from the first bad look until a producer's record is in the destination."""
    before = len(deployment.dagster.runs("kmirror_failover"))
    _, end = log_range(deployment.destination.bootstrap, topic)
    deployment.source.stop_broker(1)
    with deployment.client() as client:
        first_bad_ms = wait_until(lambda: _first_bad_ms(client, deployment.mirror), 30, what="a bad look")

        def stopped() -> bool:
            states = client.mirror(deployment.mirror).states
            return {state for state, count in states.items() if count} == {"STOPPED"}

        wait_until(stopped, 90, what=f"all STOPPED; see {deployment.dagster.log}", poll_s=0.2)
    produce(deployment.destination.bootstrap, topic, [Record(b"after the failover")])
    took_s = time.time() - first_bad_ms / 1000
    assert log_range(deployment.destination.bootstrap, topic)[1] == end + 1
    wait_until(lambda: _succeeded(deployment) == before + 1, 60, what="run succeeded", poll_s=0.5)
    assert len(deployment.dagster.runs("kmirror_failover")) == before + 1
    # the sensor goes on looking, and has nothing left to do
    sensor = f"{deployment.mirror.replace('-', '_')}_failover"
    wait_until(
        lambda: "nothing to fail over" in (deployment.dagster.ticks(sensor, 1)[0]["skipReason"] or ""), 60
    )
    return took_s


def _succeeded(deployment: Deployment) -> int:
    return [run["status"] for run in deployment.dagster.runs("kmirror_failover")].count("SUCCESS")


def _first_bad_ms(client: NodeClient, mirror: str) -> int | None:
    looks = [look for history in client.probes(mirror) for look in history.source]
    return min((look.at_ms for look in looks if not look.ok), default=None)


def _set_up_again(deployment: Deployment, topic: str) -> None:
    """Start the source, and mirror it onto the destination from the beginning."""
    with deployment.client() as client:
        topics = [each.topic for each in client.mirror(deployment.mirror).topics]
        client.delete(deployment.mirror)
        destination = admin(deployment.destination.bootstrap)
        for deleted in destination.delete_topics(topics).values():
            deleted.result(30)
        deployment.source.start_broker(1)
        client.create(CreateMirror(document=json.loads(deployment.document.read_text())))
    deployment.await_equal(topic)
    wait_until(lambda: _all_mirroring(deployment), 60, what="all MIRRORING again")


def _all_mirroring(deployment: Deployment) -> bool:
    with deployment.client() as client:
        states = client.mirror(deployment.mirror).states
        return {state for state, count in states.items() if count} == {"MIRRORING"}
