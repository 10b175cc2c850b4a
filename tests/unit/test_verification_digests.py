"""Digests of records: what they depend on, and what they do not."""

from itertools import pairwise

from hypothesis import assume, given, settings
from hypothesis import strategies as st

from kmirror_dagster.broker.log_records import CREATE_TIME, LOG_APPEND_TIME, LogRecord
from kmirror_dagster.verification.digests import Digest, digest_of, encode

CONTENT = st.none() | st.binary(max_size=20)
HEADERS = st.none() | st.lists(st.tuples(st.text(max_size=5), CONTENT), min_size=1, max_size=4)


@st.composite
def logs(draw: st.DrawFn) -> list[LogRecord]:
    """Records in ascending order of offset, with holes."""
    offsets = sorted(draw(st.sets(st.integers(0, 2**63 - 1), max_size=30)))
    return [
        (
            offset,
            draw(st.sampled_from([CREATE_TIME, LOG_APPEND_TIME])),
            draw(st.integers(-1, 2**62)),
            draw(CONTENT),
            draw(CONTENT),
            draw(HEADERS),
        )
        for offset in offsets
    ]


RECORDS = logs().filter(bool)


@settings(deadline=None)
@given(logs(), st.data())
def test_division_does_not_matter(log: list[LogRecord], data: st.DataObject) -> None:
    """A range's digest is the sum of its parts', however it was divided and in whatever order they came."""
    whole = digest_of(log)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(log)), max_size=4)))
    bounds = [0, *cuts, len(log)]
    parts = [digest_of(log[a:b]) for a, b in pairwise(bounds)]
    assert sum(data.draw(st.permutations(parts)), Digest()) == whole
    assert whole - parts[0] == sum(parts[1:], Digest())
    assert whole.records == len(log)


@settings(deadline=None)
@given(RECORDS, st.data())
def test_any_change_shows(log: list[LogRecord], data: st.DataObject) -> None:
    """A record that is altered in offset, timestamp, key, value or headers changes the digest."""
    index = data.draw(st.integers(0, len(log) - 1))
    field = data.draw(st.sampled_from([0, 2, 3, 4, 5]))
    values = {0: st.integers(0, 2**63 - 1), 2: st.integers(-1, 2**62), 3: CONTENT, 4: CONTENT, 5: HEADERS}
    changed = list(log[index])
    changed[field] = data.draw(values[field])
    assume(changed[field] != log[index][field])
    altered = [*log[:index], tuple(changed), *log[index + 1 :]]
    assert digest_of(altered).total != digest_of(log).total  # type: ignore[arg-type]


@settings(deadline=None)
@given(RECORDS, st.data())
def test_missing_or_repeated_records_show(log: list[LogRecord], data: st.DataObject) -> None:
    """A record that is missing, or there twice at another offset, changes the digest."""
    index = data.draw(st.integers(0, len(log) - 1))
    assert digest_of([*log[:index], *log[index + 1 :]]) != digest_of(log)
    offset = data.draw(st.integers(0, 2**63 - 1).filter(lambda n: all(n != each[0] for each in log)))
    assert digest_of([*log, (offset, *log[index][1:])]) != digest_of(log)  # type: ignore[list-item]


@settings(deadline=None)
@given(RECORDS)
def test_timestamp_type_is_left_out(log: list[LogRecord]) -> None:
    """LogAppendTime at the source and CreateTime at the destination are the same record."""
    other = [(each[0], CREATE_TIME, *each[2:]) for each in log]
    assert digest_of(other) == digest_of(log)  # type: ignore[arg-type]


@settings(deadline=None)
@given(RECORDS, RECORDS)
def test_encodings_differ_where_records_do(one: list[LogRecord], other: list[LogRecord]) -> None:
    """Two records are encoded alike only when all that counts of them is equal."""
    for left in one:
        for right in other:
            same = (left[0], *left[2:]) == (right[0], *right[2:])
            assert (encode(left) == encode(right)) == same


def test_encoding_is_the_documented_one() -> None:
    """The bytes are those that the docstring names, so anybody can compute the digest again."""
    record: LogRecord = (7, CREATE_TIME, 9, b"k", None, [("h", b""), ("é", None)])
    expected = (
        b"\0\0\0\0\0\0\0\x07" + b"\0\0\0\0\0\0\0\x09"
        b"\0\0\0\x01k"
        b"\xff\xff\xff\xff"
        b"\0\0\0\x02"
        b"\0\0\0\x01h" + b"\0\0\0\0"
        b"\0\0\0\x02\xc3\xa9" + b"\xff\xff\xff\xff"
    )
    assert encode(record) == expected


@settings(deadline=None)
@given(RECORDS)
def test_digest_is_kept_as_text(log: list[LogRecord]) -> None:
    """What is stored of a digest gives the same digest again."""
    digest = digest_of(log)
    assert len(digest.hex) == 64
    assert Digest.from_hex(digest.hex, digest.records) == digest
