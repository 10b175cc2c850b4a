"""One connection to one broker: frames in, frames out, in order (Kafka protocol guide, "Network").

Sockets are driven directly from the event loop rather than through its transports, for two reasons: large answers
are received straight into buffers that the data path owns, and requests that carry record batches are written with
one gathered system call instead of being joined first.
"""

import asyncio
import math
import random
import socket
import ssl
import struct
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any, TypeVar

from kafka.protocol.api_message import ApiMessage
from kafka.protocol.metadata.api_versions import ApiVersionsRequest
from kafka.protocol.sasl import SaslAuthenticateRequest, SaslHandshakeRequest

from kmirror_dagster.broker import clients
from kmirror_dagster.broker.codes import broker_error
from kmirror_dagster.errors import (
    AuthenticationError,
    ClusterUnreachableError,
    ConnectionLostError,
    DeadlineError,
    KmirrorError,
)
from kmirror_dagster.settings import ClusterSettings
from kmirror_dagster.version import __version__

Buffer = bytes | bytearray | memoryview
T = TypeVar("T")

CLIENT_SOFTWARE = "kmirror-dagster"
_STAGING_BYTES = 64 * 1024
# Part of a session's life (KIP-368) after which requests go over a new connection.
_SESSION_SHARE = (0.85, 0.95)
# One readiness callback reads at most this much, so that one busy connection cannot starve the others.
_READ_BURST_BYTES = 4 * 1024 * 1024
_BUFFER_STEP = 1024 * 1024
_MAX_FRAME_BYTES = 512 * 1024 * 1024
# A large answer is read in pieces of about this size rather than as it trickles in (SO_RCVLOWAT).
_CHUNK_BYTES = 512 * 1024
_IOV_LIMIT = 512
# A request that a broken network held up must not arrive when another node has taken its partition over, which takes
# longer than this (RFC 5482; only Linux has the option). Control records are fenced by nothing else.
_LONGEST_UNDERWAY_MS = 4_000
_TCP_USER_TIMEOUT: int | None = getattr(socket, "TCP_USER_TIMEOUT", None)
_LONGEST_RETIRED_S = 60.0
_DISCARD = struct.pack("ii", 1, 0)


@dataclass(frozen=True)
class Frame:
    """Body of one answer (behind the size field).

    Attributes:
        view: the bytes.
        lease: what `BufferPool.release` takes back.
        began: when its first bytes came, monotonic seconds.
    """

    view: memoryview
    lease: bytearray | None = None
    began: float = 0.0


