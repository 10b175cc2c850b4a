"""What every request passes before it reaches the API: token and body size. Plain ASGI, for speed."""

import hmac
import logging
import time
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any, TypeAlias

from pydantic import SecretStr

from kmirror_dagster.coordination.models import ErrorBody
from kmirror_dagster.coordination.peers import FORWARDED_HEADER
from kmirror_dagster.errors import ApiAuthenticationError, UsageError

Scope: TypeAlias = MutableMapping[str, Any]
Message: TypeAlias = MutableMapping[str, Any]
Receive: TypeAlias = Callable[[], Awaitable[Message]]
Send: TypeAlias = Callable[[Message], Awaitable[None]]
App: TypeAlias = Callable[[Scope, Receive, Send], Awaitable[None]]

logger = logging.getLogger(__name__)

OPEN_PATHS = frozenset({"/health/live", "/health/ready"})
MAX_BODY_BYTES = 1024 * 1024
_REFUSALS_NOTED_EVERY_S = 10.0
_FORWARDED = FORWARDED_HEADER.lower().encode()


class _TooLargeError(Exception):
    """Error when a body turns out too large while it is read."""


class _CountedBody:
    """Passes a request's body on until it is too long; requests are answered once their body is read."""

    def __init__(self, receive: Receive, limit: int) -> None:
        self._receive = receive
        self._left = limit
        self.too_long = False

    async def receive(self) -> Message:
        message = await self._receive()
        self._left -= len(message.get("body", b""))
        if self._left < 0:
            self.too_long = True
            raise _TooLargeError
        return message


class HttpGuard:
    """Wraps an ASGI app.

    Args:
        app: what is guarded.
        token: compared in constant time with the bearer token of every request but those to `OPEN_PATHS`.
        forwarded_headers: further headers of answers to requests that another node has handed on.
        max_body_bytes: longest body that is read, announced or not.
    """

    def __init__(
        self,
        app: App,
        token: SecretStr,
        *,
        forwarded_headers: Callable[[], list[tuple[bytes, bytes]]] = list,
        max_body_bytes: int = MAX_BODY_BYTES,
    ) -> None:
        self._app = app
        self._token = token.get_secret_value().encode()
        self._forwarded_headers = forwarded_headers
        self._refused = 0
        self._noted = -_REFUSALS_NOTED_EVERY_S
        self._max_body_bytes = max_body_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one connection event, as ASGI defines it."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers: dict[bytes, bytes] = dict(scope["headers"])
        if scope["path"] not in OPEN_PATHS and not self._is_authorized(headers):
            self._note_refusal(scope)
            await refuse(
                send, 401, ApiAuthenticationError, "API token is missing or wrong: set KMIRROR_TOKEN"
            )
            return
        announced = headers.get(b"content-length", b"0")
        if announced.isdigit() and int(announced) > self._max_body_bytes:
            await self._refuse_size(send)
            return
        body = _CountedBody(receive, self._max_body_bytes)

        async def checked_send(message: Message) -> None:
            if body.too_long:
                return  # what the app makes of a body cut short is not for the caller
            if message["type"] == "http.response.start" and _FORWARDED in headers:
                message["headers"] = [*message.get("headers", ()), *self._forwarded_headers()]
            await send(message)

        try:
            await self._app(scope, body.receive, checked_send)
        except _TooLargeError:
            logger.debug("body of %s cut short", scope["path"])
        if body.too_long:
            await self._refuse_size(send)

    def _note_refusal(self, scope: Scope) -> None:
        """One line now and then: a flood of requests must not become a flood of lines."""
        self._refused += 1
        now = time.monotonic()
        if now - self._noted < _REFUSALS_NOTED_EVERY_S:
            return
        client = (scope.get("client") or ("unknown", 0))[0]
        logger.warning(
            "%d request(s) refused for a wrong or missing token, the last by %s: %s %s",
            self._refused,
            client,
            scope["method"],
            scope["path"],
        )
        self._noted, self._refused = now, 0

    def _is_authorized(self, headers: dict[bytes, bytes]) -> bool:
        scheme, _, given = headers.get(b"authorization", b"").partition(b" ")
        # both sides are always compared, so that the time taken tells nothing
        return hmac.compare_digest(given.strip(), self._token) and scheme.lower() == b"bearer"

    async def _refuse_size(self, send: Send) -> None:
        text = f"body is longer than {self._max_body_bytes} bytes: send less at a time"
        await refuse(send, 413, UsageError, text)


async def refuse(send: Send, status: int, kind: type[Exception], message: str) -> None:
    """Answer with an error, without the app."""
    body = ErrorBody(code=kind.__name__, message=message).model_dump_json().encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    if status == 401:
        headers.append((b"www-authenticate", b"Bearer"))
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
