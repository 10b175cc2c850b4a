"""Comparison of two record streams: planted differences of every kind are found, nothing else is."""

import random
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kmirror_dagster.broker.log_records import CREATE_TIME, LOG_APPEND_TIME, LogRecord
from kmirror_dagster.verification.report import DifferenceKind, DifferenceLog, Isolation
from kmirror_dagster.verification.streams import Compaction, PartitionComparison, Side


def comparison(
    differences: DifferenceLog | None = None, compaction: Compaction | None = None
) -> tuple[PartitionComparison, DifferenceLog]:
    log = differences or DifferenceLog()
    return (
        PartitionComparison(
            "orders", 0, isolation=Isolation.READ_UNCOMMITTED, differences=log, compaction=compaction
        ),
        log,
    )


def compare(
    source: Sequence[LogRecord],
    destination: Sequence[LogRecord],
    *,
    chunk: int = 3,
    seed: int = 0,
    compaction: Compaction | None = None,
) -> tuple[PartitionComparison, DifferenceLog]:
    """Feed both sides in chunks of random size and random interleaving."""
    rng = random.Random(seed)
    compared, log = comparison(compaction=compaction)
    rest = {Side.SOURCE: list(source), Side.DESTINATION: list(destination)}
    while rest:
        side = rng.choice(list(rest))
        count = rng.randint(1, chunk)
        records, rest[side] = rest[side][:count], rest[side][count:]
        size = sum(len(r[4] or b"") for r in records)
        compared.feed(side, records, size, done=not rest[side])
        if not rest[side]:
            del rest[side]
    assert compared.finished
    return compared, log


def record(offset: int, **changes: object) -> LogRecord:
    fields: dict[str, object] = {
        "type": CREATE_TIME,
        "timestamp": 1_700_000_000_000 + offset,
        "key": b"key-%d" % offset,
        "value": b"value-%d" % offset,
        "headers": [("a", b"1"), ("a", None), ("a", b"")],
    } | changes
    return (offset, *fields.values())  # type: ignore[return-value]


RECORDS = [record(offset) for offset in range(20)]

optional_bytes = st.none() | st.binary(max_size=4)
headers = st.none() | st.lists(st.tuples(st.text(max_size=2), optional_bytes), min_size=1, max_size=3)


@st.composite
def logs(draw: st.DrawFn) -> list[LogRecord]:
    """A log with holes."""
    contents = st.tuples(st.integers(1, 2), st.integers(-1, 5), optional_bytes, optional_bytes, headers)
    offsets = sorted(draw(st.sets(st.integers(0, 60), max_size=25)))
    return [(offset, *draw(contents)) for offset in offsets]


@given(logs(), st.integers(1, 7), st.integers(0, 1000))
def test_equal_logs_show_no_difference_in_any_interleaving(
    log: list[LogRecord], chunk: int, seed: int
) -> None:
    """Equal logs, holes included, are equal however they are cut and interleaved."""
    compared, found = compare(log, list(log), chunk=chunk, seed=seed)
    assert (found.total, compared.compared, compared.duplicates) == (0, len(log), 0)
    assert [compared.pending_bytes(side) for side in Side] == [0, 0]


@given(logs(), logs(), st.integers(1, 7), st.integers(0, 1000))
def test_differences_are_those_of_a_plain_comparison(
    source: list[LogRecord], destination: list[LogRecord], chunk: int, seed: int
) -> None:
    """For any two logs the counts are those one gets by looking at each offset."""
    _, found = compare(source, destination, chunk=chunk, seed=seed)
    left, right = {r[0]: r for r in source}, {r[0]: r for r in destination}
    both = left.keys() & right.keys()
    expected = {
        DifferenceKind.MISSING: len(left.keys() - right.keys()),
        DifferenceKind.EXTRA: len(right.keys() - left.keys()),
        DifferenceKind.KEY: sum(left[o][3] != right[o][3] for o in both),
        DifferenceKind.VALUE: sum(left[o][4] != right[o][4] for o in both),
        DifferenceKind.HEADERS: sum(left[o][5] != right[o][5] for o in both),
        DifferenceKind.TIMESTAMP: sum(
            left[o][2] != right[o][2] or (left[o][1], right[o][1]) == (CREATE_TIME, LOG_APPEND_TIME)
            for o in both
        ),
    }
    assert found.by_kind == {kind: count for kind, count in expected.items() if count}


