"""The HTTP front door's server: uvicorn on the orchestrator's own loop, with our signals, sockets and deadlines.

Its connections have bounds on what a request may cost, and on how long it and its answer take.
"""

from __future__ import annotations

import asyncio
import resource
import socket
from collections.abc import Callable, Iterator
from contextlib import AsyncExitStack, contextmanager, suppress
from functools import partial
from typing import Any, cast

import h11
import uvicorn
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.h11_impl import H11Protocol, RequestResponseCycle

from orchestrator.chat.models import ChatModels
from orchestrator.http.app import application
from orchestrator.http.endpoint import BODY_LIMIT_S, HttpService
from orchestrator.http.errors import INVALID, SERVER, Failure
from orchestrator.sessions import Orchestrator
from specwire.rpc.channel import PING_EVERY_MS, PING_TIMEOUT_MS, READ_AHEAD_BYTES
from specwire.rpc.errors import StatusError
from specwire.rpc.keys import HEADER
from specwire.rpc.server import ListenError, dialled, parse_listen
from specwire.rpc.tls import Certification, ServerTls, shown_in

# ----------------------------------------------------------------------------------------------------------------------
# One HTTP/1.1 connection: uvicorn's, bounded.
#
# A body is not read before an endpoint asks for it, so a refused caller costs its headers only. Deadlines belong to the
# connection, so they also hold where nothing reads.

# Most bytes of a request's line and headers, and seconds for them from its first byte or the connection's start.
MOST_HEADER_BYTES = 16 * 1024
HEAD_LIMIT_S = 30.0
# Most chunks of one body, and one more for each so many bytes: a chunk costs some 5 us beside its bytes (measured;
# httptools would take 0.07 us, but h11 is strict).
FREE_CHUNKS, CHUNK_BYTES = 1024, 64
# Seconds and bytes for which a refused client's further data is read and dropped, so that it sees its answer: closing a
# connection with unread bytes resets it.
LINGER_S = 2.0
READ_BYTES = 256 * 1024
LINGER_BYTES = 16 * 1024 * 1024
# Seconds beyond an endpoint's own limit for a body, so that the endpoint reports it first.
BODY_SLACK_S = 5.0
# Seconds without reading after which a client is gone, or wants to hold its session's slot.
UNREAD_LIMIT_S = 600.0
# Most connections; each may hold READ_AHEAD_BYTES unread, and as much again of headers.
MOST_CONNECTIONS = 4096
# File descriptors that everything else may need.
OTHER_FILES = 128
LEAST_CONNECTIONS = 16


TOO_LONG = (431, f"its line and headers must be at most {MOST_HEADER_BYTES} bytes", "headers_too_large")


def most_connections() -> int:
    """How many connections this process may have open, at most MOST_CONNECTIONS."""
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return max(LEAST_CONNECTIONS, min(MOST_CONNECTIONS, files - OTHER_FILES))


