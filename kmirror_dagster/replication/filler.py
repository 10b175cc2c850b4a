"""Filling a new log up to the source's log start: pure bytes.

A new log begins at offset 0, a source log seldom does. Records without content take the offsets in between and are
deleted at once (DeleteRecords), so that the destination's log starts where the source's does. They carry an empty
key, because compacted topics refuse records without one, and a header by which an interrupted filling is known.
"""

from functools import lru_cache

from kmirror_dagster.broker import batches, codecs

# Larger ones save requests but cost the broker memory while it validates them.
BATCH_RECORDS = 500_000

PAYLOAD = batches.encode_payload(b"", None, [(b"kmirror.filler", None)])


def filler_batch(
    count: int, timestamp: int, *, producer_id: int, producer_epoch: int, base_sequence: int
) -> bytes:
    """One compressed batch of `count` (at most BATCH_RECORDS) empty records."""
    body = _full_body()[: _body_length(count)]
    return batches.seal(
        codecs.compress(codecs.ZSTD if count > 1 else codecs.NONE, body),
        count=count,
        base_timestamp=timestamp,
        max_timestamp=timestamp,
        codec=codecs.ZSTD if count > 1 else codecs.NONE,
        producer_id=producer_id,
        producer_epoch=producer_epoch,
        base_sequence=base_sequence,
    )


@lru_cache(maxsize=1)
def _full_body() -> bytes:
    # the first n records of a batch are a prefix of those of a longer one: one body serves all sizes
    return b"".join(_record(delta) for delta in range(BATCH_RECORDS))


def _record(delta: int) -> bytes:
    inner = b"\0\0" + batches.write_varint(delta) + PAYLOAD
    return batches.write_varint(len(inner)) + inner


def _body_length(count: int) -> int:
    """Bytes of the first `count` records: a varint of an offset delta grows at 64, 8,192 and 1,048,576."""
    fixed = len(_record(0)) - 1
    length = 0
    below = 0
    for width, limit in ((1, 64), (2, 8_192), (3, 1_048_576)):
        upto = min(count, limit)
        length += max(upto - below, 0) * (fixed + width)
        below = limit
    return length
