"""A TCP proxy in front of one broker that reads Kafka's frames, so that faults hit a chosen request or answer.

The broker advertises the proxy's port on a listener of its own (`ListenerPlan.advertised_port`), so clients that
begin here never leave.
"""

import asyncio
import contextlib
import socket
import struct
import threading
import time
from collections import Counter, deque
from collections.abc import Coroutine
from dataclasses import dataclass, field
from enum import Enum, IntEnum
from types import TracebackType
from typing import Any

from kmirror_dagster.sandbox.cluster import SandboxCluster
from kmirror_dagster.sandbox.properties import CLIENT, HOST, INTERNAL, ListenerPlan

_PROXIED = "PROXIED"
_READ_BYTES = 1 << 20


class Api(IntEnum):
    """Keys of the requests that faults are aimed at (Kafka protocol guide, "Api Keys")."""

    PRODUCE = 0
    FETCH = 1
    LIST_OFFSETS = 2
    METADATA = 3
    FIND_COORDINATOR = 10
    API_VERSIONS = 18
    DELETE_RECORDS = 21
    INIT_PRODUCER_ID = 22
    OFFSET_FOR_LEADER_EPOCH = 23
    ADD_PARTITIONS_TO_TXN = 24
    END_TXN = 26
    WRITE_TXN_MARKERS = 27
    DESCRIBE_PRODUCERS = 61
    DESCRIBE_TRANSACTIONS = 65


class When(str, Enum):
    """Which side of the broker's work on a request a fault is on."""

    BEFORE = "before"
    AFTER = "after"


class Action(str, Enum):
    """What a fault does.

    CLOSE: end the connection; before: the broker never sees the request, after: it did, its answer is dropped.
    HALF: forward half of the request, then end the connection.
    BEHIND_BACK: end the client's connection at once, while the broker still gets and does the request.
    HOLD: keep the request or the answer, and all behind it, until `Fault.release`; a held request is delivered
        then even when its sender is long gone.
    DROP: keep the request until `Fault.release`, then end the connection: the broker never sees it.
    CRASH: end all connections of that client, and let it never connect again.
    DELAY: wait `seconds` first.
    """

    CLOSE = "close"
    HALF = "half"
    BEHIND_BACK = "behind-back"
    HOLD = "hold"
    DROP = "drop"
    CRASH = "crash"
    DELAY = "delay"


@dataclass(eq=False)
class Fault:
    """One fault at the `nth` request of a kind, counted from 1 since the fault was armed.

    Attributes:
        api: which kind of request; None: any.
        client: client id of the requests counted; None: anybody's.
        seconds: how long a request is delayed.
        times: how many requests in a row it hits.
        hit: set once it happened (for HOLD: once something is held).
    """

    action: Action
    api: Api | None = None
    nth: int = 1
    when: When = When.BEFORE
    client: str | None = None
    seconds: float = 0.0
    times: int = 1
    hit: threading.Event = field(default_factory=threading.Event)
    seen: int = 0
    released: threading.Event = field(default_factory=threading.Event)

    def takes(self, api: int, client: str) -> bool:
        """Count a request; whether the fault is meant for it."""
        if self.api is not None and self.api != api:
            return False
        if self.client is not None and self.client != client:
            return False
        self.seen += 1
        return self.nth <= self.seen < self.nth + self.times

    def release(self) -> None:
        """Let go what is held."""
        self.released.set()

    def wait_hit(self, deadline_s: float = 30.0) -> None:
        """Wait until it happened."""
        assert self.hit.wait(deadline_s), f"never came to {self}"


@dataclass
class _Asked:
    api: int
    fault: Fault | None


