"""Drills: names, settings of the shadow mirror, what is measured, what the report says."""

import json
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kmirror_dagster.coordination.recovery_ports import NodeShadows, shadow_shape
from kmirror_dagster.errors import KmirrorError, UnknownMirrorError, UsageError
from kmirror_dagster.recovery.drill import Drill, DrillWish, shadow_document, shadow_names
from kmirror_dagster.recovery.drill_load import Acknowledged, exposure
from kmirror_dagster.recovery.drill_report import DrillReport, DrillStep, keep, page
from kmirror_dagster.settings import mirror_from_document

DOCUMENT: dict[str, Any] = {
    "mirror": "orders",
    "source": {"bootstrap.servers": "${SERVERS}"},
    "destination": {"bootstrap.servers": "b:9092"},
    "filters": {"topics.include": ["orders.*"]},
    "policies": {"rpo_seconds": 7, "start": "latest", "adopt_topics": ["x"]},
}


def test_shadow_mirror_is_the_mirror_but_for_its_topics() -> None:
    """Clusters, references to secrets and policies are the mirror's; where to start and what to adopt is not."""
    shadow, topics = shadow_names("orders", 2)
    document = shadow_document(DOCUMENT, shadow, topics)
    assert document["source"] == DOCUMENT["source"]
    assert document["policies"] == {"rpo_seconds": 7}
    parsed = mirror_from_document(document, {"SERVERS": "a:9092"})
    assert [parsed.filters.selects_topic(topic) for topic in (*topics, "orders", "__other")] == [
        True,
        True,
        False,
        False,
    ]
    assert not parsed.filters.selects_group("anything")


def test_mirror_that_selects_shadow_topics_is_refused() -> None:
    """A mirror of every topic, internal ones too, would mirror the drill's as well: it says what to exclude."""
    filters = {"topics.include": [".*"], "topics.exclude": []}
    settings = mirror_from_document({**DOCUMENT, "filters": filters}, {"SERVERS": "a:9092"})
    with pytest.raises(UsageError, match=r"__kmirror_drill\\\.\.\*"):
        Drill(settings, DOCUMENT, SimpleNamespace(), DrillWish(partitions=[1]))  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="too long"):
        shadow_names("m" * 245, 1)


@settings(deadline=None)
@given(
    st.lists(st.floats(0, 100), max_size=40).map(sorted),
    st.integers(0, 50),
    st.floats(0, 100),
)
def test_exposure_counts_what_the_source_alone_had(times: list[float], end: int, at: float) -> None:
    """Records acknowledged before the moment and behind the destination's end, and the age of the oldest."""
    key = ("t", 0)
    found = exposure({key: [Acknowledged(n, when) for n, when in enumerate(times)]}, {key: end}, at)
    missing = [when for n, when in enumerate(times) if n >= end and when <= at]
    assert found.records == len(missing)
    assert found.seconds == (at - missing[0] if missing else 0)


def report(**more: Any) -> DrillReport:
    fields: dict[str, Any] = {
        "mirror": "orders",
        "started_ms": 1_769_817_600_000,
        "topics": 2,
        "partitions": 3,
        "rpo_limit_s": 5.0,
        "rpo_s": 0.2,
        "rpo_records": 90,
        "rto_s": 1.5,
        "verified": True,
        "steps": [DrillStep(name="failover", seconds=1.5)],
        "undone": True,
    }
    return DrillReport(**{**fields, **more})


@pytest.mark.parametrize(
    ("more", "reason"),
    [
        ({"rpo_s": 6.0}, "6.0 s would have been lost, 5 s are allowed"),
        ({"rto_limit_s": 1.0}, "the failover took 1.5 s, 1 s are allowed"),
        ({"verified": False, "differences": ["value at offset 4"]}, "not the same: value at offset 4"),
        ({"error": "no broker answers"}, "no broker answers"),
    ],
)
def test_drill_fails_by_its_limits(more: dict[str, Any], reason: str) -> None:
    """Each limit that is passed is named; within them the drill passes."""
    assert report().passed
    (failure,) = report(**more).failures
    assert reason in failure
    assert not report(**more).passed


def test_reports_are_kept_and_escaped(tmp_path: Path) -> None:
    """Both forms are there under the time of the drill; what a cluster says cannot become markup."""
    made = report(error="<script>alert(1)</script>")
    as_json, as_html = keep(made, tmp_path / "drills")
    assert as_json.name.startswith("20260131T000000")
    assert json.loads(as_json.read_text())["failures"] == ["<script>alert(1)</script>"]
    text = as_html.read_text()
    assert "<script>" not in text
    assert "&lt;script&gt;" in text
    assert "http" not in page(report())  # nothing from elsewhere


class Node:
    """A node's answers about one shadow mirror."""

    def __init__(self, states: Mapping[str, int], *, partitions: int = 2) -> None:
        self.summary = SimpleNamespace(
            mirror="orders-drill",
            states=dict(states),
            partitions=partitions,
            topics=[SimpleNamespace(topic="t", error=None, partitions=partitions)],
        )
        self.statuses: list[Any] = []

    def mirror(self, name: str) -> Any:
        if name != self.summary.mirror:
            raise UnknownMirrorError("none")
        return self.summary

    def iter_partitions(self, _name: str, **_: Any) -> Any:
        return iter(self.statuses)


def test_shadow_mirror_is_asked_for() -> None:
    """Mirroring only when all partitions are; what failed for good ends the wait; stopped only with positions."""
    node = Node({"MIRRORING": 1, "LOG_ALIGNMENT": 1})
    shadows = NodeShadows(node)  # type: ignore[arg-type]
    assert (shadows.exists("orders-drill"), shadows.exists("other")) == (True, False)
    assert not shadows.are_mirroring("orders-drill", 2)
    node.summary.states = {"MIRRORING": 2}
    assert shadows.are_mirroring("orders-drill", 2)
    assert not shadows.are_mirroring("orders-drill", 3)
    node.summary.states = {"MIRRORING": 1, "FAILED": 1}
    node.statuses = [SimpleNamespace(topic="t", partition=1, retriable=False, error="boom")]
    with pytest.raises(KmirrorError, match="t/1 is FAILED: boom"):
        shadows.are_mirroring("orders-drill", 2)
    node.summary.states = {"STOPPED": 2}
    node.statuses = [SimpleNamespace(topic="t", partition=n, last_mirror_offset=None) for n in range(2)]
    assert shadows.stopped_at("orders-drill") is None
    node.statuses = [SimpleNamespace(topic="t", partition=n, last_mirror_offset=7) for n in range(2)]
    assert shadows.stopped_at("orders-drill") == {("t", 0): 7, ("t", 1): 7}


def test_shadow_has_the_mirrors_shape() -> None:
    """As many partitions as the mirror's topics have, up to a limit; a mirror without topics has no shape."""
    summary = Node({}, partitions=500).summary
    assert shadow_shape(summary, 5) == [64]  # type: ignore[arg-type]
    summary.topics = []
    with pytest.raises(UsageError, match="no topics yet"):
        shadow_shape(summary, 5)  # type: ignore[arg-type]
