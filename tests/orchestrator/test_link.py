"""Links: they outlive what their listeners do, ask for a tokenizer once, speak TLS, and reach older peers."""

from __future__ import annotations

import asyncio
import itertools
import subprocess
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc
import grpc.aio
import pytest

import orchestrator.server
import verify_service.server
from bench.harness.certificates import Authority
from orchestrator.options import OrchestratorOptions
from orchestrator.peers.models import Tokenizers
from orchestrator.peers.peer import DrafterLink, VerifierLink, VerifierPeer
from orchestrator.pool import StartError
from specwire.client import AsyncClient, Completion, SpecwireError
from specwire.rpc.link import GAUGED, Link, _FirstStatus
from specwire.rpc.server_options import ModelServiceOptions
from specwire.rpc.tls import ClientTls, ServerTls
from specwire.v1 import common_pb2, verify_pb2, verify_pb2_grpc
from tests.documents import ROOT, blocks_of
from tests.orchestrator.stack import PROMPT, SLOW_TARGET, TARGET, TURNS, Services, drafted, plain, stack
from tests.ports import free_address
from tests.rpc.older_wire import older_wire
from tests.wait import asked, limits, raised, until

Info = common_pb2.GetModelInfoResponse
Request = common_pb2.GetModelInfoRequest
DoneCallback = Callable[[Any], None]


def ask_by(link: Link[Any, Any], ask: Callable[[Any, Request], Awaitable[Info]]) -> None:
    """Have the link ask its peer for its description so; `ask` is given the stub."""
    make = link._stub
    link._stub = lambda channel: SimpleNamespace(
        Connect=make(channel).Connect, GetModelInfo=partial(ask, make(channel))
    )


class Overwritten(grpc.aio.Call):
    """Ends with the peer's status, and has another one once a write has failed."""

    def __init__(self) -> None:
        self.now, self._ended = (grpc.StatusCode.UNAUTHENTICATED, "not known here"), list[DoneCallback]()

    def add_done_callback(self, callback: DoneCallback) -> None:
        self._ended.append(callback)

    def end(self) -> None:
        for callback in self._ended:
            callback(self)

    async def code(self) -> grpc.StatusCode:
        return self.now[0]

    async def details(self) -> str:
        return self.now[1]

    async def initial_metadata(self) -> grpc.aio.Metadata:
        return grpc.aio.Metadata()

    async def trailing_metadata(self) -> grpc.aio.Metadata:
        return grpc.aio.Metadata()

    async def wait_for_connection(self) -> None: ...
    def cancelled(self) -> bool:
        return False

    def done(self) -> bool:
        return True

    def time_remaining(self) -> float | None:
        return None

    def cancel(self) -> bool:
        return False


async def test_the_status_that_is_told_first_is_said() -> None:
    call = Overwritten()
    ending = _FirstStatus(call)
    call.end()
    call.now = grpc.StatusCode.INTERNAL, "Internal error from Core"
    call.end()
    assert ending.told == "UNAUTHENTICATED: not known here"