class Parser(h11.Connection):
    """h11's, which also refuses what costs too much, or what two servers may read differently (request smuggling).

    withheld: of a request that has a body only the head has been parsed; `read_body` lets it go on.
    refusal: why the last RemoteProtocolError was raised.
    """

    def __init__(self) -> None:
        super().__init__(h11.SERVER, MOST_HEADER_BYTES)
        self.withheld = False
        self.refusal: Failure | None = None
        self._chunks = self._bytes = 0

    def read_body(self) -> None:
        self.withheld = False

    def next_event(self) -> Any:
        if self.withheld:
            return h11.PAUSED
        before = self._waiting if self.their_state is h11.IDLE else 0
        try:
            event = super().next_event()
        except h11.RemoteProtocolError as error:
            too_long = error.error_status_hint == 431
            raise self._refused(*(TOO_LONG if too_long else (400, str(error), "invalid_http"))) from None
        match event:
            case h11.Request():
                self._begin(event, before - self._waiting)
            case h11.Data():
                self._count(event)
            case h11.EndOfMessage() if _size_of(event.headers) > MOST_HEADER_BYTES:
                raise self._refused(*TOO_LONG)
        return event

    @property
    def _waiting(self) -> int:
        return len(self.trailing_data[0])

    def _begin(self, request: h11.Request, size: int) -> None:
        named = dict(request.headers)
        if size > MOST_HEADER_BYTES:
            raise self._refused(*TOO_LONG)
        chunked = b"transfer-encoding" in named
        if chunked and b"content-length" in named:
            message = "Content-Length: must not stand beside Transfer-Encoding (RFC 9112, section 6.1)"
            raise self._refused(400, message, "invalid_http")
        self.withheld = chunked or int(named.get(b"content-length", b"0")) > 0
        self._chunks = self._bytes = 0

    def _count(self, data: h11.Data) -> None:
        self._chunks += data.chunk_start
        self._bytes += len(data.data)
        if self._chunks > FREE_CHUNKS + self._bytes // CHUNK_BYTES:
            message = f"body: its chunks are too small: {self._chunks} for {self._bytes} bytes; send larger ones"
            raise self._refused(400, message, "invalid_http")

    def _refused(self, status: int, message: str, code: str) -> h11.RemoteProtocolError:
        self.refusal = Failure(status, f"request: {message}", INVALID, None, code)
        return h11.RemoteProtocolError(message, error_status_hint=status)


def _size_of(headers: Any) -> int:
    """Bytes of headers on the wire, with colon, space and line's end."""
    return sum(len(name) + len(value) + 4 for name, value in headers)


class _Flow(FlowControl):
    """Tells when an endpoint wants the body."""

    def __init__(self, transport: asyncio.Transport, wanted: Callable[[], None]) -> None:
        super().__init__(transport)
        self._wanted = wanted

    def resume_reading(self) -> None:
        super().resume_reading()
        self._wanted()


