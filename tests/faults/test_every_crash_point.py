"""Every single request of a mirror, at both clusters, hit in every way."""

import pytest

from tests.conftest import Clusters
from tests.helpers.crash_points import LOOKS, Ground, Point, attack, chosen_points, failed, prepare
from tests.helpers.crash_scenarios import SCENARIOS, Scenario
from tests.helpers.proxy import Api, FaultProxy

pytestmark = [pytest.mark.integration, pytest.mark.faults]

_PARTITIONS = 120
_AT_SOURCE = (Api.METADATA, Api.LIST_OFFSETS, Api.FETCH)


@pytest.fixture(params=SCENARIOS, ids=lambda scenario: scenario.name.replace(" ", "-"))
def scenario(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Scenario:
    found: Scenario = request.param
    found.apply_limits(monkeypatch)
    return found


def in_groups(points: list[Point]) -> list[list[Point]]:
    """As many as one topic has partitions for."""
    return [points[start : start + _PARTITIONS - 1] for start in range(0, len(points), _PARTITIONS - 1)]


def attack_all(clusters: Clusters, ground: Ground, points: list[Point], proxy: FaultProxy) -> None:
    for group in in_groups(points):
        outcomes = attack(clusters, ground, group, proxy)
        assert failed(outcomes) == []
        ground = prepare(clusters, ground.scenario, _PARTITIONS)


@pytest.mark.timeout(1_800)
def test_every_request_to_the_destination(clusters: Clusters, scenario: Scenario) -> None:
    """Each occurrence of each request, before and after: killed, cut off, half sent, done behind our back."""
    ground = prepare(clusters, scenario, _PARTITIONS)
    apis = (*scenario.writes, *LOOKS, Api.FIND_COORDINATOR, Api.DESCRIBE_TRANSACTIONS)
    points = list(chosen_points(apis, ground.asked_destination, all_of_them=True))
    attack_all(clusters, ground, points, clusters.destination_proxy)


@pytest.mark.timeout(1_800)
def test_every_request_to_the_source(clusters: Clusters, scenario: Scenario) -> None:
    """The same at the source."""
    ground = prepare(clusters, scenario, _PARTITIONS)
    points = list(chosen_points(_AT_SOURCE, ground.asked_source, all_of_them=True))
    attack_all(clusters, ground, points, clusters.source_proxy)
