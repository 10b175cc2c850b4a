"""Control records at the destination: they stand for transaction markers and holes of the source.

Two ways, the same bytes in the log. WriteTxnMarkers writes thousands per request, and needs CLUSTER_ACTION or ALTER
on the cluster; without that right an empty transaction (AddPartitionsToTxn, EndTxn) writes one per partition and
round. Neither touches the last stable offset or the transaction index while nothing is open.
"""

import asyncio
import functools
import logging
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from kmirror_dagster.broker import codes, markers
from kmirror_dagster.broker.codes import broker_error
from kmirror_dagster.broker.connection import Connection, Frame
from kmirror_dagster.broker.markers import Markers
from kmirror_dagster.broker.tasks import cancel_and_wait
from kmirror_dagster.broker.transactions import TransactionalProducer
from kmirror_dagster.broker.wire import LATEST, WireCluster
from kmirror_dagster.errors import DeadlineError, ForeignWriteError, KmirrorError
from kmirror_dagster.replication.copier import Copier, Phase
from kmirror_dagster.replication.rhythm import Rhythm

log = logging.getLogger(__name__)

# WriteTxnMarkers entries of one request; the broker answers when all are appended.
_BULK_ENTRIES = 2_000
_UNANSWERED_S = 30.0
_CONFIRM_S = 15.0
_CHECK_EVERY_S = 0.002
_PROVE_EVERY_S = 1.0


@dataclass(eq=False)
class _Order:
    """Offsets `start` to `end` (exclusive) of one partition that are to be control records."""

    copier: Copier
    start: int
    end: int
    generation: int


@dataclass
class _Lane:
    """Orders for one broker (bulk) or one transactional id; one request or round at a time."""

    waiting: list[_Order] = field(default_factory=list[_Order])
    busy: bool = False
    timer: asyncio.Handle | None = None


