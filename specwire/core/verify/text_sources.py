"""Proposals out of texts: n-grams of the session's own and of others, and a prediction that came with the request."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from typing import NamedTuple, Protocol

from specwire.core.messages import MOST_WINDOW, SourceKind
from specwire.core.policy.estimates import AcceptanceByPosition
from specwire.core.policy.tunables import (
    ELSEWHERE_WEIGHT,
    MATCH_LENGTHS,
    READ_AT_ONCE,
    SHARED_ORDERS,
    TEXT_PRIORS,
    VOTES,
)
from specwire.core.policy.windows import Guess

# ----------------------------------------------------------------------------------------------------------------------
# Proposals from the text itself: what followed the last tokens when they stood earlier in prompt + output.
#
# No model and no network. It pays where a text repeats: an edited file, a quotation, a loop. Prompt lookup (Saxena
# 2023) with the match extended to the left, so that a long match is known from a short one, and with copies that may
# overlap their own beginning, as in LZ77 (Ziv, Lempel 1977).

# What matches with less has no statistics, and is not looked up; tokens to the left beyond REACH are not compared.
LEAST_NGRAM, REACH = min(MATCH_LENGTHS), max(MATCH_LENGTHS)
# Tokens of the n-grams that are looked up first; then come shorter ones.
MOST_NGRAM = SHARED_ORDERS[-2]


class Occurrences:
    """Where the n-grams of one length ended. Invariant: `_earlier` has one entry for each end that was read."""

    def __init__(self, n: int) -> None:
        self.n = n
        self._latest: dict[tuple[int, ...], int] = {}
        self._earlier: list[int] = []

    def read(self, tokens: Sequence[int], until: int) -> None:
        """Take in the n-grams that end before position `until`."""
        n, latest, earlier = self.n, self._latest, self._earlier
        for end in range(n + len(earlier), until + 1):
            gram = tuple(tokens[end - n : end])
            earlier.append(latest.get(gram, 0))
            latest[gram] = end

    def find(self, tokens: Sequence[int], most: int) -> list[int]:
        """Ends of up to `most` occurrences of the text's last n tokens, the latest first."""
        found: list[int] = []
        end = self._latest.get(tuple(tokens[-self.n :]), 0)
        while end and len(found) < most:
            found.append(end)
            end = self._earlier[end - self.n]
        return found


class Match(NamedTuple):
    """The text's last `length` tokens (counted up to REACH) also stand before position `end`, which is inside it."""

    end: int
    length: int


class Found(NamedTuple):
    """What followed the text's last tokens elsewhere. alike: the class of matches whose acceptance is learnt as one."""

    tokens: tuple[int, ...]
    alike: int


class NgramIndex:
    """Where the last tokens of `text`, which grows and belongs to the caller, stood before: in itself, or in `source`.

    Invariant: every n-gram that ends before position `done` of the source is indexed, and done < len(source): behind an
    occurrence something follows, and the text's own end is no earlier occurrence of itself.
    """

    def __init__(self, text: Sequence[int], source: Sequence[int] | None = None) -> None:
        self._text = text
        self._source, self._own = (text, True) if source is None else (source, False)
        self._lengths = [Occurrences(n) for n in range(MOST_NGRAM, LEAST_NGRAM - 1, -1)]
        self.done = 0

    @property
    def complete(self) -> bool:
        return self.done >= len(self._source) - 1

    def read(self, most: int = READ_AT_ONCE) -> None:
        """Take in up to `most` more tokens."""
        until = min(self.done + most, len(self._source) - 1)
        if until > self.done:
            self.done = until
            for occurrences in self._lengths:
                occurrences.read(self._source, until)

    def match(self) -> Match | None:
        """Where the text's end occurred before, as far as it was read: the longest n-gram that did.

        Of the last VOTES of MOST_NGRAM tokens the one that agrees farthest to the left; of equals, the latest.
        """
        for occurrences in self._lengths:
            if len(self._text) < occurrences.n:
                continue
            ends = occurrences.find(self._text, VOTES if occurrences.n == MOST_NGRAM else 1)
            if ends:
                return self._farthest(ends, occurrences.n)
        return None

    def _farthest(self, ends: Sequence[int], n: int) -> Match:
        """The longest match among `ends` of equal n-grams. A longer one must agree where the best so far does not."""
        first, *others = ends
        if n < MOST_NGRAM:
            return Match(first, n)
        source, text, here = self._source, self._text, len(self._text)
        best, length = first, self._extended(first, n)
        for end in others:
            if length >= min(here, REACH):
                break
            if end > length and source[end - 1 - length] == text[here - 1 - length]:
                found = self._extended(end, n)
                if found > length:
                    best, length = end, found
        return Match(best, length)

    def _extended(self, end: int, length: int) -> int:
        """How many tokens before `end` equal the text's last ones, given that `length` do."""
        source, text, here = self._source, self._text, len(self._text)
        most = min(end, here, REACH)
        if source[end - most : end] == text[here - most : here]:
            return most
        while length < most and source[end - 1 - length] == text[here - 1 - length]:
            length += 1
        return length

    def grew(self) -> None:
        """The text is longer: it is read when it is looked up."""

    def ended(self) -> None:
        """Nothing will be looked up any more."""

    def find(self, most: int) -> Found | None:
        """At most `most` tokens that may follow the text, by length of the match; None without one."""
        match = self.match()
        if match is None:
            return None
        return Found(self.following(match, most), bisect_right(MATCH_LENGTHS, match.length) - 1)

    def following(self, match: Match, most: int) -> tuple[int, ...]:
        """The tokens from `match.end` on; where the text itself ends, the copy goes on from its own beginning."""
        tokens = list(self._source[match.end : match.end + most])
        period = len(self._source) - match.end
        while self._own and len(tokens) < most:
            tokens.append(tokens[-period])
        return tuple(tokens)


