"""`kmirror manifest`: what a failover has left behind at the source."""

from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kmirror_dagster.cli.options import JsonOption, MirrorArgument, TopicsOption, split_patterns
from kmirror_dagster.cli.session import Session, session_of

if TYPE_CHECKING:
    from kmirror_dagster.recovery.manifest import LossManifest
    from kmirror_dagster.settings import MirrorSettings

_NUMERIC = frozenset({"PARTITION", "FROM", "TO", "RECORDS", "BYTES"})
_SHOWN_PARTITIONS = 50


def manifest(
    ctx: typer.Context,
    mirror: MirrorArgument,
    topics: TopicsOption = None,
    output: Annotated[
        Path | None,
        typer.Option("--output", metavar="FILE", help="Write it there too: *.parquet, or JSON."),
    ] = None,
    timeout: Annotated[
        float | None,
        typer.Option("--timeout", metavar="SECONDS", min=0.1, help="End the reading after that time."),
    ] = None,
    json: JsonOption = False,
) -> None:
    """List what the source of a stopped mirror holds that was never mirrored.

    Per partition: the offsets from the last mirror position to the source's end, how many readable records that are,
    their bytes and time span. Reads the source with this process's environment, writes to no cluster, and can be
    repeated as often as one likes.
    """
    from kmirror_dagster.cli.output import print_json
    from kmirror_dagster.recovery.exports import export_manifest

    session = session_of(ctx)
    made, _ = read_manifest(session, mirror, split_patterns(topics), timeout)
    if output is not None:
        export_manifest(made, output)
    if session.json or json:
        print_json(made.model_dump(mode="json"))
    else:
        print_manifest(made)


def read_manifest(
    session: Session, mirror: str, patterns: list[str] | None, timeout_s: float | None
) -> "tuple[LossManifest, MirrorSettings]":
    """Ask the node where stopped topics ended, and read the source behind that; also the mirror's settings."""
    from kmirror_dagster.cli.progress import progress
    from kmirror_dagster.coordination.recovery_nodes import stopped_positions
    from kmirror_dagster.recovery.manifest import build_manifest
    from kmirror_dagster.settings import mirror_from_document
    from kmirror_dagster.verification.range_reads import ReadLimits

    with session.client() as client:
        positions, not_stopped = stopped_positions(client, mirror, patterns)
        settings = mirror_from_document(client.document(mirror), name=f"mirror {mirror!r}")
        source_id = client.mirror(mirror).source_cluster_id
    with progress(f"manifest {mirror}") as shown:
        made = build_manifest(
            mirror,
            settings.source,
            positions,
            source_cluster_id=source_id,
            not_stopped=not_stopped,
            limits=ReadLimits(deadline_s=timeout_s),
            progress=lambda phase, done, total: shown.update(done, total, phase),
        )
    return made, settings


def print_manifest(made: "LossManifest") -> None:
    """Print a manifest: its sums, then the partitions that lack something."""
    from kmirror_dagster.cli.output import print_pairs, print_table

    span = "-"
    if made.first_timestamp_ms is not None and made.last_timestamp_ms is not None:
        span = f"{_time(made.first_timestamp_ms)} to {_time(made.last_timestamp_ms)}"
    pairs = {
        "mirror": made.mirror,
        "stopped": _time(made.stopped_ms),
        "partitions": f"{len(made.partitions)}, of which {len(made.losses)} lack something",
        "records not mirrored": str(made.records),
        "bytes": str(made.size_bytes),
        "time span": span,
    }
    if made.not_stopped:
        pairs["topics not stopped"] = ", ".join(made.not_stopped)
    print_pairs(pairs)
    shown = [loss for loss in made.partitions if loss.offsets or loss.problem]
    if not shown:
        return
    typer.echo("")
    rows = (
        (
            loss.topic,
            str(loss.partition),
            str(loss.first_offset),
            str(loss.end_offset),
            str(loss.records),
            str(loss.size_bytes),
            loss.problem or "-",
        )
        for loss in shown[:_SHOWN_PARTITIONS]
    )
    print_table(("TOPIC", "PARTITION", "FROM", "TO", "RECORDS", "BYTES", "PROBLEM"), rows, numeric=_NUMERIC)
    if len(shown) > _SHOWN_PARTITIONS:
        typer.echo(f"... and {len(shown) - _SHOWN_PARTITIONS} more (--json lists all)")


def _time(epoch_ms: int) -> str:
    return datetime.fromtimestamp(epoch_ms / 1000, timezone.utc).isoformat(timespec="milliseconds")
