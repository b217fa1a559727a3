"""Memory that is short for a forward costs time, or the session that is too large by itself; nobody else's text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from specwire.core.invalid import Code
from specwire.lm import Feed
from tests.verify_service.rig import COUPLED, Rig, chain, oracle
from verify_service.engine.batch import LEAST_CHUNK
from verify_service.engine.messages import Refusal, Scoring

LONG = tuple(index % 60 + 1 for index in range(900))


class Short(Rig):
    """A model whose forwards fail beyond `most` rows, before or after they have written."""

    def __init__(self, most: int, after: bool = False, error: type[Exception] = MemoryError, **options: Any) -> None:
        super().__init__(context=1200, **options)
        self.most, self.widest, self.failures = most, 0, 0
        forward = self.lm.forward

        def bounded(feeds: Sequence[Feed]) -> torch.Tensor:
            rows = sum(len(feed.tokens) for feed in feeds)
            if after and rows > self.most:
                forward(feeds)
            if rows > self.most:
                self.failures += 1
                raise error("out of memory")
            self.widest = max(self.widest, rows)
            return forward(feeds)

        self.lm.forward = bounded  # type: ignore[method-assign]


@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("error", [MemoryError, torch.OutOfMemoryError])
def test_a_prompt_comes_in_smaller_chunks_and_nobody_notices(error: type[Exception], after: bool) -> None:
    rig = Short(100, after, error)
    rig.open(1, (5, 6, 7), sampling=COUPLED)
    rig.open(2, LONG, max_tokens=10)
    rig.run()
    assert rig.refused == []
    assert rig.tokens == {1: oracle(rig.lm, (5, 6, 7), 40, COUPLED), 2: oracle(rig.lm, LONG, 10)}
    assert rig.widest <= 100


@pytest.mark.parametrize("after", [False, True])
def test_sessions_that_do_not_fit_together_go_one_by_one(after: bool) -> None:
    rig = Short(3, after)
    prompts = {handle: (handle, handle + 1) for handle in (1, 2, 3, 4)}
    for handle, prompt in prompts.items():
        rig.open(handle, prompt)
    rig.propose(2, chain(0, prompts[2], oracle(rig.lm, prompts[2], 2)))
    rig.run()
    assert rig.refused == []
    assert rig.tokens == {handle: oracle(rig.lm, prompt, 40) for handle, prompt in prompts.items()}


def test_a_window_that_does_not_fit_ends_nobody_s_text() -> None:
    """And costs it a few forwards, not one in each step: what fits is remembered."""
    rig = Short(2)
    rig.open(1, (5, 6))
    rig.step()
    text = (5, 6, *rig.tokens[1])
    rig.propose(1, chain(0, text, oracle(rig.lm, text, 38)))
    rig.run()
    assert rig.refused == []
    assert rig.tokens == {1: oracle(rig.lm, (5, 6), 40)}
    assert 1 <= rig.failures <= 5
    assert rig.widest == 2


def test_sessions_that_fit_without_their_windows_stay_together() -> None:
    rig = Short(4, ngram=False)
    prompts = {handle: (handle,) for handle in (1, 2, 3, 4)}
    for handle, prompt in prompts.items():
        rig.open(handle, prompt)
    rig.step()
    for handle, prompt in prompts.items():
        text = (*prompt, *rig.tokens[handle])
        rig.propose(handle, chain(0, text, oracle(rig.lm, text, 38)))
    rig.run()
    assert rig.tokens == {handle: oracle(rig.lm, prompt, 40) for handle, prompt in prompts.items()}
    assert 1 <= rig.failures <= 6
    assert rig.engine.steps == 40


def test_one_that_is_too_large_by_itself_is_told_so_and_the_others_go_on() -> None:
    rig = Short(LEAST_CHUNK - 1)
    rig.open(1, (5, 6, 7))
    rig.open(2, LONG, scope=b"a")
    rig.run()
    assert [(each.handle, each.code, each.message) for each in rig.refused] == [
        (2, Code.RESOURCE_EXHAUSTED, "the target's forward ran out of memory")
    ]
    assert rig.tokens[1] == oracle(rig.lm, (5, 6, 7), 40)
    assert rig.engine.sessions.slot_queue.slots.kept == 0
    rig.most = 1000
    rig.open(3, LONG, max_tokens=5)
    rig.run()
    assert rig.tokens[3] == oracle(rig.lm, LONG, 5)


def test_scoring_says_so_too() -> None:
    rig = Short(100)
    answers: list[Any] = []
    for tokens in (LONG, LONG[:50]):
        rig.engine.inbox.put(Scoring(tokens, len(tokens) - 2, answers.append))
    rig.run()
    assert answers[0] == Refusal(0, Code.RESOURCE_EXHAUSTED, "the target's forward ran out of memory")
    assert len(answers[1]) == 2
