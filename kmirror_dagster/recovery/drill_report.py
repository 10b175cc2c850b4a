"""Report of a drill: JSON for machines, one self-contained HTML page for people; both are kept."""

import html
from datetime import datetime, timezone
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field, computed_field

from kmirror_dagster.files import write_text


class DrillStep(BaseModel):
    """One step and how long it took."""

    model_config = ConfigDict(frozen=True)

    name: str
    seconds: float


class DrillReport(BaseModel):
    """What a drill measured.

    Attributes:
        rto_stopped_s: from the call to all partitions STOPPED.
        rto_s: from the call to a record acknowledged in every partition of the destination.
        rpo_records, rpo_s: acknowledged at the source and not at the destination when the call was made: how many,
            and the age of the oldest.
        rpo_limit_s: `policies.rpo_seconds` of the mirror.
        rto_limit_s: None: only measured.
        records_written: acknowledged at the source, before and during the failover.
        unmirrored_records: offsets that the source has behind the last mirror positions; its writer went on.
        verified_records: read on both sides up to the last mirror positions.
        verified: all of them are the same.
        positions: last mirror positions.
        undone: mirror and topics of the drill are gone again.
        error: why it did not end; None when it did.
    """

    model_config = ConfigDict(frozen=True)

    mirror: str
    started_ms: int
    finished_ms: int = 0
    topics: int
    partitions: int
    records_written: int = 0
    rto_stopped_s: float | None = None
    rto_s: float | None = None
    rto_limit_s: float | None = None
    rpo_records: int | None = None
    rpo_s: float | None = None
    rpo_limit_s: float
    unmirrored_records: int = 0
    verified_records: int = 0
    verified: bool = False
    differences: list[str] = Field(default_factory=list)
    positions: dict[str, int] = Field(default_factory=dict)
    steps: list[DrillStep] = Field(default_factory=list[DrillStep])
    undone: bool = False
    error: str | None = None

    @computed_field
    @property
    def failures(self) -> list[str]:
        """Why the drill did not pass, in words; empty when it did."""
        found = [self.error] if self.error else []
        if self.rpo_s is not None and self.rpo_s > self.rpo_limit_s:
            found.append(f"{self.rpo_s:.1f} s would have been lost, {self.rpo_limit_s:g} s are allowed")
        if self.rto_s is not None and self.rto_limit_s is not None and self.rto_s > self.rto_limit_s:
            found.append(f"the failover took {self.rto_s:.1f} s, {self.rto_limit_s:g} s are allowed")
        if not self.error and not self.verified:
            found.append(f"the copies are not the same: {'; '.join(self.differences[:3]) or 'not reached'}")
        return found

    @computed_field
    @property
    def passed(self) -> bool:
        """Whether the drill ended, within its limits, with nothing that differs."""
        return not self.failures


def file_stem(report: DrillReport) -> str:
    """Name of a report's files: sorts by time."""
    return datetime.fromtimestamp(report.started_ms / 1000, timezone.utc).strftime("%Y%m%dT%H%M%S%fZ")


def keep(report: DrillReport, directory: Path) -> tuple[Path, Path]:
    """Write both forms; nothing is overwritten that another drill wrote.

    Raises:
        UsageError: when the directory cannot be written to.
    """
    stem = directory / file_stem(report)
    as_json, as_html = stem.with_suffix(".json"), stem.with_suffix(".html")
    write_text(as_json, report.model_dump_json(indent=2) + "\n")
    write_text(as_html, page(report))
    return as_json, as_html


_STYLE = """
body{font:16px/1.5 system-ui,sans-serif;max-width:46rem;margin:3rem auto;padding:0 1rem;color:#1a1a1a}
h1{font-size:1.5rem}table{border-collapse:collapse;width:100%;margin:1rem 0}
td,th{padding:.35rem .6rem;border-bottom:1px solid #ddd;text-align:left}td.n{text-align:right}
.passed{color:#0a6b2d}.failed{color:#b00020}
@media (prefers-color-scheme:dark){body{background:#161616;color:#e8e8e8}td,th{border-color:#444}
.passed{color:#5fd38d}.failed{color:#ff8a8a}}
"""


def page(report: DrillReport) -> str:
    """The report as one HTML page without scripts, styles or pictures from elsewhere."""
    verdict = "passed" if report.passed else "failed"
    failures = "".join(f"<li>{html.escape(failure)}</li>" for failure in report.failures)
    at = datetime.fromtimestamp(report.started_ms / 1000, timezone.utc).isoformat(timespec="seconds")
    return (
        '<!doctype html><html lang="en"><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>Failover drill of {html.escape(report.mirror)}</title><style>{_STYLE}</style>"
        f"<h1>Failover drill of mirror {html.escape(report.mirror)}: "
        f'<span class="{verdict}">{verdict}</span></h1><p>{at}</p>'
        f"{f'<ul>{failures}</ul>' if failures else ''}"
        f"<table>{_rows(report)}</table><h2>Steps</h2><table>{_step_rows(report)}</table></html>\n"
    )


def figures(report: DrillReport) -> dict[str, str]:
    """What was measured, by what it is called."""
    limit = "" if report.rto_limit_s is None else f" (allowed: {report.rto_limit_s:g} s)"
    return {
        "topics": f"{report.topics}, with {report.partitions} partitions",
        "records written": str(report.records_written),
        "RPO: would have been lost": f"{_seconds(report.rpo_s)}, {_number(report.rpo_records)} records "
        f"(allowed: {report.rpo_limit_s:g} s)",
        "RTO: until every partition took a record": f"{_seconds(report.rto_s)}{limit}",
        "until all partitions were STOPPED": _seconds(report.rto_stopped_s),
        "records verified": f"{report.verified_records}, {'the same' if report.verified else 'NOT THE SAME'}",
        "written at the source behind the cut": str(report.unmirrored_records),
        "undone": "yes" if report.undone else "no",
    }


def _rows(report: DrillReport) -> str:
    return "".join(
        f"<tr><th>{html.escape(name)}</th><td>{html.escape(value)}</td></tr>"
        for name, value in figures(report).items()
    )


def _step_rows(report: DrillReport) -> str:
    return "".join(
        f'<tr><th>{html.escape(step.name)}</th><td class="n">{step.seconds:.1f} s</td></tr>'
        for step in report.steps
    )


def _seconds(value: float | None) -> str:
    return "not measured" if value is None else f"{value:.2f} s"


def _number(value: int | None) -> str:
    return "-" if value is None else str(value)
