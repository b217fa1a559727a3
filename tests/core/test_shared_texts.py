"""Proposals from other sessions' texts against a search through them all; of a text that is gone nothing is left."""

from __future__ import annotations

import random
import time
from array import array
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specwire.core.policy.tunables import SHARED_ORDERS, VOTES
from specwire.core.verify import shared_texts
from specwire.core.verify.shared_texts import (
    CHAIN_LINKS,
    FIRST_TOKENS,
    GATHERED_TOKENS,
    TOKEN_BYTES,
    Occurrence,
    ScopeTexts,
    SharedIndex,
    SharedTexts,
    voted,
)
from specwire.core.verify.text_sources import NgramSource, TextSource

# Few different tokens, so that texts repeat.
TOKENS = st.lists(st.integers(0, 3), min_size=1, max_size=60)
# What happens: which text grows, and by what; or one is forgotten.
EVENTS = st.lists(st.tuples(st.integers(0, 4), TOKENS | st.none()), max_size=12)
ROOMY = 1 << 20


def never(_: int) -> bool:
    return False


def always(_: int) -> bool:
    return True


class Searched:
    """What `ScopeTexts` promises, by brute force: texts, and the order in which their tokens came."""

    def __init__(self) -> None:
        self.texts: dict[str, list[int]] = {}
        self.came: list[tuple[str, int]] = []

    def extend(self, name: str, tokens: Sequence[int]) -> None:
        text = self.texts.setdefault(name, [])
        first = len(text) + 1
        text.extend(tokens)
        self.came += [(name, end) for end in range(first, len(text) + 1)]

    def forget(self, name: str) -> None:
        self.texts.pop(name, None)
        self.came = [each for each in self.came if each[0] != name]

    def find(self, tail: Sequence[int]) -> tuple[int, list[tuple[str, int]]]:
        for index, length in enumerate(SHARED_ORDERS):
            if len(tail) < length:
                continue
            gram = list(tail[-length:])
            ends = [
                (name, end)
                for name, end in reversed(self.came)
                if length <= end < len(self.texts[name]) and self.texts[name][end - length : end] == gram
            ]
            if ends:
                return index, ends[:VOTES]
        return len(SHARED_ORDERS), []

    def likeliest(self, ends: Sequence[tuple[str, int]], most: int) -> list[int]:
        tokens: list[int] = []
        while len(tokens) < most:
            going_on = [
                self.texts[name][end + len(tokens)]
                for name, end in ends
                if self.texts[name][end : end + len(tokens)] == tokens and end + len(tokens) < len(self.texts[name])
            ]
            if not going_on:
                break
            # most_common keeps the order in which equals came: the latest occurrence's first
            tokens.append(Counter(going_on).most_common(1)[0][0])
        return tokens


@pytest.fixture(autouse=True)
def _all_links(monkeypatch: pytest.MonkeyPatch) -> None:
    """A search has no limit of links."""
    monkeypatch.setattr(shared_texts, "CHAIN_LINKS", ROOMY)


@given(EVENTS, st.integers(1, 20))
def test_it_finds_what_a_search_finds_whatever_came_and_went(
    events: list[tuple[int, list[int] | None]], most: int
) -> None:
    texts, searched = ScopeTexts(never), Searched()
    held: dict[str, shared_texts.SharedText] = {}
    for number, tokens in events:
        name = str(number)
        if tokens is None:
            texts.forget(name)
            searched.forget(name)
            held.pop(name, None)
            continue
        if name not in held:
            held[name] = texts.begin(name, [])
        texts.extend(held[name], tokens)
        searched.extend(name, tokens)
        for tail in [*searched.texts.values(), tokens]:
            order, found = texts.occurrences(tail)
            wanted_order, wanted = searched.find(tail)
            assert order == wanted_order
            assert [(list(each.tokens), each.end) for each in found] == [(searched.texts[n], end) for n, end in wanted]
            if found:
                assert list(voted(found, most)[0]) == searched.likeliest(wanted, most)
    assert texts.tokens == sum(map(len, searched.texts.values()))


