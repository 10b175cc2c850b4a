"""The API's HTTP server, in the node's own loop."""

import asyncio
import contextlib
import logging
import socket
import ssl
from collections.abc import Generator
from typing import Any

import uvicorn

from kmirror_dagster.errors import PortInUseError
from kmirror_dagster.settings import NodeSettings

logger = logging.getLogger(__name__)

_KEEP_ALIVE_S = 15
# requests beyond this are answered 503 at once, so that a flood costs little
_CONCURRENCY = 256
_GRACE_S = 2


def bind(settings: NodeSettings) -> socket.socket:
    """Bind the API's address before anything else is done.

    Raises:
        PortInUseError: when it is taken or cannot be bound; the message names it.
    """
    host, port = settings.api_host, settings.api_port
    if settings.api_tls_certificate is None and settings.api_insecure:
        logger.warning("the API listens on %s without TLS: its token can be read on the way", host)
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
        listener.listen(128)
    except OSError as error:
        listener.close()
        raise PortInUseError(
            f"cannot listen on {host}:{port}: {error.strerror or error}; "
            "choose another api_port (0 takes a free one) or end what uses it"
        ) from None
    return listener


class _Server(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        """Leave signals to the node: it drains before the API goes."""
        yield


class ApiServer:
    """Serves an ASGI app on a bound socket.

    Args:
        app: the guarded API.
        listener: from `bind`.
        settings: TLS files, and the host by which others reach the API.
    """

    def __init__(self, app: Any, listener: socket.socket, *, settings: NodeSettings) -> None:
        password = settings.api_tls_key_password
        self._server = _Server(
            uvicorn.Config(
                app,
                log_config=None,
                access_log=False,
                lifespan="off",
                server_header=False,
                timeout_keep_alive=_KEEP_ALIVE_S,
                timeout_graceful_shutdown=_GRACE_S,
                limit_concurrency=_CONCURRENCY,
                ssl_certfile=settings.api_tls_certificate,
                ssl_keyfile=settings.api_tls_key,
                ssl_keyfile_password=password.get_secret_value() if password else None,
                ssl_ca_certs=settings.api_tls_client_ca,
                ssl_cert_reqs=ssl.CERT_REQUIRED if settings.api_tls_client_ca else ssl.CERT_NONE,
            )
        )
        self._listener = listener
        self._task: asyncio.Task[None] | None = None
        scheme = "https" if settings.api_tls_certificate else "http"
        host = settings.api_advertised_host or _reachable(settings.api_host)
        shown = f"[{host}]" if ":" in host else host
        self.endpoint = f"{scheme}://{shown}:{listener.getsockname()[1]}"

    def start(self) -> None:
        """Begin to serve."""
        self._task = asyncio.create_task(self._server.serve(sockets=[self._listener]), name="api")

    async def close(self) -> None:
        """Finish what is being answered, within moments, and end."""
        self._server.should_exit = True
        if self._task is not None:
            await asyncio.gather(self._task, return_exceptions=True)
        self._listener.close()


def _reachable(host: str) -> str:
    """Host that others can use: a wildcard address says nothing to them."""
    return socket.gethostname() if host in ("0.0.0.0", "::", "") else host  # noqa: S104 - compared, not bound
