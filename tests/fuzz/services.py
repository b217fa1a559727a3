"""Every service in one process, on a loop and a thread of its own, for calls that may be anything."""

from __future__ import annotations

import asyncio
import logging
import re
import threading
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from contextlib import AsyncExitStack, contextmanager
from typing import Any, TypeVar
from unittest.mock import patch

import grpc

import draft_service.server
import orchestrator.server
import verify_service.server
from deploy.cli.services.registry import RegistryServiceOptions, RunningRegistry
from deploy.cli.services.registry import start as start_registry
from orchestrator.chat.templates import RemoteTemplate, renderers
from orchestrator.options import OrchestratorOptions
from orchestrator.tenants import Access
from specwire.client import Client
from specwire.core.law.sampling import Rule
from specwire.registry.directory import Directory, Listing
from specwire.registry.options import NOWHERE, RegistryOptions
from specwire.rpc.channel import open_blocking_channel
from specwire.rpc.server_options import ModelServiceOptions
from tests.faults.streams import PROMPT, plain
from tests.ports import free_address

TARGET, CONTEXT, VOCABULARY = "scripted:7:vocab=64", 48, 64
DRAFT = "scripted:7:vocab=64:agree=0.7"
LIMIT_S = 120.0
BEAT_S = 0.005
# Of processor time, for a hostile chat template: many are tried.
RENDER_S = 0.3
# Seconds between two looks at the registry.
LOOK_S = 0.05
# What messages say, and no more.
TEMPLATE = "{% for message in messages %}{{ message.content }} {% endfor %}"
T = TypeVar("T")

# What no caller may bring about: our own failure, or that nothing happens at all.
OURS = (
    grpc.StatusCode.INTERNAL,
    grpc.StatusCode.UNKNOWN,
    grpc.StatusCode.UNIMPLEMENTED,
    grpc.StatusCode.UNAVAILABLE,
    grpc.StatusCode.DEADLINE_EXCEEDED,
)


# gRPC's own, where a status cannot be sent any more because the caller's connection has gone.
UNSENT_BY = "grpc._cython.cygrpc"
UNSENT = re.compile(
    r"ExecuteBatchError raised in core by servicer method \[/[\w./]+\]\n"
    r"Traceback \(most recent call last\):\n(  File .*\n(    .*\n)*)+"
    r"grpc\._cython\.cygrpc\.ExecuteBatchError: "
    r'Failed "execute_batch": \(<grpc\._cython\.cygrpc\.SendStatusFromServerOperation object at 0x[0-9a-f]+>,\)'
)


