"""One cause, one alert: debounced, per mirror, whichever way people are told."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import dagster as dg
import pytest
import yaml

from kmirror_dagster.lifecycle import MirrorState
from kmirror_dagster.orchestration import MirrorTarget
from kmirror_dagster.settings import FailoverSettings, PolicySettings
from tests.helpers.dagster_ticks import Ticker, ticker
from tests.helpers.fake_node import FakeNode, fake_resource
from tests.helpers.promql import read_expression

pytestmark = pytest.mark.case("E8")

ALERTS = Path(__file__).parents[2] / "docker" / "prometheus" / "alerts.yaml"
PARTITIONS = 500
TICKS = 10


@pytest.fixture
def instance() -> Iterator[dg.DagsterInstance]:
    with dg.DagsterInstance.ephemeral() as made:
        yield made


@pytest.fixture
def node() -> FakeNode:
    return FakeNode(topics={f"t{number}": PARTITIONS // 10 for number in range(10)})


def alerts_of(made: Ticker, ticks: int = TICKS) -> list[tuple[str, bool]]:
    """What people are told in some ticks."""
    return [
        (event.check_name, event.passed)
        for _ in range(ticks)
        for event in made.tick("orders_refresh").of(dg.AssetCheckEvaluation)
    ]


def test_failure_of_all_partitions_is_one_alert(instance: dg.DagsterInstance, node: FakeNode) -> None:
    """500 partitions fail of one cause, one after the other: told once, and once when it is over."""
    made = ticker(instance, fake_resource(node))
    made.tick("orders_refresh")
    told: list[tuple[str, bool]] = []
    for topic, number in list(node.partitions):
        node.set_state(topic, number, MirrorState.FAILED, error="the source does not answer")
        if number % 10 == 0:  # the sensor looks while they fail
            told += alerts_of(made, 1)
    assert told + alerts_of(made) == [("no_failed_partition", False)]
    node.set_all(MirrorState.MIRRORING)
    assert alerts_of(made) == [("no_failed_partition", True)]


def test_the_first_failure_is_told(instance: dg.DagsterInstance, node: FakeNode) -> None:
    """One partition of 500 is enough: told at the second look, with its reason."""
    made = ticker(instance, fake_resource(node))
    made.tick("orders_refresh")
    node.set_state("t0", 0, MirrorState.FAILED, error="foreign write at offset 7")
    assert made.tick("orders_refresh").of(dg.AssetCheckEvaluation) == []
    (event,) = made.tick("orders_refresh").of(dg.AssetCheckEvaluation)
    assert (event.check_name, event.passed) == ("no_failed_partition", False)
    assert "t0/0: foreign write at offset 7" in (event.description or "")


def test_what_comes_and_goes_is_not_told(instance: dg.DagsterInstance, node: FakeNode) -> None:
    """A failure that is over at the next look is no alert, however often that happens."""
    made = ticker(instance, fake_resource(node))
    made.tick("orders_refresh")
    for _ in range(TICKS):
        node.set_state("t0", 0, MirrorState.FAILED, error="moved")
        assert alerts_of(made, 1) == []
        node.set_state("t0", 0, MirrorState.MIRRORING)
        assert alerts_of(made, 1) == []


def test_a_source_that_is_down_is_one_failover(instance: dg.DagsterInstance, node: FakeNode) -> None:
    """However many looks and partitions: all ticks ask for the same run, of this mirror."""
    node.source_ok = False
    failover = FailoverSettings(bad_observations=5, cool_down_seconds=0)
    target = MirrorTarget("orders", PolicySettings(failover=failover))
    made = ticker(instance, fake_resource(node), target)
    runs = [run for _ in range(TICKS) for run in made.tick("orders_failover").runs]
    assert len({run.run_key for run in runs}) == 1


def rules() -> list[dict[str, Any]]:
    groups = yaml.safe_load(ALERTS.read_text(encoding="utf-8"))["groups"]
    return [rule for group in groups if group["name"] == "kmirror-mirrors" for rule in group["rules"]]


def test_prometheus_tells_of_mirrors_not_of_partitions() -> None:
    """Each alert on a mirror is one series per mirror at most, and waits before it fires."""
    alerts = [rule for rule in rules() if "alert" in rule]
    assert len(alerts) > 5
    for rule in alerts:
        found = read_expression(rule["expr"])
        assert "mirror" in found.grouped, rule["alert"]
        assert not found.grouped & {"topic", "partition"}, rule["alert"]
        assert "for" in rule, rule["alert"]