class _Session:
    """One client connection and its connection to the broker."""

    def __init__(
        self, proxy: "FaultProxy", reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        self._proxy = proxy
        self._client = (reader, writer)
        self._broker_writer: asyncio.StreamWriter | None = None
        self._asked: deque[_Asked] = deque()
        self._broker_done = asyncio.Event()
        self._client_gone = False
        self._holding = False
        self.client_id = ""

    async def run(self) -> None:
        reader, writer = self._client
        try:
            broker_reader, self._broker_writer = await asyncio.open_connection(
                HOST, self._proxy.target, limit=_READ_BYTES
            )
        except OSError:
            writer.close()
            return
        answers = asyncio.create_task(self._answers(broker_reader))
        try:
            await self._requests(reader)
            # what was forwarded is still worked on; a client that went away does not change that
            if self._asked and not self._broker_done.is_set():
                with contextlib.suppress(asyncio.TimeoutError):
                    await asyncio.wait_for(self._broker_done.wait(), 1.0)
        finally:
            answers.cancel()
            self.close()
            await asyncio.gather(answers, return_exceptions=True)

    def close(self) -> None:
        """End both connections; a held request is delivered all the same once it is let go."""
        self._client_gone = True
        self._client[1].close()
        if self._broker_writer is not None and not self._holding:
            self._broker_writer.close()

    # client to broker

    async def _requests(self, reader: asyncio.StreamReader) -> None:
        while (frame := await _frame(reader)) is not None:
            api, client_id = _header(frame)
            self.client_id = client_id
            if self._proxy.is_dead(client_id):
                return
            fault = self._proxy.count(api, client_id)
            if fault is not None and fault.when is When.BEFORE and not await self._before(fault, frame):
                return
            if self._proxy.latency_s:
                await asyncio.sleep(self._proxy.latency_s)
            await self._proxy.flowing()
            after = fault if fault is not None and fault.when is When.AFTER else None
            self._asked.append(_Asked(api, after))
            self._broker_done.clear()
            if not await self._forward(frame):
                return

    async def _before(self, fault: Fault, frame: bytes) -> bool:
        """Whether the connection lives on."""
        fault.hit.set()
        if fault.action is Action.DELAY:
            await asyncio.sleep(fault.seconds)
        elif fault.action is Action.DROP:
            await _until(fault.released)
            return False
        elif fault.action is Action.HOLD:
            self._holding = True
            await _until(fault.released)
            self._holding = False
        elif fault.action is Action.CRASH:
            self._proxy.kill(self.client_id)
            return False
        elif fault.action is Action.HALF:
            await self._forward(frame[: len(frame) // 2])
            return False
        elif fault.action is Action.BEHIND_BACK:
            self._client_gone = True
            self._client[1].close()
            self._asked.append(_Asked(-1, None))
            self._broker_done.clear()
            await self._forward(frame)
            return False
        else:
            return False
        return True

    async def _forward(self, frame: bytes) -> bool:
        writer = self._broker_writer
        assert writer is not None
        try:
            writer.write(frame)
            await writer.drain()
        except OSError:
            return False
        return True

    # broker to client

    async def _answers(self, reader: asyncio.StreamReader) -> None:
        try:
            while (frame := await _frame(reader)) is not None:
                asked = self._asked.popleft()
                if asked.fault is not None and not await self._after(asked.fault):
                    self._client_gone = True
                    self._client[1].close()
                if self._proxy.latency_s:
                    await asyncio.sleep(self._proxy.latency_s)
                await self._proxy.flowing()
                await self._pass_on(frame)
                if not self._asked:
                    self._broker_done.set()
        finally:
            self._broker_done.set()
            self._client[1].close()

    async def _pass_on(self, frame: bytes) -> None:
        if self._client_gone:
            return  # what the broker still answers is read, so that it does all it was asked
        try:
            self._client[1].write(frame)
            await self._client[1].drain()
        except OSError:
            self._client_gone = True

    async def _after(self, fault: Fault) -> bool:
        """Whether the answer is passed on."""
        fault.hit.set()
        if fault.action is Action.DELAY:
            await asyncio.sleep(fault.seconds)
            return True
        if fault.action is Action.HOLD:
            await _until(fault.released)
            return True
        if fault.action is Action.CRASH:
            self._proxy.kill(self.client_id)
        return False


class FaultProxy:
    """Forwards to a broker, in a thread of its own.

    Attributes:
        port: where clients connect.
        target: the broker's port, set once it is known.
        counts: requests of each kind that came, since `reset`.
        order: kinds of the requests in their order, since `reset`.
        latency_s: seconds each way.
        host: where clients connect; that of the socket to listen at, when one is given.
    """

    def __init__(self, target: int = 0, listening: socket.socket | None = None) -> None:
        self.target = target
        self.latency_s = 0.0
        self.counts: Counter[int] = Counter()
        self.order: list[tuple[int, str]] = []
        self._faults: list[Fault] = []
        self._dead: set[str] = set()
        self._sessions: set[_Session] = set()
        self._stalled = threading.Event()
        self._listening = listening or socket.create_server((HOST, 0))
        self.host: str
        self.port: int
        self.host, self.port = self._listening.getsockname()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._serve, name=f"proxy-{self.port}", daemon=True)
        self._thread.start()

    @property
    def bootstrap(self) -> str:
        """Address for clients."""
        return f"{self.host}:{self.port}"

    @property
    def connections(self) -> int:
        """Open connections of clients."""
        return len(self._sessions)

    # steering

    def arm(self, fault: Fault) -> Fault:
        """Make a fault happen; it counts from now on."""
        self._faults.append(fault)
        return fault

    def reset(self) -> None:
        """Forget faults, counts, latency and dead clients; what is held is let go."""
        faults, self._faults = self._faults, []
        for fault in faults:
            fault.release()
        self.counts = Counter()
        self.order = []
        self.latency_s = 0.0
        self._dead.clear()
        self._stalled.clear()

    def cut(self, client: str | None = None) -> None:
        """End all connections, or those of one client."""
        self._soon(self._cut(client))

    def stall(self) -> None:
        """Forward nothing more in either direction; connections stay open."""
        self._stalled.set()

    def resume(self) -> None:
        """End a stall."""
        self._stalled.clear()

    def revive(self, client: str) -> None:
        """Let a client that crashed connect again."""
        self._dead.discard(client)

    def close(self) -> None:
        """End everything."""
        self.reset()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)

    def __enter__(self) -> "FaultProxy":
        """The running proxy."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End it."""
        self.close()

    # for the sessions, in the proxy's loop

    def count(self, api: int, client: str) -> Fault | None:
        """Count a request; the fault meant for it."""
        self.counts[api] += 1
        self.order.append((api, client))
        found = [fault for fault in self._faults if fault.takes(api, client)]
        return found[0] if found else None

    def is_dead(self, client: str) -> bool:
        """Whether a client crashed."""
        return client in self._dead

    def kill(self, client: str) -> None:
        """End a client: as if its process had been killed."""
        self._dead.add(client)
        for session in list(self._sessions):
            if session.client_id == client:
                session.close()

    async def flowing(self) -> None:
        """Wait while the proxy is stalled."""
        while self._stalled.is_set():
            await asyncio.sleep(0.005)

    async def _cut(self, client: str | None) -> None:
        for session in list(self._sessions):
            if client is None or session.client_id == client:
                session.close()

    def _soon(self, work: Coroutine[Any, Any, None]) -> None:
        asyncio.run_coroutine_threadsafe(work, self._loop).result(10)

    def _serve(self) -> None:
        asyncio.set_event_loop(self._loop)

        async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            session = _Session(self, reader, writer)
            self._sessions.add(session)
            try:
                await session.run()
            except (OSError, asyncio.IncompleteReadError):
                session.close()
            finally:
                self._sessions.discard(session)

        async def end() -> None:
            server.close()
            tasks = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

        server = self._loop.run_until_complete(
            asyncio.start_server(accept, sock=self._listening, limit=_READ_BYTES)
        )
        self._loop.run_forever()
        self._loop.run_until_complete(end())
        self._loop.close()


def behind(proxy: FaultProxy) -> tuple[ListenerPlan, ...]:
    """Listeners of a broker: its own, one whose clients are sent through a proxy, and one for everybody else."""
    through = ListenerPlan(_PROXIED, advertised_port=proxy.port, advertised_host=proxy.host)
    return ListenerPlan(INTERNAL), through, ListenerPlan(CLIENT)


def lead(proxy: FaultProxy, cluster: SandboxCluster) -> None:
    """Let a proxy lead to the only broker of a cluster that was started with `behind`."""
    proxy.target = cluster.brokers[0].ports[_PROXIED]


async def _frame(reader: asyncio.StreamReader) -> bytes | None:
    """Next frame with its size field; None at the end of the stream."""
    try:
        head = await reader.readexactly(4)
        return head + await reader.readexactly(struct.unpack(">i", head)[0])
    except (asyncio.IncompleteReadError, OSError):
        return None


def _header(frame: bytes) -> tuple[int, str]:
    """Api key and client id of a request (request header v1 and later)."""
    api, _, _, size = struct.unpack_from(">hhih", frame, 4)
    return api, frame[14 : 14 + max(size, 0)].decode(errors="replace")


async def _until(event: threading.Event) -> None:
    while not event.is_set():
        await asyncio.sleep(0.002)


def wait_quiet(proxy: FaultProxy, for_s: float = 0.1, deadline_s: float = 10.0) -> None:
    """Wait until no request came for a while."""
    end = time.monotonic() + deadline_s
    seen, since = len(proxy.order), time.monotonic()
    while time.monotonic() - since < for_s:
        assert time.monotonic() < end, "requests keep coming"
        if len(proxy.order) != seen:
            seen, since = len(proxy.order), time.monotonic()
        time.sleep(0.005)
