"""A writer that goes to the other cluster when it is refused, as clients behind a changed address do."""

import threading
import time
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from confluent_kafka import KafkaException

from kmirror_dagster.broker.clients import producer
from kmirror_dagster.settings import ClusterSettings
from kmirror_dagster.verification.history import Ack, Event
from kmirror_dagster.verification.history_recorder import HistoryWriter, RecordedProducer

_PAUSE_S = 0.02
_ATTEMPT_S = 0.05
_FLUSH_S = 60.0


class MovingWriter:
    """Writes at a steady rate at A until a record is refused there, then knocks at B until one is taken.

    Args:
        clusters: settings of "A" and "B".
        history: where to.
        name: of the process in the history.
        topic, partitions: where to write.
        rate: records a second.
    """

    def __init__(
        self,
        clusters: Mapping[str, ClusterSettings],
        history: HistoryWriter,
        *,
        name: str,
        topic: str,
        partitions: int,
        rate: float,
    ) -> None:
        self._clusters = clusters
        self._history = history
        self._name = name
        self._topic = topic
        self._partitions = partitions
        self._rate = rate
        self._ended = threading.Event()
        self._refused = threading.Event()
        self._pool = ThreadPoolExecutor(1)
        self._work: Future[None] | None = None
        self.sent = 0

    def __enter__(self) -> "MovingWriter":
        """Begin."""
        self._work = self._pool.submit(self._run)
        return self

    def __exit__(self, *_: object) -> None:
        """End."""
        self._ended.set()
        assert self._work is not None
        self._work.result(_FLUSH_S * 2)
        self._pool.shutdown()

    def _run(self) -> None:
        self._steadily(self._client("A"), leave=True)
        while not self._ended.is_set():
            self._refused.clear()
            client = self._client("B")
            self._send(client)
            assert client.flush(_FLUSH_S) == 0
            if not self._refused.is_set():
                self._steadily(client, leave=False)
                return
            self._ended.wait(_ATTEMPT_S)

    def _client(self, cluster: str) -> RecordedProducer:
        refused = self._refused

        class Noticing:
            """The client, with an eye on what is refused."""

            def __init__(self, inner: Any) -> None:
                self._inner = inner

            def __getattr__(self, name: str) -> Any:
                return getattr(self._inner, name)

            def produce(self, topic: str, *, on_delivery: Any, **more: Any) -> None:
                def told(error: Any, message: Any) -> None:
                    if error is not None:
                        refused.set()
                    on_delivery(error, message)

                self._inner.produce(topic, on_delivery=told, **more)

        client = Noticing(producer(self._clusters[cluster], linger_ms=5))
        return RecordedProducer(client, self._history, cluster=cluster, process=f"{self._name}-{cluster}")

    def _send(self, client: RecordedProducer) -> None:
        value, partition = f"{self._name}-{self.sent}", self.sent % self._partitions
        self.sent += 1
        try:
            client.send(self._topic, value, partition=partition)
        except KafkaException:  # the client knows already that it is refused
            self._refused.set()

    def _steadily(self, client: RecordedProducer, *, leave: bool) -> None:
        began, sent = time.monotonic(), 0
        while not self._ended.is_set() and not (leave and self._refused.is_set()):
            wanted = (time.monotonic() - began) * self._rate
            while sent < wanted and not self._refused.is_set():
                self._send(client)
                sent += 1
            client.poll(0)
            self._ended.wait(_PAUSE_S)
        assert client.flush(_FLUSH_S) == 0
        assert leave or not self._refused.is_set(), "a record was refused where writing was allowed"


def downtime_s(events: list[Event]) -> float:
    """Seconds between the last record taken at A and the first one taken at B."""
    acks = [event for event in events if isinstance(event, Ack)]
    last = max(event.at_ms for event in acks if event.cluster == "A")
    first = min(event.at_ms for event in acks if event.cluster == "B")
    return (first - last) / 1000
