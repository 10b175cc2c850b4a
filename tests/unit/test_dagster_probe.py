"""Dagster's own look at a cluster."""

import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import trustme

from kmirror_dagster.broker.probe import look


@contextmanager
def server(handle: Callable[[socket.socket], None]) -> Iterator[tuple[str, int]]:
    """A listener that hands its first connection over."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            connection, _ = listener.accept()
            with connection:
                handle(connection)

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield "127.0.0.1", listener.getsockname()[1]
        thread.join(5)


def answer(connection: socket.socket) -> None:
    connection.recv(64)
    connection.sendall(b"\x00\x00\x00\x04\x00\x00\x00\x01")


def test_an_answer_is_enough() -> None:
    """A broker that answers is there, even when the other bootstrap servers are not."""
    with socket.create_server(("127.0.0.1", 0)) as closed:
        dead = closed.getsockname()
    with server(answer) as address:
        assert look([dead, address], tls=False, budget_s=3).ok


def test_refused() -> None:
    """A port where nobody listens is down, at once."""
    with socket.create_server(("127.0.0.1", 0)) as closed:
        dead = closed.getsockname()
    seen = look([dead], tls=False, budget_s=3)
    assert (seen.ok, seen.error) == (False, f"127.0.0.1:{dead[1]}: Connection refused")


@pytest.mark.case("C36")
def test_silence_is_bounded() -> None:
    """A port that accepts and never answers is down, when the budget is spent."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        begun = time.monotonic()
        seen = look([silent.getsockname()], tls=False, budget_s=0.3)
        assert time.monotonic() - begun < 1
    assert not seen.ok


def test_connection_closed_without_an_answer() -> None:
    """A balancer that accepts and closes, for want of a broker, is no broker."""
    with server(lambda connection: None) as address:
        seen = look([address], tls=False, budget_s=3)
    assert not seen.ok


def test_tls_broker_with_any_certificate() -> None:
    """A TLS listener counts as there whatever its certificate: being down is another thing."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    trustme.CA().issue_cert("elsewhere.example").configure_cert(context)

    def handle(connection: socket.socket) -> None:
        with context.wrap_socket(connection, server_side=True) as secure:
            answer(secure)

    with server(handle) as address:
        assert look([address], tls=True, budget_s=3).ok


def test_no_address() -> None:
    """No bootstrap server known is no answer."""
    assert not look([], tls=False, budget_s=1).ok
