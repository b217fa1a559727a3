"""An orchestrator among peers that speak TLS, and one that does not fit in."""

from __future__ import annotations

import asyncio
import subprocess
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import pytest

import draft_service.server
import orchestrator.server
import verify_service.server
from bench.harness.certificates import Authority
from orchestrator.options import OrchestratorOptions
from orchestrator.pool import StartError
from specwire.client import AsyncClient
from specwire.rpc.server_options import ModelServiceOptions
from specwire.rpc.tls import ClientTls, ServerTls
from tests.documents import ROOT, blocks_of
from tests.orchestrator.stack import DRAFT, PROMPT, SLOW_TARGET, TURNS, drafted, plain
from tests.wait import asked, limits

OURS, OTHERS = Authority(), Authority("another authority")
LIMIT_S = 120.0
FILES = ("ca.pem", "server.pem", "server.key", "edge.pem", "edge.key")


@asynccontextmanager
async def peers() -> AsyncIterator[tuple[str, str]]:
    """The addresses of a verifier and a drafter that want certificates and show theirs."""
    tls = OURS.server(client_ca=OURS)
    async with AsyncExitStack() as parts:
        verifier = await verify_service.server.start(ModelServiceOptions(SLOW_TARGET, tls=tls), patient=True)
        parts.push_async_callback(verifier.stop, 0.0)
        drafter = await draft_service.server.start(ModelServiceOptions(DRAFT, tls=tls))
        parts.push_async_callback(drafter.stop, 0.0)
        yield verifier.address, drafter.address


def options(verifier: str, drafter: str, tls: ClientTls | None, start_timeout: float = LIMIT_S) -> OrchestratorOptions:
    return OrchestratorOptions(
        (verifier,), (drafter,), tls=OURS.server(), peer_tls=tls, start_timeout=start_timeout, plan=TURNS
    )


async def test_every_hop_is_encrypted() -> None:
    async with peers() as addresses:
        running = await orchestrator.server.start(options(*addresses, OURS.client(OURS.sign())))
        try:
            async with AsyncClient(running.address, tls=OURS.client()) as client:
                done = await drafted(
                    lambda: client.complete(PROMPT, max_tokens=60, ignore_eos=True, timeout=LIMIT_S), least=11
                )
        finally:
            await running.stop(0.0)
    assert list(done.tokens) == plain(SLOW_TARGET, PROMPT, 60)


async def test_certificates_made_as_the_page_says_serve_both_ends(tmp_path: Path) -> None:
    """docs/DEPLOY.md's commands: a server on this machine, and a client that has to show a certificate."""
    (recipe,) = (block for block in blocks_of(ROOT / "docs" / "DEPLOY.md") if block.text.startswith("openssl"))
    await asyncio.to_thread(subprocess.run, ["sh", "-ec", recipe.text], cwd=tmp_path, capture_output=True, check=True)
    ca, *pairs = ((tmp_path / name).read_bytes() for name in FILES)
    served, shown = ServerTls(pairs[0], pairs[1], client_ca=ca), ClientTls(ca, pairs[2], pairs[3])
    verifier = await verify_service.server.start(ModelServiceOptions(SLOW_TARGET, tls=served), patient=True)
    try:
        running = await orchestrator.server.start(
            OrchestratorOptions((verifier.address,), (), peer_tls=shown, tls=served)
        )
        try:
            async with AsyncClient(running.address, tls=shown) as client:
                assert (await client.complete(PROMPT, max_tokens=4, timeout=LIMIT_S)).tokens
        finally:
            await running.stop(0.0)
    finally:
        await verifier.stop(0.0)


async def test_a_peer_that_is_not_trusted_ends_the_start_at_once() -> None:
    async with peers() as (verifier, drafter):
        with pytest.raises(StartError, match="is not trusted: unable to get local issuer certificate"):
            await orchestrator.server.start(options(verifier, drafter, OTHERS.client()))


@pytest.mark.parametrize(
    ("tls", "hint"),
    [(None, "it may want TLS"), (OURS.client(OTHERS.sign()), "it may want a client's certificate that it trusts")],
    ids=["plaintext", "wrong certificate"],
)
async def test_a_peer_that_hangs_up_is_named(tls: ClientTls | None, hint: str) -> None:
    waits = limits(0.5)

    async def why(verifier: str, drafter: str) -> tuple[str, float]:
        limit = next(waits)
        with pytest.raises(StartError) as caught:
            await orchestrator.server.start(options(verifier, drafter, tls, start_timeout=limit))
        return str(caught.value), limit

    async with peers() as (verifier, drafter):
        told, limit = await asked(lambda: why(verifier, drafter), lambda answer: "does not answer" not in answer[0])
    each = (f"{address} closed the connection at once: {hint}" for address in (verifier, drafter))
    assert told == f"not ready within {limit:g} s: {'; '.join(each)}"