def test_where_few_links_are_followed_the_longest_run_that_they_lead_to_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chains that are cut short tell nothing of longer runs: these are asked for all the same."""
    monkeypatch.setattr(shared_texts, "CHAIN_LINKS", 2)
    chance, texts = random.Random(2), ScopeTexts(never)
    said = [[chance.randrange(12) for _ in range(120)] for _ in range(20)]
    for number, tokens in enumerate(said):
        grown(texts, str(number), tokens)
    asked = [chance.choice(said)[: chance.randrange(20, 120)] for _ in range(300)]
    asked += [[chance.randrange(20) for _ in range(20)] for _ in range(300)]
    orders = Counter(texts.occurrences(tail)[0] for tail in asked)
    monkeypatch.setattr(shared_texts, "CHAIN_LINKS", ROOMY)
    whole = Counter(texts.occurrences(tail)[0] for tail in asked)
    # Chains of 16 tokens are short: nearly each one leads to them.
    assert orders[0] >= 0.9 * whole[0] > 200


def test_an_end_that_nobody_said_is_told_by_its_last_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    walked: list[int] = []
    walk = ScopeTexts._walk

    def counted(
        texts: ScopeTexts, index: int, value: int, tail: array[int], most: int
    ) -> tuple[list[Occurrence], bool]:
        walked.append(SHARED_ORDERS[index])
        return walk(texts, index, value, tail, most)

    monkeypatch.setattr(ScopeTexts, "_walk", counted)
    texts = ScopeTexts(never)
    grown(texts, "a", range(100, 200))
    assert texts.occurrences(range(300, 320)) == (len(SHARED_ORDERS), [])
    assert walked == [2]
    walked.clear()
    order, _ = texts.occurrences([*range(300, 318), 150, 151, 152, 153])
    assert (SHARED_ORDERS[order], walked) == (4, [2, 4, 8, 4])


def test_the_most_frequent_continuation_is_proposed_and_of_equals_the_latest() -> None:
    def after(*tokens: int) -> Occurrence:
        return Occurrence(array("I", tokens), 0, 0)

    assert voted([after(1, 2), after(3, 4), after(3, 5), after(3, 4)], 4) == ((3, 4), 0.75)
    assert voted([after(1, 2), after(3, 4)], 4) == ((1, 2), 0.5)
    assert voted([after(7, 8, 9)], 2) == ((7, 8), 1.0)


def test_a_full_scope_gives_up_whole_texts_the_oldest_first() -> None:
    texts = ScopeTexts(never)
    chance = random.Random(3)
    pieces = {f"{number}": [chance.randrange(50000) for _ in range(FIRST_TOKENS // 4)] for number in range(9)}
    for name, piece in pieces.items():
        texts.extend(texts.begin(name, piece), piece)
    kept = [name for name, piece in pieces.items() if texts.occurrences(piece[:20])[1]]
    assert kept == ["5", "6", "7", "8"]
    assert texts.evicted == 5
    assert texts.capacity == FIRST_TOKENS
    assert texts.tokens <= FIRST_TOKENS
    assert texts.size <= FIRST_TOKENS * TOKEN_BYTES


@pytest.mark.parametrize("step", [1, 100])
def test_a_scope_that_may_grow_keeps_everything(step: int) -> None:
    texts = ScopeTexts(always)
    chance = random.Random(4)
    piece = [chance.randrange(50000) for _ in range(3 * FIRST_TOKENS)]
    text = texts.begin("a", [])
    for start in range(0, len(piece), step):
        texts.extend(text, piece[start : start + step])
    assert texts.capacity == 4 * FIRST_TOKENS
    for at in range(20, len(piece) - 1, 97):
        order, found = texts.occurrences(piece[at - 20 : at])
        assert (order, [each.end for each in found]) == (0, [at])


def test_what_turns_of_a_conversation_have_in_common_is_kept_once() -> None:
    texts = ScopeTexts(always)
    chance = random.Random(5)
    turns = [[chance.randrange(50000) for _ in range(300)] for _ in range(4)]
    told: list[int] = []
    for number, turn in enumerate(turns):
        told += turn
        index = SharedIndex(texts, told.copy(), str(number))
        while not index.complete:
            index.read()
    assert texts.tokens <= len(told) + 3 * SHARED_ORDERS[0]
    for at in range(20, len(told) - 1, 31):
        found = texts.occurrences(told[at - 20 : at])[1]
        assert [(each.tokens[each.end], each.position) for each in found] == [(told[at], at)]
    texts.forget("2")
    assert not texts.occurrences(turns[2][50:70])[1], "it was that session's, and is gone"
    assert texts.occurrences(turns[3][50:70])[1]


def grown(texts: ScopeTexts, name: str, tokens: Sequence[int]) -> None:
    text: list[int] = []
    index = SharedIndex(texts, text, name)
    for token in tokens:
        index.read()
        text.append(token)
        index.grew()
    index.ended()


def test_what_a_session_decides_is_there_for_others_as_soon_as_it_is_worth_taking_in() -> None:
    texts, text = ScopeTexts(always), list(range(100, 120))
    index = SharedIndex(texts, text, "a")
    known = []
    for token in range(120, 100 + 2 * GATHERED_TOKENS + 1):
        index.read()
        text.append(token)
        index.grew()
        found = SharedIndex(texts, text[-5:-1]).find(1)
        if found is not None and found.tokens == (token,):
            known.append(len(text))
    assert known == [GATHERED_TOKENS, 2 * GATHERED_TOKENS]


def test_the_rest_of_a_text_that_has_ended_is_there_for_others() -> None:
    texts, text = ScopeTexts(always), [1, 2, 3]
    index = SharedIndex(texts, text, "a")
    index.read()
    text.append(4)
    index.grew()
    assert SharedIndex(texts, [1, 2, 3], "b").find(4) is None
    index.ended()
    found = SharedIndex(texts, [1, 2, 3], "b").find(4)
    assert found is not None
    assert found.tokens == (4,)


def test_a_text_that_does_not_grow_is_taken_in_to_its_end() -> None:
    texts = ScopeTexts(always)
    index = SharedIndex(texts, [1, 2, 3, 4], "a", grows=False)
    index.read()
    assert index.complete
    found = SharedIndex(texts, [1, 2, 3]).find(4)
    assert found is not None
    assert found.tokens == (4,)


def test_what_was_found_is_followed_as_long_as_the_text_goes_on_like_it(monkeypatch: pytest.MonkeyPatch) -> None:
    texts, searched = ScopeTexts(always), list[int]()
    for name, end in (("a", 7), ("b", 8), ("c", 8)):
        grown(texts, name, [*range(100, 140), end, 9, 9, 9])
    text = list(range(100, 120))
    index, search = SharedIndex(texts, text), texts.occurrences

    def counted(tail: Sequence[int]) -> tuple[int, list[Occurrence]]:
        searched.append(len(tail))
        return search(tail)

    monkeypatch.setattr(texts, "occurrences", counted)
    told = []
    for grows in ([], [120, 121], list(range(122, 140)), [7], [1]):
        text += grows
        found, fresh = index.find(3), SharedIndex(texts, text).find(3)
        told.append(None if found is None else found.tokens)
        assert told[-1] == (None if fresh is None else fresh.tokens)
    assert told == [(120, 121, 122), (122, 123, 124), (8, 9, 9), (9, 9, 9), None]
    # Once for each fresh one; here at the beginning, and behind what nobody said.
    assert searched.count(20) == 2
    assert [searched.count(length) for length in (22, 40, 41)] == [1, 1, 1]
    assert searched.count(42) == 2


def test_where_a_text_is_repeated_what_stands_at_its_own_place_counts_alone() -> None:
    """Two others, one token farther on, say otherwise; also while what was found is followed."""
    texts, common = ScopeTexts(always), range(100, 140)
    grown(texts, "first", [*common, 7, 8, 9, 7])
    for name in ("edited", "edited again"):
        grown(texts, name, [1, *common, 7, 8, 6, 6])

    def said(*text: int) -> tuple[int, ...]:
        found = SharedIndex(texts, text).find(4)
        assert found is not None
        return found.tokens

    assert said(*common) == (7, 8, 9, 7)
    assert said(2, 3, *common) == said(1, *common) == (7, 8, 6, 6)
    assert said(*range(23), *common[-15:]) == (7, 8, 6, 6), "less than the longest order is no sign of a repetition"
    text = [*common]
    index = SharedIndex(texts, text)
    for at, token in enumerate((7, 8, 9)):
        found = index.find(4)
        assert found is not None
        assert found.tokens == (7, 8, 9, 7)[at:]
        text.append(token)


def test_nothing_of_a_forgotten_text_is_followed() -> None:
    texts = ScopeTexts(always)
    grown(texts, "a", range(100, 200))
    text = list(range(100, 120))
    index = SharedIndex(texts, text)
    assert index.find(2) is not None
    texts.forget("a")
    text.append(120)
    assert index.find(2) is None


def test_a_forgotten_session_adds_nothing_while_it_runs_on() -> None:
    texts = ScopeTexts(always)
    text = list(range(100))
    index = SharedIndex(texts, text, "a")
    index.read()
    texts.forget("a")
    text += range(100, 200)
    index.grew()
    index.read()
    assert index.complete
    assert (len(texts), texts.tokens) == (0, 0)
    assert texts.occurrences(text[:150])[1] == []


def test_scopes_know_nothing_of_each_other_also_after_deletion() -> None:
    """Neither tokens nor what was learnt of them: the same prompt gets the same from a scope, whatever others hold."""
    chance = random.Random(6)
    secret, own = [chance.randrange(9) for _ in range(400)], [chance.randrange(9) for _ in range(400)]
    kept, alone = SharedTexts(ROOMY, lambda _: True), SharedTexts(ROOMY, lambda _: True)
    other = kept.of(b"other")
    assert other is not None
    grown(other, "theirs", secret)
    for scopes in (kept, alone):
        mine = scopes.of(b"mine")
        assert mine is not None
        grown(mine, "mine", own)
    found = []
    for forget in ((), ("theirs",), ("mine",)):
        for session in forget:
            kept.forget(session)
            alone.forget(session)
        told = []
        for scopes in (kept, alone):
            mine = scopes.of(b"mine")
            assert mine is not None
            index = SharedIndex(mine, secret[:200])
            source = NgramSource(secret[:200], 16, index, learnt=mine.learnt[False])
            guess = source.look()
            told.append(None if guess is None else (guess.tokens, guess.acceptance.rates(16)))
        assert told[0] == told[1]
        found.append(told[0])
    assert found[0] is not None
    assert found[-1] is None
    assert kept.of(b"") is None


@dataclass(eq=False)
class Read:
    """Words of an index, and how many of them were looked at."""

    words: memoryview
    looks: int = 0

    def __getitem__(self, at: int) -> int:
        self.looks += 1
        return int(self.words[at])


def look_time(texts: ScopeTexts, tails: Sequence[list[int]]) -> float:
    """Seconds for one look at the end of each, by a session that has looked before for none."""
    indices = [SharedIndex(texts, tail) for tail in tails]
    began = time.perf_counter()
    for index in indices:
        index.find(16)
    return time.perf_counter() - began


def two_scopes(own: Sequence[int], theirs: Sequence[int]) -> tuple[ScopeTexts, ScopeTexts]:
    """One scope's session says `own`, then each of VOTES of another's says `theirs`; returns both scopes' texts."""
    kept = SharedTexts(ROOMY, lambda _: True)
    mine, other = kept.of(b"mine"), kept.of(b"other")
    assert mine is not None
    assert other is not None
    grown(mine, "mine", own)
    for number in range(VOTES):
        grown(other, f"theirs-{number}", [number, *theirs])
    return mine, other


