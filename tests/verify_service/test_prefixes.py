"""Sessions start from what others of their scope left in a slot, and write the text that they would without it."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest

from specwire.core.invalid import Code
from specwire.core.law.sampling import Sampling
from specwire.core.verify.session import Allowance
from tests.verify_service.rig import COUPLED, GREEDY, Rig, chain, oracle
from verify_service.engine import sessions
from verify_service.engine.messages import LinkLost, Scoring
from verify_service.engine.slots import Prefix, longest

SYSTEM = tuple(index % 50 + 3 for index in range(40))
HELD_BACK = Allowance(0, 0)


class Counting(Rig):
    """Counts the positions that are fed. Sessions are of scope b"a" unless said otherwise, and closed at their end."""

    def __init__(self, slots: int = 4, **options: Any) -> None:
        super().__init__(slots=slots, context=1024, **options)

    @property
    def fed(self) -> int:
        return sum(len(feed.tokens) for feed in self.feeds)

    def complete(self, handle: int, prompt: Sequence[int], count: int = 10, **changes: Any) -> list[int]:
        """The session's whole output; it is closed."""
        self.open(handle, prompt, **{"max_tokens": count, "scope": b"a", **changes})
        self.run()
        self.tick(closes=(handle,))
        self.run()
        return self.tokens[handle]

    def cached(self, handle: int) -> int:
        return next(a for r in reversed(self.reports) for a in r.admitted if a.handle == handle).cached

    @property
    def counts(self) -> dict[str, int]:
        return dict(self.engine.sessions.slot_queue.slots.counts)


@pytest.mark.parametrize("sampling", [GREEDY, COUPLED])
def test_the_next_turn_feeds_nothing_that_its_parent_has_fed(sampling: Sampling) -> None:
    rig = Counting()
    said = rig.complete(1, SYSTEM, sampling=sampling)
    turn = (*SYSTEM, *said, 4, 5, 6)
    before = rig.fed
    expected = oracle(rig.lm, turn, 10, sampling)
    assert rig.complete(2, turn, sampling=sampling) == expected
    # The last token that was decided has not been fed.
    assert rig.cached(2) == len(SYSTEM) + len(said) - 1
    assert rig.fed - before == len(turn) - rig.cached(2) + 9
    assert rig.counts == {"prefix taken over": 1}


def test_what_begins_alike_is_copied_and_both_stay() -> None:
    rig = Counting()
    prompts = {handle: (*SYSTEM, handle, handle + 1) for handle in (1, 2, 3)}
    for handle, prompt in prompts.items():
        assert rig.complete(handle, prompt) == oracle(rig.lm, prompt, 10)
        assert rig.cached(handle) == (len(SYSTEM) if handle > 1 else 0)
    assert rig.counts == {"prefix copied": 2}
    assert rig.engine.sessions.slot_queue.slots.kept == 3


def test_a_session_that_still_runs_is_shared_from_too_and_not_disturbed() -> None:
    rig = Counting()
    one, other = (*SYSTEM, 1), (*SYSTEM, 2, 3)
    rig.open(1, one, scope=b"a", sampling=COUPLED)
    rig.step()
    rig.propose(1, chain(0, (*one, *rig.tokens[1]), oracle(rig.lm, one, 9, COUPLED)[1:]))
    rig.open(2, other, scope=b"a")
    rig.run()
    assert rig.cached(2) == len(SYSTEM)
    assert rig.tokens == {1: oracle(rig.lm, one, 40, COUPLED), 2: oracle(rig.lm, other, 40)}


def test_in_the_middle_of_a_forward_draft_tokens_are_not_shared() -> None:
    """Behind the text of a session at work lie draft tokens, here wrong ones that the newcomer's text goes on with."""
    rig = Counting()
    one = (*SYSTEM, 1)
    rig.open(1, one, scope=b"a")
    rig.step()
    text = (*one, *rig.tokens[1])
    wrong = [(token + 1) % 60 for token in oracle(rig.lm, text, 6)]
    rig.propose(1, chain(0, text, wrong))
    rig.during(lambda: rig.open(2, (*text, *wrong, 9), scope=b"a"))
    rig.run()
    assert rig.cached(2) == len(text)
    assert rig.tokens == {1: oracle(rig.lm, one, 40), 2: oracle(rig.lm, (*text, *wrong, 9), 40)}


