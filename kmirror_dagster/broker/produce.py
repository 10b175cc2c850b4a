"""Produce (API 0) packed by hand, version 8: one batch per partition, many partitions per request.

Version 8 is the newest without compact encoding; a transactional batch sent with it makes the broker verify the
transaction with its coordinator (KIP-890, part 1), which is what compare-and-append relies on.
"""

import struct
from collections.abc import Sequence
from typing import NamedTuple

API_KEY = 0
VERSION = 8
ACKS_ALL = -1

_PARTITION = struct.Struct(">ii")
_ANSWER = struct.Struct(">ihqqqi")

Buffer = bytes | bytearray | memoryview


class Append(NamedTuple):
    """One batch for one partition."""

    topic: str
    partition: int
    batch: Buffer


class Appended(NamedTuple):
    """Answer for one partition; `base_offset` is -1 on errors."""

    topic: str
    partition: int
    error_code: int
    base_offset: int
    message: str | None


def request(
    appends: Sequence[Append],
    *,
    correlation_id: int,
    client_id: str,
    timeout_ms: int,
    transactional_id: str | None = None,
) -> list[Buffer]:
    """Buffers of one framed request, batches by reference (written with one gathered call)."""
    client = client_id.encode()
    head = bytearray(4)
    head += struct.pack(">hhih", API_KEY, VERSION, correlation_id, len(client)) + client
    if transactional_id is None:
        head += b"\xff\xff"
    else:
        name = transactional_id.encode()
        head += struct.pack(">h", len(name)) + name
    by_topic: dict[str, list[Append]] = {}
    for append in appends:
        by_topic.setdefault(append.topic, []).append(append)
    head += struct.pack(">hii", ACKS_ALL, timeout_ms, len(by_topic))
    buffers: list[Buffer] = []
    size = 0
    for topic, entries in by_topic.items():
        name = topic.encode()
        head += struct.pack(">h", len(name)) + name + struct.pack(">i", len(entries))
        for entry in entries:
            length = len(entry.batch)
            head += _PARTITION.pack(entry.partition, length)
            buffers += (head, entry.batch)
            size += len(head) + length
            head = bytearray()
    first = buffers[0]
    struct.pack_into(">i", first, 0, size - 4)  # pyright: ignore[reportArgumentType] - the first one is a bytearray
    return buffers


def answer(view: memoryview) -> list[Appended]:
    """Read an answer (version 8; correlation id in front)."""
    position = 4
    results: list[Appended] = []
    (topics,) = struct.unpack_from(">i", view, position)
    position += 4
    for _ in range(topics):
        topic, position = _string(view, position)
        (count,) = struct.unpack_from(">i", view, position)
        position += 4
        for _ in range(count):
            index, error_code, base_offset, _, _, errors = _ANSWER.unpack_from(view, position)
            position += _ANSWER.size
            detail: str | None = None
            for _ in range(max(errors, 0)):
                reason, position = _string(view, position + 4)
                detail = detail or reason
            message, position = _string(view, position)
            results.append(Appended(topic or "", index, error_code, base_offset, message or detail))

    return results


def _string(view: memoryview, position: int) -> tuple[str | None, int]:
    (size,) = struct.unpack_from(">h", view, position)
    position += 2
    if size < 0:
        return None, position
    return bytes(view[position : position + size]).decode(errors="replace"), position + size
