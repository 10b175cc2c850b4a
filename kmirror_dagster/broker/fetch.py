"""Fetch (API 1) packed by hand, versions 12 and 13, with incremental fetch sessions (KIP-227).

Versions: 12 sends the last fetched epoch (KIP-595), so the source reports truncation; 13 names topics by id (KIP-516),
so a recreated topic is noticed. Readers are ordinary consumers (replica id -1) at read_committed: every transaction
they see is decided.
"""

import struct
from dataclasses import dataclass, field
from typing import NamedTuple

from kmirror_dagster.broker.varints import append_uvarint, skip_tags, uvarint

API_KEY = 1
LOWEST_VERSION = 12
HIGHEST_VERSION = 13
READ_COMMITTED = 1

_PARTITION = struct.Struct(">iiqiqi")
_ANSWER = struct.Struct(">ihqqq")
_ABORTED = struct.Struct(">qq")
_ZERO_ID = bytes(16)

TopicPartition = tuple[str, int]


@dataclass(frozen=True)
class FetchPosition:
    """What to read next of one partition."""

    topic_id: bytes
    offset: int
    leader_epoch: int = -1
    last_epoch: int = -1
    max_bytes: int = 1 << 20


class AbortedTransaction(NamedTuple):
    """Entry of the aborted transactions list: who aborted, and where its first record is."""

    producer_id: int
    first_offset: int


class FetchedPartition(NamedTuple):
    """One partition of an answer. Offsets are -1 when the broker did not give them."""

    topic: str
    partition: int
    error_code: int
    high_watermark: int
    last_stable_offset: int
    log_start_offset: int
    aborted: tuple[AbortedTransaction, ...]
    records: memoryview
    diverging_end_offset: int


