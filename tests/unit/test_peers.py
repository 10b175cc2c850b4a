"""Calls from node to node."""

import asyncio

import httpx
import pytest
from pydantic import SecretStr

from kmirror_dagster.coordination.peers import Peers
from kmirror_dagster.errors import ApiAuthenticationError


def test_a_refused_token_names_the_remedy() -> None:
    """A peer that does not know this node's token is a matter of the nodes, not of the caller's own token."""

    def refuse(request: httpx.Request) -> httpx.Response:
        return httpx.Response(401, json={"code": "ApiAuthenticationError", "message": "token is wrong"})

    async def ask() -> None:
        peers = Peers(SecretStr("a"), transport=httpx.MockTransport(refuse))
        try:
            await peers.forward("http://peer.example", "POST", "/v1/mirrors", query="", content=b"{}")
        finally:
            await peers.close()

    with pytest.raises(ApiAuthenticationError, match=r"http://peer\.example .* same KMIRROR_TOKEN"):
        asyncio.run(ask())
