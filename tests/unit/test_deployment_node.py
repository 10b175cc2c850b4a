"""The command that containers, systemd and Kubernetes run, as a real process whose destination is down."""

import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import psutil
import pytest
import yaml

from tests.helpers.dockerfiles import read_dockerfile
from tests.helpers.exposition import Exposition
from tests.helpers.waiting import wait_until

ROOT = Path(__file__).parents[2]
TOKEN = "token-of-the-file"


def commands() -> dict[str, list[str]]:
    """Arguments of `kmirror` in each kind of deployment."""
    _, stages = read_dockerfile(ROOT / "docker" / "Dockerfile")
    unit = (ROOT / "deploy" / "systemd" / "kmirror-node@.service").read_text(encoding="utf-8")
    started = re.search(r"^ExecStart=(.+)$", unit, re.MULTILINE)
    assert started is not None
    manifests = yaml.safe_load_all(
        (ROOT / "deploy" / "kubernetes" / "nodes.yaml").read_text(encoding="utf-8")
    )
    (pods,) = (document for document in manifests if document["kind"] == "StatefulSet")
    return {
        "image": stages["node"].command("CMD"),
        "systemd": shlex.split(started[1])[1:],
        "kubernetes": pods["spec"]["template"]["spec"]["containers"][0]["args"],
    }


def _bearer(token: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {token}"} if token else {}


@dataclass
class Running:
    """A node in the foreground."""

    process: subprocess.Popen[bytes]
    url: str
    log: Path
    state_dir: Path

    def status(self, path: str, token: str = "") -> int:
        """Status of an answer."""
        return httpx.get(self.url + path, headers=_bearer(token), timeout=5).status_code

    def entries(self) -> list[dict[str, object]]:
        """Its log lines."""
        return [json.loads(line) for line in self.log.read_text().splitlines()]


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Running]:
    """The image's command with settings and token from files; nobody listens where the destination should be."""
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))
        port = nobody.getsockname()[1]
        config, token, log = tmp_path / "node.yaml", tmp_path / "token", tmp_path / "log"
        config.write_text(f"destination: {{bootstrap.servers: '127.0.0.1:{port}'}}\n")
        token.write_text(f"{TOKEN}\n")
        arguments = [str(config) if a == "/etc/kmirror/node.yaml" else a for a in commands()["image"]]
        environ = {k: v for k, v in os.environ.items() if not k.startswith("KMIRROR_")}
        environ |= {"KMIRROR_STATE_DIR": str(tmp_path / "state"), "KMIRROR_TOKEN_FILE": str(token)}
        with log.open("wb") as output:
            process = subprocess.Popen(
                [sys.executable, "-m", "kmirror_dagster.cli.main", *arguments], env=environ, stderr=output
            )
        try:
            announced = tmp_path / "state" / "node.json"
            wait_until(lambda: announced.exists(), 60, what=f"API announced; see {log}")
            content = json.loads(announced.read_text())
            # the command became the node: signals of a supervisor reach it
            assert content["pid"] == process.pid
            yield Running(process, content["endpoint"], log, tmp_path / "state")
        finally:
            process.kill()
            process.wait(10)


def test_every_deployment_runs_the_same_command() -> None:
    """Image, unit and manifests start a node in the foreground, and let it wait for its cluster."""
    wanted = ["node", "start", "--foreground", "--config", "/etc/kmirror/node.yaml", "--timeout", "600"]
    assert commands() == {"image": wanted, "systemd": wanted, "kubernetes": wanted}


def test_node_is_alive_but_not_ready_without_its_cluster(node: Running) -> None:
    """Liveness holds while the destination is down, readiness does not, metrics need the token of the file; TERM
    ends the node at once with code 0, leaving no endpoint behind."""
    assert node.status("/health/live") == 200
    assert node.status("/health/ready") == 503
    assert node.status("/metrics") == 401
    assert node.status("/metrics", "another") == 401
    answer = httpx.get(node.url + "/metrics", headers=_bearer(TOKEN), timeout=5)
    told = Exposition(answer.content)
    assert told.samples("kmirror_node_info")
    resident = told.value("process_resident_memory_bytes")
    assert resident == pytest.approx(psutil.Process(node.process.pid).memory_info().rss, rel=0.2)
    assert resident < 200 * 1024 * 1024  # what the sizing in docs/operations.md counts with
    began = time.monotonic()
    node.process.send_signal(signal.SIGTERM)
    assert node.process.wait(30) == 0
    assert time.monotonic() - began < 10
    assert not (node.state_dir / "node.json").exists()
    entries = node.entries()
    assert entries[-1]["message"] == "node ended"
    assert {"time", "level", "logger", "message", "node", "pid"} <= entries[-1].keys()
    assert TOKEN not in node.log.read_text()
