"""A target with a head beside it: what a head is, the slots of both, and what the head drafts behind their texts."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Collection, Sequence
from itertools import count
from typing import NamedTuple, Protocol

import torch

from specwire.core.draft import DraftingModel, DraftRow, HeadRequest
from specwire.core.model import Feed, ModelInfo
from specwire.core.policy.tunables import LEAST_BEHIND, PREFILL_ROWS
from specwire.lm.guesses import draw_among
from specwire.lm.kv_cache import CachedLM, Runner


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


# ----------------------------------------------------------------------------------------------------------------------
# The slots of a target and of a head beside it.


class HeadFailed(Exception):
    """A head cannot go on; what it drafts is of no use. One clause."""


# Positions whose features wait to be read, at most: beyond that they are dropped, and the head begins anew there.
MOST_UNREAD = 512
# Rows of a forward of which a slot's are kept as they lie. A part of a larger one is copied: else all of it would stay.
SMALL_FORWARD = 64


def waiting_bytes(width: int) -> int:
    """What waits of a slot at most, in float32, where a prompt is fed in chunks of PREFILL_ROWS."""
    return 4 * width * (MOST_UNREAD + 1 + PREFILL_ROWS)


class _Features:
    """What the target's taps said of a slot's latest positions, from `first` up to `stop`.

    They stay what forwards returned until they are read: a step that nobody drafts behind costs next to nothing.
    """

    def __init__(self, width: int) -> None:
        self._nothing = torch.empty(0, width)
        self._parts: list[torch.Tensor] = []
        self.first = self.stop = 0

    def between(self, first: int, stop: int) -> torch.Tensor:
        if len(self._parts) > 1:
            self._parts = [torch.cat(self._parts)]
        return self._parts[0][first - self.first : stop - self.first] if self._parts else self._nothing

    def add(self, rows: torch.Tensor, count: int) -> None:
        self._parts.append(rows)
        self.stop += count

    def begin(self, at: int) -> None:
        """Forget everything; what comes next is of position `at`."""
        self._parts.clear()
        self.first = self.stop = at

    def cut(self, stop: int) -> None:
        """Forget what is not before `stop`."""
        if stop <= self.first:
            self.begin(stop)
        while self.stop > stop:
            last = self._parts.pop()
            self.stop -= len(last)
            if self.stop < stop:
                self.add(last[: stop - self.stop], stop - self.stop)

    def forget_before(self, first: int) -> None:
        self._parts = [self.between(first, self.stop)]
        self.first = first

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self._parts)

    def copied(self, other: _Features, stop: int) -> None:
        """Become what `other` has before `stop`."""
        self._parts.clear()
        self.first = self.stop = min(other.first, stop)
        if stop > other.first:
            self.add(other.between(other.first, stop), stop - other.first)


class _Slot:
    """What the head knows of one slot.

    origin: the first position that it knows, its row 0. What lies before was not kept for it. Rotations tell how far
    rows are from each other, so it need not know where it began.
    fed: the position up to which it has read. successor: the token that its last row was computed with.
    written: rows that may differ from zero.
    """

    def __init__(self, width: int) -> None:
        self.features = _Features(width)
        self.written = 0
        self.begin(0)

    def begin(self, at: int) -> None:
        """Of what is before `at` it knows nothing."""
        self.origin = self.fed = at
        self.successor = -1
        self.features.begin(at)

    def skip(self, at: int) -> None:
        """Likewise, and keep the features from there on."""
        self.origin = self.fed = at
        self.successor = -1
        self.features.forget_before(at)

    @property
    def unread(self) -> int:
        return self.features.stop - self.fed

    @property
    def able(self) -> bool:
        """Whether the head may draft behind it: it knows the text, or enough of its end."""
        return self.origin == 0 or self.features.stop - self.origin >= LEAST_BEHIND

    def kept(self, length: int) -> int:
        """See `HeadedModel`."""
        if length <= self.origin or length > self.fed:
            return length
        return length if length == self.fed and self.features.first < self.fed else length - 1

    def cut(self, length: int) -> None:
        if length <= self.origin:
            self.begin(length)
            return
        self.fed = min(self.fed, length)
        self.features.cut(length)

    def write(self, start: int) -> None:
        """The text goes on from `start`, otherwise than it did if it went further."""
        if start < self.features.stop:
            if self.kept(start) < start:
                self.begin(start)
            else:
                self.cut(start)


class HeadedModel(CachedLM, DraftingModel):
    """The target, whose features a head reads.

    Row t of the head is of the target's features at position t and the text's token t + 1. Features wait here until
    that token is decided, and the head is asked. Draft rows of the head are never kept: what is decided of them is
    computed anew from the target's features. Nothing is tapped in a forward of which nothing is kept (see `heed`).

    A text that goes on otherwise, in this slot or in one that it was copied to, has another token t + 1. So where the
    features of its last position are gone, that position is not kept either: the target computes it again.

    Invariants, of each slot: rows from `origin` to `fed` are the head's, of the text; features are held from `fed` - 1
    on, or from `fed`, up to what the target has cached.
    """

    def __init__(self, runner: Runner, info: ModelInfo, slots: int, unassigned: Sequence[int], head: Head) -> None:
        """runner: it taps what the head reads."""
        super().__init__(runner, info, slots, unassigned)
        self._head = head
        self._slots = [_Slot(head.width) for _ in range(slots)]
        self._proven = False
        self._heeded: frozenset[int] | None = None

    # The target's

    @property
    def branches(self) -> bool:
        """A window is a line here. A head's runners-up would gain little (docs/LOG.md)."""
        return False

    @property
    def kv_bytes(self) -> int:
        return super().kv_bytes + self._head.kv_bytes

    def keep(self, slot: int, start: int, rows: Sequence[int]) -> None:
        super().keep(slot, start, rows)
        self._slots[slot].cut(start + len(rows))

    def rollback(self, slot: int, length: int) -> None:
        """Also of the head. One position fewer is kept where the head has read on with another token (see above)."""
        own = self._slots[slot]
        kept = own.kept(length)
        super().rollback(slot, kept)
        own.cut(kept)

    def discard(self, slot: int) -> None:
        self._void(slot)
        super().discard(slot)

    def _void(self, slot: int) -> None:
        """Forget its text, and leave nothing of it in the head."""
        own = self._slots[slot]
        self._head.zero(slot, own.written)
        own.written = 0
        own.begin(0)

    @torch.inference_mode()
    def copy(self, source: int, target: int, length: int) -> None:
        """Of the head, too. One position fewer is copied where the head has read on with another token (see above)."""
        own, other = self._slots[target], self._slots[source]
        length = other.kept(length)
        super().copy(source, target, length)
        own.origin, own.fed = other.origin, min(other.fed, length)
        own.successor = other.successor if own.fed == other.fed else -1
        own.features.copied(other.features, min(length, other.features.stop))
        own.cut(length)
        self._head.copy(source, target, own.fed - own.origin)
        own.written = max(own.written, own.fed - own.origin)

    @torch.inference_mode()
    def forward(self, feeds: Sequence[Feed]) -> torch.Tensor:
        heeded = self._heeded
        self.runner.tapping = heeded is None or any(slot in heeded for slot, *_ in feeds)
        rows = super().forward(feeds)
        tapped, end = self.runner.tapped, 0
        large = len(tapped) > SMALL_FORWARD
        for slot, start, tokens, *_ in feeds:
            own, begin = self._slots[slot], end
            end += len(tokens)
            own.write(start)
            if heeded is not None and slot not in heeded:
                own.begin(start + len(tokens))
                continue
            if own.unread > MOST_UNREAD:
                own.begin(start)
            fresh = tapped[begin:end]
            own.features.add(fresh.clone() if large else fresh, end - begin)
        for slot in self.failed:
            self._void(slot)
        return rows

    # The head's

    @property
    def most_depth(self) -> int | None:
        return self._head.most_depth

    def heed(self, slots: Collection[int] | None) -> None:
        self._heeded = None if slots is None else frozenset(slots)

    def stop(self) -> None:
        """It will not be asked any more: keep nothing for it."""
        self._heeded = frozenset()
        for own in self._slots:
            own.begin(own.features.stop)

    def unread(self, slot: int) -> int | None:
        return self._slots[slot].unread if self._slots[slot].able else None

    def skip(self, slot: int, left: int) -> None:
        own = self._slots[slot]
        if left < own.unread:
            own.skip(own.features.stop - left)

    @torch.inference_mode()
    def catch_up(self, requests: Sequence[HeadRequest]) -> None:
        """Let the head read what is held of the texts, up to what a draft begins with, all in one forward."""
        feeds = []
        for request in requests:
            feed, own = self._feed(request), self._slots[request.slot]
            count = min(own.features.stop, len(request.tokens) - 2) - feed.start
            if count > 0:
                feeds.append(feed._replace(tokens=feed.tokens[:count]))
        if feeds:
            self._head.read(self._rows(feeds, 0), self._held(feeds))
            self._mark_read(feeds)

    @torch.inference_mode()
    def draft(self, requests: Sequence[HeadRequest]) -> list[list[int]]:
        """Behind each text as many tokens as are asked for, as the head has, or as fit into the context.

        Everything before a text's last token must be cached. Of a text shorter than two tokens nothing is drafted, nor
        of one of whose end the head knows too little.

        Raises:
            HeadFailed: nothing that it said was ever finite. Where something was, it begins anew behind the text.
        """
        drafted: list[list[int]] = [[] for _ in requests]
        asked = [(at, request._replace(depth=self._depth(request))) for at, request in enumerate(requests)]
        asked = [(at, request) for at, request in asked if request.depth > 0]
        if not asked:
            return drafted
        live = [request for _, request in asked]
        feeds, deepest = [self._feed(request) for request in live], max(request.depth for request in live)
        found = self._head.draft(self._rows(feeds, deepest - 1), self._held(feeds), live)
        self._mark_read(feeds)
        for (at, request), tokens in zip(asked, found, strict=True):
            drafted[at] = tokens
            self._proven = self._proven or len(tokens) > 0
            if len(tokens) < request.depth:
                self._void(request.slot)
                self._slots[request.slot].begin(self.cached(request.slot))
        if not self._proven:
            raise HeadFailed("its logits are not finite")
        return drafted

    def _depth(self, request: HeadRequest) -> int:
        """How many tokens are to be drafted."""
        if len(request.tokens) < 2 or not self._slots[request.slot].able:
            return 0
        most = request.depth if self._head.most_depth is None else min(request.depth, self._head.most_depth)
        return min(most, self.info.context - len(request.tokens))

    def _feed(self, request: HeadRequest) -> Feed:
        """The rows that the head lacks; the last one again if it has them all."""
        own, tokens = self._slots[request.slot], request.tokens
        start = own.fed
        if start > own.features.first and (start == len(tokens) - 1 or own.successor != tokens[start]):
            start -= 1
        return Feed(request.slot, start, tokens[start + 1 :], 1)

    def _held(self, feeds: Sequence[Feed]) -> torch.Tensor:
        """The features that the head is to read there."""
        return torch.cat([self._slots[feed.slot].features.between(feed.start, feed.stop) for feed in feeds])

    def _mark_read(self, feeds: Sequence[Feed]) -> None:
        """The last features stay: another token may yet follow them."""
        for feed in feeds:
            own = self._slots[feed.slot]
            own.fed, own.successor = feed.stop, feed.tokens[-1]
            own.features.forget_before(feed.stop - 1)

    def _rows(self, feeds: Sequence[Feed], behind: int) -> list[Feed]:
        """Feeds of positions as those of the head's rows, which it will write, and up to so many behind each feed."""
        rows = []
        for feed in feeds:
            own = self._slots[feed.slot]
            row = feed._replace(start=feed.start - own.origin) if own.origin else feed
            own.written = max(own.written, min(row.stop + behind, self.info.context))
            rows.append(row)
        return rows
