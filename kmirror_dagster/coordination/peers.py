"""Calls from node to node: the same API, the same token, short deadlines."""

import asyncio
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import httpx
from pydantic import SecretStr, TypeAdapter, ValidationError

from kmirror_dagster.coordination.state_directory import TOKEN_VARIABLE
from kmirror_dagster.coordination.tls import ClientIdentity, verifying_context
from kmirror_dagster.errors import ApiAuthenticationError, NodeUnavailableError

FORWARDED_HEADER = "X-Kmirror-Forwarded"
# how far the answering node's own coordinator partitions were written: "3=17,8=2"
ENDS_HEADER = "X-Kmirror-Ends"
FAN_OUT_DEADLINE_S = 2.0
_UNAUTHORIZED = 401
# longer than any verb waits by itself: an advance asked to wait, a refresh, a creation that asks both
# clusters
FORWARD_DEADLINE_S = 150.0
_CONNECT_S = 1.0
# a peer that does not answer is not asked again for this long, so that listings stay quick while it is down
_DEAD_FOR_S = 2.0

_T = TypeVar("_T")


@dataclass(frozen=True)
class Forwarded:
    """A peer's answer as it came.

    Attributes:
        ends: next offset of each coordinator partition the peer leads, as of its answer.
    """

    status: int
    content: bytes
    content_type: str
    ends: dict[int, int]


class Peers:
    """Client of all other nodes, in the node's loop.

    Args:
        token: API token, shared by the nodes of a group.
        ca: PEM file that verifies `https` endpoints; None for the system's authorities.
        identity: what this node shows to others that ask for a certificate.
        transport: what carries the calls; the network when not given.
    """

    def __init__(
        self,
        token: SecretStr,
        *,
        ca: Path | None = None,
        identity: ClientIdentity | None = None,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        self._http = httpx.AsyncClient(
            verify=verifying_context(ca, identity),
            transport=transport,
            trust_env=False,
            headers={"Authorization": f"Bearer {token.get_secret_value()}", FORWARDED_HEADER: "1"},
            limits=httpx.Limits(max_connections=100, max_keepalive_connections=20),
        )
        self._dead_until: dict[str, float] = {}

    async def forward(
        self, endpoint: str, method: str, path: str, *, query: str, content: bytes
    ) -> Forwarded:
        """Hand a request on to the node that leads what it is about.

        Raises:
            NodeUnavailableError: when that node does not answer.
            ApiAuthenticationError: when it does not know this node's token.
        """
        url = f"{endpoint}{path}" + (f"?{query}" if query else "")
        headers = {"Content-Type": "application/json"} if content else None
        timeout = httpx.Timeout(FORWARD_DEADLINE_S, connect=_CONNECT_S)
        try:
            answer = await self._http.request(method, url, content=content, headers=headers, timeout=timeout)
        except httpx.TransportError as error:
            raise self._unavailable(endpoint, error) from error
        if answer.status_code == _UNAUTHORIZED:
            # the caller's own token was right, so the plain answer would mislead
            raise ApiAuthenticationError(
                f"the node at {endpoint} refuses this node's API token: "
                f"start all nodes of a group with the same {TOKEN_VARIABLE}"
            )
        kind = answer.headers.get("content-type", "application/json")
        ends = decode_ends(answer.headers.get(ENDS_HEADER, ""))
        return Forwarded(answer.status_code, answer.content, kind, ends)

    async def gather(
        self,
        endpoints: Iterable[str],
        method: str,
        path: str,
        bodies: Mapping[str, bytes],
        model: TypeAdapter[_T],
    ) -> dict[str, _T]:
        """Ask several nodes the same thing at once; those that do not answer in time are left out.

        Args:
            endpoints: whom to ask.
            method: HTTP method.
            path: path and query.
            bodies: endpoint -> body; none for a node that is missing.
            model: what the answers are.
        """
        asked = [endpoint for endpoint in endpoints if not self._is_dead(endpoint)]
        answers = await asyncio.gather(
            *(self._ask(endpoint, method, path, bodies.get(endpoint, b""), model) for endpoint in asked)
        )
        return {
            endpoint: answer for endpoint, answer in zip(asked, answers, strict=True) if answer is not None
        }

    async def close(self) -> None:
        """Close all connections."""
        await self._http.aclose()

    async def _ask(
        self, endpoint: str, method: str, path: str, body: bytes, model: TypeAdapter[_T]
    ) -> _T | None:
        headers = {"Content-Type": "application/json"} if body else None
        try:
            answer = await asyncio.wait_for(
                self._http.request(
                    method, endpoint + path, content=body, headers=headers, timeout=FAN_OUT_DEADLINE_S
                ),
                FAN_OUT_DEADLINE_S,
            )
        except (httpx.TransportError, asyncio.TimeoutError) as error:
            self._unavailable(endpoint, error)
            return None
        if not answer.is_success:
            return None
        try:
            return model.validate_json(answer.content)
        except ValidationError:
            return None  # a node of another version: its part is shown from the stored state

    def _is_dead(self, endpoint: str) -> bool:
        return self._dead_until.get(endpoint, 0.0) > time.monotonic()

    def _unavailable(self, endpoint: str, error: Exception) -> NodeUnavailableError:
        self._dead_until[endpoint] = time.monotonic() + _DEAD_FOR_S
        return NodeUnavailableError(f"the node at {endpoint} does not answer: {type(error).__name__}")


def encode_ends(ends: Mapping[int, int]) -> str:
    """Value of `ENDS_HEADER`."""
    return ",".join(f"{partition}={position}" for partition, position in sorted(ends.items()))


def decode_ends(text: str) -> dict[int, int]:
    """Read a value of `ENDS_HEADER`; what is malformed is nothing to wait for."""
    pairs = (part.partition("=") for part in text.split(",") if part)
    return {int(key): int(value) for key, _, value in pairs if key.isdigit() and value.isdigit()}
