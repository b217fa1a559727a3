"""Every sampling option is exact with speculation on: texts and reports are those of the target alone, whatever comes.

At the engine; tests/orchestrator/test_every_option.py asks the whole stack.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specwire.core.law.acceptance import TargetWeights, judge
from specwire.core.law.sampling import LogprobsOf, Sampling, log_probabilities, seen_in, with_rule
from specwire.core.messages import DraftToken, FinishReason, TokenLogprobs, Weights
from specwire.core.text import Stopping
from specwire.core.verify.session import Allowance
from specwire.lm.scripted import Script
from tests.reference_target import Told, alone, close
from tests.verify_service.rig import FAR, Rig, chain, opening

VOCABULARY = 12
# Loops, so that penalties have something to do; ends often, so that minima have.
MODEL = f"scripted:4:vocab={VOCABULARY}:memory=1:spread=4:eos=0.15"
PROMPT = (5, 6, 7, 5)
SCRIPT = Script.parse(MODEL)

samplings = st.builds(
    Sampling,
    temperature=st.sampled_from([0.0, 0.7, 1.5]),
    top_k=st.sampled_from([0, 0, 3]),
    top_p=st.sampled_from([1.0, 0.83]),
    min_p=st.sampled_from([0.0, 0.11]),
    seed=st.integers(0, 99),
    choice=st.integers(0, 2),
    repetition_penalty=st.sampled_from([1.0, 1.3, 0.8]),
    presence_penalty=st.sampled_from([0.0, 0.9, -0.7]),
    frequency_penalty=st.sampled_from([0.0, 0.4, -0.3]),
    logit_bias=st.dictionaries(st.integers(0, VOCABULARY - 1), st.sampled_from([-100.0, -2.0, 1.5]), max_size=3).map(
        lambda bias: tuple(sorted(bias.items()))
    ),
    logprobs=st.sampled_from([0, 3]),
    logprobs_of=st.sampled_from(LogprobsOf),
)
stoppings = st.builds(
    Stopping,
    max_tokens=st.integers(12, 24),
    stop_ids=st.frozensets(st.integers(0, VOCABULARY - 1), max_size=2),
    ignore_eos=st.booleans(),
    min_tokens=st.sampled_from([0, 0, 5, 12]),
)


def known(sampling: Sampling, stopping: Stopping) -> Told:
    return alone(SCRIPT, PROMPT, sampling, stopping)


def told(rig: Rig) -> list[TokenLogprobs]:
    """All reports of session 1 in the order of the verdicts, a connection's tail before what follows it."""
    verdicts = [
        each.verdict
        for reported in rig.reports
        for each in (*(each for admitted in reported.admitted for each in admitted.tail), *reported.decided)
    ]
    return [each for verdict in verdicts for each in verdict.logprobs]


@settings(deadline=None, max_examples=30, derandomize=True)
@given(samplings, stoppings, st.data())
def test_no_option_depends_on_proposals(sampling: Sampling, stopping: Stopping, data: st.DataObject) -> None:
    """Nothing proposed, right guesses, wrong ones, and right ones that go wrong somewhere."""
    tokens, reports, reason = known(sampling, stopping)
    wrong = data.draw(st.lists(st.integers(0, VOCABULARY - 1), min_size=6, max_size=6))
    right = data.draw(st.integers(0, 5))
    guesses: list[Callable[[int], Sequence[int]]] = [
        lambda _: (),
        lambda done: tokens[done : done + 6],
        lambda _: wrong,
        lambda done: [*tokens[done : done + right], *wrong],
    ]
    for ngram, guess in zip((False, False, True, False), guesses, strict=True):
        rig = Rig(MODEL, slots=1, context=64, ngram=ngram)
        rig.tick(opens=(replace(opening(1, PROMPT, sampling=sampling), stopping=stopping),))
        rig.run(rig.proposing(PROMPT, guess))
        assert (rig.tokens[1], rig.finished[1]) == (tokens, reason)
        assert close(told(rig), reports)


@settings(deadline=None, max_examples=25, derandomize=True)
@given(samplings, stoppings, st.integers(0, 24))
def test_a_session_that_goes_on_from_the_log_has_the_same_options(
    sampling: Sampling, stopping: Stopping, cut: int
) -> None:
    """At another verifier: counts are a function of the text, minima of where the output began."""
    tokens, reports, reason = known(sampling, stopping)
    held = tokens[: min(cut, len(tokens) - 1)]
    rig = Rig(MODEL, slots=1, context=64)
    rig.tick(opens=(replace(opening(1, PROMPT, sampling=sampling, decided=held), stopping=stopping, attach=2),))
    rig.run(rig.proposing(PROMPT, lambda done: tokens[len(held) + done :][:6]) if not held else lambda: None)
    assert (held + rig.tokens[1], rig.finished[1]) == (tokens, reason)
    assert close(told(rig), reports[len(held) :])


