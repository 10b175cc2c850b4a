"""The `kmirror` command. Nothing heavy is imported before a command needs it: help must come at once."""

import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from kmirror_dagster.cli import (
    certification,
    check,
    mirrors,
    nodes,
    offsets,
    plan,
    recovery_cut,
    recovery_drill,
    recovery_failback,
    recovery_faults,
    recovery_forecast,
    recovery_history,
    recovery_manifest,
    recovery_switchover,
    schemas,
    verbs,
    verification,
)
from kmirror_dagster.cli.boundary import EXIT_CODES, EXIT_INTERRUPTED, CommandGroup, complain
from kmirror_dagster.cli.sandbox_group import SandboxGroup
from kmirror_dagster.cli.session import Session
from kmirror_dagster.version import __version__

_MIRRORS = "Mirrors"
_STEERING = "Steering"
_RECOVERY = "Recovery and proof"
_MACHINES = "Nodes and sandbox"

app = typer.Typer(
    name="kmirror",
    cls=CommandGroup,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="Mirror Kafka clusters: the same record at the same offset.",
    epilog=EXIT_CODES,
)


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"kmirror {__version__}")
        raise typer.Exit


@app.callback()
def _global_options(  # pyright: ignore[reportUnusedFunction]
    ctx: typer.Context,
    endpoint: Annotated[
        str | None,
        typer.Option(
            "--endpoint",
            metavar="URL",
            help="API of a node, several separated by commas (KMIRROR_ENDPOINT); its token is KMIRROR_TOKEN "
            "or in the state directory. Default: the node of the state directory.",
        ),
    ] = None,
    state_dir: Annotated[
        Path | None,
        typer.Option(
            "--state-dir", metavar="DIR", help="State directory of the local node (KMIRROR_STATE_DIR)."
        ),
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print data as JSON, in any command.")] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show tracebacks and log lines.")] = False,
    version: Annotated[
        bool,
        typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and end."),
    ] = False,
) -> None:
    ctx.obj = Session(endpoint=endpoint, state_dir=state_dir, json=json, debug=debug)
    _set_up_logging(debug=debug)


def _set_up_logging(*, debug: bool) -> None:
    import logging

    if debug:
        logging.basicConfig(level=logging.DEBUG, stream=sys.stderr)
    else:
        # what a library has to say about a failed connection is in the one line that ends the command
        logging.getLogger().addHandler(logging.NullHandler())


def _add_commands() -> None:
    for name, function in (
        ("create", mirrors.create),
        ("list", mirrors.list_mirrors),
        ("describe", mirrors.describe),
        ("verify", verification.verify),
        ("certify", certification.certify),
        ("plan", plan.plan),
        ("check", check.check),
        ("schemas", schemas.schemas),
        ("offsets", offsets.offsets),
        ("refresh", mirrors.refresh),
        ("delete", mirrors.delete),
    ):
        app.command(name, rich_help_panel=_MIRRORS)(function)
    for function in (verbs.start, verbs.pause, verbs.resume, verbs.stop, verbs.recover):
        app.command(function.__name__, rich_help_panel=_STEERING)(function)
    app.command("switchover", rich_help_panel=_RECOVERY)(recovery_switchover.switchover)
    app.command("failback", rich_help_panel=_RECOVERY)(recovery_failback.failback)
    app.command("forecast", rich_help_panel=_RECOVERY)(recovery_forecast.forecast)
    app.command("drill", rich_help_panel=_RECOVERY)(recovery_drill.drill)
    app.command("cut", rich_help_panel=_RECOVERY)(recovery_cut.cut)
    app.command("manifest", rich_help_panel=_RECOVERY)(recovery_manifest.manifest)
    app.command("faults", rich_help_panel=_RECOVERY)(recovery_faults.faults)
    app.add_typer(
        recovery_history.app, name="history", help="Check recorded histories.", rich_help_panel=_RECOVERY
    )
    app.add_typer(nodes.app, name="node", rich_help_panel=_MACHINES)
    sandbox = typer.Typer(cls=SandboxGroup, no_args_is_help=True)
    app.add_typer(
        sandbox,
        name="sandbox",
        help="Two real Apache Kafka clusters on this machine: start, stop, status, reset, seed.",
        rich_help_panel=_MACHINES,
    )

    @sandbox.callback()
    def _() -> None:  # pyright: ignore[reportUnusedFunction]
        """Keep the group a group: its commands are found when one of them is called."""


_add_commands()


def run(arguments: list[str] | None = None) -> int:
    """Run one command line; its exit code."""
    try:
        result: Any = app(args=arguments, prog_name="kmirror", standalone_mode=True)
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    except KeyboardInterrupt:  # before a command ran
        complain("interrupted")
        return EXIT_INTERRUPTED
    return result if isinstance(result, int) else 0


def main() -> None:
    """Entry point of the console script."""
    sys.exit(run())


if __name__ == "__main__":
    main()
