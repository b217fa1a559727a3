"""The services' threads as strands of the simulation: the real engine and the real drafter's sessions.

Forwards take virtual time. The verifier's takes in commands before and after it, as the real one does.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable, Sequence
from contextvars import Context
from dataclasses import dataclass, replace
from functools import lru_cache, reduce
from random import Random

import torch
from tokenizers import Tokenizer
from tokenizers.decoders import Fuse

from draft_service.sessions import Command as DraftCommand
from draft_service.sessions import Replies, Sessions
from orchestrator.store import SessionRecord
from specwire.core.draft import HeadRequest
from specwire.core.policy.costs import StepCosts
from specwire.core.policy.estimates import ForwardTimes
from specwire.core.policy.heads import HeadDepth
from specwire.lm import Feed
from specwire.lm.guesses import guesses
from specwire.lm.law.sampler import LogitsSampler
from specwire.lm.scripted import EOS_ID, SPREAD, HeadedScript, Row, Script, ScriptedLM
from specwire.rpc.model_info import model_info_to_wire
from specwire.rpc.service_thread import Stop
from specwire.sim.verifier import SteppedEngine
from specwire.text.tokenizer import load_tokenizer
from specwire.v1 import common_pb2
from tests.simulation.loop import SimLoop
from verify_service.engine.heads import HeadDrafting
from verify_service.engine.messages import Command, QueuePatience, Reports

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


@dataclass(frozen=True, slots=True)
class HeadPlay:
    """A head beside a target. agree: how often its best token is the target's. slow: how often a call of it takes as
    long as SLOW_FORWARDS of the target. fails: how often one fails.
    """

    agree: float
    slow: float = 0.0
    fails: float = 0.0


# By name. What a forward of a head takes of one of its target's.
HEADS = {
    "good": HeadPlay(0.9),
    "poor": HeadPlay(0.2),
    "slow": HeadPlay(0.9, slow=0.3),
    "frail": HeadPlay(0.9, fails=0.1),
}
HEAD_SHARE, SLOW_FORWARDS = 0.05, 3.0

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


class HeadFault(Exception):
    """A head's call failed."""


class HeadedModel(Model, HeadedScript):
    """Calls of its head take virtual time: `drafted` seconds since that was last set to 0.

    failures: calls that failed. wrong: what it was asked, and must not be.
    """

    def __init__(
        self, played: Script, slots: int, seconds: float, config: TargetConfig, play: HeadPlay, random: Random
    ) -> None:
        super().__init__(played, slots, seconds, config)
        self.head = replace(played, agree=play.agree)
        self.drafted = 0.0
        self.failures = 0
        self.wrong: list[str] = []
        self._play = play
        self._random = random

    def draft(self, requests: Sequence[HeadRequest]) -> list[list[int]]:
        if self.failures:
            self.wrong.append("a head that failed is asked again")
        if not all(self._holds(request) for request in requests):
            self.wrong.append("a head drafts behind another text than its slot's")
        forwards = HEAD_SHARE * max(request.depth for request in requests)
        forwards = SLOW_FORWARDS if self._random.random() < self._play.slow else forwards
        self.drafted += forwards * self.cost(1) * self.slowness
        if self._random.random() < self._play.fails:
            self.failures += 1
            raise HeadFault("as planned")
        return super().draft(requests)

    def _holds(self, request: HeadRequest) -> bool:
        """Exactly what is before a text's last token."""
        held = self._rows[request.slot]
        return (held[-1].prefix if held else 0) == reduce(self.script.extend, request.tokens[:-1], 0)

    def drafting(self) -> HeadDrafting:
        return HeadDrafting(self, HeadDepth({1: HEAD_SHARE * self.cost(1) * 1e6}))


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
        self.head = lm if isinstance(lm, HeadedModel) else None
        self._loop, self._busy_until = loop, 0.0
        self.engine = SteppedEngine(
            lm,
            LogitsSampler(),
            costs,
            self._deliver,
            self._now_us,
            detach_grace_us=grace * 1e6,
            patience=patience,
            drafting=None if self.head is None else self.head.drafting(),
        )
        self._context = engine_context
        self._loop_context = loop_context
        self._next: asyncio.Handle | None = None
        self._resting = False

    def _now_us(self) -> float:
        """As its thread sees it, which a head keeps busy between two callbacks."""
        return self._loop.time() * 1e6 + self._drafted * 1e6

    @property
    def _drafted(self) -> float:
        return 0.0 if self.head is None else self.head.drafted

    def send(self, command: Command | Stop) -> None:
        self.engine.inbox.put(command)
        if self._resting or self._next is None:
            self._schedule(max(0.0, self._busy_until - self._loop.time()))

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
        if self.head is not None:
            self.head.drafted = 0.0
        engine, now_us = self.engine, self._loop.time() * 1e6
        rest = engine.turn(now_us, now_us)
        self._busy_until = self._loop.time() + self._drafted
        if engine.computing:
            self._schedule(self._drafted + self.lm.spent)
        elif rest is None:
            engine.tell()
        else:
            self._resting = True
            seconds = (rest.until_us - now_us) / 1e6
            if seconds < 1e6:
                self._schedule(max(1e-6, self._drafted, seconds))


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
