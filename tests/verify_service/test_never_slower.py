"""Never slower is enforced: whatever a drafter does, 256 tokens take at most 3 % longer than plain decoding.

In virtual time: a forward of m rows takes V(m), everything else nothing. The drafters answer some time after a verdict.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch

from specwire.core.costs import StepCosts
from specwire.core.speed import ForwardTimes
from specwire.core.verification import Allowance
from specwire.lm import Feed
from tests.verify_service.rig import Rig, chain, oracle
from verify_service.engine import Rest

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

        self.lm.forward = timed  # type: ignore[method-assign]

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


def wrong(truth: Sequence[int], done: int) -> tuple[list[int], float]:
    return [(token + 1) % 64 for token in truth[done : done + 8]], 1000.0


def right_for_a_while(truth: Sequence[int], done: int) -> tuple[list[int], float]:
    return list(truth[done : done + 8]) if done < 12 else [1] * 8, 1000.0


def wrong_and_wide(truth: Sequence[int], done: int) -> tuple[list[int], float]:
    return [truth[done], *((token + 1) % 64 for token in truth[done + 1 : done + 16])], 1000.0


def late(truth: Sequence[int], done: int) -> tuple[list[int], float]:
    return list(truth[done : done + 2]), 35_000.0


def moody(truth: Sequence[int], done: int) -> tuple[list[int], float]:
    """Prompt while it is trusted least."""
    return list(truth[done : done + 4]), 500.0 if done // 16 % 2 else 60_000.0


@pytest.mark.parametrize("growth", [0.0, 0.02, 0.05])
@pytest.mark.parametrize("due", [0, 8])
@pytest.mark.parametrize("drafter", [silent, wrong, wrong_and_wide, right_for_a_while, late, moody])
def test_never_slower(drafter: Drafter, due: int, growth: float) -> None:
    rig = Virtual(growth)
    assert rig.generate(drafter, due) <= COUNT * PLAIN_US / 0.97


def good(truth: Sequence[int], done: int) -> tuple[list[int], float]:
    """Three of four right."""
    tokens = list(truth[done : done + 4])
    return [*tokens[:3], (tokens[3] + 1) % 64], 2000.0


@pytest.mark.parametrize("growth", [0.0, 0.05])
def test_good_drafter_pays(growth: float) -> None:
    """Four tokens for a wait of 2 ms and a forward of five rows."""
    rig = Virtual(growth)
    ideal = COUNT / 4 * (2000.0 + rig.cost(5))
    assert rig.generate(good, due=4) <= 1.15 * ideal
