"""What a head is to the target beside it; and heads that draft by a forward for each token."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from itertools import count
from typing import NamedTuple, Protocol

import torch

from specwire.core.draft import DraftRow, HeadRequest
from specwire.core.model import Feed
from specwire.lm.guesses import draw_among


class Head(Protocol):
    """Drafts over the slots of a target, from its features.

    Row t of a slot is of the target's features at position t and of the text's token t + 1, and says what token t + 2
    may be. As a `Runner` it keeps no valid lengths: a feed says where its rows are, and rows behind them are void.

    width: of a position's features, those of all taps side by side. most_depth: tokens that it can draft in a row; None
    for any number.
    """

    width: int
    most_depth: int | None

    @property
    def kv_bytes(self) -> int: ...

    def read(self, feeds: Sequence[Feed], features: torch.Tensor) -> object:
        """Rows of the text. features: (sum of tokens, width), of all tokens of the feeds, one behind the other."""
        ...

    def draft(
        self,
        feeds: Sequence[Feed],
        features: torch.Tensor,
        requests: Sequence[HeadRequest],
    ) -> list[list[int]]:
        """Read likewise, and draft behind each feed, the end of its request's text, as many tokens as that asks for.

        Fewer where a step's values were not finite: those before it. Rows are written as for the deepest request, but
        none beyond the context.
        """
        ...

    def zero(self, slot: int, stop: int) -> None: ...

    def copy(self, source: int, target: int, stop: int) -> None:
        """The first `stop` rows."""
        ...


class HeadStep(NamedTuple):
    """What a head's forward leads to, a row for each feed: what its next step reads, and logits over its own ids."""

    states: torch.Tensor
    logits: torch.Tensor


class SteppedHead(ABC):
    """A `Head` that drafts by a forward for each token. target_ids: of each of its own ids the target's."""

    target_ids: torch.Tensor

    @abstractmethod
    def read(self, feeds: Sequence[Feed], features: torch.Tensor) -> HeadStep:
        """As `Head.read`."""

    @abstractmethod
    def follow(self, feeds: Sequence[Feed], states: torch.Tensor, depth: int) -> HeadStep:
        """One row for each feed, behind its own last token. states: of the step before. depth: 1 for the first."""

    def draft(
        self,
        feeds: Sequence[Feed],
        features: torch.Tensor,
        requests: Sequence[HeadRequest],
    ) -> list[list[int]]:
        """As `Head.draft`."""
        drafted: list[list[int]] = [[] for _ in requests]
        live, step = [*range(len(requests))], self.read(feeds, features)
        for depth in count(1):
            fine = finite_rows(step.logits)
            if len(fine) < len(live):
                live, step = [live[row] for row in fine], HeadStep(step.states[fine], step.logits[fine])
            rows = [DraftRow(len(requests[at].tokens) + depth - 1, requests[at].sampling) for at in live]
            for at, token in zip(live, draw_among(self.target_ids, step.logits, rows), strict=True):
                drafted[at].append(token)
            going = [row for row, at in enumerate(live) if depth < requests[at].depth]
            if not going:
                break
            states = step.states if len(going) == len(live) else step.states[going]
            live = [live[row] for row in going]
            # Behind its own tokens the head reads what it made of the one before.
            behind = [Feed(feeds[at].slot, feeds[at].stop + depth - 1, [drafted[at][-1]], 1) for at in live]
            step = self.follow(behind, states, depth)
        return drafted


def finite_rows(logits: torch.Tensor) -> list[int]:
    """The rows of which all values are finite."""
    # A finite sum proves it in one cheap pass; sums can also overflow.
    if math.isfinite(logits.sum()):
        return [*range(len(logits))]
    return torch.isfinite(logits).all(dim=1).nonzero().flatten().tolist()
