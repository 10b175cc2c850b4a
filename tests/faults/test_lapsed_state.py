"""A destination that forgets: producer states and transactional ids expire within moments."""

import asyncio
from collections.abc import Iterator

import pytest

from kmirror_dagster.sandbox.cluster import SandboxCluster
from tests.conftest import Clusters
from tests.helpers.comparison import differences, log_ranges
from tests.helpers.copying import Copying, run
from tests.helpers.crash_points import attack, chosen_points, failed, prepare
from tests.helpers.crash_scenarios import SCENARIOS, Scenario, by_transactions, write_mixed
from tests.helpers.crashing import proxied_settings
from tests.helpers.histories import LONG, RawWriter
from tests.helpers.kafka import create_topic
from tests.helpers.proxy import FaultProxy, behind, lead
from tests.helpers.waiting import unique_name

pytestmark = [pytest.mark.integration, pytest.mark.faults]

_FORGETFUL = {
    "producer.id.expiration.ms": "1000",
    "producer.id.expiration.check.interval.ms": "200",
    "transactional.id.expiration.ms": "2000",
    "transaction.remove.expired.transaction.cleanup.interval.ms": "500",
}


@pytest.fixture(scope="module")
def forgetful(clusters: Clusters, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Clusters]:
    """The session's source and a destination that forgets producers after a second."""
    with FaultProxy() as proxy:
        destination = SandboxCluster(
            "forgetful", tmp_path_factory.mktemp("forgetful"), 1, _FORGETFUL, listeners=behind(proxy)
        )
        try:
            destination.start()
            lead(proxy, destination)
            yield Clusters(clusters.source, destination, clusters.source_proxy, proxy)
        finally:
            destination.remove()


@pytest.mark.timeout(900)
@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.name.replace(" ", "-"))
def test_crash_points_while_producers_are_forgotten(
    forgetful: Clusters, scenario: Scenario, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The records are old, so that brokers forget their producer at each look: killed or cut off, identical."""
    scenario.apply_limits(monkeypatch)
    ground = prepare(forgetful, scenario, 96)
    points = chosen_points(scenario.writes, ground.asked_destination, all_of_them=False)
    assert failed(attack(forgetful, ground, points, forgetful.destination_proxy)) == []


@pytest.mark.parametrize("bulk", [True, False], ids=["bulk", "transactions"])
def test_copying_goes_on_after_everything_was_forgotten(forgetful: Clusters, bulk: bool) -> None:
    """Idle for longer than all state lives, again and again, then data of every kind."""
    topic = unique_name("forgotten")
    for cluster in (forgetful.source, forgetful.destination):
        create_topic(
            cluster.bootstrap, topic, 1, {"retention.ms": "-1", "message.timestamp.after.max.ms": LONG}
        )

    async def main() -> None:
        raw = RawWriter(forgetful.source.bootstrap, topic)
        copying = Copying(proxied_settings(forgetful, topic, topic))
        if not bulk:
            by_transactions(copying)
        try:
            await copying.begin(topic)
            for number in range(4):
                await write_mixed(raw, topic, [0], 2, seed=number)
                end = log_ranges(forgetful.source.bootstrap, topic, [0])[0][1]
                await copying.caught_up({(topic, 0): end}, 30)
                await asyncio.sleep(4)  # idle for longer than the longest of those lives
        finally:
            await copying.link.close()
            await raw.close()

    run(main)
    assert differences(forgetful.source.bootstrap, forgetful.destination.bootstrap, topic, [0]) == {}
