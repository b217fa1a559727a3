"""A target with a head beside it: the slots of both, and what the head drafts behind their texts."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count
from typing import NamedTuple, Protocol, runtime_checkable

import torch

from specwire.core.draft import HeadRequest
from specwire.core.model import Feed, ModelInfo, SlotModel
from specwire.lm.draft_sampler import DraftRow, draw_among
from specwire.lm.kv_cache import CachedLM, TappedRunner


@runtime_checkable
class DraftingModel(SlotModel, Protocol):
    """A target that drafts behind its own texts: by a head beside it, or by some of its layers."""

    @property
    def most_depth(self) -> int | None:
        """Tokens that are drafted behind a text at most, however many are asked for; None for any number."""
        ...

    def catch_up(self, requests: Sequence[HeadRequest]) -> None:
        """Read what `draft` would have to read before it drafts."""
        ...

    def draft(self, requests: Sequence[HeadRequest]) -> list[list[int]]:
        """Behind each text up to as many tokens as are asked for; what the slots hold stays as it is."""
        ...


class HeadFailed(Exception):
    """A head cannot go on; what it drafts is of no use. One clause."""


class Step(NamedTuple):
    """What a head's forward leads to, a row for each feed: what its next step reads, and logits over its own ids."""

    states: torch.Tensor
    logits: torch.Tensor


class Head(Protocol):
    """Drafts over the slots of a target, from its features.

    Row t of a slot is of the target's features at position t and of the text's token t + 1, and says what token t + 2
    may be. As a `Runner` it keeps no valid lengths: a feed says where its rows are, and rows behind them are void.

    width: of a position's features, those of all taps side by side. target_ids: of each of its own ids the target's.
    most_depth: tokens that it can draft in a row; None for any number.
    """

    width: int
    target_ids: torch.Tensor
    most_depth: int | None

    @property
    def kv_bytes(self) -> int: ...

    def read(self, feeds: Sequence[Feed], features: torch.Tensor) -> Step:
        """Rows of the text. features: (sum of tokens, width), of all tokens of the feeds, one behind the other."""
        ...

    def follow(self, feeds: Sequence[Feed], states: torch.Tensor, depth: int) -> Step:
        """One row for each feed, behind its own last token. states: of the step before. depth: 1 for the first."""
        ...

    def zero(self, slot: int, stop: int) -> None: ...

    def copy(self, source: int, target: int, stop: int) -> None:
        """The first `stop` rows."""
        ...


# Positions whose features wait: a head that nobody asks reads them before there are more.
MOST_HELD = 512


class _Held(NamedTuple):
    """What the target's taps said of positions `first` and on: (positions, taps x hidden), and the text's ids there."""

    first: int
    features: torch.Tensor
    tokens: tuple[int, ...]

    @property
    def stop(self) -> int:
        return self.first + len(self.features)

    def until(self, stop: int) -> _Held:
        count = max(0, stop - self.first)
        return _Held(self.first, self.features[:count], self.tokens[:count])

    def since(self, first: int) -> _Held:
        return _Held(first, self.features[first - self.first :], self.tokens[first - self.first :])

    def and_then(self, features: torch.Tensor, tokens: Sequence[int]) -> _Held:
        whole = torch.cat((self.features, features)) if len(self.features) else features
        return _Held(self.first, whole, (*self.tokens, *tokens))


