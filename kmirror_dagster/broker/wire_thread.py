"""A wire client for blocking callers: it lives in an event loop of its own, with connections that stay open."""

import asyncio
import concurrent.futures
import threading
from collections.abc import Awaitable, Callable
from typing import TypeVar

from kmirror_dagster.broker.wire import WireCluster
from kmirror_dagster.errors import DeadlineError, KmirrorError
from kmirror_dagster.settings import ClusterSettings

T = TypeVar("T")

_GRACE_S = 2.0
_JOIN_S = 5.0


class WireThread:
    """One wire client in a thread of its own, started at the first call; safe to share between threads.

    Args:
        settings: cluster to talk to.
        role: what the cluster is called in messages.
    """

    def __init__(self, settings: ClusterSettings, *, role: str = "Kafka") -> None:
        self._settings = settings
        self._role = role
        self._lock = threading.Lock()
        self._closed = False
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._cluster: WireCluster | None = None

    def run(self, work: Callable[[WireCluster], Awaitable[T]], *, timeout_s: float, doing: str) -> T:
        """Run `work` in the client's loop and wait for it.

        Raises:
            DeadlineError: it is not done within `timeout_s` seconds; it is cancelled then.
            KmirrorError: what `work` raises, or that the client was closed meanwhile.
        """
        with self._lock:
            # under the lock, so that nothing is handed to a loop that `close` has told to stop
            loop = self._started()
            future = asyncio.run_coroutine_threadsafe(self._bounded(work, timeout_s, doing), loop)
        try:
            return future.result(timeout_s + _GRACE_S)
        except (concurrent.futures.CancelledError, asyncio.CancelledError):
            raise KmirrorError(f"{doing}: client of {self._settings.address} is closed") from None
        except concurrent.futures.TimeoutError:
            future.cancel()
            raise DeadlineError(self._late(doing, timeout_s)) from None

    def close(self) -> None:
        """End: calls under way give up, connections are closed. Harmless when closed."""
        with self._lock:
            self._closed = True
            loop, thread = self._loop, self._thread
            self._loop = self._thread = None
            if loop is None or thread is None:
                return
            loop.call_soon_threadsafe(loop.stop)
        if thread is not threading.current_thread():
            thread.join(_JOIN_S)

    async def _bounded(self, work: Callable[[WireCluster], Awaitable[T]], timeout_s: float, doing: str) -> T:
        if self._cluster is None:
            self._cluster = WireCluster(self._settings, role=self._role)
        self._cluster.close_idle()
        try:
            return await asyncio.wait_for(work(self._cluster), timeout_s)
        except asyncio.TimeoutError:
            raise DeadlineError(self._late(doing, timeout_s)) from None

    def _late(self, doing: str, timeout_s: float) -> str:
        return f"{doing}: {self._settings.address} did not answer within {timeout_s:g} s"

    def _started(self) -> asyncio.AbstractEventLoop:
        if self._closed:
            raise KmirrorError(f"client of {self._settings.address} is closed")
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
            # a daemon: a client that nobody closed must not keep the process alive
            self._thread = threading.Thread(
                target=self._serve, args=(self._loop,), name="kmirror-admin", daemon=True
            )
            self._thread.start()
        return self._loop

    def _serve(self, loop: asyncio.AbstractEventLoop) -> None:
        asyncio.set_event_loop(loop)
        try:
            loop.run_forever()
            loop.run_until_complete(self._end())
        finally:
            loop.close()

    async def _end(self) -> None:
        tasks = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._cluster is not None:
            await self._cluster.close()
