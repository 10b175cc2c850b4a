"""Two owners of one partition at once, on purpose: late requests of the former one, both alive, one frozen."""

import asyncio
import random
from collections.abc import Callable
from pathlib import Path

import pytest

from kmirror_dagster.errors import ForeignWriteError, KmirrorError, ReplicationError
from tests.conftest import Clusters
from tests.helpers.comparison import differences, log_ranges
from tests.helpers.copier_process import CopierProcess, load
from tests.helpers.copying import Copying, run
from tests.helpers.crash_points import Ground, prepare, side_by_side
from tests.helpers.crash_scenarios import (
    ABORTED,
    BULK_MARKERS,
    DATA,
    LOG_START,
    TRANSACTION_MARKERS,
    Scenario,
    by_transactions,
    write_mixed,
)
from tests.helpers.crashing import Attempt, copy_through, crash, proxied_settings
from tests.helpers.histories import LONG, RawWriter, raw_batch_records
from tests.helpers.kafka import Record, create_topic, produce
from tests.helpers.proxy import Action, Api, Fault, When
from tests.helpers.waiting import unique_name, wait_until

pytestmark = pytest.mark.integration

_CONFIGS = {"retention.ms": "-1", "message.timestamp.after.max.ms": LONG}


# --- a request of the former owner that arrives late


class Takeover:
    """A request of a partition's first owner is held up; a second owner goes on."""

    def __init__(self, clusters: Clusters, ground: Ground, partition: int, api: Api, nth: int) -> None:
        self.tp = (ground.topic, partition)
        self.name = f"{ground.topic}-{partition}"
        self.what = f"{api.name.lower()} {nth}"
        self.error: BaseException | None = None
        self._clusters = clusters
        self._ground = ground
        self._held = Fault(Action.HOLD, api, nth, When.BEFORE, f"{self.name}-first")
        clusters.destination_proxy.arm(self._held)

    async def run(self, *, between: bool) -> None:
        """Let the held request go: between the second owner's first look and its first write, or afterwards."""
        first, second = self._owner("first", 1), self._owner("second", 2)
        attempt = Attempt()
        end = self._ground.ends[self.tp[1]]
        try:
            await copy_through(first, self.tp, end, attempt, until=self._held.hit.is_set)
            assert self._held.hit.is_set(), f"{self.what} was never sent"
            await crash(first)
            second.records = dict(first.records)
            if between:
                letting_go = asyncio.create_task(self._let_go_at_first_write())
                await copy_through(second, self.tp, end, attempt)
                letting_go.cancel()
            else:
                await copy_through(second, self.tp, end, attempt)
            self._held.release()
            await self._write_more()
            await second.caught_up({self.tp: self._ground.ends[self.tp[1]]})
            await second.link.close()
        except (KmirrorError, AssertionError) as error:
            self.error = error
        finally:
            self._held.release()
            await crash(first)
            await crash(second)

    def _owner(self, name: str, owner: int) -> Copying:
        copying = Copying(proxied_settings(self._clusters, self.name, f"{self.name}-{name}"), owner=owner)
        self._ground.scenario.prepare(copying)
        return copying

    async def _let_go_at_first_write(self) -> None:
        delays = [
            Fault(Action.DELAY, api, client=f"{self.name}-second", seconds=0.2)
            for api in self._ground.scenario.writes
        ]
        for delay in delays:
            self._clusters.destination_proxy.arm(delay)
        while not any(delay.hit.is_set() for delay in delays):
            await asyncio.sleep(0.002)
        self._held.release()

    async def _write_more(self) -> None:
        raw = RawWriter(self._clusters.source.bootstrap, self.tp[0])
        try:
            for seed in range(3):
                await raw.plain(self.tp[0], {self.tp[1]: raw_batch_records(seed, 60)})
                self._ground.ends[self.tp[1]] += 60
        finally:
            await raw.close()


def take_over(
    clusters: Clusters, scenario: Scenario, *, between: bool, aims: Callable[[Api], bool] = lambda _: True
) -> tuple[list[Takeover], dict[int, str]]:
    """Hold up the first two and the last request of each kind; what differs afterwards."""
    ground = prepare(clusters, scenario, 24)
    takeovers: list[Takeover] = []
    for api in filter(aims, scenario.writes):
        count = ground.asked_destination.get(api, 0)
        for nth in sorted({1, min(2, count), count} - {0}):
            takeovers.append(Takeover(clusters, ground, len(takeovers) + 1, api, nth))
    run(lambda: side_by_side(takeover.run(between=between) for takeover in takeovers))
    partitions = [takeover.tp[1] for takeover in takeovers]
    found = differences(clusters.source.bootstrap, clusters.destination.bootstrap, ground.topic, partitions)
    return takeovers, found


