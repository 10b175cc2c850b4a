"""Keys and values of the state topic."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kmirror_dagster.errors import RecordCorruptError
from kmirror_dagster.lifecycle import DesiredState, MirrorState
from kmirror_dagster.records import (
    LeaderRecord,
    MirrorRecord,
    OffsetMapRecord,
    PartitionRecord,
    PositionRecord,
    Record,
    TopicRecord,
    decode,
    decode_key,
    encode_key,
    mirror_owner,
    partition_owner,
)

NAMES = st.text(min_size=1, max_size=30)
NUMBERS = st.integers(0, 2**53)
PARTITIONS = st.builds(
    PartitionRecord,
    mirror=NAMES,
    topic=NAMES,
    partition=st.integers(0, 10_000),
    state=st.sampled_from(list(MirrorState)),
    previous_state=st.sampled_from([None, *MirrorState]),
    leader_epoch=NUMBERS,
    state_epoch=NUMBERS,
    error=st.none() | st.text(max_size=100),
    retriable=st.booleans(),
    retry_attempt=st.integers(0, 50),
    producer_id=st.integers(-1, 2**53),
)
RECORDS = st.one_of(
    PARTITIONS,
    st.builds(
        MirrorRecord,
        mirror=NAMES,
        document=st.dictionaries(st.text(max_size=10), st.text(max_size=20) | st.integers() | st.none()),
        source_cluster_id=NAMES,
        destination_cluster_id=NAMES,
        created_ms=NUMBERS,
    ),
    st.builds(
        TopicRecord,
        mirror=NAMES,
        topic=NAMES,
        partitions=st.integers(0, 10_000),
        desired=st.sampled_from(list(DesiredState)),
        error=st.none() | st.text(max_size=50),
        source_configs=st.dictionaries(NAMES, st.none() | NAMES, max_size=3),
    ),
    st.builds(
        PositionRecord,
        mirror=NAMES,
        topic=NAMES,
        partition=st.integers(0, 10_000),
        source_cluster_id=NAMES,
        source_leader_epoch=st.integers(-1, 10_000),
        offset=NUMBERS,
        recorded_ms=NUMBERS,
        source_offset=st.none() | NUMBERS,
    ),
    st.builds(
        OffsetMapRecord,
        mirror=NAMES,
        topic=NAMES,
        partition=st.integers(0, 10_000),
        destination_topic_id=st.none() | NAMES,
        runs=st.lists(st.tuples(NUMBERS, NUMBERS), max_size=5).map(tuple),
    ),
    st.builds(
        LeaderRecord,
        coordinator_partition=st.integers(0, 1_000),
        node_id=NAMES,
        endpoint=NAMES,
        epoch=NUMBERS,
        since_ms=NUMBERS,
    ),
)

STOPPED = PartitionRecord(mirror="m", topic="t", partition=3, state=MirrorState.STOPPED)


@given(record=RECORDS)
def test_record_round_trip(record: Record) -> None:
    """What was written is what is read, for any text in names and values."""
    assert decode(record.key(), record.value()) == record


@given(record=RECORDS, junk=st.binary(max_size=40))
def test_junk_is_refused_and_never_guessed_at(record: Record, junk: bytes) -> None:
    """A value or key of arbitrary bytes is a named error, nothing else."""
    for key, value in ((record.key(), junk), (junk, record.value())):
        try:
            decode(key, value)
        except RecordCorruptError as error:
            assert str(error)


@given(record=RECORDS, cut=st.integers(0, 10_000))
def test_truncated_value_is_refused(record: Record, cut: int) -> None:
    """A value that lost its end is refused."""
    value = record.value()
    with pytest.raises(RecordCorruptError):
        decode(record.key(), value[: cut % len(value)])


def changed(record: Record, **fields: Any) -> bytes:
    """Value of a record with some fields replaced; None removes one."""
    document = json.loads(record.value()) | fields
    return json.dumps({key: value for key, value in document.items() if value is not None}).encode()


@pytest.mark.parametrize("version", [0, 2, 99, "1", -1, 1.0, True, []])
def test_unknown_version_is_refused(version: Any) -> None:
    """Versions above the reader's own, and what is no version, are refused."""
    with pytest.raises(RecordCorruptError, match="schema version"):
        decode(STOPPED.key(), changed(STOPPED, v=version))


def test_missing_version_is_refused() -> None:
    """A value without a version is not taken for the newest one."""
    with pytest.raises(RecordCorruptError, match="schema version"):
        decode(STOPPED.key(), changed(STOPPED, v=None))


def test_field_of_a_later_writer_is_passed_over() -> None:
    """Fields a reader does not know are ignored: they come with compatible changes."""
    assert decode(STOPPED.key(), changed(STOPPED, colour="blue")) == STOPPED


def test_unknown_state_is_refused() -> None:
    """A state that is none is a corrupt record, not FAILED or anything else."""
    with pytest.raises(RecordCorruptError, match="cannot be read"):
        decode(STOPPED.key(), changed(STOPPED, state="SLEEPING"))


def test_key_and_value_must_agree() -> None:
    """A value under another thing's key is refused."""
    with pytest.raises(RecordCorruptError, match="names another thing"):
        decode(encode_key("partition", "m", "t", 4), STOPPED.value())


def test_unknown_record_type_is_refused() -> None:
    """A record type of a later version is refused by name."""
    with pytest.raises(RecordCorruptError, match="unknown record type 'offset-map'"):
        decode(encode_key("offset-map", "m"), b"{}")


@pytest.mark.parametrize("key", [b"", b"null", b"[]", b'"m"', b"[null]", b'[["a"]]', b"\xff", b'{"a":1}'])
def test_malformed_key_is_refused(key: bytes) -> None:
    """Bytes that are no key of this format are refused."""
    with pytest.raises(RecordCorruptError):
        decode_key(key)


def test_keys_are_one_to_one() -> None:
    """Names that would run together stay apart."""
    keys = {encode_key("partition", *parts) for parts in (("a", "b-1", 0), ("a-b", "1", 0), ("a", "b", 10))}
    assert len(keys) == 3


def test_owner_is_the_documented_hash() -> None:
    """Homes of records are fixed for ever: other readers compute the same ones."""
    assert mirror_owner("orders", 50) == 12
    assert partition_owner("orders", "eu.orders", 7, 50) == 13


@given(mirror=NAMES, topic=NAMES, count=st.integers(1, 200))
def test_owner_is_one_of_the_coordinator_partitions(mirror: str, topic: str, count: int) -> None:
    """Any name has a home."""
    assert 0 <= mirror_owner(mirror, count) < count
    assert 0 <= partition_owner(mirror, topic, 0, count) < count


def test_partitions_spread_over_coordinator_partitions() -> None:
    """1,200 partitions of one mirror fall on all 50 coordinator partitions, none with twice its share."""
    counts = [0] * 50
    for topic in range(12):
        for partition in range(100):
            counts[partition_owner("m", f"topic-{topic}", partition, 50)] += 1
    assert min(counts) > 0
    assert max(counts) <= 2 * 1_200 / 50
