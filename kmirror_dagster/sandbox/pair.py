"""The sandbox: source and destination cluster under one directory, and documents to mirror between them."""

import os
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from platformdirs import user_state_path
from rich.console import Console

from kmirror_dagster.errors import UsageError
from kmirror_dagster.sandbox import jars
from kmirror_dagster.sandbox.cluster import START_S, STOP_S, SandboxCluster
from kmirror_dagster.sandbox.locks import held
from kmirror_dagster.sandbox.plan import ClusterPlan
from kmirror_dagster.sandbox.status import SandboxStatus, cluster_status

HOME_ENV = "KMIRROR_SANDBOX_HOME"
SOURCE = "source"
DESTINATION = "destination"
MIRROR = "sandbox"
MIRROR_FILE = "mirror.yaml"
NODE_FILE = "node.yaml"

_MIRROR_TEXT = """\
# Mirrors everything of the sandbox's source onto its destination. One document describes one mirror.
mirror: {mirror}
source:
  bootstrap.servers: {source}
destination:
  bootstrap.servers: {destination}
filters:
  topics.include: [".*"]
"""
_NODE_TEXT = """\
# A node of the sandbox; start it with: kmirror node start --config {path}
destination:
  bootstrap.servers: {destination}
"""


def default_home(environ: Mapping[str, str] | None = None) -> Path:
    """Directory of the sandbox: ``KMIRROR_SANDBOX_HOME``, else one in the user's state directory."""
    override = (os.environ if environ is None else environ).get(HOME_ENV)
    return Path(override).expanduser().absolute() if override else user_state_path("kmirror") / "sandbox"


class Sandbox:
    """Two clusters that are started and stopped together.

    Attributes:
        home: directory of both.
        source: cluster to copy from.
        destination: cluster to copy to.
    """

    def __init__(
        self, home: Path | None = None, brokers: int | None = None, overrides: Mapping[str, str] | None = None
    ) -> None:
        """Describe a sandbox; nothing is started or written yet.

        Args:
            home: its directory; default `default_home()`.
            brokers: brokers of each cluster, 1 or 3; default: what is there, else 1.
            overrides: broker settings for both clusters.
        """
        self.home = home.expanduser().absolute() if home else default_home()
        self._wanted = brokers
        size = brokers or 1
        self.source = SandboxCluster(SOURCE, self.home, size, overrides)
        self.destination = SandboxCluster(DESTINATION, self.home, size, overrides)

    @property
    def mirror_file(self) -> Path:
        """The document of the sandbox's mirror."""
        return self.home / MIRROR_FILE

    @property
    def node_file(self) -> Path:
        """The settings of a node for the sandbox."""
        return self.home / NODE_FILE

    @property
    def clusters(self) -> tuple[SandboxCluster, SandboxCluster]:
        """Both clusters."""
        return self.source, self.destination

    def start(self, wait_s: float = START_S, *, detach: bool = False, console: Console | None = None) -> None:
        """Start what is not running, wait until both clusters serve, write the documents that are missing.

        Args:
            wait_s: seconds until both must serve.
            detach: let the brokers outlive this process; else they end with it, however it ends.
            console: where the progress of a first download is shown.

        Raises:
            UsageError: the sandbox exists with another number of brokers.
            SandboxError: a cluster does not come up, or another process is at work on the sandbox.
        """
        with held(self.home / ".lock", wait_s=wait_s):
            self._check_size()
            start_clusters(self.clusters, wait_s, console=console)
            self._write_documents()
            if detach:
                for cluster in self.clusters:
                    cluster.detach()

    def stop(self, wait_s: float = STOP_S) -> bool:
        """Stop both clusters, whoever started them; data stays.

        Returns:
            Whether anything was running.
        """
        if not self.home.exists():
            return False
        with held(self.home / ".lock", wait_s=wait_s + START_S):
            running = any(cluster.running_brokers() for cluster in self.clusters)
            with ThreadPoolExecutor(2) as pool:
                for stopped in [pool.submit(cluster.stop, wait_s) for cluster in self.clusters]:
                    stopped.result()
        return running

    def reset(self) -> None:
        """Stop both clusters and delete their data, logs and documents; the next start makes new ones."""
        if not self.home.exists():
            return
        with held(self.home / ".lock", wait_s=START_S):
            for cluster in self.clusters:
                cluster.remove()
            for path in (self.mirror_file, self.node_file):
                path.unlink(missing_ok=True)

    def status(self) -> SandboxStatus:
        """What runs where."""
        return SandboxStatus(
            home=self.home,
            clusters=tuple(cluster_status(cluster) for cluster in self.clusters),
            mirror_file=self.mirror_file if self.mirror_file.exists() else None,
            node_file=self.node_file if self.node_file.exists() else None,
        )

    def _check_size(self) -> None:
        for cluster in self.clusters:
            plan = ClusterPlan.load(cluster.home)
            if plan is not None and self._wanted not in (None, len(plan.ports)):
                raise UsageError(
                    f"the sandbox in {self.home} has {len(plan.ports)} broker(s) a cluster, "
                    f"not {self._wanted}; to start anew: kmirror sandbox reset"
                )

    def _write_documents(self) -> None:
        """Write documents that are missing: ports stay the same, and a person may have changed the rest."""
        source, destination = self.source.bootstrap, self.destination.bootstrap
        if not self.mirror_file.exists():
            text = _MIRROR_TEXT.format(mirror=MIRROR, source=source, destination=destination)
            self.mirror_file.write_text(text, encoding="utf-8")
        if not self.node_file.exists():
            text = _NODE_TEXT.format(path=self.node_file, destination=destination)
            self.node_file.write_text(text, encoding="utf-8")


def start_clusters(
    clusters: Sequence[SandboxCluster], wait_s: float = START_S, *, console: Console | None = None
) -> None:
    """Start clusters side by side; when one fails, or on Ctrl-C, none of those started here is left running.

    Raises:
        SandboxError: of the first cluster that does not come up.
    """
    jars.class_path(console)
    idle = [cluster for cluster in clusters if not cluster.running_brokers()]
    with ThreadPoolExecutor(len(clusters)) as pool:
        futures = [pool.submit(cluster.start, wait_s) for cluster in clusters]
        try:
            for future in futures:
                future.result()
        except BaseException:
            for cluster in clusters:
                cluster.interrupt()
            pool.shutdown(wait=True)
            for cluster in idle:
                cluster.stop()
            raise
