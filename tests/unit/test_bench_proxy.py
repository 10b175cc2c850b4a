"""The benchmark's long line: late, in order, complete, and not narrow."""

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from bench.proxy import HOST, serve
from tests.helpers.waiting import wait_until

DELAY_S = 0.05


@pytest.fixture
def ends() -> Iterator[tuple[socket.socket, socket.socket]]:
    """Both ends of a connection through the proxy; at the end the proxy has let go of it."""
    before = threading.active_count()
    with ExitStack() as stack:
        target = stack.enter_context(socket.create_server((HOST, 0)))
        listener = stack.enter_context(socket.create_server((HOST, 0)))
        arguments = (listener, target.getsockname()[1], DELAY_S)
        threading.Thread(target=serve_until_closed, args=arguments, daemon=True).start()
        client = stack.enter_context(socket.create_connection(listener.getsockname(), timeout=20))
        server, _ = target.accept()
        stack.enter_context(server)
        server.settimeout(20)
        yield client, server
        listener.shutdown(socket.SHUT_RDWR)
    wait_until(lambda: threading.active_count() == before, 20, what="the proxy's threads ended")


def serve_until_closed(listener: socket.socket, port: int, delay_s: float) -> None:
    """The end of a test closes the listener, which ends the loop."""
    try:
        serve(listener, port, delay_s)
    except OSError:
        return


def received(end: socket.socket, size: int) -> bytes:
    """So many bytes."""
    found = bytearray()
    while len(found) < size:
        piece = end.recv(1 << 20)
        assert piece, f"ended after {len(found)} bytes"
        found += piece
    return bytes(found)


def test_both_directions_take_the_delay(ends: tuple[socket.socket, socket.socket]) -> None:
    """A question and its answer are under way for twice the delay."""
    client, server = ends
    began = time.monotonic()
    client.sendall(b"question")
    assert received(server, 8) == b"question"
    asked_s = time.monotonic() - began
    server.sendall(b"answer")
    assert received(client, 6) == b"answer"
    assert asked_s >= DELAY_S
    assert time.monotonic() - began >= 2 * DELAY_S


def test_much_is_under_way_at_a_time(ends: tuple[socket.socket, socket.socket]) -> None:
    """The delay is paid once, not once a piece: 64 MB arrive whole and in order in far less than 64 delays."""
    client, server = ends
    pieces = [bytes([number]) * (1 << 20) for number in range(64)]
    sender = threading.Thread(target=lambda: [client.sendall(piece) for piece in pieces], daemon=True)
    began = time.monotonic()
    sender.start()
    assert received(server, 64 << 20) == b"".join(pieces)
    assert time.monotonic() - began < 64 * DELAY_S
    sender.join(10)


def test_end_of_one_direction_leaves_the_other(ends: tuple[socket.socket, socket.socket]) -> None:
    """A side that has said everything still gets its answer."""
    client, server = ends
    client.sendall(b"last words")
    client.shutdown(socket.SHUT_WR)
    assert received(server, 10) == b"last words"
    assert server.recv(1) == b""
    server.sendall(b"heard")
    assert received(client, 5) == b"heard"


def test_lost_receiver_ends_the_sender(ends: tuple[socket.socket, socket.socket]) -> None:
    """Nobody writes for ever to a side that is gone."""
    client, server = ends
    server.close()
    with pytest.raises(OSError, match=r"(?i)broken pipe|reset"):
        for _ in range(1_000):
            client.sendall(bytes(1 << 20))
