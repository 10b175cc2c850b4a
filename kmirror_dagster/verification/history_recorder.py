"""Recorders: wrap a producer or consumer of confluent-kafka so that what it does becomes a history.

They take the client, not its settings, and call nothing but its documented methods.
"""

import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

from kmirror_dagster.verification.history import (
    Ack,
    Assign,
    EndTransaction,
    Event,
    Fail,
    Poll,
    PolledRecord,
    Position,
    Rebuilt,
    Send,
    Stop,
    event_line,
)
from kmirror_dagster.verification.report import Isolation


class HistoryWriter:
    """Appends events to a file, or keeps them when there is none; safe to share between threads.

    The order of the lines is the order in which recorders saw things happen: a send is written before the client
    is called, everything else after it has answered.

    Args:
        path: file to append to; None keeps the events in `events` only.
    """

    def __init__(self, path: Path | None = None) -> None:
        self.events: list[Event] = []
        self._lock = threading.Lock()
        self._file = path.open("a", encoding="utf-8") if path is not None else None

    def add(self, event: Event) -> None:
        """Append one event, stamped with the time of now."""
        with self._lock:
            stamped = event.model_copy(update={"at_ms": time.time_ns() // 1_000_000})
            if self._file is None:
                self.events.append(stamped)
            else:
                self._file.write(event_line(stamped) + "\n")

    def stopped(self, source: str, destination: str, topic: str, partition: int, offset: int) -> None:
        """Note that mirroring ended at an offset (the last mirror position)."""
        self.add(
            Stop(source=source, destination=destination, topic=topic, partition=partition, offset=offset)
        )

    def rebuilt(self, cluster: str, topic: str) -> None:
        """Note that a topic was made anew from the other cluster."""
        self.add(Rebuilt(cluster=cluster, topic=topic))

    def close(self) -> None:
        """Write everything out; idempotent."""
        with self._lock:
            if self._file is not None:
                self._file.close()

    def __enter__(self) -> "HistoryWriter":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class ProducerClient(Protocol):
    """The part of `confluent_kafka.Producer` that is used."""

    def produce(self, topic: str, *args: Any, **kwargs: Any) -> None: ...

    def poll(self, timeout: float = ...) -> int: ...

    def flush(self, timeout: float = ...) -> int: ...

    def commit_transaction(self, timeout: float = ...) -> None: ...

    def abort_transaction(self, timeout: float = ...) -> None: ...

    def begin_transaction(self) -> None: ...


class ConsumerClient(Protocol):
    """The part of `confluent_kafka.Consumer` that is used."""

    def subscribe(self, topics: list[str], **kwargs: Any) -> None: ...

    def assign(self, partitions: Any) -> None: ...

    def consume(self, num_messages: int = ..., timeout: float = ...) -> list[Any]: ...

    def close(self) -> None: ...


class RecordedProducer:
    """A producer whose sends, acknowledgements and transactions are recorded.

    Args:
        client: a `confluent_kafka.Producer`.
        history: where to.
        cluster: name of the cluster in the history.
        process: name of this producer in the history; one per client.
    """

    def __init__(self, client: ProducerClient, history: HistoryWriter, *, cluster: str, process: str) -> None:
        self._client = client
        self._history = history
        self._cluster = cluster
        self._process = process
        self._transactions = 0
        self._transaction: str | None = None

    def send(self, topic: str, value: str, *, key: str | None = None, partition: int | None = None) -> None:
        """Send one value, unique in the history.

        Raises:
            BufferError: when the client's queue is full; the value counts as not sent.
        """
        where = {} if partition is None else {"partition": partition}
        self._history.add(
            Send(
                process=self._process,
                cluster=self._cluster,
                topic=topic,
                partition=partition,
                value=value,
                transaction=self._transaction,
            )
        )

        def told(error: Any, message: Any) -> None:
            if error is not None:
                self._history.add(Fail(value=value, error=str(error)))
                return
            offset: int | None = message.offset()
            self._history.add(
                Ack(
                    cluster=self._cluster,
                    topic=topic,
                    partition=message.partition(),
                    offset=offset if offset is not None and offset >= 0 else None,
                    value=value,
                )
            )

        try:
            self._client.produce(topic, value=value.encode(), key=key, on_delivery=told, **where)
        except Exception as error:
            self._history.add(Fail(value=value, certain=True, error=str(error)))
            raise

    def poll(self, timeout_s: float = 0.0) -> int:
        """Serve acknowledgements."""
        return self._client.poll(timeout_s)

    def flush(self, timeout_s: float) -> int:
        """Wait for outstanding acknowledgements; how many are left."""
        return self._client.flush(timeout_s)

    def begin(self) -> None:
        """Begin a transaction."""
        self._client.begin_transaction()
        self._transactions += 1
        self._transaction = f"{self._process}-{self._transactions}"

    def commit(self, timeout_s: float) -> None:
        """Commit; when the client raises nobody knows the outcome and nothing is recorded."""
        self._end("commit", self._client.commit_transaction, timeout_s)

    def abort(self, timeout_s: float) -> None:
        """Abort; as `commit`."""
        self._end("abort", self._client.abort_transaction, timeout_s)

    def _end(self, op: Any, call: Callable[[float], None], timeout_s: float) -> None:
        name, self._transaction = self._transaction, None
        call(timeout_s)
        if name is not None:
            self._history.add(EndTransaction(op=op, transaction=name))


class RecordedConsumer:
    """A consumer whose assignments and records are recorded; values have to be UTF-8.

    Args:
        client: a `confluent_kafka.Consumer`.
        history: where to.
        cluster: name of the cluster in the history.
        process: name of this consumer in the history; one per client.
        isolation: the client's `isolation.level`.
    """

    def __init__(
        self,
        client: ConsumerClient,
        history: HistoryWriter,
        *,
        cluster: str,
        process: str,
        isolation: Isolation = Isolation.READ_COMMITTED,
    ) -> None:
        self._client = client
        self._history = history
        self._cluster = cluster
        self._process = process
        self._isolation = isolation

    def subscribe(self, topics: list[str]) -> None:
        """Subscribe as a member of a group; each assignment is recorded."""

        def assigned(_client: Any, partitions: Sequence[Any]) -> None:
            self._assigned(partitions)

        self._client.subscribe(topics, on_assign=assigned)

    def assign(self, partitions: Sequence[Any]) -> None:
        """Read given partitions (`confluent_kafka.TopicPartition`) from their offsets on."""
        self._assigned(partitions)
        self._client.assign(list(partitions))

    def _assigned(self, partitions: Sequence[Any]) -> None:
        positions = [Position(p.topic, p.partition, p.offset if p.offset >= 0 else None) for p in partitions]
        self._history.add(Assign(process=self._process, cluster=self._cluster, positions=positions))

    def poll(self, timeout_s: float, *, limit: int = 500) -> list[Any]:
        """Next messages without errors; what a client reports as an error of a partition is passed over."""
        messages = [m for m in self._client.consume(limit, timeout_s) if m.error() is None]
        if messages:
            self._history.add(
                Poll(
                    process=self._process,
                    cluster=self._cluster,
                    isolation=self._isolation,
                    records=[
                        PolledRecord(m.topic(), m.partition(), m.offset(), (m.value() or b"").decode())
                        for m in messages
                    ],
                )
            )
        return messages

    def close(self) -> None:
        """Close the client."""
        self._client.close()
