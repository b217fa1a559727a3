"""An engine without its thread: the test gives commands, steps it, and reads what it reports."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import count
from typing import Any

import numpy as np
import torch

from specwire.core.draft import DraftingModel
from specwire.core.law.acceptance import choose
from specwire.core.law.sampling import Sampling
from specwire.core.messages import AssignedDrafter, FinishReason, Outcome, Proposal
from specwire.core.model import TORCH
from specwire.core.policy.costs import StepCosts
from specwire.core.policy.estimates import ForwardTimes
from specwire.core.policy.heads import HeadDepth
from specwire.core.policy.tunables import MOST_HEAD_DEPTH
from specwire.core.text import Stopping, hash_of
from specwire.core.verify.session import Allowance
from specwire.core.verify.shared_texts import ScopeTexts
from specwire.lm import Feed, LanguageModel, load_model
from specwire.lm.law.sampler import LogitsSampler
from verify_service.engine.engine import DETACH_GRACE_US, Engine, Rest
from verify_service.engine.heads import HeadDrafting
from verify_service.engine.messages import (
    Decided,
    Opening,
    QueuePatience,
    Refusal,
    Report,
    Reports,
    Tick,
)
from verify_service.engine.shares import TenantShares

FLAT = {1: 1000.0, 32: 1000.0}
ROWS = (1, 2, 4, 8, 16, 32)
GREEDY = Sampling()
COUPLED = Sampling(temperature=1.0, seed=11)
FAR = Allowance(0, 1 << 20)


def oracle(lm: LanguageModel, prompt: Sequence[int], length: int, sampling: Sampling = GREEDY) -> list[int]:
    """`length` tokens that the scripted model alone decides, by the reference rules; past any end of sequence."""
    script = lm.script  # type: ignore[attr-defined]  # of the scripted model
    prefix, tokens = 0, []
    for token in prompt:
        prefix = script.extend(prefix, token)
    for position in range(len(prompt), len(prompt) + length):
        tokens.append(choose(script.logits(prefix).astype(np.float64), position, sampling))
        prefix = script.extend(prefix, tokens[-1])
    return tokens


class Rig:
    """Session handles are numbers; all commands come from link 0 unless said otherwise."""

    def __init__(
        self,
        spec: str = "scripted:5",
        slots: int = 4,
        context: int = 512,
        ngram: bool = True,
        detach_grace_us: float = DETACH_GRACE_US,
        patience: QueuePatience = QueuePatience(),  # noqa: B008 # frozen
        growth: float | None = None,
        drafting: HeadDrafting | None = None,
        heads: str | None = None,
        runtime: str = TORCH,
        shares: TenantShares | None = None,
        text_memory: int = 0,
        known: ScopeTexts | None = None,
        kv_memory: int | None = None,
        beside: Callable[[LanguageModel], LanguageModel] = lambda lm: lm,
    ) -> None:
        """growth: share of a millisecond that a row more costs; forwards then take their time. drafting: of a head, or
        `heads`, what drafts beside a model that is no script. beside: what is served in place of the model itself.
        """
        self.lm = beside(
            load_model(spec, slots=slots, context=context, heads=heads, runtime=runtime, kv_memory=kv_memory)
        )
        if isinstance(self.lm, DraftingModel):
            drafting = HeadDrafting(self.lm, HeadDepth({1: 20.0}, self.lm.most_depth or MOST_HEAD_DEPTH))
        self.now = 0.0
        self.growth, self.patience = growth, patience
        costs = StepCosts(ForwardTimes(FLAT if growth is None else {m: self._cost(m) for m in ROWS}))
        self.feeds: list[Feed] = []
        self._watch()
        sampler = LogitsSampler()
        self.engine = Engine(
            self.lm,
            sampler,
            costs,
            self._take,
            self._clock,
            ngram=ngram,
            detach_grace_us=detach_grace_us,
            patience=patience,
            drafting=drafting,
            shares=shares,
            text_memory=text_memory,
            known=known,
        )
        self.tokens: dict[int, list[int]] = {}
        self.outcomes: dict[int, list[Outcome]] = {}
        self.finished: dict[int, FinishReason] = {}
        self.positions: dict[int, int] = {}
        self.refused: list[Refusal] = []
        self.reports: list[Report] = []

    def _cost(self, rows: int) -> float:
        return 1000.0 * (1 + (self.growth or 0.0) * (rows - 1))

    def _watch(self) -> None:
        """What is fed is noted in `feeds`, and takes its time."""
        forward = self.lm.forward

        def watched(feeds: Sequence[Feed]) -> torch.Tensor:
            self.feeds += feeds
            self.now += 0.0 if self.growth is None else self._cost(sum(len(feed.tokens) for feed in feeds))
            return forward(feeds)

        self.lm.forward = watched  # type: ignore[method-assign]  # the test steps in between

    def during(self, action: Callable[[], object], before: bool = False) -> None:
        """Do that in the middle of the next forward; before: it computes."""
        forward = self.lm.forward

        def interrupted(feeds: Sequence[Feed]) -> torch.Tensor:
            self.lm.forward = forward  # type: ignore[method-assign]  # the test steps in between
            logits = None if before else forward(feeds)
            action()
            return forward(feeds) if logits is None else logits

        self.lm.forward = interrupted  # type: ignore[method-assign]  # the test steps in between

    def _clock(self) -> float:
        """Every look at the clock takes a microsecond."""
        self.now += 1.0
        return self.now

    def _take(self, reports: Reports) -> None:
        for link, report in reports.items():
            self.reports.append(report)
            for admitted in report.admitted:
                self.tokens.setdefault(admitted.handle, [])
                self.positions[admitted.handle] = admitted.position
                self._read(admitted.tail, link)
            self._read(report.decided, link)
            self.refused += report.refused

    def _read(self, verdicts: Sequence[Decided], link: int) -> None:
        for decided in verdicts:
            verdict = decided.verdict
            assert verdict.position == self.positions[decided.handle], link
            self.positions[decided.handle] += len(verdict.tokens)
            self.tokens[decided.handle] += verdict.tokens
            self.outcomes.setdefault(decided.handle, []).extend(verdict.outcomes)
            if verdict.finish is not None:
                self.finished[decided.handle] = verdict.finish

    def tick(self, link: int = 0, **parts: Any) -> None:
        self.engine.inbox.put(Tick(link, self.now, **parts))

    def open(self, handle: int, prompt: Sequence[int], link: int = 0, **changes: Any) -> None:
        self.tick(link, opens=(opening(handle, prompt, **changes),))

    def propose(self, handle: int, *proposals: Proposal, link: int = 0) -> None:
        self.tick(link, proposals=tuple((handle, proposal) for proposal in proposals))

    def step(self) -> Rest | None:
        rest = self.engine.step()
        self.engine.tell()
        return rest

    def run(self, before_step: Callable[[], None] = lambda: None, most: int = 2000) -> None:
        """Step until nothing is left to do; a deliberate wait passes as if nobody sent anything."""
        for _ in range(most):
            before_step()
            rest = self.step()
            if rest is not None and not rest.waiting:
                return
            if rest is not None:
                self.now = max(self.now, rest.until_us)
        raise AssertionError(f"still busy after {most} steps")

    def proposing(self, prompt: Sequence[int], guess: Callable[[int], Sequence[int]]) -> Callable[[], None]:
        """Before each step, a new chain behind what session 1 has decided: the guesses of what follows."""
        numbers = count()

        def propose() -> None:
            done = self.tokens.get(1)
            if done is not None and 1 not in self.finished and not self.refused:
                self.propose(1, chain(next(numbers), [*prompt, *done], guess(len(done))))

        return propose

    def held_slots(self) -> int:
        return len(self.engine.roster)


def opening(
    handle: int,
    prompt: Sequence[int],
    max_tokens: int = 40,
    sampling: Sampling = GREEDY,
    allowance: Allowance = FAR,
    stop_ids: frozenset[int] = frozenset(),
    decided: Sequence[int] = (),
    **changes: Any,
) -> Opening:
    fields: dict[str, Any] = {"session_id": f"session-{handle}", "fence": 1, "attach": 1, **changes}
    tokens = (*prompt, *decided)
    stopping = Stopping(max_tokens, stop_ids)
    return Opening(
        handle=handle,
        tokens=tokens,
        prompt_length=len(prompt),
        sampling=sampling,
        stopping=stopping,
        allowance=allowance,
        **fields,
    )


def owing(tokens: int, source: int = 0) -> tuple[AssignedDrafter, ...]:
    """A drafter whose fixed plan has it send so many tokens behind each verdict."""
    return (AssignedDrafter(source, plan=f"stream:{tokens},{max(tokens, 32)},{tokens}"),)


def chain(number: int, text: Sequence[int], tokens: Sequence[int], offset: int = 0, source: int = 0) -> Proposal:
    """A chunk of a chain that starts behind `text`."""
    return Proposal(source, number, len(text), offset, tuple(tokens), hash_of(text) if offset == 0 else None)