async def test_a_link_ends_though_grpc_keeps_the_cancellation_to_itself(
    dead_address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As it does where a stream ends while it begins."""
    begun = asyncio.Event()

    async def connect_once(*_: object) -> tuple[bool, str]:
        begun.set()
        with suppress(asyncio.CancelledError):
            await asyncio.Event().wait()
        return True, "the peer closed the stream"

    monkeypatch.setattr(Link, "_connect_once", connect_once)
    link: VerifierLink = Link(dead_address, verify_pb2_grpc.VerifyServiceStub)
    running = asyncio.create_task(link.run(SimpleNamespace(on_unreachable=lambda: None)))
    await begun.wait()
    running.cancel()
    async with asyncio.timeout(60.0):
        await raised(asyncio.CancelledError, running)


async def test_a_listener_that_fails_costs_a_connection_not_the_link(monkeypatch: pytest.MonkeyPatch) -> None:
    async with stack(SLOW_TARGET) as running:
        peer = running.orchestrator.orchestrator.pool.verifiers[0]
        failures = iter([RuntimeError("a bug")])

        def fail_once(message: verify_pb2.ConnectVerifyResponse) -> None:
            for failure in failures:
                raise failure
            VerifierPeer.on_message(peer, message)

        monkeypatch.setattr(peer, "on_message", fail_once)
        async with asyncio.timeout(60.0):
            done = await running.client.complete(PROMPT, max_tokens=20, ignore_eos=True)
    assert list(done.tokens) == plain(SLOW_TARGET, PROMPT, 20)


async def test_a_known_tokenizer_is_not_sent_again_and_a_link_that_is_back_is_told(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with stack(SLOW_TARGET) as running:
        peer = running.orchestrator.orchestrator.pool.verifiers[0]
        assert peer.info is not None
        first, asked = peer.info, list[str]()

        def ask(stub: Any, request: Request) -> Awaitable[Info]:
            asked.append(request.known_tokenizer_hash)
            answer: Awaitable[Info] = stub.GetModelInfo(request)
            return answer

        ask_by(peer.link, ask)
        await running.verify_again()
        await until(lambda: peer.info is not first)
    assert set(asked) == {first.tokenizer_hash}
    told = [record.getMessage() for record in caplog.records if record.name == "specwire.rpc.link"]
    assert f"link to {running.verifier.address} is there again" in told[1:]
    assert peer.info is not first
    assert peer.info.tokenizer_hash == first.tokenizer_hash


async def test_the_round_trip_is_measured_while_the_link_is_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """A line that becomes longer is believed once all measurements say so, one that becomes shorter at once."""
    monkeypatch.setattr("specwire.rpc.link.GAUGE_EVERY", 0.01)
    async with stack(SLOW_TARGET) as running:
        orchestrator = running.orchestrator.orchestrator
        link = orchestrator.pool.verifiers[0].link
        direct, near_us = link._stub, link.round_trip_us
        measured = asyncio.Semaphore(0)

        async def ask_from_afar(stub: Any, request: Request) -> Info:
            measured.release()
            await asyncio.sleep(0.2)
            info: Info = await stub.GetModelInfo(request)
            return info

        ask_by(link, ask_from_afar)
        async with asyncio.timeout(60.0):
            for _ in range(GAUGED + 2):
                await measured.acquire()
            assert link.round_trip_us >= 200_000 > near_us
            link._stub = direct
            await until(lambda: link.round_trip_us < 200_000)


class Deaf:
    """A listener that no link should reach."""

    def on_unreachable(self) -> None:
        pass


@pytest.mark.parametrize("turns", range(8))
async def test_a_link_ends_when_it_is_cancelled_whatever_happens_at_the_same_moment(turns: int) -> None:
    """The answer fails, and some turns of the event loop later, before the link has heard of it, comes the end."""
    asked = asyncio.Event()
    answer: asyncio.Future[Info] = asyncio.get_running_loop().create_future()

    async def describe(*_: object) -> Info:
        asked.set()
        return await answer

    link: DrafterLink = Link("127.0.0.1:1", lambda _: SimpleNamespace(GetModelInfo=describe))
    running = asyncio.create_task(link.run(Deaf()))  # type: ignore[arg-type] # nor to being up
    await asked.wait()
    answer.set_exception(TimeoutError())
    for _ in range(turns):
        await asyncio.sleep(0)
    running.cancel()
    done, _ = await asyncio.wait({running}, timeout=60)
    assert done
    assert running.cancelled()


class Revoking(verify_pb2_grpc.VerifyServiceServicer):
    """Ends each stream as one whose key is revoked, while more and more is said on it."""

    async def GetModelInfo(self, request: Request, context: grpc.aio.ServicerContext[object, object]) -> Info:
        return Info()

    async def Connect(
        self,
        requests: AsyncIterator[verify_pb2.ConnectVerifyRequest],
        context: grpc.aio.ServicerContext[object, object],
    ) -> AsyncIterator[verify_pb2.ConnectVerifyResponse]:
        for _ in range(5):
            await anext(requests)
            yield verify_pb2.ConnectVerifyResponse()
        await context.abort(grpc.StatusCode.UNAUTHENTICATED, "this token is not known here")


class Talkative:
    """Says something on a link, whenever it is up."""

    def __init__(self, link: VerifierLink) -> None:
        self._link = link
        self._talks: set[asyncio.Task[None]] = set()

    def on_up(self, info: Info) -> None:
        self._talks.add(asyncio.create_task(self._talk()))

    async def _talk(self) -> None:
        while self._link.up:
            self._link.send(verify_pb2.ConnectVerifyRequest())
            await asyncio.sleep(0)

    def on_message(self, message: verify_pb2.ConnectVerifyResponse) -> None: ...
    def on_down(self) -> None: ...
    def on_unreachable(self) -> None: ...


async def test_a_link_that_its_peer_ends_says_why_though_something_is_being_sent(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of a hundred ends some ten met a write, whose failure gRPC puts in the place of the peer's status.

    Where a busy machine has the write fail before that status is read at all, nobody knows it: INTERNAL is said.
    """
    # What the error says in the end is not asked for.
    monkeypatch.setattr("specwire.rpc.link.describe", lambda _error: "as overwritten")
    server = grpc.aio.server()
    verify_pb2_grpc.add_VerifyServiceServicer_to_server(Revoking(), server)
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    link: VerifierLink = Link(address, verify_pb2_grpc.VerifyServiceStub)
    await server.start()
    try:
        ends = [await link._connect_once(Talkative(link)) for _ in range(100)]
    finally:
        await server.stop(0)
    told = Counter(ends)
    assert told.keys() <= {
        (True, "UNAUTHENTICATED: this token is not known here"),
        (True, "INTERNAL: Internal error from Core"),
    }
    assert told[True, "UNAUTHENTICATED: this token is not known here"] > 0


async def test_a_verifier_is_described_by_the_process_that_its_link_reaches() -> None:
    """Another one may come to its address between the first answer and the stream: with other EOS ids, say."""
    first = await verify_service.server.start(ModelServiceOptions(TARGET, free_address()))
    link: VerifierLink = Link(first.address, verify_pb2_grpc.VerifyServiceStub, tokenizers=Tokenizers())
    later, asked = [first], itertools.count(1)

    async def ask(stub: Any, request: Request) -> Info:
        info: Info = await stub.GetModelInfo(request)
        if next(asked) == 2:  # the last time that it is asked before the link is up
            await first.stop()
            options = ModelServiceOptions(f"{TARGET}:end=9", listen=first.address)
            later.append(await verify_service.server.start(options))
        return info

    ask_by(link, ask)
    peer = VerifierPeer(link, lambda: None, lambda _: None)
    running = asyncio.create_task(link.run(peer))
    try:
        await until(lambda: peer.up and peer.info is not None and list(peer.info.eos_ids) == [9])
    finally:
        running.cancel()
        await asyncio.wait({running})
        for each in later:
            await each.stop()


# ----------------------------------------------------------------------------------------------------------------------
# An orchestrator among peers that speak TLS, and one that does not fit in.

OURS, OTHERS = Authority(), Authority("another authority")
LIMIT_S = 120.0
FILES = ("ca.pem", "server.pem", "server.key", "edge.pem", "edge.key")


@asynccontextmanager
async def peers() -> AsyncIterator[tuple[str, str]]:
    """The addresses of a verifier and a drafter that want certificates and show theirs."""
    tls = OURS.server(client_ca=OURS)
    async with AsyncExitStack() as parts:
        services = Services(parts)
        verifier, drafter = await services.verifier(patient=True, tls=tls), await services.drafter(tls=tls)
        yield verifier.address, drafter.address


def options(verifier: str, drafter: str, tls: ClientTls | None, start_timeout: float = LIMIT_S) -> OrchestratorOptions:
    return OrchestratorOptions(
        (verifier,), (drafter,), tls=OURS.server(), peer_tls=tls, start_timeout=start_timeout, plan=TURNS
    )


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
        caught = await raised(
            StartError, orchestrator.server.start(options(verifier, drafter, tls, start_timeout=limit))
        )
        return str(caught), limit

    async with peers() as (verifier, drafter):
        told, limit = await asked(lambda: why(verifier, drafter), lambda answer: "does not answer" not in answer[0])
    each = (f"{address} closed the connection at once: {hint}" for address in (verifier, drafter))
    assert told == f"not ready within {limit:g} s: {'; '.join(each)}"


# ----------------------------------------------------------------------------------------------------------------------
# Peers of an older release beside those of today: the text is the target's, and drafting still takes part in it.

VERIFIER, DRAFTER, CLIENT = "a verifier", "a drafter", "a client"


@pytest.mark.parametrize("older", [(VERIFIER,), (DRAFTER,), (CLIENT,), (VERIFIER, DRAFTER, CLIENT)], ids=" and ".join)
async def test_one_side_is_older(older: tuple[str, ...]) -> None:
    """An edge (orchestrator, drafter, client) is older than its verifier in the last case, as it speaks."""
    wires = {}
    async with AsyncExitStack() as parts:

        async def reached(who: str, address: str) -> str:
            if who not in older:
                return address
            its, wire = await parts.enter_async_context(older_wire(address))
            wires[who] = wire
            return its

        services = Services(parts)
        verifier, drafter = await services.verifier(patient=True, slots=4), await services.drafter()
        peers = [await reached(VERIFIER, verifier.address)], [await reached(DRAFTER, drafter.address)]
        running = await services.orchestrator(*peers, plan=TURNS)
        client = AsyncClient(await reached(CLIENT, running.address))
        await parts.enter_async_context(client)

        async def text() -> Completion:
            return await client.complete(list(PROMPT), max_tokens=48)

        assert list((await drafted(text)).tokens) == plain(TARGET, PROMPT, 48)
        if CLIENT in older:
            await raised(SpecwireError, client.score_text(list(PROMPT), [[[1, 2]]]), "UNIMPLEMENTED")
    assert all(wire.passed > 0 for wire in wires.values())
    # A drafter that is asked for chains is told nothing new.
    assert all(wire.dropped > 0 for who, wire in wires.items() if who != DRAFTER)
