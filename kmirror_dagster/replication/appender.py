"""Writes to one destination broker for all partitions of a mirror that it leads.

Produce v3 and later takes exactly one batch per partition and request, and the broker remembers the last five
batches per producer: so requests gather the heads of many partitions, and at most five are in flight.
"""

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass

from kmirror_dagster.broker import codes, produce
from kmirror_dagster.broker.connection import Connection, Frame
from kmirror_dagster.broker.missing_rights import Right
from kmirror_dagster.broker.produce import Append as ProduceAppend
from kmirror_dagster.broker.produce import Appended
from kmirror_dagster.broker.tasks import cancel_and_wait
from kmirror_dagster.broker.wire import WireCluster
from kmirror_dagster.errors import ConnectionLostError, ForeignWriteError, KmirrorError, ReplicationError
from kmirror_dagster.replication.copier import Copier, Lease, Phase
from kmirror_dagster.replication.plan import Append
from kmirror_dagster.replication.rhythm import ENOUGH_BYTES, SMALL_BYTES, Rhythm

log = logging.getLogger(__name__)

MAX_IN_FLIGHT = 5
_REQUEST_BYTES = 4 * 1024 * 1024
_TIMEOUT_MS = 30_000
TOO_LARGE = frozenset({codes.MESSAGE_TOO_LARGE, codes.RECORD_LIST_TOO_LARGE})
_UNANSWERED_S = _TIMEOUT_MS / 1000 + 10

# The batch was not appended and never will be as it is; everything else is doubtful and read again.
_REFUSALS: dict[int, str] = {
    codes.MESSAGE_TOO_LARGE: "larger than the destination allows; raise max.message.bytes there",
    codes.RECORD_LIST_TOO_LARGE: "larger than a segment of the destination; raise segment.bytes there",
    codes.CORRUPT_MESSAGE: "damaged at the source: its CRC-32C does not match",
    codes.INVALID_RECORD: "refused as invalid",
    codes.POLICY_VIOLATION: "refused by a policy of the destination",
}
_DENIALS: dict[int, Right] = {
    codes.TOPIC_AUTHORIZATION_FAILED: Right("WRITE", "topic"),
    codes.TRANSACTIONAL_ID_AUTHORIZATION_FAILED: Right("WRITE", "transactional-id"),
    codes.CLUSTER_AUTHORIZATION_FAILED: Right("IDEMPOTENT_WRITE", "cluster"),
}


@dataclass(slots=True)
class _Sent:
    copier: Copier
    step: Append
    lease: Lease
    generation: int


