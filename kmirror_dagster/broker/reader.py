"""Reading fixed ranges of logs as fast as one consumer can; never joins a group, never commits."""

import uuid
from bisect import bisect_left
from collections.abc import Collection, Iterable, Iterator, Sequence
from operator import itemgetter

from confluent_kafka import KafkaError, Message, TopicPartition

from kmirror_dagster.broker.clients import ConnectionErrors, consumer
from kmirror_dagster.broker.log_records import OFFSET, Chunk, Headers, LogRange, LogRecord
from kmirror_dagster.errors import BrokerError, KmirrorError
from kmirror_dagster.settings import ClusterSettings

# One call's worth of messages; larger ones only add latency to the other side.
BATCH_RECORDS = 5_000

_READER_SETTINGS: dict[str, str | int | bool] = {
    "enable.auto.offset.store": False,
    # the only way to learn that nothing readable is left before the end: control records, aborted and
    # compacted records take offsets but are never delivered
    "enable.partition.eof": True,
    # a range whose start was deleted meanwhile goes on at the new start; who compares reads the starts again
    "auto.offset.reset": "earliest",
    "check.crcs": True,
    "fetch.wait.max.ms": 20,
    "fetch.error.backoff.ms": 50,
    # the default of a second stalls a reader each time its local queue is full
    "fetch.queue.backoff.ms": 2,
    "queued.min.messages": 100_000,
    "queued.max.messages.kbytes": 32 * 1024,
    "max.partition.fetch.bytes": 1024 * 1024,
    "fetch.max.bytes": 16 * 1024 * 1024,
    # nothing is polled while the other side catches up, and no group would notice
    "max.poll.interval.ms": 86_400_000,
    "session.timeout.ms": 45_000,
}

# What the client library raises for headers with a name that is no UTF-8.
_UNREADABLE = (UnicodeDecodeError, SystemError)

# What a record takes besides the bytes of its value: key, headers and the objects that hold them, about.
RECORD_OVERHEAD_BYTES = 200

# Errors of a group this reader is no member of, and states that librdkafka leaves by itself.
_PASSING = frozenset(
    {
        KafkaError.GROUP_AUTHORIZATION_FAILED,
        KafkaError._TRANSPORT,  # noqa: SLF001 - librdkafka's own codes start with an underscore
        KafkaError._ALL_BROKERS_DOWN,  # noqa: SLF001
        KafkaError._RESOLVE,  # noqa: SLF001
        KafkaError._TIMED_OUT,  # noqa: SLF001
    }
)


