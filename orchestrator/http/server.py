"""Runs the HTTP front door: uvicorn on the orchestrator's own loop, with our signals, our sockets and our deadlines."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Iterator
from contextlib import AsyncExitStack, contextmanager
from functools import partial
from typing import cast

import uvicorn

from orchestrator.chat.models import ChatModels
from orchestrator.http.app import application
from orchestrator.http.connection import MOST_HEADER_BYTES, Connection
from orchestrator.http.endpoint import HttpService
from orchestrator.sessions import Orchestrator
from specwire.rpc.channel import READ_AHEAD_BYTES
from specwire.rpc.errors import StatusError
from specwire.rpc.keys import HEADER
from specwire.rpc.server import ListenError, dialled, parse_listen
from specwire.rpc.tls import Certification, ServerTls

logger = logging.getLogger(__name__)

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
