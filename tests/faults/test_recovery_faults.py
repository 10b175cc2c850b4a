"""Every kind of fault during copying, failover, failback and switchover, under load: no anomaly, times in a table."""

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from kmirror_dagster.sandbox.cluster import SandboxCluster
from tests.conftest import start_all
from tests.helpers.campaign import PHASES, run_campaign
from tests.helpers.disks import SmallDisk
from tests.helpers.faults_page import record
from tests.helpers.namespaces import Link, can_unplug
from tests.helpers.nodes import NodeProcess
from tests.helpers.proxy import FaultProxy, behind, lead
from tests.helpers.recovery_faults import FAULTS, Fault, Side

pytestmark = [pytest.mark.integration, pytest.mark.faults, pytest.mark.timeout(1_200)]

_DISK_MB = 600
_NODES = 2
_TOKEN = "one-token-for-the-nodes-of-a-group"


def _cluster(
    name: str, home: Path, stack: ExitStack, *, root: bool
) -> tuple[SandboxCluster, FaultProxy, Side]:
    link = stack.enter_context(Link()) if root else None
    disk = stack.enter_context(SmallDisk(home / name, _DISK_MB)) if root else None
    proxy = stack.enter_context(FaultProxy(listening=link.listen() if link else None))
    cluster = SandboxCluster("cluster", home / name, listeners=behind(proxy))
    stack.callback(cluster.remove)
    return cluster, proxy, Side(name, cluster, proxy, [], link, disk)


@pytest.fixture(scope="module")
def sides(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Side, Side]]:
    """Two clusters with nodes; what only root may make is there when the tests run as root."""
    home = tmp_path_factory.mktemp("campaign")
    with ExitStack() as stack:
        made = [_cluster(name, home, stack, root=can_unplug()) for name in ("A", "B")]
        start_all([cluster for cluster, _, _ in made])
        for cluster, proxy, side in made:
            lead(proxy, cluster)
            for number in range(_NODES):
                node = NodeProcess(
                    home / f"node-{side.name}{number}", proxy.bootstrap, environ={"KMIRROR_TOKEN": _TOKEN}
                )
                stack.callback(node.stop)
                side.nodes.append(node.start())
        yield made[0][2], made[1][2]


@pytest.mark.parametrize(
    ("number", "fault"),
    [(n, fault) for n, fault in enumerate(FAULTS) if can_unplug() or not fault.needs_root],
    ids=lambda value: value.name.replace(" ", "-") if isinstance(value, Fault) else None,
)
def test_fault_in_every_phase(sides: tuple[Side, Side], tmp_path: Path, number: int, fault: Fault) -> None:
    """Copying, failover, failback, switchover under one fault each: 0 anomalies; the times are kept."""
    record(run_campaign(*sides, tmp_path, dict.fromkeys(PHASES, fault), seed=number))
