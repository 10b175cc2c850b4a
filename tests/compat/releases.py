"""Releases of Apache Kafka, as clusters for tests."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from kmirror_dagster.sandbox import jars, storage
from kmirror_dagster.sandbox.cluster import SandboxCluster
from kmirror_dagster.sandbox.jars import JarLock
from kmirror_dagster.sandbox.plan import ClusterPlan
from kmirror_dagster.sandbox.processes import BrokerProcess
from kmirror_dagster.sandbox.properties import CONTROLLER, HOST, BrokerPlan, render

LOCKS = Path(__file__).with_name("locks")
SOURCE_ENV, DESTINATION_ENV = "KMIRROR_TEST_SOURCE_KAFKA", "KMIRROR_TEST_DESTINATION_KAFKA"
VERSIONS = ("2.8.2", "3.0.2", "3.3.2", "3.6.2", "3.9.1", "4.0.1", "4.1.1", "4.2.0", "4.3.1")
NEWEST = jars.KAFKA_VERSION
# KRaft is for production from 3.3 on; before, a cluster has a ZooKeeper.
_FIRST_KRAFT = (3, 3)
_FIRST_LOG4J2 = (4, 0)
_JVM = ("-Xms64m", "-Xmx512m", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1", "-XX:-UsePerfData")


def cluster_of(name: str, home: Path, variable: str, **more: Any) -> SandboxCluster:
    """A cluster of the release that an environment variable names; of the sandbox's when it is not set."""
    version = os.environ.get(variable, NEWEST)
    return (
        SandboxCluster(name, home, **more)
        if version == NEWEST
        else ReleaseCluster(name, home, version, **more)
    )


class ReleaseCluster(SandboxCluster):
    """A cluster of one broker of a given release, with a ZooKeeper where the release needs one."""

    def __init__(self, name: str, home: Path, version: str, **more: Any) -> None:
        super().__init__(name, home, **more)
        self.version = version
        self._number = tuple(int(part) for part in version.split(".")[:2])
        self._lock = JarLock.model_validate_json((LOCKS / f"kafka-{version}.lock.json").read_text())
        self._keeper: BrokerProcess | None = None

    @property
    def has_zookeeper(self) -> bool:
        """Whether its metadata are kept by a ZooKeeper."""
        return self._number < _FIRST_KRAFT

    @property
    def cluster_id(self) -> str:
        """Kafka's cluster id; with a ZooKeeper the broker makes it up."""
        if not self.has_zookeeper:
            return super().cluster_id
        (broker,) = self.brokers
        lines = (broker.data / "meta.properties").read_text().splitlines()
        return next(line.partition("=")[2] for line in lines if line.startswith("cluster.id="))

    def stop(self, wait_s: float = 20.0) -> None:
        super().stop(wait_s)
        if self._keeper is not None:
            self._keeper.stop(wait_s=wait_s)

    def _class_path(self, console: Console | None = None) -> list[Path]:
        return jars.class_path(console, lock=self._lock)

    def _format(self, brokers: Sequence[BrokerPlan], plan: ClusterPlan, class_path: list[Path]) -> None:
        if self.has_zookeeper:
            self._start_zookeeper(brokers[0], class_path)
        else:
            fresh = [each for each in brokers if not (each.data / "meta.properties").exists()]
            storage.format_with_tool(fresh, plan.cluster_id, class_path)

    def _properties(self, broker: BrokerPlan, everybody: Sequence[BrokerPlan]) -> Mapping[str, str]:
        properties = dict(super()._properties(broker, everybody))
        if self.has_zookeeper:
            for key in ("process.roles", "node.id", "controller.quorum.voters", "controller.listener.names"):
                del properties[key]
            for key in ("listeners", "listener.security.protocol.map"):
                parts = [part for part in properties[key].split(",") if not part.startswith(CONTROLLER)]
                properties[key] = ",".join(parts)
            properties["broker.id"] = str(broker.node_id)
            # the port that a controller would have had
            properties["zookeeper.connect"] = f"{HOST}:{broker.ports[CONTROLLER]}"
        return properties

    def _command(self, broker: BrokerPlan) -> list[str]:
        return [*self._java_options(broker), "kafka.Kafka", str(broker.home / "server.properties")]

    def _java_options(self, broker: BrokerPlan) -> list[str]:
        options = [*_JVM, f"-Djava.io.tmpdir={broker.home / 'tmp'}"]
        if self._number >= _FIRST_LOG4J2:
            return [*options, f"-Dlog4j2.configurationFile={broker.home / 'log4j2.properties'}"]
        path = broker.home / "log4j.properties"
        path.write_text(_log4j_properties(broker.log), encoding="latin-1")
        return [*options, f"-Dlog4j.configuration=file:{path}"]

    def _start_zookeeper(self, broker: BrokerPlan, class_path: list[Path]) -> None:
        home = broker.home / "zookeeper"
        home.mkdir(exist_ok=True)
        if self._keeper is not None and self._keeper.is_alive():
            return
        self._keeper = BrokerProcess(pid_file=home / "zookeeper.pid", console=home / "console.log")
        arguments = [
            "org.apache.zookeeper.server.ZooKeeperServerMain",
            str(broker.ports[CONTROLLER]),
            str(home),
        ]
        self._keeper.start(jars.java(), [*self._java_options(broker), *arguments], class_path)


def _log4j_properties(log: Path) -> str:
    return render(
        {
            "log4j.rootLogger": "INFO, file",
            "log4j.appender.file": "org.apache.log4j.FileAppender",
            "log4j.appender.file.File": str(log),
            "log4j.appender.file.layout": "org.apache.log4j.PatternLayout",
            "log4j.appender.file.layout.ConversionPattern": "%d{yyyy-MM-dd HH:mm:ss.SSS} %-5p %c{1} %m%n",
        }
    )
