"""Formats the storage of new brokers: the first time with Kafka's own tool, later by copying what it wrote.

The tool writes two files: who the broker is (``meta.properties``), and the feature levels that a new cluster begins
with, which are the same for every cluster of one Kafka version. A copy saves a JVM per broker, a third of its start.
"""

import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from kmirror_dagster.errors import SandboxError
from kmirror_dagster.sandbox import jars
from kmirror_dagster.sandbox.plan import random_uuid
from kmirror_dagster.sandbox.processes import java_environment
from kmirror_dagster.sandbox.properties import BrokerPlan, render

_FORMAT_S = 60.0
_META = "meta.properties"
_FEATURES = Path("__cluster_metadata-0") / "00000000000000000000-0000000000.checkpoint"
_KEPT_NAME = f"features-{jars.KAFKA_VERSION}.checkpoint"


def format_brokers(brokers: Sequence[BrokerPlan], cluster_id: str, class_path: list[Path]) -> None:
    """Format the data directory of every broker that has none yet, all at once.

    Args:
        brokers: brokers whose ``server.properties`` are written.
        cluster_id: Kafka cluster id to format for.
        class_path: jars.

    Raises:
        SandboxError: the tool refused; the message holds its reason.
    """
    fresh = [broker for broker in brokers if not (broker.data / _META).exists()]
    kept = class_path[0].parent / _KEPT_NAME
    if not kept.exists():
        format_with_tool(fresh, cluster_id, class_path)
        _keep(fresh, kept)
        return
    for broker in fresh:
        _format_by_copy(broker, cluster_id, kept)


def _format_by_copy(broker: BrokerPlan, cluster_id: str, kept: Path) -> None:
    features = broker.data / _FEATURES
    features.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(kept, features)
    meta = {
        "version": "1",
        "cluster.id": cluster_id,
        "node.id": str(broker.node_id),
        "directory.id": random_uuid(),
    }
    # Last: its presence says that the directory is formatted.
    (broker.data / _META).write_text(render(meta), encoding="latin-1")


def _keep(formatted: Sequence[BrokerPlan], kept: Path) -> None:
    """Keep the feature levels for the next cluster; in one step, as others may do the same."""
    for broker in formatted[:1]:
        with tempfile.NamedTemporaryFile(dir=kept.parent, delete=False) as file:
            file.write((broker.data / _FEATURES).read_bytes())
        os.replace(file.name, kept)


def format_with_tool(brokers: Sequence[BrokerPlan], cluster_id: str, class_path: list[Path]) -> None:
    """Format data directories with Kafka's own tool, a JVM for each.

    Raises:
        SandboxError: the tool refused; the message holds its reason.
    """
    running = [(broker, _start(broker, cluster_id, class_path)) for broker in brokers]
    deadline = time.monotonic() + _FORMAT_S
    try:
        for broker, process in running:
            output, _ = process.communicate(timeout=max(0.1, deadline - time.monotonic()))
            if process.returncode != 0:
                raise SandboxError(f"cannot format {broker.data}: {_reason(output)}")
    except subprocess.TimeoutExpired as error:
        raise SandboxError(
            f"formatting took longer than {_FORMAT_S:.0f} s; is the machine overloaded?"
        ) from error
    finally:
        for _, process in running:
            if process.poll() is None:
                process.kill()
                process.communicate()


def _reason(output: str) -> str:
    """The line that says why, without Java's stack of calls."""
    lines = [line for line in output.splitlines() if line.strip() and not line.startswith("\tat ")]
    exceptions = [line for line in lines if "Exception" in line]
    return (exceptions or lines or ["no output"])[-1]


def _start(broker: BrokerPlan, cluster_id: str, class_path: list[Path]) -> "subprocess.Popen[str]":
    arguments = ["format", "--config", str(broker.home / "server.properties"), "--cluster-id", cluster_id]
    return subprocess.Popen(
        [
            str(jars.java()),
            "-Xmx128m",
            "-XX:+UseSerialGC",
            "-XX:TieredStopAtLevel=1",
            "-XX:-UsePerfData",
            f"-Dlog4j2.configurationFile={broker.home / 'log4j2.properties'}",
            "kafka.tools.StorageTool",
            *arguments,
        ],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env=java_environment(class_path),
        text=True,
    )
