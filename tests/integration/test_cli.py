"""The command line in processes of its own, with a real node and real clusters."""

import json
import os
import re
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from kmirror_dagster.broker.admin import ClusterAdmin
from kmirror_dagster.broker.admin_types import OffsetKind, Partition
from kmirror_dagster.broker.clients import producer as secured_producer
from kmirror_dagster.records import STATE_TOPIC, encode_key
from kmirror_dagster.sandbox.cluster import SandboxCluster
from kmirror_dagster.sandbox.properties import INTERNAL, Protocol
from kmirror_dagster.sandbox.security import ClusterSecurity, User
from tests.conftest import Clusters
from tests.helpers.kafka import (
    Record,
    commit_offsets,
    committed_offsets,
    create_topic,
    log_range,
    produce,
    produce_transaction,
)
from tests.helpers.secured import client_properties
from tests.helpers.waiting import unique_name, wait_until

pytestmark = pytest.mark.integration

PASSWORD = "cli-test-password"
VARIABLE = "CLI_TEST_PASSWORD"
STATE_PARTITIONS = 4


@dataclass(frozen=True)
class Done:
    """A command that has ended."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        """What it printed."""
        return json.loads(self.out)


@dataclass
class Bench:
    """A node with a destination of its own, and `kmirror` to talk to it."""

    source: SandboxCluster
    destination: SandboxCluster
    folder: Path
    node_file: Path
    admin: ClusterAdmin
    environ: dict[str, str] = field(default_factory=dict)

    def run(self, *arguments: str | Path, environ: dict[str, str] | None = None) -> Done:
        command = [sys.executable, "-m", "kmirror_dagster.cli.main", *map(str, arguments)]
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=120,
            env={**self.environ, **(environ or {})},
            stdin=subprocess.DEVNULL,
        )
        assert "Traceback" not in done.stderr, done.stderr
        return Done(done.returncode, done.stdout, done.stderr)

    def ok(self, *arguments: str | Path) -> Done:
        done = self.run(*arguments)
        assert done.code == 0, done
        return done

    def refused(self, *arguments: str | Path, environ: dict[str, str] | None = None) -> str:
        """Run what has to be refused: exit code 2, one line, nothing changed; the line."""
        before = self.stored()
        done = self.run(*arguments, environ=environ)
        lines = done.err.splitlines()
        assert (done.code, done.out) == (2, ""), done
        # lines before the last one tell how a wait goes on
        assert all(re.search(r": \d+ s$", line) for line in lines[:-1]), lines
        assert self.stored() == before
        return lines[-1]

    def stored(self) -> dict[Partition, int]:
        """How far each partition of the state topic reaches."""
        partitions = [(STATE_TOPIC, number) for number in range(STATE_PARTITIONS)]
        answers = self.admin.list_offsets(partitions, OffsetKind.LATEST)
        assert not answers.errors
        return {key: found.offset for key, found in answers.values.items()}

    def document(self, mirror: str, *topics: str, **changes: Any) -> Path:
        """A settings file; JSON is YAML."""
        document: dict[str, Any] = {
            "mirror": mirror,
            "source": client_properties(self.source.bootstrap, "source"),
            "destination": login(self.destination),
            "filters": {"topics.include": list(topics), "groups.include": [f"{mirror}-.*"]},
        } | changes
        path = self.folder / f"{unique_name('file')}.yaml"
        path.write_text(json.dumps(document, indent=1))
        return path


def login(cluster: SandboxCluster, password: str = f"${{{VARIABLE}}}") -> dict[str, str]:
    return {
        "bootstrap.servers": cluster.bootstrap,
        "security.protocol": "SASL_PLAINTEXT",
        "sasl.mechanism": "PLAIN",
        "sasl.username": "mirror",
        "sasl.password": password,
    }


@pytest.fixture(scope="module")
def bench(clusters: Clusters, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    """A running node whose destination is a cluster with passwords, not shared with other tests."""
    folder = tmp_path_factory.mktemp("cli")
    security = ClusterSecurity(Protocol.SASL_PLAINTEXT, "PLAIN", (User("mirror", PASSWORD, is_super=True),))
    with SandboxCluster("cli-destination", folder, security=security) as destination:
        node_file = folder / "node.yaml"
        settings = {
            "destination": login(destination),
            "mirror.topic.num.partitions": STATE_PARTITIONS,
            "mirror.metadata.refresh.interval.ms": 1_000,
        }
        node_file.write_text(json.dumps(settings))
        hidden = ("KMIRROR_", "COVERAGE")
        environ = {k: v for k, v in os.environ.items() if not k.startswith(hidden)}
        environ |= {"KMIRROR_STATE_DIR": str(folder / "state"), VARIABLE: PASSWORD, "CLI_TEST_WRONG": "wrong"}
        admin = ClusterAdmin(destination.settings())
        made = Bench(clusters.source, destination, folder, node_file, admin, environ)
        made.ok("node", "start", "--config", node_file)
        try:
            yield made
        finally:
            made.run("node", "stop")
            admin.close()


@pytest.fixture
def topic(bench: Bench) -> str:
    """A topic with records, at the source only."""
    name = unique_name("cli")
    create_topic(bench.source.bootstrap, name, 2)
    produce(bench.source.bootstrap, name, [Record(b"v%d" % n, b"k", partition=n % 2) for n in range(100)])
    return name


@pytest.fixture
def mirror(bench: Bench, topic: str) -> Iterator[str]:
    """A mirror of that topic, MIRRORING, deleted afterwards."""
    name = unique_name("mirror")
    bench.ok("create", bench.document(name, topic), "--wait")
    yield name
    bench.run("delete", name, "--force")


def states(bench: Bench, mirror: str) -> set[str | None]:
    return {p["state"] for p in bench.ok("describe", mirror, "--json").json}


# --- what works


def test_a_mirror_from_create_to_delete(bench: Bench, topic: str) -> None:
    """Create, verify, pause, resume, stop and delete, each in a process of its own."""
    name = unique_name("mirror")
    group = f"{name}-group"
    commit_offsets(bench.source.bootstrap, group, [(topic, 0, 7), (topic, 1, 50)])
    created = bench.ok("create", bench.document(name, topic), "--wait", "--json").json
    assert (created["mirror"], created["states"]) == (name, {"MIRRORING": 2})
    assert bench.ok("create", bench.document(name, topic)).code == 0  # again: changes nothing
    assert name in bench.ok("list").out
    report = bench.ok("verify", name, "--json").json
    assert report["ok"], report
    assert (report["records"]["read_committed"], report["groups"]) == (100, 2)
    rows = [line.split() for line in bench.ok("describe", name).out.splitlines()]
    assert rows[1:] == [[name, topic, str(n), "50", "50", "0", "MIRRORING"] for n in (0, 1)]
    assert bench.ok("pause", name, "--json").json["states"] == {"PAUSED": 2}
    produce(bench.source.bootstrap, topic, [Record(b"later", partition=n) for n in (0, 1)])
    assert bench.ok("resume", name, "--json").json["states"] == {"MIRRORING": 2}
    assert bench.ok("verify", name, "--json").json["records"]["read_committed"] == 102
    assert bench.ok("refresh", name, "--json").json["steps"]
    assert bench.ok("stop", name, "--json").json["states"] == {"STOPPED": 2}
    assert bench.ok("delete", name).code == 0
    assert name not in bench.ok("list").out


@pytest.mark.case("C10")
def test_a_commit_marker_at_the_tail_is_no_lag(bench: Bench) -> None:
    """A log that ends with a commit marker is caught up: lag 0, stopped at once, group offsets as they were."""
    name, topic = unique_name("mirror"), unique_name("cli")
    groups = [f"{name}-before-marker", f"{name}-behind-marker"]
    create_topic(bench.source.bootstrap, topic)
    produce_transaction(bench.source.bootstrap, topic, [Record(b"only")])
    for offset, group in enumerate(groups, start=1):
        commit_offsets(bench.source.bootstrap, group, [(topic, 0, offset)])
    bench.ok("create", bench.document(name, topic), "--wait")
    [shown] = wait_until(lambda: caught_up(bench, name), 30)
    assert (shown["sourceOffset"], shown["destinationOffset"], shown["lag"]) == (2, 2, 0)
    report = bench.ok("verify", name, "--json").json
    assert (report["records"]["read_committed"], report["groups"]) == (1, 2)
    assert bench.ok("stop", name, "--json", "--timeout", "20").json["states"] == {"STOPPED": 1}
    plain = bench.destination.bootstrap_of(INTERNAL)
    assert log_range(plain, topic) == (0, 2)
    assert [committed_offsets(plain, group)[topic, 0] for group in groups] == [1, 2]
    bench.ok("delete", name)


def caught_up(bench: Bench, mirror: str) -> list[dict[str, Any]]:
    """Partitions of a mirror, once the node has looked at both ends of each."""
    found = bench.ok("describe", mirror, "--json").json
    return found if all(p["lag"] == 0 for p in found) else []


def test_verify_finds_what_others_wrote(bench: Bench, mirror: str, topic: str) -> None:
    """After a stop the destination is writable; what is written there is a difference, exit code 1."""
    bench.ok("stop", mirror)
    produce(bench.destination.bootstrap_of(INTERNAL), topic, [Record(b"local")])
    done = bench.run("verify", mirror, "--topics", topic, "--settle", "0")
    assert done.code == 1
    assert re.search(r"offset_range +\S+ +0 +- +log end: source 50, destination 51", done.out)
    assert done.err.splitlines()[-1].endswith("2 differences and 0 duplicates found")


def test_a_stopped_node_leaves_its_mirrors_behind(bench: Bench, mirror: str) -> None:
    """Without a node every command says how to start one; started again, the mirror goes on."""
    bench.ok("node", "stop")
    done = bench.run("list")
    assert (done.code, done.out) == (2, "")
    assert "kmirror node start" in done.err
    assert bench.ok("node", "stop").out.startswith("no node runs on")
    bench.ok("node", "start", "--config", bench.node_file)
    wait_until(lambda: states(bench, mirror) == {"MIRRORING"}, 60)


# --- what is refused


def misspell(bench: Bench, topic: str) -> tuple[Path, str]:
    return (
        bench.document("refused", topic, source={"bootstrap.server": "127.0.0.1:9092"}),
        r":4: source\.bootstrap\.server: .*bootstrap\.servers",
    )


def wrong_type(bench: Bench, topic: str) -> tuple[Path, str]:
    policies = {"rpo_seconds": "soon"}
    return bench.document("refused", topic, policies=policies), r"policies\.\S+: expected a .*number.*soon"


def missing_variable(bench: Bench, topic: str) -> tuple[Path, str]:
    destination = login(bench.destination, "${CLI_TEST_NOT_SET}")
    return bench.document("refused", topic, destination=destination), r"sasl\.password.*CLI_TEST_NOT_SET"


def literal_secret(bench: Bench, topic: str) -> tuple[Path, str]:
    destination = login(bench.destination, PASSWORD)
    return bench.document("refused", topic, destination=destination), r"sasl\.password.*must not be stored"


def same_cluster(bench: Bench, topic: str) -> tuple[Path, str]:
    source = login(bench.destination)
    return bench.document("refused", topic, source=source), r"same cluster \(\S{22}\)"


def wrong_password(bench: Bench, topic: str) -> tuple[Path, str]:
    source = login(bench.destination, "${CLI_TEST_WRONG}")
    return bench.document("refused", topic, source=source), r"SASL authentication failed for user 'mirror'"


def unreachable_source(bench: Bench, topic: str) -> tuple[Path, str]:
    source = {"bootstrap.servers": "127.0.0.1:1"}
    return bench.document("refused", topic, source=source), r"cannot reach source cluster at 127\.0\.0\.1:1"


@pytest.mark.parametrize(
    "make",
    [
        misspell,
        wrong_type,
        missing_variable,
        literal_secret,
        same_cluster,
        wrong_password,
        unreachable_source,
    ],
)
def test_a_bad_document_is_refused(
    bench: Bench, topic: str, make: Callable[[Bench, str], tuple[Path, str]]
) -> None:
    """One line names the thing and the remedy, exit code 2, and no mirror comes of it."""
    path, expected = make(bench, topic)
    line = bench.refused("create", path)
    assert re.search(expected, line), line
    assert PASSWORD not in line
    assert "refused" not in bench.ok("list").out


def test_other_settings_of_an_existing_mirror_are_refused(bench: Bench, mirror: str, topic: str) -> None:
    """The same name with other settings needs --replace."""
    other = bench.document(mirror, topic, "another-topic")
    assert "--replace" in bench.refused("create", other)
    assert bench.ok("create", other, "--replace").code == 0


@pytest.mark.parametrize(
    "command",
    ["describe", "start", "pause", "resume", "stop", "recover", "delete", "verify", "refresh"],
)
def test_an_unknown_mirror_is_refused(bench: Bench, command: str) -> None:
    """Every command names the mirror it does not know."""
    assert "'nobody-knows'" in bench.refused(command, "nobody-knows")


def test_an_illegal_transition_is_refused_with_the_state(bench: Bench, mirror: str, topic: str) -> None:
    """A stopped mirror cannot be resumed or paused: the line says what it is and what to use instead."""
    bench.ok("stop", mirror)
    assert f"{topic} is STOPPED: use 'start'" in bench.refused("resume", mirror)
    assert f"{topic} is STOPPED" in bench.refused("pause", mirror)
    bench.ok("start", mirror)
    assert states(bench, mirror) == {"MIRRORING"}
    bench.ok("pause", mirror)
    assert f"{topic} is PAUSED: use 'resume'" in bench.refused("start", mirror)


def test_a_pattern_that_matches_nothing_is_refused(bench: Bench, mirror: str) -> None:
    """A topic that the mirror does not have is named."""
    assert "no-such-topic" in bench.refused("stop", mirror, "--topics", "no-such-topic")


def test_a_second_node_on_a_state_directory_is_refused(bench: Bench) -> None:
    """The line names the node that runs there and how to end it."""
    line = bench.refused("node", "start", "--config", bench.node_file)
    assert "runs on this state directory" in line
    assert "kmirror node stop" in line


def test_a_port_in_use_is_refused(bench: Bench, tmp_path: Path) -> None:
    """The line names the address and the setting."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        settings = json.loads(bench.node_file.read_text()) | {"api_port": port}
        file = tmp_path / "node.yaml"
        file.write_text(json.dumps(settings))
        line = bench.refused("--state-dir", tmp_path / "state", "node", "start", "--config", file)
    assert f"127.0.0.1:{port}" in line
    assert "api_port" in line


