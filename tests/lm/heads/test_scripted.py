"""A scripted head: right as often as it says, behind the text that its slot holds."""

from __future__ import annotations

import time

import pytest

from specwire.core.draft import DraftingModel, HeadRequest
from specwire.core.law.sampling import Sampling
from specwire.core.model import Feed, ModelError
from specwire.lm import load_model
from specwire.lm.scripted import HeadedScript
from tests.verify_service.rig import COUPLED, GREEDY, Rig, oracle

TARGET = "scripted:5:vocab=24"
PROMPT = [3, 1, 4, 1, 5]
DEPTH = 8


def model(agree: float, context: int | None = None) -> HeadedScript:
    lm = load_model(TARGET, slots=3, heads=f"{TARGET}:agree={agree}", context=context)
    assert isinstance(lm, HeadedScript)
    assert isinstance(lm, DraftingModel)
    return lm


@pytest.mark.parametrize("sampling", [GREEDY, COUPLED], ids=["greedy", "coupled"])
def test_one_that_always_agrees_says_the_target_s_own_text(sampling: Sampling) -> None:
    lm, plain = model(1.0), load_model(TARGET, slots=1)
    lm.forward([Feed(1, 0, PROMPT[:-1], 1), Feed(2, 0, PROMPT[1:-1], 1)])
    requests = [HeadRequest(1, PROMPT, sampling, DEPTH), HeadRequest(2, PROMPT[1:], sampling, 2)]
    assert lm.draft(requests) == [oracle(plain, PROMPT, DEPTH, sampling), oracle(plain, PROMPT[1:], 2, sampling)]
    assert [lm.cached(slot) for slot in range(3)] == [0, 4, 3], "what it drafted is not held"


def test_it_is_right_as_often_as_it_agrees() -> None:
    lm, plain = model(0.6), load_model(TARGET, slots=1)
    right = 0
    for first in range(400):
        prompt = [first % 24, first // 24, 3]
        lm.forward([Feed(0, 0, prompt[:-1], 1)])
        right += lm.draft([HeadRequest(0, prompt, GREEDY, 1)])[0] == oracle(plain, prompt, 1)
        lm.discard(0)
    assert 0.5 < right / 400 < 0.7


def test_it_reads_what_the_slot_holds_before_it_drafts() -> None:
    lm = model(1.0)
    assert lm.unread(0) == 0
    lm.forward([Feed(0, 0, PROMPT[:-1], 1)])
    assert lm.unread(0) == 4
    lm.draft([HeadRequest(0, PROMPT, GREEDY, 1)])
    assert lm.unread(0) == 0
    lm.rollback(0, 2)
    lm.forward([Feed(0, 2, [7, 7], 1)])
    lm.copy(0, 1, 3)
    assert (lm.unread(0), lm.unread(1)) == (2, 1)
    lm.catch_up([HeadRequest(0, [3, 1, 7, 7, 2], GREEDY, 1)])
    assert lm.unread(0) == 0
    with pytest.raises(ValueError, match="slot 0 holds 4 positions of 2"):
        lm.draft([HeadRequest(0, PROMPT[:2], GREEDY, 1)])
    lm.discard(0)
    assert lm.unread(0) == 0
    lm.stop()
    assert lm.unread(1) is None


def test_it_drafts_no_further_than_the_context() -> None:
    lm = model(1.0, context=7)
    lm.forward([Feed(0, 0, PROMPT[:-1], 1)])
    assert len(lm.draft([HeadRequest(0, PROMPT, GREEDY, DEPTH)])[0]) == 2


def test_its_forward_takes_its_time() -> None:
    lm = load_model(TARGET, slots=1, heads=f"{TARGET}:delay_ms=20")
    assert isinstance(lm, HeadedScript)
    lm.forward([Feed(0, 0, PROMPT[:-1], 1)])
    began = time.perf_counter()
    lm.draft([HeadRequest(0, PROMPT, GREEDY, 3)])
    assert time.perf_counter() - began > 0.055


@pytest.mark.parametrize("agree", [0.0, 0.7, 1.0])
def test_a_verifier_that_has_one_writes_the_target_s_text(agree: float) -> None:
    rig = Rig(TARGET, ngram=False, heads=f"{TARGET}:agree={agree}")
    rig.open(0, PROMPT, max_tokens=200)
    rig.run()
    assert rig.tokens[0] == oracle(load_model(TARGET, slots=1), PROMPT, 200)
    accepted = 1 - rig.engine.steps / 200
    assert accepted < 0.02 if agree == 0.0 else accepted > 0.3


@pytest.mark.parametrize(
    ("head", "wrong"),
    [
        ("scripted:5:vocab=9", "heads: of 9 ids, beside a target of 24"),
        ("scripted:5:frob=1", "expected scripted:SEED"),
        ("nowhere", "a scripted model has no features for them"),
        ("self:skip=1", "a scripted model has no layers to skip"),
    ],
)
def test_what_does_not_fit_is_refused(head: str, wrong: str) -> None:
    with pytest.raises(ModelError, match=wrong):
        load_model(TARGET, slots=1, heads=head)
