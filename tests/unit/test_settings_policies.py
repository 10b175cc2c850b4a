"""Policies: where mirroring starts, and how they are written."""

from datetime import datetime, timezone
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel, ValidationError

from kmirror_dagster.settings import (
    FailoverSettings,
    MirrorSettings,
    NodeSettings,
    PolicySettings,
    StartPolicy,
)


@pytest.mark.parametrize("at", ["earliest", "latest", "LATEST"])
def test_start_is_a_word(at: str) -> None:
    """`earliest` and `latest` are words, written back as such."""
    start = PolicySettings.model_validate({"start": at}).start
    assert (start.at, start.timestamp_ms) == (at.lower(), None)
    assert start.model_dump() == at.lower()


@given(st.datetimes(datetime(1971, 1, 1), datetime(2200, 1, 1), timezones=st.just(timezone.utc)))
def test_start_is_a_time_that_survives_writing(when: datetime) -> None:
    """A time is written with its offset from UTC and read back as the same millisecond."""
    when = when.replace(microsecond=when.microsecond // 1_000 * 1_000)
    policies = PolicySettings.model_validate({"start": {"timestamp": when.isoformat()}})
    assert policies.start.timestamp_ms == round(when.timestamp() * 1_000)
    assert PolicySettings.model_validate(policies.model_dump(mode="json")) == policies


@pytest.mark.parametrize(
    "start",
    [
        "yesterday",
        "",
        3,
        None,
        [],
        {"timestamp": "2026-01-31"},
        {"timestamp": "2026-01-31T00:00:00"},
        {"timestamp": 5},
        {"timestamp": None},
        {"timestamp": "2026-01-31T00:00:00Z", "x": 1},
        {"at": "timestamp"},
    ],
)
def test_other_starts_are_refused(start: Any) -> None:
    """Anything else, times without an offset included, is refused."""
    with pytest.raises(ValidationError):
        PolicySettings.model_validate({"start": start})


def test_a_start_can_be_made_in_python() -> None:
    """The attributes are those that code uses."""
    when = datetime(2026, 1, 31, tzinfo=timezone.utc)
    assert StartPolicy(at="timestamp", timestamp=when).timestamp_ms == 1_769_817_600_000
    assert PolicySettings(start=StartPolicy(at="latest")).start.at == "latest"


def test_failover_waits_for_proof() -> None:
    """By default five failed looks in a row and ten minutes between failovers."""
    failover = FailoverSettings()
    assert (failover.bad_observations, failover.probe_quorum, failover.cool_down_seconds) == (5, 1, 600)
    assert failover.max_destination_lag_seconds is None


@pytest.mark.parametrize(
    "document",
    [{"rpo_seconds": 0}, {"rpo_seconds": float("nan")}, {"replication_factor": 0}, {"max_lag_records": -1}],
)
def test_numbers_out_of_bounds_are_refused(document: dict[str, float]) -> None:
    """Numbers that make no sense are refused."""
    with pytest.raises(ValidationError):
        PolicySettings.model_validate(document)


@pytest.mark.parametrize("model", [MirrorSettings, NodeSettings])
def test_every_setting_is_described(model: type[BaseModel]) -> None:
    """Each setting has a description in words: the documentation is made of them."""
    seen: set[type[BaseModel]] = set()

    def walk(current: type[BaseModel]) -> None:
        for name, field in current.model_fields.items():
            assert field.description, f"{current.__name__}.{name}"
            assert field.description.endswith("."), f"{current.__name__}.{name}"
            inner = field.annotation
            if isinstance(inner, type) and issubclass(inner, BaseModel) and inner not in seen:
                seen.add(inner)
                walk(inner)

    walk(model)


def test_topics_are_translated_by_name_or_all_of_them() -> None:
    """Exact offsets are the default; patterns match whole names, and a malformed one is refused."""
    assert PolicySettings().never_translates
    some = PolicySettings(translated_topics=["audit.*"])
    assert [some.may_translate(name) for name in ("audit-1", "an-audit")] == [True, False]
    assert PolicySettings(offsets="translated").may_translate("anything")
    with pytest.raises(ValueError, match="RE2"):
        PolicySettings(translated_topics=["("])