class Index(Protocol):
    """What followed a text's last tokens elsewhere; `complete` once all that there is to read is read."""

    @property
    def complete(self) -> bool: ...
    def read(self) -> None: ...
    def grew(self) -> None: ...
    def ended(self) -> None: ...
    def find(self, most: int) -> Found | None: ...


class NgramSource:
    """The n-gram proposals of one session, and how good they are, by the length of the match.

    Acceptance is learnt without testing anything: under an exact rule proposals do not change the text, so a guess that
    was never in a window can be compared with what was decided. One guess at a time is followed, until the text
    contradicts it or has passed its end: these are the guesses that windows of full width would have tested.

    Args:
        tokens: the session's text, which grows at its end.
        most: tokens of a guess.
        index: where they are looked up, if not in the text itself. priors: see TEXT_PRIORS. kind: what its guesses are.
        learnt: of other sessions, by class of match; this one begins there, and adds to it. None: begin with `priors`.
    """

    def __init__(
        self,
        tokens: Sequence[int],
        most: int = MOST_WINDOW,
        index: Index | None = None,
        priors: Sequence[float] = TEXT_PRIORS,
        kind: SourceKind = SourceKind.NGRAM,
        learnt: Sequence[AcceptanceByPosition] | None = None,
    ) -> None:
        self.index = NgramIndex(tokens) if index is None else index
        self.acceptance = [AcceptanceByPosition(prior=prior) for prior in priors]
        if learnt is not None:
            self.acceptance = [each.faded(ELSEWHERE_WEIGHT) for each in learnt]
        self._learnt = learnt
        self._kind = kind
        self._tokens = tokens
        self._most = most
        self.guess: Guess | None = None
        self._guessed_at = -1
        self._followed: Guess | None = None
        self._alike = self._followed_alike = 0
        # Tokens of the followed guess that the text has confirmed.
        self._right = 0

    def look(self) -> Guess | None:
        """What may follow the text as it is now; `guess` until the next look."""
        if self._guessed_at != len(self._tokens) or not self.index.complete:
            self.index.read()
            self.guess, self._guessed_at = self._new_guess(), len(self._tokens)
            if self._followed is None:
                self._followed, self._followed_alike, self._right = self.guess, self._alike, 0
        return self.guess

    def _new_guess(self) -> Guess | None:
        found = self.index.find(self._most)
        if found is None:
            return None
        self._alike = found.alike
        return Guess(len(self._tokens), found.tokens, self.acceptance[found.alike], self._kind)

    @property
    def right_since(self) -> int:
        """How many tokens since the last look are as the followed guess says: all of them, or else it is dropped."""
        guess = self._followed
        return 0 if guess is None else len(self._tokens) - max(guess.position, self._guessed_at)

    def text_grew(self) -> None:
        """Compare the followed guess with the text."""
        self.index.grew()
        guess = self._followed
        if guess is None:
            return
        decided, self._right = _held_against(guess, self._tokens, self._right)
        if self._right < decided or decided == len(guess.tokens):
            self.acceptance[self._followed_alike].observe(decided, self._right)
            if self._learnt is not None:
                self._learnt[self._followed_alike].observe(decided, self._right)
            self._followed = None


