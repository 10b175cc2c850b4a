"""Runs the copying of one topic until it is told to end: the child process that is measured."""

import asyncio
import cProfile
import json
import logging
import signal
import sys
from collections.abc import Awaitable, Callable
from typing import Any

from kmirror_dagster.broker.pauses import favour_the_loop
from kmirror_dagster.errors import ReplicationError
from kmirror_dagster.lifecycle import MirrorState
from kmirror_dagster.records import PartitionRecord
from kmirror_dagster.replication.budget import Budget
from kmirror_dagster.replication.link import MirrorLink
from kmirror_dagster.settings import (
    ClusterSettings,
    FilterSettings,
    MirrorSettings,
    NodeSettings,
    PolicySettings,
)

_MIRROR = "bench"


async def mirror(job: dict[str, Any]) -> None:
    """Align and copy all partitions until SIGTERM."""
    ended = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, ended.set)
    settings = MirrorSettings(
        mirror=_MIRROR,
        source=ClusterSettings(bootstrap_servers=(job["source"],)),
        destination=ClusterSettings(bootstrap_servers=(job["destination"],)),
        filters=FilterSettings(),
        policies=PolicySettings(),
    )
    budget = NodeSettings(destination=settings.destination).memory_budget_bytes
    link = MirrorLink(settings, node_id="bench", budget=Budget(budget), transactional_prefix="kmirror")

    def failed(error: ReplicationError) -> None:
        logging.error("failed: %s", error)
        ended.set()

    try:
        for partition in range(job["partitions"]):
            await _begin(link, job["topic"], partition, failed)
        logging.info("all partitions are being copied")
        await ended.wait()
    finally:
        await link.close()


async def _begin(
    link: MirrorLink, topic: str, partition: int, failed: Callable[[ReplicationError], None]
) -> None:
    record = PartitionRecord(
        mirror=_MIRROR, topic=topic, partition=partition, state=MirrorState.LOG_ALIGNMENT
    )
    alignment = await link.align(topic, partition, record)
    link.start(topic, partition, alignment, failed, owner_epoch=1)


def _run(main: Awaitable[None]) -> None:
    asyncio.run(main)  # type: ignore[arg-type]


def main() -> int:
    """Entry point; the job is JSON in the first argument."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    job = json.loads(sys.argv[1])
    favour_the_loop()  # as a node does
    if not job.get("profile"):
        _run(mirror(job))
        return 0
    profiler = cProfile.Profile()
    profiler.enable()
    try:
        _run(mirror(job))
    finally:
        profiler.disable()
        profiler.dump_stats(job["profile"])
    return 0


if __name__ == "__main__":
    sys.exit(main())
