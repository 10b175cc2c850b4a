"""What there is to say about a sandbox."""

from enum import Enum
from pathlib import Path

from pydantic import BaseModel, ConfigDict

from kmirror_dagster.sandbox.cluster import SandboxCluster
from kmirror_dagster.sandbox.plan import ClusterPlan
from kmirror_dagster.sandbox.properties import CLIENT, HOST


class ClusterState(str, Enum):
    """Condition of a sandbox cluster as its processes tell it."""

    ABSENT = "absent"
    STOPPED = "stopped"
    PARTLY_RUNNING = "partly running"
    RUNNING = "running"


class BrokerStatus(BaseModel):
    """One broker.

    Attributes:
        pid: process id; None when it is not running.
        log: its log file.
    """

    model_config = ConfigDict(frozen=True)

    broker: int
    address: str
    pid: int | None
    log: Path


class ClusterStatus(BaseModel):
    """One cluster."""

    model_config = ConfigDict(frozen=True)

    name: str
    state: ClusterState
    bootstrap_servers: str | None
    cluster_id: str | None
    brokers: tuple[BrokerStatus, ...]


class SandboxStatus(BaseModel):
    """Both clusters of a sandbox, and the documents that go with them."""

    model_config = ConfigDict(frozen=True)

    home: Path
    clusters: tuple[ClusterStatus, ...]
    mirror_file: Path | None
    node_file: Path | None

    @property
    def is_running(self) -> bool:
        """Whether all brokers run."""
        return all(cluster.state is ClusterState.RUNNING for cluster in self.clusters)


def cluster_status(cluster: SandboxCluster) -> ClusterStatus:
    """Status of one cluster, from its plan and its processes; no broker is asked."""
    plan = ClusterPlan.load(cluster.home)
    if plan is None:
        return ClusterStatus(
            name=cluster.name, state=ClusterState.ABSENT, bootstrap_servers=None, cluster_id=None, brokers=()
        )
    brokers = tuple(
        BrokerStatus(
            broker=each.node_id,
            address=f"{HOST}:{each.ports[CLIENT]}",
            pid=cluster.broker_pid(each.node_id),
            log=each.log,
        )
        for each in plan.brokers(cluster.home)
    )
    running = sum(broker.pid is not None for broker in brokers)
    state = ClusterState.RUNNING if running == len(brokers) else ClusterState.PARTLY_RUNNING
    return ClusterStatus(
        name=cluster.name,
        state=state if running else ClusterState.STOPPED,
        bootstrap_servers=cluster.bootstrap,
        cluster_id=plan.cluster_id,
        brokers=brokers,
    )
