"""The results file: ratios for people and machines, every round behind them, and the machine it ran on."""

import json
import os
import platform
import statistics
import sys
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import psutil

from bench import memory
from bench.jars import MIRROR_MAKER_VERSION
from bench.latency import LatencyRound
from bench.mirrors import CEILING, MIRROR_MAKER, OURS
from bench.rounds import Round, Sample
from bench.workloads import PARTITIONS, Workload
from kmirror_dagster.sandbox.jars import KAFKA_VERSION

LATEST = Path(__file__).parent / "results" / "latest.json"
_THROUGHPUT = {
    "throughput_ratio": "records_per_s",
    "cpu_ratio": "cpu_us_per_record",
    "memory_ratio": "peak_rss_bytes",
}
_SAME_MACHINE = ("cores", "cpu", "memory_gib")


def machine() -> dict[str, Any]:
    """What the figures depend on; nothing that names the machine."""
    cpu = next(
        (
            line.split(":", 1)[1].strip()
            for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
            if line.startswith("model name")
        ),
        platform.machine(),
    )
    return {
        "cores": os.cpu_count(),
        "cpu": cpu,
        "memory_gib": round(psutil.virtual_memory().total / (1 << 30), 1),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "kafka": KAFKA_VERSION,
        "mirrormaker2": MIRROR_MAKER_VERSION,
    }


def median(rounds: Iterable[Round], tool: str, figure: str) -> float | None:
    """Median of one figure over a tool's rounds; None when it had none."""
    values = [getattr(each, figure) for each in rounds if each.tool == tool]
    return statistics.median(values) if values else None


def ratio(ours: float | None, theirs: float | None) -> float | None:
    """Ours by theirs."""
    return round(ours / theirs, 4) if ours is not None and theirs else None


def _ratios(rounds: Sequence[Round], figures: Mapping[str, str]) -> dict[str, Any]:
    """Ours by MirrorMaker 2's, medians, by key."""
    return {
        key: ratio(median(rounds, OURS, figure), median(rounds, MIRROR_MAKER, figure))
        for key, figure in figures.items()
    }


def _used(rounds: Sequence[Round]) -> dict[str, Any]:
    """Medians of every tool, and all rounds behind them."""
    tools = dict.fromkeys(each.tool for each in rounds)
    figures = ("records_per_s", "cpu_us_per_record", "peak_rss_bytes")
    return {
        "medians": {
            tool: {figure: _rounded(median(rounds, tool, figure)) for figure in figures} for tool in tools
        },
        "rounds": [each.figures() for each in rounds],
    }


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 3)


def _data(workload: Workload) -> dict[str, Any]:
    return {
        "records": workload.written,
        "value_bytes": workload.value_bytes,
        "batch_records": workload.batch_records,
        "codec": workload.codec,
        "partitions": PARTITIONS,
    }


def throughput(workload: Workload, rounds: Sequence[Round]) -> dict[str, Any]:
    """Keys of a workload in which what is there already is mirrored."""
    ceiling = ratio(median(rounds, OURS, "records_per_s"), median(rounds, CEILING, "records_per_s"))
    measured = {} if ceiling is None else {"ceiling_ratio": ceiling}
    return {**_ratios(rounds, _THROUGHPUT), **measured, **_data(workload), **_used(rounds)}


def wan(workload: Workload, rounds: Sequence[Round], near: Sequence[Round]) -> dict[str, Any]:
    """Keys of a workload with a delay; `near`: rounds of the same run through the same proxy without it."""

    def of_own(tool: str) -> float | None:
        return ratio(median(rounds, tool, "records_per_s"), median(near, tool, "records_per_s"))

    return {
        **_ratios(rounds, _THROUGHPUT),
        "of_own_zero_ms_ratio": of_own(OURS),
        "mirrormaker2_of_own_zero_ms_ratio": of_own(MIRROR_MAKER),
        "delay_ms": workload.delay_ms,
        **_data(workload),
        **_used(rounds),
        "zero_ms_rounds": [each.figures() for each in near],
    }


def latency(workload: Workload, rounds: Sequence[LatencyRound]) -> dict[str, Any]:
    """Keys of a workload at a steady rate; times in milliseconds by tool."""
    tools = dict.fromkeys(each.tool for each in rounds)

    def of(figure: str) -> dict[str, float | None]:
        return {tool: _rounded(median(rounds, tool, figure)) for tool in tools}

    return {
        "p50_ms": of("p50_ms"),
        "p99_ms": of("p99_ms"),
        "max_ms": of("max_ms"),
        **_ratios(rounds, {key: figure for key, figure in _THROUGHPUT.items() if key != "throughput_ratio"}),
        "rate_per_s": workload.rate,
        **_data(workload),
        **_used(rounds),
    }


def backlog(workload: Workload, found: Round, samples: Sequence[Sample]) -> dict[str, Any]:
    """Keys of draining a backlog: memory in bytes, behind the first tenth."""
    flat = memory.flatness(samples)
    return {
        "rss_min_bytes": flat.min_bytes,
        "rss_max_bytes": flat.max_bytes,
        "rss_slope_bytes_per_s": round(flat.slope_bytes_per_s),
        "rss_growth_bytes": round(flat.growth_bytes),
        "rss_samples": flat.samples,
        "backlog_bytes": workload.written * workload.value_bytes,
        **_data(workload),
        **_used([found]),
        "memory_s_share_mb": memory.thinned(samples),
    }


def summary(measured: Mapping[str, Any]) -> str:
    """The keys that matter in one line."""
    endings = ("_ratio", "_ms", "_bytes", "_bytes_per_s")
    kept = {key: value for key, value in measured.items() if key.endswith(endings) and key != "value_bytes"}
    return ", ".join(f"{key} {value}" for key, value in kept.items())


def write(path: Path, measured: Mapping[str, Any], *, quick: bool) -> None:
    """Put workloads into the file; other workloads of an earlier run on the same machine stay."""
    document: dict[str, Any] = {}
    if path.exists():
        document = json.loads(path.read_text(encoding="utf-8"))
    here, there = machine(), document.get("machine", {})
    same = all(here[key] == there.get(key) for key in _SAME_MACHINE)
    workloads = dict(document.get("workloads", {})) if same else {}
    now = datetime.now(timezone.utc).isoformat(timespec="seconds")
    workloads.update({name: {"date": now, "quick": quick, **keys} for name, keys in measured.items()})
    path.parent.mkdir(parents=True, exist_ok=True)
    document = {"date": now, "machine": here, "workloads": workloads}
    fresh = path.with_name(path.name + ".new")
    fresh.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    fresh.replace(path)


def say(text: str) -> None:
    """One line of progress."""
    sys.stderr.write(text + "\n")
    sys.stderr.flush()
