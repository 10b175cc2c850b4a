"""One running node: how it starts, what it watches, and the order in which all of it ends."""

import asyncio
import concurrent.futures
import logging
import socket
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import psutil
from pydantic import SecretStr

from kmirror_dagster.broker.admin import ClusterAdmin
from kmirror_dagster.broker.clients import check_reachable
from kmirror_dagster.broker.follower import TopicFollower
from kmirror_dagster.broker.membership import GroupMember
from kmirror_dagster.coordination.api import build_app
from kmirror_dagster.coordination.clock import now_ms
from kmirror_dagster.coordination.feed import StateFeed
from kmirror_dagster.coordination.http_guard import HttpGuard
from kmirror_dagster.coordination.leadership import Identity
from kmirror_dagster.coordination.metrics import MetricsExporter, MetricSources, NodeCounters
from kmirror_dagster.coordination.models import NodeInfo
from kmirror_dagster.coordination.pauses import PauseGuard
from kmirror_dagster.coordination.peers import ENDS_HEADER, encode_ends
from kmirror_dagster.coordination.probes import INTERVAL_S
from kmirror_dagster.coordination.rooms import Rooms, Surroundings
from kmirror_dagster.coordination.server import ApiServer
from kmirror_dagster.coordination.service import NodeService
from kmirror_dagster.coordination.state_directory import StateDirectory
from kmirror_dagster.coordination.state_topic import StateTopic, ensure_state_topic, identity_changed
from kmirror_dagster.coordination.tls import CA_VARIABLE, identity_of_node
from kmirror_dagster.coordination.view import Change, StateView
from kmirror_dagster.errors import KmirrorError, NotLeaderError
from kmirror_dagster.records import STATE_TOPIC, MirrorRecord
from kmirror_dagster.settings import NodeSettings
from kmirror_dagster.version import __version__

logger = logging.getLogger(__name__)

_T = TypeVar("_T")

_PAUSE_TICK_S = 0.2
_IDENTITY_INTERVAL_S = 10.0
_LOAD_DEADLINE_S = 120.0
_THREADS = 8
# part of a drain that is kept for leaving the group and closing connections
_CLOSING_S = 5.0


