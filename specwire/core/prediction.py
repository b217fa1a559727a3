"""Proposals from what the client says the output may look like: the old version of a text that is to be edited, say.

The prediction is looked up as the text itself is (`specwire.core.ngram`): what follows the text's last tokens there may
follow them here, too. So it goes on behind a place where the two differ as soon as a few tokens agree again. Before the
output's first token the prompt's end must be found: a copy of it stands before the prediction.
"""

from __future__ import annotations

from collections.abc import Sequence

from specwire.core.chain import SourceKind
from specwire.core.ngram import (
    GUESSED,
    LEAST,
    MOST,
    OCCURRENCES,
    REACH,
    READ_AT_ONCE,
    Guess,
    Match,
    NgramSource,
    Occurrences,
)
from specwire.core.speed import expected_tokens

# What is believed of matches in a prediction before anything was seen, by their length: it is there to be copied.
PREDICTION_PRIORS = (0.5, 0.6, 0.7, 0.85, 0.95)


class PredictionIndex:
    """Where the last tokens of `text`, which grows and belongs to somebody else, stand in what was predicted.

    Args:
        before: what the output goes on behind, the prompt.
    """

    def __init__(self, text: Sequence[int], before: Sequence[int], prediction: Sequence[int]) -> None:
        self._text = text
        self._source = [*before[-REACH:], *prediction]
        self._lengths = [Occurrences(n) for n in range(MOST, LEAST - 1, -1)]
        self.done = 0

    @property
    def complete(self) -> bool:
        return self.done >= len(self._source)

    def read(self, most: int = READ_AT_ONCE) -> None:
        """Take in up to `most` more tokens."""
        until = min(self.done + most, len(self._source))
        if until > self.done:
            self.done = until
            for occurrences in self._lengths:
                occurrences.read(self._source, until)

    def truncate(self, length: int) -> None:
        """The text is cut; what was predicted stays."""

    def match(self) -> Match | None:
        """The occurrence that agrees farthest to the left; of equals, the latest. None where nothing would follow."""
        for occurrences in self._lengths:
            if len(self._text) >= occurrences.n:
                ends = occurrences.find(self._text, OCCURRENCES)
                following = [end for end in ends if end < len(self._source)]
                if following:
                    return max((Match(end, self._agreeing(end)) for end in following), key=lambda match: match.length)
        return None

    def _agreeing(self, end: int) -> int:
        """How many tokens before `end` equal the text's last ones, up to REACH."""
        here, length = len(self._text), 0
        most = min(end, here, REACH)
        while length < most and self._source[end - 1 - length] == self._text[here - 1 - length]:
            length += 1
        return length

    def following(self, match: Match, most: int) -> tuple[int, ...]:
        """At most `most` tokens from `match.end` on."""
        return tuple(self._source[match.end : match.end + most])


class PredictedSource:
    """A session's own guesses where there is a prediction: from it or from the text, whichever promises more.

    Args: see NgramSource; prompt_length: of `tokens`, those that are the prompt.
    """

    def __init__(
        self, tokens: Sequence[int], prompt_length: int, prediction: Sequence[int], most: int = GUESSED
    ) -> None:
        index = PredictionIndex(tokens, tokens[:prompt_length], prediction)
        self._predicted = NgramSource(tokens, most, index, PREDICTION_PRIORS, SourceKind.PREDICTION)
        self._copied = NgramSource(tokens, most)
        self.guess: Guess | None = None
        self.tested_us = 0.0

    def look(self) -> Guess | None:
        predicted, copied = self._predicted.look(), self._copied.look()
        self.guess = predicted if _promise(predicted) >= _promise(copied) else copied
        return self.guess

    def text_grew(self) -> None:
        self._predicted.text_grew()
        self._copied.text_grew()

    def truncate(self, length: int) -> None:
        self._predicted.truncate(length)
        self._copied.truncate(length)
        self.guess = None


def _promise(guess: Guess | None) -> float:
    """Tokens that a window of all of it would decide."""
    if guess is None:
        return 0.0
    width = len(guess.tokens)
    return expected_tokens(guess.acceptance.rates(width), width)