class HeadedModel:
    """A `SlotModel` that is the target, whose features a head reads.

    Row t of the head is of the target's features at position t and the text's token t + 1. Features wait here until
    that token is decided. Draft rows of the head are never kept: what is decided of them is computed anew from the
    target's features.

    A text that goes on otherwise, in this slot or in one that it was copied to, has another token t + 1. So where the
    features of its last position are gone, that position is not kept either: the target computes it again.

    Invariants, of each slot: rows before `fed` are the head's, of the text; features are held from `fed` - 1 on, or
    from `fed`, up to what the target has cached.
    """

    def __init__(self, lm: CachedLM, target: TappedRunner, head: Head) -> None:
        """target: which computes what is `lm`."""
        self._lm, self._target, self._head = lm, target, head
        nothing = torch.empty(0, head.width)
        self._fed = [0] * lm.slots
        self._successors = [-1] * lm.slots
        self._held = [_Held(0, nothing, ())] * lm.slots
        self._nothing = nothing

    # The target's

    @property
    def info(self) -> ModelInfo:
        return self._lm.info

    @property
    def slots(self) -> int:
        return self._lm.slots

    @property
    def failed(self) -> frozenset[int]:
        return self._lm.failed

    @property
    def branches(self) -> bool:
        """A window is a line here."""
        return False

    @property
    def kv_bytes(self) -> int:
        return self._lm.kv_bytes + self._head.kv_bytes

    @property
    def most_depth(self) -> int | None:
        return self._head.most_depth

    def cached(self, slot: int) -> int:
        return self._lm.cached(slot)

    def keep(self, slot: int, start: int, rows: Sequence[int]) -> None:
        self._lm.keep(slot, start, rows)
        self._cut(slot, start + len(rows))

    def rollback(self, slot: int, length: int) -> None:
        """To one position less where the head has read more."""
        kept = self._kept(slot, length)
        self._lm.rollback(slot, kept)
        self._cut(slot, kept)

    def _kept(self, slot: int, length: int) -> int:
        return length if length >= self._fed[slot] else max(0, length - 1)

    def _cut(self, slot: int, length: int) -> None:
        self._fed[slot] = min(self._fed[slot], length)
        held = self._held[slot]
        self._held[slot] = held.until(length) if held.first < length else _Held(length, self._nothing, ())

    def discard(self, slot: int) -> None:
        self._head.zero(slot, self._lm.written(slot))
        self._lm.discard(slot)
        self._forget(slot)

    def _forget(self, slot: int) -> None:
        self._fed[slot], self._held[slot] = 0, _Held(0, self._nothing, ())

    @torch.inference_mode()
    def copy(self, source: int, target: int, length: int) -> None:
        """Of one position less where the head has read more."""
        length = self._kept(source, length)
        self._lm.copy(source, target, length)
        self._fed[target] = min(self._fed[source], length)
        self._successors[target] = self._successors[source] if self._fed[target] == self._fed[source] else -1
        self._held[target] = self._held[source]
        self._cut(target, length)
        self._head.copy(source, target, self._fed[target])

    @torch.inference_mode()
    def forward(self, feeds: Sequence[Feed]) -> torch.Tensor:
        rows = self._lm.forward(feeds)
        end = 0
        for feed in feeds:
            fresh = self._target.tapped[end : end + len(feed.tokens)]
            end += len(feed.tokens)
            self._cut(feed.slot, feed.start)
            if len(self._held[feed.slot].tokens) > MOST_HELD:
                self._read(feed)
            self._held[feed.slot] = self._held[feed.slot].and_then(fresh, feed.tokens)
        for slot in self.failed:
            self._forget(slot)
        return rows

    # The head's

    def _read(self, feed: Feed) -> None:
        """Let the head read what is held: the text, behind which the target was fed `feed`."""
        start, held = self._fed[feed.slot], self._held[feed.slot]
        tokens = [*held.since(start).tokens[1:], feed.tokens[0]]
        reads = Feed(feed.slot, start, tokens, 1)
        self._head.read([reads], held.since(start).features)
        self._settle(reads)

    @torch.inference_mode()
    def catch_up(self, requests: Sequence[HeadRequest]) -> None:
        """Let the head read the texts up to what a draft begins with, all in one forward."""
        feeds = [self._feed(request) for request in requests if len(request.tokens) > 2]
        feeds = [feed._replace(tokens=feed.tokens[:-1]) for feed in feeds if len(feed.tokens) > 1]
        if feeds:
            rows = [self._held[feed.slot].since(feed.start).features[: len(feed.tokens)] for feed in feeds]
            self._head.read(feeds, torch.cat(rows))
            for feed in feeds:
                self._settle(feed)

    @torch.inference_mode()
    def draft(self, requests: Sequence[HeadRequest]) -> list[list[int]]:
        """Behind each text as many tokens as are asked for, or as the head has, or as fit into the context.

        Everything before a text's last token must be cached. Of a text shorter than two tokens nothing is drafted.
        """
        drafted: list[list[int]] = [[] for _ in requests]
        live = [at for at, request in enumerate(requests) if request.depth > 0 and len(request.tokens) > 1]
        if not live:
            return drafted
        feeds = [self._feed(requests[at]) for at in live]
        features = [self._held[feed.slot].since(feed.start).features[: len(feed.tokens)] for feed in feeds]
        step = self._head.read(feeds, torch.cat(features))
        for feed in feeds:
            self._settle(feed)
        for depth in count(1):
            if not bool(torch.isfinite(step.logits).all()):
                raise HeadFailed("its logits are not finite")
            rows = [_row(requests[at], len(drafted[at])) for at in live]
            chosen = draw_among(self._head.target_ids, step.logits, rows, self.info.vocabulary)
            for at, token in zip(live, chosen, strict=True):
                drafted[at].append(token)
            going = [row for row, at in enumerate(live) if self._goes_on(requests[at], len(drafted[at]))]
            if not going:
                break
            states = step.states if len(going) == len(live) else step.states[going]
            live = [live[row] for row in going]
            feeds = [_next(requests[at], drafted[at]) for at in live]
            step = self._head.follow(feeds, states, depth)
        return drafted

    def _feed(self, request: HeadRequest) -> Feed:
        """The rows that the head lacks; the last one again if it has them all."""
        slot, tokens, held = request.slot, request.tokens, self._held[request.slot]
        start = self._fed[slot]
        if start > held.first and (start == len(tokens) - 1 or self._successors[slot] != tokens[start]):
            start -= 1
        return Feed(slot, start, tokens[start + 1 :], 1)

    def _settle(self, feed: Feed) -> None:
        """Note what was fed; the last row's features stay, for another successor."""
        self._fed[feed.slot], self._successors[feed.slot] = feed.stop, feed.tokens[-1]
        self._held[feed.slot] = self._held[feed.slot].since(feed.stop - 1)

    def _goes_on(self, request: HeadRequest, drafted: int) -> bool:
        most = request.depth if self.most_depth is None else min(request.depth, self.most_depth)
        return drafted < most and len(request.tokens) + drafted < self.info.context


def _row(request: HeadRequest, drafted: int) -> DraftRow:
    return DraftRow(len(request.tokens) + drafted, request.sampling, rate=False)


def _next(request: HeadRequest, drafted: Sequence[int]) -> Feed:
    """Behind its own tokens the head reads what it made of the one before."""
    return Feed(request.slot, len(request.tokens) - 2 + len(drafted), [drafted[-1]], 1)
