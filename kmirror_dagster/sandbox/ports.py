"""Free ports on the loopback interface, chosen so that two processes do not pick the same one."""

import contextlib
import errno
import fcntl
import random
import socket
import tempfile
from pathlib import Path
from types import TracebackType
from typing import IO

import psutil

from kmirror_dagster.errors import PortInUseError, SandboxError

HOST = "127.0.0.1"
# Below Linux' range for outgoing connections (32768-60999), so never handed to a client.
_FIRST, _LAST = 20000, 32000
_TRIES = 500


class PortClaim:
    """Ports claimed until the block is left, by then their user listens on them.

    A claim is a locked file: it keeps other claims of this machine's user away, and ends with the process.
    """

    def __init__(self, folder: Path | None = None, rng: random.Random | None = None) -> None:
        self._folder = folder or Path(tempfile.gettempdir()) / f"kmirror-ports-{_user()}"
        self._rng = rng or random.Random()  # noqa: S311 - not a secret
        self._files: list[IO[str]] = []

    def __enter__(self) -> "PortClaim":
        """Make the folder of claims."""
        self._folder.mkdir(mode=0o700, exist_ok=True)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Drop all claims."""
        for file in self._files:
            file.close()
        self._files.clear()

    def take(self) -> int:
        """Claim one free port.

        Raises:
            SandboxError: none was found.
        """
        for _ in range(_TRIES):
            port = self._rng.randrange(_FIRST, _LAST)
            if self._claim(port) and is_free(port):
                return port
        raise SandboxError(f"no free port between {_FIRST} and {_LAST} on {HOST}; end some programs")

    def _claim(self, port: int) -> bool:
        file = (self._folder / f"{port}.lock").open("a")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.close()
            return False
        self._files.append(file)
        return True


def _user() -> str:
    return str(psutil.Process().uids().real)


def is_free(port: int) -> bool:
    """Whether a server could listen on the port now."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        # As Java's server sockets do: connections in TIME_WAIT do not count.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, port))
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                return False
            raise
    return True


def require_free(port: int, purpose: str) -> None:
    """Check that a port that is already decided on can be had.

    Args:
        port: TCP port.
        purpose: who wants it, for the message.

    Raises:
        PortInUseError: another program listens on it; the message names it where that can be seen.
    """
    if not is_free(port):
        raise PortInUseError(f"port {port} of {purpose} is taken{_holder(port)}; end that program")


def _holder(port: int) -> str:
    with contextlib.suppress(psutil.Error):
        for connection in psutil.net_connections("tcp"):
            if connection.status == psutil.CONN_LISTEN and connection.laddr and connection.laddr.port == port:
                if connection.pid is None:
                    break
                return f" by process {connection.pid} ({psutil.Process(connection.pid).name()})"
    return ""
