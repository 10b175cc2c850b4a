"""Transactions over the wire (KIP-98), version 1 semantics: epoch bumps happen only at InitProducerId.

Version 2 (KIP-890) bumps the epoch at every EndTxn; version 1 keeps it, which lets a new owner finish a
transaction it inherits under the epoch the partition already knows.
"""

import asyncio
import random
import time
from collections.abc import Callable, Sequence
from typing import Any

from kafka.protocol.admin.transactions import DescribeTransactionsRequest
from kafka.protocol.producer.transaction import (
    AddPartitionsToTxnRequest,
    EndTxnRequest,
    InitProducerIdRequest,
)

from kmirror_dagster.broker import codes
from kmirror_dagster.broker.codes import broker_error
from kmirror_dagster.broker.missing_rights import Right
from kmirror_dagster.broker.wire import TopicPartition, WireCluster
from kmirror_dagster.errors import AuthorizationError, FencedError, KmirrorError

_COORDINATOR_MOVED = frozenset(
    {codes.COORDINATOR_LOAD_IN_PROGRESS, codes.COORDINATOR_NOT_AVAILABLE, codes.NOT_COORDINATOR}
)
_LONGEST_TIMEOUT_MS = 900_000  # default of the broker's transaction.max.timeout.ms
_INVALID_TRANSACTION_TIMEOUT = 50
_ONGOING = "Ongoing"
SHARED_EPOCH = 0


def _refused_topic(answer: Any) -> str:
    """The topic that an answer to AddPartitionsToTxn says may not be written; "" when none."""
    for topic in answer.results_by_topic_v3_and_below:
        for entry in topic.results_by_partition:
            if entry.partition_error_code == codes.TOPIC_AUTHORIZATION_FAILED:
                return str(topic.name)
    return ""


async def shared_producer_id(cluster: WireCluster, transactional_id: str) -> int:
    """Producer id that everybody gets who asks with the same transactional id, to be used with SHARED_EPOCH.

    For appends outside of transactions: writers that know nothing of each other are kept in order by the sequence
    numbers of one producer. Kafka forgets the id when it was not asked for during a week
    (transactional.id.expiration.ms).
    """
    producer = TransactionalProducer(cluster, transactional_id)
    state = await producer.describe()
    if state is not None:
        return int(state.producer_id)
    await producer.start(timeout_ms=60_000)
    return producer.producer_id


