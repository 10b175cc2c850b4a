"""Killing a copying process again and again while its source is written to."""

import asyncio
import contextlib
import random
import threading
import time
from pathlib import Path

from confluent_kafka import KafkaException

from tests.conftest import Clusters
from tests.helpers.comparison import differences, log_ranges
from tests.helpers.copier_process import CopierProcess
from tests.helpers.copying import run
from tests.helpers.crash_scenarios import write_mixed
from tests.helpers.histories import LONG, RawWriter, records
from tests.helpers.kafka import create_topic, produce, produce_transaction
from tests.helpers.waiting import unique_name, wait_until

# between two rounds of the writer: what it writes is compared in memory, and a slow machine takes its time to kill
_PACE_S = 0.05
_CONFIGS = {"retention.ms": "-1", "message.timestamp.after.max.ms": LONG}


class SteadyWriter:
    """Writes plain batches and transactions in a thread until it is stopped."""

    def __init__(self, bootstrap: str, topic: str, partitions: int) -> None:
        self._bootstrap = bootstrap
        self._topic = topic
        self._partitions = range(partitions)
        self._stop = threading.Event()
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> "SteadyWriter":
        """Begin."""
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        """End, with all transactions ended."""
        self._stop.set()
        self._thread.join(60)
        assert self._error is None, self._error

    def _run(self) -> None:
        async def main() -> None:
            raw = RawWriter(self._bootstrap, self._topic)
            seed = 0
            while not self._stop.is_set():
                await write_mixed(raw, self._topic, self._partitions, 1, seed=seed)
                seed += 1
                await asyncio.sleep(_PACE_S)
            await raw.settled(self._topic, self._partitions)
            await raw.close()

        try:
            run(main)
        except BaseException as error:
            self._error = error
            raise


class SteadyClients(SteadyWriter):
    """The same with real producers, which get over brokers that end; what they could not write is left out."""

    def _run(self) -> None:
        number = 0
        while not self._stop.is_set():
            number += 1
            content = [record for partition in self._partitions for record in records(number, 40, partition)]
            # a transaction that a broker's end has broken is aborted by the next one of the same id
            with contextlib.suppress(KafkaException, AssertionError):
                produce(self._bootstrap, self._topic, content, {"compression.type": "lz4"})
                produce_transaction(self._bootstrap, self._topic, content, commit=number % 3 != 0)
        with contextlib.suppress(AssertionError):
            produce_transaction(self._bootstrap, self._topic, content, commit=False)


def kill_again_and_again(
    clusters: Clusters, folder: Path, *, kills: int, partitions: int, seed: int, bulk: bool = True
) -> dict[int, str]:
    """Kill the process that copies at random moments of its work; what differs in the end."""
    rng = random.Random(seed)
    topic = unique_name("killed")
    for cluster in (clusters.source, clusters.destination):
        create_topic(cluster.bootstrap, topic, partitions, _CONFIGS)
    source, destination = clusters.source.bootstrap, clusters.destination.bootstrap

    def start(owner: int) -> CopierProcess:
        return CopierProcess.start(
            source, destination, topic, topic, partitions, folder, owner=owner, bulk=bulk
        )

    def length() -> int:
        return sum(end for _, end in log_ranges(destination, topic, range(partitions)).values())

    def copied() -> bool:
        return log_ranges(destination, topic, range(partitions)) == log_ranges(
            source, topic, range(partitions)
        )

    with SteadyWriter(source, topic, partitions):
        for owner in range(1, kills + 1):
            before = length()
            with start(owner) as process:
                wait_until(lambda before=before: length() > before, 30, what="copying")
                time.sleep(rng.uniform(0, 0.3))  # where it is then is what differs from kill to kill
                process.kill()
    with start(kills + 1):
        wait_until(copied, 180, what="the rest")
    return differences(source, destination, topic, range(partitions))
