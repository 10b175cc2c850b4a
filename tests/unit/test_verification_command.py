"""`kmirror certify` around the reading itself."""

import json
from pathlib import Path
from typing import Any

import pytest

from kmirror_dagster.cli.certification import moment
from kmirror_dagster.errors import ClusterUnreachableError, UsageError
from kmirror_dagster.lifecycle import DesiredState, MirrorState
from kmirror_dagster.verification.certificate import Certificate, DifferingRange, PartitionCertificate
from kmirror_dagster.verification.certifier import WindowReport
from kmirror_dagster.verification.report import Isolation
from tests.helpers.command_line import FakeNode, install, kmirror, partition, refused


@pytest.fixture
def node(monkeypatch: pytest.MonkeyPatch) -> FakeNode:
    """The node every command of the test talks to."""
    return install(monkeypatch)


def certificate(*partitions: PartitionCertificate) -> Certificate:
    return Certificate(
        mirror="orders",
        source_cluster_id="A",
        destination_cluster_id="B",
        isolations=[Isolation.READ_COMMITTED],
        began_ms=1,
        checked_ms=2,
        partitions=list(partitions),
    )


def same(number: int = 0) -> PartitionCertificate:
    return PartitionCertificate(
        topic="orders-eu",
        partition=number,
        checked_to=100,
        source_end=130,
        destination_end=120,
        records={Isolation.READ_COMMITTED: 99},
        digests={Isolation.READ_COMMITTED: "ab" * 32},
    )


def differing() -> PartitionCertificate:
    found = DifferingRange(first=42, end=50, differences=1, examples=["value at offset 42: 3 bytes"])
    return same(1).model_copy(update={"differing": [found]})


class _Sides:
    def __init__(self, *_: object, **__: object) -> None: ...

    def __enter__(self) -> "_Sides":
        return self

    def __exit__(self, *_: object) -> None: ...


def stub(monkeypatch: pytest.MonkeyPatch, *answers: Any) -> list[dict[str, Any]]:
    """Let passes answer these, the last one again and again; returns what they were asked."""
    asked: list[dict[str, Any]] = []
    left = list(answers)

    def answer(_sides: object, *arguments: Any, **options: Any) -> Any:
        asked.append({"arguments": arguments, **options})
        found = left.pop(0) if len(left) > 1 else left[0]
        if isinstance(found, Exception):
            raise found
        return found

    monkeypatch.setattr("kmirror_dagster.verification.both_sides.BothSides", _Sides)
    monkeypatch.setattr("kmirror_dagster.verification.certifier.certify", answer)
    monkeypatch.setattr("kmirror_dagster.verification.certifier.recheck", answer)
    monkeypatch.setattr("kmirror_dagster.settings.mirror_from_document", lambda *_, **__: None)
    return asked


def test_certificate_is_printed_and_named(
    node: FakeNode, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """One pass: up to which offset, how many records, what is unread, where it is kept; exit code 0."""
    asked = stub(monkeypatch, certificate(same()))
    node.partitions.append(partition("stopped", 0, MirrorState.STOPPED, desired=DesiredState.STOPPED))
    result = kmirror("certify", "orders", "--certificate", str(tmp_path / "c.json"))
    assert result.exit_code == 0, result.output
    assert "VERIFIED TO" in result.stdout
    assert "abababababababab" in result.stdout
    assert f"certificate: {tmp_path / 'c.json'}" in result.stdout
    assert asked[0]["arguments"][1] == ["orders-eu", "orders-us"]


def test_what_differs_is_exit_code_1(node: FakeNode, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A differing record ends with 1 and names topic, partition and offset; JSON is printed all the same."""
    stub(monkeypatch, certificate(same(), differing()))
    result = kmirror("certify", "orders", "--json", "--certificate", str(tmp_path / "c.json"))
    assert result.exit_code == 1
    found = json.loads(result.stdout)
    assert [each["verified_to"] for each in found["partitions"]] == [100, 42]
    assert "orders-eu/1: value at offset 42" in result.stderr


def test_continuous_goes_on_after_what_passes(
    node: FakeNode, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """An unreachable cluster is told and tried again; the time limit ends it with what is known."""
    asked = stub(monkeypatch, ClusterUnreachableError("no broker answers"), certificate(same()))
    options = ("--continuous", "--interval", "0.1", "--timeout", "1", "--restart")
    result = kmirror("certify", "orders", *options, "--certificate", str(tmp_path / "c.json"))
    assert result.exit_code == 0, result.output
    assert "trying again" in result.stderr
    assert [each["restart"] for each in asked[:2]] == [True, False]


def test_stopped_topics_are_read_to_their_last_position(
    node: FakeNode, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A stopped topic that is named is certified up to its last mirror position only."""
    asked = stub(monkeypatch, certificate(same()))
    more = {"desired": DesiredState.STOPPED, "last_mirror_offset": 77}
    node.partitions.append(partition("stopped", 0, MirrorState.STOPPED, **more))
    kmirror("certify", "orders", "--topics", "stopped", "--certificate", str(tmp_path / "c.json"))
    assert asked[0]["ceilings"] == {("stopped", 0): 77}


def test_window_is_read_once(node: FakeNode, monkeypatch: pytest.MonkeyPatch) -> None:
    """A window of time is read without a certificate, and takes no option of one."""
    report = WindowReport(
        since_ms=1, until_ms=2, certificate=certificate(same()), behind=["orders-eu/0"], duration_s=2.0
    )
    asked = stub(monkeypatch, report)
    window = ("--since", "2026-01-31T00:00:00Z", "--until", "2026-01-31T01:00:00+01:00")
    result = kmirror("certify", "orders", *window)
    assert result.exit_code == 0, result.output
    assert asked[0]["since_ms"] == asked[0]["until_ms"] == 1_769_817_600_000
    assert "not copied to the window's end yet: orders-eu/0" in result.stdout
    assert "leave --continuous" in refused(kmirror("certify", "orders", *window, "--continuous"))


@pytest.mark.parametrize(("text", "reason"), [("yesterday", "is no time"), ("2026-01-31", "append Z")])
def test_times_are_unambiguous(text: str, reason: str) -> None:
    """A time that is none, or of no time zone, is refused by its option."""
    with pytest.raises(UsageError, match=f"--since.*{reason}"):
        moment(text, "--since")
