"""The writer killed or cut off at the steps of its protocol: identical afterwards, each time."""

from pathlib import Path

import pytest

from tests.conftest import Clusters
from tests.helpers.crash_points import LOOKS, attack, chosen_points, failed, prepare
from tests.helpers.crash_scenarios import LOG_START, SCENARIOS, Scenario
from tests.helpers.killing import kill_again_and_again
from tests.helpers.proxy import Api

pytestmark = pytest.mark.integration


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


def test_a_mirror_hit_while_it_looks_is_identical_afterwards(
    clusters: Clusters, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed or cut off at requests that only read, at either cluster, the log ends up the same."""
    scenario = LOG_START
    scenario.apply_limits(monkeypatch)
    ground = prepare(clusters, scenario, 64)
    looks = list(chosen_points(LOOKS, ground.asked_destination, all_of_them=False))
    fetches = list(chosen_points((Api.FETCH, Api.LIST_OFFSETS), ground.asked_source, all_of_them=False))
    outcomes = attack(clusters, ground, looks, clusters.destination_proxy)
    assert failed(outcomes) == []
    ground = prepare(clusters, scenario, 64)
    outcomes = attack(clusters, ground, fetches, clusters.source_proxy)
    assert failed(outcomes) == []


def test_a_process_killed_again_and_again_leaves_an_identical_log(clusters: Clusters, tmp_path: Path) -> None:
    """SIGKILL at random moments, three times, while the source is written to; another owner goes on each time."""
    found = kill_again_and_again(clusters, tmp_path, kills=3, partitions=3, seed=1)
    assert found == {}
