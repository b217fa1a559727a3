"""Proposals from a prediction: right ones are taken up from the first token on, wrong ones change nothing."""

from __future__ import annotations

import random

from specwire.core.messages import SourceKind
from specwire.core.policy.tunables import READ_AT_ONCE
from specwire.core.verify.text_sources import REACH, NgramIndex, TextSource

PROMPT = [1, 2, 3, 4, 5]
PREDICTED = [10, 11, 12, 13, 14, 15, 16, 17]


def follow(source: TextSource, text: list[int], decided: list[int]) -> list[tuple[int, ...]]:
    """What is guessed before each token of `decided`."""
    guesses = []
    for token in decided:
        guess = source.look()
        guesses.append(() if guess is None else guess.tokens)
        text.append(token)
        source.text_grew()
    return guesses


def test_before_the_first_token_the_whole_prediction_is_proposed() -> None:
    text = list(PROMPT)
    source = TextSource(text, len(PROMPT), PREDICTED)
    guess = source.look()
    assert guess is not None
    assert (guess.position, guess.tokens, guess.kind) == (5, tuple(PREDICTED), SourceKind.PREDICTION)


def test_it_goes_on_behind_what_differs() -> None:
    """One token replaced, one inserted, one left out."""
    text = list(PROMPT)
    source = TextSource(text, len(PROMPT), PREDICTED)
    assert follow(source, text, [10, 99, 12, 13, 14])[-1] == (14, 15, 16, 17)
    text = list(PROMPT)
    source = TextSource(text, len(PROMPT), PREDICTED)
    assert follow(source, text, [10, 11, 99, 12, 13, 14])[-1] == (14, 15, 16, 17)
    text = list(PROMPT)
    source = TextSource(text, len(PROMPT), PREDICTED)
    assert follow(source, text, [10, 12, 13, 14])[-1] == (14, 15, 16, 17)


def test_references_are_quoted_from_in_any_order() -> None:
    """A request names texts of its own by predicting them one after another."""
    first, second = [20, 21, 22, 23, 24, 25], [30, 31, 32, 33, 34, 35]
    text = list(PROMPT)
    source = TextSource(text, len(PROMPT), [*first, *second])
    guesses = follow(source, text, [50, 31, 32, 33, 51, 21, 22, 23])
    assert guesses[3] == (33, 34, 35)
    assert guesses[-1] == (23, 24, 25, *second)


def test_the_text_itself_is_still_guessed_from() -> None:
    text = list(PROMPT)
    source = TextSource(text, len(PROMPT), [90, 91, 92])
    follow(source, text, [20, 21, 22, 23, 24, 20, 21, 22])
    guess = source.look()
    assert guess is not None
    assert (guess.tokens[:2], guess.kind) == ((23, 24), SourceKind.NGRAM)


def test_of_equals_the_prediction_counts() -> None:
    """A prompt that holds the old text, which is predicted too, as in an edit."""
    prompt = [*PREDICTED, 1, 2]
    text = list(prompt)
    source = TextSource(text, len(prompt), PREDICTED)
    follow(source, text, PREDICTED[:4])
    guess = source.look()
    assert guess is not None
    assert (guess.tokens[0], guess.kind) == (14, SourceKind.PREDICTION)


def test_a_long_prediction_is_taken_in_bit_by_bit() -> None:
    drawn = random.Random(4)
    prediction = [drawn.randrange(1000) for _ in range(2 * READ_AT_ONCE)]
    text = list(PROMPT)
    index = NgramIndex(text, [*PROMPT, *prediction])
    index.read()
    assert index.done == READ_AT_ONCE
    assert not index.complete
    while not index.complete:
        index.read()
    match = index.match()
    assert match is not None
    assert (match.end, match.length) == (len(PROMPT), len(PROMPT))
    assert index.following(match, 3) == tuple(prediction[:3])


def test_only_the_prompts_end_is_looked_for() -> None:
    prompt = list(range(100, 200))
    index = TextSource(prompt, len(prompt), PREDICTED).sources[0].index
    assert isinstance(index, NgramIndex)
    index.read()
    match = index.match()
    assert match is not None
    assert (match.end, match.length) == (REACH, REACH)


def test_any_prediction_is_bounds_safe() -> None:
    drawn = random.Random(5)
    for _ in range(200):
        text = [drawn.randrange(3) for _ in range(drawn.randrange(1, 6))]
        source = TextSource(text, len(text), [drawn.randrange(3) for _ in range(drawn.randrange(1, 6))])
        for guess in follow(source, text, [drawn.randrange(3) for _ in range(30)]):
            assert len(guess) <= 16
