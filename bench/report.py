"""``python -m bench.report``: writes docs/benchmarks.md from bench/results/latest.json."""

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.mirrors import CEILING, MIRROR_MAKER, MIRROR_MAKER_JVM, OURS
from bench.results import LATEST
from bench.rounds import WARM_UP

PAGE = Path(__file__).parents[1] / "docs" / "benchmarks.md"
_NAMES = {OURS: "kmirror", MIRROR_MAKER: "MirrorMaker 2", CEILING: "produce only"}
# What the product sets itself: key of a workload, comparison, bound.
_TARGETS: dict[str, dict[str, tuple[str, float]]] = {
    "bulk": {
        "throughput_ratio": (">=", 2.5),
        "cpu_ratio": ("<=", 0.08),
        "memory_ratio": ("<=", 0.12),
        "ceiling_ratio": (">=", 0.8),
    },
    "wan": {"of_own_zero_ms_ratio": (">=", 0.8)},
    "tiny": {"throughput_ratio": (">=", 1.0), "cpu_ratio": ("<=", 0.6)},
    "eos": {"throughput_ratio": (">=", 1.0)},
}
_MEANINGS = {
    "throughput_ratio": "records a second, kmirror by MirrorMaker 2",
    "cpu_ratio": "processor time of a record, kmirror by MirrorMaker 2",
    "memory_ratio": "highest resident memory, kmirror by MirrorMaker 2",
    "ceiling_ratio": "records a second, kmirror by writing the same batches from memory",
    "of_own_zero_ms_ratio": "records a second, kmirror with the delay by kmirror without",
    "mirrormaker2_of_own_zero_ms_ratio": "records a second, MirrorMaker 2 with the delay by without",
}
_INTRODUCTION = """\
# Benchmarks

This page is written by `python -m bench.report` from `bench/results/latest.json`; do not edit it.

## How to repeat

```sh
make bench                            # everything: about half an hour, 30 GB of free disk
make bench WORKLOAD="bulk wan"        # some workloads; the others keep their figures
make bench QUICK=1                    # fewer records, minutes; marked as quick in the results
make bench BENCH_HOME=DIRECTORY       # keep clusters and source data for the next run
```

Needs what `make demo` needs, and an otherwise idle machine: each round notes how many processors other programs
used (`foreign_cpu`); when that is more than a tenth, repeat the run. Ctrl-C ends every process that it started.

## What is compared

Source and destination are two clusters of one broker each on one machine. kmirror and MirrorMaker 2 mirror the same
topic of 8 partitions in turn, A B A B, each time onto an emptied destination, after the disk has become quiet. One turn
goes ahead and does not count: brokers are slower until they have compiled what they do. The figures are medians.

- **kmirror** is a node started as users start it, with one mirror; all settings are the defaults, the same for every
  workload.
- **MirrorMaker 2** runs in dedicated mode, one task a partition, tuned for throughput by
  `bench/mirrormaker.properties`, in `latency` with the addition of
  `bench/mirrormaker-latency.properties`. JVM: `{jvm}`.
- **produce only** writes the batches of `bulk` from memory with kmirror's own wire code, as many requests under way
  and partitions in a request as a mirror has: the most this destination takes from it.

The clock starts when {warm_up:.0%} of the records have arrived, so start-up (and most of a JVM's compiling) is left out
for all. Processor time and memory are the operating system's figures of the one process that mirrors; memory is the
highest over its life. kmirror also copies offsets and transaction markers exactly; MirrorMaker 2 does not.
"""
_WORKLOADS = {
    "bulk": "{records:,} records of {value_bytes:,} bytes in {codec} batches of {batch_records} records.",
    "wan": "The data of `bulk`; {delay_ms:g} ms each way between the source and the mirror, by a TCP proxy that "
    "delays and limits nothing else; compared with the same proxy without delay, as it takes processor time too.",
    "tiny": "{records:,} records of {value_bytes:,} bytes, one in each batch.",
    "eos": "{records:,} records of {value_bytes:,} bytes; a transaction every {batch_records} records, "
    "spread over all partitions, four producers at a time.",
    "latency": "{rate_per_s:,} records of {value_bytes:,} bytes a second, {records:,} of them measured after a "
    "warm-up: from the call of produce to the consumer having the record, both in one process.",
    "backlog": "{records:,} records of {value_bytes:,} bytes, {gigabytes:.1f} GB, are there before kmirror starts; its "
    "resident memory is read at even intervals, and counted when a tenth has arrived.",
}


def page(document: Mapping[str, Any]) -> str:
    """The whole page from the results file's content."""
    parts = [_INTRODUCTION.format(jvm=" ".join(MIRROR_MAKER_JVM), warm_up=WARM_UP), _machine(document)]
    workloads: Mapping[str, Any] = document["workloads"]
    parts += [_section(name, workloads[name]) for name in _WORKLOADS if name in workloads]
    return "\n".join(parts)


