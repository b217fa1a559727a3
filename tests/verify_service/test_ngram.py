"""The verifier's own proposals: the text is what it is without them, and they are asked where they pay."""

from __future__ import annotations

from pathlib import Path

import pytest

from specwire.core.law.sampling import Sampling
from specwire.core.messages import Outcome, SourceKind, Verdict
from specwire.core.policy.tunables import SHORT_CHAIN
from specwire.core.policy.windows import Guess
from specwire.core.verify.text_sources import NgramSource, TextSource
from specwire.telemetry.tally import window_counts
from specwire.v1 import common_pb2
from tests.verify_service.peer import connected, serving
from tests.verify_service.rig import COUPLED, GREEDY, Rig, chain, oracle

LOOPING = "scripted:5:memory=2"
PROMPTS = {1: (7, 3, 9), 2: (4, 4, 4, 4, 4), 3: (8, 20, 31, 8, 20, 31, 8)}


def verdicts(rig: Rig, handle: int) -> list[Verdict]:
    return [each.verdict for report in rig.reports for each in report.decided if each.handle == handle]


def accepted(rig: Rig, handle: int, kind: SourceKind) -> int:
    mine = [verdict for verdict in verdicts(rig, handle) if verdict.kind is kind]
    return sum(window_counts(verdict.outcomes, verdict.width).accepted for verdict in mine)


@pytest.mark.parametrize("sampling", [GREEDY, COUPLED, Sampling(0.3, 8, 0.9, 3)])
def test_texts_of_several_sessions_are_the_target_s(sampling: Sampling) -> None:
    rig = Rig(LOOPING, context=2048, growth=0.0)
    for handle, prompt in PROMPTS.items():
        rig.open(handle, prompt, max_tokens=1200, sampling=sampling)
    rig.run()
    for handle, prompt in PROMPTS.items():
        assert rig.tokens[handle] == oracle(rig.lm, prompt, 1200, sampling)
        assert any(verdict.kind is SourceKind.NGRAM for verdict in verdicts(rig, handle))


def test_a_loop_is_decided_many_tokens_at_a_time() -> None:
    rig = Rig(LOOPING, context=1024, growth=0.05)
    rig.open(1, PROMPTS[1], max_tokens=400)
    rig.run()
    assert rig.engine.steps < 150
    assert accepted(rig, 1, SourceKind.NGRAM) > 250
    assert accepted(rig, 1, SourceKind.DRAFTER) == 0


