"""The node process: how it starts, what makes it refuse to, how it ends, and what it survives."""

import json
import os
import signal
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest
from confluent_kafka.admin import AlterConfigOpType, ConfigEntry, ConfigResource, ResourceType

from kmirror_dagster.coordination.client import NodeClient
from kmirror_dagster.coordination.launcher import ensure_node, node_endpoint, start_node, stop_node
from kmirror_dagster.coordination.models import VerbRequest
from kmirror_dagster.coordination.state_directory import StateDirectory
from kmirror_dagster.errors import (
    ClusterUnreachableError,
    KmirrorError,
    NodeRunningError,
    NodeUnavailableError,
    PortInUseError,
    SettingsError,
    UnknownMirrorError,
    UsageError,
)
from kmirror_dagster.lifecycle import MirrorState
from kmirror_dagster.records import STATE_TOPIC, PartitionRecord, partition_owner
from kmirror_dagster.sandbox.certificates import CertificateFolder
from kmirror_dagster.sandbox.cluster import SandboxCluster
from kmirror_dagster.settings import node_from_document
from tests.conftest import ClusterFactory, Clusters
from tests.helpers.kafka import DEADLINE_S, Record, admin, create_topic, produce
from tests.helpers.nodes import STATE_PARTITIONS, NodeMirror, NodeProcess
from tests.helpers.secured import client_properties, new_cluster
from tests.helpers.waiting import wait_until

pytestmark = [pytest.mark.integration, pytest.mark.timeout(240)]


@pytest.fixture(scope="module")
def destination(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SandboxCluster]:
    """A destination of this module's own: its state topic is tampered with and its broker is stopped."""
    cluster = new_cluster("node-destination", tmp_path_factory.mktemp("cluster"))
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.remove()


@pytest.fixture
def node(destination: SandboxCluster, tmp_path: Path) -> Iterator[NodeProcess]:
    """A node that is running."""
    process = NodeProcess(tmp_path / "state", destination.bootstrap)
    try:
        yield process.start()
    finally:
        process.stop()


@pytest.fixture
def mirror(clusters: Clusters, node: NodeProcess, destination: SandboxCluster) -> Iterator[NodeMirror]:
    """A mirror on that node."""
    made = NodeMirror(node, clusters.source.bootstrap, destination.bootstrap)
    made.create()
    yield made
    made.delete()


def log_entries(node: NodeProcess) -> list[dict[str, object]]:
    """The node's log, line by line."""
    return [json.loads(line) for line in node.log.read_text().splitlines()]


def processes_of(state_dir: Path) -> list[int]:
    """Processes that were started on a state directory."""
    return [
        process.pid
        for process in psutil.process_iter(["cmdline", "status"])
        if str(state_dir) in (process.info["cmdline"] or [])
        and process.info["status"] != psutil.STATUS_ZOMBIE
    ]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signal_ends_a_node_in_order(node: NodeProcess, number: signal.Signals) -> None:
    """A signal drains the node: it leaves the group, withdraws its endpoint and ends with 0."""
    pid = node.process.pid
    node.signal(number)
    wait_until(
        lambda: not psutil.pid_exists(pid) or not processes_of(node.state_dir), 15, what="the node ended"
    )
    assert node.endpoint is None
    assert log_entries(node)[-1]["message"] == "node ended"
    assert not stop_node(node.state_dir)


def test_shutdown_by_the_api_ends_a_node(node: NodeProcess) -> None:
    """The API's shutdown is the same as a signal."""
    node.client.shutdown()
    wait_until(lambda: not processes_of(node.state_dir), 15, what="the node ended")
    with pytest.raises(NodeUnavailableError, match="kmirror node start"):
        NodeClient.discover(node.state_dir, {})