def _machine(document: Mapping[str, Any]) -> str:
    machine = document["machine"]
    return (
        f"Machine: {machine['cores']} cores ({machine['cpu']}), {machine['memory_gib']} GiB of memory, Linux "
        f"{machine['kernel']}, Python {machine['python']}, brokers of Apache Kafka {machine['kafka']}, MirrorMaker 2 "
        f"of {machine['mirrormaker2']}. Brokers, tool and benchmark share it.\n"
    )


def _section(name: str, found: Mapping[str, Any]) -> str:
    gigabytes = found["records"] * found["value_bytes"] / 1e9
    lines = [f"## {name}", "", _WORKLOADS[name].format(**found, gigabytes=gigabytes)]
    quick = " with fewer records than a full run" if found["quick"] else ""
    turns = max(sum(each["tool"] == tool for each in found["rounds"]) for tool in found["medians"])
    lines += ["", f"Measured {found['date'][:10]}{quick}; {turns} {'turn' if turns == 1 else 'turns'}.", ""]
    body = {"latency": _latency, "backlog": _backlog}.get(name, _throughput)
    return "\n".join([*lines, *body(name, found)]) + "\n"


def _throughput(name: str, found: Mapping[str, Any]) -> list[str]:
    rows = [
        (
            _NAMES[tool],
            f"{figures['records_per_s']:,.0f}",
            f"{figures['records_per_s'] * found['value_bytes'] / 1e6:,.0f}",
            f"{figures['cpu_us_per_record']:.2f}",
            f"{figures['peak_rss_bytes'] / 1e6:,.0f}",
        )
        for tool, figures in found["medians"].items()
    ]
    head = ("", "records/s", "MB/s", "processor µs a record", "memory MB")
    return [*_table(head, rows), "", *_ratios(name, found)]


def _ratios(name: str, found: Mapping[str, Any]) -> list[str]:
    rows: list[tuple[str, ...]] = []
    for key, meaning in _MEANINGS.items():
        value = found.get(key)
        if value is None:
            continue
        aim = _TARGETS.get(name, {}).get(key)
        rows.append((f"`{key}`", meaning, f"{value:.3f}", _verdict(value, *aim) if aim else ""))
    return _table(("ratio", "meaning", "measured", "aim"), rows) if rows else []


def _verdict(value: float, comparison: str, bound: float) -> str:
    met = value >= bound if comparison == ">=" else value <= bound
    sign = "≥" if comparison == ">=" else "≤"
    return f"{sign} {bound:g}: {'met' if met else '**missed**'}"


def _latency(name: str, found: Mapping[str, Any]) -> list[str]:
    keys = ("p50_ms", "p99_ms", "max_ms")
    rows = [
        (
            _NAMES[tool],
            *(f"{found[key][tool]:.1f}" for key in keys),
            f"{found['medians'][tool]['cpu_us_per_record']:.0f}",
            f"{found['medians'][tool]['peak_rss_bytes'] / 1e6:,.0f}",
        )
        for tool in found["medians"]
    ]
    head = ("", "p50 ms", "p99 ms", "slowest ms", "processor µs a record", "memory MB")
    lines = _table(head, rows)
    ours, theirs = (found["p99_ms"].get(tool) for tool in (OURS, MIRROR_MAKER))
    if ours is not None and theirs is not None:
        met = "met" if ours < theirs and ours < 50 else "**missed**"
        lines += ["", f"Aim: p99 below MirrorMaker 2's and below 50 ms: {met}."]
    return [*lines, "", *_ratios(name, found)]


def _backlog(name: str, found: Mapping[str, Any]) -> list[str]:
    del name
    figures = found["medians"][OURS]
    growth, low = found["rss_growth_bytes"], found["rss_min_bytes"]
    head = ("lowest MB", "highest MB", "trend MB/s", "growth by the trend MB", "records/s", "samples")
    row = (
        f"{low / 1e6:.1f}",
        f"{found['rss_max_bytes'] / 1e6:.1f}",
        f"{found['rss_slope_bytes_per_s'] / 1e6:+.3f}",
        f"{growth / 1e6:+.1f}",
        f"{figures['records_per_s']:,.0f}",
        str(found["rss_samples"]),
    )
    return _table(head, [row])


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    return [f"| {' | '.join(each)} |" for each in (head, ["---"] * len(head), *rows)]


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the page."""
    parser = argparse.ArgumentParser(prog="python -m bench.report", description=__doc__)
    parser.add_argument("--results", type=Path, default=LATEST, help="results file")
    parser.add_argument("--output", type=Path, default=PAGE, help="page to write")
    options = parser.parse_args(arguments)
    if not options.results.exists():
        sys.stderr.write(f"{options.results}: no results yet; run `make bench` first\n")
        return 1
    text = page(json.loads(options.results.read_text(encoding="utf-8")))
    options.output.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
