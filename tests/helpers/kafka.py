"""Producing to, reading from and administering the clusters of the tests, through librdkafka only."""

import logging
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from confluent_kafka import (
    OFFSET_BEGINNING,
    Consumer,
    ConsumerGroupTopicPartitions,
    KafkaError,
    Message,
    Producer,
    TopicPartition,
)
from confluent_kafka.admin import AdminClient, NewPartitions, NewTopic, OffsetSpec

logger = logging.getLogger(__name__)

READ_COMMITTED = "read_committed"
READ_UNCOMMITTED = "read_uncommitted"
Header = tuple[str, bytes | None]
DEADLINE_S = 30.0


@dataclass(frozen=True)
class Record:
    """A record to be written; `timestamp` in ms since the epoch, None: now."""

    value: bytes | None = None
    key: bytes | None = None
    headers: tuple[Header, ...] = ()
    timestamp: int | None = None
    partition: int = 0


@dataclass(frozen=True)
class ReadRecord:
    """A record as a consumer gets it."""

    offset: int
    key: bytes | None
    value: bytes | None
    headers: tuple[Header, ...]
    timestamp: int


def admin(bootstrap: str) -> AdminClient:
    """An admin client."""
    return AdminClient({"bootstrap.servers": bootstrap}, logger=logger)


def create_topic(
    bootstrap: str, name: str, partitions: int = 1, configs: dict[str, str] | None = None, replicas: int = 1
) -> None:
    """Create a topic and wait until its partitions have leaders."""
    client = admin(bootstrap)
    topic = NewTopic(name, num_partitions=partitions, replication_factor=replicas, config=configs or {})
    client.create_topics([topic])[name].result(DEADLINE_S)
    deadline = time.monotonic() + DEADLINE_S
    while time.monotonic() < deadline:
        found = client.list_topics(name, timeout=DEADLINE_S).topics[name].partitions
        if len(found) == partitions and all(each.leader >= 0 for each in found.values()):
            return
        time.sleep(0.05)
    raise AssertionError(f"{name} has no leaders")


def grow_topic(bootstrap: str, name: str, partitions: int) -> None:
    """Raise the number of partitions."""
    client = admin(bootstrap)  # a client that is let go never answers
    client.create_partitions([NewPartitions(name, partitions)])[name].result(DEADLINE_S)


def delete_topic(bootstrap: str, name: str) -> None:
    """Delete a topic."""
    client = admin(bootstrap)  # a client that is let go never answers
    client.delete_topics([name])[name].result(DEADLINE_S)


def delete_records(bootstrap: str, topic: str, before: int, partition: int = 0) -> None:
    """Raise the log start of a partition."""
    target = TopicPartition(topic, partition, before)
    client = admin(bootstrap)  # a client that is let go never answers
    client.delete_records([target])[target].result(DEADLINE_S)


def producer(bootstrap: str, config: dict[str, str | int | float | bool] | None = None) -> Producer:
    """An idempotent producer."""
    base: dict[str, str | int | float | bool] = {
        "bootstrap.servers": bootstrap,
        "enable.idempotence": True,
        "linger.ms": 5,
    }
    return Producer(base | (config or {}), logger=logger)


def write(client: Producer, topic: str, records: Iterable[Record]) -> None:
    """Hand records to a producer; keeps its queue from overflowing, does not flush."""
    for record in records:
        arguments = {} if record.timestamp is None else {"timestamp": record.timestamp}
        while True:
            try:
                client.produce(
                    topic,
                    value=record.value,
                    key=record.key,
                    headers=list(record.headers),
                    partition=record.partition,
                    on_delivery=_raise_failed,
                    **arguments,
                )
                break
            except BufferError:
                client.poll(0.1)
        client.poll(0)


def _raise_failed(error: KafkaError | None, message: Message) -> None:
    if error is not None:
        raise AssertionError(f"record for {message.topic()} not written: {error}")


def produce(
    bootstrap: str,
    topic: str,
    records: Iterable[Record],
    config: dict[str, str | int | float | bool] | None = None,
) -> None:
    """Write records in the given order and wait until all are acknowledged."""
    client = producer(bootstrap, config)
    client.list_topics(topic, timeout=DEADLINE_S)  # as in `consume`: saves half a second
    write(client, topic, records)
    assert client.flush(DEADLINE_S) == 0