class NodeRuntime:
    """One node; made inside its loop.

    Args:
        settings: of the node.
        directory: its state directory, held by this process.
        node_id: name towards the other nodes.
        token: API token.
        listener: bound socket of the API.
        environ: where `${ENV}` references of mirrors are looked up.
        drain_s: longest time that ending in order may take.
    """

    def __init__(
        self,
        settings: NodeSettings,
        directory: StateDirectory,
        *,
        node_id: str,
        token: SecretStr,
        listener: socket.socket,
        environ: Mapping[str, str],
        drain_s: float = 20.0,
    ) -> None:
        self._settings = settings
        self._directory = directory
        self._node_id = node_id
        self._token = token
        self._environ = environ
        self._drain_s = drain_s
        self._loop = asyncio.get_running_loop()
        self._started_ms = now_ms()
        self._stop = asyncio.Event()
        self._failure: KmirrorError | None = None
        self._draining = False
        self._joined = False
        self._cluster_id = ""
        self._rooms: Rooms | None = None
        self._feed: StateFeed | None = None
        self._member: GroupMember | None = None
        self._watchers: list[asyncio.Task[None]] = []
        self._guard = PauseGuard(settings.session_timeout_ms / 2000)
        self._counters = NodeCounters()
        self._exporter = MetricsExporter(self._metric_sources, self._counters, node_id=node_id)
        app = HttpGuard(build_app(self._service, self), token, forwarded_headers=self._ends)
        self._server = ApiServer(app, listener, settings=settings)
        self._slow = ThreadPoolExecutor(_THREADS, thread_name_prefix="refresh")
        self._quick = ThreadPoolExecutor(_THREADS, thread_name_prefix="quick")
        self._urgent = ThreadPoolExecutor(1, thread_name_prefix="urgent")
        self._admin = ClusterAdmin(settings.destination)

    # what the API asks

    def info(self) -> NodeInfo:
        """This node, as the API describes it."""
        process = psutil.Process()
        times = process.cpu_times()
        rooms = self._rooms
        return NodeInfo(
            node_id=self._node_id,
            endpoint=self._server.endpoint,
            version=__version__,
            started_ms=self._started_ms,
            destination_cluster_id=self._cluster_id,
            coordinator_partitions=sorted(rooms.leadership.shards) if rooms else [],
            mirror_partitions=len(rooms.partitions.running()) if rooms else 0,
            cpu_seconds=times.user + times.system,
            memory_bytes=process.memory_info().rss,
            quarantined_records=sorted(rooms.view.quarantined.values()) if rooms else [],
            max_retry_attempts=self._settings.mirror_failed_retry_max_attempts,
        )

    def is_ready(self) -> bool:
        """Whether the state is loaded, the group joined, and everything it assigned is led."""
        rooms = self._rooms
        if rooms is None or not self._joined or self._draining:
            return False
        return all(rooms.leadership.shard(partition) for partition in rooms.leadership.assigned)

    def request_shutdown(self) -> None:
        """Begin to drain; harmless when draining."""
        self._stop.set()

    def metrics(self) -> bytes:
        """Prometheus text."""
        return self._exporter.render()

    def _metric_sources(self) -> MetricSources | None:
        rooms = self._rooms
        if rooms is None:
            return None
        return MetricSources(rooms.view, rooms.leadership, rooms.partitions, rooms.refreshes, rooms.budget)

    def _service(self) -> NodeService:
        if self._rooms is None or self._draining:
            raise NotLeaderError("this node is starting or ending: try again")
        return self._rooms.service

    def _ends(self) -> list[tuple[bytes, bytes]]:
        if self._rooms is None:
            return []
        return [(ENDS_HEADER.lower().encode(), encode_ends(self._rooms.service.ends()).encode())]

    # life

    async def run(self, *, startup_wait_s: float) -> None:
        """Run until asked to stop; returns when everything has ended.

        Args:
            startup_wait_s: longest wait for the destination cluster.

        Raises:
            KmirrorError: why it could not start, or could not go on.
        """
        self._server.start()
        try:
            certificate = self._settings.api_tls_certificate
            ca = str(Path(certificate).resolve()) if certificate else None
            self._directory.write_endpoint(
                endpoint=self._server.endpoint,
                node_id=self._node_id,
                ca=ca,
                identity=identity_of_node(self._settings) if self._settings.api_tls_client_ca else None,
            )
            await self._unless_stopped(self._start(startup_wait_s))
            await self._stop.wait()
        finally:
            await self._end()
        if self._failure is not None:
            raise self._failure

    async def _unless_stopped(self, work: Coroutine[Any, Any, None]) -> None:
        """Await work, unless a stop is asked for before it is done."""
        task = asyncio.create_task(work)
        stop = asyncio.create_task(self._stop.wait())
        try:
            await asyncio.wait({task, stop}, return_when=asyncio.FIRST_COMPLETED)
            if task.done():
                task.result()
        finally:
            task.cancel()
            stop.cancel()
            await asyncio.gather(task, stop, return_exceptions=True)

    async def _start(self, wait_s: float) -> None:
        settings = self._settings
        self._cluster_id = await self._call(
            lambda: check_reachable(settings.destination, wait_s, role="destination")
        )
        topic = await self._call(lambda: ensure_state_topic(self._admin, settings))
        view = StateView(topic.partitions, topic.topic_id)
        self._feed = StateFeed(
            view,
            lambda on_records: TopicFollower(
                settings.destination,
                STATE_TOPIC,
                topic.partitions,
                group_id=settings.group_id,
                on_records=on_records,
            ),
        )
        await self._feed.load(_LOAD_DEADLINE_S)
        rooms = self._rooms = Rooms(view, self._surroundings())
        view.subscribe(self._changed)
        self._member = GroupMember(
            settings.destination,
            STATE_TOPIC,
            group_id=settings.group_id,
            session_timeout_ms=settings.session_timeout_ms,
            on_assigned=self._on_assigned,
            on_revoked=self._on_revoked,
            on_lost=self._on_revoked,
        )
        self._guard.tick()
        self._guard.clear()
        self._member.start()
        for loop in (
            self._watch_pauses(rooms),
            self._watch_identity(topic),
            self._watch_threads(),
            self._probe(rooms),
            self._tick(rooms),
        ):
            self._watch(loop)
        logger.info("node serves: cluster %s, API at %s", self._cluster_id, self._server.endpoint)

    def _surroundings(self) -> Surroundings:
        configured = self._environ.get(CA_VARIABLE) or self._settings.api_tls_certificate
        return Surroundings(
            settings=self._settings,
            identity=Identity(self._node_id, self._server.endpoint),
            token=self._token,
            peer_ca=Path(configured) if configured else None,
            environ=self._environ,
            cluster_id=self._cluster_id,
            admin=self._admin,
            guard=self._guard,
            slow=self._slow,
            quick=self._quick,
            urgent=self._urgent,
        )

    async def _end(self) -> None:
        """Drain: stop copying, leave the group, close what is open; never longer than the drain allows."""
        self._draining = True
        deadline = self._loop.time() + self._drain_s
        watchers, self._watchers = self._watchers, []
        for watcher in watchers:
            watcher.cancel()
        await asyncio.gather(*watchers, return_exceptions=True)
        try:
            await asyncio.wait_for(self._give_up(deadline), max(deadline - self._loop.time(), 0.1))
        except asyncio.TimeoutError:
            logger.warning("not everything ended within %.0f s; the other nodes take it over", self._drain_s)
        await self._server.close()
        self._admin.close()
        self._slow.shutdown(wait=False, cancel_futures=True)
        self._quick.shutdown(wait=False, cancel_futures=True)
        self._urgent.shutdown(wait=False, cancel_futures=True)

    async def _give_up(self, deadline: float) -> None:
        rooms, member, feed = self._rooms, self._member, self._feed
        if rooms is not None:
            work_s = max(deadline - self._loop.time() - _CLOSING_S, 0.1)
            try:
                # work ends before the group hears of it: nobody else begins while this node still writes
                await asyncio.wait_for(rooms.leadership.revoke_all(), work_s)
            except asyncio.TimeoutError:
                logger.warning("copies did not end within %.0f s", work_s)
        if member is not None:
            member.stop()
            await self._call(lambda: member.join(_CLOSING_S))
        if rooms is not None:
            await rooms.close(_CLOSING_S)
        if feed is not None:
            await feed.close(_CLOSING_S)

    def _fail(self, error: KmirrorError) -> None:
        """End the node because it cannot go on."""
        logger.error("%s", error, extra={"error": type(error).__name__})
        self._failure = self._failure or error
        self._stop.set()

    async def _call(self, work: Callable[[], _T]) -> _T:
        return await self._loop.run_in_executor(self._quick, work)

    # group membership; these three are called in its thread

    def _on_assigned(self, partitions: list[int]) -> None:
        self._loop.call_soon_threadsafe(self._assigned, partitions)

    def _assigned(self, partitions: list[int]) -> None:
        self._joined = True
        if self._draining or self._rooms is None:
            return
        if partitions:
            self._counters.rebalances += 1
            logger.info("assigned coordinator partitions %s", _ranges(partitions))
        self._rooms.leadership.assign(partitions)

    def _on_revoked(self, partitions: list[int]) -> None:
        rooms = self._rooms
        if rooms is None or not partitions or self._loop.is_closed():
            return
        future = asyncio.run_coroutine_threadsafe(self._revoked(rooms, partitions), self._loop)
        # heartbeats go on meanwhile: the session is not at stake, only how soon the others may begin
        limit_s = self._settings.session_timeout_ms / 1000
        try:
            future.result(limit_s)
        except concurrent.futures.TimeoutError:
            # the group need not wait any longer, and the work still has to end
            logger.warning("copies did not end within %.1f s of losing their lead", limit_s)

    async def _revoked(self, rooms: Rooms, partitions: list[int]) -> None:
        self._counters.rebalances += 1
        logger.info("giving up coordinator partitions %s", _ranges(partitions))
        await rooms.leadership.revoke(partitions)

    # watching

    async def _watch_pauses(self, rooms: Rooms) -> None:
        while True:
            gap = self._guard.tick()
            if gap:
                self._counters.pauses += 1
                logger.warning(
                    "this process did not run for %.1f s: giving up all leads and joining anew", gap
                )
                await rooms.leadership.revoke_all()
                self._guard.tick()
                self._guard.clear()
                if self._member is not None:
                    self._member.rejoin()
            await asyncio.sleep(_PAUSE_TICK_S)

    def _watch(self, work: Coroutine[Any, Any, None]) -> None:
        """Run a loop for as long as the node lives; a fault in it ends the node, not just the loop."""
        task = asyncio.create_task(work)
        self._watchers.append(task)
        task.add_done_callback(self._watched)

    def _watched(self, task: "asyncio.Task[None]") -> None:
        if task in self._watchers:
            self._watchers.remove(task)
        if not task.cancelled() and (fault := task.exception()) is not None:
            logger.error("a loop of this node ended with a fault", exc_info=fault)
            self._fail(KmirrorError(f"internal error: {fault!r}; the node's log has the trace"))

    async def _probe(self, rooms: Rooms) -> None:
        while True:
            rooms.prober.tick()
            await asyncio.sleep(INTERVAL_S)

    async def _tick(self, rooms: Rooms) -> None:
        while True:
            await asyncio.sleep(INTERVAL_S)
            await rooms.partitions.tick()

    async def _watch_threads(self) -> None:
        while True:
            await asyncio.sleep(INTERVAL_S)
            for what, part in (("group member", self._member), ("state follower", self._feed)):
                if part is not None and not part.is_alive():
                    self._fail(KmirrorError(f"the {what} of this node ended unexpectedly; its log says why"))

    async def _watch_identity(self, topic: StateTopic) -> None:
        suspected = False
        while True:
            await asyncio.sleep(_IDENTITY_INTERVAL_S / 10 if suspected else _IDENTITY_INTERVAL_S)
            problem = await self._call(
                lambda: identity_changed(self._admin, cluster_id=self._cluster_id, topic_id=topic.topic_id)
            )
            # one look may be at a broker that is catching up
            if problem is not None and suspected:
                self._fail(
                    KmirrorError(f"{problem}: ending, because what this node knows belongs to the former one")
                )
            suspected = problem is not None

    def _changed(self, changes: Sequence[Change]) -> None:
        rooms = self._rooms
        if rooms is None:
            return
        rooms.partitions.changed(changes)
        rooms.refreshes.changed(changes)
        for change in changes:
            before, after = change.before, change.after
            if isinstance(before, MirrorRecord) and _needs_reconnect(before, after):
                self._watch(rooms.partitions.reconnect(before.mirror))


def _needs_reconnect(before: MirrorRecord, after: object) -> bool:
    """Whether changed settings concern more than what is selected (KIP-1279 section 3.2)."""
    if not isinstance(after, MirrorRecord):
        return False
    return {**before.document, "filters": None} != {**after.document, "filters": None}


def _ranges(partitions: list[int]) -> str:
    """Numbers as ranges, for a log line: 0-3,7."""
    parts: list[str] = []
    first = last = -2
    for number in [*sorted(partitions), -1]:
        if number == last + 1 and first >= 0:
            last = number
            continue
        if first >= 0:
            parts.append(str(first) if first == last else f"{first}-{last}")
        first = last = number
    return ",".join(parts) or "none"