def slots_seen(texts: ScopeTexts, tails: Sequence[list[int]]) -> int:
    """Words of slots and of heads that looks read."""
    reads = [Read(texts._words), *map(Read, texts._latest)]
    texts._words, *texts._latest = reads  # type: ignore[assignment]
    look_time(texts, tails)
    return sum(each.looks for each in reads)


@pytest.fixture
def _as_served(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_texts, "CHAIN_LINKS", CHAIN_LINKS)


@pytest.mark.usefixtures("_as_served")
def test_a_look_up_takes_as_long_whether_or_not_another_scope_holds_the_text() -> None:
    """By what is read of the index, and by the clock, in turns: a busy machine slows all of them.

    The third scope is the one that holds the text: there both show it, so they would show a leak.
    """
    chance = random.Random(8)
    secret, unsaid, own = ([chance.randrange(50000) for _ in range(2000)] for _ in range(3))
    held, theirs = two_scopes(own, secret)
    not_held, _ = two_scopes(own, unsaid)
    tails = [secret[:end] for end in range(SHARED_ORDERS[0], len(secret), 50)]
    scopes, took = (held, not_held, theirs), [list[float]() for _ in range(3)]
    for turn in range(201):
        for at in (0, 1, 2) if turn % 2 else (2, 1, 0):
            took[at].append(look_time(scopes[at], tails))
    with_it, without, where_it_is = map(median, took)
    assert 0.93 < with_it / without < 1.08
    assert where_it_is / without > 1.08

    with_it, without, where_it_is = (slots_seen(texts, tails) for texts in scopes)
    assert with_it == without
    assert where_it_is > without


