"""Sandbox clusters broken on purpose: killed, paused, port taken, starter gone."""

import signal
import socket
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from confluent_kafka import KafkaException

from kmirror_dagster.errors import PortInUseError, SandboxError
from kmirror_dagster.sandbox import cluster as cluster_module
from kmirror_dagster.sandbox.cluster import SandboxCluster
from kmirror_dagster.sandbox.ports import HOST, PortClaim
from tests.conftest import ClusterFactory
from tests.helpers.kafka import Record, admin, consume, create_topic, log_range, produce
from tests.helpers.waiting import wait_until

pytestmark = [pytest.mark.integration, pytest.mark.unsecured("about the sandbox itself")]


def is_gone(pid: int) -> bool:
    return not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


def test_killed_broker_comes_back_with_its_data(cluster_factory: ClusterFactory) -> None:
    """SIGKILL, then start: same address, same cluster id, same records; so do stop and start."""
    cluster = cluster_factory()
    address, cluster_id = cluster.bootstrap, cluster.cluster_id
    create_topic(address, "kept")
    produce(address, "kept", [Record(b"1"), Record(b"2")])
    pid = cluster.broker_pid()
    cluster.kill_broker()
    assert pid is not None
    assert is_gone(pid)
    assert not cluster.is_alive()
    cluster.start_broker()
    assert (cluster.bootstrap, cluster.cluster_id) == (address, cluster_id)
    assert [record.value for record in consume(address, "kept")] == [b"1", b"2"]
    cluster.stop()
    assert cluster.running_brokers() == []
    cluster.start()
    produce(address, "kept", [Record(b"3")])
    assert log_range(address, "kept") == (0, 3)


def test_paused_broker_answers_nothing_until_resumed(cluster_factory: ClusterFactory) -> None:
    """A paused cluster accepts connections and does not answer; resumed, it serves again."""
    cluster = cluster_factory()
    client = admin(cluster.bootstrap)
    client.list_topics(timeout=10)
    cluster.pause()
    assert cluster.is_alive()
    with socket.create_connection((HOST, int(cluster.bootstrap.rsplit(":", 1)[1])), 5):
        pass
    with pytest.raises(KafkaException):
        client.list_topics(timeout=1)
    cluster.resume()
    cluster.wait_ready()
    cluster.pause()
    cluster.stop(wait_s=5)
    assert not cluster.is_alive()


def test_three_brokers_survive_the_loss_of_one(cluster_factory: ClusterFactory) -> None:
    """With one of three brokers killed a replicated topic takes writes; the broker rejoins."""
    cluster = cluster_factory(brokers=3)
    create_topic(cluster.bootstrap, "replicated", replicas=3, configs={"min.insync.replicas": "2"})
    produce(cluster.bootstrap, "replicated", [Record(b"before")])
    cluster.kill_broker(2)
    assert cluster.running_brokers() == [1, 3]
    produce(cluster.bootstrap, "replicated", [Record(b"without")])
    cluster.start_broker(2)
    client = admin(cluster.bootstrap)

    def in_sync() -> bool:
        topic = client.list_topics("replicated", timeout=10).topics["replicated"]
        return len(topic.partitions[0].isrs) == 3

    wait_until(in_sync, 30, what="all replicas in sync")
    assert [record.value for record in consume(cluster.bootstrap, "replicated")] == [b"before", b"without"]
    with pytest.raises(SandboxError, match="no broker 4"):
        cluster.kill_broker(4)


def test_port_taken_meanwhile_is_named(cluster_factory: ClusterFactory) -> None:
    """A stopped cluster whose port another program took does not start; the message names both."""
    cluster = cluster_factory()
    port = int(cluster.bootstrap.rsplit(":", 1)[1])
    cluster.stop()
    with socket.create_server((HOST, port)):
        with pytest.raises(
            PortInUseError, match=rf"port {port} of sandbox cluster .* is taken by process \d+"
        ):
            cluster.start()
        assert cluster.running_brokers() == []
    cluster.start()


def test_broker_that_does_not_start_tells_why(cluster_factory: ClusterFactory) -> None:
    """A refused setting ends the start at once, in one line with the reason, and nothing is left."""
    cluster = cluster_factory(overrides={"num.io.threads": "0"}, start=False)
    with pytest.raises(SandboxError, match=r"num\.io\.threads") as caught:
        cluster.start()
    assert "\n" not in str(caught.value)
    assert not list(cluster.home.rglob("broker.pid"))


def test_port_lost_at_the_last_moment(
    cluster_factory: ClusterFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A port that is taken between choice and start is not the end: the cluster starts on others."""
    choose = cluster_module.choose_ports
    with socket.create_server((HOST, 0)) as thief:
        taken = thief.getsockname()[1]
        choices: list[int] = []

        def unlucky(claim: PortClaim, brokers: int, names: tuple[str, ...]) -> tuple[dict[str, int], ...]:
            (ports,) = choose(claim, brokers, names)
            choices.append(1)
            return ({**ports, "CLIENT": taken},) if len(choices) == 1 else (ports,)

        monkeypatch.setattr(cluster_module, "choose_ports", unlucky)
        cluster = cluster_factory()
    assert len(choices) == 2
    create_topic(cluster.bootstrap, "served")


STARTER = """
import signal, sys
from pathlib import Path
from kmirror_dagster.sandbox.cluster import SandboxCluster
cluster = SandboxCluster("source", Path(sys.argv[1]))
cluster.start()
if sys.argv[2] == "detach":
    cluster.detach()
else:
    print(cluster.broker_pid(), flush=True)
    signal.pause()
"""


def run_starter(home: Path, what: str) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [sys.executable, "-c", STARTER, str(home), what],
        cwd=Path.cwd(),
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_no_broker_outlives_its_starter(tmp_path: Path, number: signal.Signals) -> None:
    """However the process that started a cluster ends, its JVM ends too."""
    with run_starter(tmp_path, "wait") as starter:
        assert starter.stdout is not None
        pid = int(starter.stdout.readline())
        assert not is_gone(pid)
        starter.send_signal(number)
        starter.wait(10)
    wait_until(lambda: is_gone(pid), 15, what="end of the JVM")


def test_detached_cluster_is_found_and_stopped(tmp_path: Path) -> None:
    """A detached cluster lives on without its starter; another process finds it by its files and ends it."""
    with run_starter(tmp_path, "detach") as starter:
        assert starter.wait(90) == 0
    cluster = SandboxCluster("source", tmp_path)
    pid = cluster.broker_pid()
    assert pid is not None
    cluster.start()
    assert cluster.broker_pid() == pid
    create_topic(cluster.bootstrap, "alive")
    cluster.stop()
    assert is_gone(pid)
