"""Ground for faults: a topic with many partitions alike, each of which one fault is tried on."""

import asyncio
import logging
import time
from collections.abc import Awaitable, Iterable, Iterator
from dataclasses import dataclass

from kmirror_dagster.errors import KmirrorError
from tests.conftest import Clusters
from tests.helpers.comparison import differences, log_ranges
from tests.helpers.copying import Copying, run
from tests.helpers.crash_scenarios import Scenario
from tests.helpers.crashing import Attempt, copy_with_fault, proxied_settings
from tests.helpers.histories import LONG, RawWriter
from tests.helpers.kafka import create_topic
from tests.helpers.proxy import Action, Api, Fault, FaultProxy, When
from tests.helpers.waiting import unique_name

log = logging.getLogger(__name__)

# Faults tried side by side: each waits most of its time.
_AT_ONCE = 6
LOOKS = (Api.METADATA, Api.LIST_OFFSETS, Api.OFFSET_FOR_LEADER_EPOCH, Api.DESCRIBE_PRODUCERS)
HOW = (
    (When.BEFORE, Action.CRASH),
    (When.AFTER, Action.CRASH),
    (When.BEFORE, Action.CLOSE),
    (When.AFTER, Action.CLOSE),
    (When.BEFORE, Action.BEHIND_BACK),
    (When.BEFORE, Action.HALF),
)


@dataclass(frozen=True)
class Point:
    """Where a mirror is hit, and how."""

    api: Api
    nth: int
    when: When
    action: Action

    def __str__(self) -> str:
        """For the report."""
        return f"{self.action.value} {self.when.value} {self.api.name.lower()} {self.nth}"

    def fault(self, client: str) -> Fault:
        """The fault, aimed at one client."""
        return Fault(self.action, self.api, self.nth, self.when, client)


@dataclass
class Ground:
    """A scenario's topic on both sides, and what an undisturbed copy of a partition asks for."""

    scenario: Scenario
    topic: str
    ends: dict[int, int]
    asked_source: dict[int, int]
    asked_destination: dict[int, int]


@dataclass
class Outcome:
    """What became of one partition."""

    point: Point
    attempt: Attempt | None = None
    error: BaseException | None = None
    hit: bool = False
    seconds: float = 0.0
    difference: str | None = None

    def __str__(self) -> str:
        """One line of the report."""
        if self.error is not None:
            result = repr(self.error)
        elif not self.hit:
            result = "never came to it"
        else:
            result = "identical" if self.difference is None else f"DIFFERS: {self.difference}"
        retries = (
            ""
            if self.attempt is None
            else f"{self.attempt.resyncs} resyncs, {len(self.attempt.failures)} retries"
        )
        return f"{self.point}: {result} ({self.seconds:.1f} s; {retries})"


def prepare(clusters: Clusters, scenario: Scenario, partitions: int) -> Ground:
    """Fill a topic, and copy its first partition undisturbed."""
    topic = unique_name("crash")
    configs = {"retention.ms": "-1", "message.timestamp.after.max.ms": LONG}
    create_topic(clusters.source.bootstrap, topic, partitions, configs | scenario.configs)
    create_topic(clusters.destination.bootstrap, topic, partitions, configs)

    async def write() -> None:
        raw = RawWriter(clusters.source.bootstrap, topic)
        try:
            await scenario.write(raw, clusters, topic, range(partitions))
        finally:
            await raw.close()

    run(write)
    ranges = log_ranges(clusters.source.bootstrap, topic, range(partitions))
    ends = {partition: end for partition, (_, end) in ranges.items()}
    for proxy in (clusters.source_proxy, clusters.destination_proxy):
        proxy.reset()

    async def copy() -> None:
        copying = Copying(proxied_settings(clusters, topic, f"{topic}-undisturbed"))
        scenario.prepare(copying)
        try:
            await copying.begin(topic, 0)
            await copying.caught_up({(topic, 0): ends[0]})
        finally:
            await copying.link.close()

    run(copy)
    return Ground(
        scenario, topic, ends, dict(clusters.source_proxy.counts), dict(clusters.destination_proxy.counts)
    )


def chosen_points(apis: Iterable[Api], asked: dict[int, int], *, all_of_them: bool) -> Iterator[Point]:
    """Requests of some kinds, each hit in every way: the first two and the last, or all."""
    for api in apis:
        count = asked.get(api, 0)
        chosen = range(1, count + 1) if all_of_them else sorted({1, min(2, count), count} - {0})
        for nth in chosen:
            for when, action in HOW:
                yield Point(api, nth, when, action)


def attack(clusters: Clusters, ground: Ground, points: Iterable[Point], proxy: FaultProxy) -> list[Outcome]:
    """Try one point on one partition each, and compare all of them."""
    outcomes = {partition: Outcome(point) for partition, point in enumerate(points, start=1)}

    async def one(partition: int, outcome: Outcome) -> None:
        mirror = f"{ground.topic}-{partition}"
        fault = proxy.arm(outcome.point.fault(f"{mirror}-first"))
        began = time.monotonic()
        try:
            outcome.attempt = await copy_with_fault(
                clusters,
                mirror,
                (ground.topic, partition),
                ground.ends[partition],
                fault.hit,
                crashes=outcome.point.action is Action.CRASH,
                prepare=ground.scenario.prepare,
            )
        except (KmirrorError, AssertionError) as error:
            outcome.error = error
        outcome.hit = fault.hit.is_set()
        outcome.seconds = time.monotonic() - began

    run(lambda: side_by_side(one(partition, outcome) for partition, outcome in outcomes.items()))
    found = differences(
        clusters.source.bootstrap, clusters.destination.bootstrap, ground.topic, list(outcomes)
    )
    for partition, outcome in outcomes.items():
        outcome.difference = found.get(partition)
        log.info("%s: %s", ground.scenario.name, outcome)
    return list(outcomes.values())


async def side_by_side(works: Iterable[Awaitable[None]]) -> None:
    """Do works, some at a time."""
    room = asyncio.Semaphore(_AT_ONCE)

    async def one(work: Awaitable[None]) -> None:
        async with room:
            await work

    await asyncio.gather(*(one(work) for work in works))


def failed(outcomes: Iterable[Outcome]) -> list[str]:
    """Lines of those that did not end identical."""
    return [str(o) for o in outcomes if o.error is not None or o.difference is not None]
