"""A neighbour of the soak's sessions, who asks for what must hurt nobody: what one request did to all others once.

Large, at the ends of ranges, at a dead end, left at once. What comes of it is counted; that the sessions beside it are
as ever is what the soak judges anyway, and a service that fails writes of it.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from itertools import count
from pathlib import Path
from random import Random
from typing import Any

import grpc
import grpc.aio

from bench.harness.services import ServiceProcess
from bench.soak.monkey import within
from bench.soak.reader import PATIENCE_S
from bench.soak.rig import GREEDY, KEPT_BYTES, OTHER
from specwire.client import AsyncClient, SpecwireError
from specwire.rpc.channel import open_channel
from specwire.rpc.keys import show
from specwire.v1 import common_pb2, generation_pb2_grpc
from specwire.v1 import generation_pb2 as pb

# Mean seconds between two requests, how long one may take, and after how long some are left.
EVERY_S, LIMIT_S, LEFT_S = 2.0, 60.0, 0.05
PROMPT = (5, 6, 7)
NOTE_BYTES, PARTS, NUMBERS = 1 << 20, 60_000, 1_000_000
MOST_32, MOST_64 = (1 << 32) - 1, (1 << 64) - 1
Stub = generation_pb2_grpc.GenerationServiceStub
Asked = Callable[[Stub], AsyncIterator[Any]]


def _asked(length: int = 1, sampling: common_pb2.Sampling | None = None, **more: Any) -> pb.GenerateRequest:
    more = more if "chat" in more else {"tokens": pb.TokenIds(ids=PROMPT), **more}
    return pb.GenerateRequest(
        stopping=common_pb2.Stopping(max_tokens=length), sampling=sampling or common_pb2.Sampling(), **more
    )


async def dead_end(stub: Stub) -> AsyncIterator[Any]:
    """A text that a constraint lets neither go on nor end, with its log-probabilities."""
    asked = _asked(50, common_pb2.Sampling(logprobs=0, choices=common_pb2.Choices(texts=["red"])))
    asked.stopping.min_tokens = 50
    async for each in stub.Generate(asked, timeout=LIMIT_S):
        yield each


async def ends_of_ranges(stub: Stub) -> AsyncIterator[Any]:
    sampling = common_pb2.Sampling(temperature=3e38, top_k=MOST_32, top_p=1.0, seed=MOST_64, repetition_penalty=3e38)
    async for each in stub.Generate(_asked(MOST_32, sampling, priority=-(1 << 31)), timeout=LIMIT_S):
        yield each


async def many_parts(stub: Stub) -> AsyncIterator[Any]:
    async for each in stub.Generate(_asked(chat=pb.Chat(messages=[pb.ChatMessage()] * PARTS)), timeout=LIMIT_S):
        yield each


async def many_numbers(stub: Stub) -> AsyncIterator[Any]:
    async for each in stub.Generate(_asked(tokens=pb.TokenIds(ids=[5] * NUMBERS)), timeout=LIMIT_S):
        yield each


async def long_note(stub: Stub) -> AsyncIterator[Any]:
    """It is written, read, gone on behind, and deleted."""
    session_id = ""
    async for each in stub.Generate(_asked(note='"' * NOTE_BYTES), timeout=LIMIT_S):
        session_id = each.started.session_id or session_id
        yield each
    yield await stub.GetSession(pb.GetSessionRequest(session_id=session_id), timeout=LIMIT_S)
    async for each in stub.Generate(_asked(parent=session_id), timeout=LIMIT_S):
        yield each
    yield await stub.DeleteSession(pb.DeleteSessionRequest(session_id=session_id), timeout=LIMIT_S)


async def left_scores(stub: Stub) -> AsyncIterator[Any]:
    text = pb.TextPart(tokens=pb.TokenIds(ids=PROMPT * 20))
    asked = pb.ScoreTextRequest(prefix=text, continuations=[pb.ScoredText(parts=[text])] * 8)
    yield await stub.ScoreText(asked, timeout=LEFT_S)


KINDS: Sequence[Asked] = (dead_end, ends_of_ranges, many_parts, many_numbers, long_note, left_scores)


class Neighbour:
    """`answers`: by kind and status."""

    def __init__(self, addresses: Sequence[str], seed: int) -> None:
        self.answers: Counter[str] = Counter()
        self._addresses = addresses
        self._random = Random(seed)

    @property
    def kinds(self) -> int:
        """Of requests that were answered, whatever with."""
        return len({name.partition(" ")[0] for name in self.answers})

    async def run(self, until: asyncio.Event) -> None:
        while not until.is_set():
            await self.ask(self._random.choice(KINDS), self._random.choice(self._addresses))
            await within(until, self._random.uniform(0.0, 2 * EVERY_S))

    async def ask(self, kind: Asked, address: str) -> None:
        async with open_channel(address) as channel:
            self.answers[f"{kind.__name__} {await _status(kind(Stub(channel)))}"] += 1


async def _status(answers: AsyncIterator[Any]) -> str:
    try:
        async for _ in answers:
            pass
    except grpc.aio.AioRpcError as error:
        return str(error.code().name)
    return "OK"


# ----------------------------------------------------------------------------------------------------------------------
# Beside the soak an orchestrator with its log in a file: a tenant would fill it, and the file is cut now and then.
#
# What a tenant may have kept is bounded, and no room of another's, who is served as ever. A log that was cut within its
# head is said at start and kept aside, and a new one is begun.

FILLED_EVERY_S, FILED_LIMIT_S = 4.0, 120.0
LENGTH = 4
# Of what a tenant may have kept it asks for twice as much; the file has pages that are not full, and a journal.
FILED_NOTE_BYTES, NOTES = 200_000, 20
MOST_FILE_BYTES = 4 * KEPT_BYTES
# A session log begins with so many bytes.
HEAD_BYTES = 100
KEPT_ASIDE = "it is kept as"


class FiledService:
    """`answers`: by who asked and status; "cut": how often the log was. `wrong`: what should not have been."""

    def __init__(self, service: ServiceProcess, log: Path, seed: int) -> None:
        self.answers: Counter[str] = Counter()
        self.wrong: list[str] = []
        self._service = service
        self._log = log
        self._random = Random(seed)

    async def run(self, until: asyncio.Event) -> None:
        for number in count():
            await self._fill()
            if number % 2 == 0:
                await self._cut()
                await self._ask_as_other()
            if await within(until, self._random.uniform(0.0, 2 * FILLED_EVERY_S)):
                return

    async def _fill(self) -> None:
        async with open_channel(self._service.address) as channel:
            stub = generation_pb2_grpc.GenerationServiceStub(channel)
            for _ in range(NOTES):
                self.answers[f"greedy {await self._note(stub)}"] += 1
        await self._ask_as_other()
        kept = sum(each.stat().st_size for each in self._log.parent.glob("log*") if "damaged" not in each.name)
        if kept > MOST_FILE_BYTES:
            self.wrong.append(f"{self._log}: {kept} bytes, of which a tenant may have had {KEPT_BYTES}")

    async def _note(self, stub: generation_pb2_grpc.GenerationServiceStub) -> str:
        asked = pb.GenerateRequest(
            tokens=pb.TokenIds(ids=PROMPT), stopping=common_pb2.Stopping(max_tokens=1), note="x" * FILED_NOTE_BYTES
        )
        try:
            async for _ in stub.Generate(asked, metadata=show(GREEDY), timeout=FILED_LIMIT_S):
                pass
        except grpc.aio.AioRpcError as error:
            return str(error.code().name)
        return "OK"

    async def _ask_as_other(self) -> None:
        try:
            async with AsyncClient(self._service.address, token=OTHER, patience=PATIENCE_S) as client:
                told = await client.complete(PROMPT, max_tokens=LENGTH, ignore_eos=True, timeout=FILED_LIMIT_S)
        except SpecwireError as error:
            self.answers[f"other {error.code}"] += 1
            self.wrong.append(f"another tenant of a log that was filled or cut was told {error}")
            return
        self.answers["other OK"] += 1
        if len(told.tokens) != LENGTH:
            self.wrong.append(f"another tenant had {len(told.tokens)} of {LENGTH} tokens")

    async def _cut(self) -> None:
        """Within its head, while nobody has it."""
        size = self._random.randrange(HEAD_BYTES)
        await asyncio.to_thread(self._service.kill)
        said = len(self._service.said())
        head = self._log.read_bytes()[:size]
        self._log.write_bytes(head)
        self._service.restart()  # by this thread: a process is bound to the one that started it
        await asyncio.to_thread(self._service.ready)
        self.answers["cut"] += 1
        if KEPT_ASIDE not in self._service.said()[said:]:
            self.wrong.append(f"{self._log} was cut to {size} bytes, and nothing was said")
        if head not in [each.read_bytes() for each in self._log.parent.glob("log.damaged-*")]:
            self.wrong.append(f"{self._log} was cut to {size} bytes, and what was left is gone")
