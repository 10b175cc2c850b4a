"""``python -m bench [WORKLOAD...]``: both tools in turn on the same brokers; writes bench/results/latest.json."""

import argparse
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench import results, source_data
from bench.clusters import BenchClusters, log_ends, wait_calm
from bench.mirrors import MIRROR_MAKER, OURS, Kmirror, MirrorMaker, Route, Tool
from bench.results import say
from bench.rounds import Round, Watch
from bench.workloads import FULL, PARTITIONS, QUICK, Workload
from kmirror_dagster.errors import KmirrorError

_TOOLS: dict[str, type[Kmirror] | type[MirrorMaker]] = {OURS: Kmirror, MIRROR_MAKER: MirrorMaker}


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
        """Measure one workload."""
        self.prepare(workload)
        rounds: list[Round] = []
        for turn in range(self._turns):
            for tool in self._tools:
                rounds.append(self.round(workload, tool))
                say(f"{workload.name} {turn + 1}/{self._turns} {describe(rounds[-1])}")
        return results.throughput(workload, rounds)

    def prepare(self, workload: Workload) -> None:
        """Write the workload's data unless an earlier run did."""
        source = self.clusters.source
        marker = self.clusters.home / f"{workload.topic}.written"
        if marker.exists():
            return
        say(f"{workload.name}: writing {workload.records} records at the source")
        began = time.monotonic()
        self.clusters.create(source, workload.topic, PARTITIONS)
        source_data.write(source.settings(), workload, lambda text: say(f"{workload.name}: {text}"))
        marker.touch()
        say(f"{workload.name}: written in {time.monotonic() - began:.1f} s")
        wait_calm()

    def round(self, workload: Workload, tool: Tool) -> Round:
        """Mirror a workload's topic onto a clean destination."""
        source, destination = self.clusters.source, self.clusters.destination
        self.clusters.clean()
        if not tool.makes_topics:
            self.clusters.create(destination, workload.topic, PARTITIONS)
        ends = log_ends(source.settings(), workload.topic, PARTITIONS)
        target = sum(ends.values()) if tool.mirrors_markers else workload.written
        route = Route(source.bootstrap, destination.bootstrap, workload.topic, self._folder)
        brokers = [pid for pid in (source.broker_pid(), destination.broker_pid()) if pid]
        process = tool.start(route)
        try:
            watch = Watch(destination.settings(), workload.topic, process, brokers)
            found = watch.run(
                tool.name, target, workload.written, lambda text: say(f"{workload.name} {tool.name}: {text}")
            )
            process.interrupt()
            return found
        finally:
            process.stop()


def describe(found: Round) -> str:
    """One round in one line."""
    return (
        f"{found.tool}: {found.records_per_s:,.0f} records/s, {found.cpu_us_per_record:.2f} us CPU a record "
        f"({found.cpu_s / found.seconds:.2f} cores), peak {found.peak_rss_bytes / 1e6:.0f} MB, "
        f"{found.seconds:.1f} s; load {found.load_average:.1f}, others use {found.foreign_cpu:.2f} cores"
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    parser.add_argument("workloads", nargs="*", choices=[[], *FULL], help="default: all")
    parser.add_argument("--quick", action="store_true", help="fewer records")
    parser.add_argument("--turns", type=int, default=2, help="rounds of each tool and workload (2)")
    parser.add_argument("--only", choices=list(_TOOLS), help="run one tool; no ratios then")
    parser.add_argument("--home", type=Path, help="keep clusters and source data here for the next run")
    parser.add_argument("--output", type=Path, default=results.LATEST, help="results file")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the chosen workloads."""
    options = _parser().parse_args(arguments)
    # SIGTERM ends the run as Ctrl-C does: every process it started is ended on the way out
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    known = QUICK if options.quick else FULL
    tools = [kind() for name, kind in _TOOLS.items() if options.only in (None, name)]
    try:
        say("starting two clusters")
        with BenchClusters(options.home) as clusters:
            bench = Bench(clusters, tools, options.turns)
            for name in options.workloads or known:
                measured = bench.run(known[name])
                results.write(options.output, {name: measured}, quick=options.quick)
                ratios = {key: value for key, value in measured.items() if key.endswith("_ratio")}
                say(f"{name}: {ratios}")
    except KeyboardInterrupt:
        say("interrupted")
        return 130
    except KmirrorError as error:
        say(str(error))
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
