"""Texts of callers among a drafter's sessions, without threads or wire: who goes first, and what failures cost."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from draft_service.commands import CloseSession, Dropped, LoseLink, OpenSession, WriteText, Written
from draft_service.service import deliver
from draft_service.sessions import FAILED, LONG_TEXT_ROWS, ROWS_BESIDE_DRAFTING, Sessions
from specwire.core.law.sampling import Sampling
from specwire.core.messages import FinishReason, Pace
from specwire.core.text import Ending
from specwire.lm import Feed, load_model
from specwire.lm.guesses import guesses
from specwire.lm.law.sampler import NextPlace, choose_plainly
from tests.draft_service.peer import continuation
from tests.draft_service.test_sessions import MODEL, Faulty, Recorder

PROMPT = (3, 1, 4)


def writing(model: Faulty) -> Sessions:
    return Sessions(model, guesses, deliver, choose=choose_plainly)


def faulty(slots: int) -> tuple[Faulty, list[list[Feed]]]:
    """A model, and all that it will have been fed."""
    model, fed = Faulty(load_model(MODEL, slots=slots)), list[list[Feed]]()
    forward = model.model.forward

    def watched(feeds: Sequence[Feed]) -> torch.Tensor:
        fed.append(list(feeds))
        return forward(feeds)

    model.model.forward = watched  # type: ignore[method-assign]
    return model, fed


def asked(link: Recorder, tokens: Sequence[int] = PROMPT, most: int = 5, priority: int = 0) -> WriteText:
    ending = Ending(len(tokens) + most, frozenset(), frozenset())
    return WriteText(link, tuple(tokens), Sampling(), ending, priority)


def opening(link: Recorder, tokens: Sequence[int] = PROMPT, pace: Pace = Pace(1, 3)) -> OpenSession:  # noqa: B008  # a frozen value
    return OpenSession(link, 1, tuple(tokens), Sampling(), pace)


def run(sessions: Sessions) -> None:
    """Until nothing wants a token."""
    while sessions.wanting or sessions.writer.wants(sessions._free):
        sessions.step()
        sessions.deliver()


def told(link: Recorder) -> list[int]:
    return [reply.token for reply in link.replies if isinstance(reply, Written)]


def test_a_text_is_plain_decoding_and_ends_by_its_length() -> None:
    sessions, link = writing(faulty(1)[0]), Recorder()
    sessions.apply(asked(link))
    run(sessions)
    assert told(link) == continuation(MODEL, PROMPT, 5)
    ends = [reply.finish for reply in link.replies if isinstance(reply, Written)]
    assert ends == [None] * 4 + [FinishReason.LENGTH]
    assert (sessions.writer.running, sessions.writer.waiting, sessions._free) == (0, 0, [0])
    assert (sessions.tally.texts, sessions.tally.written, sessions.tally.drafted) == (1, 5, 0)


def test_prompts_of_texts_take_few_rows_beside_drafting_and_many_alone() -> None:
    (model, fed), link, caller = faulty(2), Recorder(), Recorder()
    sessions, prompt = writing(model), [index % 8 for index in range(LONG_TEXT_ROWS + 60)]
    sessions.apply(asked(caller, prompt))
    sessions.apply(opening(link, PROMPT, Pace(1, 4)))
    run(sessions)
    beside = [feeds for feeds in fed if len(feeds) == 2]
    alone = [feeds for feeds in fed if len(feeds) == 1]
    assert [len(feeds[1].tokens) for feeds in beside] == [ROWS_BESIDE_DRAFTING] * 4
    assert len(alone[0][0].tokens) == min(LONG_TEXT_ROWS, len(prompt) - 4 * ROWS_BESIDE_DRAFTING)
    assert link.proposed(1) == continuation(MODEL, PROMPT, 4)
    assert told(caller) == continuation(MODEL, prompt, 5)


def test_a_failed_forward_costs_its_texts_and_the_next_one_works(caplog: pytest.LogCaptureFixture) -> None:
    (model, _), first, second = faulty(1), Recorder(), Recorder()
    sessions = writing(model)
    sessions.apply(asked(first))
    model.raises = True
    run(sessions)
    assert first.replies == [Dropped(0, 13, "the drafter's model failed: RuntimeError")]
    sessions.apply(asked(second))
    run(sessions)
    assert told(second) == continuation(MODEL, PROMPT, 5)
    assert "1 texts" in caplog.text


def test_a_token_that_cannot_be_chosen_costs_its_text_alone() -> None:
    def choose(logits: torch.Tensor, rows: Sequence[int], places: Sequence[NextPlace]) -> Any:
        if any(place.sampling.seed == 5 for place in places):
            raise ZeroDivisionError("a bug, put there by the test")
        return choose_plainly(logits, rows, places)

    (model, _), link, callers = faulty(4), Recorder(), [Recorder(), Recorder(), Recorder()]
    sessions = Sessions(model, guesses, deliver, choose=choose)
    for seed, caller in zip((0, 5, 0), callers, strict=True):
        sessions.apply(replace(asked(caller), sampling=Sampling(seed=seed)))
    sessions.apply(opening(link))
    run(sessions)
    assert callers[1].replies == [Dropped(0, 13, FAILED)]
    assert told(callers[0]) == told(callers[2]) == continuation(MODEL, PROMPT, 5)
    assert link.proposed(1) == continuation(MODEL, PROMPT, 3)
    assert len(sessions._free) == 3


def test_logits_that_are_not_finite_cost_that_text_alone() -> None:
    (model, _), link, callers = faulty(3), Recorder(), [Recorder(), Recorder()]
    sessions = writing(model)
    for caller in callers:
        sessions.apply(asked(caller))
    sessions.apply(opening(link))
    sessions.writer.seat(sessions._free)
    broken = sessions.writer._running[callers[0]].slot
    assert broken is not None
    model.poisoned = frozenset({broken})
    run(sessions)
    assert callers[0].replies == [Dropped(0, 10, "the drafter's logits are not finite")]
    assert told(callers[1]) == continuation(MODEL, PROMPT, 5)
    assert link.proposed(1) == continuation(MODEL, PROMPT, 3)
    assert sorted(sessions._free) == sorted({0, 1, 2} - {next(iter(sessions._open.values())).slot})


def test_the_text_that_came_last_gives_its_slot_up_and_that_of_the_least_priority_first() -> None:
    (model, _), link = faulty(3), Recorder()
    sessions, callers = writing(model), [Recorder() for _ in range(3)]
    for caller, priority in zip(callers, (0, 1, 0), strict=True):
        sessions.apply(asked(caller, most=20, priority=priority))
    sessions.step()
    sessions.apply(opening(link))
    assert set(sessions.writer._running) == {callers[0], callers[1]}
    sessions.apply(OpenSession(link, 2, PROMPT, Sampling(), Pace(1, 1)))
    assert set(sessions.writer._running) == {callers[1]}
    assert [text.link for text in sessions.writer._waiting] == [callers[0], callers[2]]
    sessions.apply(OpenSession(link, 3, PROMPT, Sampling(), Pace(1, 1)))
    sessions.apply(OpenSession(link, 4, PROMPT, Sampling(), Pace(1, 1)))
    assert [reply for reply in link.replies if isinstance(reply, Dropped)] == []
    sessions.deliver()
    assert [reply.handle for reply in link.replies if isinstance(reply, Dropped)] == [4]
    for handle in (1, 2, 3):
        sessions.apply(CloseSession(link, handle))
    run(sessions)
    assert [told(caller) for caller in callers] == [continuation(MODEL, PROMPT, 20)] * 3


@settings(max_examples=60, deadline=None)
@given(st.lists(st.sampled_from(["write", "open", "close", "leave", "step"]), max_size=40), st.integers(1, 3))
def test_every_slot_has_one_holder_whatever_comes(events: list[str], slots: int) -> None:
    sessions, link = writing(faulty(slots)[0]), Recorder()
    callers, handles, left = list[Recorder](), list[int](), Counter[str]()
    for event in events:
        left[event] += 1
        if event == "write":
            callers.append(Recorder())
            sessions.apply(asked(callers[-1], [*PROMPT, left[event] % 8]))
        elif event == "open":
            handles.append(left[event])
            sessions.apply(OpenSession(link, handles[-1], PROMPT, Sampling(), Pace(1, 2)))
        elif event == "close" and handles:
            sessions.apply(CloseSession(link, handles.pop(0)))
        elif event == "leave" and callers:
            sessions.apply(LoseLink(callers.pop(0)))
        elif event == "step":
            sessions.step()
            sessions.deliver()
        held = [each.slot for each in sessions._open.values()]
        held += [each.slot for each in sessions.writer._running.values() if each.slot is not None]
        assert sorted([*held, *sessions._free]) == list(range(slots))
        assert sessions.writer.texts == sessions.writer.running + sessions.writer.waiting
    sessions.apply(LoseLink(link))
    run(sessions)
    for number, caller in enumerate(callers, left["write"] - len(callers) + 1):
        assert told(caller) == continuation(MODEL, [*PROMPT, number % 8], 5)
