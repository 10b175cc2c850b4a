"""Connections whose brokers want to see the credentials again (KIP-368), against a broker of a few lines."""

import asyncio
import struct
from collections.abc import Awaitable, Callable

import pytest
from kafka.protocol.metadata.api_versions import ApiVersionsRequest

from kmirror_dagster.broker.connection import Connection
from kmirror_dagster.errors import DeadlineError
from kmirror_dagster.settings import ClusterSettings

_API_VERSIONS, _SASL_HANDSHAKE, _SASL_AUTHENTICATE = 18, 17, 36
_PLAIN = b"PLAIN"


class Broker:
    """Lets everybody in by SASL PLAIN for a while; answers nothing while it holds.

    Attributes:
        life_ms: of a session, as told at the log-in; 0: for ever.
        logins: how many there were.
        connections: how many are open.
    """

    def __init__(self, life_ms: int) -> None:
        self.life_ms = life_ms
        self.logins = 0
        self.connections = 0
        self.going = asyncio.Event()
        self.going.set()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answer requests of one connection, one after the other."""
        self.connections += 1
        try:
            while True:
                (size,) = struct.unpack(">i", await reader.readexactly(4))
                api, version, correlation = struct.unpack_from(">hhi", await reader.readexactly(size))
                await self.going.wait()
                body = struct.pack(">i", correlation) + self._answer(api, version)
                writer.write(struct.pack(">i", len(body)) + body)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass  # the client has closed
        finally:
            writer.close()
            self.connections -= 1

    def _answer(self, api: int, version: int) -> bytes:
        if api == _SASL_HANDSHAKE:
            return struct.pack(">hih", 0, 1, len(_PLAIN)) + _PLAIN
        if api == _SASL_AUTHENTICATE:
            self.logins += 1
            return struct.pack(">hhiq", 0, -1, 0, self.life_ms)
        assert api == _API_VERSIONS
        known = ((_API_VERSIONS, 0, 3), (_SASL_HANDSHAKE, 0, 1), (_SASL_AUTHENTICATE, 0, 2))
        if version == 0:
            return struct.pack(">hi", 0, len(known)) + b"".join(struct.pack(">hhh", *each) for each in known)
        entries = b"".join(struct.pack(">hhhb", *each, 0) for each in known)
        return struct.pack(">hb", 0, len(known) + 1) + entries + struct.pack(">ib", 0, 0)


def with_broker(life_ms: int, work: Callable[[Broker, Connection], Awaitable[None]]) -> None:
    """Run something with an open connection."""

    async def main() -> None:
        broker = Broker(life_ms)
        server = await asyncio.start_server(broker.serve, "127.0.0.1", 0)
        host, port = server.sockets[0].getsockname()
        document = {
            "bootstrap.servers": f"{host}:{port}",
            "security.protocol": "SASL_PLAINTEXT",
            "sasl.mechanism": "PLAIN",
            "sasl.username": "alice",
            "sasl.password": "secret",
        }
        connection = await Connection(ClusterSettings.model_validate(document), host, port).open(10)
        try:
            await work(broker, connection)
        finally:
            connection.close()
            await until(lambda: not broker.connections)
            server.close()
            await server.wait_closed()

    asyncio.run(main())


async def until(condition: Callable[[], bool], deadline_s: float = 20.0) -> None:
    loop = asyncio.get_running_loop()
    end = loop.time() + deadline_s
    while not condition():
        assert loop.time() < end
        await asyncio.sleep(0.01)


def test_a_session_that_ends_takes_no_new_requests() -> None:
    """Shortly before its end the connection counts as gone, so that the next request opens another one."""

    async def work(broker: Broker, connection: Connection) -> None:
        assert connection.alive
        assert broker.logins == 1
        await until(lambda: not connection.alive)
        # not closed: what was sent before is still answered
        await connection.call(ApiVersionsRequest(), version=0)

    with_broker(1_000, work)


@pytest.mark.parametrize("life_ms", [0, 3_600_000])
def test_a_long_session_lives_on(life_ms: int) -> None:
    """Brokers that set no limit, or a late one, keep their connections."""

    async def work(broker: Broker, connection: Connection) -> None:
        await asyncio.sleep(0)
        await connection.call(ApiVersionsRequest(), version=0)
        assert connection.alive

    with_broker(life_ms, work)


@pytest.mark.parametrize("cancelled", [False, True])
def test_nothing_is_asked_behind_a_request_that_was_given_up(cancelled: bool) -> None:
    """A broker that does not answer one request answers none behind it; once it has, the connection is good again."""

    async def work(broker: Broker, connection: Connection) -> None:
        broker.going.clear()
        call = asyncio.create_task(
            connection.call(ApiVersionsRequest(), version=0, deadline_s=60 if cancelled else 0.05)
        )
        await until(lambda: connection.in_flight == 1)
        assert connection.alive
        if cancelled:
            call.cancel()
        with pytest.raises(asyncio.CancelledError if cancelled else DeadlineError):
            await call
        assert not connection.alive
        broker.going.set()
        await until(lambda: connection.in_flight == 0)
        assert connection.alive

    with_broker(0, work)


def test_a_retired_connection_waits_for_its_answers() -> None:
    """It closes when everything that was sent is answered; at once when nothing is out."""

    async def work(broker: Broker, connection: Connection) -> None:
        broker.going.clear()
        calls = [asyncio.create_task(connection.call(ApiVersionsRequest(), version=0)) for _ in range(3)]
        await until(lambda: connection.in_flight == 3)
        connection.retire()
        assert connection.alive
        broker.going.set()
        for call in calls:
            assert (await call).error_code == 0
        await until(lambda: not connection.alive)
        connection.retire()

    with_broker(0, work)
