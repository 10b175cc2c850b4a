"""Fenced appends to the state topic.

A transactional id per coordinator partition hands out a producer id whose epoch grows with every new leader.
Appends carry both, outside of transactions: once a newer epoch has appended, the broker refuses the older one
(INVALID_PRODUCER_EPOCH), and sequence numbers keep a repeated append from landing twice (KIP-98).
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from time import time

from kmirror_dagster.broker import batches, codes, produce
from kmirror_dagster.broker.missing_rights import Right
from kmirror_dagster.broker.transactions import TransactionalProducer
from kmirror_dagster.broker.wire import WireCluster, retrying
from kmirror_dagster.errors import ConnectionLostError, DeadlineError, FencedError, NotLeaderError
from kmirror_dagster.settings import ClusterSettings

_APPEND_TIMEOUT_MS = 10_000


@dataclass
class _Lane:
    producer: TransactionalProducer
    lock: asyncio.Lock
    sequence: int = 0


class StateLog:
    """Appends to one compacted topic, one fenced writer per partition.

    Args:
        settings: the destination cluster.
        topic: the state topic.
        transactional_prefix: what the transactional ids begin with; nodes of one group share it.
    """

    def __init__(self, settings: ClusterSettings, topic: str, *, transactional_prefix: str) -> None:
        self._cluster = WireCluster(settings, role="destination")
        self._topic = topic
        self._prefix = transactional_prefix
        self._lanes: dict[int, _Lane] = {}

    async def acquire(self, partition: int, *, deadline_s: float = 30.0) -> int:
        """Become the writer of a partition; the former one is refused as soon as something is appended.

        Returns:
            The producer epoch. It grows with every acquisition, but wraps to another producer id after 32,766.

        Raises:
            KmirrorError: the coordinator could not be reached in time.
        """
        producer = TransactionalProducer(self._cluster, f"{self._prefix}-state-{partition}")
        await producer.start(deadline_s=deadline_s, timeout_ms=60_000)
        self._lanes[partition] = _Lane(producer, asyncio.Lock())
        return producer.producer_epoch

    async def append(
        self, partition: int, records: Sequence[tuple[bytes, bytes | None]], *, deadline_s: float = 15.0
    ) -> int:
        """Append records as one batch, all or none.

        Args:
            partition: an acquired partition.
            records: keys and values; a None value deletes the key.
            deadline_s: seconds to go on trying.

        Returns:
            Offset of the first record.

        Raises:
            NotLeaderError: the partition is not acquired.
            FencedError: another node acquired it.
            KmirrorError: not appended, or not known to be, when the deadline passed.
        """
        lane = self._lanes.get(partition)
        if lane is None:
            raise NotLeaderError(f"coordinator partition {partition} is not led by this node")
        now = int(time() * 1000)
        raw = [
            batches.RawRecord(index, now, batches.encode_payload(key, value))
            for index, (key, value) in enumerate(records)
        ]
        async with lane.lock:
            batch = batches.encode_batch(
                raw,
                producer_id=lane.producer.producer_id,
                producer_epoch=lane.producer.producer_epoch,
                base_sequence=lane.sequence,
            )
            # the same bytes again after a doubtful answer: the broker knows the sequence and appends once
            offset = await retrying(lambda: self._send(partition, batch), deadline_s=deadline_s)
            lane.sequence = batches.next_sequence(lane.sequence, len(raw))
            return offset

    async def _send(self, partition: int, batch: bytes) -> int:
        leader = await self._cluster.leader(self._topic, partition)
        connection = await self._cluster.connection(leader.node_id, "produce")
        correlation_id = connection.next_id()
        buffers = produce.request(
            [produce.Append(self._topic, partition, batch)],
            correlation_id=correlation_id,
            client_id=self._cluster.settings.client_id or "kmirror",
            timeout_ms=_APPEND_TIMEOUT_MS,
        )
        future = connection.send(correlation_id, buffers)
        try:
            frame = await asyncio.wait_for(asyncio.shield(future), _APPEND_TIMEOUT_MS / 1000 + 5)
        except asyncio.TimeoutError:
            connection.close()
            raise DeadlineError(f"append to {self._topic}/{partition} unanswered") from None
        except ConnectionLostError:
            self._cluster.forget(self._topic, partition)
            raise
        answer = produce.answer(frame.view)[0]
        if answer.error_code in codes.FENCED:
            raise FencedError(f"coordinator partition {partition} was taken over by another node")
        if answer.error_code:
            if answer.error_code in codes.STALE_METADATA:
                self._cluster.forget(self._topic, partition)
            doing = f"appending to {self._topic}/{partition}"
            raise self._cluster.refusal(answer.error_code, doing, Right("WRITE", "topic"), self._topic)
        return answer.base_offset

    async def release(self, partition: int) -> None:
        """Stop writing to a partition; waits for an append under way. Harmless when not acquired."""
        lane = self._lanes.pop(partition, None)
        if lane is not None:
            async with lane.lock:
                return

    async def close(self) -> None:
        """Close all connections."""
        self._lanes.clear()
        await self._cluster.close()
