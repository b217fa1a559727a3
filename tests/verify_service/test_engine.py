"""The engine decides what the target alone would, whatever is proposed, and holds no session longer than it must."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
import torch

from specwire.core.invalid import Code
from specwire.core.law.sampling import Sampling, TokenScore
from specwire.core.messages import FinishReason, Outcome
from specwire.core.policy.estimates import AcceptanceByPosition
from specwire.core.policy.windows import Guess, Share, StepCandidate, StepPlan
from specwire.core.verify.session import Allowance, VerifySession
from specwire.lm import Feed
from specwire.rpc.service_thread import Stop
from tests.verify_service.rig import FAR, Rig, chain, oracle, owing
from verify_service.engine.batch import PATIENCE_US, patiently
from verify_service.engine.engine import LOOK_AGAIN_US
from verify_service.engine.messages import Refusal, Scoring
from verify_service.engine.scoring import ScoringJob

PROMPT = (7, 3, 9)


def test_perfect_proposals_are_accepted_many_at_a_time() -> None:
    rig = Rig()
    truth = oracle(rig.lm, PROMPT, 40)
    rig.open(1, PROMPT)
    rig.propose(1, chain(0, PROMPT, truth))
    rig.run()
    assert rig.tokens[1] == truth
    assert rig.engine.steps <= 4
    assert rig.outcomes[1].count(Outcome.ACCEPTED) >= 37


def test_late_duplicated_reordered_and_hostile_proposals_change_no_text() -> None:
    rig = Rig()
    truth = oracle(rig.lm, PROMPT, 80)
    rig.open(1, PROMPT, max_tokens=80)
    chance = random.Random(3)

    def mischief() -> None:
        at = chance.randrange(0, 80)
        text = (*PROMPT, *truth[:at])
        good = chain(chance.randrange(50), text, truth[at : at + 5])
        rig.propose(1, good, good, chain(60, text, [1] * 300), chain(3, (1, 2), [99999, 5], 4), chain(1 << 40, (), []))

    rig.run(mischief)
    assert rig.tokens[1] == truth


def test_several_sessions_share_forwards() -> None:
    rig = Rig()
    prompts = {handle: tuple(range(handle, handle + 3 * handle)) for handle in (1, 2, 3)}
    for handle, prompt in prompts.items():
        rig.open(handle, prompt, sampling=Sampling(1.0, seed=handle))
    rig.run()
    for handle, prompt in prompts.items():
        assert rig.tokens[handle] == oracle(rig.lm, prompt, 40, Sampling(1.0, seed=handle))
    assert rig.engine.steps == 40


def test_a_step_tells_each_link_once() -> None:
    """Whatever it decides for however many of its sessions."""
    rig = Rig(slots=8)
    for handle in range(1, 7):
        rig.open(handle, (handle, 2, 3), link=handle % 2, max_tokens=10)
    rig.step()
    before = len(rig.reports)
    for _ in range(5):
        rig.step()
    told = rig.reports[before:]
    assert len(told) == 5 * 2
    assert {len(report.decided) for report in told} == {3}


def test_long_prompt_comes_in_chunks_and_stalls_nobody() -> None:
    rig = Rig(context=2000)
    long = tuple(index % 60 + 1 for index in range(1500))
    rig.open(1, PROMPT)
    rig.open(2, long, max_tokens=5)
    rig.step()
    assert len(rig.tokens[1]) == 1
    assert rig.tokens[2] == []
    rig.run()
    assert rig.tokens[1] == oracle(rig.lm, PROMPT, 40)
    assert rig.tokens[2] == oracle(rig.lm, long, 5)
    assert max(report.timings.rows for report in rig.reports if report.timings) <= 513


def test_reopened_text_goes_on_where_it_was() -> None:
    rig = Rig()
    truth = oracle(rig.lm, PROMPT, 20)
    rig.open(1, PROMPT, max_tokens=20, decided=truth[:7])
    rig.run()
    assert rig.tokens[1] == truth[7:]


def test_text_that_holds_its_end_is_finished_at_once() -> None:
    rig = Rig(slots=1)
    rig.open(1, PROMPT, max_tokens=3, decided=(4, 5, 6))
    rig.run()
    assert (rig.tokens[1], rig.finished[1]) == ([], FinishReason.LENGTH)
    assert rig.held_slots() == 0


def test_credit_is_respected_and_more_of_it_wakes_the_session() -> None:
    rig = Rig()
    truth = oracle(rig.lm, PROMPT, 40)
    rig.open(1, PROMPT, allowance=Allowance(3, 8))
    rig.propose(1, chain(0, PROMPT, truth))
    rig.run()
    assert rig.tokens[1] == truth[:5]
    rig.tick(progress=((1, Allowance(8, 9)),))
    rig.run()
    assert rig.tokens[1] == truth[:6]
    rig.tick(progress=((1, Allowance(9, 1 << 32)),))
    rig.run()
    assert rig.tokens[1] == truth


def test_deadline_ends_the_session_even_without_credit() -> None:
    rig = Rig()
    rig.open(1, PROMPT, allowance=Allowance(3, 3), deadline_us=5000.0)
    rest = rig.step()
    assert rest is not None
    assert rest.until_us == 5000.0
    rig.now = 5000.0
    rig.run()
    assert (rig.tokens[1], rig.finished[1]) == ([], FinishReason.DEADLINE)
    assert rig.held_slots() == 0


def test_proposal_that_arrives_during_the_forward_meets_the_last_row() -> None:
    rig = Rig()
    truth = oracle(rig.lm, PROMPT, 40)
    rig.open(1, PROMPT)
    rig.step()
    rig.during(lambda: rig.propose(1, chain(0, (*PROMPT, truth[0]), truth[1:3])))
    rig.step()
    assert rig.outcomes[1] == [Outcome.DIRECT, Outcome.ACCEPTED]


def test_messages_for_unknown_handles_are_ignored_and_counted() -> None:
    rig = Rig()
    rig.propose(9, chain(0, PROMPT, (1, 2)))
    rig.tick(progress=((9, FAR),), closes=(9, 9))
    rig.run()
    assert sum(rig.engine.sessions.counts.values()) == 2


def test_session_opened_and_closed_in_one_message_leaves_nothing() -> None:
    rig = Rig()
    rig.open(1, PROMPT)
    rig.tick(closes=(1,))
    rig.run()
    assert rig.held_slots() == 0


def test_scores_are_the_log_probabilities_of_the_next_tokens() -> None:
    rig = Rig(context=2000)
    tokens = tuple(index % 60 + 1 for index in range(700))
    got: list[list[TokenScore] | Refusal] = []
    rig.engine.inbox.put(Scoring(tokens, 650, got.append))
    rig.open(1, PROMPT)
    rig.run()
    logits = rig.lm.forward([Feed(0, 0, tokens[:-1], 50)])
    expected = logits.log_softmax(dim=1).gather(1, torch.tensor(tokens[650:]).unsqueeze(1)).squeeze(1).tolist()
    (scores,) = got
    assert not isinstance(scores, Refusal)
    assert [each.logprobs.logprob for each in scores] == pytest.approx(expected)
    ranks = (logits >= logits.gather(1, torch.tensor(tokens[650:]).unsqueeze(1))).sum(dim=1).tolist()
    assert [each.rank for each in scores] == ranks
    assert rig.tokens[1] == oracle(rig.lm, PROMPT, 40)


def test_continuations_share_what_stands_before_them() -> None:
    rig = Rig(context=2000)
    prefix, texts = tuple(index % 60 + 1 for index in range(600)), ((7, 8, 9), (10,), tuple(range(1, 61)) * 5)
    got: list[list[TokenScore] | Refusal] = []
    rig.engine.inbox.put(Scoring(prefix + texts[0], 600, got.append, others=texts[1:]))
    rig.run()
    (scores,) = got
    assert not isinstance(scores, Refusal)
    # A continuation of n tokens takes n rows: the prefix's last one, and its own but the last.
    assert sum(len(feed.tokens) for feed in rig.feeds) == 599 + sum(map(len, texts))
    expected = [
        logits.log_softmax(dim=0)[token].item()
        for text in texts
        for logits, token in zip(rig.lm.forward([Feed(0, 0, (prefix + text)[:-1], len(text))]), text, strict=True)
    ]
    assert [each.logprobs.logprob for each in scores] == pytest.approx(expected)


def test_scoring_is_not_charged_to_sessions() -> None:
    rig = Rig()
    rig.open(1, PROMPT)
    rig.step()
    held = rig.engine.roster.get(0, 1)
    assert held is not None
    run_chunk = rig.engine._scorer.run_chunk

    def slow(job: ScoringJob) -> None:
        rig.now += 1e6
        run_chunk(job)

    rig.engine._scorer.run_chunk = slow  # type: ignore[method-assign]  # the test steps in between
    rig.engine.inbox.put(Scoring((1, 2, 3), 1, lambda _: None))
    rig.step()
    rig.step()
    assert held.session.ledger.elapsed_us < 1000.0


def test_scoring_needs_a_free_slot_and_a_cancelled_one_gives_it_back() -> None:
    rig = Rig(slots=1)
    got: list[list[TokenScore] | Refusal] = []
    request = Scoring((1, 2, 3), 1, got.append)
    rig.engine.inbox.put(request)
    rig.engine.inbox.put(Scoring((1, 2, 3), 1, got.append))
    request.cancelled = True
    rig.run()
    assert [each.code for each in got if isinstance(each, Refusal)] == [Code.RESOURCE_EXHAUSTED]
    rig.open(1, PROMPT)
    rig.run()
    assert 1 in rig.finished


def test_flood_of_commands_does_not_keep_a_session_from_its_steps() -> None:
    rig = Rig()
    rig.open(1, PROMPT)
    rig.step()
    proposed = (1, chain(0, PROMPT, [1] * 255))
    for _ in range(20):
        rig.tick(proposals=(proposed,) * 64)
    rig.step()
    assert len(rig.tokens[1]) == 2
    assert rig.engine.inbox.weight > 16 * 64 * 255
    rig.run()
    assert (1 in rig.finished, rig.engine.inbox.weight) == (True, 0)


def test_stop_ends_run_and_answers_what_waits() -> None:
    rig = Rig()
    got: list[list[TokenScore] | Refusal] = []
    rig.engine.inbox.put(Scoring((1, 2, 3), 1, got.append))
    rig.engine.inbox.put(Stop())
    rig.engine.run()
    assert len(got) == 1


def test_cache_holds_only_decided_text_after_every_step() -> None:
    rig = Rig()
    truth = oracle(rig.lm, PROMPT, 60)
    rig.open(1, PROMPT, max_tokens=60)
    proposer = rig.proposing(PROMPT, lambda done: [*truth[done : done + 2], 1, 2, 3, 4])

    def check() -> None:
        for held in rig.engine.roster:
            cached = rig.lm.cached(held.slot)
            assert cached < held.session.position or cached == 0
            rows = rig.lm._rows[held.slot]  # type: ignore[attr-defined]  # of the scripted model
            prefix = 0
            for token, row in zip(held.session.text.tokens, rows[:cached], strict=False):
                prefix = rig.lm.script.extend(prefix, token)  # type: ignore[attr-defined]  # of the scripted model
                assert prefix == row.prefix
        proposer()

    rig.run(check)
    assert rig.tokens[1] == truth


def test_waits_for_a_proposal_that_is_due_and_worth_it() -> None:
    rig = Rig()
    truth = oracle(rig.lm, PROMPT, 40)
    rig.open(1, PROMPT, drafters=owing(4))
    rig.step()
    rest = rig.step()
    assert rest is not None
    assert rest.waiting
    rig.propose(1, chain(0, (*PROMPT, truth[0]), truth[1:5]))
    assert rig.step() is None
    assert rig.tokens[1] == truth[:6]


def test_a_patient_verifier_waits_for_all_that_is_due_and_tests_it_without_a_ledger_or_a_guess() -> None:
    acceptance = AcceptanceByPosition()
    guess = Guess(0, (1,) * 8, acceptance)
    short = StepCandidate(0, 100, 1, 1, -1e9, acceptance, missing=3, guess=guess)
    assert patiently([short], 100.0) == StepPlan((), 100.0 + PATIENCE_US, (0,))
    late = patiently([short], 100.0, waited_us=PATIENCE_US)
    assert late.shares == (Share(0, 1, 1, True),)
    full = short._replace(drafted=4, missing=0)
    prompt = full._replace(slot=1, uncached=9)
    assert patiently([full, prompt], 100.0).shares == (Share(0, 1, 4, True), Share(1, 9, 0, True))


def test_silent_drafter_costs_little() -> None:
    """Tokens are promised and never come: the waits end by the chance that they fall to, or by the ledger."""
    rig = Rig(context=2000, growth=0.0)
    rig.open(1, PROMPT, max_tokens=256, drafters=owing(4))
    waited = 0.0
    for _ in range(2000):
        rest = rig.step()
        if rest is not None and not rest.waiting:
            break
        if rest is not None:
            before = rig.now
            rig.now = max(rig.now, rest.until_us)
            rig.engine._pauses.waited_us += rig.now - before
            waited += rig.now - before
    assert 1 in rig.finished
    assert waited <= 0.02 * 256 * 1000 + 3 * 1000


def test_what_a_step_decides_is_told_behind_the_next_plan_and_before_its_forward(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """During a forward, who sends it has the interpreter. Before a rest it is told, too, and before the end."""
    rig = Rig(ngram=False)
    told: list[int] = []
    forward = rig.lm.forward

    def watched(feeds: Sequence[Feed]) -> torch.Tensor:
        told.append(len(rig.tokens[1]))
        return forward(feeds)

    monkeypatch.setattr(rig.lm, "forward", watched)
    rig.open(1, PROMPT, max_tokens=3)
    for _ in range(3):
        assert rig.engine.step() is None
    assert told == [0, 1, 2]
    assert len(rig.tokens[1]) == 2
    assert rig.engine.step() is not None
    assert len(rig.tokens[1]) == 3
    rig.open(2, PROMPT, max_tokens=3)
    assert rig.engine.step() is None
    assert rig.tokens[2] == []
    rig.engine.inbox.put(Stop())
    rig.engine.run()
    assert len(rig.tokens[2]) > 0


def test_a_constraint_that_answers_while_it_is_decided_to_rest_is_looked_at_soon(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Nobody wakes the engine for an answer: what was not there when the step was planned must not put it to sleep."""
    rig = Rig(ngram=False)
    answers = iter([False])
    monkeypatch.setattr(VerifySession, "heard", lambda self, limit_s=0.0: next(answers, True))
    rig.open(1, PROMPT)
    rest = rig.step()
    assert rest is not None
    assert rest.until_us <= rig.now + LOOK_AGAIN_US
    rig.run()
    assert 1 in rig.finished
