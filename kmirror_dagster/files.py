"""Files that are there complete or not at all."""

import fcntl
import os
import tempfile
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path

from kmirror_dagster.errors import UsageError


def write_atomically(path: Path, write: Callable[[Path], object]) -> None:
    """Let `write` fill a file beside `path`, then put it in its place, on disk before its name.

    Raises:
        UsageError: when the directory cannot be written to.
    """
    temporary: Path | None = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        os.close(handle)
        temporary = Path(name)
        write(temporary)
        with temporary.open("rb") as written:
            os.fsync(written.fileno())
        temporary.replace(path)
        temporary = None
    except OSError as error:
        raise UsageError(f"{path} cannot be written: {error.strerror or error}") from error
    finally:
        if temporary is not None:
            temporary.unlink(missing_ok=True)


def write_text(path: Path, text: str) -> None:
    """Write a text file as UTF-8; an existing one is replaced.

    Raises:
        UsageError: when the directory cannot be written to.
    """
    write_atomically(path, lambda temporary: temporary.write_text(text, encoding="utf-8"))


@contextmanager
def lock_file(path: Path, taken: str) -> Generator[None]:
    """Hold a lock on a file, made when missing, that ends with this process however it ends.

    Args:
        path: the file; it stays.
        taken: what the error says when another process holds it.

    Raises:
        UsageError: when another process holds it, or it cannot be made.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle = path.open("w")
    except OSError as error:
        raise UsageError(f"{path} cannot be written: {error.strerror or error}") from error
    with handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise UsageError(f"{taken}: wait for it, or end it") from error
        yield
