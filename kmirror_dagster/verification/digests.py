"""Digests of records that can be added up: of a range from those of its parts, in any division. Pure.

A range's digest is the sum, modulo 2^256, of the BLAKE2b-256 hashes of its records; each hash covers the record's
offset, so records that changed places count as changed. What one byte of it means is stated in `encode`, so that
anybody can compute it again from a consumer. It finds accidents and careless hands: it is no signature against
somebody who can choose the contents of billions of records.
"""

import struct
from collections.abc import Iterable
from dataclasses import dataclass
from hashlib import blake2b

from kmirror_dagster.broker.log_records import HEADERS, KEY, OFFSET, TIMESTAMP, VALUE, LogRecord

_BYTES = 32
_MODULUS = 1 << (8 * _BYTES)
_FIXED = struct.Struct(">qqi")
_LENGTH = struct.Struct(">i")
# length of a null key, value or header value, as in Kafka's protocol
_NULL = -1


@dataclass(frozen=True)
class Digest:
    """Sum over some records; equal digests of equal counts mean equal records."""

    total: int = 0
    records: int = 0

    def __add__(self, other: "Digest") -> "Digest":
        return Digest((self.total + other.total) % _MODULUS, self.records + other.records)

    def __sub__(self, other: "Digest") -> "Digest":
        return Digest((self.total - other.total) % _MODULUS, self.records - other.records)

    @property
    def hex(self) -> str:
        """The sum as 64 hexadecimal digits."""
        return f"{self.total:064x}"

    @classmethod
    def from_hex(cls, text: str, records: int) -> "Digest":
        """Read back what `hex` wrote.

        Raises:
            ValueError: when the text is no such sum.
        """
        total = int(text, 16)
        if not 0 <= total < _MODULUS:
            raise ValueError(f"{text!r} is no digest")
        return cls(total, records)


def encode(record: LogRecord) -> bytes:
    """What is hashed of one record; no two different records have the same encoding.

    Big-endian: offset (8 bytes), timestamp in ms (8), length of the key (4, -1: null), key, length of the value (4,
    -1: null), value, number of headers (4), then of each header the length of its name in UTF-8 (4), name, length of
    its value (4, -1: null), value. The timestamp's type is left out: LogAppendTime becomes CreateTime in a copy.
    """
    key, value, headers = record[KEY], record[VALUE], record[HEADERS]
    parts = [
        _FIXED.pack(record[OFFSET], record[TIMESTAMP], _NULL if key is None else len(key)),
        key or b"",
        _LENGTH.pack(_NULL if value is None else len(value)),
        value or b"",
    ]
    if not headers:
        parts.append(b"\0\0\0\0")
    else:
        parts.append(_LENGTH.pack(len(headers)))
        for name, content in headers:
            encoded = name.encode()
            parts += (
                _LENGTH.pack(len(encoded)),
                encoded,
                _LENGTH.pack(_NULL if content is None else len(content)),
                content or b"",
            )
    return b"".join(parts)


def digest_of(records: Iterable[LogRecord]) -> Digest:
    """Digest of records, of whatever range they are."""
    total = count = 0
    for record in records:
        total += int.from_bytes(blake2b(encode(record), digest_size=_BYTES).digest(), "big")
        count += 1
    return Digest(total % _MODULUS, count)
