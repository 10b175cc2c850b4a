"""The two clusters both tools work between, and putting them back as they were before each round."""

import asyncio
import shutil
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType

from bench.errors import BenchError
from kmirror_dagster.broker.admin import ClusterAdmin
from kmirror_dagster.broker.admin_types import NewTopic
from kmirror_dagster.broker.wire import LATEST, TopicPartition, WireCluster
from kmirror_dagster.errors import KmirrorError
from kmirror_dagster.sandbox.cluster import SERVER_JVM, SandboxCluster
from kmirror_dagster.sandbox.pair import start_clusters
from kmirror_dagster.sandbox.ports import PortClaim
from kmirror_dagster.sandbox.properties import CLIENT, HOST, ListenerPlan
from kmirror_dagster.settings import ClusterSettings

WAN = "WAN"
SOURCE_PREFIX = "bench-"
# Records keep for good whatever their timestamps; a deleted topic's files go away at once.
_BROKER = {"log.retention.ms": "-1", "log.segment.delete.delay.ms": "500"}
_DELETED_S = 60.0
_LED_S = 30.0
_CALM_S = 90.0
_CALM_DIRTY_KB = 100_000


class BenchClusters:
    """Source and destination, one broker each, sized as servers.

    Attributes:
        home: directory of both.
        wan_port: port the source's second listener tells clients to use: the delaying proxy's.
    """

    def __init__(self, home: Path | None) -> None:
        """Describe them.

        Args:
            home: directory to keep; None: a temporary one, removed at the end.
        """
        self._temporary = home is None
        self.home = home or Path(tempfile.mkdtemp(prefix="kmirror-bench-"))
        self.home.mkdir(parents=True, exist_ok=True)
        with PortClaim() as claim:
            self.wan_port = self._remembered_port() or claim.take()
        (self.home / "wan.port").write_text(str(self.wan_port), encoding="ascii")
        self.source = self._source({})
        self.destination = SandboxCluster("destination", self.home, 1, _BROKER, jvm_options=SERVER_JVM)

    def _source(self, overrides: Mapping[str, str]) -> SandboxCluster:
        listeners = (ListenerPlan(CLIENT), ListenerPlan(WAN))
        settings = {**_BROKER, **overrides}
        return SandboxCluster("source", self.home, 1, settings, listeners=listeners, jvm_options=SERVER_JVM)

    def _remembered_port(self) -> int | None:
        path = self.home / "wan.port"
        return int(path.read_text(encoding="ascii")) if path.exists() else None

    def __enter__(self) -> "BenchClusters":
        """Start both."""
        try:
            start_clusters((self.source, self.destination))
            self._advertise_proxy()
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Stop both."""
        self._end()

    def _advertise_proxy(self) -> None:
        """Start the source again with its second listener's address being the proxy's."""
        port = self.source.plan.ports[0][CLIENT]
        advertised = f"{CLIENT}://{HOST}:{port},{WAN}://{HOST}:{self.wan_port}"
        self.source.stop()
        self.source = self._source({"advertised.listeners": advertised})
        self.source.start()

    def _end(self) -> None:
        for cluster in (self.source, self.destination):
            cluster.stop()
        if self._temporary:
            shutil.rmtree(self.home, ignore_errors=True)

    @property
    def wan_bootstrap(self) -> str:
        """The source as seen through the proxy."""
        return f"{HOST}:{self.wan_port}"

    @property
    def wan_target_port(self) -> int:
        """Where the proxy has to connect to."""
        return self.source.plan.ports[0][WAN]

    def clean(self) -> None:
        """Delete everything at the destination and MirrorMaker 2's own topics at the source, files included."""
        _delete(self.destination, lambda name: not name.startswith("__") or name == "__mirror_state")
        _delete(self.source, lambda name: not name.startswith(("__", SOURCE_PREFIX)))
        wait_calm()

    def create(self, cluster: SandboxCluster, topic: str, partitions: int) -> None:
        """Make an empty topic; one of that name is deleted first."""
        _delete(cluster, lambda name: name == topic)
        admin = ClusterAdmin(cluster.settings())
        try:
            configs = {"retention.ms": "-1", "message.timestamp.type": "CreateTime"}
            _raise_any(admin.create_topics([NewTopic(topic, partitions, 1, configs)]))
        finally:
            admin.close()
        end = time.monotonic() + _LED_S
        while not log_ends(cluster.settings(), topic, partitions):
            if time.monotonic() > end:
                raise BenchError(f"{topic} at cluster {cluster.name} has no leaders after {_LED_S:g} s")
            time.sleep(0.05)


def delete_topic(cluster: SandboxCluster, topic: str) -> None:
    """Delete one topic, files included; harmless when there is none."""
    _delete(cluster, lambda name: name == topic)


def _delete(cluster: SandboxCluster, chosen: Callable[[str], bool]) -> None:
    admin = ClusterAdmin(cluster.settings())
    try:
        names = [name for name in admin.topic_names() if chosen(name)]
        if names:
            _raise_any(admin.delete_topics(names))
        end = time.monotonic() + _DELETED_S
        data = cluster.brokers[0].data
        while any(chosen(name) for name in admin.topic_names()) or list(data.glob("*-delete")):
            if time.monotonic() > end:
                raise BenchError(f"topics of cluster {cluster.name} were not deleted within {_DELETED_S:g} s")
            time.sleep(0.1)
    finally:
        admin.close()


def log_ends(settings: ClusterSettings, topic: str, partitions: int) -> dict[TopicPartition, int]:
    """Log end offset of each partition; empty when there is no such topic, or it is not served yet."""

    async def read() -> dict[TopicPartition, int]:
        cluster = WireCluster(settings, role="source")
        try:
            found = await cluster.list_offsets([(topic, number) for number in range(partitions)], LATEST)
        finally:
            await cluster.close()
        if any(outcome.error for outcome in found.values()):
            return {}
        return {tp: outcome.offset for tp, outcome in found.items()}

    return asyncio.run(read())


def _raise_any(outcomes: Mapping[str, KmirrorError | None]) -> None:
    for error in outcomes.values():
        if error is not None:
            raise error


def wait_calm() -> None:
    """Wait until what was written before has gone to disk, so that a round does not pay for the one before."""
    end = time.monotonic() + _CALM_S
    while time.monotonic() < end:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        values = {line.split(":")[0]: int(line.split()[1]) for line in lines}
        if values["Dirty"] + values["Writeback"] < _CALM_DIRTY_KB:
            return
        time.sleep(0.25)
