"""Processes killed and brokers ended over and over, under writes."""

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.conftest import ClusterFactory, Clusters, start_all
from tests.helpers.comparison import differences, log_ranges
from tests.helpers.copier_process import keep_copying, take_lead
from tests.helpers.copying import Copying, mirror_settings, run
from tests.helpers.crash_scenarios import by_transactions
from tests.helpers.histories import LONG
from tests.helpers.kafka import create_topic
from tests.helpers.killing import SteadyClients, kill_again_and_again
from tests.helpers.waiting import unique_name, wait_until

pytestmark = [pytest.mark.integration, pytest.mark.faults]

_CONFIGS = {"retention.ms": "-1", "message.timestamp.after.max.ms": LONG, "min.insync.replicas": "2"}


@pytest.mark.timeout(900)
@pytest.mark.parametrize("bulk", [True, False], ids=["bulk", "transactions"])
def test_fifty_kills(clusters: Clusters, tmp_path: Path, bulk: bool) -> None:
    """SIGKILL fifty times at random moments, with control records written either way."""
    assert kill_again_and_again(clusters, tmp_path, kills=50, partitions=3, seed=7, bulk=bulk) == {}


@pytest.mark.timeout(900)
@pytest.mark.parametrize("bulk", [True, False], ids=["bulk", "transactions"])
def test_brokers_of_both_clusters_ended_in_turn(
    cluster_factory: ClusterFactory, tmp_path: Path, bulk: bool
) -> None:
    """Three brokers each; every one is killed or stopped once, and leaders move, while all kinds of data flow."""
    source, destination = (
        cluster_factory("source", 3, start=False),
        cluster_factory("destination", 3, start=False),
    )
    start_all([source, destination])
    topic = unique_name("moved")
    partitions = range(3)
    for cluster in (source, destination):
        create_topic(cluster.bootstrap, topic, len(partitions), _CONFIGS, replicas=3)

    async def main(end: Callable[[], None]) -> None:
        copying = Copying(mirror_settings(source.bootstrap, destination.bootstrap, topic))
        if not bulk:
            by_transactions(copying)
        take_lead(tmp_path, copying.owner)
        tasks = [asyncio.create_task(keep_copying(copying, topic, p, tmp_path)) for p in partitions]
        ending = asyncio.create_task(asyncio.to_thread(end))
        try:
            done, _ = await asyncio.wait([ending, *tasks], return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
            await asyncio.wait_for(ending, 300)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await copying.link.close()

    def end_brokers() -> None:
        with SteadyClients(source.bootstrap, topic, len(partitions)):
            for number in (1, 2, 3):
                destination.kill_broker(number)
                destination.start_broker(number)
                source.stop_broker(number)
                source.start_broker(number)
        wait_until(
            lambda: (
                log_ranges(destination.bootstrap, topic, partitions)
                == log_ranges(source.bootstrap, topic, partitions)
            ),
            120,
            what="the rest",
        )

    run(lambda: main(end_brokers))
    assert differences(source.bootstrap, destination.bootstrap, topic, partitions) == {}
