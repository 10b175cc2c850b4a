"""`kmirror plan`: what the next metadata refresh would change."""

from typing import TYPE_CHECKING, Annotated

import typer

from kmirror_dagster.cli.options import JsonOption, MirrorArgument
from kmirror_dagster.cli.session import Session, session_of
from kmirror_dagster.errors import KmirrorError

if TYPE_CHECKING:
    from kmirror_dagster.coordination.models import MirrorPlan

_MARKS = {"create": ("+", typer.colors.GREEN), "delete": ("-", typer.colors.RED)}
_CHANGE = ("~", typer.colors.YELLOW)


def plan(
    ctx: typer.Context,
    mirror: MirrorArgument,
    check: Annotated[
        bool, typer.Option("--check", help="End with 1 when a refresh would change anything.")
    ] = False,
    json: JsonOption = False,
) -> None:
    """Show what a metadata refresh would change now: topics, configurations, groups, ACLs, log starts.

    The node that leads the mirror looks at both clusters and changes nothing. What it could not look at, and
    what is left alone on purpose, follows below the changes.
    """
    session = session_of(ctx)
    changes = show_plan(session, mirror, as_json=session.json or json)
    if check and changes:
        raise KmirrorError(f"{mirror} is not in step: {changes} change(s)")


def show_plan(session: Session, mirror: str, *, as_json: bool) -> int:
    """Print what a refresh of a mirror would change; the number of changes.

    Raises:
        KmirrorError: when something could not be looked at.
    """
    from kmirror_dagster.cli.output import print_json
    from kmirror_dagster.cli.progress import busy

    with session.client() as client, busy(f"planning {mirror}"):
        planned = client.plan(mirror)
    if as_json:
        print_json(planned.model_dump(mode="json"))
    else:
        _print_plan(planned)
    errors = [
        f"{step.step}: {name}: {text}" for step in planned.status.steps for name, text in step.errors.items()
    ]
    if errors:
        raise KmirrorError(f"plan of {mirror} is not complete: {'; '.join(errors)}")
    return len(planned.changes)


def _print_plan(planned: "MirrorPlan") -> None:
    for step in planned.status.steps:
        changes = [change for change in planned.changes if change.step == step.step]
        if not (changes or step.notes or step.errors):
            continue
        typer.secho(step.step, bold=True)
        for change in changes:
            mark, colour = _MARKS.get(change.text.split(" ", 1)[0], _CHANGE)
            typer.secho(f"  {mark} {change.subject}: {change.text}", fg=colour)
        for name, text in step.errors.items():
            typer.secho(f"  ! {name}: {text}", fg=typer.colors.RED)
        for note in step.notes:
            typer.secho(f"    {note}", dim=True)
    count = len(planned.changes)
    typer.echo(f"{count} change(s)" if count else "nothing to change")
