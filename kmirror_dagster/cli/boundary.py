"""Where errors end: one line on stderr and an exit code, never a traceback nobody asked for."""

import sys
import traceback
from typing import Any

import typer
from typer.core import TyperGroup

from kmirror_dagster.cli.session import session_of
from kmirror_dagster.errors import KmirrorError

EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_INTERRUPTED = 130

EXIT_CODES = (
    "Exit codes: 0 it worked; 1 it did not work, or differences were found; "
    "2 something has to be changed first (the message says what); 130 interrupted."
)


def complain(message: str) -> None:
    """Write one line to stderr."""
    line = " ".join(part.strip() for part in message.splitlines() if part.strip())
    typer.echo(f"kmirror: {line}", err=True)


class CommandGroup(TyperGroup):
    """The root of the command line: turns every error into a line and an exit code."""

    def invoke(self, ctx: Any) -> Any:
        """Run the command; framework errors (unknown option, ...) are left to the framework, exit code 2."""
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            complain("interrupted")
            raise typer.Exit(EXIT_INTERRUPTED) from None
        except KmirrorError as error:
            _show_traceback_if_asked(ctx)
            complain(str(error) or type(error).__name__)
            raise typer.Exit(error.exit_code) from error
        except (typer.Exit, typer.Abort, BrokenPipeError):
            raise
        except Exception as error:
            if hasattr(error, "format_message"):  # of the framework, whose classes moved between its versions
                raise
            _show_traceback_if_asked(ctx)
            hint = "" if session_of(ctx).debug else "; run again with 'kmirror --debug' for the traceback"
            complain(f"unexpected {type(error).__name__}: {error}{hint}")
            raise typer.Exit(EXIT_FAILED) from error


def _show_traceback_if_asked(ctx: Any) -> None:
    if session_of(ctx).debug:
        traceback.print_exc(file=sys.stderr)