class Failures(logging.Handler):
    """Remembers what was logged as an error."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.seen: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        text = self.format(record)
        if not (record.name == UNSENT_BY and UNSENT.fullmatch(text)):
            self.seen.append(text)

    def take(self) -> list[str]:
        """What was logged since this was called last."""
        seen, self.seen = self.seen, []
        return seen


class Watch:
    """What the services' loop computes meanwhile, in seconds of processor time: a busy machine changes none of it.

    cpu: of the loop's thread, in all. turn: of the whole process, between two beats of the loop at most: so long a
    neighbour waits, also where another thread does not let the loop go on.
    """

    def __init__(self) -> None:
        self.cpu = self.turn = 0.0
        self._over = asyncio.Event()

    async def run(self) -> None:
        began, last = time.thread_time(), time.process_time()
        while not self._over.is_set():
            await asyncio.sleep(BEAT_S)
            now = time.process_time()
            self.turn, last = max(self.turn, now - last), now
        self.cpu = time.thread_time() - began

    def end(self) -> None:
        self._over.set()


class Services:
    """Verifier, drafter and orchestrator, which lets drafters dial in, at their addresses; `figures`: the verifier's.

    registration: where the orchestrator finds the others; NOWHERE, and it is told.
    """

    def __init__(self, registration: RegistryOptions) -> None:
        self._registration = registration
        self._looks = 0
        self._told_of: Directory | None = None  # the one that the registry service looks at
        self.failures = Failures()
        self.verifier = self.drafter = self.orchestrator = self.registry = self.http = self.figures = ""
        self.fingerprint = self.weights = ""
        self.sessions: list[str] = []
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="services", daemon=True)
        self._parts = AsyncExitStack()
        self._forks = renderers(RENDER_S)

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(LIMIT_S)

    def start(self, redis_url: str) -> None:
        self._thread.start()
        logging.getLogger().addHandler(self.failures)
        self._run(self._start(redis_url))
        with Client(self.orchestrator) as client:
            for length in (3, 12):
                self.sessions.append(client.complete(PROMPT, max_tokens=length, timeout=LIMIT_S).session_id)

    async def _start(self, redis_url: str) -> None:
        options = ModelServiceOptions(TARGET, context=CONTEXT, slots=8, metrics="127.0.0.1:0")
        registration = self._registration
        verifier = await verify_service.server.start(options, detach_grace=0.0, registration=registration)
        self._own(verifier.stop)
        drafter = await draft_service.server.start(ModelServiceOptions(DRAFT, context=CONTEXT), registration)
        self._own(drafter.stop)
        known = OrchestratorOptions(
            () if registration.url else (verifier.address,),
            () if registration.url else (drafter.address,),
            redis_url,
            registration=registration,
            accept_drafters=True,
            access=Access(rules=frozenset(Rule)),
            drafters_per_session=2,
            http="127.0.0.1:0",
            chat_template=TEMPLATE,
        )
        self._serving = serving = await orchestrator.server.start(known)
        self._own(serving.stop)
        self._parts.callback(self._forks.stop)
        self.verifier, self.drafter, self.orchestrator = verifier.address, drafter.address, serving.address
        self.http = str(serving.http)
        assert verifier.metrics is not None
        self.figures = verifier.metrics.url
        self.registry = (await self._registry()).address
        self.fingerprint = verifier.info.vocabulary_fingerprint
        self.weights = verifier.info.weights_fingerprint

    async def _registry(self) -> RunningRegistry:
        """What tells edges of it; where the services use none, of a Redis that does not answer."""
        running = await start_registry(RegistryServiceOptions(self._registration.url or f"redis://{free_address()}"))
        self._own(running.stop)
        self._told_of = running._servicer._directory
        return running

    def _own(self, stop: Callable[[float], Awaitable[None]]) -> None:
        self._parts.push_async_callback(stop, 0.0)

    def pardon(self) -> None:
        """Let in again whoever flooded: the next caller comes from the same host."""
        hub = self._serving._hub
        self._loop.call_soon_threadsafe(hub._barred.clear)

    def see_registry(self) -> None:
        """Until the orchestrator has looked at it as it is now."""
        self._run(self._seen_since(self._looks + 2))

    async def _seen_since(self, looks: int) -> None:
        while self._looks < looks:  # noqa: ASYNC110 # nothing tells of it
            await asyncio.sleep(LOOK_S / 5)

    @contextmanager
    def looking(self) -> Iterator[None]:
        """Have the orchestrator look at the registry often, and count its looks."""
        listing = Directory.listing

        async def counted(directory: Directory) -> Listing:
            try:
                return await listing(directory)
            finally:
                self._looks += directory is not self._told_of

        with patch.object(Directory, "listing", counted), patch("orchestrator.peers.discovery.LOOK_S", LOOK_S):
            yield

    @contextmanager
    def watched(self) -> Iterator[Watch]:
        """Figures are there behind it."""
        watch = Watch()
        running = asyncio.run_coroutine_threadsafe(watch.run(), self._loop)
        try:
            yield watch
        finally:
            self._loop.call_soon_threadsafe(watch.end)
            running.result(LIMIT_S)

    def render(self, source: str, messages: list[dict[str, Any]], more: dict[str, Any]) -> str:
        """By the chat template `source`. Raises InvalidParameter, TemplateInvalid."""
        return self._run(self._rendered(source, messages, more))

    async def _rendered(self, source: str, messages: list[dict[str, Any]], more: dict[str, Any]) -> str:
        template = RemoteTemplate(self._forks, source, {"bos_token": "<s>"})
        try:
            return await template.render(messages, True, more)
        finally:
            template.close()

    def stop(self) -> None:
        self._run(self._parts.aclose())
        logging.getLogger().removeHandler(self.failures)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(LIMIT_S)
        self._loop.close()

    def address_of(self, method: str) -> str:
        """Where this method, SERVICE.METHOD, is served."""
        at = {"VerifyService": self.verifier, "DraftService": self.drafter, "RegistryService": self.registry}
        return at.get(method.partition(".")[0], self.orchestrator)

    def channel(self, address: str) -> grpc.Channel:
        return open_blocking_channel(address)

    def check(self) -> None:
        """They serve as ever: the next session's text is the target's, and nothing was logged as our own failure."""
        assert self.failures.take() == []
        self.sessions = [self.complete(), *self.sessions[:1]]

    def complete(self) -> str:
        """A session that must write the target's text; its id."""
        with Client(self.orchestrator) as client:
            done = client.complete(PROMPT, max_tokens=20, ignore_eos=True, timeout=LIMIT_S)
        assert list(done.tokens) == plain(TARGET, 20, PROMPT)
        return done.session_id


@contextmanager
def services(redis_url: str = "memory:", registered: bool = False) -> Iterator[Services]:
    """registered: they find each other in that Redis, too."""
    running = Services(RegistryOptions(redis_url) if registered else NOWHERE)
    with running.looking():
        running.start(redis_url)
        try:
            yield running
        finally:
            running.stop()
