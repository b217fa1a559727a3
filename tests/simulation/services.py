"""The services' threads as strands of the simulation: the real engine and the real drafter's sessions.

Forwards take virtual time. The verifier's takes in commands before and after it, as the real one does.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable, Sequence
from contextvars import Context
from dataclasses import dataclass, replace
from functools import lru_cache
from random import Random

import torch
from tokenizers import Tokenizer
from tokenizers.decoders import Fuse

from draft_service.commands import Command as DraftCommand
from draft_service.commands import Replies
from draft_service.sampler import guesses
from draft_service.sessions import Sessions
from orchestrator.store import SessionRecord
from specwire.core.policy.costs import StepCosts
from specwire.core.policy.estimates import ForwardTimes
from specwire.lm import Feed
from specwire.lm.scripted import EOS_ID, SPREAD, Row, Script, ScriptedLM
from specwire.rpc.model_info import model_info_to_wire
from specwire.rpc.service_thread import Stop
from specwire.sim.verifier import SteppedEngine
from specwire.text import load_tokenizer
from specwire.v1 import common_pb2
from tests.simulation.loop import SimLoop
from verify_service.engine.messages import Command, QueuePatience, Reports
from verify_service.engine.sampler import LogitsSampler

CONTEXT = 160
VOCABULARY = 12
EOS = 0.01
ROWS = (1, 2, 4, 8, 16, 32)


class SeededScript(Script):
    """Remembers what it has said: every party asks for the same logits."""

    def logits(self, prefix: int, position: int = 0, right: bool = True) -> Row:
        return _logits(self, prefix, position)


@lru_cache(maxsize=1 << 16)
def _logits(script: SeededScript, prefix: int, position: int) -> Row:
    return Script.logits(script, prefix, position)


@dataclass(frozen=True, slots=True)
class Play:
    """What target and drafters play. agree: how often a drafter's best token is the target's."""

    seed: int
    agree: float = 1.0
    vocabulary: int = VOCABULARY
    spread: float = SPREAD

    @property
    def target(self) -> SeededScript:
        return SeededScript(self.seed, vocab=self.vocabulary, eos=EOS, spread=self.spread)

    @property
    def drafter(self) -> SeededScript:
        return replace(self.target, agree=self.agree)


@dataclass(frozen=True, slots=True)
class TargetConfig:
    """What decides a text or its end beside the weights. fused: the tokenizer puts no spaces between tokens."""

    eos_ids: frozenset[int] = frozenset((EOS_ID,))
    context: int = CONTEXT
    fused: bool = False

    @classmethod
    def of(cls, record: SessionRecord, vocabulary: int) -> TargetConfig:
        """What the session was begun with; its limit is its own, whatever the context."""
        told = record.eos_ids, record.tokenizer_fingerprint == PLAIN_HASHES[vocabulary]
        return USUAL if told == ((EOS_ID,), True) else cls(frozenset(told[0] or ()), fused=not told[1])


USUAL = TargetConfig()
# By what an operator has changed. The first token is said often, the context is shorter than many texts.
CONFIGS = {
    "": USUAL,
    "eos": TargetConfig(eos_ids=frozenset((EOS_ID, 5))),
    "context": TargetConfig(context=64),
    "tokenizer": TargetConfig(fused=True),
}


class _PlainHashes(dict[int, str]):
    """Of the usual tokenizer's text, by the vocabulary's size."""

    def __missing__(self, vocabulary: int) -> str:
        text = ScriptedLM(Script(0, vocab=vocabulary), 1).info.tokenizer_json
        self[vocabulary] = hashlib.sha256(text).hexdigest()
        return self[vocabulary]


PLAIN_HASHES = _PlainHashes()


@lru_cache(maxsize=8)
def fused(tokenizer_json: bytes) -> bytes:
    """The same tokens; decoded without spaces."""
    tokenizer = Tokenizer.from_str(tokenizer_json.decode())
    tokenizer.decoder = Fuse()
    return str(tokenizer.to_str()).encode()


class Model(ScriptedLM):
    """A forward of m rows takes `seconds` times 1 + (m - 1) / 16, times `slowness`; `elapse` is told of it."""

    def __init__(self, played: Script, slots: int, seconds: float, config: TargetConfig = USUAL) -> None:
        super().__init__(played, slots, config.context)
        text = fused(self.info.tokenizer_json) if config.fused else self.info.tokenizer_json
        self.info = replace(self.info, eos_ids=tuple(sorted(config.eos_ids)), tokenizer_json=text)
        self.seconds = seconds
        self.slowness = 1.0
        self.spent = 0.0
        self.elapse: Callable[[float], None] = lambda _: None

    def forward(self, feeds: Sequence[Feed]) -> torch.Tensor:
        self.spent = self.cost(sum(len(feed.tokens) for feed in feeds)) * self.slowness
        self.elapse(self.spent)
        return super().forward(feeds)

    def cost(self, rows: int) -> float:
        return self.seconds * (1 + (rows - 1) / 16)

    @property
    def tokenizer(self) -> Tokenizer:
        return load_tokenizer(self.info.tokenizer_json)

    def described(self, place: str) -> common_pb2.GetModelInfoResponse:
        info = model_info_to_wire(self.info, self.slots)
        info.host_id = place
        for rows in ROWS:
            info.forward_times.add(rows=rows, microseconds=round(self.cost(rows) * 1e6))
        return info


class EngineStrand:
    """In place of the verifier's ServiceThread: what it does, as callbacks of a strand.

    grace: seconds for which it keeps what lost its link. patience: with sessions that find no slot.
    """

    def __init__(
        self,
        loop: SimLoop,
        lm: Model,
        engine_context: Context,
        loop_context: Context,
        grace: float,
        patience: QueuePatience,
    ) -> None:
        self.on_reports: Callable[[Reports], None] = lambda _: None
        costs = StepCosts(ForwardTimes({rows: lm.cost(rows) * 1e6 for rows in ROWS}))
        self.lm = lm
        self.engine = SteppedEngine(
            lm,
            LogitsSampler(lm.info.deterministic),
            costs,
            self._deliver,
            lambda: loop.time() * 1e6,
            detach_grace_us=grace * 1e6,
            patience=patience,
        )
        self._loop = loop
        self._context = engine_context
        self._loop_context = loop_context
        self._next: asyncio.Handle | None = None
        self._resting = False

    def send(self, command: Command | Stop) -> None:
        self.engine.inbox.put(command)
        if self._resting or self._next is None:
            self._schedule(0.0)

    async def room(self) -> None:
        """As a thread that takes in whatever comes."""

    async def stop(self) -> None:
        self.send(Stop())

    def _deliver(self, reports: Reports) -> None:
        self._loop.call_soon(self.on_reports, reports, context=self._loop_context)

    def _schedule(self, seconds: float) -> None:
        if self._next is not None:
            self._next.cancel()
        self._next = self._loop.call_later(seconds, self._go_on, context=self._context)

    def _go_on(self) -> None:
        self._next, self._resting = None, False
        engine, now_us = self.engine, self._loop.time() * 1e6
        rest = engine.turn(now_us, now_us)
        if engine.computing:
            self._schedule(self.lm.spent)
        elif rest is None:
            engine.tell()
        else:
            self._resting = True
            seconds = (rest.until_us - now_us) / 1e6
            if seconds < 1e6:
                self._schedule(max(1e-6, seconds))


class DrafterStrand:
    """In place of the drafter's ServiceThread: likewise."""

    def __init__(self, loop: SimLoop, lm: Model, context: Context, loop_context: Context, random: Random) -> None:
        self.on_reports: Callable[[Replies], None] = lambda _: None
        self.book = Sessions(lm, guesses, self._deliver, lambda: round(loop.time() * 1e9))
        self.lm = lm
        self._loop = loop
        self._context = context
        self._loop_context = loop_context
        self._random = random
        self._commands: list[DraftCommand] = []
        self._drafting = False
        self._next: asyncio.Handle | None = None
        self.stopped = False

    def send(self, command: DraftCommand) -> None:
        self._commands.append(command)
        if self._next is None:
            self._next = self._loop.call_soon(self._go_on, context=self._context)

    async def room(self) -> None:
        """As a thread that takes in whatever comes."""

    def _deliver(self, replies: Replies) -> None:
        self._loop.call_soon(self.on_reports, replies, context=self._loop_context)

    async def failed(self) -> str:
        await asyncio.Event().wait()
        return "unreachable"

    async def stop(self) -> None:
        self.stopped = True

    def _go_on(self) -> None:
        """The end of a forward, then what waits, then the next forward; its replies come at its end."""
        self._next = None
        if self._drafting:
            self._drafting = False
            self.book.step()
            self.book.deliver()
        commands, self._commands = self._commands, []
        for command in commands:
            self.book.apply(command)
        self.book.deliver()
        if self.book.wanting and not self.stopped:
            self._drafting = True
            seconds = self.lm.seconds * self.lm.slowness * self._random.uniform(0.5, 1.5)
            self._next = self._loop.call_later(seconds, self._go_on, context=self._context)
