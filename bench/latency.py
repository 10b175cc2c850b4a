"""From produce to readable at the destination: one process writes and reads, so one clock counts."""

import math
import struct
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from confluent_kafka import Consumer, KafkaError, Message, Producer, TopicPartition

from bench.clusters import log_ends
from bench.errors import BenchError
from bench.guarded import GuardedProcess
from bench.meter import Meter, Reading, between
from bench.rounds import FIRST_RECORD_S, Round, made
from bench.workloads import PARTITIONS, Workload
from kmirror_dagster.settings import ClusterSettings

_STAMP = struct.Struct(">qq")
_DRAIN_S = 30.0
_POLL_S = 0.05
_TELL_S = 2.0
# both clients send at once: what they add is the same for every tool
_CLIENT: dict[str, str | int | bool] = {"socket.nagle.disable": True}


@dataclass(frozen=True)
class LatencyRound(Round):
    """A round at a steady rate.

    Attributes:
        p50_ms: median of produce to readable, milliseconds.
        p99_ms: 99th percentile.
        max_ms: slowest record.
    """

    p50_ms: float
    p99_ms: float
    max_ms: float

    def describe(self) -> str:
        """One line."""
        return (
            f"{self.tool}: p50 {self.p50_ms:.1f} ms, p99 {self.p99_ms:.1f} ms, max {self.max_ms:.1f} ms; "
            + super().describe().split(": ", 1)[1]
        )


def percentile(ordered: Sequence[float], share: float) -> float:
    """Nearest-rank percentile of ascending values; `share` from 0 to 1."""
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]


class Writer:
    """Writes records at a steady rate in a thread; each carries its number and the time it was handed over.

    Args:
        settings: source.
        workload: topic, rate and size.
    """

    def __init__(self, settings: ClusterSettings, workload: Workload) -> None:
        self._workload = workload
        self._producer = Producer(
            {**_CLIENT, "bootstrap.servers": ",".join(settings.bootstrap_servers), "linger.ms": 0}
        )
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self.written = 0
        self.failure: str | None = None

    def __enter__(self) -> "Writer":
        """Begin."""
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        """End, and wait for what is under way."""
        self.end()

    def end(self) -> None:
        """Write no more."""
        self._ended.set()
        self._thread.join(_DRAIN_S)

    def _run(self) -> None:
        padding = bytes(max(0, self._workload.value_bytes - _STAMP.size))
        began = time.monotonic()
        while not self._ended.is_set():
            number = self.written
            wait_s = began + number / self._workload.rate - time.monotonic()
            if wait_s > 0:
                time.sleep(wait_s)
            value = _STAMP.pack(number, time.monotonic_ns()) + padding
            self._producer.produce(
                self._workload.topic, value, partition=number % PARTITIONS, on_delivery=self._delivered
            )
            self._producer.poll(0)
            self.written += 1
        self._producer.flush(_DRAIN_S)

    def _delivered(self, error: KafkaError | None, message: Message) -> None:
        del message
        if error is not None:
            self.failure = error.str()


class LatencyWatch:
    """Measures one round.

    Args:
        source: where it writes.
        destination: where it reads.
        workload: topic, rate, warm-up and how many records are measured.
        process: the tool.
        known: processes whose processor time is not foreign.
        note: takes progress.
    """

    def __init__(
        self,
        source: ClusterSettings,
        destination: ClusterSettings,
        workload: Workload,
        process: GuardedProcess,
        known: Sequence[int],
        note: Callable[[str], None],
    ) -> None:
        self._source = source
        self._destination = destination
        self._workload = workload
        self._process = process
        self._meter = Meter(process, known)
        self._note = note
        self._told = 0.0

    def run(self, tool: str) -> LatencyRound:
        """Wait until records flow, warm up, measure.

        Raises:
            BenchError: the tool ended, nothing came for two minutes, or measured records are missing at the end.
        """
        self._await_topic()
        consumer = Consumer(
            {
                **_CLIENT,
                "bootstrap.servers": ",".join(self._destination.bootstrap_servers),
                "group.id": "bench-latency",
                "enable.auto.commit": False,
                "auto.offset.reset": "earliest",
                "fetch.min.bytes": 1,
            }
        )
        try:
            consumer.assign([TopicPartition(self._workload.topic, each, 0) for each in range(PARTITIONS)])
            with Writer(self._source, self._workload) as writer:
                self._warm_up(consumer, writer)
                latencies, begin, end = self._measure(consumer, writer)
        finally:
            consumer.close()
        ordered = sorted(latencies.values())
        base = made(tool, len(ordered), between(begin, end))
        return LatencyRound(
            **vars(base),
            p50_ms=percentile(ordered, 0.5),
            p99_ms=percentile(ordered, 0.99),
            max_ms=ordered[-1],
        )

    def _await_topic(self) -> None:
        """Wait until the tool has made the topic at the destination."""
        end = time.monotonic() + FIRST_RECORD_S
        while len(log_ends(self._destination, self._workload.topic, PARTITIONS)) < PARTITIONS:
            self._check(end, "the topic is not at the destination")
            time.sleep(_POLL_S)

    def _warm_up(self, consumer: Consumer, writer: Writer) -> None:
        end = time.monotonic() + FIRST_RECORD_S
        while self._read(consumer) is None:
            self._check(end, "no record came", writer)
        end = time.monotonic() + self._workload.warm_up_s
        while time.monotonic() < end:
            self._read(consumer)
            self._follow(end + _DRAIN_S, "", writer, f"warming up, {writer.written} records")

    def _measure(self, consumer: Consumer, writer: Writer) -> tuple[dict[int, float], Reading, Reading]:
        """Milliseconds by record number, of all records of the measured part."""
        first = writer.written
        wanted = range(first, first + self._workload.records)
        latencies: dict[int, float] = {}
        begin = self._meter.read()
        end = begin.at + self._workload.records / self._workload.rate * 2 + _DRAIN_S
        while len(latencies) < len(wanted):
            found = self._read(consumer)
            if found is not None and found[0] in wanted:
                latencies.setdefault(*found)
            missing = f"{len(wanted) - len(latencies)} of {len(wanted)} records are missing"
            self._follow(end, missing, writer, f"{len(latencies) / len(wanted):.0%}")
        return latencies, begin, self._meter.read()

    def _read(self, consumer: Consumer) -> tuple[int, float] | None:
        """Number and milliseconds of the next record, None when none came for a moment."""
        message = consumer.poll(_POLL_S)
        now = time.monotonic_ns()
        if message is None:
            return None
        error = message.error()
        value = message.value()
        if error is not None or value is None:
            raise BenchError(f"cannot read {self._workload.topic} at the destination: {error}")
        number, sent = _STAMP.unpack_from(value)
        return number, (now - sent) / 1e6

    def _check(self, end: float, what: str, writer: Writer | None = None) -> None:
        if not self._process.is_alive:
            raise BenchError(f"the tool ended; see {self._process.log}:\n{self._process.tail()}")
        if writer is not None and writer.failure:
            raise BenchError(f"cannot write {self._workload.topic} at the source: {writer.failure}")
        if time.monotonic() > end:
            raise BenchError(f"{what}; see {self._process.log}:\n{self._process.tail()}")

    def _follow(self, end: float, what: str, writer: Writer, text: str) -> None:
        """Check and tell now and then: looking at processes after each record would disturb."""
        if time.monotonic() - self._told > _TELL_S:
            self._told = time.monotonic()
            self._check(end, what, writer)
            self._note(text)
