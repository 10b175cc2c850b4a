"""`kmirror verify` around the comparison itself."""

import json
from typing import Any

import pytest

from kmirror_dagster.coordination.models import (
    MirrorSummary,
    RefreshStatus,
    TopicStatus,
)
from kmirror_dagster.errors import (
    KmirrorError,
)
from kmirror_dagster.lifecycle import DesiredState, MirrorState
from kmirror_dagster.verification.compare import VerifyProgress
from kmirror_dagster.verification.report import Difference, DifferenceKind, Isolation, VerifyReport
from tests.helpers.command_line import FakeNode, install, kmirror, partition, refused, set_states


@pytest.fixture
def node(monkeypatch: pytest.MonkeyPatch) -> FakeNode:
    """The node every command of the test talks to."""
    return install(monkeypatch)


def test_verify_wants_topics_that_are_mirrored(node: FakeNode, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stopped topics are left out unless named; nothing left is exit code 2."""
    monkeypatch.setattr("kmirror_dagster.settings.mirror_from_document", lambda *_, **__: None)
    set_states(node, MirrorState.STOPPED, desired=DesiredState.STOPPED)
    assert "no topic that is not stopped" in refused(kmirror("verify", "orders"))
    assert "no topic matching nope.*" in refused(kmirror("verify", "orders", "--topics", "nope.*"))


def report_of(topics: object, **more: Any) -> VerifyReport:
    counts = {Isolation.READ_UNCOMMITTED: 1_000, Isolation.READ_COMMITTED: 990}
    return VerifyReport(mirror="orders", partitions=4, records=counts, duration_s=2.0, **more)


def stub_comparison(monkeypatch: pytest.MonkeyPatch, **more: Any) -> list[tuple[Any, ...]]:
    """Let the comparison answer at once; returns what it was asked."""
    asked: list[tuple[Any, ...]] = []

    def compare(settings: object, topics: list[str], **options: Any) -> VerifyReport:
        asked.append((topics, options["group_topics"], options["limits"]))
        options["progress"](VerifyProgress("comparing", 1, 2))
        return report_of(topics, **more)

    monkeypatch.setattr("kmirror_dagster.verification.compare.compare_mirror", compare)
    monkeypatch.setattr("kmirror_dagster.settings.mirror_from_document", lambda *_, **__: None)
    return asked


def test_verify_prints_what_was_compared(node: FakeNode, monkeypatch: pytest.MonkeyPatch) -> None:
    """A comparison without differences is exit code 0, with its figures; stopped topics are left out."""
    asked = stub_comparison(monkeypatch, timestamp_types=3)
    node.partitions.append(partition("stopped", 0, MirrorState.STOPPED, desired=DesiredState.STOPPED))
    result = kmirror("verify", "orders", "--last", "10", "--timeout", "7")
    assert result.exit_code == 0, result.output
    [(topics, group_topics, limits)] = asked
    assert topics == group_topics == ["orders-eu", "orders-us"]
    assert (limits.last_offsets, limits.deadline_s) == (10, 7)
    shown = dict(line.split("  ", 1) for line in result.stdout.splitlines())
    assert shown["differences"].strip() == "0"
    assert shown["topics left out"].strip() == "stopped"
    assert "995 records/s" in shown["duration"]


def test_verify_ends_with_1_when_anything_differs(node: FakeNode, monkeypatch: pytest.MonkeyPatch) -> None:
    """Differences are listed and counted, exit code 1; so in JSON."""
    found = Difference(
        kind=DifferenceKind.VALUE, topic="orders-eu", partition=1, offset=7, detail="source null, ..."
    )
    more = {"differences_total": 25, "differences": [found] * 25, "duplicates": 2}
    stub_comparison(monkeypatch, **more)
    result = kmirror("verify", "orders")
    assert result.exit_code == 1
    assert result.stderr == "kmirror: orders: 25 differences and 2 duplicates found\n"
    assert "value       orders-eu  1          7       source null, ..." in result.stdout
    assert "... and 5 more" in result.stdout
    result = kmirror("verify", "orders", "--json")
    assert result.exit_code == 1
    document = json.loads(result.stdout)
    assert (document["ok"], document["differences"][0]["kind"]) == (False, "value")
    assert document["records"] == {"read_uncommitted": 1_000, "read_committed": 990}


def test_a_failed_refresh_does_not_keep_verify_from_comparing(
    node: FakeNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Verify asks for a refresh first; when that fails it says so and compares."""

    def fail(_: str) -> RefreshStatus:
        raise KmirrorError("refresh took too long")

    stub_comparison(monkeypatch)
    monkeypatch.setattr(node, "refresh", fail)
    monkeypatch.setattr(node, "mirror", lambda _: summary)
    summary = MirrorSummary.model_construct(
        mirror="orders", topics=[TopicStatus(topic="t", partitions=1, desired=DesiredState.MIRRORING)]
    )
    result = kmirror("verify", "orders")
    assert result.exit_code == 0
    assert "refresh took too long" in result.stderr
