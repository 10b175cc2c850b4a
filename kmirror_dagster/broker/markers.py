"""WriteTxnMarkers (API 27) packed by hand, version 1: thousands of control records in one request.

Each entry appends one control batch with one record. Needs CLUSTER_ACTION or ALTER on the cluster.
"""

import struct
from collections.abc import Sequence
from typing import NamedTuple

from kmirror_dagster.broker.varints import append_uvarint, skip_tags, uvarint

API_KEY = 27
VERSION = 1

_ABORT = 0
_ENTRY = struct.Struct(">qhb")
_INT = struct.Struct(">i")
_LONG = struct.Struct(">q")


class Markers(NamedTuple):
    """Abort markers for one partition: `number` of them, under a producer identity."""

    topic: str
    partition: int
    number: int
    producer_id: int
    producer_epoch: int
    coordinator_epoch: int


def request(entries: Sequence[Markers], *, correlation_id: int, client_id: str) -> bytes:
    """One framed request.

    The broker refuses an entry whose producer epoch or coordinator epoch is older than what the partition saw of that
    producer.
    """
    client = client_id.encode()
    out = bytearray(4)
    out += struct.pack(">hhih", API_KEY, VERSION, correlation_id, len(client)) + client + b"\0"
    append_uvarint(out, sum(entry.number for entry in entries) + 1)
    for entry in entries:
        one = bytearray(_ENTRY.pack(entry.producer_id, entry.producer_epoch, _ABORT))
        name = entry.topic.encode()
        append_uvarint(one, 2)  # one topic
        append_uvarint(one, len(name) + 1)
        one += name
        append_uvarint(one, 2)  # one partition
        one += _INT.pack(entry.partition) + b"\0" + _INT.pack(entry.coordinator_epoch) + b"\0"
        out += bytes(one) * entry.number
    out += b"\0"
    _INT.pack_into(out, 0, len(out) - 4)
    return bytes(out)


def answer(view: memoryview) -> dict[tuple[str, int], int]:
    """Kafka's error code by topic and partition; 0 where all markers were written."""
    found: dict[tuple[str, int], int] = {}
    position = skip_tags(view, 4)
    markers, position = uvarint(view, position)
    for _ in range(markers - 1):
        position += _LONG.size  # producer id
        topics, position = uvarint(view, position)
        for _ in range(topics - 1):
            size, position = uvarint(view, position)
            topic = bytes(view[position : position + size - 1]).decode()
            partitions, position = uvarint(view, position + size - 1)
            for _ in range(partitions - 1):
                index, code = struct.unpack_from(">ih", view, position)
                position = skip_tags(view, position + 6)
                found[topic, index] = found.get((topic, index)) or code
            position = skip_tags(view, position)
        position = skip_tags(view, position)
    return found
