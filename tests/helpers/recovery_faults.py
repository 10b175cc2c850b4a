"""Faults of a campaign: what is broken, and how it is put right again."""

import signal
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from kmirror_dagster.sandbox.cluster import SandboxCluster
from tests.helpers.disks import SmallDisk
from tests.helpers.namespaces import Link
from tests.helpers.nodes import NodeProcess
from tests.helpers.proxy import FaultProxy

_START_S = 180.0


@dataclass
class Side:
    """One cluster, its nodes (which write to it), and the line over which nodes reach it."""

    name: str
    cluster: SandboxCluster
    proxy: FaultProxy
    nodes: list[NodeProcess]
    link: Link | None = None
    disk: SmallDisk | None = None

    @property
    def bootstrap(self) -> str:
        """Address for clients that no line fault hits."""
        return self.cluster.bootstrap

    @property
    def state_dir(self) -> str:
        """State directory of the node that commands are sent to: never the one that is broken, if there are two."""
        return str(self.nodes[-1].state_dir)


@dataclass(frozen=True)
class Roles:
    """Who is copied from and who is copied to; the nodes that copy are the destination's."""

    source: Side
    destination: Side


@dataclass(frozen=True)
class Fault:
    """Something that breaks.

    Attributes:
        hold_s: how long it lasts.
        heals_itself: others take over; it is put right only after they have.
        ends_source: nobody can copy from the source while it lasts.
        needs_root: it is made of what only root may make.
    """

    name: str
    inject: Callable[[Roles], None]
    heal: Callable[[Roles], None]
    hold_s: float = 6.0
    heals_itself: bool = False
    ends_source: bool = False
    needs_root: bool = False


def _start(side: Side) -> None:
    if not side.cluster.is_alive():
        side.cluster.start_broker(1, wait_s=_START_S)


def _each(roles: Roles, act: Callable[[Side], None]) -> None:
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(act, (roles.source, roles.destination)))


def _link(side: Side) -> Link:
    assert side.link is not None
    return side.link


def _disk(side: Side) -> SmallDisk:
    assert side.disk is not None
    return side.disk


def _slow_down(side: Side) -> None:
    side.proxy.latency_s = 0.25


def _speed_up(side: Side) -> None:
    side.proxy.latency_s = 0.0


def _make_room(side: Side) -> None:
    _disk(side).empty()
    side.cluster.kill_broker(1)  # it halts by itself, sooner or later
    side.cluster.start_broker(1, wait_s=_START_S)


NODE_KILLED = Fault(
    "a node is killed",
    lambda roles: roles.destination.nodes[0].kill(),
    lambda roles: _start_node(roles.destination),
    heals_itself=True,
)
NODE_FROZEN = Fault(
    "a node is frozen",
    lambda roles: roles.destination.nodes[0].signal(signal.SIGSTOP),
    lambda roles: roles.destination.nodes[0].signal(signal.SIGCONT),
    heals_itself=True,
)
SOURCE_KILLED = Fault(
    "the source is killed",
    lambda roles: roles.source.cluster.kill_broker(1),
    lambda roles: _start(roles.source),
    ends_source=True,
)
SOURCE_FROZEN = Fault(
    "the source is frozen",
    lambda roles: roles.source.cluster.pause(),
    lambda roles: roles.source.cluster.resume(),
    ends_source=True,
)
DESTINATION_KILLED = Fault(
    "the destination is killed",
    lambda roles: roles.destination.cluster.kill_broker(1),
    lambda roles: _start(roles.destination),
)
DESTINATION_FROZEN = Fault(
    "the destination is frozen",
    lambda roles: roles.destination.cluster.pause(),
    lambda roles: roles.destination.cluster.resume(),
)
BOTH_RESTARTED = Fault(
    "both clusters are killed and started",
    lambda roles: _each(roles, lambda side: side.cluster.kill_broker(1)),
    lambda roles: _each(roles, _start),
    hold_s=2.0,
    ends_source=True,
)
SOURCE_UNPLUGGED = Fault(
    "the network to the source is cut",
    lambda roles: _link(roles.source).unplug(),
    lambda roles: _link(roles.source).plug_in(),
    hold_s=10.0,
    ends_source=True,
    needs_root=True,
)
DESTINATION_UNPLUGGED = Fault(
    "the network to the destination is cut",
    lambda roles: _link(roles.destination).unplug(),
    lambda roles: _link(roles.destination).plug_in(),
    hold_s=10.0,
    needs_root=True,
)
SOURCE_SLOW = Fault(
    "the line to the source is slow",
    lambda roles: _slow_down(roles.source),
    lambda roles: _speed_up(roles.source),
)
SOURCE_STALLS = Fault(
    "the line to the source stalls",
    lambda roles: roles.source.proxy.stall(),
    lambda roles: roles.source.proxy.resume(),
    hold_s=10.0,
    ends_source=True,
)
DESTINATION_SLOW = Fault(
    "the line to the destination is slow",
    lambda roles: _slow_down(roles.destination),
    lambda roles: _speed_up(roles.destination),
)
DESTINATION_STALLS = Fault(
    "the line to the destination stalls",
    lambda roles: roles.destination.proxy.stall(),
    lambda roles: roles.destination.proxy.resume(),
    hold_s=10.0,
)
DISK_FULL = Fault(
    "the destination's disk is full",
    lambda roles: _disk(roles.destination).fill(),
    lambda roles: _make_room(roles.destination),
    needs_root=True,
)

FAULTS = (
    NODE_KILLED,
    NODE_FROZEN,
    SOURCE_KILLED,
    SOURCE_FROZEN,
    DESTINATION_KILLED,
    DESTINATION_FROZEN,
    BOTH_RESTARTED,
    SOURCE_UNPLUGGED,
    DESTINATION_UNPLUGGED,
    SOURCE_SLOW,
    SOURCE_STALLS,
    DESTINATION_SLOW,
    DESTINATION_STALLS,
    DISK_FULL,
)


def _start_node(side: Side) -> None:
    if side.nodes[0].endpoint is None:
        side.nodes[0].start()


def mend(side: Side) -> None:
    """Put everything right, whatever a cycle that failed has left behind."""
    side.proxy.reset()
    if side.link is not None:
        side.link.plug_in()
    if side.disk is not None:
        side.disk.empty()
    side.cluster.resume()
    _start(side)
    if side.nodes[0].endpoint is not None:
        side.nodes[0].signal(signal.SIGCONT)
    _start_node(side)
