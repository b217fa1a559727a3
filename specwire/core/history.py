"""Which ids a text holds, and how often its output does: what penalties look at, position by position."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

FIRST_ROOM = 256

Ids = npt.NDArray[np.int64]
Counts = npt.NDArray[np.int64]


class Seen(NamedTuple):
    """The text before a position: its distinct ids, and how often each stands in the output, of one length."""

    ids: Ids
    counts: Counts


class History:
    """Grows with the decided text; `seen` adds the part of a window that stands before one of its positions.

    Invariant: ids[:n] are distinct, n = len(_places), and counts[_places[id]] says how often id stands in the output.
    """

    def __init__(self, prompt: Sequence[int], output: Sequence[int] = ()) -> None:
        self._places: dict[int, int] = {}
        self._ids = np.zeros(FIRST_ROOM, dtype=np.int64)
        self._counts = np.zeros(FIRST_ROOM, dtype=np.int64)
        for token in prompt:
            self._place(token)
        self.extend(output)

    def extend(self, tokens: Sequence[int]) -> None:
        """The output goes on with `tokens`."""
        for token in tokens:
            place = self._place(token)  # which may move the arrays
            self._counts[place] += 1

    def seen(self, window: Sequence[int] = ()) -> Seen:
        """The text as it would stand if the output went on with `window`."""
        size = len(self._places)
        fresh = [token for token in dict.fromkeys(window) if token not in self._places]
        ids = np.concatenate([self._ids[:size], np.array(fresh, dtype=np.int64)])
        counts = np.concatenate([self._counts[:size], np.zeros(len(fresh), dtype=np.int64)])
        places = {token: size + index for index, token in enumerate(fresh)}
        for token in window:
            counts[places[token] if token in places else self._places[token]] += 1
        return Seen(ids, counts)

    def _place(self, token: int) -> int:
        """Where `token` is; a new one comes last."""
        place = self._places.setdefault(token, len(self._places))
        if place == len(self._ids):
            self._ids = np.concatenate([self._ids, np.zeros_like(self._ids)])
            self._counts = np.concatenate([self._counts, np.zeros_like(self._counts)])
        self._ids[place] = token
        return place


def seen_in(tokens: Sequence[int], prompt_length: int) -> Seen:
    """A text counted at once, for who keeps no History: one that goes back, as a drafter's does."""
    text = np.array(tokens, dtype=np.int64)
    ids, places = np.unique(text, return_inverse=True)
    return Seen(ids, np.bincount(places[prompt_length:], minlength=len(ids)))
