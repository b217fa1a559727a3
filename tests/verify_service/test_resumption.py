"""Sessions that lost their link: kept, decided further, taken over by a newer connection, given up where they must."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from typing import Any

import pytest

from specwire.core.invalid import Code
from specwire.core.law.sampling import Sampling
from specwire.core.messages import FinishReason
from specwire.core.verify.session import Allowance
from tests.verify_service.rig import COUPLED, FAR, GREEDY, Rig, chain, oracle
from verify_service.engine.engine import DETACH_GRACE_US
from verify_service.engine.messages import Admitted, LinkLost, Scoring

PROMPT = (7, 3, 9)
TRUTH_LENGTH = 40


def cut(rig: Rig, link: int = 0) -> None:
    rig.engine.inbox.put(LinkLost(link))


def admitted(rig: Rig) -> Admitted:
    """The last session that was taken in."""
    return [each for report in rig.reports for each in report.admitted][-1]


def tail(rig: Rig) -> list[int]:
    """The tokens that the last session taken in had waiting for it."""
    return [token for decided in admitted(rig).tail for token in decided.verdict.tokens]


def reattach(rig: Rig, decided: Sequence[int], handle: int = 5, **changes: Any) -> None:
    """Open session 1 on another link, from a log that holds `decided`."""
    fields: dict[str, Any] = {"link": 1, "attach": 2, "session_id": "session-1", **changes}
    rig.open(handle, PROMPT, decided=decided, **fields)


def begun(credit: int = 13, sampling: Sampling = GREEDY) -> tuple[Rig, list[int]]:
    """A rig whose session 1 stands two tokens behind its prompt, and what will be decided."""
    rig = Rig()
    rig.open(1, PROMPT, sampling=sampling, allowance=Allowance(3, credit))
    rig.step()
    rig.step()
    return rig, oracle(rig.lm, PROMPT, TRUTH_LENGTH, sampling)


@pytest.mark.parametrize("sampling", [GREEDY, COUPLED])
def test_it_goes_on_to_its_credit_and_delivers_what_it_decided_once(sampling: Sampling) -> None:
    rig, truth = begun(credit=13, sampling=sampling)
    cut(rig)
    rig.run()
    assert rig.tokens[1] == truth[:2]
    steps = rig.engine.steps
    assert steps == 10
    reattach(rig, truth[:2], sampling=sampling)
    rig.run()
    assert admitted(rig).resumed
    assert (admitted(rig).position, tail(rig)) == (5, truth[2:10])
    assert rig.tokens[5] == truth[2:]
    assert rig.engine.steps - steps == TRUTH_LENGTH - 10
    assert rig.refused == []


def test_a_link_that_still_seems_to_be_there_is_told() -> None:
    rig, truth = begun()
    reattach(rig, truth[:1])
    rig.run()
    assert [(each.handle, each.code) for each in rig.refused] == [(1, Code.FAILED_PRECONDITION)]
    assert "superseded" in rig.refused[0].message
    assert admitted(rig).resumed
    assert rig.tokens[5] == truth[1:]


def test_a_newer_owner_takes_over_too_and_an_older_one_does_not() -> None:
    rig, truth = begun()
    cut(rig)
    reattach(rig, truth[:2], fence=2, attach=1, allowance=Allowance(5, 13))
    rig.run()
    assert admitted(rig).resumed
    cut(rig, 1)
    rig.open(9, PROMPT, session_id="session-1", fence=1, attach=9)
    rig.run()
    assert [(each.handle, each.code) for each in rig.refused] == [(9, Code.FAILED_PRECONDITION)]
    reattach(rig, truth[:10], 6, fence=2, attach=2)
    rig.run()
    assert rig.tokens[5] + rig.tokens[6] == truth[2:]


def test_the_same_handle_takes_its_own_session_over() -> None:
    rig, truth = begun()
    rig.open(1, PROMPT, attach=2, decided=truth[:2])
    rig.run()
    assert admitted(rig).resumed
    assert rig.refused == []
    assert rig.tokens[1] == truth


@pytest.mark.parametrize("at", ["before", "during"])
def test_a_connection_comes_back_while_a_step_is_under_way(at: str) -> None:
    rig, truth = begun(credit=1 << 20)

    def comes_back() -> None:
        cut(rig)
        reattach(rig, truth[:2])

    rig.during(comes_back, before=at == "before")
    rig.run()
    assert rig.tokens[5] == truth[2:]
    assert rig.engine.steps == TRUTH_LENGTH


def test_a_prompt_that_is_half_fed_is_not_fed_again() -> None:
    rig = Rig(context=2048)
    prompt = tuple(index % 64 for index in range(1200))
    rig.open(1, prompt, max_tokens=1)
    rig.step()
    cut(rig)
    rig.open(5, prompt, link=1, attach=2, session_id="session-1", max_tokens=1)
    rig.run()
    assert len(rig.feeds) > 1
    assert sum(len(feed.tokens) for feed in rig.feeds) == len(prompt)
    assert rig.tokens[5] == oracle(rig.lm, prompt, 1)


# Where the log wins


@pytest.mark.parametrize(
    "changes",
    [
        {"sampling": COUPLED},
        {"max_tokens": 30},
        {"stop_ids": frozenset({63})},
        {"allowance": Allowance(5, 6)},
    ],
    ids=str,
)
def test_other_parameters_or_less_credit_begin_afresh(changes: dict[str, Any]) -> None:
    rig, truth = begun()
    cut(rig)
    rig.run()
    reattach(rig, truth[:2], **changes)
    rig.run()
    assert not admitted(rig).resumed
    assert tail(rig) == []
    expected = oracle(rig.lm, (*PROMPT, *truth[:2]), 38, changes.get("sampling", GREEDY))
    assert rig.tokens[5] == expected[: len(rig.tokens[5])]
    assert rig.engine.sessions.counts["held session opened with another text"] == 1


@pytest.mark.parametrize("agreeing", [0, 1, 4])
def test_another_text_is_the_log_s_and_keeps_the_cache_that_they_share(agreeing: int) -> None:
    rig, truth = begun()
    cut(rig)
    rig.run()
    other = [*truth[:agreeing], (truth[agreeing] + 1) % 64]
    rig.feeds.clear()
    reattach(rig, other)
    rig.run()
    assert rig.feeds[0].start == len(PROMPT) + agreeing
    assert rig.tokens[5] == oracle(rig.lm, (*PROMPT, *other), 40 - len(other))


def test_a_log_that_is_shorter_than_what_was_said_to_be_durable_begins_afresh() -> None:
    rig, truth = begun(credit=5)
    rig.tick(progress=((1, Allowance(5, 5)),))
    rig.run()
    cut(rig)
    reattach(rig, truth[:1])
    rig.run()
    assert not admitted(rig).resumed
    assert rig.tokens[5] == truth[1:]


# Ends


def test_an_end_that_was_decided_without_a_link_is_told_with_the_tail() -> None:
    rig, truth = begun(credit=1 << 20)
    cut(rig)
    rig.run()
    steps = rig.engine.steps
    reattach(rig, truth[:2])
    rig.run()
    assert (rig.tokens[5], rig.finished[5]) == (truth[2:], FinishReason.LENGTH)
    assert rig.engine.steps == steps


def test_an_end_whose_verdict_was_lost_is_told_again_until_it_is_closed() -> None:
    rig = Rig()
    truth = oracle(rig.lm, PROMPT, TRUTH_LENGTH)
    rig.open(1, PROMPT)
    rig.run()
    for attach in (2, 3):
        cut(rig, attach - 2)
        reattach(rig, truth[:39], handle=5 + attach, link=attach - 1, attach=attach)
        rig.run()
        assert tail(rig) == truth[39:]
    rig.tick(link=2, closes=(8,))
    rig.run()
    assert len(list(rig.engine.roster)) == 0


def test_a_deadline_passes_without_a_link() -> None:
    rig = Rig()
    rig.open(1, PROMPT, allowance=Allowance(3, 3), deadline_us=5000.0)
    rig.run()
    cut(rig)
    rig.now = 5000.0
    rig.run()
    assert list(rig.engine.roster) == []
    assert rig.finished == {}


# Giving up


def test_it_is_let_go_at_the_end_of_its_grace() -> None:
    rig, truth = begun(credit=8)
    cut(rig)
    rest = None
    while rest is None:
        rest = rig.step()
    assert not rest.waiting
    rig.now = rest.until_us
    assert DETACH_GRACE_US <= rig.now < DETACH_GRACE_US + 5000.0
    rig.run()
    assert list(rig.engine.roster) == []
    assert rig.engine.sessions.counts["session let go that nobody came back for"] == 1
    reattach(rig, truth[:2])
    rig.run()
    assert not admitted(rig).resumed
    assert rig.tokens[5] == truth[2:]


def test_the_longest_detached_session_gives_up_its_slot_to_a_new_one() -> None:
    rig = Rig(slots=2)
    for handle in (1, 2):
        rig.open(handle, (*PROMPT, handle), allowance=Allowance(4, 6), link=handle)
        rig.step()
    cut(rig, 2)
    rig.step()
    cut(rig, 1)
    rig.run()
    rig.open(3, PROMPT)
    rig.run()
    assert rig.refused == []
    assert rig.tokens[3] == oracle(rig.lm, PROMPT, TRUTH_LENGTH)
    assert {held.session_id for held in rig.engine.roster} == {"session-1", "session-3"}
    assert rig.engine.sessions.counts["idle session gave up its slot"] == 1


def test_one_whose_end_was_told_goes_before_one_that_is_detached() -> None:
    rig = Rig(slots=2)
    rig.open(1, PROMPT, allowance=Allowance(3, 6), link=1)
    rig.step()
    cut(rig, 1)
    rig.open(2, PROMPT)
    rig.run()
    assert rig.finished[2] is FinishReason.LENGTH
    rig.open(3, PROMPT)
    rig.run()
    assert {held.session_id for held in rig.engine.roster} == {"session-1", "session-3"}


def test_a_text_to_score_may_have_an_idle_session_s_slot() -> None:
    rig = Rig(slots=1)
    rig.open(1, PROMPT, allowance=Allowance(3, 6))
    rig.step()
    cut(rig)
    rig.step()
    answers: list[Any] = []
    rig.engine.inbox.put(Scoring((1, 2, 3), 1, answers.append))
    for _ in range(20):
        rig.step()
    assert len(answers[0]) == 2


def test_without_a_grace_nothing_is_kept() -> None:
    rig = Rig(detach_grace_us=0.0)
    rig.open(1, PROMPT, allowance=FAR)
    rig.step()
    cut(rig)
    rig.step()
    assert list(rig.engine.roster) == []


# At random


class Owner:
    """An orchestrator of one session: its log may lag behind what it was told, and its drafts may be wrong."""

    def __init__(self, seed: int) -> None:
        self.random = Random(seed)
        self.rig = Rig("scripted:5:eos=0.01", slots=2)
        self.sampling = self.random.choice([GREEDY, COUPLED])
        self.truth = oracle(self.rig.lm, PROMPT, 60, self.sampling)
        self.log: list[int] = []
        self.attach = 0
        self.owners = 1
        self.buffer = self.random.randint(2, 12)
        self.open()

    @property
    def told(self) -> list[int]:
        """Everything that was decided, as far as it knows."""
        return [*self.log[: self.opened_at], *self.rig.tokens.get(self.handle, [])]

    @property
    def handle(self) -> int:
        return self.owners * 1000 + self.attach

    def open(self) -> None:
        """On a link of its own, from the log."""
        self.attach += 1
        self.opened_at = len(self.log)
        self.rig.open(
            self.handle,
            PROMPT,
            link=self.handle,
            session_id="s",
            fence=self.owners,
            attach=self.attach,
            max_tokens=60,
            sampling=self.sampling,
            decided=self.log,
            allowance=self.allowance(),
        )

    def allowance(self) -> Allowance:
        durable = len(PROMPT) + len(self.log)
        return Allowance(durable, durable + self.buffer)

    def act(self, kinds: int = 8) -> None:
        """One of the first `kinds` things; 6 of them may happen within a step."""
        match self.random.randrange(kinds):
            case 0:
                self.log = self.told[: self.random.randint(len(self.log), len(self.told))]
                self.rig.tick(self.handle, progress=((self.handle, self.allowance()),))
            case 1:
                cut(self.rig, self.handle)
                self.open()
            case 2:
                self.open()  # the verifier has not noticed yet
            case 3:
                self.owners, self.attach = self.owners + 1, 0
                self.open()
            case 4:
                text = [*PROMPT, *self.told]
                wrong = self.random.randrange(4)
                guess = [*self.truth[len(self.told) :][:wrong], 1, 2]
                self.rig.tick(self.handle, proposals=((self.handle, chain(self.random.randrange(99), text, guess)),))
            case 5:
                self.rig.open(
                    9,
                    (4, 4),
                    link=9,
                    session_id=f"other-{self.random.randrange(3)}",
                    fence=self.attach + 9000,
                    attach=self.random.randrange(99),
                    max_tokens=3,
                )
            case _:
                self.rig.step()


@pytest.mark.parametrize("seed", range(40))
def test_whatever_is_cut_the_text_is_the_target_s(seed: int) -> None:
    owner = Owner(seed)
    forward = owner.rig.lm.forward

    def disturbed(feeds: Any) -> Any:
        logits = forward(feeds)
        if owner.random.random() < 0.2:
            owner.act(kinds=6)
        return logits

    owner.rig.lm.forward = disturbed  # type: ignore[method-assign]  # the test steps in between
    for _ in range(300):
        owner.act()
        assert owner.told == owner.truth[: len(owner.told)]
    owner.rig.lm.forward = forward  # type: ignore[method-assign]  # the test steps in between
    owner.open()
    for _ in range(60):
        owner.rig.run()
        owner.log = owner.told
        owner.rig.tick(owner.handle, progress=((owner.handle, owner.allowance()),))
    end = owner.truth.index(0) + 1 if 0 in owner.truth else len(owner.truth)
    assert owner.told == owner.truth[:end]
    assert owner.handle in owner.rig.finished
    assert any(each.resumed for report in owner.rig.reports for each in report.admitted)
    assert any(each.tail for report in owner.rig.reports for each in report.admitted)


def test_a_held_session_s_owner_is_remembered_whoever_else_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("verify_service.engine.sessions.REMEMBERED_GENERATIONS", 2)
    rig, truth = begun()
    reattach(rig, truth[:2], fence=50, attach=3)
    for other in range(4):
        rig.open(7, (1, 2), link=2, session_id=f"other-{other}")
        rig.tick(2, closes=(7,))
    rig.step()
    rig.refused.clear()
    reattach(rig, truth[:2], handle=9, link=3, fence=1, attach=9)
    rig.step()
    assert [(refusal.handle, refusal.code) for refusal in rig.refused] == [(9, Code.FAILED_PRECONDITION)]


@pytest.mark.parametrize("spare", [0, 2])
def test_an_owner_who_allows_less_gets_no_more_although_the_step_is_under_way(spare: int) -> None:
    rig, truth = begun(credit=100)
    text = (*PROMPT, *truth[:2])
    rig.propose(1, chain(0, text, truth[2:10]))
    credit = len(text) + spare
    rig.during(lambda: reattach(rig, truth[:2], allowance=Allowance(len(text), credit)), before=True)
    rig.run()
    assert [*tail(rig), *rig.tokens.get(5, [])] == truth[2 : 2 + spare]
    rig.tick(1, progress=((5, Allowance(len(text), FAR.credit)),))
    rig.run()
    assert [*tail(rig), *rig.tokens[5]] == truth[2:]
