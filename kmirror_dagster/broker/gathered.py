"""Reads of single partitions that travel together: what is asked while a request is on its way goes with the next one.

Whoever looks at one partition writes down what it needs of that one, and thousands of them that look at once cost a few
requests to each broker. Nothing is answered from before it was asked for.
"""

import asyncio
from collections.abc import Awaitable, Callable, Hashable, Mapping, Sequence
from typing import Any, Generic, TypeAlias, TypeVar

from kafka.protocol.admin.transactions import DescribeProducersRequest

from kmirror_dagster.broker import codes
from kmirror_dagster.broker.fetch import FetchedPartition
from kmirror_dagster.broker.missing_rights import Right
from kmirror_dagster.broker.reads import BatchLook, batch_at, fetch_many, look_at
from kmirror_dagster.broker.wire import Leader, Outcome, ProducerState, TopicPartition, WireCluster
from kmirror_dagster.errors import ConnectionLostError, KmirrorError
from kmirror_dagster.settings import ClusterSettings

Key = TypeVar("Key", bound=Hashable)
Value = TypeVar("Value")
Answers: TypeAlias = Mapping[Key, Value | KmirrorError]

# of one request: decoding an answer of this length holds the loop for some tens of milliseconds
_MOST_OFFSETS = 1_000
_MOST_PRODUCERS = 500
# batches that are longer are read one by one; together below what a broker answers at most (fetch.max.bytes, 55 MiB)
_LOOK_BYTES = 32 * 1024
_MOST_LOOKS = 256


