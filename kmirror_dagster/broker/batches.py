"""Bytes of record batches, message format v2 (Kafka protocol guide, "Record Batch").

A batch is 61 bytes of header and its records, compressed as one. Passing a batch on touches only the header; only
what cannot be passed on as it is (cut in the middle, holes inside, append-time stamps) is decoded and encoded again.
"""

import struct
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from crc32c import crc32c

from kmirror_dagster.broker import codecs
from kmirror_dagster.errors import UnsupportedDataError

Buffer = bytes | bytearray | memoryview

HEADER_BYTES = 61
_LENGTH_OFFSET = 12  # base offset and the length field itself are not counted in batch_length
_CRC_START = 21  # CRC-32C covers everything from the attributes on
_HEADER = struct.Struct(">qiibIhiqqqhii")
_BODY = struct.Struct(">hiqqqhii")  # attributes .. record count
_PREFIX = struct.Struct(">qii")  # base offset, batch length, partition leader epoch
_CRC = struct.Struct(">I")
_CRC_AT = 17
_MAGIC_AT = 16
# small enough to stay in the processor's cache
_ZEROS = memoryview(bytes(64 * 1024))
_INVERTED = 0xFFFFFFFF

COMPRESSION_MASK = 0x07
LOG_APPEND_TIME = 0x08
TRANSACTIONAL = 0x10
CONTROL = 0x20
DELETE_HORIZON = 0x40

NO_PRODUCER = -1
MAX_SEQUENCE = 0x7FFFFFFF


class BatchHeader(NamedTuple):
    """Header of one batch and where it lies in its buffer (`start` to `end`, bytes)."""

    start: int
    end: int
    base_offset: int
    leader_epoch: int
    magic: int
    crc: int
    attributes: int
    last_offset_delta: int
    base_timestamp: int
    max_timestamp: int
    producer_id: int
    producer_epoch: int
    base_sequence: int
    record_count: int

    @property
    def last_offset(self) -> int:
        """Offset of the last record, deleted ones included."""
        return self.base_offset + self.last_offset_delta

    @property
    def next_offset(self) -> int:
        """Offset behind this batch."""
        return self.base_offset + self.last_offset_delta + 1

    @property
    def is_control(self) -> bool:
        """Whether this is a control batch (transaction marker)."""
        return bool(self.attributes & CONTROL)

    @property
    def is_transactional(self) -> bool:
        """Whether the batch belongs to a transaction."""
        return bool(self.attributes & TRANSACTIONAL)

    @property
    def codec(self) -> int:
        """Compression codec id."""
        return self.attributes & COMPRESSION_MASK


class RawRecord(NamedTuple):
    """One record: `payload` is key, value and headers in wire form, one slice."""

    offset: int
    timestamp: int
    payload: bytes


def headers(view: memoryview) -> Iterator[BatchHeader]:
    """Headers of all complete batches in the records field of a Fetch answer; a cut last batch is left out.

    Raises:
        UnsupportedDataError: message format v0 or v1.
    """
    position, end = 0, len(view)
    while end - position >= _MAGIC_AT + 1:
        magic = view[position + _MAGIC_AT]
        if magic != 2:
            (offset,) = struct.unpack_from(">q", view, position)
            raise UnsupportedDataError(
                f"message format v{magic} at offset {offset}: only v2 (Kafka 0.11 and later) is mirrored; "
                "rewrite the topic with a current producer"
            )
        if end - position < HEADER_BYTES:
            return
        fields = _HEADER.unpack_from(view, position)
        batch_end = position + _LENGTH_OFFSET + fields[1]
        if batch_end > end:
            return
        yield BatchHeader(position, batch_end, fields[0], *fields[2:])
        position = batch_end


def is_intact(view: memoryview, header: BatchHeader) -> bool:
    """Whether the batch's CRC-32C is right. Checked before the header is changed, so damage is never sealed in."""
    return crc32c(view[header.start + _CRC_START : header.end]) == header.crc