class TransactionalProducer:
    """One transactional id: fences its former user when it starts, then begins and aborts transactions.

    Only aborts are ever needed: transaction markers of the mirror hide nothing and commit nothing.
    """

    def __init__(self, cluster: WireCluster, transactional_id: str) -> None:
        self.transactional_id = transactional_id
        self.producer_id = -1
        self.producer_epoch = -1
        self._cluster = cluster

    @property
    def ready(self) -> bool:
        """Whether `start` or `inherit` gave this producer an identity."""
        return self.producer_id >= 0

    async def start(self, *, deadline_s: float = 30.0, timeout_ms: int = _LONGEST_TIMEOUT_MS) -> None:
        """InitProducerId: bump the epoch, so that the former user is refused from now on.

        A transaction it left open is aborted, and its markers are written before this returns. With an identity
        already, only that one is bumped (KIP-360): FencedError when somebody else bumped it before.
        """

        async def attempt(timeout: int) -> Any:
            return await self._ask(
                lambda: InitProducerIdRequest(
                    transactional_id=self.transactional_id,
                    transaction_timeout_ms=timeout,
                    producer_id=self.producer_id,
                    producer_epoch=self.producer_epoch,
                ),
                deadline_s,
                highest=4,
            )

        answer = await attempt(timeout_ms)
        if answer.error_code == _INVALID_TRANSACTION_TIMEOUT:
            answer = await attempt(60_000)
        self._check(answer.error_code, "starting")
        self.producer_id, self.producer_epoch = answer.producer_id, answer.producer_epoch

    async def adopt(self, partition: TopicPartition, *, deadline_s: float = 30.0) -> bool | None:
        """Take the identity as the former user left it.

        Starting instead would abort a transaction that is open, whose marker would take an offset of the
        partition. Needs DESCRIBE on the transactional id (DescribeTransactions, KIP-664).

        Returns:
            Whether a transaction with the partition is open; None when there was no former user.
        """
        state = await self.describe(deadline_s=deadline_s)
        if state is None:
            return None
        self.inherit(state.producer_id, state.producer_epoch)
        held = {(entry.topic, index) for entry in state.topics for index in entry.partitions}
        return state.transaction_state == _ONGOING and partition in held

    async def describe(self, *, deadline_s: float = 30.0) -> Any:
        """What the coordinator knows of the id (DescribeTransactions); None when nothing."""
        answer = await self._ask(
            lambda: DescribeTransactionsRequest(transactional_ids=[self.transactional_id]),
            deadline_s,
            highest=0,
            code_of=lambda answer: answer.transaction_states[0].error_code,
        )
        state = answer.transaction_states[0]
        if state.error_code == codes.TRANSACTIONAL_ID_NOT_FOUND:
            return None
        self._check(state.error_code, "describing")
        return state

    def inherit(self, producer_id: int, producer_epoch: int) -> None:
        """Go on under an identity the former user left with an open transaction."""
        self.producer_id, self.producer_epoch = producer_id, producer_epoch

    async def add_partitions(self, partitions: Sequence[TopicPartition], *, deadline_s: float = 30.0) -> None:
        """AddPartitionsToTxn; waits while the transaction before is still being completed."""
        grouped: dict[str, list[int]] = {}
        for topic, partition in partitions:
            grouped.setdefault(topic, []).append(partition)
        kind = AddPartitionsToTxnRequest

        def build() -> Any:
            return kind(
                v3_and_below_transactional_id=self.transactional_id,
                v3_and_below_producer_id=self.producer_id,
                v3_and_below_producer_epoch=self.producer_epoch,
                v3_and_below_topics=[
                    kind.AddPartitionsToTxnTopic(name=topic, partitions=indexes)
                    for topic, indexes in grouped.items()
                ],
            )

        def code_of(answer: Any) -> int:
            found = [
                entry.partition_error_code
                for topic in answer.results_by_topic_v3_and_below
                for entry in topic.results_by_partition
                if entry.partition_error_code
            ]
            # one failing partition fails the others with OPERATION_NOT_ATTEMPTED (55): name the real cause
            return next((code for code in found if code != 55), found[0] if found else 0)

        answer = await self._ask(build, deadline_s, highest=3, code_of=code_of)
        self._check(code_of(answer), f"adding {len(partitions)} partitions to", topic=_refused_topic(answer))

    async def abort(self, *, deadline_s: float = 30.0) -> None:
        """EndTxn(abort): the coordinator writes one marker into each partition; repeating it is harmless."""
        answer = await self._ask(
            lambda: EndTxnRequest(
                transactional_id=self.transactional_id,
                producer_id=self.producer_id,
                producer_epoch=self.producer_epoch,
                committed=False,
            ),
            deadline_s,
            highest=4,
        )
        self._check(answer.error_code, "ending")

    async def _ask(
        self,
        build: Callable[[], Any],
        deadline_s: float,
        *,
        highest: int,
        code_of: Callable[[Any], int] = lambda answer: answer.error_code,
    ) -> Any:
        end = time.monotonic() + deadline_s
        ceiling = 0.004
        while True:
            answer: Any = None
            try:
                connection = await self._cluster.coordinator(self.transactional_id)
                request = build()
                answer = await connection.call(
                    request, version=connection.version(request.API_KEY, highest), deadline_s=deadline_s
                )
                code = code_of(answer)
            except AuthorizationError:
                raise
            except KmirrorError as error:
                # also while the coordinator cannot be looked up: at an id's first use on a new cluster the
                # brokers create the topic it is kept in
                self._cluster.forget_coordinator(self.transactional_id)
                if not error.retriable or time.monotonic() > end:
                    raise
                code = codes.COORDINATOR_NOT_AVAILABLE
            if code in _COORDINATOR_MOVED:
                self._cluster.forget_coordinator(self.transactional_id)
            elif code != codes.CONCURRENT_TRANSACTIONS and code not in codes.STALE_METADATA:
                return answer
            if time.monotonic() > end:
                raise broker_error(code, f"transaction {self.transactional_id}, for {deadline_s:g} s")
            await asyncio.sleep(random.uniform(ceiling / 4, ceiling))  # noqa: S311 - jitter, no secret
            ceiling = min(ceiling * 2, 0.5)

    def _check(self, code: int, doing: str, *, topic: str = "") -> None:
        if code in codes.FENCED:
            raise FencedError(
                f"{self.transactional_id} was taken over by another node while {doing} a transaction"
            )
        if code:
            right, name = Right("WRITE", "transactional-id"), self.transactional_id
            if code == codes.TOPIC_AUTHORIZATION_FAILED:
                right, name = Right("WRITE", "topic"), topic
            elif doing == "describing":
                right = Right("DESCRIBE", "transactional-id")
            raise self._cluster.refusal(code, f"{doing} transaction {self.transactional_id}", right, name)
