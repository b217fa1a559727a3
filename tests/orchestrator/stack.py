"""A whole stack in one process: scripted models, real gRPC between the parts, and the text that they must write."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import AsyncExitStack, aclosing, asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self, TypeVar
from unittest.mock import patch

import draft_service.server
import verify_service.server
from draft_service.server import RunningDrafter
from orchestrator import server
from orchestrator.options import OrchestratorOptions
from orchestrator.tenants import Access
from specwire.client import AsyncClient, Chunk, Completion, Finished, SpecwireError, Started
from specwire.core.law.acceptance import choose
from specwire.core.law.sampling import Sampling
from specwire.core.messages import FinishReason
from specwire.lm import Feed, load_model
from specwire.lm.scripted import Metronome
from specwire.registry.options import NOWHERE, RegistryOptions
from specwire.rpc.server_options import ModelServiceOptions
from tests.orchestrator.redis_for_tests import RedisServer
from tests.ports import free_address
from tests.wait import LIMIT_S, asked, until
from verify_service.engine.messages import QueuePatience
from verify_service.server import PATIENCE, RunningVerifier

TARGET = "scripted:7:vocab=64"
DRAFT = "scripted:7:vocab=64:agree=0.7"
# Slow enough that drafting pays and that a test can interfere half-way: an emulation, not a benchmark.
SLOW_TARGET = f"{TARGET}:delay_ms=8"
PROMPT = (5, 6, 7)
# Seconds: a session that nobody reads outlives every wait of a test.
UNREAD_S = 10 * LIMIT_S
SALT = Access(cache_salt=b"0123456789abcdef")
# Of a stack in which draft tokens are tested once the drafter is there, whoever is quick: they take turns, and the
# verifier waits for its drafter. That it is there before a text is over, see `drafted`.
TURNS = "lockstep:3"
Told = TypeVar("Told", bound=Completion | list[Completion])


def plain(model: str, prompt: Sequence[int], length: int, sampling: Sampling | None = None) -> list[int]:
    """`length` tokens of plain decoding by `model`, every one from a forward of the whole text."""
    lm, text = load_model(model, slots=1), list(prompt)
    for _ in range(length):
        lm.rollback(0, 0)
        logits = lm.forward([Feed(0, 0, text, 1)])[0].numpy()
        text.append(choose(logits, len(text), sampling or Sampling()))
    return text[len(prompt) :]


async def drafted(ask: Callable[[], Awaitable[Told]], least: int = 1) -> Told:
    """What `ask` answers, once at least so many tokens of drafters were accepted in it.

    It is asked again until then: on a busy machine a text may be over before its drafter has been opened.
    """

    def accepted(told: Told) -> int:
        texts = told if isinstance(told, list) else [told]
        return sum(drafter.accepted for each in texts for drafter in each.stats.drafters)

    return await asked(ask, lambda told: accepted(told) >= least)


# Of forwards: as many as there may be.
ALL = 1 << 20


@contextmanager
def held(forwards: int) -> Iterator[Callable[[int], None]]:
    """Slow scripted models of this process end so many forwards; the function that is given lets go more.

    So a text is in the middle for as long as a test needs it to be, and not for so many milliseconds.
    """
    let_go, wait_until = threading.Semaphore(forwards), Metronome.wait_until

    def wait(metronome: Metronome, due: float) -> None:
        let_go.acquire(timeout=LIMIT_S)
        wait_until(metronome, due)

    with patch.object(Metronome, "wait_until", wait):
        try:
            yield let_go.release
        finally:
            let_go.release(ALL)


class Reading:
    """A stream that is read in a task of its own. `error`: what it ended with in place of `finished`."""

    def __init__(self, client: AsyncClient, prompt: Sequence[int] = PROMPT, **options: Any) -> None:
        self.session_id = ""
        self.tokens: list[int] = []
        self.finished: Finished | None = None
        self.error: SpecwireError | None = None
        self._task = asyncio.create_task(self._read(client, tuple(prompt), options))

    async def _read(self, client: AsyncClient, prompt: tuple[int, ...], options: dict[str, Any]) -> None:
        try:
            async with aclosing(client.generate(prompt, **options)) as events:
                async for event in events:
                    match event:
                        case Started():
                            self.session_id = event.session_id
                        case Chunk():
                            assert event.position == len(prompt) + len(self.tokens)
                            self.tokens += event.tokens
                        case Finished():
                            self.finished = event
        except SpecwireError as error:
            self.error = error

    @property
    def reason(self) -> FinishReason | None:
        return None if self.finished is None else self.finished.reason

    async def until(self, length: int) -> None:
        """So many tokens are here, and it goes on."""
        await until(lambda: len(self.tokens) >= length or self._task.done())
        assert (self.finished, self.error) == (None, None)

    async def rest(self) -> Self:
        """Read to its end."""
        async with asyncio.timeout(LIMIT_S):
            await self._task
        return self

    async def leave(self) -> None:
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)


class Services:
    """Started in this process; they end with `owned`. What is stopped may be started again at its address.

    redis: where they are registered, if anywhere.
    """

    def __init__(self, owned: AsyncExitStack, redis: RedisServer | None = None) -> None:
        self.owned = owned
        self.redis = redis

    def registry(self) -> RegistryOptions:
        return NOWHERE if self.redis is None else RegistryOptions(self.redis.url)

    async def verifier(
        self, model: str = SLOW_TARGET, listen: str = "", patient: bool = False, **options: Any
    ) -> RunningVerifier:
        served = ModelServiceOptions(model, listen or free_address(), **options)
        running = await verify_service.server.start(served, patient=patient, registration=self.registry())
        self.owned.push_async_callback(running.stop, 0.0)
        return running

    async def drafter(self, model: str = DRAFT, **options: Any) -> RunningDrafter:
        running = await draft_service.server.start(ModelServiceOptions(model, **options), self.registry())
        self.owned.push_async_callback(running.stop, 0.0)
        return running

    async def orchestrator(
        self, verifiers: Sequence[str] = (), drafters: Sequence[str] = (), **options: Any
    ) -> server.RunningOrchestrator:
        """All of them have one salt: a tenant's sessions share verifiers' caches."""
        more = {"registration": self.registry(), "access": SALT, **options}
        running = await server.start(OrchestratorOptions(tuple(verifiers), tuple(drafters), **more))
        self.owned.push_async_callback(running.stop, 0.0)
        return running

    async def client(self, running: server.RunningOrchestrator, **more: Any) -> AsyncClient:
        return await self.owned.enter_async_context(AsyncClient(running.address, **more))


@dataclass
class Stack:
    client: AsyncClient
    orchestrator: server.RunningOrchestrator
    verifier: RunningVerifier
    drafters: list[RunningDrafter]
    services: Services

    async def another(self, *drafters: str, **options: Any) -> server.RunningOrchestrator:
        """One more orchestrator, of the same log and verifier."""
        more = {"redis_url": self.orchestrator.orchestrator.options.redis_url, "access": Access(), **options}
        return await self.services.orchestrator([self.verifier.address], drafters, **more)

    async def verify_again(self, model: str = SLOW_TARGET, **options: Any) -> None:
        """Stop the verifier, and have another one at its address."""
        await self.verifier.stop(0.0)
        self.verifier = await self.services.verifier(model, self.verifier.address, **options)


@asynccontextmanager
async def stack(
    target: str = TARGET,
    *drafts: str,
    slots: int = 16,
    patience: QueuePatience = PATIENCE,
    context: int | None = None,
    patient: bool = False,
    dtype: str = "float32",
    deterministic: bool = False,
    heads: str = "",
    usage_log: Path | None = None,
    **options: Any,
) -> AsyncIterator[Stack]:
    """Of the verifier: slots, patience, context, patient, dtype, deterministic, heads, usage_log. options: of the
    orchestrator.
    """
    async with AsyncExitStack() as parts:
        served = ModelServiceOptions(
            target, free_address(), slots=slots, context=context, dtype=dtype, deterministic=deterministic, heads=heads
        )
        verifier = await verify_service.server.start(served, patient=patient, patience=patience, usage_log=usage_log)
        parts.push_async_callback(verifier.stop, 0.0)
        services = Services(parts)
        drafters = [await services.drafter(draft, context=context) for draft in drafts]
        peers = (verifier.address,), tuple(each.address for each in drafters)
        known = {"listen": free_address(), "detach_grace": UNREAD_S, "access": Access(), **options}
        orchestrator = await services.orchestrator(*peers, **known)
        client = await services.client(orchestrator)
        yield Stack(client, orchestrator, verifier, drafters, services)