class TextSource:
    """A session's own guesses: from its prediction, its text, or what `others` know, whichever promises most.

    Of equals the first counts, in this order. The prediction is what the client says the output may look like, the old
    version of a text that is to be edited, say: what follows the text's last tokens there may follow them here, too. So
    it goes on behind a place where the two differ as soon as a few tokens agree again. Before the output's first token
    the prompt's end must be found: a copy of it stands before the prediction.

    Args: see NgramSource; prompt_length: of `tokens`, those that are the prompt. others: further sources of guesses.
        own: False leaves the session's text and its prediction out, and needs others. learnt: of the tenant's other
        sessions' own texts, where this one's begins.

    sources: all of them, in this order.
    """

    def __init__(
        self,
        tokens: Sequence[int],
        prompt_length: int = 0,
        prediction: Sequence[int] = (),
        most: int = MOST_WINDOW,
        others: Sequence[NgramSource] = (),
        own: bool = True,
        learnt: Sequence[AcceptanceByPosition] | None = None,
    ) -> None:
        self.sources = [NgramSource(tokens, most, learnt=learnt), *others] if own else list(others)
        if own and prediction:
            index = NgramIndex(tokens, [*tokens[:prompt_length][-REACH:], *prediction])
            self.sources.insert(0, NgramSource(tokens, most, index, kind=SourceKind.PREDICTION))
        self.guess: Guess | None = None

    def look(self) -> Guess | None:
        guesses = [source.look() for source in self.sources]
        self.guess = max(guesses, key=promise) if len(guesses) > 1 else guesses[0]
        return self.guess

    @property
    def right_since(self) -> int:
        """See NgramSource."""
        return max(source.right_since for source in self.sources)

    def text_grew(self) -> None:
        for source in self.sources:
            source.text_grew()

    def text_ended(self) -> None:
        """The text has its end."""
        for source in self.sources:
            source.index.ended()


def _held_against(guess: Guess, tokens: Sequence[int], right: int = 0) -> tuple[int, int]:
    """How many of a guess's tokens the text has reached, and how many of those were right before the first error.

    right: so many are known to be.
    """
    start = guess.position
    decided = min(len(tokens) - start, len(guess.tokens))
    while right < decided and tokens[start + right] == guess.tokens[right]:
        right += 1
    return decided, right


def promise(guess: Guess | None, most: int | None = None) -> float:
    """Tokens that a window of all of it, or of its first `most` tokens, is expected to decide."""
    if guess is None:
        return 0.0
    return guess.acceptance.expected(len(guess.tokens) if most is None else min(most, len(guess.tokens)))


# ----------------------------------------------------------------------------------------------------------------------
# Proposals from a head beside the target, which reads what the target's layers made of the text.


class HeadSource:
    """A head's proposals for one session, and how good they are.

    As of n-grams, acceptance is learnt from the text, whether a proposal was tested or not.

    Args:
        tokens: the session's text, which grows at its end.
        learnt: of all sessions, where this one begins, and to which it adds.
    """

    def __init__(self, tokens: Sequence[int], learnt: AcceptanceByPosition) -> None:
        self.acceptance = learnt.faded(ELSEWHERE_WEIGHT)
        # Whether the head has drafted for it before.
        self.read = False
        self._learnt = learnt
        self._tokens = tokens
        self._guess: Guess | None = None

    @property
    def proposed(self) -> bool:
        """Whether something is proposed behind the text as it is now."""
        return self.look() is not None

    def propose(self, tokens: Sequence[int]) -> None:
        """The head thinks that these follow the text."""
        if tokens:
            self._guess = Guess(len(self._tokens), tuple(tokens), self.acceptance, SourceKind.HEAD)

    def look(self) -> Guess | None:
        """What may follow the text as it is now."""
        guess = self._guess
        return guess if guess is not None and guess.position == len(self._tokens) else None

    def text_grew(self) -> None:
        """Compare the last proposal with the text."""
        guess, self._guess = self._guess, None
        if guess is None:
            return
        decided, right = _held_against(guess, self._tokens)
        self.acceptance.observe(decided, right)
        self._learnt.observe(decided, right)
