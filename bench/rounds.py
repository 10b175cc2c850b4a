"""One round: a tool mirrors a topic onto a clean destination, watched from outside."""

import asyncio
import os
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass

import psutil

from bench.errors import BenchError
from bench.guarded import GuardedProcess, Usage
from bench.workloads import PARTITIONS
from kmirror_dagster.broker.wire import LATEST, WireCluster
from kmirror_dagster.errors import KmirrorError
from kmirror_dagster.settings import ClusterSettings

_POLL_S = 0.02
# The clock starts when this part has arrived: start-up, and most of the JVM's compiling, is left out for both.
WARM_UP = 0.1
_FIRST_RECORD_S = 120.0
_STALLED_S = 60.0


@dataclass(frozen=True)
class Round:
    """What one round measured; rates and processor time are of the part after the warm-up.

    Attributes:
        tool: who mirrored.
        records: data records in the measured part.
        seconds: wall clock of that part.
        cpu_s: processor seconds of the tool in that part.
        peak_rss_bytes: highest resident memory of the tool over its life.
        load_average: of the machine, over a minute, at the end.
        foreign_cpu: processors busy with something that is neither broker, tool nor benchmark, mean.
    """

    tool: str
    records: int
    seconds: float
    cpu_s: float
    peak_rss_bytes: int
    load_average: float
    foreign_cpu: float

    @property
    def records_per_s(self) -> float:
        """Throughput."""
        return self.records / self.seconds

    @property
    def cpu_us_per_record(self) -> float:
        """Processor time of one record, microseconds."""
        return self.cpu_s / self.records * 1e6

    def figures(self) -> dict[str, float | str]:
        """For the results file."""
        raw = {
            key: round(value, 4) if isinstance(value, float) else value for key, value in asdict(self).items()
        }
        return {
            **raw,
            "records_per_s": round(self.records_per_s),
            "cpu_us_per_record": round(self.cpu_us_per_record, 3),
        }


@dataclass(frozen=True)
class _Reading:
    offsets: int
    at: float
    usage: Usage
    machine_s: float
    known_s: float


class Watch:
    """Watches a topic of the destination, and the tool that fills it.

    Args:
        destination: the cluster.
        topic: the topic.
        process: the tool.
        known: processes whose processor time is not foreign: the brokers.
    """

    def __init__(
        self, destination: ClusterSettings, topic: str, process: GuardedProcess, known: list[int]
    ) -> None:
        self._topic = topic
        self._settings = destination
        self._process = process
        self._known = [psutil.Process(pid) for pid in (*known, os.getpid())]

    def run(self, tool: str, target: int, records: int, note: Callable[[str], None]) -> Round:
        """Wait until the topic holds `target` offsets, which stand for `records` data records."""
        begin, end = asyncio.run(self._follow(target, note))
        share = (end.offsets - begin.offsets) / target
        seconds = end.at - begin.at
        cpu_s = end.usage.cpu_s - begin.usage.cpu_s
        foreign = end.machine_s - begin.machine_s - cpu_s - (end.known_s - begin.known_s)
        return Round(
            tool,
            round(records * share),
            seconds,
            cpu_s,
            end.usage.peak_rss_bytes,
            os.getloadavg()[0],
            max(0.0, foreign / seconds),
        )

    async def _follow(self, target: int, note: Callable[[str], None]) -> tuple[_Reading, _Reading]:
        cluster = WireCluster(self._settings, role="destination")
        begin: _Reading | None = None
        offsets, changed, told = 0, time.monotonic(), 0.0
        try:
            while True:
                found = await self._offsets(cluster)
                reading = self._read(found)
                if found != offsets:
                    offsets, changed = found, reading.at
                if begin is None and found >= target * WARM_UP:
                    begin = reading
                if found >= target:
                    if begin is None or found > target:
                        raise BenchError(
                            f"{self._topic}: destination holds {found} offsets instead of {target}"
                        )
                    return begin, reading
                self._check(found, reading.at - changed)
                if reading.at - told > 2:
                    told = reading.at
                    note(f"{found / target:.0%}")
                await asyncio.sleep(_POLL_S)
        finally:
            await cluster.close()

    def _check(self, found: int, silent_s: float) -> None:
        if not self._process.is_alive:
            raise BenchError(f"the tool ended; see {self._process.log}:\n{self._process.tail()}")
        if silent_s > (_STALLED_S if found else _FIRST_RECORD_S):
            raise BenchError(f"nothing arrived for {silent_s:.0f} s at {found}:\n{self._process.tail()}")

    async def _offsets(self, cluster: WireCluster) -> int:
        wanted = [(self._topic, partition) for partition in range(PARTITIONS)]
        try:
            found = await cluster.list_offsets(wanted, LATEST)
        except KmirrorError:
            return 0  # MirrorMaker 2 makes the topic itself
        return sum(outcome.offset for outcome in found.values() if outcome.error is None)

    def _read(self, offsets: int) -> _Reading:
        busy = psutil.cpu_times()
        machine = busy.user + busy.nice + busy.system + busy.irq + busy.softirq
        known = sum(times.user + times.system for times in (each.cpu_times() for each in self._known))
        return _Reading(offsets, time.monotonic(), self._process.usage(), machine, known)
