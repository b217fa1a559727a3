"""What followed the same tokens in texts of other sessions: an index that grows with each token, and forgets texts.

A tenant's requests repeat each other: an agent reads a file that it wrote before, an editor asks again. So a verifier
keeps the texts of its sessions, by cache scope, and looks up what followed the last tokens of a text in any of them:
suffix decoding (Oliaro et al. 2024, arXiv 2411.04975), by hash chains as in LZ77's implementations instead of trees.
A whole text can be taken out at any time, and memory is bounded: both would cost a tree much.

One scope's texts are looked up in one object, which holds nothing of another's: neither text nor counts.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from math import ceil
from operator import mul
from typing import NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from specwire.core.policy.estimates import AcceptanceByPosition
from specwire.core.policy.tunables import (
    MATCH_LENGTHS,
    READ_AT_ONCE,
    SHARED_ORDERS,
    TEXT_PRIORS,
    VOTES,
)
from specwire.core.text import MASK
from specwire.core.verify.text_sources import Found

# ----------------------------------------------------------------------------------------------------------------------
# Bounds on memory.

# What is kept of an n-gram's end lies together, in words of 32 bits, so that a look costs one miss of the cache: its
# text's number, its offset there, a tag of 8 bits for each order, and a link for each.
TEXT, END, TAGS, LINKS = range(4)
SLOT_WORDS = LINKS + len(SHARED_ORDERS)
# See VOTES and READ_AT_ONCE.
CHAIN_LINKS, GATHERED_TOKENS = 3 * VOTES, READ_AT_ONCE // 16
WORD_MASK = (1 << 32) - 1
TAG_BITS = 8
TAG_MASK = (1 << TAG_BITS) - 1
# Tokens that a scope has room for at first; it doubles as they come.
FIRST_TOKENS = 1 << 12
# What a token takes, all told: its slot (28), 4 in the heads of each order, itself (4, and what arrays keep in hand),
# and its part in the text's own objects, of which there is at most one for TOKENS_A_TEXT tokens.
TOKEN_BYTES = 64
TOKENS_A_TEXT = 64
# Tokens by which texts that begin alike are found, and texts behind one another that are followed to compare them.
BEGINNING_TOKENS = 32
MOST_LINEAGE = 64
# Factors of the n-grams' hash: a polynomial's base, and what spreads its bits (Knuth 1973, section 6.4).
HASH_BASE = 0x5851F42D4C957F2D
HASH_SPREAD = 0x9E3779B97F4A7C15
HASH_SHIFT, TAG_SHIFT = 20, 36
POWERS = [pow(HASH_BASE, exponent, 1 << 64) for exponent in range(SHARED_ORDERS[0])]
# One hash, or those of many n-grams.
Hashes = TypeVar("Hashes", int, NDArray[np.int64])


@dataclass(slots=True, eq=False)
class SharedText:
    """A text, or the end of one: `tokens[0]` stands at position `start`.

    beginning: its first tokens, by which texts that begin alike are found; empty for a text shorter than that. base:
    number of the text that it equals before position `own_from`; None: it equals none. So what a conversation's turns
    have in common is kept, and counted, once.
    """

    session_id: str
    number: int
    beginning: bytes = b""
    start: int = 0
    own_from: int = 0
    base: int | None = None
    tokens: array[int] = field(default_factory=lambda: array("I"))

    @property
    def end(self) -> int:
        """The position behind its last token."""
        return self.start + len(self.tokens)


class Occurrence(NamedTuple):
    """The looked up tokens stand before `tokens[end]`, which is there, at `position` of the whole text."""

    tokens: array[int]
    end: int
    position: int


class ScopeTexts:
    """The texts of one scope, and where the n-grams of each length of SHARED_ORDERS ended in them.

    Every end of an n-gram has a *slot*; slots are used in turn. heads[bucket] is the latest slot with a hash, and a
    slot's link is the one before it (numbers from 1 on; 0: none). A slot's tag is another part of the hash: it rules
    most other n-grams out without a look at their tokens. A link whose slot was used again is recognised by its age,
    and an end whose text is gone, or differs, by comparing tokens. So an eviction has no links to mend.

    Invariant: a text of which a slot is used again is gone as a whole.

    Args:
        may_grow: asked for room for so many tokens more.
        tokens: room at first, a power of two.
    """

    def __init__(self, may_grow: Callable[[int], bool], tokens: int = FIRST_TOKENS) -> None:
        self.capacity = tokens
        self.used = 0
        self.evicted = 0
        # What its sessions learnt of proposals from these texts, and each from its own, greedy and drawn: see
        # NgramSource.
        self.learnt = {drawn: [AcceptanceByPosition(prior=prior) for prior in VOTED_PRIORS] for drawn in (False, True)}
        self.learnt_own = {
            drawn: [AcceptanceByPosition(prior=prior) for prior in TEXT_PRIORS] for drawn in (False, True)
        }
        self._may_grow = may_grow
        self._texts: dict[int, SharedText] = {}
        self._by_id: dict[str, int] = {}
        self._beginnings: dict[bytes, int] = {}
        self._next = 0
        self._keep(
            np.zeros((tokens, SLOT_WORDS), np.uint32),
            [np.zeros(tokens, np.uint32) for _ in SHARED_ORDERS],
        )

    def _keep(self, slots: NDArray[np.uint32], heads: list[NDArray[np.uint32]]) -> None:
        """Use these slots and, by order, these heads, through views of them that give Python's own integers."""
        self._slots, self._heads = slots, heads
        self._words, self._latest = slots.reshape(-1).data, [each.data for each in heads]

    def __len__(self) -> int:
        return len(self._texts)

    @property
    def tokens(self) -> int:
        """How many are kept."""
        return sum(len(text.tokens) for text in self._texts.values())

    @property
    def size(self) -> int:
        """Bytes of its arrays, at most TOKEN_BYTES for each token that there is room for."""
        kept = sum(len(text.tokens) * text.tokens.itemsize for text in self._texts.values())
        return self._slots.nbytes + sum(each.nbytes for each in self._heads) + kept

    def holds(self, text: SharedText) -> bool:
        return self._texts.get(text.number) is text

    # Texts come and go

    def begin(self, session_id: str, tokens: Sequence[int]) -> SharedText:
        """A session's text, which begins with `tokens`; an earlier one of the same session is gone.

        Nothing is taken in yet: what comes next is from position `own_from` on.
        """
        self.forget(session_id)
        text = SharedText(session_id, self._next, _beginning(tokens))
        self._next = self._next + 1 & WORD_MASK  # who has had a number so long ago is gone with its slots
        before = self._like(tokens)
        if before is not None:
            base, text.own_from = before
            text.base, text.start = base.number, max(0, text.own_from - SHARED_ORDERS[0])
            text.tokens.extend(tokens[text.start : text.own_from])
        self._texts[text.number] = text
        self._by_id[session_id] = text.number
        if text.beginning:
            self._beginnings[text.beginning] = text.number
        if len(self._texts) > max(1, self.capacity // TOKENS_A_TEXT):
            self._evict(next(iter(self._texts)))
        return text

    def extend(self, text: SharedText, tokens: Sequence[int]) -> None:
        """Take in what follows a text; nothing where it is gone, or would be too long."""
        if not self.holds(text) or len(text.tokens) + len(tokens) > WORD_MASK:
            return
        first = max(len(text.tokens) + 1, text.own_from - text.start)
        if len(text.tokens) == text.own_from - text.start:
            first -= 1  # what follows the common part is its own
        text.tokens.extend(tokens)
        ends = range(max(first, SHARED_ORDERS[-1]), len(text.tokens) + 1)
        step = max(1, self.capacity // 2)
        for start in range(0, len(ends), step):
            self._note(text, ends[start : start + step])

    def forget(self, session_id: str) -> None:
        """Drop a session's text; nothing of it is proposed any more, also while the session runs on."""
        number = self._by_id.get(session_id)
        if number is not None:
            self._drop(number)

    def clear(self) -> None:
        """Drop all texts, and the memory that they had room in."""
        for number in list(self._texts):
            self._drop(number)
        self.capacity, self.used = 1, 0
        self._keep(np.zeros((1, SLOT_WORDS), np.uint32), [np.zeros(1, np.uint32) for _ in SHARED_ORDERS])

    def _evict(self, number: int) -> None:
        if number in self._texts:
            self._drop(number)
            self.evicted += 1

    def _drop(self, number: int) -> None:
        text = self._texts.pop(number)
        del self._by_id[text.session_id]
        if self._beginnings.get(text.beginning) == number:
            del self._beginnings[text.beginning]
        # Freed at once, whoever still holds the text or an occurrence in it.
        del text.tokens[:]

    def _like(self, tokens: Sequence[int]) -> tuple[SharedText, int] | None:
        """The latest text that begins likewise, and up to where; None where too little is common."""
        number = self._beginnings.get(_beginning(tokens))
        lineage: list[SharedText] = []
        while number is not None and len(lineage) < MOST_LINEAGE:
            text = self._texts.get(number)
            if text is None:
                return None
            lineage.append(text)
            number = text.base
        if not lineage or number is not None:
            return None
        common, ids = 0, array("I", tokens)
        for text in reversed(lineage):
            if common >= text.own_from:
                equal = _common(ids[text.own_from :], text.tokens[text.own_from - text.start :])
                common = max(common, text.own_from + equal)
        # The last token is never common: something of the text is its own.
        common = min(common, len(ids) - 1)
        return (lineage[0], common) if common >= BEGINNING_TOKENS else None

    # Slots

    def _take(self, count: int) -> bool:
        """Make room for so many slots; returns whether texts may have to go for them.

        Whether there is more memory is asked once a round.
        """
        while self.used % self.capacity + count > self.capacity or self.used == self.capacity:
            if not self._may_grow(self.capacity):
                break
            self.used = min(self.used, self.capacity)
            # A bucket becomes two. Which of them a link belongs to is found out by comparing.
            self._keep(
                np.concatenate([self._slots, np.zeros_like(self._slots)]),
                [np.concatenate([heads, heads]) for heads in self._heads],
            )
            self.capacity *= 2
        return self.used + count > self.capacity

    def _note(self, text: SharedText, ends: range) -> None:
        """Index the n-grams that end before these offsets, at most `capacity` of them."""
        if not self.holds(text):
            return
        full = self._take(len(ends))
        slots = np.arange(self.used, self.used + len(ends)) % self.capacity
        if full:
            for number in np.unique(self._slots[slots, TEXT]).tolist():
                self._evict(number)
            if not self.holds(text):
                return
        self.used += len(ends)
        words = np.zeros((len(ends), SLOT_WORDS), np.uint32)
        words[:, TEXT], words[:, END] = text.number, np.arange(ends.start, ends.stop)
        before = max(0, ends.start - SHARED_ORDERS[0])
        ids = np.array(text.tokens[before : ends.stop - 1], np.uint64)
        for index, (heads, (length, hashes)) in enumerate(zip(self._heads, _all_hashes(ids), strict=True)):
            # The n-grams of the first ends may be too short.
            behind = max(ends.start, before + length) - ends.start
            values = hashes[ends.start + behind - before - length :].astype(np.int64)
            words[behind:, TAGS] |= _tag(values, index).astype(np.uint32)
            words[behind:, LINKS + index] = _linked(heads, slots[behind:], values & (self.capacity - 1))
        self._slots[slots] = words

    # Looking up

    def occurrences(self, tail: Sequence[int]) -> tuple[int, list[Occurrence]]:
        """Index of the longest order whose n-gram at the end of `tail` occurs, and its latest occurrences.

        At most VOTES of them, of CHAIN_LINKS that are looked at; the latest first. Only those that something follows.
        Where an n-gram occurs, its shorter ends do: so most of what nobody said is told by its last tokens alone.
        """
        ids = array("I", tail[-SHARED_ORDERS[0] :])
        possible: list[tuple[int, int]] = []
        for index, value in _hashes(ids):
            found, all_seen = self._walk(index, value, ids, 1)
            if all_seen and not found:
                break
            possible.append((index, value))
        for index, value in reversed(possible):
            found, _ = self._walk(index, value, ids, VOTES)
            if found:
                return index, found
        return len(SHARED_ORDERS), []

    def _walk(self, index: int, value: int, tail: array[int], most: int) -> tuple[list[Occurrence], bool]:
        """The latest `most` occurrences of the n-gram that `tail` ends with, and whether no other one is kept."""
        words, texts, link = self._words, self._texts, LINKS + index
        capacity, newest, length, age = self.capacity, self.used - 1, SHARED_ORDERS[index], -1
        tag, mask, gram = _tag(value, index), TAG_MASK << TAG_BITS * index, tail[-length:]
        found: list[Occurrence] = []
        slot = self._latest[index][value & (capacity - 1)] - 1
        for _ in range(CHAIN_LINKS):
            older = (newest - slot) % capacity
            if slot < 0 or older <= age:
                return found, True
            age, at = older, slot * SLOT_WORDS
            if words[at + TAGS] & mask == tag and (text := texts.get(words[at + TEXT])) is not None:
                end, tokens = words[at + END], text.tokens
                if end < len(tokens) and tokens[end - length : end] == gram:
                    found.append(Occurrence(tokens, end, text.start + end))
                    if len(found) == most:
                        break
            slot = words[at + link] - 1
        return found, False


def _beginning(tokens: Sequence[int]) -> bytes:
    return array("I", tokens[:BEGINNING_TOKENS]).tobytes() if len(tokens) >= BEGINNING_TOKENS else b""


def _common(some: array[int], other: array[int]) -> int:
    """Length of the common prefix."""
    most = min(len(some), len(other))
    differ = np.frombuffer(some, np.uint32)[:most] != np.frombuffer(other, np.uint32)[:most]
    return int(differ.argmax()) if differ.any() else most


def _hashes(tail: array[int]) -> Iterator[tuple[int, int]]:
    """Each order's index, and the hash of the last n tokens; the shortest first, as far as there are so many."""
    back = tail[::-1]
    value = reached = 0
    for index in range(len(SHARED_ORDERS) - 1, -1, -1):
        length = SHARED_ORDERS[index]
        if length > len(back):
            return
        value += sum(map(mul, back[reached:length], POWERS[reached:length]))
        reached = length
        yield index, (value * HASH_SPREAD & MASK) >> HASH_SHIFT


def _all_hashes(ids: NDArray[np.uint64]) -> list[tuple[int, NDArray[np.uint64]]]:
    """Each order, and the hashes of all its n-grams in these tokens."""
    found: list[tuple[int, NDArray[np.uint64]]] = []
    value, power, reached = ids.copy(), 1, 1
    for length in reversed(SHARED_ORDERS):
        while reached < length:
            power = power * HASH_BASE & MASK
            value = value[1:] + ids[: max(0, len(ids) - reached)] * np.uint64(power)
            reached += 1
        found.append((length, value * np.uint64(HASH_SPREAD) >> np.uint64(HASH_SHIFT)))
    return found[::-1]


def _tag(value: Hashes, index: int) -> Hashes:
    """What a slot's tags have of this hash, or these, of the order with this index."""
    return (value >> TAG_SHIFT & TAG_MASK) << TAG_BITS * index


def _linked(heads: NDArray[np.uint32], slots: NDArray[np.int64], buckets: NDArray[np.int64]) -> NDArray[np.uint32]:
    """Put slots before what their buckets hold, in order; returns their links."""
    links = np.zeros(len(slots), np.uint32)
    if not len(slots):
        return links
    order = np.argsort(buckets, kind="stable")
    sorted_buckets, sorted_slots = buckets[order], slots[order]
    again = sorted_buckets[1:] == sorted_buckets[:-1]
    before = heads[sorted_buckets]
    before[1:][again] = sorted_slots[:-1][again] + 1
    links[order] = before
    last = np.append(~again, True)
    heads[sorted_buckets[last]] = sorted_slots[last] + 1
    return links


# ----------------------------------------------------------------------------------------------------------------------
# What a session sees of its scope's texts.

# Continuations are told apart by order, and by how many of VOTES occurrences have their first token. P(accept) of each
# before anything was seen: what a match of that length has where all agree, times that share.
VOTED_PRIORS = tuple(
    TEXT_PRIORS[MATCH_LENGTHS.index(order)] * votes / VOTES for order in SHARED_ORDERS for votes in range(1, VOTES + 1)
)


def share_class(share: float) -> int:
    """One of VOTES classes of shares: above 0, 1 / VOTES, ..."""
    return max(0, ceil(VOTES * share) - 1)


def voted(occurrences: Sequence[Occurrence], most: int) -> tuple[tuple[int, ...], float]:
    """The likeliest `most` tokens behind some occurrences, and the share of them that has the first one.

    Token by token: the most frequent one among the occurrences that agree so far; of equals, the latest one's.
    """
    group = [tokens[end : end + most] for tokens, end, _ in occurrences]
    found: list[int] = []
    share = 1.0
    while group:
        # What the first and the last one in order have in common, all have.
        low, high = min(group), max(group)
        if low == high:
            return (*found, *low[len(found) :]), share
        depth = len(found)
        while depth < len(low) and low[depth] == high[depth]:
            depth += 1
        following = [each[depth] for each in group if len(each) > depth]
        best = max(following, key=following.count)
        if depth == 0:
            share = following.count(best) / len(following)
        found += (*low[len(found) : depth], best)
        group = [each for each in group if len(each) > depth + 1 and each[depth] == best]
    return tuple(found), share


class SharedIndex:
    """A session's part in its scope's texts: it looks its end up in all of them, its own too, and adds itself.

    Where a whole n-gram of the longest order was found, the next look follows what was found there: as long as the text
    goes on like one of them, nothing is searched.

    Args:
        tokens: the session's text, which belongs to the caller.
        session_id: "" of one that adds nothing, to texts that are only read.
        grows: at its end, so that its last tokens wait until there are GATHERED_TOKENS of them.
    """

    def __init__(self, texts: ScopeTexts, tokens: Sequence[int], session_id: str = "", grows: bool = True) -> None:
        self._texts = texts
        self._tokens = tokens
        self._session_id = session_id
        self._least = GATHERED_TOKENS if grows else 1
        self._text: SharedText | None = None
        self._followed: Sequence[Occurrence] = ()
        self._followed_at = 0
        self.done = 0

    @property
    def complete(self) -> bool:
        return not self._session_id or len(self._tokens) - self.done < self._least

    def read(self, most: int = READ_AT_ONCE) -> None:
        """Take in up to `most` more tokens, if enough are there."""
        if not self._session_id:
            return
        if self._text is None:
            self._text = self._texts.begin(self._session_id, self._tokens)
            self.done = self._text.own_from
        if not self.complete:
            until = min(self.done + most, len(self._tokens))
            self._texts.extend(self._text, self._tokens[self.done : until])
            self.done = until

    def grew(self) -> None:
        """Take in what was decided, once the text before it is."""
        if self._text is not None and self._least <= len(self._tokens) - self.done <= READ_AT_ONCE:
            self.read()

    def ended(self) -> None:
        """Take in the rest, if it is no more than what is taken in at once."""
        self._least = 1
        if len(self._tokens) - self.done <= READ_AT_ONCE:
            self.read()

    def find(self, most: int) -> Found | None:
        order, occurrences = 0, self._going_on()
        if not occurrences:
            order, occurrences = self._texts.occurrences(self._tokens)
        self._followed, self._followed_at = () if order else occurrences, len(self._tokens)
        if not occurrences:
            return None
        votes = occurrences if order else self._in_place(occurrences)
        tokens, share = voted(votes, most)
        return Found(tokens, order * VOTES + share_class(share))

    def _in_place(self, occurrences: list[Occurrence]) -> list[Occurrence]:
        """Those at this text's own position, else all: where a request is repeated with its seed, noise is the same."""
        return [each for each in occurrences if each.position == len(self._tokens)] or occurrences

    def _going_on(self) -> list[Occurrence]:
        """Those of the last look whose texts go on as this one did. A text that was forgotten is empty by now."""
        said = array("I", self._tokens[self._followed_at :])
        behind = len(said)
        return [
            Occurrence(tokens, end + behind, position + behind)
            for tokens, end, position in self._followed
            if end + behind < len(tokens) and tokens[end : end + behind] == said
        ]


class SharedTexts:
    """The texts that a verifier keeps, by scope, in `most_bytes` of memory.

    A scope that needs room takes it from what nobody uses: the scopes without a running session, the least recently
    used first. Else it gives up its own oldest texts.

    Args:
        in_use: whether a session of a scope runs.
    """

    def __init__(self, most_bytes: int, in_use: Callable[[bytes], bool]) -> None:
        self._most = most_bytes // TOKEN_BYTES
        self._in_use = in_use
        self._scopes: dict[bytes, ScopeTexts] = {}
        self.evicted = 0

    @property
    def capacity(self) -> int:
        """Tokens that there is room for now, in all scopes."""
        return sum(texts.capacity for texts in list(self._scopes.values()))

    @property
    def texts(self) -> int:
        return sum(len(texts) for texts in list(self._scopes.values()))

    @property
    def size(self) -> int:
        """Bytes of memory in use, at most."""
        return self.capacity * TOKEN_BYTES

    def of(self, scope: bytes) -> ScopeTexts | None:
        """The texts of a scope; None without one, or where there is no room for more scopes."""
        if not scope:
            return None
        texts = self._scopes.pop(scope, None)
        if texts is None:
            if not self._room(FIRST_TOKENS):
                return None
            texts = ScopeTexts(self._room)
        self._scopes[scope] = texts  # the last one is the most recently used
        return texts

    def forget(self, session_id: str) -> None:
        """Drop the text of a session that was deleted or failed."""
        for texts in self._scopes.values():
            texts.forget(session_id)

    def _room(self, tokens: int) -> bool:
        """Whether so many more fit, now or once idle scopes are given up."""
        for scope in list(self._scopes):
            if self.capacity + tokens <= self._most:
                break
            if not self._in_use(scope):
                self.evicted += len(self._scopes.pop(scope))
        return self.capacity + tokens <= self._most