def test_node_comes_back_under_its_name(node: NodeProcess) -> None:
    """A restart keeps name and token, and the log is added to, one JSON object a line."""
    before, token = node.client.node(), StateDirectory(node.state_dir).token({})
    node.stop()
    node.start()
    after = node.client.node()
    assert after.node_id == before.node_id
    assert after.started_ms > before.started_ms
    assert StateDirectory(node.state_dir).token({}) == token
    assert after.coordinator_partitions == list(range(STATE_PARTITIONS))
    assert {entry["node"] for entry in log_entries(node)[1:]} == {before.node_id}


def test_second_node_on_a_directory_is_refused(node: NodeProcess) -> None:
    """One line names the node that runs there; the running one is not disturbed."""
    with pytest.raises(NodeRunningError, match=f"pid {node.process.pid}.*--state-dir") as caught:
        start_node(node.state_dir, node.config, wait_s=30)
    assert "\n" not in str(caught.value)
    assert node.client.ready()


def test_callers_that_race_get_one_node(destination: SandboxCluster, tmp_path: Path) -> None:
    """Several callers that want a node at once come out with the same one."""
    state_dir = tmp_path / "state"
    settings = node_from_document(
        {"destination": client_properties(destination.bootstrap, "destination")}, os.environ
    )
    try:
        with ThreadPoolExecutor(3) as pool:
            found = [pool.submit(ensure_node, state_dir, settings, wait_s=90) for _ in range(3)]
            pids = {future.result().pid for future in found}
        assert pids == set(processes_of(state_dir))
        assert len(pids) == 1
    finally:
        stop_node(state_dir)


def test_port_in_use_is_named(destination: SandboxCluster, tmp_path: Path) -> None:
    """A port that is taken is one line with the address; no process is left."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        process = NodeProcess(tmp_path / "state", destination.bootstrap, api_port=port)
        with pytest.raises(PortInUseError, match=f"127.0.0.1:{port}.*api_port") as caught:
            process.start()
    assert caught.value.exit_code == 2
    assert not processes_of(process.state_dir)


def test_unreachable_destination_is_named(tmp_path: Path) -> None:
    """A destination that does not answer is one line with its address, within the time given."""
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{closed.getsockname()[1]}"
        process = NodeProcess(tmp_path / "state", address)
        with pytest.raises(ClusterUnreachableError, match=address):
            start_node(process.state_dir, process.config, wait_s=8)
    assert not processes_of(process.state_dir)
    assert node_endpoint(process.state_dir) is None


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("destination: [", "not valid YAML"),
        ("destinaton: {}", "destination"),
        ("destination: {bootstrap.servers: '${NOPE}'}", "NOPE"),
    ],
)
def test_bad_node_document_is_named(tmp_path: Path, text: str, named: str) -> None:
    """A document with a mistake is one line that names it; no process is left."""
    config = tmp_path / "node.yaml"
    config.write_text(text)
    with pytest.raises(SettingsError, match=named) as caught:
        start_node(tmp_path / "state", config, wait_s=30, environ={"PATH": os.environ["PATH"]})
    assert "\n" not in str(caught.value)
    assert not processes_of(tmp_path / "state")


def test_missing_node_document_is_named(tmp_path: Path) -> None:
    """A file that is not there is named."""
    with pytest.raises(SettingsError, match=r"nowhere\.yaml"):
        start_node(tmp_path / "state", tmp_path / "nowhere.yaml", wait_s=30)


def test_node_that_hangs_is_killed_at_last(node: NodeProcess) -> None:
    """Stopping does not wait for ever for a process that does not react."""
    pid = node.process.pid
    node.signal(signal.SIGSTOP)
    assert stop_node(node.state_dir, wait_s=1)
    assert not processes_of(node.state_dir)
    assert not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


def test_stop_during_a_start_is_obeyed(tmp_path: Path) -> None:
    """A node that still waits for its destination ends at once when it is told to."""
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        process = NodeProcess(tmp_path / "state", f"127.0.0.1:{closed.getsockname()[1]}")
        starter = threading.Thread(target=_start_in_vain, args=(process,))
        starter.start()
        wait_until(lambda: process.endpoint is not None, 30, what="the API of a starting node")
        assert process.client.live()
        assert not process.client.ready()
        assert stop_node(process.state_dir, wait_s=10)
        starter.join(30)
        process.stop()
    assert not processes_of(process.state_dir)


def _start_in_vain(process: NodeProcess) -> None:
    with pytest.raises(KmirrorError):
        start_node(process.state_dir, process.config, wait_s=60)


def test_api_speaks_tls(destination: SandboxCluster, tmp_path: Path) -> None:
    """With a certificate the API is HTTPS; clients of the state directory and other nodes verify it."""
    pair = CertificateFolder(tmp_path / "tls").server()
    tls = {"api_tls_certificate": str(pair.certificate), "api_tls_key": str(pair.key)}
    shared = {"KMIRROR_TOKEN": "shared-by-the-group"}
    one = NodeProcess(tmp_path / "one", destination.bootstrap, environ=shared, **tls)
    two = NodeProcess(tmp_path / "two", destination.bootstrap, environ=shared, **tls)
    try:
        one.start()
        two.start()
        with NodeClient.discover(one.state_dir, {}) as client:
            assert client.endpoints[0].startswith("https://")
            wait_until(lambda: len(set(client.cluster().leaders.values())) == 2, 30, what="both lead")
            endpoint, token = client.endpoints[0], StateDirectory(one.state_dir).token({})
        assert token is not None
        stranger = NodeClient(endpoint, token, ca=CertificateFolder(tmp_path / "other").server().certificate)
        with pytest.raises(NodeUnavailableError), stranger:
            stranger.node()
        # each asks the other for its part: a verb on a mirror of either goes through
        for node in (one, two):
            with pytest.raises(UnknownMirrorError):
                node.client.verb("nothing", "stop")
            assert node.client.mirrors() == []
    finally:
        one.stop()
        two.stop()


# the state topic


def alter_policy(bootstrap: str, value: str) -> None:
    """Set the state topic's cleanup policy."""
    entry = ConfigEntry("cleanup.policy", value, incremental_operation=AlterConfigOpType.SET)
    resource = ConfigResource(ResourceType.TOPIC, STATE_TOPIC, incremental_configs=[entry])
    client = admin(bootstrap)
    client.incremental_alter_configs([resource])[resource].result(DEADLINE_S)


