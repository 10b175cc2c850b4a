"""Formats the storage of new brokers with Kafka's own tool."""

import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

from kmirror_dagster.errors import SandboxError
from kmirror_dagster.sandbox import jars
from kmirror_dagster.sandbox.processes import java_environment
from kmirror_dagster.sandbox.properties import BrokerPlan

_FORMAT_S = 60.0
_META = "meta.properties"


def format_brokers(brokers: Sequence[BrokerPlan], cluster_id: str, class_path: list[Path]) -> None:
    """Format the data directory of every broker that has none yet, all at once.

    Args:
        brokers: brokers whose ``server.properties`` are written.
        cluster_id: Kafka cluster id to format for.
        class_path: jars.

    Raises:
        SandboxError: the tool refused; the message holds its last line.
    """
    fresh = [broker for broker in brokers if not (broker.data / _META).exists()]
    running = [(broker, _start(broker, cluster_id, class_path)) for broker in fresh]
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
