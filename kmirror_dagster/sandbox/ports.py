"""Free ports on the loopback interface, chosen so that two processes do not pick the same one."""

import contextlib
import errno
import fcntl
import os
import random
import socket
import struct
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

    A claim is a lock on one byte of a file that all claims of this machine's user share: it keeps the others away
    from that port, and ends with the process. The locks belong to the open file (Linux' "open file description
    locks"), so two claims in one process exclude each other too.
    """

    def __init__(self, file: Path | None = None, rng: random.Random | None = None) -> None:
        """Describe a claim.

        Args:
            file: the shared file; it stays empty.
            rng: chooses ports.
        """
        self._path = file or Path(tempfile.gettempdir()) / f"kmirror-ports-{os.getuid()}.lock"
        self._rng = rng or random.Random()  # noqa: S311 - not a secret
        self._file: IO[bytes] | None = None
        self._taken: set[int] = set()

    def __enter__(self) -> "PortClaim":
        """Open the shared file."""
        self._file = self._path.open("ab")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Drop all claims."""
        if self._file is not None:
            self._file.close()

    def take(self) -> int:
        """Claim one free port.

        Raises:
            SandboxError: none was found.
        """
        for _ in range(_TRIES):
            port = self._rng.randrange(_FIRST, _LAST)
            if port not in self._taken and self._lock(port) and is_free(port):
                self._taken.add(port)
                return port
        raise SandboxError(f"no free port between {_FIRST} and {_LAST} on {HOST}; end some programs")

    def _lock(self, port: int) -> bool:
        assert self._file is not None  # noqa: S101 - used as a context manager
        # struct flock (fcntl(2)): type, whence, start, length, pid (0 for this kind of lock).
        request = struct.pack("hhqqi", fcntl.F_WRLCK, os.SEEK_SET, port, 1, 0)
        try:
            fcntl.fcntl(self._file, fcntl.F_OFD_SETLK, request)
        except (BlockingIOError, PermissionError):
            return False
        return True


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
