"""The verify engine in this process: no network, no log, no Ray. An oracle drafts, or a drafter, or a head."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Protocol, cast

import torch
from transformers import PreTrainedModel

from bench.gpu.shapes import CountedHead
from bench.harness.runs import BenchError
from bench.peers.transformers_peer import Stopwatch
from specwire.core.law.sampling import Sampling
from specwire.core.messages import Outcome, Proposal
from specwire.core.text import Stopping, Text
from specwire.core.verify.session import Allowance
from specwire.lm import Feed, LanguageModel
from specwire.lm.law.sampler import LogitsSampler
from verify_service.engine.calibration import calibrate_head, step_costs
from verify_service.engine.engine import Engine
from verify_service.engine.heads import HeadDrafting
from verify_service.engine.messages import Opening, Reports, Tick
from verify_service.engine.slots import common


class TransformersPair:
    """As its users run it; a fixed number of draft tokens, as the rows beside it have."""

    def __init__(self, target: PreTrainedModel, draft: PreTrainedModel, tokens: int) -> None:
        self._target, self._draft = target, draft
        settings = draft.generation_config
        settings.num_assistant_tokens, settings.num_assistant_tokens_schedule = tokens, "constant"
        settings.assistant_confidence_threshold = 0.0

    @torch.inference_mode()
    def run(self, prompt: Sequence[int], tokens: int, assisted: bool) -> Decoded:
        """From the first token to the last."""
        ids = torch.tensor([list(prompt)], device=self._target.device)
        watch = Stopwatch()
        generate = cast(Callable[..., torch.Tensor], self._target.generate)
        output = generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            use_cache=True,
            max_new_tokens=tokens,
            assistant_model=self._draft if assisted else None,
            streamer=watch,
        )
        (began, first), *rest = watch.puts[1:]
        text = tuple(output[0, len(prompt) :].tolist())
        ended = rest[-1][0] if rest else began
        accepted = sum(tokens - 1 for _, tokens in watch.puts[1:])
        return Decoded(ended - began, len(text) - first, (text,), 0, accepted if assisted else 0)


LINK, SOURCE = 0, 1
GREEDY = Sampling(temperature=0.0)


class Source(Protocol):
    """Proposes for several texts at once. forwards: that it has run for that."""

    forwards: int

    def draft(self, texts: Mapping[int, Sequence[int]]) -> dict[int, list[int]]:
        """Draft tokens behind each text, by its number."""
        ...


class Oracle:
    """Knows the target's next token, and proposes it with a chosen probability. Exists in measurements only."""

    forwards = 0

    def __init__(self, after: Sequence[int], acceptance: float, tokens: int, seed: int) -> None:
        self._after, self._acceptance, self._tokens = after, acceptance, tokens
        self._chance = random.Random(seed)

    def draft(self, texts: Mapping[int, Sequence[int]]) -> dict[int, list[int]]:
        return {number: self._behind(text[-1]) for number, text in texts.items()}

    def _behind(self, token: int) -> list[int]:
        drafted = []
        for _ in range(self._tokens):
            right = self._after[token]
            token = right if self._chance.random() < self._acceptance else (right + 1) % len(self._after)
            drafted.append(token)
        return drafted


class ModelDrafter:
    """A real drafter: one forward for each draft token of all texts. It takes turns with the target."""

    def __init__(self, lm: LanguageModel, tokens: int) -> None:
        self._lm, self._tokens = lm, tokens
        self._held: dict[int, list[int]] = {}
        self.forwards = 0

    def draft(self, texts: Mapping[int, Sequence[int]]) -> dict[int, list[int]]:
        feeds = [self._feed(number, list(text)) for number, text in texts.items()]
        drafted: dict[int, list[int]] = {number: [] for number in texts}
        for _ in range(self._tokens):
            tokens = self._lm.forward(feeds).argmax(dim=1).tolist()
            self.forwards += 1
            for number, token in zip(drafted, tokens, strict=True):
                drafted[number].append(token)
            feeds = [Feed(feed.slot, feed.stop, [token], 1) for feed, token in zip(feeds, tokens, strict=True)]
            for feed in feeds:
                self._held[feed.slot] = [*self._held[feed.slot], *feed.tokens]
        return drafted

    def _feed(self, slot: int, text: list[int]) -> Feed:
        """What the slot lacks of the text, at least its last token."""
        start = min(common(self._held.get(slot, []), text), self._lm.cached(slot), len(text) - 1)
        self._held[slot] = text
        return Feed(slot, start, text[start:], 1)


@dataclass(frozen=True, slots=True)
class Decoded:
    """tokens: of all sessions in `seconds`, from when each had its first; tested, accepted: draft tokens.

    forwards, drafts: of the target and of what drafts, in that time; 0 where nobody counts them.
    """

    seconds: float
    tokens: int
    texts: tuple[tuple[int, ...], ...]
    tested: int
    accepted: int
    forwards: int = 0
    drafts: int = 0


