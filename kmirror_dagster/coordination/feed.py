"""Feeds the view from the state topic: read and decoded in a thread, applied in the loop."""

import asyncio
import logging
from collections.abc import Callable, Sequence

from kmirror_dagster.broker.follower import FollowedRecord, TopicFollower
from kmirror_dagster.coordination.view import Entry, StateView, decode_entry
from kmirror_dagster.errors import DeadlineError
from kmirror_dagster.records import STATE_TOPIC

logger = logging.getLogger(__name__)

OnRecords = Callable[[Sequence[FollowedRecord], dict[int, int]], None]


class StateFeed:
    """Keeps a view current.

    Args:
        view: what is fed.
        follower: makes the follower that calls back with what it reads.
    """

    def __init__(self, view: StateView, follower: Callable[[OnRecords], TopicFollower]) -> None:
        self._view = view
        self._loop = asyncio.get_running_loop()
        self._follower = follower(self._followed)
        self._unread = set(range(view.count))
        self._loaded = asyncio.Event()
        self._closed = False

    async def load(self, deadline_s: float) -> None:
        """Begin to follow, and wait until everything stored so far is in the view.

        Raises:
            DeadlineError: when the topic is not read to its end in time.
        """
        began = self._loop.time()
        self._follower.start()
        try:
            await asyncio.wait_for(self._loaded.wait(), deadline_s)
        except asyncio.TimeoutError:
            raise DeadlineError(
                f"{STATE_TOPIC} was not read to its end within {deadline_s:.0f} s: "
                f"{len(self._unread)} of {self._view.count} partitions are missing"
            ) from None
        view = self._view
        took = self._loop.time() - began
        logger.info(
            "state loaded in %.2f s: %d mirrors, %d states", took, len(view.mirrors), len(view.states)
        )

    def is_alive(self) -> bool:
        """Whether the follower still runs."""
        return self._follower.is_alive()

    async def close(self, deadline_s: float) -> None:
        """End the follower."""
        self._closed = True
        self._follower.stop()
        await self._loop.run_in_executor(None, self._follower.join, deadline_s)

    def _followed(self, records: Sequence[FollowedRecord], ends: dict[int, int]) -> None:
        """Called in the follower's thread."""
        entries = [decode_entry(r.partition, r.offset, r.at_ms, r.key, r.value) for r in records]
        if not self._closed:
            self._loop.call_soon_threadsafe(self._take, entries, ends)

    def _take(self, entries: Sequence[Entry], ends: dict[int, int]) -> None:
        self._view.apply(entries)
        for partition, position in ends.items():
            self._view.advance(partition, position)
        if self._unread:
            self._unread -= ends.keys()
            if not self._unread:
                self._loaded.set()
