"""``python -m bench [WORKLOAD...]``: both tools in turn on the same brokers; writes bench/results/latest.json."""

import argparse
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from bench import results
from bench.clusters import BenchClusters
from bench.mirrors import MIRROR_MAKER, OURS, Kmirror, MirrorMaker, Tool
from bench.results import say
from bench.runs import Bench
from bench.workloads import FULL, QUICK, shortened
from kmirror_dagster.errors import KmirrorError

_TOOLS: dict[str, type[Kmirror] | type[MirrorMaker]] = {OURS: Kmirror, MIRROR_MAKER: MirrorMaker}


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    parser.add_argument("workloads", nargs="*", metavar="WORKLOAD", help=f"{', '.join(FULL)}; default: all")
    parser.add_argument("--quick", action="store_true", help="fewer records")
    parser.add_argument("--records", type=int, help="so many records: to try the benchmark itself")
    parser.add_argument("--turns", type=int, default=3, help="measured rounds of each tool and workload (3)")
    parser.add_argument("--only", choices=list(_TOOLS), help="run one tool; no ratios then")
    parser.add_argument("--home", type=Path, help="keep clusters and source data here for the next run")
    parser.add_argument(
        "--output", type=Path, help="results file; default: latest.json, and none with --only or --records"
    )
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the chosen workloads."""
    parser = _parser()
    options = parser.parse_args(arguments)
    unknown = [name for name in options.workloads if name not in FULL]
    if unknown:
        parser.error(f"no workload {', '.join(unknown)}; there are {', '.join(FULL)}")
    # SIGTERM ends the run as Ctrl-C does, and a shell that started it with & must not have switched that off:
    # every process it started is ended on the way out
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.default_int_handler)
    known = QUICK if options.quick else FULL
    if options.records:
        known = {name: shortened(each, options.records) for name, each in known.items()}
    # what only tries the benchmark must not replace figures that somebody relies on
    output = options.output or (None if options.only or options.records else results.LATEST)
    tools: list[Tool] = [kind() for name, kind in _TOOLS.items() if options.only in (None, name)]
    # in the order in which one can use the figures of another, whatever the order asked for
    chosen = [name for name in known if name in (options.workloads or known)]
    try:
        say(f"starting two clusters; then {', '.join(chosen)}")
        with BenchClusters(options.home.absolute() if options.home else None) as clusters:
            bench = Bench(clusters, tools, options.turns)
            for name in chosen:
                measured = bench.run(known[name])
                if output is not None:
                    results.write(output, {name: measured}, quick=known[name] != FULL[name])
                say(f"{name}: {results.summary(measured)}")
    except KeyboardInterrupt:
        say("interrupted; nothing is left running")
        return 130
    except KmirrorError as error:
        say(str(error))
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