@dataclass
class BufferPool:
    """Reuses the receive buffers of large answers; a fresh 16 MiB buffer costs thousands of page faults."""

    keep_bytes: int = 16 * 1024 * 1024
    free: list[bytearray] = field(default_factory=list[bytearray])

    def acquire(self, size: int) -> bytearray:
        """A buffer of at least `size` bytes."""
        fitting = [each for each in self.free if len(each) >= size]
        if fitting:
            return self._take(min(fitting, key=len))  # a large one stays for a large answer
        # rounded up, so that answers of about the same size share buffers
        return bytearray(-(-size // _BUFFER_STEP) * _BUFFER_STEP)

    def _take(self, buffer: bytearray) -> bytearray:
        self.free = [each for each in self.free if each is not buffer]  # not by their contents
        return buffer

    def release(self, lease: bytearray | None) -> None:
        """Give a buffer back; the caller must not hold views of it any more."""
        if lease is None or len(lease) > self.keep_bytes:
            return
        self.free.append(lease)
        while sum(map(len, self.free)) > self.keep_bytes:
            # small ones go first: they are cheap to make, and would keep the place of those that are not
            self._take(min(self.free, key=len))


@dataclass
class _Waiting:
    correlation_id: int
    future: "asyncio.Future[Frame]"


class Connection:
    """An authenticated connection to one broker.

    Raises (from `open`): ClusterUnreachableError, AuthenticationError. Requests raise ConnectionLostError when
    the connection ends before the answer came: the outcome is unknown then.
    """

    def __init__(
        self, settings: ClusterSettings, host: str, port: int, *, pool: BufferPool | None = None
    ) -> None:
        self.host = host
        self.port = port
        self.versions: dict[int, tuple[int, int]] = {}
        self._settings = settings
        self._pool = pool or BufferPool()
        self._loop = asyncio.get_running_loop()
        self._ids = count(1)
        self._waiting: deque[_Waiting] = deque()
        self._sock: socket.socket | None = None
        self._error: KmirrorError | None = None
        self._staging = bytearray(_STAGING_BYTES)
        self._staging_view = memoryview(self._staging)
        self._staged = 0
        self._body: bytearray | None = None
        self._body_view: memoryview | None = None
        self._body_began = 0.0
        self._body_size = 0
        self._body_read = 0
        self._low_water = 1
        self._out: deque[memoryview] = deque()
        self._writing = False
        self._tls = False
        self._expires_at = math.inf
        self._retired = False
        self._given_up: asyncio.Future[Frame] | None = None  # the newest answer nobody waits for any more
        # of the exchange of versions, which costs the broker next to nothing
        self.round_trip_s = math.inf
        self.last_used = time.monotonic()

    # opening

    async def open(self, deadline_s: float) -> "Connection":
        """Connect, shake hands (TLS), negotiate versions and authenticate (SASL) within `deadline_s` seconds."""
        try:
            await asyncio.wait_for(self._open(), deadline_s)
        except asyncio.TimeoutError:
            error = ClusterUnreachableError(f"{self.host}:{self.port} did not answer within {deadline_s:g} s")
            self._fail(error)
            raise error from None
        except ConnectionLostError as error:
            raise clients.setup_failed(self._settings, str(error), address=self._address) from error
        except KmirrorError as error:
            self._fail(error)
            raise
        except asyncio.CancelledError:
            self.close()
            raise
        except (OSError, ssl.SSLError) as error:
            reason = ClusterUnreachableError(f"cannot connect to {self.host}:{self.port}: {_reason(error)}")
            self._fail(reason)
            raise reason from error
        return self

    async def _open(self) -> None:
        infos = await self._loop.getaddrinfo(self.host, self.port, type=socket.SOCK_STREAM)
        last: OSError | None = None
        for family, kind, proto, _, address in infos:
            sock = socket.socket(family, kind, proto)
            try:
                sock.setblocking(False)
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                if _TCP_USER_TIMEOUT is not None:
                    sock.setsockopt(socket.IPPROTO_TCP, _TCP_USER_TIMEOUT, _LONGEST_UNDERWAY_MS)
                await self._loop.sock_connect(sock, address)
            except OSError as error:
                sock.close()
                last = error
                continue
            except BaseException:
                sock.close()
                raise
            self._sock = sock
            break
        if self._sock is None:
            raise last or OSError(f"no address found for {self.host}")
        context = clients.ssl_context(self._settings)
        if context is not None:
            await self._handshake(context)
        self._loop.add_reader(self._sock.fileno(), self._readable)
        await self._negotiate()
        await self._authenticate()

    async def _handshake(self, context: ssl.SSLContext) -> None:
        assert self._sock is not None  # noqa: S101 - set by the caller
        secure = context.wrap_socket(
            self._sock, server_hostname=self.host, do_handshake_on_connect=False, suppress_ragged_eofs=True
        )
        self._sock = secure
        self._tls = True
        while True:
            try:
                secure.do_handshake()
            except ssl.SSLWantReadError:
                await self._until(self._loop.add_reader, self._loop.remove_reader)
            except ssl.SSLWantWriteError:
                await self._until(self._loop.add_writer, self._loop.remove_writer)
            except ssl.SSLCertVerificationError as error:
                raise clients.tls_refused(
                    self._settings, error.verify_message, address=self._address
                ) from error
            else:
                return

    async def _until(self, add: Callable[..., Any], remove: Callable[[int], Any]) -> None:
        assert self._sock is not None  # noqa: S101 - only called while a socket is open
        ready = self._loop.create_future()
        fd = self._sock.fileno()
        add(fd, lambda: ready.done() or ready.set_result(None))
        try:
            await ready
        finally:
            remove(fd)

    async def _negotiate(self) -> None:
        request = ApiVersionsRequest[3](
            client_software_name=CLIENT_SOFTWARE, client_software_version=__version__
        )
        asked = time.monotonic()
        answer = await self.call(request, version=3)
        self.round_trip_s = time.monotonic() - asked
        if answer.error_code == 35:  # UNSUPPORTED_VERSION: brokers before 2.4 answer in version 0
            answer = await self.call(ApiVersionsRequest[0](), version=0)
        if answer.error_code:
            raise broker_error(answer.error_code, f"version negotiation with {self.host}:{self.port}")
        self.versions = {key.api_key: (key.min_version, key.max_version) for key in answer.api_keys}

    async def _authenticate(self) -> None:
        mechanism = clients.sasl_mechanism(self._settings)
        if mechanism is None:
            return
        name = str(self._settings.sasl_mechanism)
        handshake = await self.call(SaslHandshakeRequest(mechanism=name), version=1)
        if handshake.error_code:
            raise AuthenticationError(
                f"{self.host}:{self.port} does not offer SASL mechanism {name}; it offers "
                f"{', '.join(handshake.mechanisms)}: check sasl.mechanism"
            )
        while not mechanism.is_done():
            payload = await asyncio.to_thread(mechanism.auth_bytes)  # OAUTHBEARER may fetch a token here
            answer = await self.call(SaslAuthenticateRequest(auth_bytes=payload), version=1)
            if answer.error_code:
                raise clients.credentials_refused(self._settings, address=self._address)
            mechanism.receive(answer.auth_bytes)
            if answer.session_lifetime_ms > 0:
                # KIP-368: a request behind that moment would end the connection, its outcome unknown
                share = random.uniform(*_SESSION_SHARE)  # noqa: S311 - jitter, no secret
                self._expires_at = time.monotonic() + answer.session_lifetime_ms / 1_000 * share

    # asking

    @property
    def alive(self) -> bool:
        """Whether requests can still be sent.

        Not when the broker soon wants to see the credentials again, nor behind a request that was given up.
        """
        answering = self._given_up is None or self._given_up.done()
        usable = self._sock is not None and self._error is None and answering
        return usable and time.monotonic() < self._expires_at

    @property
    def in_flight(self) -> int:
        """Requests sent and not yet answered."""
        return len(self._waiting)

    def version(self, api_key: int, highest: int) -> int:
        """Highest version of an API that both sides speak, at most `highest`; -1 when the broker lacks it."""
        low, high = self.versions.get(api_key, (0, -1))
        best = min(high, highest)
        return best if best >= low else -1

    async def call(self, request: Any, *, version: int | None = None, deadline_s: float = 30.0) -> Any:
        """Send one generated request and decode its answer.

        Args:
            request: instance of a generated request class.
            version: API version; by default the highest both sides speak.
            deadline_s: seconds; afterwards DeadlineError (the answer, when it comes, is dropped).

        A broker answers the requests of a connection one after the other: behind one that it does not answer all
        others wait. Once somebody has given up waiting, the connection takes no new ones.
        """
        if version is None:
            version = self.version(request.API_KEY, type(request).max_version)
            if version < 0:
                raise broker_error(35, f"{type(request).__name__} at {self.host}:{self.port}")
        request.API_VERSION = version
        correlation_id = next(self._ids)
        request.with_header(correlation_id=correlation_id, client_id=self._client_id)
        future = self.send(correlation_id, [request.encode(header=True, framed=True)])
        try:
            frame = await asyncio.wait_for(asyncio.shield(future), deadline_s)
        except asyncio.CancelledError:
            self._given_up = future
            raise
        except asyncio.TimeoutError:
            self._given_up = future
            raise DeadlineError(
                f"{type(request).__name__} to {self.host}:{self.port} unanswered after {deadline_s:g} s"
            ) from None
        return _decode(request, bytes(frame.view), version)

    @property
    def _address(self) -> str:
        return f"{self.host}:{self.port}"

    @property
    def _client_id(self) -> str:
        return self._settings.client_id or CLIENT_SOFTWARE

    def next_id(self) -> int:
        """A fresh correlation id for a hand-packed request."""
        return next(self._ids)

    def send(self, correlation_id: int, buffers: Sequence[Buffer]) -> "asyncio.Future[Frame]":
        """Queue one framed request; the future yields the body of its answer (correlation id in front).

        The buffers must stay unchanged until the future is done.
        """
        future: asyncio.Future[Frame] = self._loop.create_future()
        if self._error is not None or self._sock is None:
            future.set_exception(self._error or ConnectionLostError(f"{self.host}:{self.port} is closed"))
            return future
        self.last_used = time.monotonic()
        self._waiting.append(_Waiting(correlation_id, future))
        self._out.extend(memoryview(buffer).cast("B") for buffer in buffers)
        if not self._writing:
            self._writable()
        return future

    # writing

    def _writable(self) -> None:
        assert self._sock is not None  # noqa: S101 - only called while a socket is open
        try:
            while self._out:
                sent = self._send_some()
                while sent and self._out:
                    head = self._out[0]
                    if sent < len(head):
                        self._out[0] = head[sent:]
                        break
                    sent -= len(head)
                    self._out.popleft()
        except (BlockingIOError, ssl.SSLWantWriteError, ssl.SSLWantReadError, InterruptedError):
            if not self._writing:
                self._writing = True
                self._loop.add_writer(self._sock.fileno(), self._writable)
            return
        except OSError as error:
            self._fail(ConnectionLostError(f"connection to {self.host}:{self.port} lost: {_reason(error)}"))
            return
        if self._writing:
            self._writing = False
            self._loop.remove_writer(self._sock.fileno())

    def _send_some(self) -> int:
        assert self._sock is not None  # noqa: S101 - only called while a socket is open
        if self._tls or len(self._out) == 1:
            return self._sock.send(self._out[0])
        if len(self._out) <= _IOV_LIMIT:
            return self._sock.sendmsg(self._out)
        return self._sock.sendmsg([self._out[index] for index in range(_IOV_LIMIT)])

    # reading

    def _readable(self) -> None:
        budget = _READ_BURST_BYTES
        try:
            while budget > 0 and self._sock is not None:
                received = self._receive()
                if received == 0:
                    self._fail(ConnectionLostError(f"{self.host}:{self.port} closed the connection"))
                    return
                budget -= received
        except (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError, InterruptedError):
            return
        except OSError as error:
            self._fail(ConnectionLostError(f"connection to {self.host}:{self.port} lost: {_reason(error)}"))
            return
        if self._tls and self._sock is not None and self._sock.pending():  # pyright: ignore[reportAttributeAccessIssue]
            # decrypted bytes wait inside the TLS layer: the selector will not report them
            self._loop.call_soon(self._readable_again)

    def _readable_again(self) -> None:
        if self._sock is not None:
            self._readable()

    def _receive(self) -> int:
        assert self._sock is not None  # noqa: S101 - only called while a socket is open
        if self._body_view is not None:
            received = self._sock.recv_into(self._body_view[self._body_read : self._body_size])
            self._body_read += received
            if self._body_read == self._body_size:
                self._wake_at(1)
                self._finish_body()
            else:
                self._wake_at(min(self._body_size - self._body_read, _CHUNK_BYTES))
            return received
        received = self._sock.recv_into(self._staging_view[self._staged :])
        self._staged += received
        self._unpack_staging()
        return received

    def _unpack_staging(self) -> None:
        position = 0
        while self._staged - position >= 4:
            (size,) = struct.unpack_from(">i", self._staging, position)
            if not 4 <= size <= _MAX_FRAME_BYTES:
                self._fail(ConnectionLostError(f"{self.host}:{self.port} sent a frame of {size} bytes"))
                return
            available = self._staged - position - 4
            if size <= available:
                start = position + 4
                # a copy that may be written to: the data path changes batch headers in place
                copy = memoryview(bytearray(self._staging_view[start : start + size]))
                self._deliver(Frame(copy, began=time.monotonic()))
                position = start + size
                continue
            if size > _STAGING_BYTES - 4:
                self._begin_body(size, position + 4, available)
                return
            break
        remaining = self._staged - position
        if position and remaining:
            self._staging[:remaining] = self._staging[position : self._staged]
        self._staged = remaining

    def _begin_body(self, size: int, start: int, available: int) -> None:
        self._body = self._pool.acquire(size)
        self._body_view = memoryview(self._body)
        self._body_view[:available] = self._staging_view[start : start + available]
        self._body_began = time.monotonic()
        self._body_size = size
        self._body_read = available
        self._staged = 0
        self._wake_at(min(size - available, _CHUNK_BYTES))

    def _wake_at(self, size: int) -> None:
        """Let the kernel gather that many bytes before it reports the socket as readable."""
        if self._sock is not None and size != self._low_water and not self._tls:
            self._low_water = size
            self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, size)

    def _finish_body(self) -> None:
        body, view, size = self._body, self._body_view, self._body_size
        self._body = self._body_view = None
        assert body is not None  # noqa: S101 - set together with the view
        assert view is not None  # noqa: S101 - checked by the caller
        self._deliver(Frame(view[:size], body, self._body_began))

    def _deliver(self, frame: Frame) -> None:
        self.last_used = time.monotonic()
        (correlation_id,) = struct.unpack_from(">i", frame.view)
        if not self._waiting or self._waiting[0].correlation_id != correlation_id:
            self._fail(ConnectionLostError(f"{self.host}:{self.port} answered out of order"))
            return
        future = self._waiting.popleft().future
        if future.done():
            self._pool.release(frame.lease)  # nobody waits any more
        else:
            future.set_result(frame)
        if self._retired and not self._waiting:
            self.close()

    # closing

    def retire(self) -> None:
        """Close as soon as everything that was sent is answered, at the latest after a minute."""
        self._retired = True
        if not self._waiting:
            self.close()
        else:
            self._loop.call_later(_LONGEST_RETIRED_S, self.close)

    def close(self) -> None:
        """Close at once; outstanding requests end with ConnectionLostError. Harmless when closed."""
        self._fail(ConnectionLostError(f"connection to {self.host}:{self.port} was closed"))

    def _fail(self, error: KmirrorError) -> None:
        if self._error is None:
            self._error = error
        sock, self._sock = self._sock, None
        if sock is not None:
            fd = sock.fileno()
            if fd >= 0:
                self._loop.remove_reader(fd)
                self._loop.remove_writer(fd)
                if self._waiting:
                    # what the kernel has not sent yet must not arrive later than this: nobody waits for it
                    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _DISCARD)
            sock.close()
        self._out.clear()
        waiting, self._waiting = self._waiting, deque()
        for entry in waiting:
            if not entry.future.done():
                entry.future.set_exception(error)
                # whoever gave up waiting does not look at it any more
                entry.future.exception()


def _decode(request: Any, data: bytes, version: int) -> Any:
    kind: type[ApiMessage] | None = request.header.get_response_class()
    if kind is None:
        raise KmirrorError(f"no answer class for {type(request).__name__} version {version}")
    return kind.decode(data, header=True)


def _reason(error: BaseException) -> str:
    return (getattr(error, "strerror", None) or str(error) or type(error).__name__).lower()