class MarkerWriter:
    """Writes control records for all partitions of a mirror on this node; one round serves all that wait.

    A partition waits here with nothing in flight, its log end being the offset of its next control record.

    Args:
        cluster: the destination.
        transactional_prefix: what the transactional ids begin with.
        on_written: called with a copier and the offset up to which its control records are written.
        on_trouble: called with a copier and the reason when its outcome is unknown or it was refused.
        may_send: asked before each request; False while this node is not sure to be the owner.
        rhythm_of: rhythm of the requests to a broker.
    """

    def __init__(
        self,
        cluster: WireCluster,
        transactional_prefix: str,
        *,
        on_written: Callable[[Copier, int], None],
        on_trouble: Callable[[Copier, KmirrorError], None],
        may_send: Callable[[], bool],
        rhythm_of: Callable[[int], Rhythm],
    ) -> None:
        self._cluster = cluster
        self._prefix = transactional_prefix
        self._on_written = on_written
        self._on_trouble = on_trouble
        self._may_send = may_send
        self._producers: dict[int, tuple[int, TransactionalProducer]] = {}
        self._brokers: dict[int, _Lane] = {}
        self._lanes: dict[int, _Lane] = {}
        self._rhythm_of = rhythm_of
        self._bulk = True
        self._connections: dict[int, Connection] = {}
        self._unproven: dict[Copier, None] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._prover = asyncio.get_running_loop().create_task(self._prove(), name="marker-prover")

    def write(self, copier: Copier, start: int, end: int) -> None:
        """Fill offsets `start` to `end` (exclusive) with control records; the outcome comes by callback."""
        self._queue(_Order(copier, start, end, copier.generation))

    async def close(self) -> None:
        """End everything under way."""
        await cancel_and_wait([*self._tasks, self._prover])

    def _queue(self, order: _Order) -> None:
        leader = self._cluster.known_leader(*order.copier.key)
        if self._bulk and leader is not None:
            lane = self._broker_lane(leader.node_id)
            lane.waiting.append(order)
            self._schedule(leader.node_id, lane)
        elif self._bulk:
            self._trouble([order], KmirrorError(f"{order.copier.name} has no leader"))
        else:
            lane = self._lanes.setdefault(order.copier.fenced_lane, _Lane())
            lane.waiting.append(order)
            self._begin_round(order.copier.fenced_lane, lane)

    def _still_wanted(self, lane: _Lane) -> _Lane:
        """Drop what waited in a lane too long: its partition is stopped now, or this node may not write."""
        waiting, lane.waiting = lane.waiting, []
        allowed = self._may_send()
        for order in waiting:
            if order.generation != order.copier.generation:
                continue
            if order.copier.phase is not Phase.RUNNING:
                self._trouble([order], KmirrorError(f"{order.copier.name} was stopped"))
            elif not allowed:
                self._trouble([order], KmirrorError("this node is not sure of its leadership"))
            else:
                lane.waiting.append(order)
        return lane

    def _broker_lane(self, node_id: int) -> _Lane:
        lane = self._brokers.get(node_id)
        if lane is None:
            lane = self._brokers[node_id] = _Lane()
            self._rhythm_of(node_id).listen(functools.partial(self._answer_came, node_id, lane))
        return lane

    def _spawn(self, task: "asyncio.Task[None]") -> None:
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    # WriteTxnMarkers

    def _schedule(self, node_id: int, lane: _Lane) -> None:
        """Send behind the callbacks of this moment, or when the requests that are out are answered."""
        if lane.timer is None:
            loop = asyncio.get_running_loop()
            hold = self._rhythm_of(node_id).hold_s(control=True)
            lane.timer = (
                loop.call_later(hold, self._due, node_id, lane)
                if hold > 0
                else loop.call_soon(self._due, node_id, lane)
            )

    def _due(self, node_id: int, lane: _Lane) -> None:
        lane.timer = None
        self._send_bulk(node_id, lane)

    def _answer_came(self, node_id: int, lane: _Lane) -> None:
        if lane.timer is not None:
            lane.timer.cancel()
            lane.timer = None
        if lane.waiting:
            self._schedule(node_id, lane)

    def _send_bulk(self, node_id: int, lane: _Lane) -> None:
        if lane.busy or not lane.waiting:
            return
        lane.busy = True
        connection = self._connections.get(node_id)
        if connection is None or not connection.alive:
            self._spawn(asyncio.get_running_loop().create_task(self._connect(node_id, lane)))
            return
        share = _share(self._still_wanted(lane))
        if not share:
            lane.busy = False
            return
        correlation_id = connection.next_id()
        frame = markers.request(
            [
                Markers(
                    order.copier.topic,
                    order.copier.partition,
                    count,
                    order.copier.plain.producer_id,
                    order.copier.plain.producer_epoch,
                    order.copier.owner_epoch,
                )
                for order, count in share
            ],
            correlation_id=correlation_id,
            client_id=self._cluster.settings.client_id,
        )
        self._rhythm_of(node_id).sent()
        future = connection.send(correlation_id, [frame])
        timer = asyncio.get_running_loop().call_later(_UNANSWERED_S, connection.close)
        future.add_done_callback(lambda done: self._bulk_answered(done, node_id, lane, share, timer))

    async def _connect(self, node_id: int, lane: _Lane) -> None:
        try:
            self._connections[node_id] = await self._cluster.connection(node_id, "markers")
        except KmirrorError as error:
            orders, lane.waiting = lane.waiting, []
            self._trouble(orders, error)
        finally:
            lane.busy = False
        self._send_bulk(node_id, lane)

    def _bulk_answered(
        self,
        future: "asyncio.Future[Frame]",
        node_id: int,
        lane: _Lane,
        share: list[tuple[_Order, int]],
        timer: asyncio.TimerHandle,
    ) -> None:
        timer.cancel()
        lane.busy = False
        if not future.cancelled():
            self._take_answer(future, lane, share)
        self._rhythm_of(node_id).answered()

    def _take_answer(
        self, future: "asyncio.Future[Frame]", lane: _Lane, share: list[tuple[_Order, int]]
    ) -> None:
        orders = [order for order, _ in share]
        error = future.exception()
        if error is not None:
            self._trouble(orders, error if isinstance(error, KmirrorError) else KmirrorError(str(error)))
            return
        found = markers.answer(future.result().view)
        if codes.CLUSTER_AUTHORIZATION_FAILED in found.values():
            self._without_right(orders)
        else:
            self._settle(lane, share, found)

    def _settle(
        self, lane: _Lane, share: list[tuple[_Order, int]], found: dict[tuple[str, int], int]
    ) -> None:
        for order, count in share:
            copier = order.copier
            code = found.get(copier.key, codes.REQUEST_TIMED_OUT)
            if code:
                if code in codes.STALE_METADATA:
                    self._cluster.forget(*copier.key)
                self._trouble([order], broker_error(code, f"writing markers into {copier.name}"))
                continue
            order.start += count
            if order.start < order.end:
                lane.waiting.append(order)
                continue
            if order.generation == copier.generation:
                # the next batch's base offset proves their place; asking would cost a round trip each time
                copier.unproven = True
                self._unproven[copier] = None
                self._on_written(copier, order.end)

    def _without_right(self, orders: list[_Order]) -> None:
        """Go over to transactions for good: the broker refused before it wrote anything."""
        if self._bulk:
            log.info("no CLUSTER_ACTION or ALTER on the cluster: control records are written by transactions")
            self._bulk = False
        for lane in self._brokers.values():
            waiting, lane.waiting = lane.waiting, []
            orders = [*orders, *waiting]
        for order in orders:
            self._queue(order)

    async def _prove(self) -> None:
        """Look, once a second, whether control records at the end of a quiet log are where they should be."""
        while True:
            await asyncio.sleep(_PROVE_EVERY_S)
            quiet = [c for c in self._unproven if c.unproven and not c.in_flight and not c.queue]
            self._unproven = dict.fromkeys(c for c in self._unproven if c.unproven and c not in quiet)
            if not quiet:
                continue
            expected = {copier: (copier.acked, copier.generation) for copier in quiet}
            try:
                found = await self._cluster.list_offsets([copier.key for copier in quiet], LATEST)
            except KmirrorError as error:
                log.debug("control records not looked at: %s", error)
                self._unproven.update(dict.fromkeys(quiet))
                continue
            for copier in quiet:
                outcome = found[copier.key]
                if (copier.acked, copier.generation) != expected[copier] or copier.in_flight or copier.queue:
                    self._unproven[copier] = None
                elif outcome.error is not None or outcome.offset < copier.acked:
                    self._unproven[copier] = None  # no leader now, or followers are behind
                elif outcome.offset > copier.acked:
                    self._on_trouble(copier, foreign_write(copier, outcome.offset, copier.acked))
                else:
                    copier.unproven = False

    # empty transactions

    def _begin_round(self, number: int, lane: _Lane) -> None:
        if lane.busy or not lane.waiting:
            return
        orders = self._still_wanted(lane).waiting
        lane.waiting = []
        if not orders:
            return
        lane.busy = True
        self._spawn(asyncio.get_running_loop().create_task(self._round(number, lane, orders)))

    async def _round(self, number: int, lane: _Lane, orders: list[_Order]) -> None:
        try:
            await self._write_transactions(number, orders)
        except KmirrorError as error:
            self._trouble(orders, error)
        except Exception as error:
            log.exception("writing control records")
            self._trouble(orders, KmirrorError(f"writing control records failed: {error}"))
        finally:
            lane.busy = False
        self._begin_round(number, lane)

    async def _write_transactions(self, number: int, orders: list[_Order]) -> None:
        epoch = max(order.copier.owner_epoch for order in orders)
        led, producer = self._producers.get(number, (epoch, None))
        if producer is None or led != epoch:  # led anew: somebody else may have led it in between
            producer = TransactionalProducer(self._cluster, f"{self._prefix}/{number}")
            # fences the former owner; a marker it had begun is written now, at the very offset it was meant for
            await producer.start(timeout_ms=60_000)
            self._producers[number] = epoch, producer
        reached = await self._ends(orders)
        try:
            while pending := [
                order for order in orders if reached[order] < order.end and self._goes_on(order)
            ]:
                await producer.add_partitions([order.copier.key for order in pending])
                await producer.abort()
                for order in pending:
                    reached[order] += 1
                await self._confirm({order: reached[order] for order in pending})
        except KmirrorError:
            # fenced, forgotten by the coordinator, or in doubt: the next round begins with a new epoch
            self._producers.pop(number, None)
            raise
        for order in orders:
            if reached[order] > order.end:
                self._trouble([order], _too_far(order, reached[order], order.end))
            elif reached[order] < order.end:
                self._trouble(
                    [order], KmirrorError(f"{order.copier.name}: not all control records are written")
                )
            elif order.generation == order.copier.generation:
                self._on_written(order.copier, order.end)

    def _goes_on(self, order: _Order) -> bool:
        running = order.copier.phase is Phase.RUNNING and order.generation == order.copier.generation
        return running and self._may_send()

    async def _ends(self, orders: Iterable[_Order]) -> dict[_Order, int]:
        found = await self._cluster.list_offsets([order.copier.key for order in orders], LATEST)
        return {order: found[order.copier.key].value() for order in orders}

    async def _confirm(self, expected: dict[_Order, int]) -> None:
        """Wait until the control records are at the log's end, and nothing else is."""
        limit = time.monotonic() + _CONFIRM_S
        while True:
            found = await self._ends(expected)
            for order, offset in found.items():
                if offset > expected[order]:
                    raise _too_far(order, offset, expected[order])
            if found == expected:
                return
            if time.monotonic() > limit:
                raise DeadlineError(f"control records did not show within {_CONFIRM_S:g} s")
            await asyncio.sleep(_CHECK_EVERY_S)

    def _trouble(self, orders: Iterable[_Order], error: KmirrorError) -> None:
        for order in orders:
            if order.generation == order.copier.generation:
                self._on_trouble(order.copier, error)


def _share(lane: _Lane) -> list[tuple[_Order, int]]:
    """Orders of the next request and how many markers each gets; what has to wait stays in the lane."""
    room = _BULK_ENTRIES
    share: list[tuple[_Order, int]] = []
    while lane.waiting and room > 0:
        order = lane.waiting.pop(0)
        count = min(order.end - order.start, room)
        room -= count
        share.append((order, count))
    return share


def _too_far(order: _Order, found: int, expected: int) -> KmirrorError:
    return KmirrorError(f"{order.copier.name}: the destination ends at {found} instead of {expected}")


def foreign_write(copier: Copier, found: int, expected: int) -> ForeignWriteError:
    """Error of a destination log that is longer than the mirror made it."""
    return ForeignWriteError(
        f"{copier.name}: the destination ends at {found} instead of {expected}: somebody else writes to this topic; "
        "stop the other writer, delete the topic at the destination and run recover"
    )