def test_state_topic_is_compacted_and_its_size_fixed(node: NodeProcess, destination: SandboxCluster) -> None:
    """It is made compacted with the configured partitions; another number later changes nothing."""
    resource = ConfigResource(ResourceType.TOPIC, STATE_TOPIC)
    client = admin(destination.bootstrap)
    configs = client.describe_configs([resource])[resource].result(DEADLINE_S)
    assert configs["cleanup.policy"].value == "compact"
    node.stop()
    other = NodeProcess(
        node.state_dir.with_name("other"), destination.bootstrap, **{"mirror.topic.num.partitions": 3}
    )
    try:
        assert other.start().client.cluster().state_partitions == STATE_PARTITIONS
    finally:
        other.stop()


def test_state_topic_that_would_lose_state_is_refused(destination: SandboxCluster, tmp_path: Path) -> None:
    """A state topic that is deleted by age is refused with the setting to change."""
    process = NodeProcess(tmp_path / "state", destination.bootstrap)
    process.start()
    process.stop()
    alter_policy(destination.bootstrap, "delete")
    try:
        with pytest.raises(UsageError, match=r"cleanup\.policy is 'delete'"):
            process.start()
    finally:
        alter_policy(destination.bootstrap, "compact")


def test_corrupt_record_is_quarantined_and_the_others_load(
    node: NodeProcess, mirror: NodeMirror, clusters: Clusters, destination: SandboxCluster
) -> None:
    """Junk in the state topic is listed, at once and after a restart; the mirrors around it go on."""
    topic = mirror.topic()
    create_topic(clusters.source.bootstrap, topic, 2)
    mirror.await_states(MirrorState.MIRRORING, topic, partitions=2)
    junk = PartitionRecord(mirror="gone", topic="t", partition=0, state=MirrorState.STOPPED)
    owner = partition_owner("gone", "t", 0, STATE_PARTITIONS)
    bad = Record(value=b'{"v":1,"state":"SLEEP', key=junk.key(), partition=owner)
    newer = Record(value=b'{"v":99}', key=junk.key().replace(b"gone", b"later"), partition=0)
    produce(destination.bootstrap, STATE_TOPIC, [bad, newer])
    wait_until(lambda: len(node.client.node().quarantined_records) == 2, 10, what="two records quarantined")
    node.stop()
    node.start()
    told = node.client.node().quarantined_records
    assert len(told) == 2
    assert any(f"{STATE_TOPIC}/{owner} offset " in text for text in told)
    mirror.await_states(MirrorState.MIRRORING, topic, partitions=2)
    assert node.metric("kmirror_quarantined_records") == 2
    # a tombstone of the same key ends it
    produce(destination.bootstrap, STATE_TOPIC, [Record(key=bad.key, partition=owner)])
    wait_until(lambda: len(node.client.node().quarantined_records) == 1, 10, what="one record left")


