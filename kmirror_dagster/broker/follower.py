"""Follows all partitions of a topic from its beginning, in a thread of its own."""

import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from confluent_kafka import (
    OFFSET_BEGINNING,
    TIMESTAMP_NOT_AVAILABLE,
    Consumer,
    KafkaError,
    KafkaException,
    Message,
    TopicPartition,
)

from kmirror_dagster.broker.clients import consumer
from kmirror_dagster.settings import ClusterSettings

logger = logging.getLogger(__name__)

_BATCH = 500
_POLL_S = 0.5
_ERROR_PAUSE_S = 0.5
_LEADERS_S = 5.0


@dataclass(frozen=True)
class FollowedRecord:
    """One record as it is stored; `at_ms` is its timestamp, 0 when it has none."""

    partition: int
    offset: int
    at_ms: int
    key: bytes | None
    value: bytes | None


class TopicFollower:
    """Reads a topic for ever, committed records only.

    Args:
        settings: cluster to read from.
        topic: topic, all partitions of it.
        partitions: how many it has.
        group_id: named in requests only; nothing is joined or committed.
        on_records: called in the follower's thread with records in offset order per partition, and with the
            partitions whose end was reached: partition -> next offset.
    """

    def __init__(
        self,
        settings: ClusterSettings,
        topic: str,
        partitions: int,
        *,
        group_id: str,
        on_records: Callable[[Sequence[FollowedRecord], dict[int, int]], None],
    ) -> None:
        self._settings = settings
        self._topic = topic
        self._partitions = partitions
        self._group_id = group_id
        self._on_records = on_records
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="state-follower", daemon=True)

    def start(self) -> None:
        """Begin to read."""
        self._thread.start()

    def stop(self) -> None:
        """Ask the thread to end; it does within a poll."""
        self._stopping.set()

    def is_alive(self) -> bool:
        """Whether the thread still runs."""
        return self._thread.is_alive()

    def join(self, timeout_s: float) -> bool:
        """Wait for the thread; whether it ended."""
        if self._thread.ident is None:
            return True
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        client = consumer(
            self._settings,
            group_id=self._group_id,
            isolation_level="read_committed",
            auto_offset_reset="earliest",
            enable_partition_eof=True,
            # the topic is small: what is prefetched beyond this only takes memory
            queued_max_messages_kbytes=8_192,
        )
        try:
            self._find_leaders(client)
            client.assign([TopicPartition(self._topic, p, OFFSET_BEGINNING) for p in range(self._partitions)])
            while not self._stopping.is_set():
                self._read(client)
        finally:
            client.close()

    def _find_leaders(self, client: Consumer) -> None:
        """Ask once before anything is fetched: else the client waits half a second for its next look."""
        try:
            client.list_topics(self._topic, timeout=_LEADERS_S)
        except KafkaException as error:
            logger.info("leaders of %s not known yet: %s", self._topic, error.args[0].str())

    def _read(self, client: Consumer) -> None:
        records: list[FollowedRecord] = []
        ends: dict[int, int] = {}
        # a batch waits until it is full or its time is over: wait for one message, then take what is there
        messages = client.consume(1, _POLL_S)
        messages += client.consume(_BATCH, 0) if messages else []
        for message in messages:
            error = message.error()
            if error is None:
                records.append(_record(message))
            elif error.code() == KafkaError._PARTITION_EOF:  # noqa: SLF001 - the client's public name of it
                ends[_partition(message)] = _offset(message)
            else:
                logger.warning("reading %s: %s", self._topic, error.str())
                self._stopping.wait(_ERROR_PAUSE_S)
        if records or ends:
            self._on_records(records, ends)


def _record(message: Message) -> FollowedRecord:
    kind, timestamp = message.timestamp()
    return FollowedRecord(
        _partition(message),
        _offset(message),
        0 if kind == TIMESTAMP_NOT_AVAILABLE else timestamp,
        _as_bytes(message.key()),
        _as_bytes(message.value()),
    )


def _partition(message: Message) -> int:
    partition = message.partition()
    return -1 if partition is None else partition


def _offset(message: Message) -> int:
    offset = message.offset()
    return -1 if offset is None else offset


def _as_bytes(data: str | bytes | None) -> bytes | None:
    return data.encode() if isinstance(data, str) else data
