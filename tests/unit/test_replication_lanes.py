"""How the partitions of one source broker are spread over fetch loops."""

import asyncio
import struct
from collections import Counter
from typing import cast

from kmirror_dagster.broker.connection import BufferPool, Connection, Frame
from kmirror_dagster.broker.fetch import FetchedPartition
from kmirror_dagster.broker.wire import WireCluster
from kmirror_dagster.replication.budget import Budget
from kmirror_dagster.replication.copier import Copier, Sequence
from kmirror_dagster.replication.lanes import MOST_LANES, SourceLanes
from kmirror_dagster.settings import ClusterSettings

FULL_ANSWER = 600_000


class Broker:
    """Answers the first request of each connection with `size` bytes without partitions, later ones never."""

    def __init__(self, round_trip_s: float, size: int) -> None:
        self.settings = ClusterSettings(bootstrap_servers=("broker:9092",))
        self.pool = BufferPool()
        self.round_trip_s = round_trip_s
        self.size = size
        self.asked: Counter[str] = Counter()
        self._connections: dict[str, Connection] = {}

    async def connection(self, node_id: int, lane: str) -> Connection:
        """A connection for each lane."""
        assert node_id == 1
        self.asked[lane] += 1
        return self._connections.setdefault(lane, cast("Connection", _Line(self)))

    def drop(self, connection: Connection) -> None:
        """Close it."""


class _Line:
    def __init__(self, broker: Broker) -> None:
        self.round_trip_s = broker.round_trip_s
        self._size = broker.size
        self._answered = False

    def version(self, api_key: int, highest: int) -> int:
        return highest

    def next_id(self) -> int:
        return 1

    def send(self, correlation_id: int, buffers: list[bytes]) -> "asyncio.Future[Frame]":
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Frame] = loop.create_future()
        if not self._answered:
            self._answered = True
            head = struct.pack(">ib", correlation_id, 0) + struct.pack(">ihi", 0, 0, 7) + b"\1\0"
            view = memoryview(bytearray(head.ljust(self._size, b"\0")))
            # an hour late: what a broker is judged by is the shortest way, not this one
            future.set_result(Frame(view, began=loop.time() + 3_600))
        return future


def made(partition: int) -> Copier:
    """A copier of one partition."""
    return Copier(
        "t",
        partition,
        Sequence(1, 0),
        acked=0,
        topic_id=bytes(16),
        on_failure=print,
        fenced_lane=0,
        owner_epoch=1,
    )


async def spread(broker: Broker, copiers: list[Copier]) -> list[int]:
    """Partitions of each fetch loop once the broker has given its first answers."""
    moved: list[Copier] = []
    refused: list[tuple[Copier, FetchedPartition]] = []
    lanes = SourceLanes(
        cast("WireCluster", broker),
        1,
        Budget(1 << 30),
        on_ready=moved.append,
        on_moved=moved.append,
        on_refused=lambda copier, fetched: refused.append((copier, fetched)),
    )
    for copier in copiers:
        lanes.add(copier)
    for _ in range(50):
        await asyncio.sleep(0)
    assert broker.asked["fetch-0"] > 1
    sizes = [reader.size for reader in lanes.readers]
    for copier in copiers:
        lanes.remove(copier)
    assert [reader.size for reader in lanes.readers] == [0] * len(sizes)
    await lanes.close()
    assert not moved
    assert not refused
    return sizes


def test_a_near_broker_is_read_by_one_loop_however_late_an_answer_is() -> None:
    """One connection, as long as the shortest way to the broker is short."""
    broker = Broker(0.002, FULL_ANSWER)
    assert asyncio.run(spread(broker, [made(partition) for partition in range(8)])) == [8]
    assert set(broker.asked) == {"fetch-0"}


def test_a_far_broker_with_much_to_read_is_read_by_several_loops() -> None:
    """Even shares, each on a connection of its own, and room for their buffers."""
    broker = Broker(0.1, FULL_ANSWER)
    assert asyncio.run(spread(broker, [made(partition) for partition in range(10)])) == [3, 3, 2, 2]
    assert set(broker.asked) == {f"fetch-{lane}" for lane in range(MOST_LANES)}
    assert broker.pool.keep_bytes >= 64 << 20


def test_a_far_broker_with_little_to_read_keeps_one_loop() -> None:
    """Where answers are not full, a second connection would carry nothing."""
    broker = Broker(0.1, 10_000)
    assert asyncio.run(spread(broker, [made(partition) for partition in range(8)])) == [8]


def test_no_more_loops_than_partitions() -> None:
    """A loop without partitions is not begun."""
    broker = Broker(0.1, FULL_ANSWER)
    assert asyncio.run(spread(broker, [made(0), made(1)])) == [1, 1]
