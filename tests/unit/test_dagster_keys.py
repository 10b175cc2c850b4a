"""Partition keys and identifiers."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kmirror_dagster.errors import UsageError
from kmirror_dagster.orchestration import PartitionKey
from kmirror_dagster.orchestration.keys import dagster_names

topics = st.from_regex(r"[A-Za-z0-9._-]{1,249}", fullmatch=True).filter(lambda name: name not in (".", ".."))


@given(topic=topics, partition=st.integers(0, 2**31 - 1))
def test_key_round_trip(topic: str, partition: int) -> None:
    """Any legal topic name and partition number come back from their key."""
    key = PartitionKey(topic, partition)
    assert PartitionKey.parse(str(key)) == key


@given(topic=st.from_regex(r"[a.]{1,30}", fullmatch=True).filter(lambda name: name not in (".", "..")))
def test_key_never_holds_range_mark(topic: str) -> None:
    """Dagster's range mark "..." never occurs in a key, though it may in a topic's name."""
    assert "..." not in str(PartitionKey(topic, 0))


@given(st.lists(st.tuples(topics, st.integers(0, 99)), unique=True))
def test_keys_are_distinct(names: list[tuple[str, int]]) -> None:
    """Two mirror partitions never share a key."""
    assert len({str(PartitionKey(topic, number)) for topic, number in names}) == len(names)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "orders",
        "orders/",
        "/3",
        "orders/-1",
        "orders/01",
        "orders/x",
        "a/b/3",
        "orders/3 ",
        "or ders/3",
        "orders/99999999999",
        "../0",
        "a...b/0",
        "a%2Eb/0",
        "orders/٣",
    ],
)
def test_bad_key_is_refused(text: str) -> None:
    """What is no key is refused in one line that quotes it or its part at fault; nothing is guessed."""
    with pytest.raises(UsageError) as refusal:
        PartitionKey.parse(text)
    assert "\n" not in str(refusal.value)


def test_identifiers_of_mirrors_are_distinct() -> None:
    """Mirror names that would become the same identifier are told apart, the same way each time."""
    names = dagster_names(["a-b", "a.b", "a_b", "orders-eu"])
    assert len(set(names.values())) == 4
    assert names["a_b"] == "a_b"
    assert names["orders-eu"] == "orders_eu"
    assert names == dagster_names(["a-b", "a.b", "a_b", "orders-eu"])