@given(st.integers(0, 19), st.integers(1, 7), st.integers(0, 1000))
def test_a_planted_change_is_found_at_its_offset(offset: int, chunk: int, seed: int) -> None:
    """One changed record is one difference at that offset and at no other."""
    changed = [*RECORDS[:offset], record(offset, value=b"other"), *RECORDS[offset + 1 :]]
    _, found = compare(RECORDS, changed, chunk=chunk, seed=seed)
    assert [(d.kind, d.offset) for d in found.listed] == [(DifferenceKind.VALUE, offset)]


@pytest.mark.parametrize(
    ("changes", "kind", "detail"),
    [
        ({"key": None}, DifferenceKind.KEY, "source 5 bytes sha256:"),
        ({"key": b""}, DifferenceKind.KEY, "destination empty"),
        ({"value": None}, DifferenceKind.VALUE, "destination null"),
        ({"value": b""}, DifferenceKind.VALUE, "destination empty"),
        ({"headers": None}, DifferenceKind.HEADERS, "source 3 headers, destination 0"),
        (
            {"headers": [("a", b"1"), ("a", b""), ("a", b"")]},
            DifferenceKind.HEADERS,
            "header 2 of 3: source value null, destination value empty",
        ),
        (
            {"headers": [("a", None), ("a", b"1"), ("a", b"")]},
            DifferenceKind.HEADERS,
            "header 1 of 3",
        ),
        (
            {"headers": [("A", b"1"), ("a", None), ("a", b"")]},
            DifferenceKind.HEADERS,
            "header 1 of 3: source key",
        ),
        ({"timestamp": 0}, DifferenceKind.TIMESTAMP, "destination 0 (CreateTime)"),
        ({"type": LOG_APPEND_TIME}, DifferenceKind.TIMESTAMP, "(LogAppendTime)"),
    ],
)
def test_each_field_is_compared(changes: dict[str, object], kind: DifferenceKind, detail: str) -> None:
    """Key, value, headers (order, null or empty) and timestamp each make a difference of their own kind."""
    changed = [*RECORDS[:5], record(5, **changes), *RECORDS[6:]]
    _, found = compare(RECORDS, changed)
    assert [(d.kind, d.offset) for d in found.listed] == [(kind, 5)]
    assert detail in found.listed[0].detail


def test_a_difference_never_shows_the_payload() -> None:
    """Details hold lengths and hashes, never the bytes themselves."""
    secret = b"s3cret-payload"
    changed = record(
        3, key=secret, value=secret, headers=[("s3cret-payload", secret), ("a", None), ("a", b"")]
    )
    _, found = compare(RECORDS, [*RECORDS[:3], changed, *RECORDS[4:], record(20, value=secret)])
    assert found.total == 4
    assert not [d.detail for d in found.listed if "s3cret" in d.detail]


def test_a_record_on_one_side_only_is_missing_or_extra() -> None:
    """A record the destination lacks is missing, one the source lacks is extra; the rest still lines up."""
    _, found = compare([*RECORDS[:4], *RECORDS[5:]], [*RECORDS[:9], *RECORDS[10:]])
    assert [(d.kind, d.offset) for d in found.listed] == [
        (DifferenceKind.EXTRA, 4),
        (DifferenceKind.MISSING, 9),
    ]


def test_a_shorter_log_lacks_its_tail() -> None:
    """What one side has behind the end of the other is missing or extra."""
    _, found = compare(RECORDS, RECORDS[:17])
    assert [(d.kind, d.offset) for d in found.listed] == [(DifferenceKind.MISSING, o) for o in (17, 18, 19)]
    _, found = compare(RECORDS[:19], RECORDS)
    assert [(d.kind, d.offset) for d in found.listed] == [(DifferenceKind.EXTRA, 19)]


