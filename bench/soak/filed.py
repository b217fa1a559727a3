"""Beside the soak an orchestrator with its log in a file: a tenant would fill it, and the file is cut now and then.

What a tenant may have kept is bounded, and no room of another's, who is served as ever. A log that was cut within its
head is said at start and kept aside, and a new one is begun.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from itertools import count
from pathlib import Path
from random import Random

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

EVERY_S, LIMIT_S = 4.0, 120.0
PROMPT, LENGTH = (5, 6, 7), 4
# Of what a tenant may have kept it asks for twice as much; the file has pages that are not full, and a journal.
NOTE_BYTES, NOTES = 200_000, 20
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
            if await within(until, self._random.uniform(0.0, 2 * EVERY_S)):
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
            tokens=pb.TokenIds(ids=PROMPT), stopping=common_pb2.Stopping(max_tokens=1), note="x" * NOTE_BYTES
        )
        try:
            async for _ in stub.Generate(asked, metadata=show(GREEDY), timeout=LIMIT_S):
                pass
        except grpc.aio.AioRpcError as error:
            return str(error.code().name)
        return "OK"

    async def _ask_as_other(self) -> None:
        try:
            async with AsyncClient(self._service.address, token=OTHER, patience=PATIENCE_S) as client:
                told = await client.complete(PROMPT, max_tokens=LENGTH, ignore_eos=True, timeout=LIMIT_S)
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
