"""Progress on stderr: a bar on a terminal, a plain line now and then elsewhere."""

import sys
import threading
import time
from collections.abc import Generator
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol

import typer

# Between two plain lines: often enough to see that it goes on, seldom enough for a log file.
LINE_INTERVAL_S = 5.0


class Progress(Protocol):
    """One running bar."""

    def update(self, done: int, total: int | None, text: str) -> None:
        """Show how far it is; `total` None when nobody knows."""
        ...


def progress(title: str) -> AbstractContextManager[Progress]:
    """A bar for something whose progress is told with `update`."""
    return _bar(title) if sys.stderr.isatty() else _lines(title)


@contextmanager
def busy(title: str) -> Generator[None, None, None]:
    """Show that one blocking call is under way, and for how long."""
    ended = threading.Event()
    started = time.monotonic()
    with progress(title) as shown:

        def tick() -> None:
            while not ended.wait(0.2):
                shown.update(0, None, f"{time.monotonic() - started:.0f} s")

        ticker = threading.Thread(target=tick, name="progress", daemon=True)
        ticker.start()
        try:
            yield
        finally:
            ended.set()
            ticker.join()


class _Lines:
    def __init__(self, title: str) -> None:
        self._title = title
        self._next = time.monotonic() + LINE_INTERVAL_S

    def update(self, done: int, total: int | None, text: str) -> None:
        now = time.monotonic()
        if now < self._next:
            return
        self._next = now + LINE_INTERVAL_S
        share = f" {done}/{total}" if total is not None else ""
        typer.echo(f"{self._title}:{share} {text}".rstrip(), err=True)


@contextmanager
def _lines(title: str) -> Generator[Progress, None, None]:
    yield _Lines(title)


@contextmanager
def _bar(title: str) -> Generator[Progress, None, None]:
    from rich.console import Console
    from rich.progress import BarColumn, SpinnerColumn, TextColumn
    from rich.progress import Progress as RichProgress

    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.fields[note]}"),
    )
    with RichProgress(*columns, console=Console(stderr=True), transient=True) as shown:
        task = shown.add_task(title, total=None, note="")

        class Bar:
            def update(self, done: int, total: int | None, text: str) -> None:
                shown.update(task, completed=done, total=total, note=text)

        yield Bar()