class Connection(H11Protocol):
    """uvicorn's HTTP/1.1 connection, with gRPC's bounds on what waits for a client that does not read."""

    conn: Parser

    def __init__(self, *given: Any, certification: Certification, **named: Any) -> None:
        super().__init__(*given, **named)
        self._certification = certification

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        made = cast(asyncio.Transport, transport)
        self._arriving: asyncio.TimerHandle | None = None
        self._unread: asyncio.TimerHandle | None = None
        self._in_body = False
        self.conn = Parser()
        super().connection_made(made)
        self.flow = _Flow(made, self._read_body)
        if not self._certification.holds(self.certificates):  # a handshake that resumes an older one asks for none
            made.abort()
            return
        if len(self.connections) > most_connections():
            self._refuse(Failure(503, "there are too many connections", SERVER, None, "too_many_connections", 1.0))
            return
        made.set_write_buffer_limits(high=READ_AHEAD_BYTES)
        _notice_dead_peers(made.get_extra_info("socket"))
        self._expect(HEAD_LIMIT_S)

    def certificates(self) -> tuple[bytes, bytes]:
        """See `shown_in`."""
        return shown_in(self.transport.get_extra_info("ssl_object"))

    @property
    def running_token(self) -> str | None:
        """What the request that is being answered shows as `authorization`; None without a request, or without one."""
        cycle: RequestResponseCycle | None = self.cycle  # None before the first request, whatever uvicorn's types say
        if cycle is None or cycle.response_complete:
            return None
        shown = (value for name, value in cycle.scope["headers"] if name == HEADER.encode())
        return next((value.decode("latin-1") for value in shown), None)

    def connection_lost(self, exc: Exception | None) -> None:
        self._expect(None)
        self.resume_writing()
        if exc is None and (self.conn.withheld or self.conn.refusal is not None):
            self._linger()
        super().connection_lost(exc)

    def _linger(self) -> None:
        """Linger, where there is room for it. TLS connections linger by themselves: their ends say goodbye."""
        if len(self.connections) + len(self.tasks) < most_connections():
            with suppress(OSError):
                line = self.transport.get_extra_info("socket").dup()
                task = self.loop.create_task(_discard(line))
                self.tasks.add(task)
                task.add_done_callback(self.tasks.discard)

    def _read_body(self) -> None:
        """An endpoint waits for it. uvicorn calls this at an answer's end, too."""
        if self.conn.withheld and not self.cycle.response_complete:
            self.conn.read_body()
            self.loop.call_soon(self._go_on)

    def _go_on(self) -> None:
        if not self.transport.is_closing():
            self.handle_events()
            self._watch()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._watch()
        if self.conn.their_state is h11.IDLE and self._arriving is None:
            self._expect(HEAD_LIMIT_S)

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.conn.withheld:
            self.transport.close()
        self._watch()

    def _watch(self) -> None:
        """Bound the time for what a request lacks."""
        in_body = self.conn.their_state is h11.SEND_BODY
        if in_body and not self._in_body:
            self._expect(BODY_LIMIT_S + BODY_SLACK_S)
        elif not in_body and (self._in_body or self.conn.their_state is not h11.IDLE):
            self._expect(None)
        self._in_body = in_body

    def _expect(self, seconds: float | None) -> None:
        """Set or clear (None) the deadline for the next event."""
        if self._arriving is not None:
            self._arriving.cancel()
        self._arriving = None if seconds is None else self.loop.call_later(seconds, self._too_slow)

    def _too_slow(self) -> None:
        self._arriving = None
        if self._in_body or self.conn.their_state is not h11.IDLE or not self.conn.trailing_data[0]:
            self.transport.abort()  # an answer is under way, or nobody has asked for one
            return
        message = f"request: its line and headers did not come within {HEAD_LIMIT_S:g} s"
        self._refuse(Failure(408, message, INVALID, None, "timeout"))

    def pause_writing(self) -> None:
        super().pause_writing()
        if self._unread is None:
            self._unread = self.loop.call_later(UNREAD_LIMIT_S, self.transport.abort)

    def resume_writing(self) -> None:
        if self._unread is not None:
            self._unread.cancel()
            self._unread = None
        super().resume_writing()

    def send_400_response(self, msg: str) -> None:
        """Answer what is no HTTP, or has too long headers, like every other error."""
        self._refuse(self.conn.refusal or Failure(400, msg, INVALID, None, "invalid_http"))

    def _refuse(self, failure: Failure) -> None:
        """Answer an unreadable request with an error and hang up; in the middle of another answer just hang up."""
        if self.conn.our_state is h11.SEND_BODY:
            self.transport.abort()
            return
        answer = failure.response()
        head = [*answer.raw_headers, (b"connection", b"close")]
        lines = b"".join(name + b": " + value + b"\r\n" for name, value in head)
        self.transport.write(f"HTTP/1.1 {failure.status} \r\n".encode() + lines + b"\r\n" + bytes(answer.body))
        self.transport.close()


async def _discard(line: socket.socket) -> None:
    """Close our side, and read and drop what the other end sends until it hangs up or the limits are reached."""
    loop, left = asyncio.get_running_loop(), LINGER_BYTES
    with line, suppress(OSError, TimeoutError):
        line.setblocking(False)
        line.shutdown(socket.SHUT_WR)
        async with asyncio.timeout(LINGER_S):
            while left > 0 and (thrown := len(await loop.sock_recv(line, READ_BYTES))):
                left -= thrown


def _notice_dead_peers(connected: socket.socket) -> None:
    """Like gRPC's pings: a client that vanished is noticed within 10 s."""
    every, timeout = PING_EVERY_MS // 1000, PING_TIMEOUT_MS // 1000
    with suppress(OSError, AttributeError):  # not every system has all of these
        connected.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, every)
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, timeout)
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 1)


# ----------------------------------------------------------------------------------------------------------------------
# The server.

