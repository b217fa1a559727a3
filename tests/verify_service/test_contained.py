"""What fails for one session in a step ends that session, by a status of its own; the others' texts are unchanged.

Whatever part of the step it is: constraint, plan, draw, decision, report, ledger or the forward itself. And no options
that a request may have fail at all.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from specwire.core.invalid import Code
from specwire.core.law.acceptance import RowSampling
from specwire.core.law.sampling import Acceptance, LogprobsOf, Sampling
from specwire.core.messages import FinishReason, Proposal
from specwire.core.policy.heads import HeadDepth
from specwire.core.text import Stopping
from specwire.core.verify.session import RunningSession, VerifySession
from specwire.lm import Feed
from specwire.lm.law import sampler
from specwire.lm.law.logits import adjusted
from tests.verify_service.automaton import ASKED, Automaton, Walk
from tests.verify_service.rig import COUPLED, GREEDY, Rig, chain, opening, oracle
from tests.verify_service.scripted_heads import ScriptedHeads
from verify_service.engine.batch import Part
from verify_service.engine.heads import HeadDrafting
from verify_service.engine.messages import Begun, Opening
from verify_service.engine.session_manager import FAILED
from verify_service.engine.sessions import Held

VOCABULARY = 16
END = 0
MODEL = f"scripted:4:vocab={VOCABULARY}:spread=4:eos=0.05"
PROMPT = (5, 6, 7)
# Three tokens, then nothing.
DEAD = Automaton([{3: 1}, {3: 2}, {3: 3}, {}], frozenset(), VOCABULARY, END)
# One word, which then can only end: what `guided_choice ["red"]` is, where `min_tokens` does not let it.
RED = Automaton([{9: 1}, {}], frozenset({1}), VOCABULARY, END)
ANY = Automaton([dict.fromkeys(range(1, VOCABULARY), 0)], frozenset({0}), VOCABULARY, END)

# ----------------------------------------------------------------------------------------------------------------------
# One session meets a dead end, with everything that is done at a row asked for.


@pytest.mark.parametrize("rule", [None, "rejection", "threshold(0.1)"])
@pytest.mark.parametrize("of", list(LogprobsOf))
@pytest.mark.parametrize(("automaton", "least", "decided"), [(RED, 40, [9]), (DEAD, 0, [3, 3, 3]), (RED, 1, [9, END])])
def test_a_dead_end_with_logprobs_ends_its_session_only(
    automaton: Automaton, least: int, decided: list[int], of: LogprobsOf, rule: str | None
) -> None:
    """`guided_choice ["red"]`, `min_tokens 50`, `logprobs 0`: no token is decided, so there is nothing to report."""
    rig = Rig(MODEL)
    acceptance = None if rule is None else Acceptance.parse(rule)
    sampling = Sampling(temperature=1.0, seed=3, constraint=ASKED, logprobs=0, logprobs_of=of, acceptance=acceptance)
    asked = replace(opening(1, PROMPT, sampling=sampling), stopping=Stopping(40, min_tokens=least))
    rig.tick(opens=(asked,))
    rig.engine.inbox.put(Begun(0, 1, asked.generation, Walk(automaton)))
    for handle, other in ((2, GREEDY), (3, COUPLED)):
        rig.tick(opens=(replace(opening(handle, PROMPT, sampling=other), stopping=Stopping(40, ignore_eos=True)),))
    rig.run()
    assert rig.tokens[1] == decided
    ended = [] if decided[-1] == END else [(1, Code.OUT_OF_RANGE)]
    assert [(each.handle, each.code) for each in rig.refused] == ended
    assert rig.finished.get(1) is (FinishReason.EOS if decided[-1] == END else None)
    for handle, other in ((2, GREEDY), (3, COUPLED)):
        assert rig.tokens[handle] == oracle(rig.lm, PROMPT, 40, other)


# ----------------------------------------------------------------------------------------------------------------------
# A part of the step raises for one session: a bug of ours, put there by the test.

GUILTY = 2
PROMPTS = {handle: (*PROMPT, handle) for handle in (1, GUILTY, 3)}
SAMPLINGS = {1: GREEDY, GUILTY: Sampling(temperature=1.0, seed=8, frequency_penalty=0.5, logprobs=1), 3: COUPLED}


class Bug(Exception):
    """Nothing that our code expects."""


def fails(*_: object, **__: object) -> Any:
    raise Bug("put there by the test")


def guilty(rig: Rig) -> Held:
    found = rig.engine.roster.holder(f"session-{GUILTY}")
    assert found is not None
    return found


def of_session(kind: type, name: str) -> Callable[[Rig], Any]:
    """A method of the guilty session fails; those of others work on."""

    @contextmanager
    def broken(rig: Rig) -> Iterator[None]:
        held, method = guilty(rig), getattr(kind, name)
        own: tuple[object, ...] = (held, held.session, held.running)

        def called(self: object, *args: object, **kwargs: object) -> Any:
            return fails() if any(self is each for each in own) else method(self, *args, **kwargs)

        with patch.object(kind, name, called):
            yield

    return broken


@contextmanager
def of_part(rig: Rig, name: str) -> Iterator[None]:
    held, method = guilty(rig), getattr(Part, name)

    def called(self: Part) -> Any:
        return fails() if self.held is held else method(self)

    with patch.object(Part, name, called):
        yield


@contextmanager
def of_row(_: Rig) -> Iterator[None]:
    """A batch that the row is in cannot be drawn, as where its mask has another length."""

    def called(changed: torch.Tensor, rows: Sequence[RowSampling]) -> torch.Tensor:
        return fails() if any(row.sampling == SAMPLINGS[GUILTY] for row in rows) else adjusted(changed, rows)

    with patch.object(sampler, "adjusted", called):
        yield


@contextmanager
def of_report(_: Rig) -> Iterator[None]:
    with patch.object(sampler, "logprobs", fails):
        yield


@contextmanager
def of_forward(rig: Rig) -> Iterator[None]:
    """A forward that the session takes part in fails; what it wrote is what a rollback takes back."""
    slot, forward = guilty(rig).slot, rig.lm.forward

    def called(feeds: Sequence[Feed]) -> torch.Tensor:
        logits = forward(feeds)
        return fails() if any(feed.slot == slot for feed in feeds) else logits

    with patch.object(rig.lm, "forward", called):
        yield


@contextmanager
def of_proposal(rig: Rig) -> Iterator[None]:
    with of_session(RunningSession, "propose")(rig):
        rig.propose(GUILTY, chain(0, PROMPTS[GUILTY], [1]))
        yield


@contextmanager
def of_progress(rig: Rig) -> Iterator[None]:
    with of_session(RunningSession, "allow")(rig):
        rig.tick(progress=((GUILTY, guilty(rig).session.allowance),))
        yield


PLACES: dict[str, Callable[[Rig], Any]] = {
    "heard": of_session(VerifySession, "heard"),
    "looks": of_session(Held, "looks"),
    "candidate": of_session(RunningSession, "candidate"),
    "ask": of_session(VerifySession, "ask"),
    "rows": lambda rig: of_part(rig, "rows"),
    "seen": of_session(VerifySession, "seen"),
    "row": of_row,
    "report": of_report,
    "clipped": of_session(VerifySession, "clipped"),
    "resolve": of_session(VerifySession, "resolve"),
    "decided": of_session(RunningSession, "decided"),
    "forward": of_forward,
    "proposal": of_proposal,
    "progress": of_progress,
}


@pytest.mark.parametrize("place", PLACES)
def test_what_raises_for_one_session_ends_that_one(place: str, caplog: pytest.LogCaptureFixture) -> None:
    rig = Rig(MODEL)
    for handle, prompt in PROMPTS.items():
        asked = opening(handle, prompt, sampling=SAMPLINGS[handle])
        rig.tick(opens=(replace(asked, stopping=Stopping(30, ignore_eos=True)),))
    for _ in range(3):
        rig.step()
    with caplog.at_level(logging.ERROR), PLACES[place](rig):
        rig.run()
    assert [(each.handle, each.code) for each in rig.refused] == [(GUILTY, Code.INTERNAL)]
    assert rig.refused[0].message in (FAILED, "the target's forward failed; the verifier's log says why")
    assert any(record.exc_info is not None and record.exc_info[0] is Bug for record in caplog.records)
    for handle in (1, 3):
        assert rig.tokens[handle] == oracle(rig.lm, PROMPTS[handle], 30, SAMPLINGS[handle])
    assert rig.held_slots() == 0


def test_an_open_that_fails_is_refused_and_the_tick_goes_on() -> None:
    rig = Rig(MODEL)
    session, opens = rig.engine.sessions._session, [opening(handle, PROMPTS[handle]) for handle in PROMPTS]

    def called(asked: Opening) -> VerifySession:
        return fails() if asked.handle == GUILTY else session(asked)

    with patch.object(rig.engine.sessions, "_session", called):
        rig.tick(opens=tuple(replace(each, stopping=Stopping(9, ignore_eos=True)) for each in opens))
        rig.run()
    assert [(each.handle, each.code, each.message) for each in rig.refused] == [(GUILTY, Code.INTERNAL, FAILED)]
    assert {handle: len(tokens) for handle, tokens in rig.tokens.items()} == {1: 9, 3: 9}


def test_memory_that_a_report_lacks_is_told_as_such() -> None:
    rig = Rig(MODEL)
    rig.open(1, PROMPT, sampling=Sampling(logprobs=0))
    with patch.object(sampler, "logprobs", side_effect=MemoryError):
        rig.run()
    assert [each.code for each in rig.refused] == [Code.RESOURCE_EXHAUSTED]


# ----------------------------------------------------------------------------------------------------------------------
# Requests with options as any client may set them, several at a time.


@dataclass(frozen=True)
class Asked:
    """A session. automaton: its constraint. guess: what is proposed for it, behind the prompt."""

    opening: Opening
    automaton: Automaton | None
    guess: tuple[int, ...]


automata = st.one_of(
    st.sampled_from([None, None, RED, DEAD, ANY]),
    st.builds(
        lambda steps, accepting: Automaton(steps, accepting, VOCABULARY, END),
        st.lists(
            st.dictionaries(st.integers(1, VOCABULARY - 1), st.integers(0, 3), max_size=4), min_size=4, max_size=4
        ),
        st.frozensets(st.integers(0, 3)),
    ),
)
biases = st.one_of(
    st.just(()),
    st.dictionaries(st.integers(0, VOCABULARY - 1), st.sampled_from([-100.0, 100.0, 0.0, 1.5]), max_size=4).map(
        lambda found: tuple(sorted(found.items()))
    ),
    st.sampled_from([tuple((token, bias) for token in range(VOCABULARY)) for bias in (-100.0, 100.0)]),
)
RULES = ("rejection", "block", "threshold(0.000001)", "threshold(1)", "typical(1,1)", "typical(0.001,0.001)")


@st.composite
def samplings(draw: st.DrawFn, constrained: bool) -> Sampling:
    """Every option, at its usual values and at the ends of its range."""
    temperature = draw(st.sampled_from([0.0, 0.0, 0.7, 1.0, 100.0, 1e-3, 1e-4]))
    rule = draw(st.sampled_from([None, None, None, *RULES]))
    lossy_or_warm = rule is not None and (temperature > 0.0 or rule.startswith(("threshold", "typical")))
    logprobs = draw(st.sampled_from([None, None, 0, 1, 20]))
    return Sampling(
        temperature=temperature,
        top_k=draw(st.sampled_from([0, 0, 1, 3, VOCABULARY, (1 << 32) - 1])),
        top_p=draw(st.sampled_from([1.0, 1.0, 0.5, 5e-324, 1.0 - 2**-53])),
        min_p=draw(st.sampled_from([0.0, 0.0, 0.1, 1.0, 5e-324])),
        seed=draw(st.sampled_from([0, 7, (1 << 64) - 1])),
        choice=draw(st.sampled_from([0, (1 << 32) - 1])),
        repetition_penalty=draw(st.sampled_from([1.0, 1.0, 0.01, 100.0])),
        presence_penalty=draw(st.sampled_from([0.0, 0.0, -2.0, 2.0])),
        frequency_penalty=draw(st.sampled_from([0.0, 0.0, -2.0, 2.0])),
        logit_bias=draw(biases),
        logprobs=logprobs,
        logprobs_of=LogprobsOf.MODEL if logprobs is None else draw(st.sampled_from(list(LogprobsOf))),
        acceptance=Acceptance.parse(rule) if rule is not None and lossy_or_warm else None,
        constraint=ASKED if constrained else None,
    )


@st.composite
def sessions(draw: st.DrawFn, handle: int) -> Asked:
    automaton = draw(automata)
    most = draw(st.sampled_from([1, 2, 12, 50]))
    stop_ids = draw(st.sampled_from([frozenset[int](), frozenset({3}), frozenset(range(1, VOCABULARY - 1))]))
    ends = automaton is None and draw(st.booleans())
    stopping = Stopping(most, stop_ids, ends, draw(st.sampled_from([0, 0, 1, most])))
    ids = st.integers(0, VOCABULARY - 1)
    asked = replace(
        opening(handle, tuple(draw(st.lists(ids, min_size=1, max_size=4)))),
        sampling=draw(samplings(automaton is not None)),
        stopping=stopping,
        ngram=draw(st.booleans()),
        head=draw(st.booleans()),
        prediction=tuple(draw(st.lists(ids, max_size=6))),
        priority=draw(st.sampled_from([-100, 0, 100])),
        scope=draw(st.sampled_from([b"", b"a"])),
        shared=draw(st.booleans()),
        ledger_us=draw(st.sampled_from([0, 1, 1 << 40, -(1 << 40)])),
        epoch=draw(st.sampled_from([0, 5])),
    )
    return Asked(asked, automaton, tuple(draw(st.lists(ids, max_size=5))))


Ended = tuple[list[int], FinishReason | None, Code | None]


def served(asked: Sequence[Asked], guessing: bool) -> dict[int, Ended]:
    """How each ends when these are served together, beside a head. guessing: something is proposed for them."""
    heads = ScriptedHeads(lambda right: right, MODEL)
    drafting = HeadDrafting(heads, HeadDepth({1: 20.0})) if guessing else None
    rig = Rig(MODEL, slots=max(1, len(asked)), context=128, text_memory=1 << 20, drafting=drafting)
    for each in asked:
        rig.tick(opens=(each.opening if guessing else replace(each.opening, ngram=False, shared=False),))
        if each.automaton is not None:
            rig.engine.inbox.put(Begun(0, each.opening.handle, each.opening.generation, Walk(each.automaton)))
        if guessing:
            text = each.opening.tokens
            rig.propose(each.opening.handle, chain(1, text, each.guess), Proposal(0, 2, len(text), 1, each.guess))
    rig.run()
    assert not heads.stopped, "the head was switched off for all"
    refused = {each.handle: each.code for each in rig.refused}
    handles = [each.opening.handle for each in asked]
    return {handle: (rig.tokens.get(handle, []), rig.finished.get(handle), refused.get(handle)) for handle in handles}


neighbours = st.tuples(*(sessions(handle) for handle in (1, 2, 3, 4)))


def hurt_nobody(asked: tuple[Asked, ...]) -> Counter[str]:
    """All end, by the text or by a dead end of their own; and as they do alone, where no guess may change the text."""
    together = served(asked, guessing=True)
    for each in asked:
        tokens, finish, code = together[each.opening.handle]
        assert (finish is None) == (code is Code.OUT_OF_RANGE), (each, finish, code)
        assert finish is not None or each.automaton is not None
        if each.opening.sampling.guessed:
            assert (tokens, finish, code) == served([each], guessing=False)[each.opening.handle]
    return Counter((finish or code or Code.OK).name for _, finish, code in together.values())


@settings(deadline=None, max_examples=100, derandomize=True)
@given(neighbours)
def test_no_options_hurt_another_session(asked: tuple[Asked, ...]) -> None:
    hurt_nobody(asked)
