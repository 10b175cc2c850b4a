"""Fetch loop against one source broker."""

import asyncio
import logging
import math
import random
import time
from collections.abc import Callable

from kmirror_dagster.broker import codes, fetch
from kmirror_dagster.broker.connection import Connection, Frame
from kmirror_dagster.broker.fetch import FetchedPartition, FetchPosition, FetchSession, TopicPartition
from kmirror_dagster.broker.tasks import cancel_and_wait
from kmirror_dagster.broker.wire import WireCluster
from kmirror_dagster.errors import (
    KmirrorError,
    ReplicationError,
    UnsupportedDataError,
)
from kmirror_dagster.replication.budget import Budget
from kmirror_dagster.replication.copier import Copier, Lease, Phase

log = logging.getLogger(__name__)

_MAX_WAIT_MS = 500
# with partitions held back by back-pressure the answer must not be waited for long: they may want more soon
_HURRIED_WAIT_MS = 20
_PARTITION_BYTES = 512 * 1024
# An answer takes a round trip to come. Over a long way more is asked for at once, or the way stays empty between.
_FAR_PARTITION_BYTES = 8 * 1024 * 1024
_GROWTH = 4
_ANSWER_PARTITIONS = 8
MOST_ANSWER_BYTES = 24 * 1024 * 1024
# with its head, an answer just fits into a receive buffer of whole mebibytes
_ANSWER_HEAD_BYTES = 64 * 1024
_FAR_S = 0.03
_BACKOFF_FIRST_S = 0.05
_BACKOFF_CAP_S = 1.0
_MAX_ANSWER_WAIT_S = 30.0
_TOPIC_CHANGED = frozenset({codes.UNKNOWN_TOPIC_ID, codes.INCONSISTENT_TOPIC_ID})


