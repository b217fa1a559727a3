"""A TCP relay inside a test: it delays, and on demand silently stops passing anything on."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class Relay:
    """From `address` to `target`, `delay` seconds each way, for connecting too; keeps all while `hears` is not set."""

    def __init__(self, target: str, delay: float = 0.0) -> None:
        self.target = target
        self.delay = delay
        self.address = ""
        self.hears = asyncio.Event()
        self.hears.set()
        self._ends: list[asyncio.StreamWriter] = []

    @asynccontextmanager
    async def relaying(self) -> AsyncIterator[None]:
        listener = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        self.address = f"127.0.0.1:{listener.sockets[0].getsockname()[1]}"
        try:
            yield
        finally:
            self.hears.set()
            listener.close()
            self.break_off()
            await asyncio.gather(*(end.wait_closed() for end in self._ends), return_exceptions=True)

    def break_off(self) -> None:
        """End every connection; new ones are welcome."""
        for end in self._ends:
            end.close()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await asyncio.sleep(2 * self.delay)
        host, _, port = self.target.rpartition(":")
        onward_reader, onward_writer = await asyncio.open_connection(host, int(port))
        self._ends += [writer, onward_writer]
        await asyncio.gather(self._pass(reader, onward_writer), self._pass(onward_reader, writer))

    async def _pass(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """What is under way is delayed side by side, not one after the other."""
        loop = asyncio.get_running_loop()
        try:
            while data := await reader.read(1 << 16):
                await self.hears.wait()
                loop.call_later(self.delay, writer.write, data)
        except ConnectionError:
            pass  # the other end has noticed
        finally:
            loop.call_later(self.delay, writer.close)
