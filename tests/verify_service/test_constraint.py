"""A constraint is part of the target's distribution: no proposal, takeover or lost link changes a constrained text.

The constraint is an automaton, so that an oracle that knows nothing of windows can say what the text must be. Real
grammars are tried in tests/orchestrator/test_constrained.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specwire.core.invalid import Code
from specwire.core.law.acceptance import choose
from specwire.core.law.sampling import History, Sampling
from specwire.core.messages import FinishReason
from specwire.core.text import Stopping
from specwire.core.verify.session import Allowance
from specwire.lm import LanguageModel, load_model
from tests.verify_service.automaton import ASKED, Automaton, Late, Walk
from tests.verify_service.rig import FAR, Rig, opening
from verify_service.engine.messages import Begun, Opening, Refusal

VOCABULARY = 8
# Id 0 is its end of sequence, which it likes.
MODEL = f"scripted:4:vocab={VOCABULARY}:memory=1:spread=4:eos=0.2"
PROMPT = (5, 6, 7)
END = 0
STATES = 4

automata = st.builds(
    lambda steps, accepting: Automaton(steps, accepting, VOCABULARY, END),
    st.lists(
        st.dictionaries(st.integers(1, VOCABULARY - 1), st.integers(0, STATES - 1), max_size=4),
        min_size=STATES,
        max_size=STATES,
    ),
    st.frozensets(st.integers(0, STATES - 1)),
)
samplings = st.builds(
    Sampling,
    temperature=st.sampled_from([0.0, 0.7, 1.5]),
    top_k=st.sampled_from([0, 0, 3]),
    top_p=st.sampled_from([1.0, 0.83]),
    min_p=st.sampled_from([0.0, 0.11]),
    seed=st.integers(0, 99),
    repetition_penalty=st.sampled_from([1.0, 1.3]),
    frequency_penalty=st.sampled_from([0.0, 0.4]),
    constraint=st.just(ASKED),
)
stoppings = st.builds(
    Stopping,
    max_tokens=st.integers(4, 16),
    stop_ids=st.frozensets(st.integers(1, VOCABULARY - 1), max_size=1),
    min_tokens=st.sampled_from([0, 0, 3]),
)


def alone(
    lm: LanguageModel, automaton: Automaton, sampling: Sampling, stopping: Stopping
) -> tuple[list[int], FinishReason | None]:
    """What the target alone decides; no reason: it can neither go on nor end."""
    script = lm.script  # type: ignore[attr-defined]  # of the scripted model
    output: list[int] = []
    prefix, ends = 0, stopping.stop_ids | {END}
    for token in PROMPT:
        prefix = script.extend(prefix, token)
    while True:
        state = automaton.state(output)
        assert state is not None
        allowed, banned = automaton.mask(state), tuple(ends) if len(output) < stopping.min_tokens else ()
        if not any(allowed[token] and token not in banned for token in range(VOCABULARY)):
            return output, None
        seen = History(PROMPT, output).seen() if sampling.penalised else None
        logits = script.logits(prefix).astype(np.float64)
        token = choose(logits, len(PROMPT) + len(output), sampling, seen, banned, allowed)
        output.append(token)
        prefix = script.extend(prefix, token)
        if token in ends:
            return output, FinishReason.EOS if token == END else FinishReason.STOP_ID
        if len(output) == stopping.max_tokens:
            return output, FinishReason.LENGTH


def begin(rig: Rig, opened: Opening, automaton: Automaton, link: int = 0) -> None:
    """Open, and have it compiled: behind what there is of the output."""
    walk = Walk(automaton)
    output = opened.tokens[opened.prompt_length :]
    assert walk.take(output) == len(output)
    rig.tick(link, opens=(opened,))
    rig.engine.inbox.put(Begun(link, opened.handle, opened.generation, walk))


def ended(rig: Rig) -> tuple[list[int], FinishReason | None]:
    """What was decided, and why it ended; a session that is stuck is refused by that name."""
    reason = rig.finished.get(1)
    assert [refusal.code for refusal in rig.refused] == ([] if reason is not None else [Code.OUT_OF_RANGE])
    return rig.tokens[1], reason


@settings(deadline=None, max_examples=60, derandomize=True)
@given(automata, samplings, stoppings, st.data())
def test_a_constrained_text_does_not_depend_on_proposals(
    automaton: Automaton, sampling: Sampling, stopping: Stopping, data: st.DataObject
) -> None:
    """Nothing proposed, right guesses, random ones (mostly forbidden), and right ones that go wrong somewhere."""
    expected = alone(load_model(MODEL, slots=1, context=64), automaton, sampling, stopping)
    tokens = expected[0]
    wrong = data.draw(st.lists(st.integers(0, VOCABULARY - 1), min_size=6, max_size=6))
    right = data.draw(st.integers(0, 5))
    guesses: list[Callable[[int], Sequence[int]]] = [
        lambda _: (),
        lambda done: [*tokens[done : done + 6], *wrong][:6],
        lambda _: wrong,
        lambda done: [*tokens[done : done + right], *wrong],
    ]
    for ngram, guess in zip((False, False, True, False), guesses, strict=True):
        rig = Rig(MODEL, slots=1, context=64, ngram=ngram)
        begin(rig, replace(opening(1, PROMPT, sampling=sampling), stopping=stopping), automaton)
        rig.run(rig.proposing(PROMPT, guess))
        assert ended(rig) == expected


@settings(deadline=None, max_examples=40, derandomize=True)
@given(automata, samplings, stoppings, st.integers(0, 16))
def test_a_session_that_goes_on_from_the_log_has_its_constraint_behind_what_is_decided(
    automaton: Automaton, sampling: Sampling, stopping: Stopping, cut: int
) -> None:
    tokens, reason = alone(load_model(MODEL, slots=1, context=64), automaton, sampling, stopping)
    known = tokens[: min(cut, max(0, len(tokens) - 1))]
    rig = Rig(MODEL, slots=1, context=64)
    opened = replace(opening(1, PROMPT, sampling=sampling, decided=known), stopping=stopping, attach=2)
    begin(rig, opened, automaton)
    rig.run()
    decided, found = ended(rig)
    assert ([*known, *decided], found) == (tokens, reason)


def test_a_held_session_goes_on_with_the_constraint_that_it_has() -> None:
    """Its new connection's own is not needed, and stands elsewhere by then."""
    automaton = Automaton([{1: 1, 2: 1}, {3: 0, 4: 0}], frozenset({0}), VOCABULARY, END)
    sampling = Sampling(temperature=1.5, seed=3, constraint=ASKED)
    stopping = Stopping(16)
    tokens, reason = alone(load_model(MODEL, slots=1, context=64), automaton, sampling, stopping)
    assert len(tokens) > 6
    rig = Rig(MODEL, slots=1, context=64)
    first = replace(opening(1, PROMPT, sampling=sampling, allowance=Allowance(3, 8)), stopping=stopping)
    begin(rig, first, automaton)
    rig.run()
    assert rig.tokens[1] == tokens[:5]
    rig.engine.sessions.link_lost(0)
    begin(rig, replace(first, attach=2, tokens=(*PROMPT, *tokens[:2]), allowance=FAR), automaton, link=1)
    rig.positions.clear()
    rig.tokens[1] = rig.tokens[1][:2]
    rig.run()
    assert [admitted.resumed for reported in rig.reports for admitted in reported.admitted] == [False, True]
    assert ended(rig) == (tokens, reason)