def stamp(
    view: memoryview,
    header: BatchHeader,
    producer_id: int,
    producer_epoch: int,
    base_sequence: int,
    *,
    transactional: bool = False,
) -> memoryview:
    """Make a fetched batch ready for Produce, in place: own producer, base offset 0, new CRC-32C.

    The CRC is moved by what the header's change does to it, so a damaged batch stays damaged, and the destination
    refuses it: nothing needs to read the records here.

    Returns:
        The batch's bytes.
    """
    start = header.start
    before = crc32c(view[start + _CRC_START : start + HEADER_BYTES])
    attributes = header.attributes & ~(TRANSACTIONAL | DELETE_HORIZON)
    if transactional:
        attributes |= TRANSACTIONAL
    _PREFIX.pack_into(view, start, 0, header.end - start - _LENGTH_OFFSET, -1)
    _BODY.pack_into(
        view,
        start + _CRC_START,
        attributes,
        header.last_offset_delta,
        header.base_timestamp,
        header.max_timestamp,
        producer_id,
        producer_epoch,
        base_sequence,
        header.record_count,
    )
    change = before ^ crc32c(view[start + _CRC_START : start + HEADER_BYTES])
    crc = header.crc ^ _behind_zeros(change, header.end - start - HEADER_BYTES)
    _CRC.pack_into(view, start + _CRC_AT, crc)
    return view[start : header.end]


def _behind_zeros(difference: int, count: int) -> int:
    """What a difference of two CRCs becomes when `count` more equal bytes follow (CRCs are linear)."""
    value = difference ^ _INVERTED
    while count > len(_ZEROS):
        value = crc32c(_ZEROS, value)
        count -= len(_ZEROS)
    return crc32c(_ZEROS[:count], value) ^ _INVERTED


def next_sequence(base_sequence: int, count: int) -> int:
    """Base sequence of the batch behind one of `count` records; wraps like the broker's (KIP-98)."""
    following = base_sequence + count
    return following if following <= MAX_SEQUENCE else following - MAX_SEQUENCE - 1


def decode_records(view: Buffer, header: BatchHeader) -> list[RawRecord]:
    """Records of a batch, oldest first, decompressed.

    Raises:
        UnsupportedDataError: unknown codec or bytes that are no records.
    """
    data = codecs.decompress(header.codec, memoryview(view)[header.start + HEADER_BYTES : header.end])
    append_time = header.max_timestamp if header.attributes & LOG_APPEND_TIME else None
    records: list[RawRecord] = []
    position = 0
    try:
        for _ in range(header.record_count):
            length, position = read_varint(data, position)
            end = position + length
            timestamp_delta, at = read_varint(data, position + 1)  # one attributes byte in front, unused
            offset_delta, at = read_varint(data, at)
            timestamp = header.base_timestamp + timestamp_delta if append_time is None else append_time
            records.append(RawRecord(header.base_offset + offset_delta, timestamp, data[at:end]))
            position = end
    except IndexError as error:
        raise UnsupportedDataError(f"batch at offset {header.base_offset} ends inside a record") from error
    return records


def encode_batch(
    records: Sequence[RawRecord],
    producer_id: int = NO_PRODUCER,
    producer_epoch: int = NO_PRODUCER,
    base_sequence: int = NO_PRODUCER,
    *,
    codec: int = codecs.NONE,
    transactional: bool = False,
) -> bytes:
    """One batch of records with consecutive offsets, ready for Produce (base offset 0)."""
    first_timestamp = records[0].timestamp
    parts: list[bytes] = []
    for delta, record in enumerate(records):
        head = b"\0" + write_varint(record.timestamp - first_timestamp) + write_varint(delta)
        parts += (write_varint(len(head) + len(record.payload)), head, record.payload)
    return seal(
        codecs.compress(codec, b"".join(parts)),
        count=len(records),
        base_timestamp=first_timestamp,
        max_timestamp=max(record.timestamp for record in records),
        codec=codec,
        producer_id=producer_id,
        producer_epoch=producer_epoch,
        base_sequence=base_sequence,
        transactional=transactional,
    )


def join(view: memoryview, run: Sequence[BatchHeader]) -> bytes:
    """Make whole batches of one codec, behind each other, into one without a producer.

    Only a record's length, timestamp delta and offset delta are written anew; key, value and headers are moved as
    one slice.

    Raises:
        UnsupportedDataError: a batch does not decompress.
    """
    codec = run[0].codec
    first_offset, first_timestamp = run[0].base_offset, run[0].base_timestamp
    max_timestamp = first_timestamp
    parts: list[bytes | memoryview] = []
    for header in run:
        start, end = header.start + HEADER_BYTES, header.end
        data: bytes | memoryview = (
            view[start:end] if codec == codecs.NONE else codecs.decompress(codec, view[start:end])
        )
        if header.max_timestamp > max_timestamp:
            max_timestamp = header.max_timestamp
        _rebase(
            data,
            header.record_count,
            header.base_offset - first_offset,
            header.base_timestamp - first_timestamp,
            parts,
        )
    body = b"".join(parts)
    return seal(
        codecs.compress(codec, body),
        count=run[-1].next_offset - first_offset,
        base_timestamp=first_timestamp,
        max_timestamp=max_timestamp,
        codec=codec,
    )


