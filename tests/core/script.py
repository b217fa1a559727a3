"""The scripted target of the machine's tests, and the plain autoregressive oracle."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from specwire.core.messages import FinishReason
from specwire.core.text import Ending, hash_of

EOS = 0
LETTERS = ("", "a", "b", "ab", "ca")
VOCABULARY = len(LETTERS)


@dataclass(frozen=True)
class Script:
    """A deterministic next-token function, and a drafter's guess that is right `quality` times out of eight."""

    seed: int
    quality: int = 6

    def next(self, tokens: Sequence[int]) -> int:
        mixed = hash_of([self.seed, len(tokens), *tokens[-2:]])
        return EOS if mixed % 61 == 0 else 1 + (mixed >> 8) % (VOCABULARY - 1)

    def guess(self, tokens: Sequence[int], drafter: int = 0) -> int:
        """Drafters err at different places."""
        truth = self.next(tokens)
        mixed = hash_of([self.seed + 1 + drafter, len(tokens), *tokens[-2:]])
        return truth if mixed % 8 < self.quality else (truth + 1 + (mixed >> 8) % (VOCABULARY - 1)) % VOCABULARY

    def guesses(self, tokens: Sequence[int], drafter: int = 0) -> tuple[int, ...]:
        """A drafter's best guess and two others, of which the right token is one where the first is wrong in half of
        all cases.
        """
        first = self.guess(tokens, drafter)
        mixed = hash_of([self.seed + 3 + drafter, len(tokens), *tokens[-2:]])
        start = self.next(tokens) if mixed % 2 else mixed >> 8
        others = [token for step in range(VOCABULARY) if (token := (start + step) % VOCABULARY) != first]
        return first, *others[:2]


def first_stop(text: str, stops: Sequence[str]) -> int | None:
    """Where the text is cut: at the start of the stop string that is completed first (of two, the longer)."""
    for end in range(1, len(text) + 1):
        starts = [end - len(stop) for stop in stops if text[:end].endswith(stop)]
        if starts:
            return min(starts)
    return None


@dataclass(frozen=True)
class Oracle:
    """Plain decoding. `raw` is what a verifier that knows no stop strings decides."""

    raw: tuple[int, ...]
    tokens: tuple[int, ...]
    text: str
    reason: FinishReason

    @classmethod
    def of(cls, script: Script, prompt: Sequence[int], ending: Ending, stops: Sequence[str]) -> Oracle:
        raw, reason = list(prompt), None
        while reason is None:
            raw.append(script.next(raw))
            reason = ending.cut(len(raw) - 1, raw[-1:])[1]
        for length in range(len(prompt) + 1, len(raw) + 1):
            text = "".join(LETTERS[token] for token in raw[len(prompt) : length])
            cut = first_stop(text, stops)
            if cut is not None:
                return cls(tuple(raw), tuple(raw[:length]), text[:cut], FinishReason.STOP_STRING)
        return cls(tuple(raw), tuple(raw), "".join(LETTERS[token] for token in raw[len(prompt) :]), reason)


@dataclass(frozen=True)
class Release:
    text: str
    text_ends: tuple[int, ...]
    released: tuple[int, ...]
    kept: int
    stopped_at: int | None


class LetterScanner:
    """An OutputScanner that keeps the whole text and looks through all of it at every token."""

    def __init__(self, stops: Sequence[str]) -> None:
        self.stops = stops
        self.text = ""
        self.stopped_at: int | None = None
        self._released = 0

    @property
    def length(self) -> int:
        return len(self.text) if self.stopped_at is None else self.stopped_at

    def push(self, tokens: Sequence[int]) -> Release:
        ends: list[int] = []
        released: list[int] = []
        for token in tokens:
            if self.stopped_at is not None:
                break
            self.text += LETTERS[token]
            ends.append(len(self.text))
            self.stopped_at = first_stop(self.text, self.stops)
            released.append(max(self._released, self._safe()))
        return Release(self._release(self._safe()), tuple(ends), tuple(released), len(ends), self.stopped_at)

    def finish(self) -> str:
        return self._release(self.length)

    def _safe(self) -> int:
        """How much may be shown: up to where a stop string may begin."""
        for start in range(self.length):
            if any(stop.startswith(self.text[start:]) for stop in self.stops):
                return start
        return self.length

    def _release(self, end: int) -> str:
        text, self._released = self.text[self._released : end], max(self._released, end)
        return text
