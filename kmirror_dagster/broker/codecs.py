"""Kafka's compression codecs (record batch attributes, bits 0-2), for the rare batches that must be re-encoded."""

import struct

import cramjam
import lz4.frame

from kmirror_dagster.errors import UnsupportedDataError

NONE, GZIP, SNAPPY, LZ4, ZSTD = range(5)
NAMES = {NONE: "none", GZIP: "gzip", SNAPPY: "snappy", LZ4: "lz4", ZSTD: "zstd"}

# snappy-java's stream framing, which Kafka's own clients write: magic, version, compatible version, then blocks
_XERIAL_MAGIC = b"\x82SNAPPY\x00"
_XERIAL_HEADER = _XERIAL_MAGIC + struct.pack(">ii", 1, 1)
_XERIAL_BLOCK_BYTES = 32 * 1024


def decompress(codec: int, data: "bytes | memoryview") -> bytes:
    """Inflate the records part of a batch.

    Raises:
        UnsupportedDataError: unknown codec, or bytes that do not inflate.
    """
    raw = bytes(data)
    try:
        if codec == NONE:
            return raw
        if codec == GZIP:
            return bytes(cramjam.gzip.decompress(raw))
        if codec == SNAPPY:
            return _snappy_decompress(raw)
        if codec == LZ4:
            return lz4.frame.decompress(raw)
        if codec == ZSTD:
            return bytes(cramjam.zstd.decompress(raw))
    except (cramjam.DecompressionError, struct.error, RuntimeError) as error:
        raise UnsupportedDataError(f"a {NAMES[codec]} batch does not decompress: {error}") from error
    raise UnsupportedDataError(f"unknown compression codec {codec}")


def compress(codec: int, data: bytes) -> bytes:
    """Deflate the records part of a batch with the codec the source used."""
    if codec == NONE:
        return data
    if codec == GZIP:
        return bytes(cramjam.gzip.compress(data))
    if codec == SNAPPY:
        return _snappy_compress(data)
    if codec == LZ4:
        # brokers refuse frames whose blocks depend on each other
        return lz4.frame.compress(data, block_linked=False, block_size=lz4.frame.BLOCKSIZE_MAX64KB)
    if codec == ZSTD:
        return bytes(cramjam.zstd.compress(data))
    raise UnsupportedDataError(f"unknown compression codec {codec}")


def _snappy_decompress(raw: bytes) -> bytes:
    if not raw.startswith(_XERIAL_MAGIC):
        return bytes(cramjam.snappy.decompress_raw(raw))
    parts: list[bytes] = []
    position = len(_XERIAL_HEADER)
    while position < len(raw):
        (size,) = struct.unpack_from(">i", raw, position)
        position += 4
        parts.append(bytes(cramjam.snappy.decompress_raw(raw[position : position + size])))
        position += size
    return b"".join(parts)


def _snappy_compress(data: bytes) -> bytes:
    parts = [_XERIAL_HEADER]
    for start in range(0, len(data), _XERIAL_BLOCK_BYTES):
        block = bytes(cramjam.snappy.compress_raw(data[start : start + _XERIAL_BLOCK_BYTES]))
        parts += (struct.pack(">i", len(block)), block)
    return b"".join(parts)
