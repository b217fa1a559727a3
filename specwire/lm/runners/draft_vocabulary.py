"""A drafter that says some of its target's ids only: its embedding has a row for each, and one for all other ids.

The head's `d2t` (EAGLE-3) is the like of it. Beside the weights lies VOCABULARY, which tells of which ids the rows are.
Whoever asks the model knows the target's ids alone: what is fed is looked up, and logits stand at the target's ids.
Those of the others are masked like ids without a token, so they have no share in what is drawn, and none in q.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import torch

from specwire.core.model import MOST_IDS, Feed
from specwire.files import write_text
from specwire.lm.kv_cache import Runner, StoredSlots

VOCABULARY = "draft_vocabulary.json"


class DraftVocabulary(NamedTuple):
    """size: ids of the target. ids: those that the drafter says, rising; row i of its embedding is of ids[i], and the
    row behind the last one of all that are not among them.
    """

    size: int
    ids: tuple[int, ...]

    @classmethod
    def of(cls, said: bytes) -> DraftVocabulary:
        """What a file holds. Raises ValueError, which names the entry."""
        told = json.loads(said)
        size, ids = (told.get(key) if isinstance(told, dict) else None for key in ("size", "ids"))
        if type(size) is not int or not 0 < size <= MOST_IDS:
            raise ValueError(f"size: must be a number from 1 to {MOST_IDS}, not {size!r:.80}")
        if not isinstance(ids, list) or not ids or any(type(each) is not int for each in ids):
            raise ValueError(f"ids: must be a list of ids, not {ids!r:.80}")
        if ids[0] < 0 or ids[-1] >= size or any(one >= other for one, other in pairwise(ids)):
            raise ValueError(f"ids: must rise, from 0 to {size - 1} at most")
        return cls(size, tuple(ids))

    def write(self, folder: Path) -> None:
        write_text(folder / VOCABULARY, json.dumps({"size": self.size, "ids": self.ids}) + "\n")

    @property
    def rows(self) -> int:
        """Of the embedding."""
        return len(self.ids) + 1

    @property
    def others(self) -> int:
        """The row of all ids that the drafter does not say."""
        return len(self.ids)

    def own(self) -> torch.Tensor:
        """Of each id of the target the row of the embedding."""
        found = torch.full((self.size,), self.others)
        found[torch.tensor(self.ids)] = torch.arange(len(self.ids))
        return found

    def unsaid(self) -> set[int]:
        return set(range(self.size)).difference(self.ids)


class DraftVocabularyRunner(StoredSlots, Runner):
    """A `Runner` of the target's ids, by one of the drafter's rows. Logits of ids that it does not say mean nothing."""

    def __init__(self, inner: Runner, vocabulary: DraftVocabulary, device: torch.device) -> None:
        self._inner = self.store = inner
        self._size = vocabulary.size
        self._own: list[int] = vocabulary.own().tolist()
        self._ids = torch.tensor(vocabulary.ids, device=device)
        self.branches = inner.branches

    def run(self, feeds: Sequence[Feed]) -> torch.Tensor:
        rows = self._inner.run([feed._replace(tokens=[self._own[token] for token in feed.tokens]) for feed in feeds])
        told = rows.new_zeros(len(rows), self._size)
        told[:, self._ids] = rows[:, : len(self._ids)]
        return told
