"""One cluster over the wire: metadata, connections per broker, and the rare calls of the data path.

Rare calls use kafka-python's generated classes; Fetch and Produce are packed by hand (fetch.py, produce.py).
"""

import asyncio
import random
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar
from uuid import UUID

from kafka.protocol.admin.topics import DeleteRecordsRequest
from kafka.protocol.admin.transactions import DescribeProducersRequest
from kafka.protocol.consumer.offsets import ListOffsetsRequest, OffsetForLeaderEpochRequest
from kafka.protocol.metadata.api_versions import ApiVersionsRequest
from kafka.protocol.metadata.find_coordinator import FindCoordinatorRequest
from kafka.protocol.metadata.metadata import MetadataRequest
from kafka.protocol.producer.transaction import InitProducerIdRequest

from kmirror_dagster.broker import codes
from kmirror_dagster.broker.connection import BufferPool, Connection
from kmirror_dagster.broker.missing_rights import Right, refusal
from kmirror_dagster.errors import (
    AuthenticationError,
    AuthorizationError,
    BrokerError,
    ClusterUnreachableError,
    ConnectionLostError,
    DeadlineError,
    KmirrorError,
)
from kmirror_dagster.settings import ClusterSettings

EARLIEST = -2
LATEST = -1
READ_UNCOMMITTED = 0
READ_COMMITTED = 1

TopicPartition = tuple[str, int]
T = TypeVar("T")

_METADATA_MIN_AGE_S = 0.1
_IDLE_CLOSE_S = 300.0
_CALL_DEADLINE_S = 15.0


@dataclass(frozen=True)
class Leader:
    """Where a partition is led. `topic_id` is None when the cluster has no topic ids."""

    node_id: int
    epoch: int
    topic_id: UUID | None


@dataclass(frozen=True)
class ProducerState:
    """What a partition leader knows of one producer (DescribeProducers, KIP-664)."""

    producer_id: int
    producer_epoch: int
    last_sequence: int
    open_transaction_start: int
    coordinator_epoch: int


@dataclass(frozen=True)
class Outcome:
    """Offset, or the error a partition's part of a call ended with."""

    offset: int = -1
    error: KmirrorError | None = None

    def value(self) -> int:
        """The offset; raises the error instead when there is one."""
        if self.error is not None:
            raise self.error
        return self.offset


