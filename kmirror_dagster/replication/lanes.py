"""The readers of one source broker: one when it is near, several side by side when it is far away.

A broker serves the requests of one connection one after the other, and where to read on is only known when an answer
is here. Over a long way a single fetch loop therefore leaves the line empty for a round trip after each answer.
Several loops, each with some of the partitions on a connection of its own, fill it.
"""

import asyncio
from collections.abc import Callable

from kmirror_dagster.broker.fetch import FetchedPartition
from kmirror_dagster.broker.wire import WireCluster
from kmirror_dagster.replication.budget import Budget
from kmirror_dagster.replication.copier import Copier
from kmirror_dagster.replication.reader import MOST_ANSWER_BYTES, SourceReader

MOST_LANES = 4


class SourceLanes:
    """Reads one source broker for all partitions of a mirror that it leads.

    Args:
        cluster: the source.
        node_id: the broker.
        budget: shared by all readers of the node.
        on_ready: called with a copier that has steps to do.
        on_moved: called with a copier whose partition this broker does not serve any more.
        on_refused: called with a copier and what the broker answered for its position.

    Attributes:
        readers: the fetch loops, at least one as soon as there is a copier.
    """

    def __init__(
        self,
        cluster: WireCluster,
        node_id: int,
        budget: Budget,
        *,
        on_ready: Callable[[Copier], None],
        on_moved: Callable[[Copier], None],
        on_refused: Callable[[Copier, FetchedPartition], None],
    ) -> None:
        self._cluster = cluster
        self._node_id = node_id
        self._budget = budget
        self._on_ready = on_ready
        self._on_moved = on_moved
        self._on_refused = on_refused
        self._far = False
        self.readers: list[SourceReader] = []
        self._lane_of: dict[Copier, SourceReader] = {}

    def add(self, copier: Copier) -> None:
        """Read for a copier from its `planned` offset on."""
        most = MOST_LANES if self._far else 1
        if len(self.readers) < most and all(lane.size for lane in self.readers):
            self._open()
        lane = min(self.readers, key=lambda each: each.size)
        self._lane_of[copier] = lane
        lane.add(copier)

    def remove(self, copier: Copier) -> None:
        """Stop reading for a copier."""
        lane = self._lane_of.pop(copier, None)
        if lane is not None:
            lane.remove(copier)

    def resume(self, copier: Copier) -> None:
        """Go on with a copier that was held back, when its queue has room again."""
        lane = self._lane_of.get(copier)
        if lane is not None:
            lane.resume(copier)

    async def close(self) -> None:
        """End all loops and wait for them."""
        await asyncio.gather(*(lane.close() for lane in self.readers))

    def _open(self) -> None:
        self.readers.append(
            SourceReader(
                self._cluster,
                self._node_id,
                self._budget,
                lane=len(self.readers),
                on_ready=self._on_ready,
                on_moved=self._moved,
                on_refused=self._on_refused,
                on_far=self._spread,
            )
        )

    def _moved(self, copier: Copier) -> None:
        self._lane_of.pop(copier, None)
        self._on_moved(copier)

    def _spread(self) -> None:
        """Share the partitions of the first reader among several: the broker turned out to be far away."""
        if self._far:
            return
        self._far = True
        # else the buffers of large answers are made anew each time
        pool = self._cluster.pool
        pool.keep_bytes = max(pool.keep_bytes, MOST_LANES * MOST_ANSWER_BYTES)
        copiers = list(self._lane_of)
        for copier in copiers[: len(copiers) - len(copiers) // MOST_LANES]:
            self.remove(copier)
            self.add(copier)
