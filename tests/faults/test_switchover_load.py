"""Switchover between live clients at 2,000 records a second."""

import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path

import pytest

from kmirror_dagster.broker.admin import ClusterAdmin
from kmirror_dagster.broker.admin_types import Acl
from kmirror_dagster.lifecycle import MirrorState
from kmirror_dagster.sandbox.properties import INTERNAL, Protocol
from kmirror_dagster.sandbox.security import ClusterSecurity, User
from kmirror_dagster.settings import ClusterSettings
from kmirror_dagster.verification.history_checker import check_history
from kmirror_dagster.verification.history_clients import SteadyReader
from kmirror_dagster.verification.history_recorder import HistoryWriter
from tests.conftest import ClusterFactory, start_all
from tests.helpers.faults_page import record_figure
from tests.helpers.kafka import create_topic
from tests.helpers.moving_writer import MovingWriter, downtime_s
from tests.helpers.nodes import NodeMirror, NodeProcess, mirrored, ranges
from tests.helpers.waiting import wait_until

pytestmark = [pytest.mark.integration, pytest.mark.faults]

_WRITERS = 2
_RATE = 2_000
_PARTITIONS = 6
_BEFORE_S = 10.0
_AFTER_S = 5.0
_LIMIT_S = 5.0

ALICE = User("alice", "alice-secret")
ROOT = User("root", "root-secret", is_super=True)
SECURITY = ClusterSecurity(Protocol.SASL_PLAINTEXT, "PLAIN", (ROOT, ALICE), authorizer=True)


def let_write(bootstrap: str, topic: str) -> None:
    """Give alice the right to write to a topic, and to read it."""
    admin = ClusterAdmin(ClusterSettings.model_validate({"bootstrap.servers": bootstrap}))
    try:
        given = [Acl("TOPIC", topic, "LITERAL", "User:alice", "*", op, "ALLOW") for op in ("WRITE", "READ")]
        assert set(admin.create_acls(given).values()) == {None}
    finally:
        admin.close()


@pytest.mark.timeout(600)
def test_switchover_under_2000_records_a_second(
    cluster_factory: ClusterFactory, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Writers are fenced, go to B and are let in there; consumers read at both: nothing lost, doubled, reordered."""
    first = cluster_factory("A", start=False, security=SECURITY)
    second = cluster_factory("B", start=False, security=SECURITY)
    start_all([first, second])
    inner = {"A": first.bootstrap_of(INTERNAL), "B": second.bootstrap_of(INTERNAL)}
    with ExitStack() as stack:
        nodes = {name: NodeProcess(tmp_path / f"node-{name}", where) for name, where in inner.items()}
        for node in nodes.values():
            stack.callback(node.stop)
            node.start()
        mirror = stack.enter_context(mirrored(nodes["B"], inner["A"], inner["B"]))
        topic = mirror.topic()
        create_topic(inner["A"], topic, _PARTITIONS, {"retention.ms": "-1"})
        let_write(inner["A"], topic)
        # an idempotent producer may begin only where it may write to something
        let_write(inner["B"], "elsewhere")
        history = HistoryWriter()
        readers = {name: reader(inner[name], history, name, topic) for name in inner}
        mirror.await_states(MirrorState.MIRRORING, topic, partitions=_PARTITIONS)
        for each in readers.values():
            stack.callback(each.stop)
            each.start()
        with ExitStack() as writing:
            clusters = {"A": first.settings("alice"), "B": second.settings("alice")}
            writers = [
                writing.enter_context(
                    MovingWriter(
                        clusters,
                        history,
                        name=f"w{number}",
                        topic=topic,
                        partitions=_PARTITIONS,
                        rate=_RATE / _WRITERS,
                    )
                )
                for number in range(_WRITERS)
            ]
            time.sleep(_BEFORE_S)  # under load for so long
            assert sum(writer.sent for writer in writers) > _RATE * _BEFORE_S * 0.8
            told = switch_over(mirror, nodes)
            time.sleep(_AFTER_S)  # and for so long at the other cluster
        back = NodeMirror(nodes["A"], inner["B"], inner["A"], name=f"{mirror.name}-back")
        stack.callback(back.delete)
        back.await_copied(topic)
        for name, each in readers.items():
            ends = {number: end for number, (_, end) in ranges(inner[name], topic).items()}
            wait_until(
                lambda each=each, ends=ends: all(each.position(topic, n) >= end for n, end in ends.items()),
                120,
                what=f"{name} read to its end",
            )
        back.compare(topic)
    report = check_history(history.events, complete=["A", "B"])
    took_s = downtime_s(history.events)
    with capsys.disabled():
        record_figure(
            "switchover under load",
            f"{_RATE} records/s, {_PARTITIONS} partitions, {_WRITERS} writers: {took_s:.1f} s between the last record "
            f"taken at A and the first one at B (the command says: {told}); {report.acknowledged:,} "
            f"acknowledged, {report.polled:,} read at both, {report.anomalies_total} anomalies",
        )
    assert report.ok, (report.anomalies_by_kind, report.anomalies[:5])
    assert report.unmirrored == 0
    assert took_s <= _LIMIT_S


def reader(bootstrap: str, history: HistoryWriter, cluster: str, topic: str) -> SteadyReader:
    """A consumer of all partitions."""
    settings = ClusterSettings.model_validate({"bootstrap.servers": bootstrap})
    return SteadyReader(settings, history, cluster=cluster, name=f"c{cluster}", topics={topic: _PARTITIONS})


def switch_over(mirror: NodeMirror, nodes: dict[str, NodeProcess]) -> str:
    """Run the command; what it says about the writers."""
    command = [sys.executable, "-m", "kmirror_dagster.cli.main", "--state-dir", str(nodes["B"].state_dir)]
    command += ["switchover", mirror.name, "--to-state-dir", str(nodes["A"].state_dir), "--yes"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=180, check=False)
    assert done.returncode == 0, done.stderr
    return next(line for line in done.stderr.splitlines() if "without a cluster" in line)
