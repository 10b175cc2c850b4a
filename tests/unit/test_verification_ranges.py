"""Which offsets are compared, and what log starts and ends alone tell."""

import pytest

from kmirror_dagster.broker.log_records import LogRange
from kmirror_dagster.verification.ranges import (
    LogEnds,
    beyond_source,
    compared_range,
    is_settled,
    range_differences,
    waves,
)
from kmirror_dagster.verification.report import Isolation

ORDERS = ("orders", 3)


@pytest.mark.parametrize(
    ("source", "destination", "settled"),
    [
        (LogEnds(0, 10, 10), LogEnds(0, 10, 10), True),
        (LogEnds(0, 10, 10), LogEnds(0, 9, 9), False),
        (LogEnds(0, 10, 10), LogEnds(0, 10, 9), False),
        (LogEnds(0, 10, 8), LogEnds(0, 8, 8), True),  # a transaction is open at the source
        (LogEnds(5, 10, 10), LogEnds(0, 10, 10), False),  # the destination still holds what was deleted
        (LogEnds(0, 10, 10), LogEnds(5, 12, 12), True),  # nothing to wait for: it never gets better
    ],
)
def test_waiting_ends_when_it_cannot_help(source: LogEnds, destination: LogEnds, settled: bool) -> None:
    """The destination has to reach the source's stable end and log start, no more."""
    assert is_settled(source, destination) is settled


def test_equal_ends_are_no_difference() -> None:
    """Equal ends differ in nothing, an undecided transaction at the source included."""
    assert not [*range_differences(ORDERS, LogEnds(2, 10, 10), LogEnds(2, 10, 10), 0)]
    assert not [*range_differences(ORDERS, LogEnds(2, 10, 8), LogEnds(2, 8, 8), 0)]


def test_each_end_that_differs_is_told() -> None:
    """Log start, read_uncommitted end and read_committed end are told apart."""
    found = [*range_differences(ORDERS, LogEnds(2, 10, 10), LogEnds(0, 10, 7), 3.2)]
    assert [(d.isolation, d.detail) for d in found] == [
        (None, "log start: source 2, destination 0 after 3 s"),
        (Isolation.READ_COMMITTED, "log end: source 10, destination 7 after 3 s"),
    ]


def test_a_destination_beyond_the_source_is_told() -> None:
    """A destination that ends behind the source holds what the source has not."""
    assert not [*beyond_source(ORDERS, LogEnds(0, 10, 8), LogEnds(0, 10, 10))]
    found = [*beyond_source(ORDERS, LogEnds(0, 10, 10), LogEnds(0, 11, 10))]
    assert [(d.isolation, d.detail) for d in found] == [
        (Isolation.READ_UNCOMMITTED, "log end: source 10, destination 11")
    ]


def test_what_both_hold_is_compared() -> None:
    """Ranges go from the later start to the earlier end, per level, or cover only the end of that."""
    source, destination = LogEnds(2, 10, 8), LogEnds(4, 9, 7)
    committed, uncommitted = Isolation.READ_COMMITTED, Isolation.READ_UNCOMMITTED
    assert compared_range(ORDERS, source, destination, uncommitted) == LogRange(*ORDERS, 4, 9)
    assert compared_range(ORDERS, source, destination, committed) == LogRange(*ORDERS, 4, 7)
    last = compared_range(ORDERS, source, destination, committed, last_offsets=2)
    assert last == LogRange(*ORDERS, 5, 7)
    empty = compared_range(ORDERS, LogEnds(20, 20, 20), destination, committed)
    assert empty.start == empty.end


def test_empty_ranges_are_read_by_nobody() -> None:
    """Waves hold the ranges that contain offsets, at most so many at a time."""
    ranges = {("t", n): LogRange("t", n, 0, n % 3) for n in range(10)}
    found = list(waves(ranges, 4))
    assert [len(wave) for wave in found] == [4, 2]
    assert all(wanted.end > wanted.start for wave in found for wanted in wave.values())
