"""`kmirror schemas`: do the schema ids in mirrored records resolve at the destination's registry?"""

from typing import TYPE_CHECKING, Annotated

import typer

from kmirror_dagster.cli.options import JsonOption, MirrorArgument, TopicsOption, split_patterns
from kmirror_dagster.cli.session import session_of
from kmirror_dagster.errors import KmirrorError, UsageError

if TYPE_CHECKING:
    from kmirror_dagster.verification.schemas import SchemaReport

_SHOWN = 20


def schemas(
    ctx: typer.Context,
    mirror: MirrorArgument,
    topics: TopicsOption = None,
    last: Annotated[
        int,
        typer.Option("--last", metavar="N", min=1, help="Offsets looked at, at the end of each partition."),
    ] = 100,
    timeout: Annotated[
        float,
        typer.Option("--timeout", metavar="SECONDS", min=1.0, help="Longest time the reading may take."),
    ] = 60.0,
    json: JsonOption = False,
) -> None:
    """Look up the schema ids of the newest mirrored records at the destination's schema registry.

    The registry is schema_registry.url of the mirror's settings. Ends with 1 when it does not know an id, which
    consumers would stop at after a failover. Changes nothing.
    """
    from kmirror_dagster.cli.output import print_json
    from kmirror_dagster.cli.progress import progress
    from kmirror_dagster.settings import mirror_from_document, name_matcher
    from kmirror_dagster.verification.schemas import Registry, check_schemas

    session = session_of(ctx)
    try:
        selects = name_matcher(split_patterns(topics))
    except ValueError as error:
        raise UsageError(str(error)) from error
    with session.client() as client:
        settings = mirror_from_document(client.document(mirror), name=f"mirror {mirror!r}")
        found = [
            each.topic for each in client.mirror(mirror).topics if each.partitions > 0 and selects(each.topic)
        ]
    registry = Registry(settings.schema_registry)
    try:
        with progress(f"schemas {mirror}") as shown:
            report = check_schemas(
                settings,
                found,
                registry,
                last=last,
                deadline_s=timeout,
                progress=lambda phase, done, total: shown.update(done, total, phase),
            )
    finally:
        registry.close()
    if session.json or json:
        print_json({**report.model_dump(mode="json"), "ok": report.ok})
    else:
        _print_report(report)
    if not report.ok:
        raise KmirrorError(
            f"{mirror}: {len(report.missing)} schema id(s) are not at {report.registry}, "
            f"{len(report.unreadable)} topic(s) could not be looked at"
        )


def _print_report(report: "SchemaReport") -> None:
    typer.echo(
        f"{report.records} records looked at; {len(report.topics)} topics with schema ids; "
        f"{len(report.resolved)} ids resolve at {report.registry}"
    )
    for use in report.missing[:_SHOWN]:
        where = f"{use.topic}/{use.partition}@{use.offset}"
        typer.secho(f"id {use.schema_id} is not known there: {use.part} of {where}", fg=typer.colors.RED)
    if len(report.missing) > _SHOWN:
        typer.echo(f"... and {len(report.missing) - _SHOWN} more (--json lists all)")
    for topic, reason in report.unreadable.items():
        typer.secho(f"{topic}: {reason}", fg=typer.colors.RED)