@dataclass
class FetchSession:
    """Incremental fetch session with one broker: only what changed is sent and answered."""

    session_id: int = 0
    epoch: int = 0
    isolation: int = READ_COMMITTED
    sent: dict[TopicPartition, FetchPosition] = field(default_factory=dict[TopicPartition, FetchPosition])
    names: dict[bytes, str] = field(default_factory=dict[bytes, str])

    def reset(self) -> None:
        """Start a new session with the next request."""
        self.session_id = 0
        self.epoch = 0
        self.sent.clear()

    @property
    def is_new(self) -> bool:
        """Whether the next request opens a session: it must name everything wanted."""
        return self.epoch == 0

    def request(
        self,
        changed: dict[TopicPartition, FetchPosition],
        forgotten: list[TopicPartition],
        *,
        version: int,
        correlation_id: int,
        client_id: str,
        max_wait_ms: int,
        min_bytes: int,
        max_bytes: int,
    ) -> bytes:
        """Frame that moves the session's positions and asks for what there is.

        Args:
            changed: partitions to read from other positions than before, or for the first time.
            forgotten: partitions of the session that are not to be read for now.
            version: 12 or 13.
            correlation_id: of the connection.
            client_id: for the broker's logs and quotas.
            max_wait_ms: how long the broker may hold the answer back while there is nothing.
            min_bytes: how much there must be for it to answer earlier.
            max_bytes: how much it may answer, all partitions together.
        """
        out = bytearray(4)
        client = client_id.encode()
        out += struct.pack(">hhih", API_KEY, version, correlation_id, len(client)) + client + b"\0"
        out += struct.pack(
            ">iiiibii", -1, max_wait_ms, min_bytes, max_bytes, self.isolation, self.session_id, self.epoch
        )
        by_topic: dict[str, list[tuple[int, FetchPosition]]] = {}
        for (topic, partition), position in changed.items():
            by_topic.setdefault(topic, []).append((partition, position))
        append_uvarint(out, len(by_topic) + 1)
        for topic, entries in by_topic.items():
            self._append_topic(out, topic, entries[0][1].topic_id, version)
            append_uvarint(out, len(entries) + 1)
            for partition, p in entries:
                out += _PARTITION.pack(partition, p.leader_epoch, p.offset, p.last_epoch, -1, p.max_bytes)
                out.append(0)
            out.append(0)
        self._append_forgotten(out, forgotten, version)
        out += b"\1\0"  # rack id "" and no tags
        struct.pack_into(">i", out, 0, len(out) - 4)
        for tp in forgotten:
            self.sent.pop(tp, None)
        self.sent.update(changed)
        return bytes(out)

    def _append_topic(self, out: bytearray, topic: str, topic_id: bytes, version: int) -> None:
        if version >= 13:
            self.names[topic_id] = topic
            out += topic_id
        else:
            name = topic.encode()
            append_uvarint(out, len(name) + 1)
            out += name

    def _append_forgotten(self, out: bytearray, forgotten: list[TopicPartition], version: int) -> None:
        by_topic: dict[str, list[int]] = {}
        for topic, partition in forgotten:
            by_topic.setdefault(topic, []).append(partition)
        append_uvarint(out, len(by_topic) + 1)
        for topic, partitions in by_topic.items():
            self._append_topic(out, topic, self.sent[topic, partitions[0]].topic_id, version)
            append_uvarint(out, len(partitions) + 1)
            out += struct.pack(f">{len(partitions)}i", *partitions)
            out.append(0)

    def answer(self, view: memoryview, version: int) -> "FetchAnswer":
        """Read an answer and move the session on; records stay views into `view`."""
        position = skip_tags(view, 4)  # correlation id, then header tags
        _, error_code, session_id = struct.unpack_from(">ihi", view, position)
        position += 10
        partitions: list[FetchedPartition] = []
        topics, position = uvarint(view, position)
        for _ in range(topics - 1):
            if version >= 13:
                topic = self.names.get(bytes(view[position : position + 16]), "")
                position += 16
            else:
                size, position = uvarint(view, position)
                topic = bytes(view[position : position + size - 1]).decode()
                position += size - 1
            count, position = uvarint(view, position)
            for _ in range(count - 1):
                fetched, position = _read_partition(view, position, topic)
                partitions.append(fetched)
            position = skip_tags(view, position)
        if error_code:
            self.reset()
        elif session_id == 0:
            self.reset()  # the broker keeps no session for us: ask in full each time
        else:
            self.session_id = session_id
            self.epoch = self.epoch + 1 if self.epoch < 0x7FFFFFFF else 1
        return FetchAnswer(error_code, partitions)


@dataclass(frozen=True)
class FetchAnswer:
    """Error of the whole request (0: none) and what came for each partition."""

    error_code: int
    partitions: list[FetchedPartition]


def _read_partition(view: memoryview, position: int, topic: str) -> tuple[FetchedPartition, int]:
    index, error_code, high_watermark, stable, log_start = _ANSWER.unpack_from(view, position)
    position += _ANSWER.size
    count, position = uvarint(view, position)
    aborted: list[AbortedTransaction] = []
    for _ in range(count - 1):
        aborted.append(AbortedTransaction(*_ABORTED.unpack_from(view, position)))
        position = skip_tags(view, position + 16)
    position += 4  # preferred read replica: only given to readers that name a rack
    size, position = uvarint(view, position)
    length = max(size - 1, 0)
    records = view[position : position + length]
    diverging, position = _read_tags(view, position + length)
    fetched = FetchedPartition(
        topic, index, error_code, high_watermark, stable, log_start, tuple(aborted), records, diverging
    )
    return fetched, position


def _read_tags(view: memoryview, position: int) -> tuple[int, int]:
    """End offset of the diverging epoch (tag 0), -1 without one, and the position behind the tags."""
    diverging = -1
    count, position = uvarint(view, position)
    for _ in range(count):
        tag, position = uvarint(view, position)
        size, position = uvarint(view, position)
        if tag == 0 and size >= 12:
            _, diverging = struct.unpack_from(">iq", view, position)
        position += size
    return diverging, position


def topic_id_bytes(topic_id: "bytes | None") -> bytes:
    """Sixteen bytes for the wire; zero when a topic has no id."""
    return topic_id or _ZERO_ID
