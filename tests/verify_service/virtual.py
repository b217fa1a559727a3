"""An engine in virtual time: a forward of m rows takes V(m), everything else nothing."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from specwire.core.policy.costs import StepCosts
from specwire.core.policy.estimates import ForwardTimes
from specwire.core.verify.session import Allowance
from specwire.lm import Feed
from tests.verify_service.rig import Rig, chain, oracle
from verify_service.engine.engine import Rest

PROMPT = (7, 3, 9)
COUNT = 256
PLAIN_US = 10_000.0

# What a drafter proposes behind `done` decided tokens of `truth`, and how long after the verdict it arrives.
Drafter = Callable[[Sequence[int], int], tuple[list[int], float]]


class Virtual(Rig):
    """Time passes in forwards and waits alone."""

    def __init__(self, growth: float, spec: str = "scripted:5", ngram: bool = True) -> None:
        super().__init__(spec, context=1024, ngram=ngram)
        self.growth = growth
        self.engine.costs = StepCosts(ForwardTimes({m: self.cost(m) for m in (1, 2, 4, 8, 16, 32)}))
        self.pending: list[tuple[float, int, list[int]]] = []
        forward = self.lm.forward

        def timed(feeds: Sequence[Feed]) -> torch.Tensor:
            self.now += self.cost(sum(len(feed.tokens) for feed in feeds))
            self.arrive()
            return forward(feeds)

        self.lm.forward = timed  # type: ignore[method-assign]  # the test steps in between

    def cost(self, rows: int) -> float:
        return PLAIN_US * (1 + self.growth * (rows - 1))

    def _clock(self) -> float:
        return self.now

    def arrive(self) -> None:
        for when, done, tokens in [each for each in self.pending if each[0] <= self.now]:
            self.pending.remove((when, done, tokens))
            self.propose(1, chain(done, (*PROMPT, *self.truth[:done]), tokens))

    def generate(self, drafter: Drafter, due: int) -> float:
        """Microseconds for COUNT tokens."""
        self.truth = oracle(self.lm, PROMPT, COUNT + 20)
        self.open(1, PROMPT, max_tokens=COUNT, allowance=Allowance(0, 1 << 20, due))
        told = -1
        while 1 not in self.finished:
            rest = self.step()
            done = len(self.tokens.get(1, []))
            if done != told:
                told = done
                tokens, delay = drafter(self.truth, done)
                if tokens:
                    self.pending.append((self.now + delay, done, tokens))
            if rest is not None:
                self._sleep(rest)
            self.arrive()
        assert self.tokens[1] == self.truth[:COUNT]
        return self.now

    def _sleep(self, rest: Rest) -> None:
        until = min([rest.until_us, *(when for when, _, _ in self.pending)])
        slept = max(0.0, until - self.now)
        self.now += slept
        self.engine._pauses.waited_us += slept


def silent(truth: Sequence[int], done: int) -> tuple[list[int], float]:
    return [], 0.0


def good(truth: Sequence[int], done: int) -> tuple[list[int], float]:
    """Three of four right."""
    tokens = list(truth[done : done + 4])
    return [*tokens[:3], (tokens[3] + 1) % 64], 2000.0
