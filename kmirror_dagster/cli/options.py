"""Arguments and options that several commands share."""

from typing import Annotated, TypeAlias

import typer

from kmirror_dagster.cli.completion import mirror_names
from kmirror_dagster.errors import UsageError

MirrorArgument: TypeAlias = Annotated[
    str, typer.Argument(metavar="MIRROR", help="Name of the mirror.", autocompletion=mirror_names)
]
JsonOption: TypeAlias = Annotated[
    bool, typer.Option("--json", help="Print JSON to stdout and nothing else there.")
]
TopicsOption: TypeAlias = Annotated[
    list[str] | None,
    typer.Option(
        "--topics",
        metavar="PATTERN",
        help="Whole-name RE2 pattern of topics, or several separated by commas; may be given again. "
        "Default: all topics of the mirror.",
    ),
]
WaitOption: TypeAlias = Annotated[
    bool, typer.Option("--wait/--no-wait", help="Wait until all partitions are there.")
]
TimeoutOption: TypeAlias = Annotated[
    float, typer.Option("--timeout", metavar="SECONDS", min=0.1, help="Longest wait.")
]
DryRunOption: TypeAlias = Annotated[
    bool, typer.Option("--dry-run", help="Only say what would be done; nothing is changed.")
]


def split_patterns(given: list[str] | None) -> list[str] | None:
    """Patterns of all `--topics` options; None when there is none.

    Raises:
        UsageError: when they hold no pattern at all.
    """
    if not given:
        return None
    from kmirror_dagster.settings.filters import split_list

    patterns = [pattern for text in given for pattern in split_list(text)]
    if not patterns:
        raise UsageError("--topics names no topic; leave it out for all topics of the mirror")
    return patterns
