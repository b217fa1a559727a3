"""Texts that were decided: those to learn from, again and again, and those held out to measure by.

A fifth of the texts is never learnt: on the latest of them versions are compared. Only on the latest, because what is
asked for changes: a version that knows the new is worse on the old.
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

# Of every so many prompts one is held out. Held-out texts of so many rounds are kept, at most MOST_HELD_OUT output
# tokens; older ones where those have fewer than HELD_OUT_TOKENS. Below LEAST_HELD_OUT nothing is judged.
HELD_OUT_EVERY, RECENT_ROUNDS = 5, 2
LEAST_HELD_OUT, HELD_OUT_TOKENS, MOST_HELD_OUT = 256, 1024, 16_384


@dataclass(frozen=True, slots=True)
class DecidedText:
    """What a target decided behind a prompt, in tokens. session: hash of its id (`session_hash`)."""

    session: str
    prompt: tuple[int, ...]
    output: tuple[int, ...]

    @property
    def size(self) -> int:
        return len(self.prompt) + len(self.output)

    @property
    def held_out(self) -> bool:
        """By its prompt: were it by the session, one that was asked twice would be learnt and measured."""
        digest = hashlib.sha256(repr(self.prompt or self.output).encode()).digest()
        return int.from_bytes(digest[:4], "big") % HELD_OUT_EVERY == 0


def session_hash(session_id: str) -> str:
    """By which a folder's history knows a session: an id cannot be told from it."""
    return hashlib.sha256(session_id.encode()).hexdigest()[:16]


class TextMemory:
    """Texts to learn from, and those held out; the oldest go first. most_tokens: of the former."""

    def __init__(self, most_tokens: int) -> None:
        self._most = most_tokens
        self._counts: deque[int] = deque([0])
        self.fresh: deque[DecidedText] = deque()
        self.older: deque[DecidedText] = deque()
        self.held_out: deque[DecidedText] = deque()

    def add(self, texts: Sequence[DecidedText]) -> None:
        for text in texts:
            if len(text.output) == 0 or text.size < 2:
                continue  # nothing of it stands behind anything
            (self.held_out if text.held_out else self.fresh).append(text)
            self._counts[-1] += text.held_out
        self._bound_held_out()
        self._bound()

    def _bound_held_out(self) -> None:
        """`_counts`: how many held-out texts each of the latest rounds brought."""
        while len(self._counts) > RECENT_ROUNDS:
            self._counts.popleft()
        tokens = sum(len(text.output) for text in self.held_out)
        while len(self.held_out) > 1:
            old, size = len(self.held_out) > sum(self._counts), len(self.held_out[0].output)
            if tokens <= MOST_HELD_OUT and not (old and tokens - size >= HELD_OUT_TOKENS):
                return
            self.held_out.popleft()
            tokens -= size

    def _bound(self) -> None:
        tokens = sum(text.size for text in (*self.fresh, *self.older))
        while tokens > self._most and len(self.fresh) + len(self.older) > 1:
            tokens -= (self.older or self.fresh).popleft().size

    def settle(self) -> None:
        """What was fresh has been learnt: a round is over."""
        self.older.extend(self.fresh)
        self.fresh.clear()
        self._counts.append(0)

    def drop(self, sessions: Collection[str]) -> int:
        """Forget texts by the hashes of their sessions; returns how many there were."""
        gone = 0
        for texts in (self.fresh, self.older, self.held_out):
            kept = [text for text in texts if text.session not in sessions]
            gone += len(texts) - len(kept)
            texts.clear()
            texts.extend(kept)
        return gone


class TrainingWindow(NamedTuple):
    """A part of a text. learnt: the index of the first token that is no context."""

    tokens: tuple[int, ...]
    learnt: int


def windows_of(text: DecidedText, size: int) -> Iterator[TrainingWindow]:
    """Each token of the output is learnt in one window, behind at least half a window of context if there is so much.

    A text's very first token stands behind nothing, and is not learnt.
    """
    whole, half = (*text.prompt, *text.output), max(1, size // 2)
    for start in range(max(1, len(text.prompt)), len(whole), half):
        end = min(len(whole), start + half)
        first = max(0, end - size)
        yield TrainingWindow(whole[first:end], start - first)
