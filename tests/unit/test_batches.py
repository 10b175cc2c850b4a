"""Record batch bytes: round trips, header changes, varints, codecs."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kmirror_dagster.broker import batches, codecs
from kmirror_dagster.broker.batches import RawRecord
from kmirror_dagster.errors import UnsupportedDataError
from kmirror_dagster.replication.filler import BATCH_RECORDS, PAYLOAD, filler_batch

nullable = st.none() | st.binary(max_size=40)
header_lists = st.lists(st.tuples(st.binary(max_size=10), nullable), max_size=5)
payloads = st.builds(batches.encode_payload, nullable, nullable, header_lists)
records = st.lists(st.tuples(st.integers(0, 2**45), payloads), min_size=1, max_size=30).map(
    lambda items: [RawRecord(offset, timestamp, payload) for offset, (timestamp, payload) in enumerate(items)]
)


def only_header(data: "bytes | memoryview") -> batches.BatchHeader:
    """Header of the single batch in some bytes."""
    (header,) = batches.headers(memoryview(data))
    return header


@given(st.integers(-(2**63), 2**63 - 1))
def test_varints_come_back(value: int) -> None:
    """What is written as a varint is read as the same number, and nothing behind it is taken."""
    data = batches.write_varint(value)
    assert batches.read_varint(data + b"\xff", 0) == (value, len(data))


@given(records, st.sampled_from(sorted(codecs.NAMES)))
def test_encoded_records_come_back(items: list[RawRecord], codec: int) -> None:
    """Records survive encoding with any codec, with a right CRC and consecutive offsets."""
    data = batches.encode_batch(items, codec=codec, producer_id=5, producer_epoch=1, base_sequence=9)
    header = only_header(data)
    assert batches.is_intact(memoryview(data), header)
    assert (header.record_count, header.last_offset_delta, header.base_sequence) == (
        len(items),
        len(items) - 1,
        9,
    )
    assert batches.decode_records(memoryview(data), header) == items


@given(records, st.integers(0, 2**31 - 1), st.booleans())
def test_stamping_changes_the_producer_and_nothing_else(
    items: list[RawRecord], sequence: int, transactional: bool
) -> None:
    """A passed-through batch keeps its records and gets identity, sequence, flag and a right CRC."""
    data = bytearray(
        batches.encode_batch(items, codec=codecs.LZ4, producer_id=1, producer_epoch=0, base_sequence=0)
    )
    before = only_header(data)
    batches.stamp(
        memoryview(data),
        before,
        producer_id=77,
        producer_epoch=3,
        base_sequence=sequence,
        transactional=transactional,
    )
    after = only_header(data)
    assert batches.is_intact(memoryview(data), after)
    assert (after.producer_id, after.producer_epoch, after.base_sequence) == (77, 3, sequence)
    assert after.is_transactional is transactional
    assert after.base_offset == 0
    assert batches.decode_records(memoryview(data), after) == items


def test_damage_is_seen() -> None:
    """A flipped bit in the records makes the batch not intact."""
    data = bytearray(batches.encode_batch([RawRecord(0, 1, batches.encode_payload(b"k", b"v"))]))
    data[-1] ^= 1
    assert not batches.is_intact(memoryview(data), only_header(data))


@given(st.integers(0, 60), st.sampled_from([10, 3_000]))
def test_stamping_does_not_hide_damage(bit: int, size: int) -> None:
    """A batch that was damaged, in its header or its records, still is when it has another producer."""
    items = [RawRecord(offset, 1, batches.encode_payload(b"k", bytes(size))) for offset in range(40)]
    data = bytearray(batches.encode_batch(items, producer_id=1, producer_epoch=0, base_sequence=0))
    at = 43 if bit < 16 else len(data) - 1 - bit  # the producer id, which is replaced, or a record
    data[at] ^= 1 << bit % 8
    batches.stamp(memoryview(data), only_header(data), 77, 3, 5)
    assert not batches.is_intact(memoryview(data), only_header(data))


def test_a_cut_last_batch_is_left_out() -> None:
    """Fetch answers may end in the middle of a batch."""
    data = batches.encode_batch([RawRecord(0, 1, batches.encode_payload(b"k", b"v"))])
    assert len(list(batches.headers(memoryview(data + data[:-1])))) == 1
    assert list(batches.headers(memoryview(data[:30]))) == []


def test_old_message_formats_are_refused_by_name() -> None:
    """Message format v1 is named with its offset instead of being misread."""
    data = bytearray(80)
    data[16] = 1
    with pytest.raises(UnsupportedDataError, match="message format v1 at offset 0"):
        list(batches.headers(memoryview(data)))


@given(st.integers(0, batches.MAX_SEQUENCE), st.integers(1, 1_000_000))
def test_sequences_wrap_like_the_brokers(base: int, count: int) -> None:
    """Sequence numbers stay in 0..2^31-1 (KIP-98)."""
    assert batches.next_sequence(base, count) == (base + count) % 2**31


@pytest.mark.parametrize("count", [1, 2, 63, 64, 65, 8_191, 8_192, 8_193, 70_000])
def test_filler_of_any_length_is_a_valid_batch(count: int) -> None:
    """A shorter filler batch is a prefix of the longest one."""
    data = filler_batch(count, 1_000, producer_id=1, producer_epoch=0, base_sequence=0)
    header = only_header(data)
    assert batches.is_intact(memoryview(data), header)
    decoded = batches.decode_records(memoryview(data), header)
    assert [record.offset for record in decoded] == list(range(count))
    assert {record.payload for record in decoded} == {PAYLOAD}


def test_the_longest_filler_is_small() -> None:
    """Half a million offsets take a few kilobytes."""
    assert len(filler_batch(BATCH_RECORDS, 1, producer_id=1, producer_epoch=0, base_sequence=0)) < 2_000_000


@pytest.mark.parametrize("codec", [codecs.GZIP, codecs.SNAPPY, codecs.LZ4, codecs.ZSTD])
def test_bytes_that_do_not_inflate_are_named(codec: int) -> None:
    """Damaged compressed records end in a named error."""
    with pytest.raises(UnsupportedDataError, match=codecs.NAMES[codec]):
        codecs.decompress(codec, b"\x82SNAPPY\x00\x00\x00\x00\x01\x00\x00\x00\x01\x00\x00\x00\x04abcd")
