"""Reference of errors."""

import inspect

from docs.generators.markdown import head, paragraphs, table
from kmirror_dagster import errors
from kmirror_dagster.coordination.api import status_of
from kmirror_dagster.errors import BrokerError, KmirrorError

_TEXT = """\
Every error raised on purpose is one of these: its message is one line that names the thing at fault and the remedy. The
command line ends with the exit code, the HTTP API answers with the status and the class's name as `code`. What is
retriable may succeed without anybody's help; nodes retry such a `FAILED` partition by themselves."""


def page() -> str:
    """The whole page."""
    found = [
        kind
        for _, kind in inspect.getmembers(errors, inspect.isclass)
        if issubclass(kind, KmirrorError) and kind is not KmirrorError
    ]
    found.sort(key=lambda kind: inspect.getsourcelines(kind)[1])
    rows = [
        (
            f"`{kind.__name__}`",
            _parent(kind),
            paragraphs(kind.__doc__).removeprefix("Error ").split(".\n")[0],
            "yes" if kind.retriable else "no",
            str(kind.exit_code),
            str(status_of(_made(kind))),
        )
        for kind in found
    ]
    header = ("class", "is a", "meaning", "retriable", "exit code", "HTTP")
    return head("Errors", "kmirror_dagster/errors.py", _TEXT) + "\n" + table(header, rows) + "\n"


def _parent(kind: type[KmirrorError]) -> str:
    parent = kind.__mro__[1].__name__
    return "" if parent == KmirrorError.__name__ else f"`{parent}`"


def _made(kind: type[KmirrorError]) -> KmirrorError:
    return kind(0, "", "") if issubclass(kind, BrokerError) else kind("")
