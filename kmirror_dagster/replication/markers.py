"""Control records at the destination: they stand for transaction markers and holes of the source.

Two ways, the same bytes in the log. WriteTxnMarkers writes thousands per request, and needs CLUSTER_ACTION or ALTER
on the cluster; without that right an empty transaction (AddPartitionsToTxn, EndTxn) writes one per partition and
round. Neither touches the last stable offset or the transaction index while nothing is open.
"""

import asyncio
import logging
import time
from collections.abc import Iterable
from dataclasses import dataclass

from kmirror_dagster.broker import codes
from kmirror_dagster.broker.codes import broker_error
from kmirror_dagster.broker.transactions import TransactionalProducer, write_markers
from kmirror_dagster.broker.wire import LATEST, WireCluster
from kmirror_dagster.errors import DeadlineError, FencedError, ForeignWriteError, KmirrorError
from kmirror_dagster.replication.copier import Copier

log = logging.getLogger(__name__)

# WriteTxnMarkers entries of one request; the broker answers when all are appended.
_BULK_ENTRIES = 2_000
_CONFIRM_S = 15.0
_CHECK_EVERY_S = 0.002


@dataclass(eq=False)
class _Order:
    copier: Copier
    start: int
    end: int
    done: "asyncio.Future[None]"


class MarkerWriter:
    """Writes control records for all partitions of a mirror on this node; one round serves all that wait.

    A partition waits here with nothing in flight, its log end being the offset of its next control record.
    """

    def __init__(self, cluster: WireCluster, transactional_prefix: str) -> None:
        self._cluster = cluster
        self._prefix = transactional_prefix
        self._lanes: dict[int, TransactionalProducer] = {}
        self._waiting: list[_Order] = []
        self._bulk = True
        self._wake = asyncio.Event()
        self._task = asyncio.get_running_loop().create_task(self._run(), name="marker-writer")

    async def write(self, copier: Copier, start: int, end: int) -> None:
        """Fill offsets `start` to `end` (exclusive) with control records and see them there.

        Raises:
            KmirrorError: the outcome is unknown or the broker refused; read the log end before going on.
        """
        order = _Order(copier, start, end, asyncio.get_running_loop().create_future())
        self._waiting.append(order)
        self._wake.set()
        await order.done

    async def close(self) -> None:
        """End; who waits is left with a cancelled order."""
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        for order in self._waiting:
            order.done.cancel()

    async def _run(self) -> None:
        while True:
            await self._wake.wait()
            self._wake.clear()
            orders, self._waiting = self._waiting, []
            groups: dict[int, list[_Order]] = {}
            for order in orders:
                leader = self._cluster.known_leader(*order.copier.key)
                # by broker for bulk markers, by lane for transactions: both kinds of group work in parallel
                key = leader.node_id if leader is not None else -1
                groups.setdefault(key if self._bulk else order.copier.fenced_lane, []).append(order)
            await asyncio.gather(*(self._serve(group) for group in groups.values()))

    async def _serve(self, orders: list[_Order]) -> None:
        try:
            if self._bulk:
                await self._write_bulk(orders)
            if not self._bulk:
                await self._write_transactions(orders)
        except asyncio.CancelledError:
            for order in orders:
                order.done.cancel()
            raise
        except KmirrorError as error:
            _fail(orders, error)
        except Exception as error:
            log.exception("writing control records")
            _fail(orders, KmirrorError(f"writing control records failed: {error}"))
        for order in orders:
            if not order.done.done():
                order.done.set_result(None)

    # WriteTxnMarkers

    async def _write_bulk(self, orders: list[_Order]) -> None:
        written = {order: order.start for order in orders}
        while pending := [order for order in orders if not order.done.done() and written[order] < order.end]:
            room = _BULK_ENTRIES
            share: dict[_Order, int] = {}
            for order in pending:
                count = min(order.end - written[order], max(1, room))
                share[order] = count
                room -= count
                if room <= 0:
                    break
            found = await write_markers(
                self._cluster,
                [
                    (
                        order.copier.key,
                        count,
                        order.copier.plain.producer_id,
                        order.copier.plain.producer_epoch,
                    )
                    for order, count in share.items()
                ],
                coordinator_epoch=max(order.copier.owner_epoch for order in share),
            )
            if codes.CLUSTER_AUTHORIZATION_FAILED in found.values():
                log.info(
                    "no CLUSTER_ACTION or ALTER on the cluster: control records are written by transactions"
                )
                self._bulk = False
                return
            for order, count in share.items():
                code = found.get(order.copier.key, codes.REQUEST_TIMED_OUT)
                if code:
                    order.done.set_exception(broker_error(code, f"writing markers into {order.copier.name}"))
                else:
                    written[order] += count
        # where data follows, its base offset will tell; asking would cost a round trip per transaction
        await self._confirm([o for o in orders if not o.done.done() and not o.copier.data_follows])

    # empty transactions

    async def _write_transactions(self, orders: list[_Order]) -> None:
        lane = orders[0].copier.fenced_lane
        producer = self._lanes.get(lane)
        if producer is None:
            producer = TransactionalProducer(self._cluster, f"{self._prefix}-markers-{lane}")
            # fences the former owner; a marker it had begun is written now, at the very offset it was meant for
            await producer.start(timeout_ms=60_000)
            self._lanes[lane] = producer
        reached = await self._ends(orders)
        try:
            while pending := [order for order in orders if reached[order] < order.end]:
                await producer.add_partitions([order.copier.key for order in pending])
                await producer.abort()
                for order in pending:
                    reached[order] += 1
                await self._confirm(pending, reached)
        except FencedError:
            del self._lanes[lane]
            raise

    async def _ends(self, orders: Iterable[_Order]) -> dict[_Order, int]:
        found = await self._cluster.list_offsets([order.copier.key for order in orders], LATEST)
        return {order: found[order.copier.key].value() for order in orders}

    async def _confirm(self, orders: list[_Order], expected: dict[_Order, int] | None = None) -> None:
        """Wait until the control records are at the log's end, and nothing else is."""
        limit = time.monotonic() + _CONFIRM_S
        while orders:
            found = await self._cluster.list_offsets([order.copier.key for order in orders], LATEST)
            behind: list[_Order] = []
            for order in orders:
                wanted = order.end if expected is None else expected[order]
                outcome = found[order.copier.key]
                if outcome.error is not None:
                    order.done.set_exception(outcome.error)
                elif outcome.offset < wanted:
                    behind.append(order)
                elif outcome.offset > wanted:
                    order.done.set_exception(
                        ForeignWriteError(
                            f"{order.copier.name}: the destination ends at {outcome.offset} instead of {wanted}: "
                            "somebody else writes to this topic; stop the other writer, delete the topic at the "
                            "destination and run recover"
                        )
                    )
            orders = behind
            if orders and time.monotonic() > limit:
                raise DeadlineError(f"control records did not show within {_CONFIRM_S:g} s")
            if orders:
                await asyncio.sleep(_CHECK_EVERY_S)


def _fail(orders: list[_Order], error: KmirrorError) -> None:
    for order in orders:
        if not order.done.done():
            order.done.set_exception(error)
