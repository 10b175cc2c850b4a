"""One bounded look at a cluster from any process: does a broker answer? Needs no credentials."""

import contextlib
import queue
import socket
import ssl
import struct
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass

# ApiVersions v0 (protocol guide, key 18): every broker answers it, before authentication
_API_VERSIONS = struct.pack(">hhih", 18, 0, 1, 7) + b"kmirror"
_REQUEST = struct.pack(">i", len(_API_VERSIONS)) + _API_VERSIONS
_MAX_ADDRESSES = 8


@dataclass(frozen=True)
class Look:
    """What one look saw; `error` is one line, None when a broker answered."""

    ok: bool
    error: str | None = None


def look(bootstrap: Sequence[tuple[str, int]], *, tls: bool, budget_s: float) -> Look:
    """Ask all bootstrap servers at once; one that answers is enough.

    A connection alone proves nothing: the kernel, or a balancer, accepts it for a broker that hangs.

    Args:
        tls: whether the listener speaks TLS. Certificates are not verified: nothing is sent that needs
            keeping, and a broker with a bad certificate is not one that is down.
        budget_s: longest time for the whole look, name resolution included.
    """
    addresses = list(bootstrap)[:_MAX_ADDRESSES]
    if not addresses:
        return Look(False, "no bootstrap server is known")
    end = time.monotonic() + budget_s
    answers: queue.SimpleQueue[Look] = queue.SimpleQueue()
    for host, port in addresses:
        # daemon threads: resolving a name cannot be interrupted and must not keep the process
        threading.Thread(target=_report, args=(answers, host, port, tls, end), daemon=True).start()
    last = Look(False, f"no answer within {budget_s:.1f} s")
    for _ in addresses:
        with contextlib.suppress(queue.Empty):
            last = answers.get(timeout=max(0.0, end - time.monotonic()))
            if last.ok:
                return last
    return last


def _report(answers: "queue.SimpleQueue[Look]", host: str, port: int, tls: bool, end: float) -> None:
    answers.put(_ask(host, port, tls, end))


def _ask(host: str, port: int, tls: bool, end: float) -> Look:
    where = f"{host}:{port}"
    try:
        with socket.create_connection((host, port), timeout=max(0.05, end - time.monotonic())) as plain:
            with _wrapped(plain, host, tls) as connection:
                connection.settimeout(max(0.05, end - time.monotonic()))
                connection.sendall(_REQUEST)
                if connection.recv(4):
                    return Look(True)
            return Look(False, f"{where} closed the connection")
    except TimeoutError:
        return Look(False, f"{where} does not answer")
    except ssl.SSLEOFError:
        return Look(False, f"{where} closed the connection")
    except ssl.SSLError:
        return Look(True)  # an alert is an answer, for instance from a broker that wants a client certificate
    except OSError as error:
        return Look(False, f"{where}: {error.strerror or error}")


def _wrapped(plain: socket.socket, host: str, tls: bool) -> socket.socket:
    if not tls:
        return plain
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return context.wrap_socket(plain, server_hostname=host)