def test_destination_that_was_away_is_led_again(
    node: NodeProcess, mirror: NodeMirror, clusters: Clusters, destination: SandboxCluster
) -> None:
    """A destination broker that restarts interrupts and breaks nothing: leads and copies come back alone."""
    topic = mirror.topic()
    create_topic(clusters.source.bootstrap, topic, 3)
    records = [Record(value=b"%d" % n, partition=n % 3) for n in range(3_000)]
    produce(clusters.source.bootstrap, topic, records)
    mirror.await_copied(topic)
    destination.stop_broker()
    produce(clusters.source.bootstrap, topic, records)
    destination.start_broker()
    mirror.await_copied(topic)
    wait_until(node.client.ready, 60, what=f"the node leads again; see {node.log}")
    node.client.verb(mirror.name, "pause", VerbRequest())
    mirror.await_states(MirrorState.PAUSED, topic)
    node.client.verb(mirror.name, "resume", VerbRequest())
    mirror.compare(topic)


def test_metrics_are_prometheus_text(node: NodeProcess, mirror: NodeMirror, clusters: Clusters) -> None:
    """Figures of states, lag, bytes and refreshes are there under stable names."""
    topic = mirror.topic()
    create_topic(clusters.source.bootstrap, topic, 2)
    produce(clusters.source.bootstrap, topic, [Record(value=b"x" * 100)] * 50)
    mirror.await_copied(topic)
    assert node.metric("kmirror_partitions", mirror=mirror.name, state="MIRRORING") == 2
    assert node.metric("kmirror_copied_records_total", mirror=mirror.name) == 50
    assert node.metric("kmirror_copied_bytes_total", mirror=mirror.name) > 0
    assert node.metric("kmirror_led_coordinator_partitions") == STATE_PARTITIONS
    wait_until(lambda: node.metric("kmirror_lag_records", mirror=mirror.name) == 0, 10, what="lag 0")
    assert node.metric("kmirror_refresh_finished_timestamp_seconds", mirror=mirror.name) > 1_700_000_000


def test_lost_state_topic_ends_the_node(cluster_factory: ClusterFactory, tmp_path: Path) -> None:
    """What a node knows belongs to one state topic: when that is deleted it ends and says so."""
    cluster = cluster_factory("lost-state")
    process = NodeProcess(tmp_path / "state", cluster.bootstrap).start()
    try:
        client = admin(cluster.bootstrap)
        client.delete_topics([STATE_TOPIC])[STATE_TOPIC].result(DEADLINE_S)
        wait_until(lambda: process.endpoint is None, 90, what=f"the node ended; see {process.log}")
        last = [entry for entry in log_entries(process) if "error" in entry][-1]
        assert "was deleted" in str(last["message"])
        assert process.start().client.ready()
    finally:
        process.stop()