def _rebase(
    data: "bytes | memoryview",
    count: int,
    offset_shift: int,
    timestamp_shift: int,
    parts: "list[bytes | memoryview]",
) -> None:
    """Append records with their deltas shifted."""
    short, many = _SHORT_VARINTS, len(_SHORT_VARINTS)
    position = 0
    try:
        for _ in range(count):
            # varints of one or two bytes are read here: this is most of the work of mirroring tiny batches
            length = data[position]
            if length < 0x80:
                length >>= 1
                position += 1
            elif data[position + 1] < 0x80:
                length = (length & 0x7F | data[position + 1] << 7) >> 1
                position += 2
            else:
                length, position = read_varint(data, position)
            end = position + length
            # one attributes byte in front, unused
            first, second = data[position + 1], data[position + 2]
            if first < 0x80 and second < 0x80:
                timestamp_delta = ((first >> 1) ^ -(first & 1)) + timestamp_shift
                offset_delta = (second >> 1) + offset_shift
                at = position + 3
            else:
                timestamp_delta, at = read_varint(data, position + 1)
                offset_delta, at = read_varint(data, at)
                timestamp_delta += timestamp_shift
                offset_delta += offset_shift
            time_part = (
                short[timestamp_delta] if 0 <= timestamp_delta < many else write_varint(timestamp_delta)
            )
            offset_part = short[offset_delta] if offset_delta < many else write_varint(offset_delta)
            size = 1 + len(time_part) + len(offset_part) + end - at
            size_part = short[size] if size < many else write_varint(size)
            parts += (size_part + b"\0" + time_part + offset_part, data[at:end])
            position = end
    except IndexError as error:
        raise UnsupportedDataError("a batch ends inside a record") from error


def seal(
    body: bytes,
    *,
    count: int,
    base_timestamp: int,
    max_timestamp: int,
    codec: int,
    producer_id: int = NO_PRODUCER,
    producer_epoch: int = NO_PRODUCER,
    base_sequence: int = NO_PRODUCER,
    transactional: bool = False,
) -> bytes:
    """Put a batch header in front of encoded (and compressed) records."""
    attributes = codec | (TRANSACTIONAL if transactional else 0)
    checked = (
        _BODY.pack(
            attributes,
            count - 1,
            base_timestamp,
            max_timestamp,
            producer_id,
            producer_epoch,
            base_sequence,
            count,
        )
        + body
    )
    length = HEADER_BYTES - _LENGTH_OFFSET + len(body)
    return _PREFIX.pack(0, length, -1) + struct.pack(">bI", 2, crc32c(checked)) + checked


def encode_payload(
    key: bytes | None, value: bytes | None, record_headers: Sequence[tuple[bytes, bytes | None]] = ()
) -> bytes:
    """Key, value and headers of one record in wire form."""
    parts = [_nullable(key), _nullable(value), write_varint(len(record_headers))]
    for name, content in record_headers:
        parts += (write_varint(len(name)), name, _nullable(content))
    return b"".join(parts)


def _nullable(data: bytes | None) -> bytes:
    return write_varint(-1) if data is None else write_varint(len(data)) + data


def read_varint(data: Buffer, position: int) -> tuple[int, int]:
    """One zig-zag varint (protocol guide, VARINT and VARLONG) and the position behind it."""
    shift = result = 0
    while True:
        byte = data[position]
        position += 1
        result |= (byte & 0x7F) << shift
        if byte < 0x80:
            return (result >> 1) ^ -(result & 1), position
        shift += 7


def write_varint(value: int) -> bytes:
    """Zig-zag varint of a signed 64-bit number."""
    encoded = (value << 1) ^ (value >> 63)
    if encoded < 0x80:
        return bytes((encoded,))
    out = bytearray()
    while encoded >= 0x80:
        out.append(encoded & 0x7F | 0x80)
        encoded >>= 7
    out.append(encoded)
    return bytes(out)


# lengths and deltas are nearly always small: looked up instead of encoded
_SHORT_VARINTS = [write_varint(value) for value in range(8_192)]
