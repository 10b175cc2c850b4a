"""Writes the workloads' data at the source: once, and as fast as the broker takes it."""

import asyncio
import os
import threading
import time
from collections import deque
from collections.abc import Callable

from confluent_kafka import Producer

from bench.errors import BenchError
from bench.workloads import PARTITIONS, Workload
from kmirror_dagster.broker import batches, codecs, produce
from kmirror_dagster.broker.connection import Connection, Frame
from kmirror_dagster.broker.wire import WireCluster
from kmirror_dagster.settings import ClusterSettings

_VARIETY = 64
_IN_FLIGHT = 32
_DEADLINE_S = 900.0
_TELL_S = 2.0
_EOS_WRITERS = 4
_CODECS = {name: number for number, name in codecs.NAMES.items()}


def prebuilt(workload: Workload) -> list[bytes]:
    """Sealed batches of different contents, without a producer id: what a broker stores as it is."""
    now = int(time.time() * 1000)
    made: list[bytes] = []
    for number in range(_VARIETY):
        records = [
            batches.RawRecord(
                index,
                now,
                batches.encode_payload(b"%08d" % (number * 1000 + index), os.urandom(workload.value_bytes)),
            )
            for index in range(workload.batch_records)
        ]
        made.append(batches.encode_batch(records, codec=_CODECS[workload.codec]))
    return made


def write(settings: ClusterSettings, workload: Workload, note: Callable[[str], None]) -> None:
    """Write a workload's records into its (empty) topic."""
    if workload.transactional:
        _write_transactions(settings, workload, note)
    else:
        asyncio.run(
            write_batches(settings, workload.topic, prebuilt(workload), workload, note, in_flight=_IN_FLIGHT)
        )


async def write_batches(
    settings: ClusterSettings,
    topic: str,
    ready: list[bytes],
    workload: Workload,
    note: Callable[[str], None],
    *,
    in_flight: int,
) -> float:
    """Append batches from memory round robin; each request carries one for every partition.

    Args:
        settings: the cluster.
        topic: topic of `bench.workloads.PARTITIONS` partitions, all led by one broker.
        ready: sealed batches.
        workload: how many records.
        note: takes progress.
        in_flight: requests sent and not answered yet, at most.

    Returns:
        Seconds it took.
    """
    began = time.monotonic()
    await asyncio.wait_for(_append_all(settings, topic, ready, workload, note, in_flight), _DEADLINE_S)
    return time.monotonic() - began


async def _append_all(
    settings: ClusterSettings,
    topic: str,
    ready: list[bytes],
    workload: Workload,
    note: Callable[[str], None],
    in_flight: int,
) -> None:
    cluster = WireCluster(settings, role="destination")
    waiting: deque[asyncio.Future[Frame]] = deque()
    try:
        leader = await cluster.leader(topic, 0)
        connection = await cluster.connection(leader.node_id, "produce")
        rounds = workload.written // (workload.batch_records * PARTITIONS)
        told = time.monotonic()
        for number in range(rounds):
            if len(waiting) == in_flight:
                _check(await waiting.popleft())
            waiting.append(_send(connection, topic, ready, number))
            if time.monotonic() - told > _TELL_S:
                told = time.monotonic()
                note(f"{(number + 1) / rounds:.0%} written")
        while waiting:
            _check(await waiting.popleft())
    finally:
        await cluster.close()
        await asyncio.gather(*waiting, return_exceptions=True)


def _check(frame: Frame) -> None:
    for entry in produce.answer(frame.view):
        if entry.error_code:
            raise BenchError(f"{entry.topic}/{entry.partition}: write failed with error {entry.error_code}")


def _send(connection: Connection, topic: str, ready: list[bytes], number: int) -> "asyncio.Future[Frame]":
    appends = [
        produce.Append(topic, partition, ready[(number * PARTITIONS + partition) % len(ready)])
        for partition in range(PARTITIONS)
    ]
    correlation_id = connection.next_id()
    return connection.send(
        correlation_id,
        produce.request(appends, correlation_id=correlation_id, client_id="bench", timeout_ms=30_000),
    )


def _write_transactions(settings: ClusterSettings, workload: Workload, note: Callable[[str], None]) -> None:
    """Several producers, so that transactions interleave as they do in the field."""
    failures: list[BaseException] = []
    per_writer = workload.records // workload.batch_records // _EOS_WRITERS
    values = [os.urandom(workload.value_bytes) for _ in range(_VARIETY)]

    def run(writer: int) -> None:
        try:
            producer = Producer(
                {
                    "bootstrap.servers": ",".join(settings.bootstrap_servers),
                    "transactional.id": f"{workload.topic}-{writer}",
                    "linger.ms": 1,
                }
            )
            producer.init_transactions(30)
            for number in range(per_writer):
                producer.begin_transaction()
                for index in range(workload.batch_records):
                    producer.produce(
                        workload.topic, values[index % _VARIETY], b"%d" % index, index % PARTITIONS
                    )
                producer.commit_transaction(30)
                if writer == 0 and number % 250 == 249:
                    note(f"{(number + 1) / per_writer:.0%} written")
        except BaseException as error:  # noqa: BLE001 - handed to the caller
            failures.append(error)

    threads = [threading.Thread(target=run, args=(writer,), daemon=True) for writer in range(_EOS_WRITERS)]
    for thread in threads:
        thread.start()
    end = time.monotonic() + _DEADLINE_S
    for thread in threads:
        thread.join(max(0.0, end - time.monotonic()))
    if failures or any(thread.is_alive() for thread in threads):
        raise BenchError(f"writing {workload.topic} failed: {failures or 'not done in time'}")