def test_what_a_lost_link_left_behind_is_reported_with_it() -> None:
    """The tail of a resumed session brings the reports of its tokens, and cuts them as it cuts the tokens."""
    sampling = Sampling(repetition_penalty=1.3, presence_penalty=0.5, logprobs=2)
    stopping = Stopping(20, ignore_eos=True)
    tokens, reports, _ = known(sampling, stopping)
    rig = Rig(MODEL, slots=1, context=64)
    first = replace(opening(1, PROMPT, sampling=sampling, allowance=Allowance(4, 14)), stopping=stopping)
    rig.tick(opens=(first,))
    rig.run(rig.proposing(PROMPT, lambda done: tokens[done : done + 4]))
    assert rig.tokens[1] == tokens[:10]
    rig.engine.sessions.link_lost(0)
    rig.reports.clear()
    rig.tick(1, opens=(replace(first, attach=2, tokens=(*PROMPT, *tokens[:7]), allowance=FAR),))
    rig.positions.clear()
    rig.run()
    resumed = [admitted for reported in rig.reports for admitted in reported.admitted]
    assert [admitted.resumed for admitted in resumed] == [True]
    assert close(told(rig), reports[7:])


@pytest.mark.parametrize("least", [0, 3, 6])
def test_no_id_that_ends_the_text_is_drawn_before_the_minimum(least: int) -> None:
    """Everything wants to end it: the end of sequence by its logit, another id by a bias, both as stop ids."""
    sampling = Sampling(logit_bias=((0, 90.0), (3, 100.0)))
    rig = Rig(MODEL, slots=1, context=64)
    stopping = Stopping(9, frozenset({3}), min_tokens=least)
    rig.tick(opens=(replace(opening(1, PROMPT, sampling=sampling), stopping=stopping),))
    rig.run(rig.proposing(PROMPT, lambda _: [3] * 6))
    assert (len(rig.tokens[1]), rig.tokens[1][-1], rig.finished[1]) == (least + 1, 3, FinishReason.STOP_ID)
    assert not {0, 3} & set(rig.tokens[1][:least])


@pytest.mark.parametrize("rule", ["rejection", "block", "threshold(0.2)", "typical(0.3,0.09)"])
def test_rules_that_look_at_proposals_are_told_of_the_target_that_the_options_make(
    rule: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At each place of a window: as if the draft tokens before it had been decided, minima and penalties included."""
    options = Sampling(0.9, top_k=5, seed=3, repetition_penalty=1.3, frequency_penalty=0.4, logit_bias=((3, 1.5),))
    stopping = Stopping(14, min_tokens=5)
    anything = Weights(tuple(range(VOCABULARY)), (1,) * VOCABULARY)
    pairs = [(5, 5), (9, 5), (1, 9)]
    rig, widths, number = Rig(MODEL, slots=1, context=64), [], 0
    told_of: list[tuple[list[int], Sequence[Any]]] = []

    def watched(
        acceptance: Any, target: TargetWeights, window: Sequence[DraftToken], late: DraftToken | None = None
    ) -> Any:
        output = [*rig.tokens[1], *(draft.token for draft in window)]
        widths.append(len(window))
        for row in range(len(window) + 1):
            told_of.append((output[: len(output) - len(window) + row], target.probabilities(row, range(VOCABULARY))))
        return judge(acceptance, target, window, late)

    def propose() -> None:
        nonlocal number
        if 1 in rig.tokens and 1 not in rig.finished:
            number += 1
            chunk = chain(number, [*PROMPT, *rig.tokens[1]], pairs[number % len(pairs)])
            rig.propose(1, replace(chunk, weights=(anything,) * 2 if "(" not in rule else ()))

    monkeypatch.setattr("specwire.lm.law.sampler.judge", watched)
    rig.tick(opens=(replace(opening(1, PROMPT, sampling=with_rule(options, rule)), stopping=stopping),))
    rig.run(propose)
    assert rig.finished[1] in (FinishReason.EOS, FinishReason.LENGTH)
    assert widths.count(2) > 3
    for output, probabilities in told_of:
        np.testing.assert_allclose(probabilities, of_target(output, options, stopping), atol=1e-6)


def of_target(output: Sequence[int], sampling: Sampling, stopping: Stopping) -> list[float]:
    """What the target may say behind `output`, by the reference: of each id the probability."""
    prefix = 0
    for token in (*PROMPT, *output):
        prefix = SCRIPT.extend(prefix, token)
    logits = SCRIPT.logits(prefix).astype(np.float64)
    banned = (0,) if len(output) < stopping.min_tokens else ()
    seen = seen_in([*PROMPT, *output], len(PROMPT))
    return list(np.exp(log_probabilities(logits, sampling, seen, banned)))
