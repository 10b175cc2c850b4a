"""The writer killed or cut off at the steps of its protocol: identical afterwards, each time."""

import pytest

from tests.conftest import Clusters
from tests.helpers.crash_points import attack, chosen_points, failed, prepare
from tests.helpers.crash_scenarios import SCENARIOS, Scenario
from tests.helpers.proxy import Api

pytestmark = pytest.mark.integration

_READS = (Api.LIST_OFFSETS, Api.OFFSET_FOR_LEADER_EPOCH, Api.DESCRIBE_PRODUCERS)


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.name.replace(" ", "-"))
def test_a_mirror_hit_at_any_write_is_identical_afterwards(
    clusters: Clusters, scenario: Scenario, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed or cut off before or after requests that write, the log ends up the same."""
    scenario.apply_limits(monkeypatch)
    ground = prepare(clusters, scenario, 96)
    points = list(chosen_points(scenario.writes, ground.asked_destination, all_of_them=False))
    outcomes = attack(clusters, ground, points, clusters.destination_proxy)
    assert failed(outcomes) == []
    assert sum(outcome.hit for outcome in outcomes) >= 0.8 * len(points)
