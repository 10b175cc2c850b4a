"""A TCP proxy that delays both directions and limits nothing else: a long line, in a process of its own.

``python -m bench.proxy LISTEN_PORT TARGET_PORT DELAY_MS``. Each piece of data is passed on when it has been here for
the delay; as many pieces as come are under way at a time, so the line has a delay but no bandwidth.
"""

import contextlib
import socket
import sys
import threading
import time
from collections import deque
from collections.abc import Callable

HOST = "127.0.0.1"
_PIECE_BYTES = 1 << 20
# What a direction holds when its receiver does not read; far above bandwidth times delay, so nothing is slowed down.
_HELD_BYTES = 256 << 20


class Direction:
    """Carries data from one socket to another, late.

    Args:
        origin: socket to read.
        target: socket to write.
        delay_s: how long each piece is under way.
        ended: called by each of its two threads at its end.
    """

    def __init__(
        self, origin: socket.socket, target: socket.socket, delay_s: float, ended: Callable[[], None]
    ) -> None:
        self._origin = origin
        self._target = target
        self._delay_s = delay_s
        self._ended = ended
        self._changed = threading.Condition()
        self._pieces: deque[tuple[float, bytes]] = deque()
        self._held = 0
        self._broken = False

    def start(self) -> None:
        """Carry until one side ends."""
        for work in (self._read, self._write):
            threading.Thread(target=self._run, args=(work,), daemon=True).start()

    def _run(self, work: Callable[[], None]) -> None:
        try:
            work()
        finally:
            self._ended()

    def _read(self) -> None:
        while True:
            try:
                piece = self._origin.recv(_PIECE_BYTES)
            except OSError:
                piece = b""  # a reset reaches the other side as an end
            due = time.monotonic() + self._delay_s
            with self._changed:
                while self._held > _HELD_BYTES and not self._broken:
                    self._changed.wait()
                self._pieces.append((due, piece))
                self._held += len(piece)
                self._changed.notify_all()
                if not piece or self._broken:
                    return

    def _write(self) -> None:
        while True:
            with self._changed:
                while not self._pieces:
                    self._changed.wait()
                due, piece = self._pieces.popleft()
                self._held -= len(piece)
                self._changed.notify_all()
            wait_s = due - time.monotonic()
            if wait_s > 0:
                time.sleep(wait_s)
            try:
                if not piece:
                    self._target.shutdown(socket.SHUT_WR)
                    return
                self._target.sendall(piece)
            except OSError:
                self._break()
                return

    def _break(self) -> None:
        """The receiver is gone: let the sender know, and stop holding for it."""
        with self._changed:
            self._broken = True
            self._changed.notify_all()
        with contextlib.suppress(OSError):
            self._origin.shutdown(socket.SHUT_RDWR)


class Line:
    """Both directions between two sockets, which are closed when nothing is under way any more."""

    def __init__(self, client: socket.socket, server: socket.socket, delay_s: float) -> None:
        self._sockets = (client, server)
        self._lock = threading.Lock()
        self._threads = 4
        for each in self._sockets:
            each.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._directions = (
            Direction(client, server, delay_s, self._ended),
            Direction(server, client, delay_s, self._ended),
        )

    def start(self) -> None:
        """Carry until both sides have ended."""
        for direction in self._directions:
            direction.start()

    def _ended(self) -> None:
        with self._lock:
            self._threads -= 1
            last = self._threads == 0
        if last:
            for each in self._sockets:
                each.close()


def serve(listener: socket.socket, target_port: int, delay_s: float) -> None:
    """Accept connections for good."""
    while True:
        client, _ = listener.accept()
        try:
            server = socket.create_connection((HOST, target_port), timeout=10)
        except OSError:
            client.close()
            continue
        server.settimeout(None)
        Line(client, server, delay_s).start()


def main() -> int:
    """Entry point."""
    listen_port, target_port = int(sys.argv[1]), int(sys.argv[2])
    with socket.create_server((HOST, listen_port), backlog=128) as listener:
        serve(listener, target_port, float(sys.argv[3]) / 1000)
    return 0


if __name__ == "__main__":
    sys.exit(main())