LETTERS = Automaton([{1: 0, 2: 0}], frozenset({0}), VOCABULARY, END)
OPENED = opening(1, PROMPT, sampling=Sampling(constraint=ASKED), max_tokens=5)


def test_nothing_is_decided_or_told_before_the_constraint_is_there() -> None:
    rig = Rig(MODEL, slots=1, context=64)
    rig.tick(opens=(OPENED,))
    for _ in range(5):
        rig.step()
    assert rig.reports == []
    rig.engine.inbox.put(Begun(0, 1, (1, 0), Walk(LETTERS)))  # of an older connection
    rig.step()
    assert rig.reports == []
    rig.engine.inbox.put(Begun(0, 1, OPENED.generation, Walk(LETTERS)))
    rig.run()
    assert set(rig.tokens[1]) <= {1, 2, END}


def test_a_constraint_that_cannot_be_had_ends_its_session_only() -> None:
    rig = Rig(MODEL, slots=2, context=64)
    rig.tick(opens=(OPENED,))
    rig.open(2, PROMPT, max_tokens=3)
    rig.run()
    refusal = Refusal(1, Code.INVALID_ARGUMENT, "grammar: is none")
    rig.engine.inbox.put(Begun(0, 1, OPENED.generation, refusal))
    rig.run()
    assert (rig.refused, rig.held_slots(), len(rig.tokens[2])) == ([refusal], 0, 3)
    rig.engine.inbox.put(Begun(0, 1, OPENED.generation, Walk(LETTERS)))  # too late
    rig.run()
    assert 1 not in rig.tokens


