"""Writes records of the workload: one producer per compression, and one that writes transactions."""

import contextlib
import time
from collections import Counter

from confluent_kafka import KafkaError, KafkaException, Message, Producer

from kmirror_dagster.broker import clients
from kmirror_dagster.errors import DeadlineError, SandboxError
from kmirror_dagster.sandbox.workload import SeedRecord, SeedTransaction
from kmirror_dagster.settings import ClusterSettings

_TRANSACTIONAL_ID = "kmirror-sandbox-payments"
_DEADLINE_S = 60.0
_SLICE_S = 0.2
_MAX_BYTES = 2_000_000
_FENCED = (KafkaError._FENCED, KafkaError.INVALID_PRODUCER_EPOCH, KafkaError.PRODUCER_FENCED)  # noqa: SLF001


class SeedWriter:
    """Producers of one run.

    Attributes:
        written: acknowledged records outside aborted transactions, by topic.
        aborted: acknowledged records of aborted transactions, by topic.
    """

    def __init__(self, settings: ClusterSettings) -> None:
        """Describe the writer; producers are made when first needed."""
        self.written: Counter[str] = Counter()
        self.aborted: Counter[str] = Counter()
        self._settings = settings
        self._producers: dict[str, Producer] = {}
        self._transactional: Producer | None = None
        self._error: str | None = None

    def send(self, record: SeedRecord) -> None:
        """Hand over one record; `flush` waits for it.

        Raises:
            SandboxError: an earlier record was refused by the cluster.
        """
        self._produce(self._producer(record.topic.compression), record)
        self.written[record.topic.name] += 1

    def transact(self, transaction: SeedTransaction) -> None:
        """Write one transaction and end it as it says.

        Raises:
            SandboxError: the cluster refused it, or another writer of these transactions took over.
        """
        try:
            producer = self._transaction_producer(transaction.records[0].topic.compression)
            producer.begin_transaction()
            for record in transaction.records:
                self._produce(producer, record)
            # Without it an abort would throw away what is still queued here, and the log would show nothing.
            self._flush(producer)
            if transaction.commits:
                producer.commit_transaction(_DEADLINE_S)
            else:
                producer.abort_transaction(_DEADLINE_S)
        except KafkaException as error:
            raise _refused(error) from error
        counts = self.written if transaction.commits else self.aborted
        counts.update(record.topic.name for record in transaction.records)

    def flush(self) -> None:
        """Wait until everything handed over is acknowledged.

        Raises:
            SandboxError: a record was refused.
            DeadlineError: a record is not acknowledged within a minute.
        """
        for producer in self._producers.values():
            self._flush(producer)

    def close(self) -> None:
        """Abort a transaction that is open, so that no reader waits for it until it times out."""
        if self._transactional is not None:
            with contextlib.suppress(KafkaException):  # none is open
                self._transactional.abort_transaction(5)

    def _produce(self, producer: Producer, record: SeedRecord) -> None:
        while True:
            self._raise_error()
            try:
                producer.produce(
                    record.topic.name,
                    value=record.value,
                    key=record.key,
                    partition=record.partition,
                    headers=list(record.headers),
                    timestamp=record.timestamp_ms,
                    on_delivery=self._delivered,
                )
            except BufferError:
                producer.poll(_SLICE_S)
                continue
            producer.poll(0)
            return

    def _flush(self, producer: Producer) -> None:
        deadline = time.monotonic() + _DEADLINE_S
        # In slices: a signal is acted upon between two of them.
        while producer.flush(_SLICE_S) > 0:
            self._raise_error()
            if time.monotonic() >= deadline:
                raise DeadlineError(
                    f"{len(producer)} records are not acknowledged; see kmirror sandbox status"
                )
        self._raise_error()

    def _delivered(self, error: KafkaError | None, message: Message) -> None:
        if error is not None and self._error is None:
            self._error = f"{message.topic()}/{message.partition()} refused a record: {error.str()}"

    def _raise_error(self) -> None:
        if self._error is not None:
            raise SandboxError(self._error)

    def _producer(self, compression: str) -> Producer:
        known = self._producers.get(compression)
        if known is None:
            known = self._producers[compression] = self._make(compression)
        return known

    def _transaction_producer(self, compression: str) -> Producer:
        if self._transactional is None:
            producer = self._make(compression, transactional_id=_TRANSACTIONAL_ID)
            producer.init_transactions(_DEADLINE_S)
            self._transactional = producer
        return self._transactional

    def _make(self, compression: str, transactional_id: str = "") -> Producer:
        # An empty transactional.id is none.
        return clients.producer(
            self._settings,
            compression_type=compression,
            linger_ms=5,
            message_max_bytes=_MAX_BYTES,
            transactional_id=transactional_id,
        )


def _refused(error: KafkaException) -> SandboxError:
    cause: KafkaError = error.args[0]
    if cause.code() in _FENCED:
        return SandboxError("another seed took over; run one at a time")
    return SandboxError(f"the cluster refused a transaction: {cause.str()}")