class DestinationAppender:
    """Append loop against one destination broker.

    Args:
        cluster: the destination.
        node_id: the broker.
        on_progress: called with a copier whose batch was acknowledged, or that needs work at a barrier.
        on_doubt: called with a copier whose outcome at the destination is unknown: it must be read again.
        on_refusal: called with a copier whose batch was not appended and never will be, the reason and Kafka's code.
        may_send: asked before each request; False while this node is not sure of its leadership.
        rhythm: of the requests to this broker.
    """

    def __init__(
        self,
        cluster: WireCluster,
        node_id: int,
        *,
        on_progress: Callable[[Copier], None],
        on_doubt: Callable[[Copier, str], None],
        on_refusal: Callable[[Copier, ReplicationError, int], None],
        may_send: Callable[[], bool],
        rhythm: Rhythm,
    ) -> None:
        self.node_id = node_id
        self._cluster = cluster
        self._on_progress = on_progress
        self._on_doubt = on_doubt
        self._on_refusal = on_refusal
        self._may_send = may_send
        self._rhythm = rhythm
        rhythm.listen(self._answer_came)
        self._ready: dict[Copier, None] = {}
        self._requests = 0
        self._connection: Connection | None = None
        self._loop = asyncio.get_running_loop()
        self._scheduled: asyncio.Handle | None = None
        self._connecting: asyncio.Task[None] | None = None
        self._closed = False

    def ready(self, copier: Copier) -> None:
        """Note that a copier has a batch at its head."""
        self._ready[copier] = None
        self._rhythm.data_waits = True
        self._schedule()

    def remove(self, copier: Copier) -> None:
        """Forget a copier; what it has in flight is still answered to it."""
        self._ready.pop(copier, None)

    async def close(self) -> None:
        """Send nothing more; requests in flight end in doubt."""
        self._closed = True
        if self._scheduled is not None:
            self._scheduled.cancel()
        if self._connecting is not None:
            await cancel_and_wait([self._connecting])
        if self._connection is not None:
            self._connection.close()

    def _schedule(self, after_s: float = 0.0) -> None:
        """Send when the callbacks of this moment have run: what they make ready goes out together."""
        if self._scheduled is not None or self._closed or self._requests >= MAX_IN_FLIGHT:
            return
        if after_s > 0:
            self._scheduled = self._loop.call_later(after_s, self._pump)
        else:
            self._scheduled = self._loop.call_soon(self._pump)

    def _answer_came(self) -> None:
        """Some answer came, to a request of either kind: the moment that what is held waits for."""
        if self._ready:
            if self._scheduled is not None:
                self._scheduled.cancel()
                self._scheduled = None
            self._schedule()

    def _pump(self) -> None:
        self._scheduled = None
        try:
            self._drain()
            self._rhythm.data_waits = bool(self._ready)
        except Exception as error:
            # a bug must end in FAILED partitions with its name, not in ones that hang
            log.exception("appender of destination broker %d", self.node_id)
            copiers = list(self._ready)
            self._ready.clear()
            for copier in copiers:
                copier.on_failure(ReplicationError(f"{copier.name}: {type(error).__name__}: {error}"))

    async def _connect(self) -> None:
        try:
            self._connection = await self._cluster.connection(self.node_id, "produce")
        except KmirrorError as error:
            self._doubt_ready(str(error))
        finally:
            self._connecting = None
        self._schedule()

    def _doubt_ready(self, reason: str) -> None:
        copiers = list(self._ready)
        self._ready.clear()
        for copier in copiers:
            self._on_doubt(copier, reason)

    def _drain(self) -> None:
        begun = False
        while self._ready and self._requests < MAX_IN_FLIGHT and not self._closed:
            if self._connection is None or not self._connection.alive:
                # what is on its way over a connection whose session ends comes first
                if self._connecting is None and not self._requests:
                    self._connecting = self._loop.create_task(self._connect())
                return
            wait = 0.0 if begun else self._hold_s()
            if wait > 0:
                self._schedule(wait)
                return
            begun = True  # once it goes, batches behind each other go too: their order needs no answer
            if not self._may_send():
                self._doubt_ready("this node is not sure of its leadership")
                return
            batch, transactional_id = self._gather()
            if not batch:
                continue
            try:
                self._send(self._connection, batch, transactional_id)
            except Exception as error:
                # a bug, or memory running out: nothing of this request was sent
                log.exception("appender of destination broker %d", self.node_id)
                for sent in batch:
                    sent.lease.drop()
                    sent.copier.in_flight -= 1
                    reason = f"{sent.copier.name}: cannot send offset {sent.step.start}: {error!r}"
                    sent.copier.on_failure(ReplicationError(reason))

    def _hold_s(self) -> float:
        """Seconds to wait for more partitions, because little is ready and a request is out."""
        hold = self._rhythm.hold_s()
        if hold <= 0:
            return 0.0
        size = 0
        for copier in self._ready:
            head = copier.head
            size += head.size if isinstance(head, Append) else 0
            # a partition that has batches in flight wants to stay ahead of their answers, unless it is all very little
            if size >= (SMALL_BYTES if copier.in_flight else ENOUGH_BYTES):
                return 0.0
        return hold

    def _gather(self) -> tuple[list[_Sent], str | None]:
        """Heads of ready partitions for one request; one of an aborted run goes alone, with its transaction."""
        batch: list[_Sent] = []
        size = 0
        again: list[Copier] = []
        transactional_id: str | None = None
        for copier in list(self._ready):
            if not copier.can_append:
                del self._ready[copier]
                self._on_progress(copier)  # a marker or a hole may be next
                continue
            step = copier.head
            if not isinstance(step, Append):
                continue
            if step.aborted and batch:
                continue  # next round
            del self._ready[copier]
            entry = copier.pop()
            batch.append(_Sent(copier, step, entry.lease, copier.generation))
            copier.in_flight += 1
            copier.aborted_in_flight = step.aborted
            copier.sent = step.end
            size += step.size
            if copier.can_append:
                again.append(copier)
            if step.aborted:
                transactional_id = copier.transaction.transactional_id if copier.transaction else None
                break
            if size >= _REQUEST_BYTES:
                break
        for copier in again:  # behind the others, so that no partition is starved
            self._ready[copier] = None
        return batch, transactional_id

    def _send(self, connection: Connection, batch: list[_Sent], transactional_id: str | None) -> None:
        correlation_id = connection.next_id()
        buffers = produce.request(
            [
                ProduceAppend(sent.copier.topic, sent.copier.partition, sent.copier.stamp(sent.step))
                for sent in batch
            ],
            correlation_id=correlation_id,
            client_id=self._cluster.settings.client_id,
            timeout_ms=_TIMEOUT_MS,
            transactional_id=transactional_id,
        )
        self._requests += 1
        self._rhythm.sent()
        future = connection.send(correlation_id, buffers)
        timer = asyncio.get_running_loop().call_later(_UNANSWERED_S, connection.close)
        future.add_done_callback(lambda done: self._answered(done, batch, timer))

    def _answered(
        self, future: "asyncio.Future[Frame]", batch: list[_Sent], timer: asyncio.TimerHandle
    ) -> None:
        timer.cancel()
        self._requests -= 1
        answers: dict[tuple[str, int], Appended] = {}
        reason = "the request was cancelled"
        if not future.cancelled():
            error = future.exception()
            if error is None:
                answers = {(a.topic, a.partition): a for a in produce.answer(future.result().view)}
                reason = "the broker left it out of its answer"
            else:
                reason = str(error)
                if not isinstance(error, ConnectionLostError):
                    log.error("produce to destination broker %d: %r", self.node_id, error)
        now = time.monotonic()
        for sent in batch:
            self._settle(sent, answers.get(sent.copier.key), reason, now)
        self._rhythm.answered()

    def _settle(self, sent: _Sent, answer: Appended | None, reason: str, now: float) -> None:
        copier, step = sent.copier, sent.step
        sent.lease.drop()
        copier.in_flight -= 1
        if copier.generation == sent.generation and copier.phase in (Phase.RUNNING, Phase.STOPPED):
            if answer is not None and answer.error_code == codes.NONE:
                self._accept(copier, step, answer, now)
            elif copier.phase is Phase.STOPPED:
                copier.doubtful = True
            elif answer is not None and answer.error_code in TOO_LARGE and step.count > 1:
                copier.make_smaller(step)
                self._on_doubt(copier, f"a batch of {step.size} bytes is too large for the topic")
                return
            elif answer is not None and answer.error_code in _REFUSALS:
                self._on_refusal(copier, _refusal(copier, step, answer), answer.error_code)
            elif answer is not None and answer.error_code in _DENIALS:
                self._on_refusal(copier, self._denial(copier, answer.error_code), answer.error_code)
            else:
                code = reason if answer is None else codes.error_name(answer.error_code)
                if answer is not None and answer.error_code in codes.STALE_METADATA:
                    self._cluster.forget(copier.topic, copier.partition)
                self._on_doubt(copier, code)
                return
        self._on_progress(copier)

    def _denial(self, copier: Copier, code: int) -> ReplicationError:
        right, name = _DENIALS[code], copier.topic
        if code == codes.TRANSACTIONAL_ID_AUTHORIZATION_FAILED and copier.transaction is not None:
            name = copier.transaction.transactional_id
        refused = self._cluster.refusal(code, "appending", right, name)
        return ReplicationError(f"{copier.name}: {refused}")

    def _accept(self, copier: Copier, step: Append, answer: Appended, now: float) -> None:
        if answer.base_offset != step.start:
            copier.on_failure(
                ForeignWriteError(
                    f"{copier.name}: the destination put the record of offset {step.start} at {answer.base_offset}: "
                    "somebody else writes to this topic; stop the other writer, delete the topic at the "
                    "destination and run recover"
                )
            )
            return
        copier.acked, copier.acked_epoch = step.end, step.leader_epoch
        copier.futile = 0
        copier.unproven = False
        sequence = copier.aborting if step.aborted else copier.plain
        if sequence is not None:
            sequence.known = True
        copier.meter.appended(now, step.count, step.size)


def _refusal(copier: Copier, step: Append, answer: Appended) -> ReplicationError:
    detail = f" ({answer.message})" if answer.message else ""
    return ReplicationError(
        f"{copier.name}: the batch at offset {step.start} ({step.count} records, {step.size} bytes) is "
        f"{_REFUSALS[answer.error_code]}{detail}"
    )
