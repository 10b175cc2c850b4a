"""The two tools as processes: started on one topic, each with its own way of saying how far it has to come."""

import json
import os
import re
import shutil
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Protocol

from bench import jars
from bench.errors import BenchError
from bench.guarded import GuardedProcess
from bench.workloads import PARTITIONS, Workload
from kmirror_dagster.coordination.launcher import node_endpoint
from kmirror_dagster.coordination.models import CreateMirror
from kmirror_dagster.sandbox.jars import java
from kmirror_dagster.sandbox.processes import java_environment
from kmirror_dagster.sandbox.properties import log4j2_properties

OURS = "kmirror"
CEILING = "produce-only"
MIRROR_MAKER = "mirrormaker2"
# Apache Kafka's own choices for its Connect processes (kafka-run-class), with 1 GiB of heap.
MIRROR_MAKER_JVM = (
    "-Xms256m",
    "-Xmx1g",
    "-server",
    "-XX:+UseG1GC",
    "-XX:MaxGCPauseMillis=20",
    "-XX:InitiatingHeapOccupancyPercent=35",
    "-XX:+ExplicitGCInvokesConcurrent",
)
_MIRROR = "bench"
_READY_S = 120.0
_TUNED = Path(__file__).with_name("mirrormaker.properties")
_TUNED_LATENCY = Path(__file__).with_name("mirrormaker-latency.properties")
_NATIVE = ("--enable-native-access=ALL-UNNAMED", "--sun-misc-unsafe-memory-access=allow", "-XX:-UsePerfData")


@dataclass(frozen=True)
class Route:
    """What a tool has to mirror.

    Attributes:
        source: bootstrap address, the delaying proxy's where there is one.
        destination: bootstrap address.
        topic: topic of `bench.workloads.PARTITIONS` partitions.
        folder: for settings and logs.
        low_latency: whether a tool that can be tuned for either is tuned for latency rather than throughput.
    """

    source: str
    destination: str
    topic: str
    folder: Path
    low_latency: bool = False


class Tool(Protocol):
    """Starts one of the tools."""

    name: str
    makes_topics: bool
    mirrors_markers: bool

    def start(self, route: Route) -> GuardedProcess:
        """Begin mirroring."""
        ...


class Kmirror:
    """This product: a node as users run it, with one mirror; all settings are the defaults."""

    name = OURS
    makes_topics = True
    mirrors_markers = True

    def start(self, route: Route) -> GuardedProcess:
        """Start a node and create the mirror on it."""
        state = route.folder / "node"
        shutil.rmtree(state, ignore_errors=True)
        config = route.folder / "node.yaml"
        destination = {"bootstrap.servers": route.destination}
        config.write_text(json.dumps({"destination": destination}), encoding="utf-8")  # JSON is YAML
        command = [sys.executable, "-m", "kmirror_dagster.coordination.node"]
        command += ["--config", str(config), "--state-dir", str(state)]
        environment = {key: value for key, value in os.environ.items() if not key.startswith("KMIRROR_")}
        process = GuardedProcess(command, log=route.folder / f"{self.name}.log", environment=environment)
        document = {
            "mirror": _MIRROR,
            "source": {"bootstrap.servers": route.source},
            "destination": destination,
            "filters": {"topics.include": [re.escape(route.topic)]},
        }
        try:
            _create(process, state, CreateMirror(document=document))
        except BaseException:
            process.stop()
            raise
        return process


def _create(process: GuardedProcess, state: Path, request: CreateMirror) -> None:
    end = time.monotonic() + _READY_S
    while time.monotonic() < end and process.is_alive:
        running = node_endpoint(state)
        if running is not None:
            with running.client(timeout_s=15.0, deadline_s=_READY_S) as client:
                if client.ready():
                    client.create(request)
                    return
        time.sleep(0.05)
    raise BenchError(f"the node is not ready; see {process.log}:\n{process.tail()}")


class Link:
    """This product's copying alone, in a process of its own that can be profiled."""

    name = OURS
    makes_topics = False
    mirrors_markers = True

    def __init__(self, profile: Path) -> None:
        """`profile`: file that the process writes its profile to when it ends."""
        self._profile = profile

    def start(self, route: Route) -> GuardedProcess:
        """Begin mirroring."""
        job = {
            "source": route.source,
            "destination": route.destination,
            "topic": route.topic,
            "partitions": PARTITIONS,
            "profile": str(self._profile),
        }
        command = [sys.executable, "-m", "bench.link_process", json.dumps(job)]
        return GuardedProcess(command, log=route.folder / "link.log")


class Ceiling:
    """No mirror: the workload's batches are written from memory, as many requests under way as a mirror has."""

    name = CEILING
    makes_topics = False
    mirrors_markers = False

    def __init__(self, workload: Workload) -> None:
        """`workload`: whose batches."""
        self._workload = workload

    def start(self, route: Route) -> GuardedProcess:
        """Begin writing."""
        job = {
            "destination": route.destination,
            "topic": route.topic,
            "workload": asdict(self._workload),
        }
        command = [sys.executable, "-m", "bench.ceiling_process", json.dumps(job)]
        return GuardedProcess(command, log=route.folder / f"{self.name}.log")


class MirrorMaker:
    """MirrorMaker 2 in dedicated mode."""

    name = MIRROR_MAKER
    makes_topics = True
    mirrors_markers = False

    def start(self, route: Route) -> GuardedProcess:
        """Begin mirroring."""
        log = route.folder / f"{self.name}.log"
        files = [_TUNED, _TUNED_LATENCY] if route.low_latency else [_TUNED]
        tuned = "\n".join(path.read_text(encoding="utf-8") for path in files)
        settings = route.folder / f"{self.name}.properties"
        settings.write_text(
            f"{tuned}\nsrc.bootstrap.servers = {route.source}\ndst.bootstrap.servers = {route.destination}\n"
            f"src->dst.topics = {route.topic}\ntasks.max = {PARTITIONS}\n",
            encoding="utf-8",
        )
        logging = route.folder / "log4j2.properties"
        logging.write_text(log4j2_properties(log), encoding="latin-1")
        command = [
            str(java()),
            *_NATIVE,
            *MIRROR_MAKER_JVM,
            f"-Dlog4j2.configurationFile={logging}",
            "org.apache.kafka.connect.mirror.MirrorMaker",
            str(settings),
        ]
        return GuardedProcess(command, log=log, environment=java_environment(jars.class_path()))
