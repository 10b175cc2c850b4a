"""Locks between processes of one machine; the kernel drops them when their holder dies."""

import fcntl
import time
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

from kmirror_dagster.errors import SandboxError

_POLL_S = 0.1


@contextmanager
def held(path: Path, *, wait_s: float) -> Generator[None]:
    """Hold an exclusive lock on a file while the block runs.

    Args:
        path: the lock file; created when missing and never removed (removing it would race).
        wait_s: seconds to wait for another holder.

    Raises:
        SandboxError: another process held it for all of that time.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    deadline = time.monotonic() + wait_s
    with path.open("a") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError as error:
                if time.monotonic() >= deadline:
                    raise SandboxError(
                        f"{path.parent} is in use by another kmirror process; wait for it or end it"
                    ) from error
                time.sleep(_POLL_S)
        yield
