"""`kmirror drill`: a failover rehearsed on shadow topics, with a report."""

from pathlib import Path
from typing import Annotated

import typer

from kmirror_dagster.cli.options import JsonOption, MirrorArgument
from kmirror_dagster.cli.session import session_of
from kmirror_dagster.errors import KmirrorError


def drill(
    ctx: typer.Context,
    mirror: MirrorArgument,
    topics: Annotated[
        int,
        typer.Option(
            "--topics",
            metavar="COUNT",
            min=1,
            max=100,
            help="Shadow topics, at most as many as the mirror has.",
        ),
    ] = 5,
    rate: Annotated[
        float, typer.Option("--rate", metavar="RECORDS", min=1, help="Records written per second in all.")
    ] = 500.0,
    seconds: Annotated[
        float,
        typer.Option("--seconds", metavar="SECONDS", min=0.1, help="Time to write before the failover."),
    ] = 10.0,
    max_rto: Annotated[
        float | None,
        typer.Option(
            "--max-rto", metavar="SECONDS", min=0.1, help="A failover that takes longer fails the drill."
        ),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            metavar="DIR",
            help="Where reports are kept. Default: drills/MIRROR in the state directory.",
        ),
    ] = None,
    json: JsonOption = False,
) -> None:
    """Rehearse a failover on shadow topics: measure RPO and RTO, verify, write a report, undo.

    Topics of the mirror's shape are made at its source under names that begin with `__kmirror_drill.`, mirrored by a
    shadow mirror on the same nodes, written to, failed over, compared and deleted again on both sides. The mirror
    itself is not touched. What an interrupted drill has left is cleared by the next one. Ends with 1 when more than
    policies.rpo_seconds would have been lost, the failover took longer than --max-rto, or anything differs.
    """
    from kmirror_dagster.cli.output import print_json, print_pairs
    from kmirror_dagster.cli.progress import progress
    from kmirror_dagster.coordination.recovery_ports import NodeShadows, shadow_shape
    from kmirror_dagster.files import lock_file
    from kmirror_dagster.recovery.drill import Drill, DrillWish
    from kmirror_dagster.recovery.drill_report import figures, keep
    from kmirror_dagster.settings import mirror_from_document

    session = session_of(ctx)
    directory = output or session.node_directory() / "drills" / mirror
    with (
        session.client() as client,
        lock_file(directory / ".lock", f"another drill of {mirror} is under way"),
    ):
        document = client.document(mirror)
        settings = mirror_from_document(document, name=f"mirror {mirror!r}")
        wish = DrillWish(
            partitions=shadow_shape(client.mirror(mirror), topics),
            rate=rate,
            seconds=seconds,
            rpo_s=settings.policies.rpo_seconds,
            rto_s=max_rto,
        )
        with progress(f"drill {mirror}") as shown:
            report = Drill(
                settings, document, NodeShadows(client), wish, tell=lambda text: shown.update(0, None, text)
            ).run()
    files = keep(report, directory)
    if session.json or json:
        print_json(report.model_dump(mode="json"))
    else:
        print_pairs(figures(report) | {"report": str(files[1])})
    if not report.passed:
        raise KmirrorError(f"{mirror}: the drill failed: {'; '.join(report.failures)}")