@pytest.mark.parametrize(("sessions", "plans"), [(1, 15), (3, 5)])
def test_it_looks_seldom_where_no_guess_pays(sessions: int, plans: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each further row costs as much as five steps: hardly a window is worth it. Steps take 1 and 11 ms. The text is
    all loops, which is noticed every few tokens.
    """
    looked = 0

    def look(source: NgramSource) -> Guess | None:
        nonlocal looked
        looked += 1
        return own(source)

    own = NgramSource.look
    monkeypatch.setattr(NgramSource, "look", look)
    rig = Rig(LOOPING, context=1024, growth=5.0)
    for handle in range(1, sessions + 1):
        rig.open(handle, PROMPTS[handle], max_tokens=900)
    rig.run()
    decided = sum(map(len, rig.tokens.values()))
    assert decided == 900 * sessions
    assert decided / plans <= looked < 0.4 * decided


@pytest.mark.parametrize(
    ("in_vain", "right", "unsearched_us", "looks"),
    [
        (SHORT_CHAIN - 1, 0, 0.0, True),
        (SHORT_CHAIN, SHORT_CHAIN, 0.0, True),
        (SHORT_CHAIN, SHORT_CHAIN - 1, 4.9, False),
        (SHORT_CHAIN, 0, 5.0, True),
    ],
)
def test_a_text_is_searched_by_its_own_past_and_each_now_and_then(
    in_vain: int, right: int, unsearched_us: float, looks: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = Rig()
    rig.open(1, PROMPTS[1])
    rig.step()
    [held] = rig.engine.roster
    monkeypatch.setattr(TextSource, "right_since", right)
    held.looks_in_vain, held.unsearched_us = in_vain, unsearched_us
    assert held.looks(5.0) is looks


@pytest.mark.parametrize("why", ["by the request", "by the verifier"])
def test_it_can_be_switched_off(why: str) -> None:
    rig = Rig(LOOPING, context=1024, growth=0.0, ngram=why == "by the request")
    rig.open(1, PROMPTS[1], max_tokens=200, ngram=why == "by the verifier")
    rig.run()
    assert set(rig.outcomes[1]) == {Outcome.DIRECT}
    assert rig.engine.steps == 200


def test_drafters_and_the_text_take_turns() -> None:
    """A drafter that is right until the text loops, then wrong; both kinds get their tokens accepted."""
    rig = Rig(LOOPING, context=1024, growth=0.05)
    truth = oracle(rig.lm, PROMPTS[1], 400)
    number = 0

    def propose() -> None:
        nonlocal number
        done = len(rig.tokens.get(1, []))
        guess = truth[done : done + 3] if done < 60 else [1, 1, 1]
        rig.propose(1, chain(number, (*PROMPTS[1], *truth[:done]), guess))
        number += 1

    rig.open(1, PROMPTS[1], max_tokens=400)
    rig.run(propose)
    assert rig.tokens[1] == truth
    assert accepted(rig, 1, SourceKind.DRAFTER) > 20
    assert accepted(rig, 1, SourceKind.NGRAM) > 200


def test_a_session_taken_over_guesses_from_its_whole_text() -> None:
    truth = oracle(Rig(LOOPING).lm, PROMPTS[1], 300)
    rig = Rig(LOOPING, context=1024, growth=0.05)
    rig.open(1, PROMPTS[1], max_tokens=300, decided=truth[:200])
    rig.run()
    assert rig.tokens[1] == truth[200:]
    assert rig.engine.steps < 40


@pytest.mark.parametrize("sampling", [GREEDY, Sampling(0.5, seed=5)])
def test_rolled_back_caches_of_a_real_model_hold_the_text(llama: Path, sampling: Sampling) -> None:
    """Some guesses are right and some are not, and the text is that of a forward at a time."""
    prompts = {1: [5, 17, 80, 3] * 4, 2: [9, 8, 7, 9, 8, 7, 9, 8], 3: [1, 2]}
    texts, refused = [], 0
    for ngram in (False, True):
        rig = Rig(str(llama), context=128, ngram=ngram, growth=0.0)
        for handle, prompt in prompts.items():
            rig.open(handle, prompt, max_tokens=100, sampling=sampling)
        rig.run()
        texts.append(rig.tokens)
        refused = sum(Outcome.RECOVERED in outcomes for outcomes in rig.outcomes.values())
    assert texts[0] == texts[1]
    assert refused > 0


async def test_over_the_wire_a_request_may_forbid_it_and_a_verdict_says_whose_tokens_were_tested() -> None:
    kinds: dict[int, set[int]] = {1: set(), 2: set()}
    stopping = common_pb2.Stopping(max_tokens=200)
    async with serving(f"{LOOPING}:delay_ms=1") as running, connected(running) as peer:
        await peer.open(1, PROMPTS[1], stopping=stopping)
        await peer.open(2, PROMPTS[1], stopping=stopping, no_ngram=True)
        while not {1, 2} <= peer.finished.keys():
            for verdict in (await peer.receive()).verdicts:
                assert bool(verdict.tested) == bool(verdict.kind)
                kinds[verdict.handle].add(verdict.kind)
    assert peer.tokens[1] == peer.tokens[2]
    assert common_pb2.SOURCE_KIND_NGRAM in kinds[1]
    assert kinds[2] == {common_pb2.SOURCE_KIND_UNSPECIFIED}