def produce_transaction(
    bootstrap: str,
    topic: str,
    records: Iterable[Record],
    *,
    commit: bool = True,
    transactional_id: str | None = None,
) -> None:
    """Write records in one transaction that commits or aborts."""
    client = producer(bootstrap, {"transactional.id": transactional_id or f"{topic}-writer"})
    client.init_transactions(DEADLINE_S)
    client.begin_transaction()
    write(client, topic, records)
    assert client.flush(DEADLINE_S) == 0
    if commit:
        client.commit_transaction(DEADLINE_S)
    else:
        client.abort_transaction(DEADLINE_S)


def consume(
    bootstrap: str,
    topic: str,
    partition: int = 0,
    *,
    isolation: str = READ_COMMITTED,
    deadline_s: float = DEADLINE_S,
) -> list[ReadRecord]:
    """All records of a partition, from log start to the end as of now, that an isolation level shows."""
    client = Consumer(
        {
            "bootstrap.servers": bootstrap,
            "group.id": "test-reader",
            "enable.auto.commit": False,
            "isolation.level": isolation,
            "enable.partition.eof": True,
            # How long a fetch at the end of the log waits before it tells so.
            "fetch.wait.max.ms": 20,
        },
        logger=logger,
    )
    records: list[ReadRecord] = []
    try:
        # Knowing the leaders already, the client does not wait half a second for its next look at them.
        client.list_topics(topic, timeout=deadline_s)
        client.assign([TopicPartition(topic, partition, OFFSET_BEGINNING)])
        deadline = time.monotonic() + deadline_s
        while time.monotonic() < deadline:
            message = client.poll(0.2)
            if message is None:
                continue
            error = message.error()
            if error is None:
                records.append(_read(message))
            elif error.code() == KafkaError._PARTITION_EOF:
                return records
            else:
                raise AssertionError(f"cannot read {topic}-{partition}: {error}")
    finally:
        client.close()
    raise AssertionError(
        f"end of {topic}-{partition} not reached within {deadline_s} s ({len(records)} records)"
    )


def _read(message: Message) -> ReadRecord:
    offset = message.offset()
    assert offset is not None
    headers = tuple((name, value) for name, value in message.headers() or [])
    return ReadRecord(offset, message.key(), message.value(), headers, message.timestamp()[1])


def log_range(bootstrap: str, topic: str, partition: int = 0) -> tuple[int, int]:
    """Log start and log end (high watermark) of a partition."""
    target = TopicPartition(topic, partition)
    client = admin(bootstrap)
    start = client.list_offsets({target: OffsetSpec.earliest()})[target].result(DEADLINE_S).offset
    end = client.list_offsets({target: OffsetSpec.latest()})[target].result(DEADLINE_S).offset
    return start, end


def commit_offsets(bootstrap: str, group: str, offsets: Sequence[tuple[str, int, int]]) -> None:
    """Set committed offsets (topic, partition, offset) of a group without members."""
    partitions = [TopicPartition(*each) for each in offsets]
    client = admin(bootstrap)
    deadline = time.monotonic() + DEADLINE_S
    while True:
        request = ConsumerGroupTopicPartitions(group, partitions)
        result = client.alter_consumer_group_offsets([request])[group].result(DEADLINE_S)
        errors = [each.error for each in result.topic_partitions if each.error is not None]
        if not errors:
            return
        # a new cluster's group coordinator moves in after the first request for it
        moving = (KafkaError.NOT_COORDINATOR, KafkaError.COORDINATOR_LOAD_IN_PROGRESS)
        passing = all(error.code() in moving for error in errors)
        assert passing and time.monotonic() < deadline, errors
        time.sleep(0.1)


def committed_offsets(bootstrap: str, group: str) -> dict[tuple[str, int], int]:
    """Committed offsets of a group by (topic, partition).

    Through a consumer that never joins the group: librdkafka's admin call brings the process down when the
    group's coordinator is just moving in (2.16).
    """
    consumer = Consumer({"bootstrap.servers": bootstrap, "group.id": group}, logger=logger)
    try:
        topics = consumer.list_topics(timeout=DEADLINE_S).topics
        every = [TopicPartition(name, index) for name, topic in topics.items() for index in topic.partitions]
        found = consumer.committed(every, timeout=DEADLINE_S)
    finally:
        consumer.close()
    return {(each.topic, each.partition): each.offset for each in found if each.offset >= 0}