def test_a_session_closed_in_the_middle_of_a_forward_leaves_its_text_only() -> None:
    rig = Counting()
    one = (*SYSTEM, 1)
    rig.open(1, one, scope=b"a")
    rig.step()
    text = (*one, *rig.tokens[1])
    wrong = [(token + 1) % 60 for token in oracle(rig.lm, text, 6)]
    rig.propose(1, chain(0, text, wrong))
    rig.during(lambda: rig.tick(closes=(1,)))
    rig.run()
    turn = (*text, *wrong, 9)
    assert rig.complete(2, turn) == oracle(rig.lm, turn, 10)
    assert rig.cached(2) == len(text)


def test_those_that_come_together_look_only_at_what_goes_on_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hundreds come at once where a verifier was lost: each looked at all of the others before every step."""
    looked: list[int] = []

    def counted(text: list[int], prefixes: Sequence[Prefix], least: int) -> tuple[Prefix, int] | None:
        looked.append(len(prefixes))
        return longest(text, prefixes, least)

    monkeypatch.setattr(sessions, "longest", counted)
    chance, rig = random.Random(0), Counting(slots=12)
    prompts = [tuple(chance.randrange(3, 60) for _ in range(100)) for _ in range(12)]
    for handle, prompt in enumerate(prompts):
        rig.open(handle, prompt, scope=b"a", max_tokens=3)
    rig.run()
    assert len(looked) > len(prompts)
    assert not any(looked)
    assert all(len(rig.tokens[handle]) == 3 for handle in range(12))


def test_a_prompt_catches_up_with_one_that_goes_on_differently() -> None:
    rig = Counting()
    long = tuple(index % 50 + 3 for index in range(700))
    rig.open(1, long, scope=b"a", max_tokens=5)
    rig.open(2, (*long[:600], *long[:100]), scope=b"a", max_tokens=5)
    rig.run()
    assert rig.tokens[2] == oracle(rig.lm, (*long[:600], *long[:100]), 5)
    assert rig.counts == {"prefix copied": 1}


# Whose


@pytest.mark.parametrize("scope", [b"b", b""])
def test_another_scope_finds_nothing_and_feeds_as_much_as_if_it_were_alone(scope: bytes) -> None:
    alone = Counting()
    alone.complete(1, SYSTEM, scope=scope)
    rig = Counting()
    rig.complete(1, SYSTEM, scope=b"a")
    rig.open(2, SYSTEM, scope=b"a", allowance=HELD_BACK)
    rig.run()
    before = rig.fed
    assert rig.complete(3, SYSTEM, scope=scope) == oracle(rig.lm, SYSTEM, 10)
    assert rig.cached(3) == 0
    assert rig.fed - before == alone.fed


def test_sessions_without_a_scope_leave_nothing_and_share_with_nobody() -> None:
    rig = Counting()
    for handle in (1, 2):
        rig.complete(handle, SYSTEM, scope=b"")
        assert rig.cached(handle) == 0
    assert [rig.lm.cached(slot) for slot in range(4)] == [0] * 4
    assert rig.engine.sessions.slot_queue.slots.kept == 0


def test_what_was_deleted_is_zeroed_whether_its_session_is_open_or_over() -> None:
    rig = Counting()
    rig.complete(1, SYSTEM)
    rig.open(2, (*SYSTEM[:20], 1), scope=b"a", allowance=HELD_BACK)
    rig.run()
    rig.tick(forgotten=("session-1", "session-2", "nobody"))
    rig.tick(closes=(2,))
    rig.run()
    assert [rig.lm.cached(slot) for slot in range(4)] == [0] * 4
    rig.complete(3, SYSTEM)
    assert rig.cached(3) == 0


@pytest.mark.parametrize("code", [Code.ABORTED, Code.INTERNAL])
def test_what_a_failed_session_left_is_not_shared(code: Code) -> None:
    rig = Counting()
    rig.open(1, SYSTEM, scope=b"a")
    rig.step()
    held = rig.engine.roster.get(0, 1)
    assert held is not None
    rig.engine.sessions.fail(held, code, "for the test")
    assert rig.complete(2, SYSTEM) == oracle(rig.lm, SYSTEM, 10)
    assert rig.cached(2) == 0


# Memory


def test_the_least_recently_used_goes_first_and_comes_back_by_feeding() -> None:
    rig = Counting(slots=3)
    prompts = {handle: tuple((index * handle) % 60 + 1 for index in range(30)) for handle in (1, 2, 3, 4)}
    said = {handle: rig.complete(handle, prompt) for handle, prompt in prompts.items()}
    assert rig.counts == {"prefix given up": 1}
    for handle, known in ((2, True), (1, False), (3, False)):
        turn = (*prompts[handle], *said[handle], 7)
        assert rig.complete(10 + handle, turn) == oracle(rig.lm, turn, 10)
        assert (rig.cached(10 + handle) > 0) is known


def test_what_is_kept_keeps_nobody_from_a_slot() -> None:
    rig = Counting(slots=2)
    for handle in (1, 2):
        rig.complete(handle, (*SYSTEM, handle))
    for handle in (3, 4):
        rig.open(handle, (handle,) * 12, scope=b"b", allowance=HELD_BACK)
    answers: list[Any] = []
    rig.tick(closes=(4,))
    rig.engine.inbox.put(Scoring((1, 2, 3), 1, answers.append))
    rig.run()
    assert rig.refused == []
    assert len(answers[0]) == 2


def test_a_detached_session_gives_up_its_slot_and_goes_on_from_it() -> None:
    """Its slot is needed; what it held serves the one that needs it, and the session is opened from its log again."""
    rig = Counting(slots=1)
    rig.open(1, SYSTEM, scope=b"a", link=1, allowance=Allowance(0, len(SYSTEM) + 4))
    rig.run()
    rig.engine.inbox.put(LinkLost(1))
    turn = (*SYSTEM, 5)
    assert rig.complete(2, turn) == oracle(rig.lm, turn, 10)
    assert rig.cached(2) == len(SYSTEM) - 1  # of a text of one more token
    decided = rig.tokens[1]
    assert len(decided) == 4
    rig.open(3, SYSTEM, scope=b"a", session_id="session-1", attach=2, decided=decided, max_tokens=20)
    rig.run()
    assert not [each for report in rig.reports for each in report.admitted][-1].resumed
    assert rig.cached(3) == len(SYSTEM)
    assert [*decided, *rig.tokens[3]] == oracle(rig.lm, SYSTEM, 20)


@pytest.mark.parametrize("seed", range(6))
def test_texts_are_the_same_whatever_is_shared_evicted_or_closed(seed: int) -> None:
    """A crowd of turns of a few conversations, in too few slots, for two tenants."""
    rig, chance = Counting(slots=3), random.Random(seed)
    texts = {scope: [[scope[0] % 60] * 9 + [1, 2, 3]] for scope in (b"a", b"b")}
    saved = 0
    for round_ in range(12):
        opened: dict[int, tuple[bytes, list[int]]] = {}
        for index in range(chance.randint(1, 3)):
            scope = chance.choice([b"a", b"b"])
            before = chance.choice(texts[scope])
            cut = chance.randint(len(before) // 2, len(before))
            prompt = [*before[:cut], *(chance.randrange(1, 60) for _ in range(chance.randint(1, 5)))]
            handle = 10 * round_ + index
            opened[handle] = scope, prompt
            rig.open(handle, prompt, scope=scope, max_tokens=chance.randint(1, 12))
            for _ in range(chance.randint(0, 3)):
                rig.step()
        rig.run()
        for handle, (scope, prompt) in opened.items():
            assert rig.tokens[handle] == oracle(rig.lm, prompt, len(rig.tokens[handle]))
            texts[scope].append([*prompt, *rig.tokens[handle]])
            saved += rig.cached(handle)
            rig.tick(closes=(handle,))
    assert rig.refused == []
    assert saved > 0