class SourceReader:
    """Reads, on a connection of its own, for partitions that one source broker leads.

    Args:
        cluster: the source.
        node_id: the broker.
        budget: shared by all readers of the node.
        lane: number of this reader among those of the broker.
        on_ready: called with a copier that has steps to do.
        on_moved: called with a copier whose partition this broker does not serve any more.
        on_refused: called with a copier and what the broker answered for its position.
        on_far: called when full answers turn out to come from far away.
    """

    def __init__(
        self,
        cluster: WireCluster,
        node_id: int,
        budget: Budget,
        *,
        lane: int,
        on_ready: Callable[[Copier], None],
        on_moved: Callable[[Copier], None],
        on_refused: Callable[[Copier, FetchedPartition], None],
        on_far: Callable[[], None],
    ) -> None:
        self.node_id = node_id
        self._lane = f"fetch-{lane}"
        self._cluster = cluster
        self._budget = budget
        self._on_ready = on_ready
        self._on_moved = on_moved
        self._on_refused = on_refused
        self._on_far = on_far
        self._copiers: dict[TopicPartition, Copier] = {}
        # only partitions touched since the last request are looked at: with thousands of them idle, walking
        # through all for each answer would cost more than the copying
        self._dirty: set[TopicPartition] = set()
        self._held_back: set[TopicPartition] = set()
        self._troubled: set[TopicPartition] = set()
        self._session = FetchSession()
        self._wake = asyncio.Event()
        self._backoff = _BACKOFF_FIRST_S
        self._partition_bytes = _PARTITION_BYTES
        self._connection: Connection | None = None
        self._way_s = math.inf
        self._task = asyncio.get_running_loop().create_task(self._run(), name=f"reader-{node_id}")

    def add(self, copier: Copier) -> None:
        """Read for a copier from its `planned` offset on."""
        self._copiers[copier.key] = copier
        if copier.trouble_since is not None:
            self._troubled.add(copier.key)
        self.touch(copier)

    def remove(self, copier: Copier) -> None:
        """Stop reading for a copier."""
        if self._copiers.get(copier.key) is copier:
            del self._copiers[copier.key]
            self._held_back.discard(copier.key)
            self._dirty.add(copier.key)

    def touch(self, copier: Copier) -> None:
        """Look again at what a copier wants."""
        self._dirty.add(copier.key)
        self._wake.set()

    def resume(self, copier: Copier) -> None:
        """Go on with a copier that was held back, when its queue has room again."""
        if copier.key in self._held_back and copier.wants_more:
            self.touch(copier)

    @property
    def size(self) -> int:
        """Partitions it reads."""
        return len(self._copiers)

    async def close(self) -> None:
        """End the loop and wait for it."""
        await cancel_and_wait([self._task])

    async def _run(self) -> None:
        while True:
            try:
                await self._round()
            except asyncio.CancelledError:
                raise
            except KmirrorError as error:
                await self._failed(error)
            except Exception as error:
                # a bug must end in FAILED partitions with its name, not in a silent dead loop
                log.exception("reader of source broker %d", self.node_id)
                for copier in list(self._copiers.values()):
                    copier.on_failure(ReplicationError(f"reader failed: {type(error).__name__}: {error}"))
                self._copiers.clear()

    async def _round(self) -> None:
        await self._budget.wait()
        changed, forgotten = self._changes()
        if not self._session.sent and not changed:
            self._wake.clear()
            if not self._dirty:  # looked at after clearing, so that no touch between the two is lost
                await self._wake.wait()
            return
        connection = await self._cluster.connection(self.node_id, self._lane)
        if connection is not self._connection:
            self._connection, self._way_s = connection, connection.round_trip_s
        version = self._version(connection, changed)
        correlation_id = connection.next_id()
        request = self._session.request(
            changed,
            forgotten,
            version=version,
            correlation_id=correlation_id,
            client_id=self._cluster.settings.client_id,
            max_wait_ms=_HURRIED_WAIT_MS if self._held_back else _MAX_WAIT_MS,
            min_bytes=1,
            max_bytes=min(self._partition_bytes * _ANSWER_PARTITIONS, MOST_ANSWER_BYTES) - _ANSWER_HEAD_BYTES,
        )
        asked = time.monotonic()
        frame = await self._exchange(connection, correlation_id, request)
        self._adapt(frame, asked)
        self._handle(frame, version)

    def _adapt(self, frame: Frame, asked: float) -> None:
        """Choose how much to ask for by how far away the broker is.

        What counts is the shortest time in which anything was answered over this connection: a busy machine
        makes single answers late.
        """
        self._way_s = min(self._way_s, frame.began - asked)
        if self._way_s <= _FAR_S:
            self._partition_bytes = _PARTITION_BYTES
        elif len(frame.view) >= self._partition_bytes // 2:  # limited by what was asked for
            most = max(_FAR_PARTITION_BYTES, MOST_ANSWER_BYTES // max(1, len(self._copiers)))
            self._partition_bytes = min(self._partition_bytes * _GROWTH, most)
            self._on_far()

    def _changes(self) -> tuple[dict[TopicPartition, FetchPosition], list[TopicPartition]]:
        if self._session.is_new:
            self._session.reset()
            self._dirty.update(self._copiers)
        changed: dict[TopicPartition, FetchPosition] = {}
        forgotten: list[TopicPartition] = []
        sent = self._session.sent
        for tp in self._dirty:
            copier = self._copiers.get(tp)
            if copier is not None and copier.wants_more:
                self._held_back.discard(tp)
                position = copier.position(self._partition_bytes)
                if sent.get(tp) != position:
                    changed[tp] = position
                continue
            if copier is not None and copier.phase is Phase.RUNNING:
                self._held_back.add(tp)
            if tp in sent:
                forgotten.append(tp)
        self._dirty.clear()
        return changed, forgotten

    async def _exchange(self, connection: Connection, correlation_id: int, request: bytes) -> Frame:
        future = connection.send(correlation_id, [request])
        # closing it is what ends the wait: cheaper, for each small answer, than a task with a time limit
        timer = asyncio.get_running_loop().call_later(_MAX_ANSWER_WAIT_S, self._cluster.drop, connection)
        try:
            return await future
        except asyncio.CancelledError:
            # the answer to this request would be read as the answer to the next one's session
            self._session.reset()
            raise
        finally:
            timer.cancel()

    def _version(self, connection: Connection, changed: dict[TopicPartition, FetchPosition]) -> int:
        version = connection.version(fetch.API_KEY, fetch.HIGHEST_VERSION)
        if version < fetch.LOWEST_VERSION:
            raise ReplicationError(
                f"source broker {self.node_id} speaks Fetch {version}, version {fetch.LOWEST_VERSION} "
                "(Kafka 2.7) is needed: upgrade the source"
            )
        if version >= 13 and any(not any(position.topic_id) for position in changed.values()):
            return 12  # a topic created before topic ids existed has none
        return version

    def _handle(self, frame: Frame, version: int) -> None:
        lease = Lease(self._cluster.pool, frame.lease, len(frame.view), self._budget.give)
        self._budget.take(len(frame.view))
        try:
            answer = self._session.answer(frame.view, version)
            if answer.error_code:
                if answer.error_code not in (
                    codes.FETCH_SESSION_ID_NOT_FOUND,
                    codes.INVALID_FETCH_SESSION_EPOCH,
                    codes.FETCH_SESSION_TOPIC_ID_ERROR,
                ):
                    raise codes.broker_error(answer.error_code, f"fetching from source broker {self.node_id}")
                return
            self._backoff = _BACKOFF_FIRST_S
            self._end_trouble()
            for fetched in answer.partitions:
                self._deliver(fetched, lease)
        finally:
            lease.drop()

    def _deliver(self, fetched: FetchedPartition, lease: Lease) -> None:
        tp = (fetched.topic, fetched.partition)
        copier = self._copiers.get(tp)
        asked = self._session.sent.get(tp)
        if copier is None or asked is None or copier.phase is not Phase.RUNNING:
            return
        self._dirty.add(tp)
        if fetched.error_code in codes.STALE_METADATA or fetched.error_code in _TOPIC_CHANGED:
            self._move(copier)
            return
        if fetched.error_code == codes.OFFSET_NOT_AVAILABLE:
            return
        if fetched.error_code or fetched.diverging_end_offset >= 0:
            if asked.offset == copier.planned_source:
                self.remove(copier)
                self._on_refused(copier, fetched)
            return
        try:
            copier.take(fetched, asked.offset, lease)
        except UnsupportedDataError as error:
            copier.error = error  # raised once everything in front of it is appended
            self.remove(copier)
        self._on_ready(copier)

    def _move(self, copier: Copier) -> None:
        if copier.trouble_since is None:
            copier.trouble_since = time.monotonic()
        self.remove(copier)
        self._on_moved(copier)

    def _end_trouble(self) -> None:
        for tp in self._troubled:
            copier = self._copiers.get(tp)
            if copier is not None:
                copier.trouble_since = None
        self._troubled.clear()

    async def _failed(self, error: KmirrorError) -> None:
        self._session.reset()
        log.warning("source broker %d: %s; trying again", self.node_id, error)
        copiers = list(self._copiers.values())
        if not error.retriable:
            for copier in copiers:
                self.remove(copier)
                copier.on_failure(ReplicationError(f"source cannot be read: {error}"))
            return
        await asyncio.sleep(random.uniform(0, self._backoff))  # noqa: S311 - jitter, no secret
        self._backoff = min(self._backoff * 2, _BACKOFF_CAP_S)
        for copier in copiers:
            # a broker that went away may have handed its partitions to others
            self._move(copier)