def test_a_node_without_its_cluster_is_refused(bench: Bench, tmp_path: Path) -> None:
    """An unreachable destination ends the start of a node within its time, with the address."""
    file = tmp_path / "node.yaml"
    file.write_text(json.dumps({"destination": {"bootstrap.servers": "127.0.0.1:1"}}))
    line = bench.refused(
        "--state-dir", tmp_path / "state", "node", "start", "--config", file, "--timeout", "8"
    )
    assert "127.0.0.1:1" in line


def test_a_corrupt_state_record_is_quarantined(bench: Bench, mirror: str) -> None:
    """An unreadable record is reported by the node; the others are loaded and go on."""
    settings = bench.destination.settings()
    client = secured_producer(settings)
    key = encode_key("partition", "corrupt", "topic", 0)
    client.produce(STATE_TOPIC, value=b"not a record", key=key, partition=0)
    assert client.flush(30) == 0
    try:

        def quarantined() -> list[str]:
            return bench.ok("node", "status", "--json").json["quarantined_records"]

        found = wait_until(quarantined, 30)
        assert "corrupt" in found[0]
        bench.ok("node", "stop")
        bench.ok("node", "start", "--config", bench.node_file)
        assert quarantined() == found
        assert f"quarantined record: {found[0]}" in bench.ok("node", "status").out
        wait_until(lambda: states(bench, mirror) == {"MIRRORING"}, 60)
    finally:
        client.produce(STATE_TOPIC, value=None, key=key, partition=0)
        assert client.flush(30) == 0


def test_a_wrong_token_is_refused(bench: Bench) -> None:
    """A node that does not accept the token is told apart from one that does not run."""
    node = bench.ok("node", "status", "--json").json
    environ = {"KMIRROR_TOKEN": "wrong", "KMIRROR_STATE_DIR": str(bench.folder / "nowhere")}
    line = bench.refused("--endpoint", node["endpoint"], "list", environ=environ)
    assert "token" in line
