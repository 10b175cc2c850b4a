"""The two tools as processes: started on one topic, each with its own way of saying how far it has to come."""

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from bench import jars
from bench.guarded import GuardedProcess
from bench.workloads import PARTITIONS
from kmirror_dagster.sandbox.jars import java
from kmirror_dagster.sandbox.processes import java_environment
from kmirror_dagster.sandbox.properties import log4j2_properties

OURS = "kmirror"
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
_NATIVE = ("--enable-native-access=ALL-UNNAMED", "--sun-misc-unsafe-memory-access=allow", "-XX:-UsePerfData")


@dataclass(frozen=True)
class Route:
    """What a tool has to mirror.

    Attributes:
        source: bootstrap address, the delaying proxy's where there is one.
        destination: bootstrap address.
        topic: topic of `bench.workloads.PARTITIONS` partitions.
        folder: for settings and logs.
    """

    source: str
    destination: str
    topic: str
    folder: Path


class Tool(Protocol):
    """Starts one of the tools."""

    name: str
    makes_topics: bool
    mirrors_markers: bool

    def start(self, route: Route) -> GuardedProcess:
        """Begin mirroring."""
        ...


class Kmirror:
    """This product's copying in a process of its own."""

    name = OURS
    makes_topics = False
    mirrors_markers = True

    def __init__(self, profile: Path | None = None) -> None:
        """`profile`: file that the process writes its profile to when it ends."""
        self._profile = profile

    def start(self, route: Route) -> GuardedProcess:
        """Begin mirroring."""
        job = {
            "source": route.source,
            "destination": route.destination,
            "topic": route.topic,
            "partitions": PARTITIONS,
            "profile": str(self._profile) if self._profile else None,
        }
        command = [sys.executable, "-m", "bench.link_process", json.dumps(job)]
        return GuardedProcess(command, log=route.folder / f"{self.name}.log")


class MirrorMaker:
    """MirrorMaker 2 in dedicated mode."""

    name = MIRROR_MAKER
    makes_topics = True
    mirrors_markers = False

    def start(self, route: Route) -> GuardedProcess:
        """Begin mirroring."""
        log = route.folder / f"{self.name}.log"
        tuned = Path(__file__).with_name("mirrormaker.properties").read_text(encoding="utf-8")
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
