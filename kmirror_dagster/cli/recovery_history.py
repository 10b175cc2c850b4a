"""`kmirror history`: recorded producer and consumer histories checked for anomalies."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kmirror_dagster.cli.options import JsonOption
from kmirror_dagster.cli.session import session_of
from kmirror_dagster.errors import KmirrorError

if TYPE_CHECKING:
    from kmirror_dagster.verification.history_checker import HistoryReport

app = typer.Typer(no_args_is_help=True)

_SHOWN_ANOMALIES = 20


@app.callback()
def _group() -> None:  # pyright: ignore[reportUnusedFunction]
    """Check recorded producer and consumer histories."""


@app.command()
def check(
    ctx: typer.Context,
    file: Annotated[Path, typer.Argument(metavar="FILE", help="History, one JSON event a line.")],
    complete: Annotated[
        list[str] | None,
        typer.Option(
            "--complete",
            metavar="CLUSTER",
            help="Cluster whose consumers read to the end: what they have not read is unseen there. May be given "
            "again.",
        ),
    ] = None,
    json: JsonOption = False,
) -> None:
    """Look for the anomalies of Jepsen's Kafka workload in a recorded history.

    lost, duplicate, reordered, unseen, inconsistent offsets, aborted read, non-monotonic poll, unexpected value;
    over both clusters at once, since a mirror has the same record at the same offset. Ends with 1 when there is any.
    """
    from kmirror_dagster.cli.output import print_json
    from kmirror_dagster.verification.history import read_history
    from kmirror_dagster.verification.history_checker import check_history

    report = check_history(read_history(file), complete=complete or ())
    if session_of(ctx).json or json:
        print_json({**report.model_dump(mode="json"), "ok": report.ok})
    else:
        print_history(report)
    if not report.ok:
        raise KmirrorError(f"{file}: {report.anomalies_total} anomalies found")


def print_history(report: "HistoryReport") -> None:
    """Print what a history says, as text."""
    from kmirror_dagster.cli.output import print_pairs, print_table

    pairs = {
        "sent": str(report.sent),
        "acknowledged": str(report.acknowledged),
        "of unknown outcome": str(report.unknown),
        "polled": str(report.polled),
        "cut off by failovers": str(report.unmirrored),
        "anomalies": str(report.anomalies_total),
        **{f"  {kind}": str(count) for kind, count in sorted(report.anomalies_by_kind.items())},
    }
    print_pairs(pairs)
    if report.anomalies:
        typer.echo("")
        rows = (
            (
                a.kind.value,
                a.topic,
                str(a.partition),
                "-" if a.offset is None else str(a.offset),
                a.cluster or "-",
                a.detail,
            )
            for a in report.anomalies[:_SHOWN_ANOMALIES]
        )
        print_table(("ANOMALY", "TOPIC", "PARTITION", "OFFSET", "CLUSTER", "DETAIL"), rows)
        left = report.anomalies_total - min(len(report.anomalies), _SHOWN_ANOMALIES)
        if left:
            typer.echo(f"... and {left} more (--json lists the first 100 of each kind)")
