"""One round: a tool mirrors a topic onto a clean destination, watched from outside."""

import asyncio
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

from bench.errors import BenchError
from bench.guarded import GuardedProcess
from bench.meter import Meter, Reading, Span, between
from bench.workloads import PARTITIONS
from kmirror_dagster.broker.wire import LATEST, WireCluster
from kmirror_dagster.errors import KmirrorError
from kmirror_dagster.settings import ClusterSettings

_POLL_S = 0.02
_TELL_S = 2.0
# The clock starts when this part has arrived: start-up, and most of the JVM's compiling, is left out for both.
WARM_UP = 0.1
FIRST_RECORD_S = 120.0
_STALLED_S = 60.0
_ROUND_S = 1_800.0


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

    def describe(self) -> str:
        """One line."""
        return (
            f"{self.tool}: {self.records_per_s:,.0f} records/s, {self.cpu_us_per_record:.2f} us CPU a record "
            f"({self.cpu_s / self.seconds:.2f} cores), peak {self.peak_rss_bytes / 1e6:.0f} MB, "
            f"{self.seconds:.1f} s; load {self.load_average:.1f}, others use {self.foreign_cpu:.2f} cores"
        )


def made(tool: str, records: int, span: Span) -> Round:
    """A round from what was used in it."""
    return Round(
        tool, records, span.seconds, span.cpu_s, span.peak_rss_bytes, os.getloadavg()[0], span.foreign_cpu
    )


@dataclass(frozen=True)
class Sample:
    """Memory of the tool at one moment of a round.

    Attributes:
        at_s: seconds since the process was first looked at.
        share: of the topic that had arrived, 0 to 1.
        rss_bytes: resident memory.
    """

    at_s: float
    share: float
    rss_bytes: int


class Watch:
    """Watches a topic of the destination, and the tool that fills it.

    Args:
        destination: the cluster.
        topic: the topic.
        process: the tool.
        known: processes whose processor time is not foreign: brokers and proxy.
        sample_s: time between two samples of the tool's memory; None: no samples.
    """

    def __init__(
        self,
        destination: ClusterSettings,
        topic: str,
        process: GuardedProcess,
        known: Sequence[int],
        sample_s: float | None = None,
    ) -> None:
        self._topic = topic
        self._settings = destination
        self._process = process
        self._meter = Meter(process, known)
        self._sample_s = sample_s
        self._began = time.monotonic()
        self._told = 0.0
        self.samples: list[Sample] = []

    def run(self, tool: str, target: int, records: int, note: Callable[[str], None]) -> Round:
        """Wait until the topic holds `target` offsets, which stand for `records` data records.

        Raises:
            BenchError: the tool ended, or nothing came for a minute, or the round took half an hour.
        """
        first, begin, end = asyncio.run(self._follow(target, note))
        return made(tool, round(records * (target - first) / target), between(begin, end))

    async def _follow(self, target: int, note: Callable[[str], None]) -> tuple[int, Reading, Reading]:
        cluster = WireCluster(self._settings, role="destination")
        begin: tuple[int, Reading] | None = None
        offsets, changed = 0, time.monotonic()
        try:
            while True:
                found = await self._offsets(cluster)
                reading = self._meter.read() if self._process.is_alive else None
                now = time.monotonic()
                if found != offsets:
                    offsets, changed = found, now
                self._check(found, now - changed)
                assert reading is not None
                if begin is None and found >= target * WARM_UP:
                    begin = found, reading
                if found >= target:
                    if begin is None or found > target or begin[0] == found:
                        raise BenchError(
                            f"{self._topic}: destination holds {found} offsets of {target}, "
                            f"{'too many' if found > target else 'and there was nothing to measure'}"
                        )
                    return *begin, reading
                self._remember(reading, found / target, note)
                await asyncio.sleep(_POLL_S)
        finally:
            await cluster.close()

    def _remember(self, reading: Reading, share: float, note: Callable[[str], None]) -> None:
        at_s = reading.at - self._began
        if self._sample_s and (not self.samples or at_s >= self.samples[-1].at_s + self._sample_s):
            self.samples.append(Sample(at_s, share, reading.usage.rss_bytes))
        if reading.at - self._told > _TELL_S:
            self._told = reading.at
            note(f"{share:.0%}")

    def _check(self, found: int, silent_s: float) -> None:
        if not self._process.is_alive:
            raise BenchError(f"the tool ended; see {self._process.log}:\n{self._process.tail()}")
        if silent_s > (_STALLED_S if found else FIRST_RECORD_S):
            raise BenchError(f"nothing arrived for {silent_s:.0f} s at {found}:\n{self._process.tail()}")
        if time.monotonic() - self._began > _ROUND_S:
            raise BenchError(f"the round was not done after {_ROUND_S:.0f} s, at {found}")

    async def _offsets(self, cluster: WireCluster) -> int:
        wanted = [(self._topic, partition) for partition in range(PARTITIONS)]
        try:
            found = await cluster.list_offsets(wanted, LATEST)
        except KmirrorError:
            return 0  # the tools make the topic themselves
        return sum(outcome.offset for outcome in found.values() if outcome.error is None)
