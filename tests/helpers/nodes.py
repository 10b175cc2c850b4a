"""Nodes in processes of their own, and mirrors on them: started by the launcher, steered through the API."""

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
from confluent_kafka import KafkaException

from kmirror_dagster.coordination.client import NodeClient
from kmirror_dagster.coordination.launcher import NodeEndpoint, node_endpoint, start_node, stop_node
from kmirror_dagster.coordination.models import CreateMirror, MirrorSummary, PartitionStatus
from kmirror_dagster.errors import UnknownMirrorError
from kmirror_dagster.lifecycle import MirrorState
from kmirror_dagster.settings import MirrorSettings, mirror_from_document
from kmirror_dagster.verification.compare import VerifyLimits, compare_mirror
from kmirror_dagster.verification.report import VerifyReport
from tests.helpers.comparison import log_ranges
from tests.helpers.secured import client_properties, own_bootstrap
from tests.helpers.waiting import unique_name, wait_until

REFRESH_MS = 1_000
STATE_PARTITIONS = 8

_READY_S = 60.0
_SAMPLE = re.compile(r"^(\w+)(?:\{(.*)\})? (\S+)$", re.MULTILINE)


class NodeProcess:
    """A replicator node of a test.

    Args:
        state_dir: its state directory; the settings are written beside it.
        destination: bootstrap address it writes to.
        environ: variables added to this process's.
        log_level: of the node; DEBUG starts it without the launcher, which has no such option.
        settings: more of the node's settings, by their names in the document.
    """

    def __init__(
        self,
        state_dir: Path,
        destination: str,
        *,
        environ: dict[str, str] | None = None,
        log_level: str = "INFO",
        **settings: object,
    ) -> None:
        self.state_dir = state_dir
        self.log = state_dir / "node.log"
        self.config = state_dir.with_suffix(".yaml")
        document: dict[str, object] = {
            "destination": client_properties(destination, "destination"),
            "mirror.topic.num.partitions": STATE_PARTITIONS,
            "mirror.metadata.refresh.interval.ms": REFRESH_MS,
            # how long a killed node's work waits for another one
            "session_timeout_ms": 3_000,
        }
        self.config.write_text(json.dumps(document | settings))  # JSON is YAML
        hidden = {key: value for key, value in os.environ.items() if not key.startswith("KMIRROR_")}
        self._environ = {**hidden, **(environ or {})}
        self._log_level = log_level
        self._process: subprocess.Popen[bytes] | None = None
        self._client: NodeClient | None = None

    # life

    @property
    def endpoint(self) -> NodeEndpoint | None:
        """Where the running process listens; None when none runs."""
        return node_endpoint(self.state_dir)

    def start(self) -> "NodeProcess":
        """Start the process and wait until it is ready."""
        self._forget_client()
        if self._log_level == "INFO":
            start_node(self.state_dir, self.config, wait_s=_READY_S, environ=self._environ)
        else:
            self._start_attached()
        return self

    def _start_attached(self) -> None:
        self.state_dir.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "-m", "kmirror_dagster.coordination.node", "--config", str(self.config)]
        command += ["--state-dir", str(self.state_dir), "--log-level", self._log_level]
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                command, env=self._environ, stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )
        wait_until(lambda: self.endpoint is not None, _READY_S, what=f"a node; see {self.log}")
        wait_until(self.client.ready, _READY_S, what=f"node ready; see {self.log}")

    def stop(self) -> None:
        """End the process in order; harmless when none runs."""
        stop_node(self.state_dir)
        self._reap()

    def kill(self) -> None:
        """End the process with SIGKILL, and wait until it is gone."""
        process = self.process
        process.kill()
        psutil.wait_procs([process], timeout=10)
        self._reap()

    def signal(self, number: signal.Signals) -> None:
        """Send the process a signal."""
        self.process.send_signal(number)

    @property
    def process(self) -> psutil.Process:
        """The running process."""
        running = self.endpoint
        assert running is not None, f"no node runs; see {self.log}"
        return psutil.Process(running.pid)

    def _reap(self) -> None:
        self._forget_client()
        if self._process is not None:
            self._process.wait(10)
            self._process = None

    # what it tells

    @property
    def client(self) -> NodeClient:
        """Client of the running process."""
        if self._client is None:
            running = self.endpoint
            assert running is not None, f"no node runs; see {self.log}"
            self._client = running.client(timeout_s=15.0)
        return self._client

    def _forget_client(self) -> None:
        if self._client is not None:
            self._client.close()
            self._client = None

    def metric(self, name: str, **labels: str) -> float:
        """Sum of a metric's samples that carry these labels."""
        wanted = {f'{key}="{value}"' for key, value in labels.items()}
        samples = _SAMPLE.findall(self.client.metrics())
        return sum(
            float(value) for found, text, value in samples if found == name and wanted <= set(text.split(","))
        )


