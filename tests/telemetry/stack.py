"""A stack whose services all have their figures read over real sockets."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass

import draft_service.server
import verify_service.server
from deploy.cli.services import registry
from deploy.cli.services.registry import RegistryServiceOptions
from orchestrator import server
from orchestrator.options import OrchestratorOptions
from specwire.client import AsyncClient
from specwire.rpc.server_options import ModelServiceOptions
from tests.orchestrator.stack import DRAFT, TARGET
from tests.ports import free_address
from verify_service.engine.shares import TenantShares

ANY = "127.0.0.1:0"
# An emulation: slow enough that a test can look on.
SLOW_TARGET = f"{TARGET}:delay_ms=20"


@dataclass
class Observed:
    """addresses: of the figures, by service."""

    client: AsyncClient
    addresses: dict[str, str]
    http: str

    async def page(self, service: str) -> str:
        return await ask(self.addresses[service], "GET /metrics HTTP/1.1\r\nHost: x")


async def ask(address: str, head: str, body: str = "") -> str:
    """The body of the answer to one HTTP request."""
    host, _, port = address.rpartition(":")
    async with asyncio.timeout(60.0):
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(f"{head}\r\nConnection: close\r\nContent-Length: {len(body)}\r\n\r\n{body}".encode())
        answer, _, page = (await reader.read()).decode().partition("\r\n\r\n")
        writer.close()
    assert answer.startswith("HTTP/1.1 200 "), (answer, page)
    return page


@asynccontextmanager
async def observed(log_prompts: bool = False) -> AsyncIterator[Observed]:
    async with AsyncExitStack() as parts:
        served = ModelServiceOptions(SLOW_TARGET, metrics=ANY)
        verifier = await verify_service.server.start(served, patient=True, shares=TenantShares({}))
        parts.push_async_callback(verifier.stop, 0.0)
        drafter = await draft_service.server.start(ModelServiceOptions(DRAFT, metrics=ANY))
        parts.push_async_callback(drafter.stop, 0.0)
        options = OrchestratorOptions(
            (verifier.address,), (drafter.address,), metrics=ANY, plan="stream:1,8,1", http=ANY, log_prompts=log_prompts
        )
        orchestrator = await server.start(options)
        parts.push_async_callback(orchestrator.stop, 0.0)
        told = await registry.start(RegistryServiceOptions(f"redis://{free_address()}", metrics=ANY))
        parts.push_async_callback(told.stop)
        listeners = {
            "verifier": verifier.metrics,
            "drafter": drafter.metrics,
            "orchestrator": orchestrator.metrics,
            "registry": told.metrics,
        }
        addresses = {service: listener.address for service, listener in listeners.items() if listener is not None}
        client = await parts.enter_async_context(AsyncClient(orchestrator.address))
        yield Observed(client, addresses, (orchestrator.http or "").removeprefix("http://"))
