"""``python -m bench.profile WORKLOAD``: where our own processor time goes, by cProfile.

The profiler itself slows Python down two- to threefold: shares count here, not seconds. It goes by the wall clock
(reading the processor's clock at each call costs more than what is measured): on a busy machine system calls look
longer than they are.
"""

import argparse
import pstats
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from bench.clusters import BenchClusters
from bench.mirrors import Link
from bench.results import say
from bench.runs import Bench
from bench.workloads import FULL, QUICK


def main(arguments: Sequence[str] | None = None) -> int:
    """Mirror a workload once under the profiler and print the functions that took most."""
    parser = argparse.ArgumentParser(prog="python -m bench.profile", description=__doc__)
    parser.add_argument("workload", choices=["bulk", "tiny", "eos"])
    parser.add_argument("--full", action="store_true", help="the full number of records")
    parser.add_argument("--top", type=int, default=40, help="functions to print (40)")
    parser.add_argument("--sort", default="tottime", help="pstats key: tottime or cumulative")
    parser.add_argument("--home", type=Path, help="keep clusters and source data here for the next run")
    options = parser.parse_args(arguments)
    workload = (FULL if options.full else QUICK)[options.workload]
    with tempfile.TemporaryDirectory() as folder, BenchClusters(options.home) as clusters:
        profile = Path(folder) / "profile"
        bench = Bench(clusters, [], 1)
        bench.prepare(workload)
        found, _ = bench.round(workload, Link(profile), clusters.source.bootstrap, [])
        say(found.describe())
        stats = pstats.Stats(str(profile), stream=sys.stdout)
    stats.strip_dirs().sort_stats(options.sort).print_stats(options.top)
    return 0


if __name__ == "__main__":
    sys.exit(main())
