"""Runs workloads: both tools in turn on the same brokers, A B A B, after one turn that does not count."""

import socket
import sys
import time
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from bench import proxy, results, source_data
from bench.clusters import BenchClusters, delete_topic, log_ends, wait_calm
from bench.errors import BenchError
from bench.guarded import GuardedProcess
from bench.latency import LatencyRound, LatencyWatch
from bench.mirrors import OURS, Ceiling, Route, Tool
from bench.results import say
from bench.rounds import Round, Sample, Watch
from bench.workloads import PARTITIONS, Workload

_PROXY_S = 15.0


class Bench:
    """Everything a run shares.

    Args:
        clusters: running clusters.
        tools: in the order of a turn.
        turns: how often each tool mirrors a workload.
    """

    def __init__(self, clusters: BenchClusters, tools: Sequence[Tool], turns: int) -> None:
        self.clusters = clusters
        self._tools = tools
        self._turns = turns
        self._folder = clusters.home / "tools"
        self._folder.mkdir(exist_ok=True)

    def run(self, workload: Workload) -> dict[str, Any]:
        """Measure one workload; one with a delay without it as well, the proxy in between all the same.

        Raises:
            BenchError: it cannot be measured, and why.
        """
        if workload.rate:
            return self._latency(workload)
        if workload.sample_s:
            return self._backlog(workload)
        if workload.delay_ms:
            without = self._turn_by_turn(replace(workload, delay_ms=0.0), self._tools)
            return results.wan(workload, self._turn_by_turn(workload, self._tools), without)
        tools = list(self._tools)
        if workload.measures_ceiling and any(tool.name == OURS for tool in tools):
            tools.append(Ceiling(workload))
        return results.throughput(workload, self._turn_by_turn(workload, tools))

    def _turn_by_turn(self, workload: Workload, tools: Sequence[Tool]) -> list[Round]:
        self.prepare(workload)
        rounds: list[Round] = []
        with self._line(workload) as (source, known):
            # turn 0 counts for nobody: brokers compile what they are asked to do while they do it
            for turn in range(self._turns + 1):
                for tool in tools:
                    found, _ = self.round(workload, tool, source, known)
                    self._report(workload, turn, found)
                    if turn:
                        rounds.append(found)
        return rounds

    def _latency(self, workload: Workload) -> dict[str, Any]:
        rounds: list[LatencyRound] = []
        for turn in range(self._turns + 1):  # turn 0 counts for nobody here either
            for tool in self._tools:
                found = self._latency_round(workload, tool)
                self._report(workload, turn, found)
                if turn:
                    rounds.append(found)
        return results.latency(workload, rounds)

    def _latency_round(self, workload: Workload, tool: Tool) -> LatencyRound:
        """Mirror a topic that is written meanwhile onto a clean destination."""
        source, destination = self.clusters.source, self.clusters.destination
        self.clusters.clean()
        try:
            self.clusters.create(source, workload.topic, PARTITIONS)
            route = Route(
                source.bootstrap, destination.bootstrap, workload.topic, self._folder, low_latency=True
            )
            process = tool.start(route)
            try:
                watch = LatencyWatch(
                    source.settings(),
                    destination.settings(),
                    workload,
                    process,
                    self._brokers(),
                    lambda text: say(f"{workload.name} {tool.name}: {text}"),
                )
                found = watch.run(tool.name)
                process.interrupt()
            finally:
                process.stop()
        finally:
            delete_topic(source, workload.topic)
        return found

    def _backlog(self, workload: Workload) -> dict[str, Any]:
        """Drain a backlog once, ours only, and look at memory meanwhile."""
        ours = next((tool for tool in self._tools if tool.name == OURS), None)
        if ours is None:
            raise BenchError(f"{workload.name} measures {OURS} only; leave --only away")
        try:
            self.prepare(workload)
            found, samples = self.round(workload, ours, self.clusters.source.bootstrap, [])
            self._report(workload, 1, found)
            return results.backlog(workload, found, samples)
        finally:
            self.clusters.clean()
            delete_topic(self.clusters.source, workload.topic)

    def prepare(self, workload: Workload) -> None:
        """Write the workload's data unless an earlier run did."""
        source = self.clusters.source
        marker = self.clusters.home / f"{workload.topic}.written"
        if workload.kept and marker.exists():
            return
        say(f"{workload.name}: writing {workload.records:,} records at the source")
        began = time.monotonic()
        self.clusters.create(source, workload.topic, PARTITIONS)
        source_data.write(source.settings(), workload, lambda text: say(f"{workload.name}: {text}"))
        if workload.kept:
            marker.touch()
        say(f"{workload.name}: written in {time.monotonic() - began:.1f} s")
        wait_calm()

    def round(
        self, workload: Workload, tool: Tool, source_address: str, known: Sequence[int]
    ) -> tuple[Round, list[Sample]]:
        """Mirror a workload's topic onto a clean destination.

        Args:
            workload: whose data is at the source.
            tool: who mirrors.
            source_address: bootstrap address it reads from.
            known: processes that belong to the benchmark, besides the brokers.
        """
        source, destination = self.clusters.source, self.clusters.destination
        self.clusters.clean()
        if not tool.makes_topics:
            self.clusters.create(destination, workload.topic, PARTITIONS)
        ends = log_ends(source.settings(), workload.topic, PARTITIONS)
        target = sum(ends.values()) if tool.mirrors_markers else workload.written
        route = Route(source_address, destination.bootstrap, workload.topic, self._folder)
        process = tool.start(route)
        try:
            watch = Watch(
                destination.settings(),
                workload.topic,
                process,
                [*self._brokers(), *known],
                workload.sample_s,
            )
            found = watch.run(
                tool.name, target, workload.written, lambda text: say(f"{workload.name} {tool.name}: {text}")
            )
            process.interrupt()
            return found, watch.samples
        finally:
            process.stop()

    @contextmanager
    def _line(self, workload: Workload) -> Generator[tuple[str, list[int]], None, None]:
        """Address of the source as the tools see it, and the processes in between."""
        if workload.delay_ms is None:
            yield self.clusters.source.bootstrap, []
            return
        port = self.clusters.wan_port
        command = [sys.executable, "-m", "bench.proxy", str(port), str(self.clusters.wan_target_port)]
        process = GuardedProcess([*command, str(workload.delay_ms)], log=Path(self._folder) / "proxy.log")
        try:
            _await_listening(process, port)
            yield self.clusters.wan_bootstrap, [process.pid]
        finally:
            process.stop()

    def _brokers(self) -> list[int]:
        clusters = (self.clusters.source, self.clusters.destination)
        return [pid for cluster in clusters if (pid := cluster.broker_pid())]

    def _report(self, workload: Workload, turn: int, found: Round) -> None:
        name = workload.name if workload.delay_ms is None else f"{workload.name} {workload.delay_ms:g} ms"
        say(f"{name} {turn}/{1 if workload.sample_s else self._turns} {found.describe()}")


def _await_listening(process: GuardedProcess, port: int) -> None:
    end = time.monotonic() + _PROXY_S
    while time.monotonic() < end and process.is_alive:
        try:
            socket.create_connection((proxy.HOST, port), timeout=1).close()
        except OSError:
            time.sleep(0.05)
        else:
            return
    raise BenchError(f"the delaying proxy does not listen on port {port}:\n{process.tail()}")
