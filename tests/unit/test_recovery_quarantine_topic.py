"""Quarantine in a topic: what is written of a record gives the record back."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kmirror_dagster.broker.log_records import LogRecord
from kmirror_dagster.errors import UsageError
from kmirror_dagster.recovery.quarantine_topic import quarantine_topic, unwrapped, wrapped
from kmirror_dagster.settings import FilterSettings

CONTENT = st.none() | st.binary(max_size=20)
HEADERS = st.none() | st.lists(st.tuples(st.text(max_size=5), CONTENT), min_size=1, max_size=4)


@settings(deadline=None)
@given(
    st.tuples(
        st.integers(0, 2**63 - 1),
        st.sampled_from([0, 1, 2]),
        st.integers(-1, 2**62),
        CONTENT,
        CONTENT,
        HEADERS,
    ),
    st.text(min_size=1, max_size=10),
    st.integers(0, 10_000),
    st.booleans(),
)
def test_record_comes_back(record: LogRecord, topic: str, partition: int, committed: bool) -> None:
    """Whatever a record holds, also headers like ours, it is the same when it is read back."""
    headers = wrapped(record, (topic, partition), "f1", committed=committed)
    stored: LogRecord = (7, 1, 9, record[3], record[4], headers)
    assert unwrapped(stored) == ("f1", (topic, partition), record)
    twice: LogRecord = (7, 1, 9, record[3], record[4], wrapped(stored, ("q", 0), "f2", committed=True))
    assert unwrapped(twice) == ("f2", ("q", 0), stored)


def test_other_records_are_told_apart() -> None:
    """A record without our headers, or with some of them only, is not one of quarantine."""
    assert unwrapped((0, 1, 0, None, b"v", None)) is None
    headers = wrapped((0, 1, 0, None, b"v", None), ("t", 0), "f", committed=True)
    assert unwrapped((0, 1, 0, None, b"v", headers[1:])) is None


def test_topic_is_no_mirrors_business() -> None:
    """Its name is one that mirrors leave out by default; one that cannot be a topic is refused."""
    assert not FilterSettings(topics_include=(".*",)).selects_topic(quarantine_topic("orders"))
    with pytest.raises(UsageError, match="too long"):
        quarantine_topic("m" * 240)