def never_sent(takeover: Takeover) -> bool:
    """The undisturbed copy retried something that this one did not have to."""
    return isinstance(takeover.error, AssertionError) and "never sent" in str(takeover.error)


@pytest.mark.case("C08")
@pytest.mark.parametrize("between", [False, True], ids=["afterwards", "between"])
@pytest.mark.parametrize(
    "scenario",
    [DATA, TRANSACTION_MARKERS, ABORTED, LOG_START],
    ids=lambda scenario: scenario.name.replace(" ", "-"),
)
def test_a_late_request_of_the_former_owner_changes_nothing(
    clusters: Clusters, scenario: Scenario, between: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Held up until another owner works, each request that brokers fence is refused or harmless."""
    scenario.apply_limits(monkeypatch)
    takeovers, found = take_over(
        clusters, scenario, between=between, aims=lambda api: api is not Api.WRITE_TXN_MARKERS
    )
    assert [f"{t.what}: {t.error!r}" for t in takeovers if t.error and not never_sent(t)] == []
    assert found == {}


@pytest.mark.case("C08")
@pytest.mark.parametrize("between", [False, True], ids=["afterwards", "between"])
def test_late_control_records_are_refused_or_end_in_a_failure_by_name(
    clusters: Clusters, between: bool
) -> None:
    """Control records written in bulk are fenced by those of the next owner, and never pass unnoticed.

    Between its first look at the log and its first write nothing fences them: connections give up what is under way
    before another node can take over.
    """
    takeovers, found = take_over(
        clusters, BULK_MARKERS, between=between, aims=lambda api: api is Api.WRITE_TXN_MARKERS
    )
    unnoticed = [
        takeover.what for takeover in takeovers if takeover.tp[1] in found and takeover.error is None
    ]
    assert unnoticed == []
    if not between:
        assert found == {}
    assert all(isinstance(t.error, ForeignWriteError) for t in takeovers if t.error is not None)


# --- both alive


async def copy_on(copying: Copying, tp: tuple[str, int], end: int) -> str | None:
    """Copy up to an offset; the reason when it ends in a failure.

    The former owner ends with its first one: to go on it would have to write its state, which is fenced. The newer one
    ends with what time does not heal.
    """
    while True:
        try:
            await copying.caught_up({tp: end}, 20)
        except (ReplicationError, AssertionError) as error:
            if copying.owner == 1 or not getattr(error, "retriable", False):
                return str(error)
        else:
            return None
        await asyncio.sleep(0.1)
        try:
            await copying.begin(*tp)
        except ReplicationError as error:
            if not error.retriable:
                return str(error)


def both_alive(clusters: Clusters, *, bulk: bool) -> tuple[list[str | None], dict[int, str]]:
    """Let two owners copy a partition side by side while it is written to; what they end with, what differs."""
    topic = unique_name("both")
    for cluster in (clusters.source, clusters.destination):
        create_topic(cluster.bootstrap, topic, 1, _CONFIGS)

    async def main() -> list[str | None]:
        raw = RawWriter(clusters.source.bootstrap, topic)
        await write_mixed(raw, topic, [0], 4)
        owners = [
            Copying(proxied_settings(clusters, topic, f"{topic}-{number}"), owner=number) for number in (1, 2)
        ]
        for owner in owners:
            if not bulk:
                by_transactions(owner)
        try:
            await owners[0].begin(topic)
            owners[1].records = owners[0].records
            await owners[1].begin(topic)
            await write_mixed(raw, topic, [0], 12, seed=4)
            end = log_ranges(clusters.source.bootstrap, topic, [0])[0][1]
            return list(await asyncio.gather(*(copy_on(owner, (topic, 0), end) for owner in owners)))
        finally:
            for owner in owners:
                await crash(owner)
            await raw.close()

    ends = run(main)
    return ends, differences(clusters.source.bootstrap, clusters.destination.bootstrap, topic, [0])


@pytest.mark.case("C08")
def test_two_owners_at_once_make_one_log(clusters: Clusters) -> None:
    """Data, aborted runs and markers by transactions: brokers let one of two owners through, the log is identical."""
    ends, found = both_alive(clusters, bulk=False)
    assert found == {}, ends
    assert ends[1] is None


@pytest.mark.case("C08")
def test_two_owners_that_write_control_records_in_bulk_are_noticed(clusters: Clusters) -> None:
    """Where brokers cannot tell them apart, the log is identical or one of them has failed with the offset."""
    ends, found = both_alive(clusters, bulk=True)
    assert found == {} or ends != [None, None], found


@pytest.mark.case("C08")
def test_an_owner_that_was_frozen_changes_nothing_when_it_wakes(clusters: Clusters, tmp_path: Path) -> None:
    """SIGSTOP in the middle of copying, another one takes over, SIGCONT: identical, under writes all the time."""
    topic = unique_name("frozen")
    partitions = range(3)
    for cluster in (clusters.source, clusters.destination):
        create_topic(cluster.bootstrap, topic, len(partitions), _CONFIGS)
    source, destination = clusters.source.bootstrap, clusters.destination.bootstrap

    def write(seed: int) -> None:
        async def main() -> None:
            raw = RawWriter(source, f"{topic}-{seed}")
            await write_mixed(raw, topic, partitions, 5, seed=seed)
            await raw.close()

        run(main)

    def copied() -> bool:
        return log_ranges(destination, topic, partitions) == log_ranges(source, topic, partitions)

    def copier(owner: int) -> CopierProcess:
        return CopierProcess.start(
            source, destination, topic, topic, len(partitions), tmp_path, owner=owner, bulk=False
        )

    write(0)
    with copier(1) as first:
        wait_until(lambda: all(load(tmp_path, topic, p) for p in partitions), what="first owner")
        first.freeze()
        write(10)
        with copier(2) as second:
            wait_until(copied, 60, what="second owner")
            first.wake()
            write(20)
            wait_until(copied, 60, what="both owners")
            second.kill()
        first.kill()
    assert differences(source, destination, topic, partitions) == {}


# --- somebody else


def test_a_foreign_record_in_place_of_a_lost_batch_is_not_taken_for_ours(clusters: Clusters) -> None:
    """A batch is lost with its connection, and somebody else's record takes its offset: FAILED, naming the offset."""
    topic = unique_name("foreign")
    for cluster in (clusters.source, clusters.destination):
        create_topic(cluster.bootstrap, topic, 1, _CONFIGS)
    fault = clusters.destination_proxy.arm(Fault(Action.DROP, Api.PRODUCE, 3, When.BEFORE, topic))

    async def main() -> str:
        raw = RawWriter(clusters.source.bootstrap, topic)
        for seed in range(6):
            await raw.plain(topic, {0: raw_batch_records(seed, 60)})
        await raw.close()
        copying = Copying(proxied_settings(clusters, topic, topic))
        try:
            await copying.begin(topic)
            await copying.until(fault.hit.is_set)
            await asyncio.to_thread(produce, clusters.destination.bootstrap, topic, [Record(b"not ours")])
            fault.release()
            with pytest.raises(ForeignWriteError) as failure:
                await copying.until(lambda: False, 20)
            return str(failure.value)
        finally:
            await copying.link.close()

    assert "ends at 121 instead of 120" in run(main)
    assert log_ranges(clusters.destination.bootstrap, topic, [0])[0] == (0, 121)


# --- handed over in order


@pytest.mark.parametrize("bulk", [True, False], ids=["bulk", "transactions"])
def test_a_partition_handed_over_in_mid_work_stays_one_log(clusters: Clusters, bulk: bool) -> None:
    """Stopped at random moments and begun by another owner at once, twenty times: nothing is on its way any more."""
    topic = unique_name("handed")
    for cluster in (clusters.source, clusters.destination):
        create_topic(cluster.bootstrap, topic, 1, _CONFIGS)
    rng = random.Random(11)
    tp = (topic, 0)

    async def main() -> None:
        raw = RawWriter(clusters.source.bootstrap, topic)
        owners = [Copying(proxied_settings(clusters, topic, f"{topic}-{n}"), owner=n) for n in range(2)]
        for owner in owners:
            if not bulk:
                by_transactions(owner)
        try:
            for number in range(20):
                owner = owners[number % 2]
                owner.owner = number + 1
                owner.records = owners[0].records or owners[1].records
                await owner.begin(*tp)
                writing = asyncio.create_task(write_mixed(raw, topic, [0], 1, seed=number))
                await asyncio.sleep(rng.uniform(0, 0.06))
                position = await owner.link.stop(*tp, 10)
                reached = await asyncio.to_thread(log_ranges, clusters.destination.bootstrap, topic, [0])
                assert position.offset == reached[0][1]
                await writing
                assert not owner.failures
            owners[0].owner = 21
            await owners[0].begin(*tp)
            end = log_ranges(clusters.source.bootstrap, topic, [0])[0][1]
            await owners[0].caught_up({tp: end})
        finally:
            for owner in owners:
                await owner.link.close()
            await raw.close()

    run(main)
    assert differences(clusters.source.bootstrap, clusters.destination.bootstrap, topic, [0]) == {}
