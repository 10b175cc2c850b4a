"""Forecast of a failover: by sets of offsets, with and without the source, on the command line."""

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kmirror_dagster.broker.admin_types import CommittedOffset
from kmirror_dagster.lifecycle import DesiredState, MirrorState
from kmirror_dagster.recovery.forecast import Forecast, forecast_groups, forecast_partition
from kmirror_dagster.verification.ranges import LogEnds
from tests.helpers.command_line import FakeNode, install, kmirror, partition, refused

KEY = ("orders-eu", 0)
OFFSET = st.integers(0, 30)


@settings(deadline=None)
@given(OFFSET, OFFSET, OFFSET, OFFSET, OFFSET)
def test_figures_are_those_of_the_offsets_themselves(
    start: int, copied: int, missing: int, read: int, synced: int
) -> None:
    """Re-read, lost and read ahead are what the sets of offsets say, wherever the four positions are."""
    end = start + copied
    source_end = end + missing
    read = min(read, source_end)
    found = forecast_partition(
        KEY,
        source_end=source_end,
        destination=LogEnds(start, end, end),
        source_position=read,
        destination_position=synced,
    )
    already, copy = set(range(read)), set(range(start, end))
    gets = {offset for offset in copy if offset >= synced}
    assert found.re_reads == len(gets & already)
    assert found.loses == len(set(range(end, source_end)) - already)
    assert found.read_ahead == len(already - set(range(end)))
    assert found.resumes_at == max(start, min(synced, end))


def test_what_is_not_known_is_not_zero() -> None:
    """Without the source its figures are unknown; without a position at the destination none is made up."""
    found = forecast_partition(
        KEY,
        source_end=None,
        destination=LogEnds(0, 90, 90),
        source_position=None,
        destination_position=80,
    )
    assert (found.resumes_at, found.re_reads, found.loses, found.read_ahead) == (80, None, None, None)
    found = forecast_partition(
        KEY,
        source_end=100,
        destination=LogEnds(0, 90, 90),
        source_position=95,
        destination_position=None,
    )
    assert (found.resumes_at, found.re_reads, found.loses, found.read_ahead) == (None, None, 5, 5)


def test_groups_of_either_side_are_told() -> None:
    """Groups known on one side only are in it; partitions that are not mirrored are not."""
    other = ("elsewhere", 0)
    here = {
        "both": {KEY: CommittedOffset(95), other: CommittedOffset(1)},
        "source": {KEY: CommittedOffset(10)},
    }
    there = {
        "both": {KEY: CommittedOffset(80)},
        "gone": {KEY: CommittedOffset(5)},
        "foreign": {other: CommittedOffset(5)},
    }
    found = {each.group: each for each in forecast_groups({KEY: 100}, {KEY: LogEnds(0, 90, 90)}, here, there)}
    assert sorted(found) == ["both", "gone", "source"]
    assert (found["both"].re_reads, found["both"].loses, found["both"].read_ahead) == (10, 5, 5)
    assert (found["source"].without_position, found["source"].loses) == (1, 10)


@pytest.fixture
def node(monkeypatch: pytest.MonkeyPatch) -> FakeNode:
    """The node every command of the test talks to."""
    monkeypatch.setattr("kmirror_dagster.settings.mirror_from_document", lambda *_, **__: None)
    return install(monkeypatch)


def stub(monkeypatch: pytest.MonkeyPatch, **more: Any) -> list[Any]:
    """Let the look answer at once; returns the partitions it was given."""
    asked: list[Any] = []
    here = {"billing": {KEY: CommittedOffset(95)}}
    there = {"billing": {KEY: CommittedOffset(80)}}

    def look(_settings: object, known: list[Any]) -> Forecast:
        asked.append(known)
        fields: dict[str, Any] = {
            "mirror": "orders",
            "at_ms": 1,
            "source_reachable": True,
            "loses_records": 10,
            "loses_seconds": 0.5,
            "rpo_seconds": 60.0,
            "groups": forecast_groups({KEY: 100}, {KEY: LogEnds(0, 90, 90)}, here, there),
        }
        return Forecast(**{**fields, **more})

    monkeypatch.setattr("kmirror_dagster.recovery.forecast.look_ahead", look)
    return asked


def test_forecast_is_printed(node: FakeNode, monkeypatch: pytest.MonkeyPatch) -> None:
    """One line a group: what it re-reads, what it loses, where it goes on; stopped topics are not asked for."""
    asked = stub(monkeypatch)
    node.partitions.append(partition("stopped", 0, MirrorState.STOPPED, desired=DesiredState.STOPPED))
    result = kmirror("forecast", "orders")
    assert result.exit_code == 0, result.output
    assert result.stdout.splitlines()[-1].split() == ["billing", "10", "5", "5", "0", "orders-eu/0@80"]
    assert {each.topic for each in asked[0]} == {"orders-eu", "orders-us"}
    assert json.loads(kmirror("forecast", "orders", "--json").stdout)["groups"][0]["re_reads"] == 10


def test_more_than_allowed_is_exit_code_1(node: FakeNode, monkeypatch: pytest.MonkeyPatch) -> None:
    """A mirror that would lose more than its policy allows ends with 1; one without topics with 2."""
    stub(monkeypatch, loses_seconds=75.0)
    result = kmirror("forecast", "orders")
    assert result.exit_code == 1
    assert "would lose 75.0 s, 60 s are allowed" in result.stderr
    assert "no topic to fail over" in refused(kmirror("forecast", "orders", "--topics", "nope"))
