"""Contents verified: the check, the job that goes on with certificates, windows of time and backfills."""

from collections.abc import Iterator
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import dagster as dg
import pytest

from kmirror_dagster.lifecycle import MirrorState
from kmirror_dagster.orchestration.contents_jobs import ReverifyConfig, window_of
from kmirror_dagster.verification.certificate import Certificate, DifferingRange, PartitionCertificate
from kmirror_dagster.verification.certifier import WindowReport
from kmirror_dagster.verification.report import Isolation
from tests.helpers.dagster_ticks import Ticker, failure_text, ticker
from tests.helpers.fake_node import FakeNode, fake_resource

KEY = dg.AssetKey(["kafka_mirror", "orders"])


def certificate(*, differs: bool = False) -> Certificate:
    found = [DifferingRange(first=42, end=50, differences=1, examples=["value at offset 42"])]
    return Certificate(
        mirror="orders",
        source_cluster_id="A",
        destination_cluster_id="B",
        isolations=[Isolation.READ_COMMITTED],
        began_ms=1,
        checked_ms=2,
        partitions=[
            PartitionCertificate(
                topic="a",
                partition=number,
                checked_to=100,
                source_end=130,
                destination_end=130,
                records={Isolation.READ_COMMITTED: 90},
                digests={Isolation.READ_COMMITTED: "cd" * 32},
                differing=found if differs and number else [],
            )
            for number in range(2)
        ],
    )


class Reading:
    """Stands in for the reading of both clusters; `asked` is what it was asked."""

    def __init__(self) -> None:
        self.answer = certificate()
        self.asked: list[dict[str, Any]] = []

    def __enter__(self) -> "Reading":
        return self

    def __exit__(self, *_: object) -> None: ...

    def certify(self, _sides: object, store: Any, topics: list[str], **options: Any) -> Certificate:
        self.asked.append({"path": store.path, "topics": topics, **options})
        return self.answer

    def recheck(self, _sides: object, topics: list[str], **options: Any) -> WindowReport:
        self.asked.append({"topics": topics, **options})
        return WindowReport(
            since_ms=options["since_ms"], until_ms=options["until_ms"], certificate=self.answer
        )


@pytest.fixture
def node() -> FakeNode:
    node = FakeNode(topics={"a": 2, "b": 1})
    clusters = {side: {"bootstrap.servers": f"{side}:9092"} for side in ("source", "destination")}
    node.document_text = {"mirror": "orders", **clusters}
    return node


@pytest.fixture
def reading(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Reading:
    reading = Reading()
    monkeypatch.setenv("KMIRROR_STATE_DIR", str(tmp_path))
    monkeypatch.setattr("kmirror_dagster.verification.both_sides.BothSides", lambda _settings: reading)
    monkeypatch.setattr("kmirror_dagster.verification.certifier.certify", reading.certify)
    monkeypatch.setattr("kmirror_dagster.verification.certifier.recheck", reading.recheck)
    return reading


@pytest.fixture
def made(node: FakeNode, reading: Reading) -> Iterator[Ticker]:
    with dg.DagsterInstance.ephemeral() as instance:
        yield ticker(instance, fake_resource(node))


def check_status(made: Ticker) -> Any:
    key = dg.AssetCheckKey(KEY, "contents_verified")
    records = made.instance.event_log_storage.get_asset_check_execution_history(key, limit=1)
    return records[0].event.dagster_event.asset_check_evaluation_data  # type: ignore[union-attr]


def test_certificates_are_gone_on_with(made: Ticker, reading: Reading, tmp_path: Path) -> None:
    """The job reads on, reports the check green and logs figures to plot; its file is that of the command."""
    assert made.run("kmirror_certify").success
    assert reading.asked[0]["path"] == tmp_path / "certificates" / "orders.json"
    assert reading.asked[0]["topics"] == ["a", "b"]
    figures = made.instance.fetch_observations(KEY, limit=1).records[0].asset_observation.metadata  # type: ignore[union-attr]
    assert figures["certified_records"].value == 180
    assert figures["certified_offsets_unread"].value == 60
    evaluation = check_status(made)
    assert evaluation.passed
    assert evaluation.description == "180 records of 2 partitions are the same, 60 offsets not read yet"


def test_what_differs_turns_red(made: Ticker, reading: Reading) -> None:
    """A differing record fails the run and the check, naming partition and offset."""
    reading.answer = certificate(differs=True)
    assert failure_text(made.run("kmirror_certify")) == "orders: not the same: a/1: value at offset 42"
    assert not check_status(made).passed
    assert check_status(made).severity is dg.AssetCheckSeverity.ERROR


def test_check_reads_on_by_itself(made: Ticker, reading: Reading) -> None:
    """Running the check in Dagster goes on with the certificate and says what it says."""
    job = made.defs.resolve_implicit_global_asset_job_def()
    key = dg.AssetCheckKey(KEY, "contents_verified")
    result = job.get_subset(asset_selection=set(), asset_check_selection={key}).execute_in_process(
        instance=made.instance
    )
    assert result.get_asset_check_evaluations()[0].passed
    assert len(reading.asked) == 1


def test_days_are_a_backfill(made: Ticker, reading: Reading, node: FakeNode) -> None:
    """One day of a backfill reads that day; its tags say which topics, stopped ones up to their last position."""
    node.set_all(MirrorState.STOPPED, last_mirror_offset=77)
    job = made.defs.resolve_job_def("kmirror_reverify")
    result = job.execute_in_process(
        instance=made.instance,
        partition_key="2026-01-31",
        tags={"kmirror/topics": "a,c"},
        resources={"kmirror": made.resource},
    )
    assert result.success
    day = int(datetime(2026, 1, 31, tzinfo=timezone.utc).timestamp() * 1_000)
    assert reading.asked == [
        {
            "topics": ["a"],
            "since_ms": day,
            "until_ms": day + 86_400_000,
            "ceilings": {("a", 0): 77, ("a", 1): 77},
        }
    ]


def test_window_by_configuration(made: Ticker, reading: Reading) -> None:
    """A window of hours for chosen topics comes from the launchpad; what is no time is refused."""
    config = {"topics": ["b"], "since": "2026-01-31T10:00:00Z", "until": "2026-01-31T12:00:00+01:00"}
    assert made.run("kmirror_reverify", config).success
    assert (reading.asked[0]["until_ms"] - reading.asked[0]["since_ms"]) == 3_600_000
    assert "no time such as" in failure_text(made.run("kmirror_reverify", {"since": "yesterday"}))
    reading.answer = certificate(differs=True)
    assert "value at offset 42" in failure_text(made.run("kmirror_reverify", config))


def test_configuration_goes_before_the_day() -> None:
    """A window in the configuration is not cut to the day; without either, everything is read."""
    since, until = window_of(ReverifyConfig(since="2026-01-31T10:00:00Z"), "2026-02-02")
    assert (since, until) == (datetime(2026, 1, 31, 10, tzinfo=timezone.utc), None)
    assert window_of(ReverifyConfig(), None) == (None, None)