class NodeMirror:
    """One mirror on a node.

    Args:
        node: asked for everything; any node of the group will do.
        source: bootstrap address of the cluster it copies from.
        destination: bootstrap address of the cluster it copies to.
        include: patterns of topics; default: those whose names begin with the mirror's.
        name: default: one of its own.
        policies: of the settings document.
        filters: more filters.
    """

    def __init__(
        self,
        node: NodeProcess,
        source: str,
        destination: str,
        *,
        include: Sequence[str] | None = None,
        name: str | None = None,
        policies: dict[str, object] | None = None,
        filters: dict[str, object] | None = None,
    ) -> None:
        self.node = node
        self.source = own_bootstrap(source)
        self.destination = own_bootstrap(destination)
        self.name = name or unique_name("m")
        patterns = [f"{self.name}\\..*"] if include is None else list(include)
        self.document: dict[str, Any] = {
            "mirror": self.name,
            "source": client_properties(source, "source"),
            "destination": client_properties(destination, "destination"),
            "filters": {
                "topics.include": patterns,
                "groups.include": [f"{self.name}.*"],
                **(filters or {}),
            },
            "policies": policies or {},
        }

    @property
    def settings(self) -> MirrorSettings:
        """As the comparison takes them."""
        return mirror_from_document(self.document, os.environ)

    def create(self) -> MirrorSummary:
        """Create the mirror."""
        return self.node.client.create(CreateMirror(document=self.document))

    def delete(self) -> None:
        """Delete the mirror, whatever its state; harmless when there is none."""
        if self.node.endpoint is None:
            return
        try:
            self.node.client.delete(self.name, force=True)
        except UnknownMirrorError:
            return

    def topic(self, stem: str = "t") -> str:
        """A topic name that the mirror selects."""
        return unique_name(f"{self.name}.{stem}")

    # what is told of it

    @property
    def summary(self) -> MirrorSummary:
        """The mirror at a glance."""
        return self.node.client.mirror(self.name)

    def partitions(self, topic: str | None = None) -> list[PartitionStatus]:
        """Status of all its partitions, or those of a topic."""
        return list(self.node.client.iter_partitions(self.name, topic=topic))

    def errors(self) -> dict[str, str]:
        """Errors of topics and partitions by name."""
        found = {topic.topic: topic.error for topic in self.summary.topics if topic.error}
        failed = self.node.client.iter_partitions(self.name, state=MirrorState.FAILED)
        return found | {f"{each.topic}/{each.partition}": each.error or "" for each in failed}

    # waiting

    def await_states(
        self, state: MirrorState, *topics: str, partitions: int | None = None, deadline_s: float = 60.0
    ) -> None:
        """Wait until all partitions of topics are in a state; `partitions`: so many of each."""

        def there() -> bool:
            found = {topic: [each.state for each in self.partitions(topic)] for topic in topics}
            return all(
                states and set(states) == {state} and len(states) == (partitions or len(states))
                for states in found.values()
            )

        try:
            wait_until(there, deadline_s)
        except AssertionError as error:
            told = [(each.topic, each.partition, each.state, each.error) for each in self.partitions()]
            raise AssertionError(
                f"{topics} not {state} ({error}): {told}, {self.errors()}; see {self.node.log}"
            ) from error

    def await_copied(self, *topics: str, deadline_s: float = 60.0) -> None:
        """Wait until the destination's logs begin and end where the source's do."""

        def copied() -> bool:
            return all(
                ranges(self.source, topic) == ranges(self.destination, topic) != {} for topic in topics
            )

        try:
            wait_until(copied, deadline_s)
        except AssertionError as error:
            told = {topic: (ranges(self.source, topic), ranges(self.destination, topic)) for topic in topics}
            raise AssertionError(f"{error}: {told}, {self.errors()}; see {self.node.log}") from error

    def compare(self, *topics: str, groups: bool = False, deadline_s: float = 120.0) -> VerifyReport:
        """Compare as `kmirror verify` does; every difference fails the test."""
        limits = VerifyLimits(groups=groups, deadline_s=deadline_s, settle_s=60.0)
        maps = lambda: self.node.client.offset_maps(self.name)  # noqa: E731
        report = compare_mirror(self.settings, topics, limits=limits, offset_maps=maps)
        assert report.ok, (report.differences_by_kind, report.differences[:5], report.duplicates)
        return report


def ranges(bootstrap: str, topic: str) -> dict[int, tuple[int, int]]:
    """Log start and end of each partition of a topic; nothing while it does not exist or has no leaders."""
    from tests.helpers.kafka import admin

    client = admin(bootstrap)
    found = client.list_topics(topic, timeout=15).topics[topic]
    if found.error is not None or any(each.leader < 0 for each in found.partitions.values()):
        return {}
    try:
        return log_ranges(bootstrap, topic, sorted(found.partitions))
    except KafkaException:  # its leaders do not know so yet
        return {}


@contextmanager
def mirrored(node: NodeProcess, source: str, destination: str, **more: Any) -> Iterator[NodeMirror]:
    """A mirror while the block runs."""
    mirror = NodeMirror(node, source, destination, **more)
    try:
        mirror.create()
        yield mirror
    finally:
        mirror.delete()
