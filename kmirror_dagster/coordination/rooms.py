"""A node's parts, put together over one loaded view."""

import random
from collections.abc import Mapping
from concurrent.futures import Executor
from dataclasses import dataclass
from pathlib import Path

from pydantic import SecretStr

from kmirror_dagster.broker.admin import ClusterAdmin
from kmirror_dagster.broker.clients import check_reachable
from kmirror_dagster.broker.state_log import StateLog
from kmirror_dagster.coordination.clock import now_ms
from kmirror_dagster.coordination.leadership import Identity, Leadership
from kmirror_dagster.coordination.links import LinkPool
from kmirror_dagster.coordination.operations import MirrorOperations
from kmirror_dagster.coordination.partitions import PartitionCoordinator
from kmirror_dagster.coordination.pauses import PauseGuard
from kmirror_dagster.coordination.peers import Peers
from kmirror_dagster.coordination.ports import Link, MetadataRefresher
from kmirror_dagster.coordination.probes import Prober
from kmirror_dagster.coordination.refreshes import RefreshCoordinator
from kmirror_dagster.coordination.service import NodeService, Parts
from kmirror_dagster.coordination.stops import StopWork, TopicReleaser
from kmirror_dagster.coordination.tls import identity_of, identity_of_node
from kmirror_dagster.coordination.view import StateView
from kmirror_dagster.errors import KmirrorError
from kmirror_dagster.metadata.acl_release import release_acls
from kmirror_dagster.metadata.acls import TopicAcls
from kmirror_dagster.metadata.refresh import Refresher
from kmirror_dagster.metadata.release import release
from kmirror_dagster.records import STATE_TOPIC, MirrorRecord
from kmirror_dagster.replication.budget import Budget
from kmirror_dagster.replication.link import MirrorLink
from kmirror_dagster.settings import ClusterSettings, NodeSettings, mirror_from_document

_RELEASE_DEADLINE_S = 30.0


@dataclass(frozen=True)
class Surroundings:
    """What the parts need of the process.

    Attributes:
        settings: of the node.
        identity: towards the other nodes.
        token: of the API.
        peer_ca: PEM file that verifies other nodes.
        environ: where `${ENV}` references of mirrors are looked up.
        cluster_id: of the destination.
        admin: of the destination; shared.
        guard: asked before anything is sent.
        slow: threads for refreshes.
        quick: threads for short calls.
        urgent: threads that nothing but a stop uses: it must not wait behind a cluster that does not answer.
    """

    settings: NodeSettings
    identity: Identity
    token: SecretStr
    peer_ca: Path | None
    environ: Mapping[str, str]
    cluster_id: str
    admin: ClusterAdmin
    guard: PauseGuard
    slow: Executor
    quick: Executor
    urgent: Executor


class Rooms:
    """All parts of a node that depend on the state topic."""

    def __init__(self, view: StateView, around: Surroundings) -> None:
        settings = around.settings
        rng = random.Random()  # noqa: S311 - jitter, not secrets
        self._around = around
        self.budget = Budget(around.settings.memory_budget_bytes)
        self.view = view
        self.log = StateLog(settings.destination, STATE_TOPIC, transactional_prefix=settings.group_id)
        self.leadership = Leadership(
            view,
            self.log,
            around.identity,
            now_ms=now_ms,
            rng=rng,
            on_gained=self._gained,
            on_losing=self._losing,
        )
        shard_of = self.leadership.shard
        self.links = LinkPool(view.mirrors, self._link)
        releaser = TopicReleaser(self._release, around.urgent)
        acl_releaser = TopicReleaser(self._release_acls, around.urgent)
        stop_work = StopWork(view, releaser, acl_releaser, now_ms=now_ms)
        self.partitions = PartitionCoordinator(
            view, shard_of, self.links, stop_work, settings.retry_policy(), rng=rng, now_ms=now_ms
        )
        self.refreshes = RefreshCoordinator(
            view,
            shard_of,
            self._refresher,
            around.slow,
            interval_s=settings.mirror_metadata_refresh_interval_ms / 1000,
            now_ms=now_ms,
        )
        operations = MirrorOperations(
            view,
            shard_of,
            self.refreshes,
            _cluster_id,
            around.quick,
            destination_cluster_id=around.cluster_id,
            environ=around.environ,
            now_ms=now_ms,
        )
        node_id = around.identity.node_id
        self.prober = Prober(self.links, self.partitions.active_mirrors, node_id=node_id, now_ms=now_ms)
        shown = identity_of(around.environ) or identity_of_node(settings)
        self.peers = Peers(around.token, ca=around.peer_ca, identity=shown)
        parts = Parts(view, shard_of, self.partitions, self.refreshes, operations, self.prober, self.peers)
        self.service = NodeService(
            parts, node_id=node_id, destination_cluster_id=around.cluster_id, now_ms=now_ms
        )

    async def close(self, deadline_s: float) -> None:
        """End everything that is not leadership; that has been given up before."""
        await self.prober.close()
        await self.links.close(self.links.open_mirrors(), deadline_s=deadline_s)
        await self.log.close()
        await self.peers.close()

    def _gained(self, coordinator_partition: int) -> None:
        self.partitions.gained(coordinator_partition)
        self.refreshes.gained(coordinator_partition)

    async def _losing(self, coordinator_partitions: frozenset[int]) -> None:
        await self.partitions.losing(coordinator_partitions)
        await self.refreshes.losing(coordinator_partitions)

    def _link(self, record: MirrorRecord) -> Link:
        mirror = mirror_from_document(record.document, self._around.environ)
        settings = self._around.settings
        return MirrorLink(
            mirror,
            node_id=self._around.identity.node_id,
            budget=self.budget,
            transactional_prefix=settings.group_id,
            state_partitions=self.view.count,
            may_send=self._around.guard.is_sure,
        )

    def _refresher(self, record: MirrorRecord) -> MetadataRefresher:
        mirror = mirror_from_document(record.document, self._around.environ)
        return Refresher(
            mirror,
            ClusterAdmin(mirror.source),
            ClusterAdmin(mirror.destination),
            source_cluster_id=record.source_cluster_id,
            destination_cluster_id=record.destination_cluster_id,
        )

    def _release(self, held: Mapping[str, Mapping[str, str | None]]) -> Mapping[str, KmirrorError | None]:
        return release(self._around.admin, held, deadline_s=_RELEASE_DEADLINE_S)

    def _release_acls(self, topics: Mapping[str, TopicAcls]) -> Mapping[str, KmirrorError | None]:
        return release_acls(self._around.admin, topics, deadline_s=_RELEASE_DEADLINE_S)


def _cluster_id(settings: ClusterSettings, deadline_s: float, role: str) -> str:
    return check_reachable(settings, deadline_s, role=role)