def test_memory_is_bounded_and_idle_scopes_go_first() -> None:
    busy = {b"a", b"c"}
    texts = SharedTexts(4 * FIRST_TOKENS * TOKEN_BYTES, busy.__contains__)
    chance = random.Random(7)
    for scope in (b"a", b"b", b"c"):
        own = texts.of(scope)
        assert own is not None
        grown(own, scope.decode(), [chance.randrange(50000) for _ in range(FIRST_TOKENS)])
    assert texts.texts == 3
    first = texts.of(b"a")
    assert first is not None
    more = [chance.randrange(50000) for _ in range(FIRST_TOKENS)]
    grown(first, "more", more)
    assert first.capacity == 2 * FIRST_TOKENS, "there was room"
    grown(first, "and more", more[::-1])
    assert texts.evicted == 1, "that of the idle scope"
    assert first.capacity == 2 * FIRST_TOKENS, "but not enough for twice as much"
    assert texts.size <= 4 * FIRST_TOKENS * TOKEN_BYTES
    assert texts.of(b"d") is not None
    busy.add(b"d")
    assert texts.of(b"e") is None, "three are in use, and a fourth has taken the rest"


def test_a_session_takes_the_better_of_its_own_text_and_others() -> None:
    texts = ScopeTexts(always)
    grown(texts, "a", [*range(50, 80), 1, 2, 3])
    text = [5, 60, 61, 9, *range(50, 62)]
    source = TextSource(text, others=[NgramSource(text, 4, SharedIndex(texts, text, "b"), learnt=texts.learnt[False])])
    guess = source.look()
    assert guess is not None
    assert guess.tokens == (62, 63, 64, 65), "its own text knows two tokens of it, the other one sixteen"