class WireCluster:
    """Connections and metadata of one cluster, for use in one event loop.

    Args:
        settings: how to reach it.
        role: "source" or "destination", for messages.
    """

    def __init__(self, settings: ClusterSettings, *, role: str) -> None:
        self.settings = settings
        self.role = role
        self.pool = BufferPool()
        self.cluster_id: str | None = None
        self._brokers: dict[int, tuple[str, int]] = {}
        self._leaders: dict[TopicPartition, Leader] = {}
        self._hidden: frozenset[str] = frozenset()  # topics that may not be described
        self._topics: set[str] = set()
        self._read: frozenset[str] = frozenset()
        self._connections: dict[tuple[int, str], Connection] = {}
        self._opening: dict[tuple[int, str], asyncio.Lock] = {}
        self._coordinators: dict[str, int] = {}
        self._identity: tuple[int, int] | None = None
        self._identifying = asyncio.Lock()
        self._refreshed = 0.0
        self._refreshing = asyncio.Lock()
        self._closed = False

    # connections

    async def connection(self, node_id: int, lane: str = "control") -> Connection:
        """Open connection to a broker; each lane (control, fetch, produce) has its own."""
        key = (node_id, lane)
        lock = self._opening.setdefault(key, asyncio.Lock())
        async with lock:
            current = self._connections.get(key)
            if current is not None and current.alive:
                return current
            self._refuse_closed()
            address = self._brokers.get(node_id)
            if address is None:
                await self.refresh(force=True)
                address = self._brokers.get(node_id)
                if address is None:
                    raise ClusterUnreachableError(f"{self.role} broker {node_id} is not in the cluster")
            fresh = await self._open(*address)
            self._connections[key] = fresh
            if current is not None:
                current.retire()  # its session ends soon
            return fresh

    def _refuse_closed(self) -> None:
        if self._closed:
            closed = ConnectionLostError(f"{self.role} cluster client is closed")
            closed.retriable = False  # whoever retries would go on until its deadline
            raise closed

    async def _open(self, host: str, port: int) -> Connection:
        self._refuse_closed()
        setup_s = self.settings.socket_connection_setup_timeout_ms / 1000
        connection = await Connection(self.settings, host, port, pool=self.pool).open(setup_s)
        if self._closed:
            connection.close()
            self._refuse_closed()
        return connection

    async def _any(self) -> Connection:
        """A connection to any broker: known ones first, then the bootstrap list."""
        self._refuse_closed()
        for (_, lane), connection in list(self._connections.items()):
            if connection.alive and lane == "control":
                return connection
        failures: list[str] = []
        known = [(node_id, address) for node_id, address in self._brokers.items()]
        random.shuffle(known)
        for node_id, _ in known:
            try:
                return await self.connection(node_id)
            except AuthenticationError:
                raise
            except KmirrorError as error:
                failures.append(str(error))
        bootstrap = self.settings.bootstrap()
        for host, port in random.sample(bootstrap, len(bootstrap)):
            try:
                connection = await self._open(host, port)
            except AuthenticationError:
                raise
            except KmirrorError as error:
                failures.append(str(error))
                continue
            stale = self._connections.pop((-1, "control"), None)
            if stale is not None:
                stale.retire()
            self._connections[-1, "control"] = connection
            return connection
        self._refuse_closed()
        names = ", ".join(f"{host}:{port}" for host, port in bootstrap)
        raise ClusterUnreachableError(
            f"cannot reach the {self.role} cluster at {names}: {failures[-1]}; "
            "check bootstrap.servers and that a broker is running"
        )

    def drop(self, connection: Connection) -> None:
        """Close a connection that misbehaved; the next use opens another."""
        connection.close()

    def close_idle(self) -> None:
        """Close connections nobody used for five minutes."""
        horizon = time.monotonic() - _IDLE_CLOSE_S
        for key, connection in list(self._connections.items()):
            if not connection.alive or (connection.in_flight == 0 and connection.last_used < horizon):
                connection.close()
                del self._connections[key]

    async def close(self) -> None:
        """Close everything; calls under way end with ConnectionLostError."""
        self._closed = True
        for connection in self._connections.values():
            connection.close()
        self._connections.clear()

    def refusal(
        self, code: int, doing: str, right: Right, name: str = ""
    ) -> AuthorizationError | BrokerError:
        """Error for a code this cluster answered; a missing right is named with the command that grants it."""
        return refusal(code, doing, right=right, name=name, settings=self.settings)

    # metadata

    async def refresh(self, topics: Iterable[str] = (), *, force: bool = False) -> None:
        """Read brokers and leaders again, of all topics asked for so far; one request for concurrent callers."""
        asked = time.monotonic()
        wanted = set(topics)
        self._topics |= wanted
        async with self._refreshing:
            if self._refreshed > asked and wanted <= self._read:
                return  # somebody else's refresh began after we were called, and asked for our topics too
            wait = self._refreshed + _METADATA_MIN_AGE_S - time.monotonic()
            if wait > 0 and wanted <= self._read and not force:
                await asyncio.sleep(wait)
            began = time.monotonic()
            await self._read_metadata()
            self._refreshed = began

    async def _read_metadata(self) -> None:
        connection = await self._any()
        kind = MetadataRequest
        names = sorted(self._topics)
        self._read = frozenset(names)
        request = kind(
            topics=[kind.MetadataRequestTopic(name=name, topic_id=UUID(int=0)) for name in names],
            allow_auto_topic_creation=False,
        )
        answer = await connection.call(request, deadline_s=_CALL_DEADLINE_S)
        self.cluster_id = answer.cluster_id
        self._brokers = {broker.node_id: (broker.host, broker.port) for broker in answer.brokers}
        leaders: dict[TopicPartition, Leader] = {}
        hidden: set[str] = set()
        for topic in answer.topics:
            topic_id = getattr(topic, "topic_id", None)
            if not topic_id or topic_id.int == 0:
                topic_id = None
            for partition in topic.partitions:
                if partition.leader_id >= 0:
                    leaders[topic.name, partition.partition_index] = Leader(
                        partition.leader_id, partition.leader_epoch, topic_id
                    )
            if topic.error_code == codes.TOPIC_AUTHORIZATION_FAILED:
                self._topics.discard(topic.name)
                hidden.add(topic.name)
        self._leaders, self._hidden = leaders, frozenset(hidden)

    async def leader(self, topic: str, partition: int) -> Leader:
        """Leader of a partition.

        Raises:
            BrokerError: UNKNOWN_TOPIC_OR_PARTITION or LEADER_NOT_AVAILABLE, retriable.
            AuthorizationError: the topic may not be described.
        """
        known = self._leaders.get((topic, partition))
        if known is None:
            await self.refresh([topic])
            known = self._leaders.get((topic, partition))
            if known is None:
                self._topics.discard(topic)
                code = (
                    codes.TOPIC_AUTHORIZATION_FAILED
                    if topic in self._hidden
                    else codes.UNKNOWN_TOPIC_OR_PARTITION
                )
                doing = f"{topic}/{partition} at the {self.role} cluster"
                raise self.refusal(code, doing, Right("DESCRIBE", "topic"), topic)
        return known

    def known_leader(self, topic: str, partition: int) -> Leader | None:
        """Leader as last seen, without asking."""
        return self._leaders.get((topic, partition))

    def forget(self, topic: str, partition: int) -> None:
        """Forget a leader that turned out wrong; the next use looks it up."""
        self._leaders.pop((topic, partition), None)

    async def coordinator(self, transactional_id: str) -> Connection:
        """Connection to the transaction coordinator of an id."""
        node_id = self._coordinators.get(transactional_id)
        if node_id is None:
            connection = await self._any()
            if connection.version(FindCoordinatorRequest.API_KEY, 6) >= 4:
                request = FindCoordinatorRequest(key_type=1, coordinator_keys=[transactional_id])
                answer = (await connection.call(request)).coordinators[0]
            else:
                answer = await connection.call(
                    FindCoordinatorRequest(key=transactional_id, key_type=1), version=2
                )
            if answer.error_code:
                raise self.refusal(
                    answer.error_code,
                    f"looking up the coordinator of {transactional_id}",
                    Right("DESCRIBE", "transactional-id"),
                    transactional_id,
                )
            node_id = answer.node_id
            self._brokers.setdefault(node_id, (answer.host, answer.port))
            self._coordinators[transactional_id] = node_id
        return await self.connection(node_id)

    def forget_coordinator(self, transactional_id: str) -> None:
        """Forget a coordinator that moved."""
        self._coordinators.pop(transactional_id, None)

    async def any_connection(self) -> Connection:
        """Connection to any broker, for what every broker answers."""
        return await self._any()

    async def any_call(self, request: Any, deadline_s: float = _CALL_DEADLINE_S) -> Any:
        """Send a request that every broker answers."""
        return await (await self._any()).call(request, deadline_s=deadline_s)

    async def ping(self) -> None:
        """One request to any broker on a connection of its own; cancel it for a time limit.

        Raises:
            KmirrorError: no broker answered.
        """
        if not self._brokers:
            await self.refresh()
        failure: KmirrorError = ClusterUnreachableError(f"the {self.role} cluster has no brokers")
        for node_id in list(self._brokers):
            try:
                connection = await self.connection(node_id, "probe")
                await connection.call(ApiVersionsRequest(), version=0)
            except KmirrorError as error:
                failure = error
                continue
            return
        raise failure

    async def data_identity(self) -> tuple[int, int]:
        """Idempotent producer id and epoch for data that has none yet; one for all partitions begun here.

        Sequence numbers are counted per partition, so partitions can share an id; sharing lets one entry of a
        request write control records into many.
        """
        async with self._identifying:
            if self._identity is None:
                answer = await self.any_call(
                    InitProducerIdRequest(
                        transactional_id=None,
                        transaction_timeout_ms=60_000,
                        producer_id=-1,
                        producer_epoch=-1,
                    )
                )
                if answer.error_code:
                    # without any topic it may write to, a principal needs this
                    right = Right("IDEMPOTENT_WRITE", "cluster")
                    raise self.refusal(answer.error_code, "obtaining a producer id", right)
                self._identity = (answer.producer_id, answer.producer_epoch)
            return self._identity

    # rare calls, grouped by leader

    async def list_offsets(
        self, partitions: Sequence[TopicPartition], timestamp: int, *, isolation: int = READ_UNCOMMITTED
    ) -> dict[TopicPartition, Outcome]:
        """Offsets by ListOffsets: EARLIEST (-2), LATEST (-1: high watermark or last stable offset) or by time.

        An offset of -1 without an error means: no record at or behind that time.
        """

        def build(entries: list[tuple[str, int, Leader]]) -> Any:
            kind = ListOffsetsRequest
            return kind(
                replica_id=-1,
                isolation_level=isolation,
                topics=[
                    kind.ListOffsetsTopic(
                        name=topic,
                        partitions=[
                            kind.ListOffsetsTopic.ListOffsetsPartition(
                                partition_index=index, current_leader_epoch=leader.epoch, timestamp=timestamp
                            )
                            for index, leader in group
                        ],
                    )
                    for topic, group in _by_topic(entries)
                ],
                timeout_ms=int(_CALL_DEADLINE_S * 1000),
            )

        def read(answer: Any) -> Iterable[tuple[str, int, int, int]]:
            for topic in answer.topics:
                for entry in topic.partitions:
                    yield topic.name, entry.partition_index, entry.error_code, entry.offset

        return await self._per_leader(partitions, build, read, "ListOffsets", "DESCRIBE", highest=9)

    async def log_ends(self, partitions: Sequence[TopicPartition]) -> dict[TopicPartition, Outcome]:
        """Log end offsets at the leaders, beyond the high watermark too.

        ListOffsets answers the high watermark; OffsetForLeaderEpoch (KIP-320) for the current epoch answers
        the leader's log end.
        """

        def build(entries: list[tuple[str, int, Leader]]) -> Any:
            kind = OffsetForLeaderEpochRequest
            return kind(
                replica_id=-1,
                topics=[
                    kind.OffsetForLeaderTopic(
                        topic=topic,
                        partitions=[
                            kind.OffsetForLeaderTopic.OffsetForLeaderPartition(
                                partition=index, current_leader_epoch=leader.epoch, leader_epoch=leader.epoch
                            )
                            for index, leader in group
                        ],
                    )
                    for topic, group in _by_topic(entries)
                ],
            )

        def read(answer: Any) -> Iterable[tuple[str, int, int, int]]:
            for topic in answer.topics:
                for entry in topic.partitions:
                    yield topic.topic, entry.partition, entry.error_code, entry.end_offset

        return await self._per_leader(partitions, build, read, "OffsetForLeaderEpoch", "DESCRIBE", highest=4)

    async def delete_records(self, offsets: dict[TopicPartition, int]) -> dict[TopicPartition, Outcome]:
        """Move log starts (DeleteRecords); answers the new low watermarks."""

        def build(entries: list[tuple[str, int, Leader]]) -> Any:
            kind = DeleteRecordsRequest
            return kind(
                topics=[
                    kind.DeleteRecordsTopic(
                        name=topic,
                        partitions=[
                            kind.DeleteRecordsTopic.DeleteRecordsPartition(
                                partition_index=index, offset=offsets[topic, index]
                            )
                            for index, _ in group
                        ],
                    )
                    for topic, group in _by_topic(entries)
                ],
                timeout_ms=int(_CALL_DEADLINE_S * 1000),
            )

        def read(answer: Any) -> Iterable[tuple[str, int, int, int]]:
            for topic in answer.topics:
                for entry in topic.partitions:
                    yield topic.name, entry.partition_index, entry.error_code, entry.low_watermark

        return await self._per_leader(list(offsets), build, read, "DeleteRecords", "DELETE", highest=2)

    async def _per_leader(
        self,
        partitions: Sequence[TopicPartition],
        build: Callable[[list[tuple[str, int, Leader]]], Any],
        read: Callable[[Any], Iterable[tuple[str, int, int, int]]],
        name: str,
        operation: str,
        *,
        highest: int,
    ) -> dict[TopicPartition, Outcome]:
        groups: dict[int, list[tuple[str, int, Leader]]] = {}
        results: dict[TopicPartition, Outcome] = {}
        missing = {topic for topic, index in partitions if (topic, index) not in self._leaders}
        if missing:
            await self.refresh(missing)
        for topic, index in partitions:
            try:
                leader = await self.leader(topic, index)
            except (BrokerError, AuthorizationError) as error:
                results[topic, index] = Outcome(error=error)
                continue
            groups.setdefault(leader.node_id, []).append((topic, index, leader))

        async def ask(node_id: int, entries: list[tuple[str, int, Leader]]) -> None:
            connection = await self.connection(node_id)
            request = build(entries)
            version = connection.version(request.API_KEY, highest)
            answer = await connection.call(request, version=version, deadline_s=_CALL_DEADLINE_S)
            for topic, index, error_code, offset in read(answer):
                error = None
                if error_code:
                    doing = f"{name} of {topic}/{index} at the {self.role} cluster"
                    error = self.refusal(error_code, doing, Right(operation, "topic"), topic)
                    if error_code in codes.STALE_METADATA:
                        self.forget(topic, index)
                results[topic, index] = Outcome(offset, error)

        await asyncio.gather(*(ask(node_id, entries) for node_id, entries in groups.items()))
        return results

    async def producers(self, topic: str, partition: int) -> list[ProducerState]:
        """Producers a partition's leader remembers (DescribeProducers); needs READ on the topic."""
        leader = await self.leader(topic, partition)
        connection = await self.connection(leader.node_id)
        kind = DescribeProducersRequest
        request = kind(topics=[kind.TopicRequest(name=topic, partition_indexes=[partition])])
        answer = await connection.call(request, deadline_s=_CALL_DEADLINE_S)
        entry = answer.topics[0].partitions[0]
        if entry.error_code:
            if entry.error_code in codes.STALE_METADATA:
                self.forget(topic, partition)
            doing = f"DescribeProducers of {topic}/{partition} at the {self.role} cluster"
            raise self.refusal(entry.error_code, doing, Right("READ", "topic"), topic)
        return [
            ProducerState(
                state.producer_id,
                state.producer_epoch,
                state.last_sequence,
                state.current_txn_start_offset,
                state.coordinator_epoch,
            )
            for state in entry.active_producers
        ]


def _by_topic(entries: list[tuple[str, int, Leader]]) -> list[tuple[str, list[tuple[int, Leader]]]]:
    grouped: dict[str, list[tuple[int, Leader]]] = {}
    for topic, index, leader in entries:
        grouped.setdefault(topic, []).append((index, leader))
    return list(grouped.items())


async def retrying(
    attempt: Callable[[], Awaitable[T]], *, deadline_s: float, initial_s: float = 0.02, cap_s: float = 1.0
) -> T:
    """Repeat a call while its error is retriable, with full-jitter back-off, for at most `deadline_s` seconds.

    Raises:
        KmirrorError: the last error, when it is not retriable or the time is up.
    """
    end = time.monotonic() + deadline_s
    ceiling = initial_s
    while True:
        try:
            return await attempt()
        except AuthorizationError:
            raise  # whoever called tries again when somebody had time to grant it
        except KmirrorError as error:
            left = end - time.monotonic()
            if not error.retriable or left <= 0:
                raise
            if isinstance(error, DeadlineError) and left < 1:
                raise
        await asyncio.sleep(min(random.uniform(0, ceiling), max(left, 0)))  # noqa: S311 - jitter, no secret
        ceiling = min(ceiling * 2, cap_s)
