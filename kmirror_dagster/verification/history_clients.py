"""Steady producers and readers whose doings become a history: something to watch while things are broken."""

import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeoutError
from typing import Any

from kmirror_dagster.broker.admin_types import Partition
from kmirror_dagster.broker.clients import consumer, producer, topic_partitions
from kmirror_dagster.errors import DeadlineError
from kmirror_dagster.settings import ClusterSettings
from kmirror_dagster.verification.history_recorder import HistoryWriter, RecordedConsumer, RecordedProducer
from kmirror_dagster.verification.report import Isolation

_POLL_S = 0.1
_JOIN_S = 60.0
_TICK_S = 0.02
# a record is sent until its broker is back, however long that takes
_DELIVERY_MS = 600_000


class _Steady(ABC):
    """Something that goes on in a thread until it is ended; an error in it is raised at the end."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._ended = threading.Event()
        self._pool = ThreadPoolExecutor(1, thread_name_prefix=name)
        self._work: Future[None] | None = None

    def start(self) -> None:
        """Begin."""
        self._work = self._pool.submit(self._run)

    def stop(self) -> None:
        """End; harmless when it has not begun.

        Raises:
            KmirrorError: when it failed, or does not end.
        """
        self._ended.set()
        if self._work is None:
            return
        try:
            self._work.result(_JOIN_S)
        except FutureTimeoutError:
            raise DeadlineError(f"{self.name} does not end within {_JOIN_S:g} s") from None
        finally:
            self._pool.shutdown(wait=False)

    def check(self) -> None:
        """Raise what it failed of, if it did."""
        if self._work is not None and self._work.done():
            self._work.result()

    @abstractmethod
    def _run(self) -> None: ...


class SteadyProducer(_Steady):
    """Sends unique values to all partitions of topics at a steady rate, and catches up when it was held up.

    Args:
        settings: cluster to write to.
        history: where to.
        cluster: name of the cluster in the history.
        name: of the process in the history; unique in it.
        topics: number of partitions by topic.
        rate: records a second.
        padding: bytes added to each value.
    """

    def __init__(
        self,
        settings: ClusterSettings,
        history: HistoryWriter,
        *,
        cluster: str,
        name: str,
        topics: Mapping[str, int],
        rate: float,
        padding: int = 0,
    ) -> None:
        super().__init__(name)
        self.sent = 0
        self._rate = rate
        self._padding = "." * padding
        self._places = [(topic, number) for topic, count in sorted(topics.items()) for number in range(count)]
        self._running = threading.Event()
        self._running.set()
        self._idle = threading.Event()
        client = producer(settings, delivery_timeout_ms=_DELIVERY_MS, linger_ms=5)
        self._client = RecordedProducer(client, history, cluster=cluster, process=name)

    def pause(self, wait_s: float = _JOIN_S) -> None:
        """Send nothing more; returns when all that was sent has an answer.

        Raises:
            DeadlineError: when some of it has none.
        """
        self._idle.clear()
        self._running.clear()
        if not self._idle.wait(wait_s):
            raise DeadlineError(f"{self.name}: records sent are not answered within {wait_s:g} s")

    def resume(self) -> None:
        """Send again."""
        self._running.set()

    def _run(self) -> None:
        began, due = time.monotonic(), 0.0
        while not self._ended.is_set():
            if not self._running.is_set():
                if self._client.flush(_POLL_S) == 0:
                    self._idle.set()
                    self._ended.wait(_TICK_S)
                began, due = time.monotonic(), 0.0
                continue
            wanted = (time.monotonic() - began) * self._rate
            while due < wanted and not self._ended.is_set():
                self._send()
                due += 1
            self._client.poll(0)
            self._ended.wait(_TICK_S)
        left = self._client.flush(_JOIN_S / 2)
        if left:
            raise DeadlineError(f"{left} records sent are not answered")

    def _send(self) -> None:
        topic, partition = self._places[self.sent % len(self._places)]
        try:
            self._client.send(topic, f"{self.name}-{self.sent}{self._padding}", partition=partition)
        except BufferError:  # full of what the broker does not take
            self._client.poll(_POLL_S)
        self.sent += 1


class SteadyReader(_Steady):
    """Reads all partitions of topics, from their beginning on or from given offsets.

    Args:
        settings: cluster to read.
        history: where to.
        cluster: name of the cluster in the history.
        name: of the process in the history; unique in it.
        topics: number of partitions by topic.
        begin: offsets to begin at, where not at 0.
    """

    def __init__(
        self,
        settings: ClusterSettings,
        history: HistoryWriter,
        *,
        cluster: str,
        name: str,
        topics: Mapping[str, int],
        begin: Mapping[Partition, int] | None = None,
    ) -> None:
        super().__init__(name)
        self.read = 0
        isolation = Isolation.READ_COMMITTED
        client: Any = consumer(
            settings, group_id=name, isolation_level=isolation.value, auto_offset_reset="earliest"
        )
        self._client = RecordedConsumer(client, history, cluster=cluster, process=name, isolation=isolation)
        keys = [(topic, number) for topic, count in sorted(topics.items()) for number in range(count)]
        self._positions: dict[Partition, int] = {key: (begin or {}).get(key, 0) for key in keys}
        self._partitions = topic_partitions(self._positions)

    def position(self, topic: str, partition: int) -> int:
        """Offset behind the last record it has got."""
        return self._positions[topic, partition]

    def _run(self) -> None:
        self._client.assign(self._partitions)
        try:
            while not self._ended.is_set():
                for message in self._client.poll(_POLL_S):
                    self._positions[message.topic(), message.partition()] = message.offset() + 1
                    self.read += 1
        finally:
            self._client.close()