@dataclass(slots=True)
class _Session:
    text: Text
    prompt: int
    done: bool = False

    @property
    def tokens(self) -> int:
        return len(self.text) - self.prompt


@dataclass(slots=True)
class _Tally:
    tested: int = 0
    accepted: int = 0
    refused: list[str] = field(default_factory=list)


class Decoding:
    """One engine, and what it reports. What steps cost is measured when made, and so is a head.

    drafts: tokens that a head drafts for a step at most; it drafts as many as are expected to pay.
    """

    def __init__(self, lm: LanguageModel, drafts: int = 0) -> None:
        costs, self._head, drafting = step_costs(lm), lm if isinstance(lm, CountedHead) else None, None
        if self._head is not None:
            depth = calibrate_head(lm, self._head)
            depth.most = min(depth.most, drafts)
            drafting = HeadDrafting(self._head, depth)
        sampler = LogitsSampler()
        self._engine = Engine(lm, sampler, costs, self._take, ngram=False, drafting=drafting)
        self._handles, self._chains = count(1), count(1)
        self._sessions: dict[int, _Session] = {}
        self._tally = _Tally()

    def run(self, prompts: Sequence[Sequence[int]], tokens: int, source: Source | None) -> Decoded:
        """Decode greedily, `tokens` for each prompt; BenchError if a session is refused."""
        numbers = self._open(prompts, tokens)
        while any(session.tokens == 0 for session in self._sessions.values()):
            self._step(None)
        self._tally, drafter = _Tally(), source or self._head
        forwards, drafts = self._engine.steps, 0 if drafter is None else drafter.forwards
        before, began = self._decided(), time.perf_counter()
        while not all(session.done for session in self._sessions.values()):
            self._step(source)
        seconds = time.perf_counter() - began
        decided, forwards = self._decided() - before, self._engine.steps - forwards
        drafts = 0 if drafter is None else drafter.forwards - drafts
        texts = tuple(tuple(self._sessions[number].text.tokens[len(prompts[0]) :]) for number in numbers)
        self._close(numbers)
        return Decoded(seconds, decided, texts, self._tally.tested, self._tally.accepted, forwards, drafts)

    def _decided(self) -> int:
        return sum(session.tokens for session in self._sessions.values())

    def _open(self, prompts: Sequence[Sequence[int]], tokens: int) -> list[int]:
        self._sessions = {next(self._handles): _Session(Text(prompt), len(prompt)) for prompt in prompts}
        opens = tuple(_opening(number, each.text.tokens, tokens) for number, each in self._sessions.items())
        self._tell(opens=opens)
        return list(self._sessions)

    def _close(self, numbers: Sequence[int]) -> None:
        self._tell(closes=tuple(numbers), forgotten=tuple(str(number) for number in numbers))
        self._engine.step()
        self._engine.tell()
        self._sessions = {}

    def _step(self, source: Source | None) -> None:
        if source is not None:
            self._propose(source)
        self._engine.step()
        self._engine.tell()
        if self._tally.refused:
            raise BenchError(f"the engine: {self._tally.refused[0]}")

    def _propose(self, source: Source) -> None:
        """Chains behind the text as it is: the engine and the source take turns."""
        running = {number: each for number, each in self._sessions.items() if not each.done}
        slots = {slot: number for slot, number in enumerate(self._sessions) if number in running}
        drafted = source.draft({slot: running[number].text.tokens for slot, number in slots.items()})
        proposals = tuple(
            (slots[slot], self._proposal(running[slots[slot]].text, tokens)) for slot, tokens in drafted.items()
        )
        self._tell(proposals=proposals)

    def _proposal(self, text: Text, tokens: Sequence[int]) -> Proposal:
        base = len(text)
        return Proposal(SOURCE, next(self._chains), base, 0, tuple(tokens), text.hash_at(base))

    def _tell(
        self,
        opens: tuple[Opening, ...] = (),
        proposals: tuple[tuple[int, Proposal], ...] = (),
        closes: tuple[int, ...] = (),
        forgotten: tuple[str, ...] = (),
    ) -> None:
        now_us = time.monotonic_ns() / 1000
        self._engine.inbox.put(Tick(LINK, now_us, opens, proposals, (), closes, forgotten))

    def _take(self, reports: Reports) -> None:
        for report in reports.values():
            self._tally.refused += [refusal.message for refusal in report.refused]
            for decided in report.decided:
                session, verdict = self._sessions.get(decided.handle), decided.verdict
                if session is None:
                    continue
                session.text.extend(verdict.tokens)
                session.done = verdict.finish is not None
                self._tally.tested += verdict.accepted + verdict.outcomes.count(Outcome.RECOVERED)
                self._tally.accepted += verdict.accepted


def _opening(number: int, prompt: Sequence[int], tokens: int) -> Opening:
    """Credit for the whole text: there is no log to wait for."""
    allowance = Allowance(len(prompt), len(prompt) + tokens)
    stopping = Stopping(tokens, ignore_eos=True)
    return Opening(number, str(number), 1, 1, tuple(prompt), len(prompt), GREEDY, stopping, allowance)
