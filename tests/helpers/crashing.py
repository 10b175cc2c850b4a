"""Copying that is broken at a chosen point, and goes on as a node would: again, or by another owner."""

import asyncio
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from pydantic import BaseModel

from kmirror_dagster.errors import ReplicationError
from kmirror_dagster.settings import MirrorSettings, PolicySettings
from tests.conftest import Clusters
from tests.helpers.copying import Copying
from tests.helpers.secured import client_settings
from tests.helpers.translated import KeptOffsets

Prepare = Callable[[Copying], None]


def proxied_settings(
    clusters: Clusters, mirror: str, client: str, policies: PolicySettings | None = None
) -> MirrorSettings:
    """Settings of a mirror whose traffic passes both proxies under a client id of its own."""
    return MirrorSettings(
        mirror=mirror,
        source=client_settings(clusters.source_proxy.bootstrap, "source", client_id=client),
        destination=client_settings(clusters.destination_proxy.bootstrap, "destination", client_id=client),
        policies=policies or PolicySettings(),
    )


async def crash(copying: Copying) -> None:
    """End a link as a killed process would: nothing more is sent, nothing is put in order."""
    link = copying.link
    for cluster in (link.source, link.destination):
        cluster._closed = True
    # what is cancelled may begin something else, and a cancellation can be lost
    while tasks := [task for task in _tasks(link) if not task.done()]:
        for task in tasks:
            task.cancel()
        for cluster in (link.source, link.destination):
            for connection in list(cluster._connections.values()):
                connection.close()
        await asyncio.wait(tasks, timeout=0.1)


def _tasks(root: object) -> "set[asyncio.Task[Any]]":
    """All tasks that an object holds on to, itself or through what it is made of."""
    found: set[asyncio.Task[Any]] = set()
    seen: set[int] = set()
    left: list[object] = [root]
    while left:
        each = left.pop()
        if id(each) in seen:
            continue
        seen.add(id(each))
        if isinstance(each, asyncio.Task):
            found.add(each)
        elif isinstance(each, dict):
            left += [*each.keys(), *each.values()]
        elif isinstance(each, (list, tuple, set, deque)):
            left += each
        elif type(each).__module__.startswith("kmirror_dagster.") and not isinstance(each, BaseModel):
            left += vars(each).values() if hasattr(each, "__dict__") else ()
    return found


@dataclass
class Attempt:
    """What became of copying one partition.

    Attributes:
        failures: reasons it became FAILED for, and was retried, as a node does.
        resyncs: times the destination's log end was read again.
    """

    failures: list[str] = field(default_factory=list)
    resyncs: int = 0


async def copy_through(
    copying: Copying,
    tp: tuple[str, int],
    end: int,
    attempt: Attempt,
    *,
    deadline_s: float = 40.0,
    until: Callable[[], bool] = lambda: False,
) -> None:
    """Copy up to an offset; failures that time may heal are retried, others end it.

    Args:
        until: ends it earlier.
    """
    limit = time.monotonic() + deadline_s
    while not until():
        try:
            await _begin(copying, tp, until)
            await copying.until(
                lambda: until() or _reached(copying, tp, end), max(limit - time.monotonic(), 0.1)
            )
        except ReplicationError as error:
            attempt.failures.append(str(error))
            if not error.retriable or time.monotonic() > limit:
                raise
            await asyncio.sleep(0.05)
            continue
        finally:
            progress = copying.link.progress(*tp)
            attempt.resyncs += progress.resyncs_total if progress is not None else 0
        return


async def _begin(copying: Copying, tp: tuple[str, int], until: Callable[[], bool]) -> None:
    beginning = asyncio.ensure_future(copying.begin(*tp))
    while not beginning.done():
        if until():
            while not beginning.done():  # a cancellation can be lost when an answer comes in the same moment
                beginning.cancel()
                await asyncio.wait([beginning], timeout=0.1)
            return
        await asyncio.wait([beginning], timeout=0.01)
    beginning.result()


def _reached(copying: Copying, tp: tuple[str, int], end: int) -> bool:
    progress = copying.link.progress(*tp)
    if progress is None:
        return False
    return progress.destination_end >= end or (progress.source_end >= end and not progress.lag_records)


async def copy_with_fault(
    clusters: Clusters,
    mirror: str,
    tp: tuple[str, int],
    end: int,
    hit: threading.Event,
    *,
    crashes: bool,
    prepare: Prepare = lambda _: None,
    policies: PolicySettings | None = None,
    kept: KeptOffsets | None = None,
) -> Attempt:
    """Copy a partition while a fault is armed; when it is a crash, another owner finishes the work.

    Args:
        hit: set when the fault has come.
        kept: where the map of its offsets is kept.
    """
    attempt = Attempt()
    first = Copying(proxied_settings(clusters, mirror, f"{mirror}-first", policies), owner=1)
    first.offsets[tp] = kept = kept or KeptOffsets()
    prepare(first)
    try:
        await copy_through(first, tp, end, attempt, until=hit.is_set if crashes else lambda: False)
        if not crashes:
            await first.link.close()
            return attempt
    finally:
        await crash(first)
    second = Copying(proxied_settings(clusters, mirror, f"{mirror}-second", policies), owner=2)
    second.offsets[tp] = kept
    prepare(second)
    second.records = dict(first.records)  # as they were stored
    try:
        await copy_through(second, tp, end, attempt)
        await second.link.close()
    finally:
        await crash(second)
    return attempt
