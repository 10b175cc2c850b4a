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
    rounds = _rounds(entries)
    out = bytearray(4)
    out += struct.pack(">hhih", API_KEY, VERSION, correlation_id, len(client)) + client + b"\0"
    append_uvarint(out, sum(number for number, _ in rounds) + 1)
    for number, together in rounds:
        out += _marker(together) * number
    out += b"\0"
    _INT.pack_into(out, 0, len(out) - 4)
    return bytes(out)


def _rounds(entries: Sequence[Markers]) -> list[tuple[int, list[Markers]]]:
    """Markers of one identity for many partitions in one entry, which the broker appends in one go.

    Returns:
        How often an entry is repeated, and the partitions it names.
    """
    by_identity: dict[tuple[int, int, int], list[Markers]] = {}
    for entry in entries:
        by_identity.setdefault(entry[3:], []).append(entry)
    rounds: list[tuple[int, list[Markers]]] = []
    for group in by_identity.values():
        left = sorted(group, key=lambda entry: entry.number, reverse=True)
        done = 0
        while left:
            fewest = left[-1].number
            if fewest > done:
                rounds.append((fewest - done, list(left)))
                done = fewest
            left.pop()
    return rounds


def _marker(together: Sequence[Markers]) -> bytes:
    """One entry of the request: abort markers of one identity, one for each partition named."""
    first = together[0]
    out = bytearray(_ENTRY.pack(first.producer_id, first.producer_epoch, _ABORT))
    by_topic: dict[str, list[int]] = {}
    for entry in together:
        by_topic.setdefault(entry.topic, []).append(entry.partition)
    append_uvarint(out, len(by_topic) + 1)
    for topic, partitions in by_topic.items():
        name = topic.encode()
        append_uvarint(out, len(name) + 1)
        out += name
        append_uvarint(out, len(partitions) + 1)
        out += struct.pack(f">{len(partitions)}i", *partitions) + b"\0"
    out += _INT.pack(first.coordinator_epoch) + b"\0"
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