class _Lane(Generic[Key, Value]):
    """Questions of one kind to one broker; one request at a time.

    Args:
        ask: answers many keys; an error it raises is the outcome of all of them.
        most: keys of one request.
    """

    def __init__(self, ask: Callable[[list[Key]], Awaitable[Answers[Key, Value]]], most: int) -> None:
        self._ask = ask
        self._most = most
        self._waiting: dict[Key, asyncio.Future[Value]] = {}
        self._task: asyncio.Task[None] | None = None

    async def get(self, key: Key) -> Value:
        """The answer to one question, asked for not before now."""
        future = self._waiting.get(key)
        if future is None:
            future = self._waiting[key] = asyncio.get_running_loop().create_future()
            if self._task is None:
                self._task = asyncio.create_task(self._run())
        # shared: that one of the callers is cancelled is not the others' business
        return await asyncio.shield(future)

    async def close(self) -> None:
        """Whoever waits is told that the client is closed."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _run(self) -> None:
        taken: dict[Key, asyncio.Future[Value]] = {}
        try:
            while self._waiting:
                taken = {key: self._waiting[key] for key in list(self._waiting)[: self._most]}
                for key in taken:
                    del self._waiting[key]
                try:
                    _settle(taken, await self._ask(list(taken)))
                except Exception as error:  # noqa: BLE001 - whatever it is, it is the callers' to handle
                    _fail(taken, error)
        except asyncio.CancelledError:
            _fail(taken | self._waiting, ConnectionLostError("cluster client is closed"))
            self._waiting.clear()
            raise
        finally:
            self._task = None


def _settle(taken: "Mapping[Key, asyncio.Future[Value]]", answers: "Answers[Key, Value]") -> None:
    unanswered = KmirrorError("the broker's answer leaves out what was asked for")
    for key, future in taken.items():
        answer = answers.get(key, unanswered)
        if isinstance(answer, KmirrorError):
            _fail({key: future}, answer)
        elif not future.done():
            future.set_result(answer)


def _fail(taken: "Mapping[Any, asyncio.Future[Any]]", error: Exception) -> None:
    for future in taken.values():
        if not future.done():
            future.set_exception(error)
            future.exception()  # nobody may be waiting any more: that is no error of the loop


class GatheringCluster(WireCluster):
    """A cluster of which many partitions are looked at one by one, at the same time.

    One request of each kind is on its way to each broker; a broker that does not answer holds up the others' answers
    as little as it does with requests of their own.
    """

    def __init__(self, settings: ClusterSettings, *, role: str) -> None:
        super().__init__(settings, role=role)
        self._lanes: dict[tuple[object, int], _Lane[Any, Any]] = {}

    async def offset_of(self, tp: TopicPartition, which: int) -> int:
        """Offset of one partition, as `list_offsets`.

        Raises:
            KmirrorError: BrokerError when it is of the partition, others when the broker did not answer.
        """

        async def ask(partitions: list[TopicPartition]) -> Mapping[TopicPartition, Outcome]:
            return await self.list_offsets(partitions, which)

        return (await self._get(("offset", which), tp, tp, ask, _MOST_OFFSETS)).value()

    async def log_end_of(self, tp: TopicPartition) -> int:
        """Log end of one partition, as `log_ends`.

        Raises:
            KmirrorError: as `offset_of`.
        """
        return (await self._get("log end", tp, tp, self.log_ends, _MOST_OFFSETS)).value()

    async def producers_of(self, tp: TopicPartition) -> list[ProducerState]:
        """Producers that one partition's leader remembers, as `producers`.

        Raises:
            KmirrorError: as `offset_of`.
        """
        leader = await self.leader(*tp)

        async def ask(
            partitions: list[TopicPartition],
        ) -> Mapping[TopicPartition, list[ProducerState] | KmirrorError]:
            return await self._describe_producers(leader.node_id, partitions)

        return await self._get("producers", tp, tp, ask, _MOST_PRODUCERS)

    async def batch_at(self, tp: TopicPartition, offset: int) -> BatchLook | None:
        """The batch at an offset of one partition, as `look_at`.

        Raises:
            KmirrorError: as `offset_of`.
        """
        leader = await self.leader(*tp)

        async def ask(
            positions: list[tuple[TopicPartition, int]],
        ) -> Mapping[tuple[TopicPartition, int], FetchedPartition | KmirrorError]:
            return await self._fetch(leader.node_id, positions)

        fetched = await self._get("batch", tp, (tp, offset), ask, _MOST_LOOKS)
        found = batch_at(fetched.records, offset, self.role)
        if found is None and fetched.high_watermark > offset:
            # longer than what was asked for
            return await look_at(self, *tp, offset)
        return found

    async def close(self) -> None:
        """Close everything; what is under way ends with ConnectionLostError."""
        await super().close()
        await asyncio.gather(*(lane.close() for lane in self._lanes.values()))

    async def _get(
        self,
        kind: object,
        tp: TopicPartition,
        key: Key,
        ask: "Callable[[list[Key]], Awaitable[Answers[Key, Value]]]",
        most: int,
    ) -> Value:
        """Ask the broker that leads a partition, together with what else it is asked."""
        leader = await self.leader(*tp)
        name = (kind, leader.node_id)
        lane: _Lane[Key, Value] | None = self._lanes.get(name)
        if lane is None:
            lane = self._lanes[name] = _Lane(ask, most)
        return await lane.get(key)

    async def _describe_producers(
        self, node_id: int, partitions: Sequence[TopicPartition]
    ) -> dict[TopicPartition, list[ProducerState] | KmirrorError]:
        by_topic: dict[str, list[int]] = {}
        for topic, partition in partitions:
            by_topic.setdefault(topic, []).append(partition)
        kind = DescribeProducersRequest
        asked = [kind.TopicRequest(name=topic, partition_indexes=found) for topic, found in by_topic.items()]
        connection = await self.connection(node_id)
        answer = await connection.call(kind(topics=asked))
        found: dict[TopicPartition, list[ProducerState] | KmirrorError] = {}
        for topic in answer.topics:
            for entry in topic.partitions:
                tp = (topic.name, entry.partition_index)
                if entry.error_code:
                    found[tp] = self._refused(entry.error_code, tp, "DescribeProducers of")
                    continue
                found[tp] = [
                    ProducerState(
                        state.producer_id,
                        state.producer_epoch,
                        state.last_sequence,
                        state.current_txn_start_offset,
                        state.coordinator_epoch,
                    )
                    for state in entry.active_producers
                ]
        return found

    def _refused(self, code: int, tp: TopicPartition, doing: str) -> KmirrorError:
        if code in codes.STALE_METADATA:
            self.forget(*tp)
        return self.refusal(
            code, f"{doing} {tp[0]}/{tp[1]} at the {self.role} cluster", Right("READ", "topic"), tp[0]
        )

    async def _fetch(
        self, node_id: int, positions: Sequence[tuple[TopicPartition, int]]
    ) -> dict[tuple[TopicPartition, int], FetchedPartition | KmirrorError]:
        found: dict[tuple[TopicPartition, int], FetchedPartition | KmirrorError] = {}
        targets: dict[TopicPartition, tuple[Leader, int]] = {}
        for tp, offset in positions:
            leader = self.known_leader(*tp)
            if leader is None or leader.node_id != node_id:
                found[tp, offset] = self._refused(codes.NOT_LEADER_OR_FOLLOWER, tp, "reading")
            elif tp in targets:  # one offset of a partition in a request, another one by itself
                found |= await self._fetch(node_id, [(tp, offset)])
            else:
                targets[tp] = (leader, offset)
        if not targets:
            return found
        for fetched in await fetch_many(self, targets, partition_bytes=_LOOK_BYTES):
            tp = (fetched.topic, fetched.partition)
            offset = targets[tp][1]
            found[tp, offset] = fetched
            if fetched.error_code:
                found[tp, offset] = self._refused(fetched.error_code, tp, f"reading offset {offset} of")
        return found
