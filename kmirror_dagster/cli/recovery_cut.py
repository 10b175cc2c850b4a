"""`kmirror cut`: one source time to which all failed-over topics are complete."""

from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kmirror_dagster.cli.certification import moment
from kmirror_dagster.cli.options import JsonOption, MirrorArgument, TopicsOption, split_patterns
from kmirror_dagster.cli.recovery_manifest import read_manifest
from kmirror_dagster.cli.session import session_of
from kmirror_dagster.errors import UsageError
from kmirror_dagster.recovery.formats import QuarantineFormat

if TYPE_CHECKING:
    from kmirror_dagster.cli.session import Session
    from kmirror_dagster.recovery.cut import ConsistentCut

_NUMERIC = frozenset({"PARTITION", "CUT", "MIRRORED TO", "SURPLUS"})
_SHOWN_PARTITIONS = 50


def cut(
    ctx: typer.Context,
    mirror: MirrorArgument,
    topics: TopicsOption = None,
    at: Annotated[
        str | None,
        typer.Option(
            "--at",
            metavar="TIME",
            help="An earlier time (ISO-8601 with offset from UTC). Default: the latest.",
        ),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option("--output", metavar="FILE", help="Write it there too: *.parquet, or JSON."),
    ] = None,
    surplus: Annotated[
        Path | None,
        typer.Option("--surplus", metavar="DIR", help="Save what is behind the cut to files there."),
    ] = None,
    timeout: Annotated[
        float | None,
        typer.Option("--timeout", metavar="SECONDS", min=0.1, help="End the reading after that time."),
    ] = None,
    json: JsonOption = False,
) -> None:
    """Tell one source time to which all topics of a stopped mirror are complete, and the offsets it is at.

    A failover stops each partition where it happens to be. The common time is one millisecond before the earliest
    record that was never mirrored; the cut of a partition is the first offset whose record is later. What the
    destination holds behind it stays there (a log's tail cannot be cut), is counted, and can be saved. Reads both
    clusters with this process's environment and writes to neither.
    """
    from kmirror_dagster.cli.output import print_json
    from kmirror_dagster.recovery.cut import export_cut, find_cut, save_surplus

    session = session_of(ctx)
    wanted_ms = moment(at, "--at")
    manifest, settings = read_manifest(session, mirror, split_patterns(topics), timeout)
    _refuse_translated(session, mirror, {each.topic for each in manifest.partitions})
    found = find_cut(settings.destination, manifest, wanted_ms=wanted_ms)
    if output is not None:
        export_cut(found, output)
    saved = []
    if surplus is not None:
        saved = save_surplus(settings.destination, found, surplus, QuarantineFormat.JSONL)
    if session.json or json:
        files = [tail.model_dump(mode="json") for tail in saved]
        print_json({**found.model_dump(mode="json"), "saved": files})
    else:
        _print(found)
        for tail in saved:
            typer.echo(f"saved {tail.records} records: {tail.file}")


def _refuse_translated(session: "Session", mirror: str, topics: set[str]) -> None:
    """A cut is told in offsets of both sides at once: there are none where they differ."""
    with session.client() as client:
        translated = sorted({told.topic for told in client.offsets(mirror)} & topics)
    if translated:
        raise UsageError(
            f"mirror {mirror}: offsets of {', '.join(translated[:5])} are translated: there is no cut through them; "
            "leave them out (--topics)"
        )


def _print(found: "ConsistentCut") -> None:
    from kmirror_dagster.cli.output import print_pairs, print_table

    at = datetime.fromtimestamp(found.at_ms / 1000, timezone.utc).isoformat(timespec="milliseconds")
    complete = (
        "nothing is missing" if found.latest_ms is None else f"{found.latest_ms} (epoch ms) at the latest"
    )
    print_pairs(
        {
            "mirror": found.mirror,
            "common time": at,
            "complete to": complete,
            "behind the cut": f"{found.surplus} offsets",
        }
    )
    typer.echo("")
    rows = (
        (each.topic, str(each.partition), str(each.offset), str(each.mirrored_to), str(each.surplus))
        for each in found.partitions[:_SHOWN_PARTITIONS]
    )
    print_table(("TOPIC", "PARTITION", "CUT", "MIRRORED TO", "SURPLUS"), rows, numeric=_NUMERIC)
    if len(found.partitions) > _SHOWN_PARTITIONS:
        typer.echo(f"... and {len(found.partitions) - _SHOWN_PARTITIONS} more (--json lists all)")
