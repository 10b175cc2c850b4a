"""What goes to stdout: plain aligned columns, or JSON and nothing else."""

import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

import typer

if TYPE_CHECKING:
    from pydantic import BaseModel

GAP = "  "
UNKNOWN = "-"

_COLOURS = {
    "MIRRORING": typer.colors.GREEN,
    "FAILED": typer.colors.RED,
    "PAUSED": typer.colors.YELLOW,
    "STOPPED": typer.colors.BLUE,
}


def print_json(value: object) -> None:
    """Print one JSON document."""
    typer.echo(json.dumps(value, indent=2, ensure_ascii=False))


def print_models(models: "Iterable[BaseModel]") -> None:
    """Print a JSON array of models."""
    print_json([model.model_dump(mode="json") for model in models])


def print_table(
    header: Sequence[str], rows: Iterable[Sequence[str]], *, numeric: frozenset[str] = frozenset()
) -> None:
    """Print columns padded to their widest cell, `numeric` ones to the right.

    Cells are never cut or wrapped, so that a pipe sees the same lines as a terminal; states are coloured on a
    terminal only.
    """
    lines = [list(header), *(list(row) for row in rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(header))]
    coloured = sys.stdout.isatty()
    for number, line in enumerate(lines):
        cells = [
            cell.rjust(width) if name in numeric else cell.ljust(width)
            for name, cell, width in zip(header, line, widths, strict=True)
        ]
        cells[-1] = cells[-1].rstrip()
        if coloured:
            cells = [_coloured(cell, is_header=number == 0) for cell in cells]
        typer.echo(GAP.join(cells).rstrip())


def print_pairs(pairs: Mapping[str, str]) -> None:
    """Print names and values below each other, aligned."""
    width = max(map(len, pairs))
    for name, value in pairs.items():
        typer.echo(f"{name.ljust(width)}{GAP}{value}")


def number_or_unknown(value: int | None) -> str:
    """A number as text; unknown and -1 are a dash."""
    return UNKNOWN if value is None or value < 0 else str(value)


def counts_text(counts: Mapping[str, int]) -> str:
    """Counts per state as "12 MIRRORING, 1 FAILED", most first."""
    ordered = sorted(counts.items(), key=lambda item: (-item[1], item[0]))
    return ", ".join(f"{count} {name}" for name, count in ordered if count) or UNKNOWN


def rate_text(bytes_per_second: float) -> str:
    """Throughput in the largest unit below it."""
    value = bytes_per_second
    for unit in ("B/s", "KiB/s", "MiB/s"):
        if value < 1024:
            return f"{value:.0f} {unit}"
        value /= 1024
    return f"{value:.1f} GiB/s"


def _coloured(cell: str, *, is_header: bool) -> str:
    if is_header:
        return typer.style(cell, bold=True)
    colour = _COLOURS.get(cell.strip())
    return typer.style(cell, fg=colour) if colour else cell
