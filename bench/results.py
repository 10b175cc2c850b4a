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

from bench.jars import MIRROR_MAKER_VERSION
from bench.mirrors import MIRROR_MAKER, OURS
from bench.rounds import Round
from bench.workloads import Workload
from kmirror_dagster.sandbox.jars import KAFKA_VERSION

LATEST = Path(__file__).parent / "results" / "latest.json"


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


def throughput(workload: Workload, rounds: Sequence[Round]) -> dict[str, Any]:
    """Keys of a workload in which a backlog is mirrored."""

    def of(figure: str) -> float | None:
        return ratio(median(rounds, OURS, figure), median(rounds, MIRROR_MAKER, figure))

    return {
        "throughput_ratio": of("records_per_s"),
        "cpu_ratio": of("cpu_us_per_record"),
        "memory_ratio": of("peak_rss_bytes"),
        "records": workload.records,
        "value_bytes": workload.value_bytes,
        "batch_records": workload.batch_records,
        "codec": workload.codec,
        "rounds": [each.figures() for each in rounds],
    }


def write(path: Path, measured: Mapping[str, Any], *, quick: bool) -> None:
    """Put workloads into the file; those of an earlier run of the same size stay."""
    document: dict[str, Any] = {}
    if path.exists():
        document = json.loads(path.read_text(encoding="utf-8"))
    now = datetime.now(timezone.utc).isoformat(timespec="seconds")
    workloads = dict(document.get("workloads", {})) if document.get("quick", quick) == quick else {}
    workloads.update({name: {"date": now, **keys} for name, keys in measured.items()})
    path.parent.mkdir(parents=True, exist_ok=True)
    document = {"date": now, "quick": quick, "machine": machine(), "workloads": workloads}
    path.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


def say(text: str) -> None:
    """One line of progress."""
    sys.stderr.write(text + "\n")
    sys.stderr.flush()