def test_a_session_whose_link_is_lost_meanwhile_is_not_kept() -> None:
    """Nobody would ever begin it."""
    rig = Rig(MODEL, slots=1, context=64)
    rig.tick(opens=(OPENED,))
    rig.step()
    rig.engine.sessions.link_lost(0)
    assert rig.held_slots() == 0
    begin(rig, replace(OPENED, attach=2), LETTERS, link=1)
    rig.run()
    assert set(rig.tokens[1]) <= {1, 2, END}


def test_its_deadline_passes_also_while_it_is_compiled() -> None:
    rig = Rig(MODEL, slots=1, context=64)
    rig.tick(opens=(replace(OPENED, deadline_us=50.0),))
    rig.step()
    rig.now = 100.0
    rig.run()
    assert rig.finished == {1: FinishReason.DEADLINE}


@pytest.mark.parametrize("proposed", [(), (3, 3, 3), (3, 3, 3, 3, 3)])
def test_a_dead_end_is_told_by_where_and_why(proposed: tuple[int, ...]) -> None:
    """Three tokens, then nothing; also where what is proposed goes on into it."""
    dead = Automaton([{3: 1}, {3: 2}, {3: 3}, {}], frozenset(), VOCABULARY, END)
    rig = Rig(MODEL, slots=1, context=64)
    begin(rig, OPENED, dead)
    rig.run(rig.proposing(PROMPT, lambda _: proposed))
    assert rig.tokens[1] == [3, 3, 3]
    message = "grammar: the text may neither go on nor end at position 6"
    assert [(each.code, each.message) for each in rig.refused] == [(Code.OUT_OF_RANGE, message)]
    assert rig.held_slots() == 0


@pytest.mark.parametrize(("broken", "code"), [(False, Code.INVALID_ARGUMENT), (True, Code.INTERNAL)])
def test_a_constraint_that_asks_for_too_much_in_the_middle_is_no_dead_end(broken: bool, code: Code) -> None:
    """Nor is one whose process is gone, which is nobody's fault but the server's."""
    dead = Automaton([{3: 1}, {}], frozenset(), VOCABULARY, END)
    rig = Rig(MODEL, slots=1, context=64)
    walk = Walk(dead)
    walk.trouble, walk.broken = "took too much", broken
    rig.tick(opens=(OPENED,))
    rig.engine.inbox.put(Begun(0, OPENED.handle, OPENED.generation, walk))
    rig.run()
    told = [(each.code, each.message) for each in rig.refused]
    assert told == [(code, "grammar: took too much, at position 4")]
    assert rig.held_slots() == 0


@settings(deadline=None, max_examples=25, derandomize=True)
@given(automata, samplings, stoppings, st.lists(st.booleans(), min_size=1, max_size=9), st.data())
def test_a_constraint_that_answers_late_changes_no_text_and_keeps_nobody_waiting(
    automaton: Automaton, sampling: Sampling, stopping: Stopping, late: list[bool], data: st.DataObject
) -> None:
    """Its session is left out of the steps meanwhile; another one goes on."""
    expected = alone(load_model(MODEL, slots=1, context=64), automaton, sampling, stopping)
    wrong = data.draw(st.lists(st.integers(0, VOCABULARY - 1), min_size=6, max_size=6))
    right = data.draw(st.integers(0, 6))
    rig = Rig(MODEL, slots=2, context=64)
    opened = replace(opening(1, PROMPT, sampling=sampling), stopping=stopping)
    rig.tick(opens=(opened, replace(opening(2, PROMPT), stopping=Stopping(16, ignore_eos=True))))
    rig.engine.inbox.put(Begun(0, 1, opened.generation, Late(automaton, [*late, False])))
    propose = rig.proposing(PROMPT, lambda done: [*expected[0][done : done + right], *wrong][:6])
    for _ in range(400):
        propose()
        rest = rig.step()
        if rest is not None:
            rig.now = max(rig.now, min(rest.until_us, rig.now + 1e4))
        if len(rig.finished) + len(rig.refused) == 2:
            break
    assert ended(rig) == expected
    assert len(rig.tokens[2]) == 16


def test_a_constraint_that_never_answers_costs_its_own_session_only() -> None:
    rig = Rig(MODEL, slots=2, context=64)
    rig.tick(opens=(OPENED, replace(opening(2, PROMPT), stopping=Stopping(16, ignore_eos=True))))
    rig.engine.inbox.put(Begun(0, 1, OPENED.generation, Late(LETTERS, [True])))
    for _ in range(30):
        rig.step()
    rest = rig.step()
    assert rest is not None
    assert not rest.waiting
    assert 0 < rest.until_us - rig.now < 1e6
    assert (rig.tokens[1], len(rig.tokens[2])) == ([], 16)
