"""Consistent cut: the common time by its definition, against logs that are made up."""

import json
from pathlib import Path
from types import SimpleNamespace

import pyarrow.parquet
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kmirror_dagster.errors import UsageError
from kmirror_dagster.recovery.cut import ConsistentCut, chosen_time, common_time, cut_at, export_cut
from kmirror_dagster.recovery.manifest import LossManifest, PartitionLoss
from tests.helpers.command_line import install, kmirror, refused

# timestamps of one source log, by offset, and how many of them were mirrored
LOG = st.lists(st.integers(0, 50), max_size=12).flatmap(
    lambda times: st.tuples(st.just(times), st.integers(0, len(times)))
)


def loss_of(partition: int, times: list[int], mirrored: int) -> PartitionLoss:
    missing = times[mirrored:]
    return PartitionLoss(
        topic="t",
        partition=partition,
        first_offset=mirrored,
        end_offset=len(times),
        records=len(missing),
        first_timestamp_ms=min(missing, default=None),
        last_timestamp_ms=max(missing, default=None),
    )


def manifest(*losses: PartitionLoss) -> LossManifest:
    firsts = [each.first_timestamp_ms for each in losses if each.first_timestamp_ms is not None]
    return LossManifest(
        mirror="orders",
        source_cluster_id="A",
        made_ms=2,
        stopped_ms=1_000,
        records=sum(each.records for each in losses),
        size_bytes=0,
        first_timestamp_ms=min(firsts, default=None),
        partitions=list(losses),
    )


def later_than(times: list[int], mirrored: int, at: int) -> int:
    """What the broker answers: first offset of the destination's log at or after a time."""
    return next((n for n, when in enumerate(times[:mirrored]) if when >= at + 1), -1)


@settings(deadline=None)
@given(st.lists(LOG, min_size=1, max_size=4))
def test_cut_is_what_its_definition_says(logs: list[tuple[list[int], int]]) -> None:
    """No record up to the time is missing, one a millisecond later is, and below the cuts nothing is later."""
    made = manifest(*(loss_of(n, times, mirrored) for n, (times, mirrored) in enumerate(logs)))
    latest = common_time(made)
    missing = [when for times, mirrored in logs for when in times[mirrored:]]
    assert (latest is None) == (not missing)
    at = chosen_time(latest, None, stopped_ms=1_000)
    assert all(when > at for when in missing)
    assert not missing or min(missing) == at + 1
    later = {("t", n): later_than(times, mirrored, at) for n, (times, mirrored) in enumerate(logs)}
    cut = cut_at(made, at, latest, later)
    for each, (times, mirrored) in zip(cut.partitions, logs, strict=True):
        assert all(when <= at for when in times[: each.offset])
        assert each.offset == mirrored or times[each.offset] > at
        assert each.surplus == mirrored - each.offset


def test_earlier_time_may_be_chosen_later_not() -> None:
    """Asked for a time at which records are missing, it says from when on."""
    assert chosen_time(99, 50, stopped_ms=1_000) == 50
    with pytest.raises(UsageError, match="missing from 100 ms on"):
        chosen_time(99, 100, stopped_ms=1_000)
    assert chosen_time(None, None, stopped_ms=1_000) == 1_000


def test_unknown_loss_has_no_common_time() -> None:
    """Where it is not known what is missing, no time is made up."""
    broken = loss_of(0, [5, 6], 1).model_copy(update={"problem": "1 offsets were deleted at the source"})
    with pytest.raises(UsageError, match=r"t/0: 1 offsets were deleted"):
        common_time(manifest(broken))


def test_what_came_after_the_failover_is_not_cut() -> None:
    """Records written at the destination afterwards are later than any cut, and never counted."""
    made = manifest(loss_of(0, [5, 6], 2))
    assert cut_at(made, 1_000, None, {("t", 0): 7}).partitions[0].surplus == 0


def test_cut_is_exported(tmp_path: Path) -> None:
    """JSON holds all of it, Parquet one row a partition."""
    made = manifest(loss_of(0, [5, 9], 2), loss_of(1, [3, 7], 1))
    cut = cut_at(made, 6, 6, {("t", 0): 1, ("t", 1): -1})
    export_cut(cut, tmp_path / "cut.json")
    assert ConsistentCut.model_validate_json((tmp_path / "cut.json").read_text()) == cut
    assert json.loads((tmp_path / "cut.json").read_text())["surplus"] == 1
    export_cut(cut, tmp_path / "cut.parquet")
    rows = pyarrow.parquet.read_table(tmp_path / "cut.parquet").to_pylist()
    assert [(row["partition"], row["offset"], row["surplus"]) for row in rows] == [(0, 1, 1), (1, 1, 0)]


def test_command_tells_and_exports_the_cut(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """`kmirror cut` prints time and offsets, writes the file asked for, and names a time that is too late."""
    install(monkeypatch)
    made = manifest(loss_of(0, [5, 9], 2), loss_of(1, [3, 7], 1))
    clusters = SimpleNamespace(destination=None)
    monkeypatch.setattr("kmirror_dagster.cli.recovery_cut.read_manifest", lambda *_: (made, clusters))

    def find(_destination: object, found: LossManifest, *, wanted_ms: int | None) -> ConsistentCut:
        latest = common_time(found)
        at = chosen_time(latest, wanted_ms, stopped_ms=1_000)
        return cut_at(found, at, latest, {("t", 0): 1, ("t", 1): -1})

    monkeypatch.setattr("kmirror_dagster.recovery.cut.find_cut", find)
    result = kmirror("cut", "orders", "--output", str(tmp_path / "cut.json"))
    assert result.exit_code == 0, result.output
    assert "1970-01-01T00:00:00.006+00:00" in result.stdout
    assert [line.split()[-3:] for line in result.stdout.splitlines()[-2:]] == [
        ["1", "2", "1"],
        ["1", "1", "0"],
    ]
    assert json.loads((tmp_path / "cut.json").read_text())["at_ms"] == 6
    assert "records are missing from 7 ms on" in refused(
        kmirror("cut", "orders", "--at", "1970-01-01T00:00:01Z")
    )
