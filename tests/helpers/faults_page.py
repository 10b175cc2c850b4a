"""The table of faults in docs/faults.md: kept as JSON, one campaign's outcome per fault, and written as a page."""

import json
import os
import platform
import sys
import time
from pathlib import Path

from tests.helpers.campaign import PHASES, Outcome

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "docs" / "faults.json"
PAGE = ROOT / "docs" / "faults.md"

_INTRODUCTION = """\
# Faults: what was broken, and how long it took

Written by `make faults` (`tests/faults/test_recovery_faults.py`); do not edit. For each fault one cycle on two real
clusters of one broker each, with two nodes on either side, of which the first one is the one that is broken:

1. **copying**: A is mirrored to B under writes; the fault happens. Seconds until all that A has is at B, counted from
   the end of a fault that keeps anybody from copying, or from the beginning of one that others take over (a node).
2. **failover**: A's line stalls for a second under writes and A is killed, then the fault happens as well
   (where the fault itself ends the source, that is all). `kmirror stop`; seconds from its call until every partition
   has been written to at B. A fault that hits B is part of that time.
3. Old clients write to A, new ones to B.
4. **failback**: `kmirror failback`, the fault 0.5 to 4 s later. Seconds from the call to its end.
5. **switchover**: back to A, `kmirror switchover`, the fault 0.5 to 4 s later. Seconds from the call to its end.

Faults last 6 s (a cut network and a stalling line 10 s, both clusters 2 s, then their restart), which is part of the
times of 2, 4 and 5. A command that ended before the fault came was not hit by it: the mirror back was. One that the
fault made fail is run again; "x2" is how often it was run.

Producers and consumers of both clusters are recorded all the time, and the history is checked for lost, duplicate,
reordered, unseen and aborted records, inconsistent offsets and offsets that go back, as `kmirror history check FILE`
does. At the end both clusters are compared record by record, and every record that was acknowledged at A and not
mirrored has to be in quarantine.
"""


def record(outcome: Outcome) -> None:
    """Keep the outcome of one cycle, in the place of an earlier one of that fault, and write the page."""
    _keep("cycles", outcome.fault, {**vars(outcome), "day": _today()})


def record_figure(name: str, text: str) -> None:
    """Keep a measured figure, print it, and write the page."""
    _keep("figures", name, {"text": text, "day": _today()})
    sys.stderr.write(f"\n{name}: {text}\n")


def _keep(kind: str, name: str, value: dict) -> None:
    results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {"cycles": {}, "figures": {}}
    results[kind][name] = value
    RESULTS.write_text(json.dumps(results, indent=1) + "\n")
    PAGE.write_text(page(results["cycles"], results["figures"]))


def _today() -> str:
    return time.strftime("%Y-%m-%d")


def page(known: dict[str, dict], figures: dict[str, dict]) -> str:
    """The page for these outcomes."""
    lines = [_INTRODUCTION, *(_table(known) if known else [])]
    if figures:
        lines += ["", "## Figures", ""]
        lines += [f"- **{name}**: {each['text']} ({each['day']})" for name, each in figures.items()]
    return "\n".join(lines) + "\n"


def _table(known: dict[str, dict]) -> list[str]:
    total = {
        name: sum(each[name] for each in known.values())
        for name in ("total_s", "sent", "acknowledged", "polled", "unmirrored", "quarantined", "anomalies")
    }
    days = sorted({each["day"] for each in known.values()})
    lines = [
        f"Measured {days[0]}{f' to {days[-1]}' if len(days) > 1 else ''} on {os.cpu_count()} cores "
        f"({platform.machine()}), Apache Kafka 4.4.0, 200 records a second, {len(known)} faults, "
        f"{total['total_s']:,.0f} s under load.",
        "",
        f"{total['sent']:,} records sent, {total['acknowledged']:,} acknowledged; {total['unmirrored']:,} of these at "
        f"a source that was gone or had been left, and {total['quarantined']:,} found in quarantine; "
        f"{total['polled']:,} read: **{total['anomalies']} anomalies**. Other work had a part of the machine.",
        "",
        "| seconds | " + " | ".join(PHASES) + " | cycle |",
        "|---|" + "--:|" * (len(PHASES) + 1),
    ]
    for name, each in known.items():
        cells = [_cell(each, phase) for phase in PHASES]
        lines.append(f"| {name} | {' | '.join(cells)} | {each['total_s']:.0f} |")
    return lines


def _cell(outcome: dict, phase: str) -> str:
    runs = outcome["runs"].get(phase, 1)
    return f"{outcome['seconds'][phase]:.1f}{f' x{runs}' if runs > 1 else ''}"
