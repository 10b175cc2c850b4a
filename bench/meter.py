"""What a tool uses between two moments, as the operating system counts it, and what disturbs it meanwhile."""

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass

import psutil

from bench.guarded import GuardedProcess, Usage


@dataclass(frozen=True)
class Reading:
    """Counters at one moment.

    Attributes:
        at: monotonic seconds.
        usage: of the tool.
        machine_s: processor seconds of the whole machine.
        known_s: those of brokers, proxy and benchmark.
    """

    at: float
    usage: Usage
    machine_s: float
    known_s: float


@dataclass(frozen=True)
class Span:
    """What was used between two readings.

    Attributes:
        seconds: wall clock.
        cpu_s: processor seconds of the tool.
        peak_rss_bytes: highest resident memory of the tool over its life.
        foreign_cpu: processors busy with something that is neither broker, proxy, tool nor benchmark, mean.
    """

    seconds: float
    cpu_s: float
    peak_rss_bytes: int
    foreign_cpu: float


class Meter:
    """Reads the counters.

    Args:
        process: the tool.
        known: processes whose processor time is not foreign, besides this one.
    """

    def __init__(self, process: GuardedProcess, known: Sequence[int]) -> None:
        self._process = process
        self._known = [psutil.Process(pid) for pid in (*known, os.getpid())]

    def read(self) -> Reading:
        """All counters now."""
        busy = psutil.cpu_times()
        machine = busy.user + busy.nice + busy.system + busy.irq + busy.softirq
        known = sum(times.user + times.system for times in (each.cpu_times() for each in self._known))
        return Reading(time.monotonic(), self._process.usage(), machine, known)


def between(begin: Reading, end: Reading) -> Span:
    """What was used from one reading to another."""
    seconds = end.at - begin.at
    cpu_s = end.usage.cpu_s - begin.usage.cpu_s
    foreign = end.machine_s - begin.machine_s - cpu_s - (end.known_s - begin.known_s)
    return Span(seconds, cpu_s, end.usage.peak_rss_bytes, max(0.0, foreign / seconds))
