"""`kmirror check`: can this mirror work? Asked before anything is changed."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kmirror_dagster.cli.completion import mirror_names
from kmirror_dagster.cli.options import JsonOption
from kmirror_dagster.cli.session import Session, session_of
from kmirror_dagster.errors import KmirrorError, MirrorExistsError, UsageError

if TYPE_CHECKING:
    from kmirror_dagster.metadata.preflight import PreflightReport
    from kmirror_dagster.settings import MirrorSettings

_SHOWN = 20
_COLOURS = {"ok": "green", "warning": "yellow", "unknown": "yellow", "error": "red"}


def check(
    ctx: typer.Context,
    target: Annotated[
        str,
        typer.Argument(
            metavar="FILE|MIRROR",
            help="Settings file of a mirror, or the name of one on the node.",
            autocompletion=mirror_names,
        ),
    ],
    node_group: Annotated[
        str, typer.Option("--node-group", metavar="GROUP", help="Group id of the nodes.")
    ] = "kmirror",
    timeout: Annotated[
        float, typer.Option("--timeout", metavar="SECONDS", min=1.0, help="Longest time it may take.")
    ] = 60.0,
    json: JsonOption = False,
) -> None:
    """Check both clusters before mirroring: reachable, versions, every right that is needed, read-only or not.

    Changes nothing. The clusters are asked with this process's environment. Rights that are missing are
    followed by the kafka-acls lines that grant them; ends with 1 then.
    """
    session = session_of(ctx)
    report = _asked(_settings(session, target), node_group, timeout)
    if session.json or json:
        _print_json(report)
    else:
        _print_report(report)
    _raise_unless_ok(report)


def preview_creation(session: Session, file: Path, *, replace: bool, timeout_s: float, as_json: bool) -> None:
    """Say what creating a mirror from a file would do: with its node, and with both clusters.

    Raises:
        MirrorExistsError: one of that name has other settings and `replace` is not set.
        KmirrorError: something stands in the way.
    """
    from kmirror_dagster.settings import load_document, load_mirror

    document = load_document(file)
    settings = load_mirror(file)
    with session.client() as client:
        names = {summary.mirror for summary in client.mirrors()}
        stored = client.document(settings.mirror) if settings.mirror in names else None
    if stored is not None and stored != document and not replace:
        raise MirrorExistsError(f"mirror {settings.mirror!r} exists with other settings: see --replace")
    report = _asked(settings, "kmirror", timeout_s)
    action = "create" if stored is None else "keep" if stored == document else "replace"
    if as_json:
        _print_json(report, action=action)
    else:
        _print_report(report)
        text = {
            "create": "would be created",
            "replace": "would get these settings",
            "keep": "would stay as it is",
        }
        shown = ", ".join(report.topics[:_SHOWN])
        more = f" and {len(report.topics) - _SHOWN} more" if len(report.topics) > _SHOWN else ""
        typer.echo(
            f"mirror {settings.mirror} {text[action]}; topics: {shown or 'none yet'}{more}; nothing was changed"
        )
    _raise_unless_ok(report)


def _asked(settings: "MirrorSettings", node_group: str, timeout_s: float) -> "PreflightReport":
    from kmirror_dagster.broker.admin import ClusterAdmin
    from kmirror_dagster.cli.progress import busy
    from kmirror_dagster.metadata.preflight import run_preflight

    source, destination = ClusterAdmin(settings.source), ClusterAdmin(settings.destination)
    try:
        with busy(f"asking the clusters of {settings.mirror}"):
            return run_preflight(settings, source, destination, node_group=node_group, deadline_s=timeout_s)
    finally:
        source.close()
        destination.close()


def _print_json(report: "PreflightReport", **more: str) -> None:
    from kmirror_dagster.cli.output import print_json

    print_json({**report.model_dump(mode="json"), "ok": report.ok, **more})


def _raise_unless_ok(report: "PreflightReport") -> None:
    if not report.ok:
        errors = sum(finding.level == "error" for finding in report.findings)
        raise KmirrorError(f"{report.mirror}: {errors} error(s), {len(report.missing)} right(s) missing")


def _settings(session: Session, target: str) -> "MirrorSettings":
    from kmirror_dagster.settings import load_mirror, mirror_from_document

    path = Path(target)
    if path.is_file():
        return load_mirror(path)
    if path.suffix in (".yaml", ".yml") or path.parent != Path():
        raise UsageError(f"{target} does not exist; give a settings file or the name of a mirror")
    with session.client() as client:
        return mirror_from_document(client.document(target), name=f"mirror {target!r}")


def _print_report(report: "PreflightReport") -> None:
    width = max((len(finding.level) for finding in report.findings), default=len("error"))
    for finding in report.findings:
        level = typer.style(finding.level.ljust(width), fg=_COLOURS[finding.level])
        typer.echo(f"{level}  {finding.subject}: {finding.text}")
    for right in report.missing:
        level = typer.style("error".ljust(width), fg="red")
        resource = f"{right.resource_type.lower()} {right.resource_name}"
        needed = f"{right.principal} lacks {right.operation} on {resource} (to {right.why})"
        typer.echo(f"{level}  {right.side}: {needed}")
    if report.commands:
        typer.echo("\nGrant what is missing with:\n")
        for line in report.commands:
            typer.echo(line)
