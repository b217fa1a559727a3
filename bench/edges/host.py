"""Many edges in one process: python -m bench.edges.host, told what to do in lines of JSON (`bench.harness.child`).

An edge is an orchestrator with a log in memory and a client of its own, over sockets. Its sessions begin anew as soon
as they have ended; a text must be what its prompt's first text was.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from contextlib import suppress
from typing import Any

from orchestrator import server
from orchestrator.options import OrchestratorOptions
from orchestrator.server import RunningOrchestrator
from specwire.client import AsyncClient, Chunk, Finished, SpecwireError
from specwire.core.messages import FinishReason
from specwire.rpc.tls import ClientTls

# Seconds: a session waits so long for a verifier that is being started anew.
VERIFIER_WAIT_S, START_TIMEOUT_S, LIMIT_S = 120.0, 300.0, 3600.0
PROMPTS = tuple(tuple(5 + (7 * index + at) % 50 for at in range(8)) for index in range(4))
# Of one that floods: its texts are left behind so many tokens.
LEFT_BEHIND = 8


class Watch:
    """What all edges of this process see. `texts`: the first text of each prompt, by length."""

    def __init__(self) -> None:
        self.texts: dict[tuple[int, int], tuple[int, ...]] = {}
        self.ended = self.wrong = 0
        self.failures: list[str] = []


class PlayedSession:
    """A place at an edge. `last_ns`: when its newest token came; `gap_ns`: the longest pause since it was read."""

    def __init__(self, prompt: int) -> None:
        self.prompt = prompt
        self.tokens = 0
        self.gap_ns = 0
        self.last_ns = time.monotonic_ns()

    def got(self, tokens: int) -> None:
        now_ns = time.monotonic_ns()
        self.gap_ns = max(self.gap_ns, now_ns - self.last_ns)
        self.last_ns = now_ns
        self.tokens += tokens


class Edge:
    """An orchestrator, its client, and sessions that begin again and again."""

    def __init__(self, running: RunningOrchestrator, watch: Watch) -> None:
        self._running = running
        self._watch = watch
        self._client = AsyncClient(running.address)
        self._tasks: list[asyncio.Task[None]] = []
        self.sessions: list[PlayedSession] = []

    async def load(self, sessions: int, tokens: int, floods: bool) -> None:
        """Have so many sessions from now on, in place of those before. floods: each is left soon, and another begun."""
        await self._unload()
        self.sessions = [PlayedSession(index % len(PROMPTS)) for index in range(sessions)]
        self._tasks = [asyncio.create_task(self._play(each, tokens, floods)) for each in self.sessions]

    async def stop(self) -> None:
        await self._unload()
        await self._client.close()
        await self._running.stop(0.0)

    async def _unload(self) -> None:
        for task in self._tasks:
            task.cancel()
        for task in self._tasks:
            with suppress(asyncio.CancelledError):
                await task
        self._tasks = []

    async def _play(self, session: PlayedSession, tokens: int, floods: bool) -> None:
        while True:
            try:
                await self._text(session, tokens, LEFT_BEHIND if floods else tokens)
            except SpecwireError as error:
                if not floods:  # who floods is refused some of it
                    self._watch.failures.append(str(error))
                await asyncio.sleep(0.1)

    async def _text(self, session: PlayedSession, tokens: int, least: int) -> None:
        """Read a text, or its begin."""
        text: list[int] = []
        events = self._client.generate(list(PROMPTS[session.prompt]), max_tokens=tokens, ngram=False, timeout=LIMIT_S)
        try:
            async for event in events:
                if isinstance(event, Chunk):
                    session.got(len(event.tokens))
                    text += event.tokens
                    if least < tokens and len(text) >= least:
                        return
                elif isinstance(event, Finished):
                    known = self._watch.texts.setdefault((session.prompt, tokens), tuple(text))
                    self._watch.ended += 1
                    self._watch.wrong += known != tuple(text) or event.reason is not FinishReason.LENGTH
        finally:
            await events.aclose()


async def started(told: dict[str, Any], watch: Watch) -> list[Edge]:
    """told: verifiers, and of each edge the token that it shows; ca: an authority in PEM, for TLS."""
    tls = ClientTls(told["ca"].encode()) if told.get("ca") else None
    edges = []
    for token in told["tokens"]:
        options = OrchestratorOptions(
            tuple(told["verifiers"]),
            plan="off",
            peer_token=token,
            peer_tls=tls,
            verifier_wait=VERIFIER_WAIT_S,
            start_timeout=START_TIMEOUT_S,
            retention=1.0,
        )
        edges.append(Edge(await server.start(options), watch))
    return edges


def figures(edges: list[Edge], watch: Watch, since_ns: int) -> dict[str, object]:
    """Since the last time, by edge: tokens, and the longest pause of a session, the one it may be in included.

    silent: sessions without a token since `since_ns`.
    """
    now_ns = time.monotonic_ns()
    all_of_them = [session for edge in edges for session in edge.sessions]
    told = {
        "tokens": [sum(session.tokens for session in edge.sessions) for edge in edges],
        "pause_s": [
            max((max(one.gap_ns, now_ns - one.last_ns) / 1e9 for one in edge.sessions), default=0.0) for edge in edges
        ],
        "silent": sum(session.last_ns < since_ns for session in all_of_them),
        "ended": watch.ended,
        "wrong": watch.wrong,
        "failures": watch.failures[:3],
        "failed": len(watch.failures),
    }
    for session in all_of_them:
        session.tokens = session.gap_ns = 0
    return told


async def work() -> None:
    """Until the input ends."""
    watch, edges = Watch(), list[Edge]()
    loop = asyncio.get_running_loop()
    try:
        while line := await loop.run_in_executor(None, sys.stdin.readline):
            told = json.loads(line)
            try:
                answer = await _done(told, edges, watch)
            except Exception as error:  # whatever it is, who asked must hear of it
                answer = {"error": f"{type(error).__name__}: {error}"}
            print(json.dumps(answer), flush=True)
    finally:
        await asyncio.gather(*(edge.stop() for edge in edges))


async def _done(told: dict[str, Any], edges: list[Edge], watch: Watch) -> dict[str, object]:
    match told["do"]:
        case "start":
            edges += await started(told, watch)
        case "load":
            each = zip(edges, told["sessions"], told["floods"], strict=True)
            await asyncio.gather(*(edge.load(sessions, told["tokens"], floods) for edge, sessions, floods in each))
        case "read":
            return figures(edges, watch, told["since_ns"])
    return {"done": told["do"]}


if __name__ == "__main__":
    asyncio.run(work())
