"""Failover of a thousand partitions: the time from the call until every one of them can be written to."""

import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass

import pytest
from confluent_kafka.admin import ConfigResource, NewTopic

from kmirror_dagster.coordination.models import VerbRequest
from kmirror_dagster.lifecycle import MirrorState
from kmirror_dagster.sandbox.cluster import SandboxCluster
from tests.conftest import start_all
from tests.helpers.faults_page import record_figure
from tests.helpers.kafka import Record, admin, producer, write
from tests.helpers.nodes import NodeMirror, NodeProcess, mirrored
from tests.helpers.waiting import wait_until

pytestmark = [pytest.mark.integration, pytest.mark.faults, pytest.mark.timeout(900)]

_TOPICS = 100
_PARTITIONS = 10
_ALL_S = 10.0
_ONE_S = 1.0
_CONFIGS = {"retention.ms": "-1", "compression.type": "lz4"}


@dataclass
class Standby:
    """A mirror of many topics whose source is gone."""

    node: NodeProcess
    mirror: NodeMirror
    topics: list[str]
    when: str


_AT_ONCE, _LATER = "just now", "long ago, all partitions have failed"


@pytest.fixture(scope="module", params=[_AT_ONCE, _LATER], ids=["at-once", "later"])
def standby(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Standby]:
    """1,000 partitions mirrored by one node; then the source is killed for good."""
    home = tmp_path_factory.mktemp("many")
    source, destination = SandboxCluster("source", home), SandboxCluster("destination", home)
    with ExitStack() as stack:
        stack.callback(source.remove)
        stack.callback(destination.remove)
        start_all([source, destination])
        node = NodeProcess(home / "node", destination.bootstrap)
        stack.callback(node.stop)
        node.start()
        mirror = stack.enter_context(mirrored(node, source.bootstrap, destination.bootstrap))
        topics = [mirror.topic() for _ in range(_TOPICS)]
        client = admin(source.bootstrap)
        new = [NewTopic(topic, _PARTITIONS, 1, config=_CONFIGS) for topic in topics]
        for made in client.create_topics(new).values():
            made.result(120)
        write_everywhere(source.bootstrap, topics)

        wait_until(
            lambda: mirror.summary.states == {"MIRRORING": _TOPICS * _PARTITIONS},
            300,
            what=f"1,000 partitions MIRRORING; see {node.log}",
            poll_s=1,
        )
        mirror.await_copied(*topics, deadline_s=120)
        source.kill_broker(1)
        if request.param == _LATER:
            wait_until(
                lambda: mirror.summary.states.get("MIRRORING", 0) == 0, 120, what="all failed", poll_s=1
            )
        yield Standby(node, mirror, topics, request.param)


def write_everywhere(bootstrap: str, topics: list[str]) -> None:
    """One record to each partition of topics; returns when all are acknowledged."""
    client = producer(bootstrap, {"linger.ms": 0})
    for topic in topics:
        write(client, topic, [Record(b"x", partition=number) for number in range(_PARTITIONS)])
    assert client.flush(60) == 0


def stop_by_command(standby: Standby, *more: str) -> None:
    """`kmirror stop`, in a process of its own, as an operator runs it."""
    command = [sys.executable, "-m", "kmirror_dagster.cli.main", "--state-dir", str(standby.node.state_dir)]
    command += ["stop", standby.mirror.name, *more]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr


def stop_by_api(standby: Standby, topic: str) -> None:
    """The same verb through the client, and the wait for it."""
    client = standby.node.client
    client.verb(standby.mirror.name, "stop", VerbRequest(topics=[topic.replace(".", r"\.")]))

    def stopped() -> bool:
        found = client.iter_partitions(standby.mirror.name, topic=topic)
        return {status.state for status in found} == {MirrorState.STOPPED}

    wait_until(stopped, 60, poll_s=0.01)


def held_values(standby: Standby) -> set[str | None]:
    """Compression of topics at the destination, which is held back while they are mirrored."""
    resources = [ConfigResource(ConfigResource.Type.TOPIC, topic) for topic in standby.topics]
    client = admin(standby.mirror.destination)
    return {
        future.result(60)["compression.type"].value for future in client.describe_configs(resources).values()
    }


def test_failover_of_one_topic_and_of_all(standby: Standby, capsys: pytest.CaptureFixture[str]) -> None:
    """The source is gone the whole time: one topic within a second, 1,000 partitions within ten."""
    destination, topics = standby.mirror.destination, standby.topics
    began = time.monotonic()
    stop_by_api(standby, topics[0])
    write_everywhere(destination, topics[:1])
    one_s = time.monotonic() - began
    began = time.monotonic()
    stop_by_command(standby, "--topics", topics[1].replace(".", r"\."))
    write_everywhere(destination, topics[1:2])
    command_s = time.monotonic() - began
    began = time.monotonic()
    stop_by_command(standby)
    stopped_s = time.monotonic() - began
    write_everywhere(destination, topics)
    all_s = time.monotonic() - began
    with capsys.disabled():
        record_figure(
            f"failover, source gone {standby.when}",
            f"one topic of {_PARTITIONS} partitions: {one_s:.2f} s from the call of the API to written to, "
            f"{command_s:.2f} s from the start of the command (which needs its own second on this machine); "
            f"the other {(_TOPICS - 2) * _PARTITIONS} partitions: STOPPED after {stopped_s:.1f} s, all written to "
            f"after {all_s:.1f} s",
        )
    assert standby.mirror.summary.states == {"STOPPED": _TOPICS * _PARTITIONS}
    statuses = standby.mirror.partitions()
    assert all(status.last_mirror_offset == 1 for status in statuses)
    assert held_values(standby) == {"lz4"}
    assert one_s <= _ONE_S
    assert all_s <= _ALL_S
