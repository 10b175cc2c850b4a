"""`kmirror offsets`: an offset at both sides."""

import json
from typing import Any

import pytest

from kmirror_dagster.coordination.models import PartitionOffsets
from kmirror_dagster.lifecycle import MirrorState
from tests.helpers.command_line import FakeNode, install, kmirror, partition, refused


@pytest.fixture
def node(monkeypatch: pytest.MonkeyPatch) -> FakeNode:
    return install(monkeypatch)


def holding(node: FakeNode, runs: list[tuple[int, int]], **ranges: int) -> None:
    """The node knows these runs, and these ends of both logs."""
    status = partition("orders-eu", 2, MirrorState.MIRRORING, **ranges)
    node.known_offsets = PartitionOffsets(topic="orders-eu", partition=2, runs=runs, status=status)


RANGES = {
    "source_start_offset": 100,
    "source_end_offset": 2_000,
    "destination_start_offset": 100,
    "destination_end_offset": 940,
}


def told(*arguments: str) -> dict[str, Any]:
    done = kmirror("offsets", "orders", "orders-eu/2", *arguments, "--json")
    assert done.exit_code == 0, done.output
    return json.loads(done.stdout)


def test_exact_offsets_are_the_same_and_show_both_logs(node: FakeNode) -> None:
    """Identity, with the log range of each side."""
    holding(node, [], **RANGES)
    done = kmirror("offsets", "orders", "orders-eu/2", "500")
    assert done.exit_code == 0
    assert done.stdout.splitlines() == [
        "partition    orders-eu/2",
        "offsets      exact",
        "source       500 (log: 100 to 2000)",
        "destination  500 (log: 100 to 940)",
    ]
    assert told("500", "--reverse")["source"] == 500


def test_translated_offsets_lead_there_and_back(node: FakeNode) -> None:
    """Behind what was left out both directions agree; in it the answer is the next record, and said to be."""
    holding(node, [(200, 1_200)], **RANGES)
    found = told("1300")
    assert (found["offsets"], found["destination"], found["leftOut"], found["runs"]) == (
        "translated",
        300,
        False,
        1,
    )
    assert told("300", "--reverse")["source"] == 1_300
    found = told("700")
    assert (found["destination"], found["leftOut"]) == (200, True)
    assert "next one" in found["note"]


@pytest.mark.parametrize(("offset", "note"), [("50", "deleted there"), ("940", "not mirrored yet")])
def test_offsets_the_destination_does_not_hold_are_named(node: FakeNode, offset: str, note: str) -> None:
    """Before its log start, and not copied yet."""
    holding(node, [], **RANGES)
    assert note in told(offset)["note"]


@pytest.mark.parametrize("name", ["orders-eu", "orders-eu/", "/2", "orders-eu/x", "orders-eu/-1"])
def test_what_is_no_partition_is_refused(node: FakeNode, name: str) -> None:
    """One line that says how to write it."""
    assert "TOPIC/P" in refused(kmirror("offsets", "orders", "--", name, "1"))