# Seconds until the first byte of the next request on a kept connection.
KEEP_ALIVE_S = 75
BACKLOG = 1024
# Seconds for answers to end whose connections are cut at the end of a stop.
CUT_LIMIT_S = 1.0


class _Server(uvicorn.Server):
    """Signals belong to the process (`specwire.rpc.process`)."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class HttpServer:
    """A server that listens. `address`: HOST:PORT as a client on this machine dials it; `url`: with its scheme."""

    def __init__(self, service: HttpService, listening: socket.socket, tls: ServerTls | None) -> None:
        self.address = dialled(*listening.getsockname()[:2])
        self.url = f"{'http' if tls is None else 'https'}://{self.address}"
        self._certification = Certification(tls)
        made = partial(Connection, certification=self._certification)
        config = uvicorn.Config(
            application(service),
            http=cast(type[Connection], made),
            ws="none",
            lifespan="off",
            loop="none",
            log_config=None,
            access_log=False,
            proxy_headers=False,
            server_header=False,
            timeout_keep_alive=KEEP_ALIVE_S,
            h11_max_incomplete_event_size=MOST_HEADER_BYTES,
        )
        config.load()
        config.ssl = None if tls is None else tls.context()
        self._server = _Server(config)
        self._listening = listening
        self._service = service
        self._serving = asyncio.create_task(self._server.serve([listening]))

    async def started(self) -> None:
        """Return when connections are accepted."""
        while not self._server.started:
            if self._serving.done():
                self._serving.result()
                raise ListenError(f"http: the server on {self.address} ended")
            await asyncio.sleep(0.01)

    def recheck(self) -> None:
        """Cut connections whose certificate is no longer trusted, or whose running request's token is not known."""
        for connection in map(partial(cast, Connection), list(self._server.server_state.connections)):
            if not (self._certification.holds(connection.certificates) and self._known(connection)):
                connection.transport.abort()

    def _known(self, connection: Connection) -> bool:
        token = connection.running_token
        try:
            return token is None or self._service.handler.tenant([(HEADER, token)]) is not None
        except StatusError:
            return False

    async def stop(self, grace: float) -> None:
        """Take no more connections, give running answers `grace` seconds, cut the rest. Idempotent."""
        self._server.should_exit = True
        try:
            async with asyncio.timeout(grace):
                await asyncio.shield(self._serving)
        except TimeoutError:
            await self._cut()
        finally:
            await self._service.stop()

    async def _cut(self) -> None:
        """Cut answers whose clients do not read: the work for a connection ends with it."""
        state = self._server.server_state
        for connection in list(state.connections):
            cast(Connection, connection).transport.abort()
        self._server.force_exit = True
        await asyncio.wait({self._serving, *state.tasks}, timeout=CUT_LIMIT_S)
        left = [self._serving, *state.tasks]
        for task in left:
            task.cancel()
        await asyncio.gather(*left, return_exceptions=True)


async def serve(orchestrator: Orchestrator, listen: str, tls: ServerTls | None, chats: ChatModels) -> HttpServer:
    """Listen for HTTP.

    Raises:
        ListenError: the address cannot be used. TemplateInvalid: the template does not compile.
    """
    service = HttpService(orchestrator, chats)
    async with AsyncExitStack() as owned:
        owned.push_async_callback(service.stop)
        await chats.check_template()
        server = HttpServer(service, _bind(listen), tls)
        await server.started()
        owned.pop_all()
    return server


def _bind(listen: str) -> socket.socket:
    host, port = parse_listen(listen)
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        bound = socket.socket(family, kind, protocol)
    except OSError as error:
        raise ListenError(f"http: cannot listen on {listen}: {error.strerror}") from error
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        # Connections inherit it: what a client does not read soon keeps its session from being decided ahead.
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, READ_AHEAD_BYTES)
        bound.bind(address)
        bound.listen(BACKLOG)
        bound.setblocking(False)
    except OSError as error:
        bound.close()
        raise ListenError(f"http: cannot listen on {listen}: {error.strerror}") from error
    return bound