class RangeReader:
    """Streams ranges of many partitions through one consumer.

    Args:
        settings: cluster to read.
        ranges: at most one per partition.
        isolation: "read_uncommitted" or "read_committed".

    Attributes:
        unreadable_headers: records whose headers the client library cannot give; they come without.
    """

    def __init__(self, settings: ClusterSettings, ranges: Iterable[LogRange], *, isolation: str) -> None:
        self.unreadable_headers = 0
        self._address = settings.address
        self._ends: dict[tuple[str, int], int] = {}
        self._empty: list[tuple[str, int]] = []
        self._errors = ConnectionErrors(settings)
        assignment: list[TopicPartition] = []
        for wanted in ranges:
            if wanted.start >= wanted.end:
                self._empty.append((wanted.topic, wanted.partition))
                continue
            self._ends[wanted.topic, wanted.partition] = wanted.end
            assignment.append(TopicPartition(wanted.topic, wanted.partition, wanted.start))
        self._consumer = consumer(
            settings,
            group_id=f"kmirror-verify-{uuid.uuid4().hex}",
            errors=self._errors,
            isolation_level=isolation,
            **_READER_SETTINGS,
        )
        self._consumer.assign(assignment)

    def failure(self) -> KmirrorError | None:
        """What keeps the reader from its cluster, for the message of who gives up waiting."""
        return self._errors.error()

    def read(self, timeout_s: float) -> list[Chunk]:
        """Next records, at most about `BATCH_RECORDS`; an empty list when none came in time.

        Args:
            timeout_s: 0 takes only what is here already.

        Raises:
            BrokerError: when a partition cannot be read.
        """
        chunks = [Chunk(topic, partition, [], 0, True) for topic, partition in self._empty]
        self._empty.clear()
        if not self._ends:
            return chunks
        # a single message is awaited, the rest taken as it is: waiting for a full batch would only cost time
        messages = self._consumer.consume(BATCH_RECORDS, 0)
        if not messages and timeout_s > 0 and not chunks:
            messages = self._consumer.consume(1, timeout_s)
        begin = 0
        for end in self._boundaries(messages):
            chunk = self._chunk(messages[begin:end])
            if chunk is not None:
                chunks.append(chunk)
            begin = end
        return chunks

    def pause(self, partitions: Collection[tuple[str, int]]) -> None:
        """Stop fetching these partitions; what was fetched but not read is fetched again after `resume`."""
        self._consumer.pause([TopicPartition(*p) for p in partitions if p in self._ends])

    def resume(self, partitions: Collection[tuple[str, int]]) -> None:
        """Fetch paused partitions again, from the record behind the last one read."""
        self._consumer.resume([TopicPartition(*p) for p in partitions if p in self._ends])

    def close(self) -> None:
        """Close the consumer; idempotent."""
        self._consumer.close()

    @staticmethod
    def _boundaries(messages: Sequence[Message]) -> Iterator[int]:
        """Ends of the runs of one partition's records; anything but a record is a run of its own."""
        topic, partition, was_error = None, None, False
        for index, message in enumerate(messages):
            is_error = message.error() is not None
            # a topic's name is a new string in each message: cheaper to compare than to hash
            if message.partition() != partition or message.topic() != topic or is_error or was_error:
                if index:
                    yield index
                topic, partition, was_error = message.topic(), message.partition(), is_error
        if messages:
            yield len(messages)

    def _chunk(self, run: Sequence[Message]) -> Chunk | None:
        """Records of one run inside the range; None when there is nothing to tell."""
        first = run[0]
        topic, partition = first.topic() or "", first.partition()
        error = first.error()
        if error is not None and error.code() != KafkaError._PARTITION_EOF:  # noqa: SLF001
            self._raise_unless_passing(error, topic, partition)
            return None
        end = self._ends.get((topic, partition)) if partition is not None else None
        if partition is None or end is None:
            return None  # fetched before its range was found to be complete
        if error is not None:
            done = (first.offset() or 0) >= end
            records: list[LogRecord] = []
        else:
            records = self._records(run)
            done = records[-1][OFFSET] >= end - 1
            if records[-1][OFFSET] >= end:
                del records[bisect_left(records, end, key=itemgetter(OFFSET)) :]
        if done:
            del self._ends[topic, partition]
            self._consumer.incremental_unassign([TopicPartition(topic, partition)])
        size = sum(map(len, run)) + RECORD_OVERHEAD_BYTES * len(records)
        return Chunk(topic, partition, records, size, done) if records or done else None

    def _records(self, run: Sequence[Message]) -> list[LogRecord]:
        """Tuples of a run's records, built column by column: no Python code runs for a single record."""
        types, timestamps = zip(*map(Message.timestamp, run), strict=True)
        return list(
            zip(  # type: ignore[arg-type]
                map(Message.offset, run),
                types,
                timestamps,
                map(Message.key, run),
                map(Message.value, run),
                self._headers(run),
                strict=True,
            )
        )

    def _headers(self, run: Sequence[Message]) -> list[Headers | None]:
        """Headers of a run's records; None also where the client library cannot give them.

        It must be asked once only: a second call gives a list that crashes the interpreter.
        """
        headers: list[Headers | None] = []
        rest = map(Message.headers, run)
        while True:
            try:
                headers.extend(rest)  # type: ignore[arg-type]
            except _UNREADABLE:
                headers.append(None)
                self.unreadable_headers += 1
            else:
                return headers

    def _raise_unless_passing(self, error: KafkaError, topic: str, partition: int | None) -> None:
        if error.code() in _PASSING or error.retriable():
            return
        raise BrokerError(
            error.code(),
            error.name(),
            f"{topic}-{partition} at {self._address} cannot be read: {error.str()}",
        )
