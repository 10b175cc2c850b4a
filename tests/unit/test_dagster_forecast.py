"""RPO as a contract: the check and the lag check turn red, freshness does, a forecast is a table."""

from collections.abc import Iterator

import dagster as dg
import pytest

from kmirror_dagster.broker.admin_types import CommittedOffset
from kmirror_dagster.orchestration.targets import MirrorTarget
from kmirror_dagster.recovery.forecast import Forecast, forecast_groups
from kmirror_dagster.recovery.positions import KnownPartition
from kmirror_dagster.settings import MirrorSettings, PolicySettings
from kmirror_dagster.verification.ranges import LogEnds
from tests.helpers.dagster_ticks import Ticker, failure_text, ticker
from tests.helpers.fake_node import FakeNode, fake_resource

KEY = dg.AssetKey(["kafka_mirror", "orders"])


@pytest.fixture
def node() -> FakeNode:
    node = FakeNode(topics={"a": 2})
    clusters = {side: {"bootstrap.servers": f"{side}:9092"} for side in ("source", "destination")}
    node.document_text = {"mirror": "orders", **clusters, "policies": {"rpo_seconds": 5}}
    return node


@pytest.fixture
def made(node: FakeNode, monkeypatch: pytest.MonkeyPatch) -> Iterator[Ticker]:
    def look(settings: MirrorSettings, known: list[KnownPartition]) -> Forecast:
        return Forecast(
            mirror=settings.mirror,
            at_ms=1,
            source_reachable=True,
            loses_records=20,
            loses_seconds=max(each.lag_seconds for each in known),
            rpo_seconds=settings.policies.rpo_seconds,
            groups=forecast_groups(
                {("a", 0): 120},
                {("a", 0): LogEnds(0, 100, 100)},
                {"billing": {("a", 0): CommittedOffset(110)}, "idle": {("a", 0): CommittedOffset(120)}},
                {"billing": {("a", 0): CommittedOffset(60)}},
            ),
        )

    monkeypatch.setattr("kmirror_dagster.recovery.forecast.look_ahead", look)
    target = MirrorTarget("orders", PolicySettings(rpo_seconds=5))
    with dg.DagsterInstance.ephemeral() as instance:
        yield ticker(instance, fake_resource(node), target)


def check(made: Ticker, name: str) -> dg.AssetCheckEvaluation:
    job = made.defs.resolve_implicit_global_asset_job_def()
    key = dg.AssetCheckKey(KEY, name)
    result = job.get_subset(asset_selection=set(), asset_check_selection={key}).execute_in_process(
        instance=made.instance
    )
    (found,) = result.get_asset_check_evaluations()
    return found


def test_forecast_is_a_table(made: Ticker) -> None:
    """The job logs one row a group, those that lose most first, and figures to plot."""
    assert made.run("kmirror_forecast").success
    figures = made.instance.fetch_observations(KEY, limit=1).records[0].asset_observation.metadata  # type: ignore[union-attr]
    assert figures["forecast_loses_records"].value == 20
    rows = [record.data for record in figures["if_failed_over_now"].records]
    assert rows[0] == {
        "group": "billing",
        "re_reads": 40,
        "loses": 10,
        "read_ahead": 10,
        "without_position": 0,
        "resumes_at": "a/0@60",
    }
    assert (rows[1]["group"], rows[1]["without_position"]) == ("idle", 1)


def test_broken_promise_is_red(made: Ticker, node: FakeNode) -> None:
    """More seconds behind than `rpo_seconds`: forecast, check and lag check fail as errors."""
    assert check(made, "rpo_kept").passed
    assert check(made, "lag_within_limits").passed
    node.set_state("a", 1, node.partitions["a", 1].state, lag_seconds=6.0)  # type: ignore[arg-type]
    found = check(made, "rpo_kept")
    assert (found.passed, found.severity) == (False, dg.AssetCheckSeverity.ERROR)
    assert found.description == "a failover now would lose 20 records, 6.0 s (allowed: 5 s)"
    lag = check(made, "lag_within_limits")
    assert (lag.passed, lag.severity) == (False, dg.AssetCheckSeverity.ERROR)
    assert "6.0 s (allowed: 5 s)" in failure_text(made.run("kmirror_forecast"))


def test_broken_promise_ends_freshness(made: Ticker, node: FakeNode) -> None:
    """A mirror that breaks its promise is observed, not materialized: its freshness policy turns red."""
    made.tick("orders_refresh")
    assert len(made.instance.fetch_materializations(KEY, limit=9).records) == 1
    node.set_state("a", 1, node.partitions["a", 1].state, lag_seconds=6.0, lag_records=5)  # type: ignore[arg-type]
    made.tick("orders_refresh")
    assert len(made.instance.fetch_materializations(KEY, limit=9).records) == 1
    assert len(made.instance.fetch_observations(KEY, limit=9).records) == 1