def test_a_repeated_batch_is_counted_as_duplicates() -> None:
    """Records appended twice at the destination are counted once each, not everything behind them."""
    contents = [r[1:] for r in RECORDS]
    repeated = [*contents[:10], *contents[5:10], *contents[10:15]]
    destination: list[LogRecord] = [(offset, *content) for offset, content in enumerate(repeated)]  # type: ignore[misc]
    compared, found = compare(RECORDS, destination)
    assert compared.duplicates == 5
    assert found.by_kind[DifferenceKind.VALUE] == 10
    compared, _ = compare(RECORDS, [*RECORDS, (20, *RECORDS[19][1:])])  # type: ignore[list-item]
    assert compared.duplicates == 1


def test_records_the_source_repeats_are_no_duplicates() -> None:
    """Equal records at several offsets of the source are right at the destination as well."""
    same: list[LogRecord] = [(offset, 1, 5, b"k", b"v", None) for offset in range(10)]
    compared, found = compare(same, [*same[:7], (7, 1, 6, b"k", b"v", None), *same[8:]])
    assert (compared.duplicates, found.total) == (0, 1)


def test_log_append_time_may_become_create_time() -> None:
    """LogAppendTime at the source and CreateTime of the same value at the destination is counted apart."""
    source = [record(o, type=LOG_APPEND_TIME) for o in range(5)]
    compared, found = compare(source, RECORDS[:5])
    assert (compared.timestamp_types, found.total) == (5, 0)
    _, found = compare(source, [*RECORDS[:4], record(4, timestamp=1)])
    assert [d.kind for d in found.listed] == [DifferenceKind.TIMESTAMP]


def test_only_the_first_hundred_differences_are_listed() -> None:
    """All differences are counted, a hundred are listed."""
    source = [record(o) for o in range(500)]
    _, found = compare(source, [record(o, value=b"x") for o in range(500)], chunk=50)
    assert (found.total, len(found.listed)) == (500, 100)


KEYED: list[LogRecord] = [
    (0, 1, 10, b"k1", b"v", None),
    (1, 1, 10, b"k2", b"a", None),
    (2, 1, 10, b"k1", b"w", None),
    (3, 1, 10, b"k3", None, None),
]


def test_a_record_compacted_away_on_one_side_is_no_difference() -> None:
    """On a compacted topic a one-sided record is explained by a newer one of its key on both sides."""
    compared, found = compare(KEYED, KEYED[1:], compaction=Compaction(tombstones_before_ms=0))
    assert (found.total, compared.superseded) == (0, 1)
    _, found = compare(KEYED, KEYED[1:])
    assert [d.kind for d in found.listed] == [DifferenceKind.MISSING]


def test_a_lost_record_of_a_compacted_topic_is_a_difference() -> None:
    """A record that no newer one of its key replaces is missing, on a compacted topic too."""
    without_k2 = [KEYED[0], *KEYED[2:]]
    _, found = compare(KEYED, without_k2, compaction=Compaction(tombstones_before_ms=0))
    assert [(d.kind, d.offset) for d in found.listed] == [(DifferenceKind.MISSING, 1)]


def test_only_an_old_tombstone_may_be_gone() -> None:
    """A one-sided tombstone is explained when it is older than the tombstone retention, else it is lost."""
    _, found = compare(KEYED, KEYED[:3], compaction=Compaction(tombstones_before_ms=10))
    assert [(d.kind, d.offset) for d in found.listed] == [(DifferenceKind.MISSING, 3)]
    compared, found = compare(KEYED, KEYED[:3], compaction=Compaction(tombstones_before_ms=11))
    assert (found.total, compared.superseded) == (0, 1)


def test_nothing_is_compared_before_the_other_side_has_come() -> None:
    """Records wait for the other side and are released as soon as they are compared."""
    compared, found = comparison()
    compared.feed(Side.SOURCE, RECORDS, 1000)
    assert (compared.compared, compared.pending_bytes(Side.SOURCE), found.total) == (0, 1000, 0)
    compared.feed(Side.DESTINATION, RECORDS[:10], 500)
    assert (compared.compared, compared.pending_bytes(Side.DESTINATION)) == (10, 0)
    compared.feed(Side.DESTINATION, RECORDS[10:], 500, done=True)
    compared.feed(Side.SOURCE, [], 0, done=True)
    assert (compared.finished, compared.pending_bytes(Side.SOURCE), found.total) == (True, 0, 0)
