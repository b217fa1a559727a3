"""Heads for an engine in a test, which say what the test wants, and a rig beside which they draft."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch

from specwire.core.draft import DraftingModel, HeadRequest
from specwire.core.messages import SourceKind
from specwire.core.policy.heads import HeadDepth
from specwire.lm import Feed, LanguageModel, load_model
from specwire.lm.kv_cache import Runner
from tests.verify_service.rig import Rig, oracle
from verify_service.engine.heads import HeadDrafting

MODEL = "scripted:5"
PROMPT = (3, 1, 4, 1, 5)
LENGTH = 40


class ScriptedHeads(DraftingModel):
    """Says what `tokens` makes of the right continuation."""

    def __init__(self, tokens: Callable[[list[int]], list[int]], model: str = MODEL) -> None:
        self.asked: list[HeadRequest] = []
        self.lengths: list[int] = []
        self.caught_up: list[int] = []
        self.together: list[int] = []
        self.skipped: list[tuple[int, int]] = []
        self.heeded: list[Collection[int]] = []
        self.stopped = self.forgets = False
        self.reading: Callable[[], None] = lambda: None
        self.slowed: Callable[[], None] = lambda: None
        self.tokens_at: Callable[[int], Callable[[list[int]], list[int]]] = lambda _length: tokens
        self._lm = load_model(model, slots=1)

    def unread(self, slot: int) -> int | None:
        return 1 if slot in self.caught_up and not self.forgets else 40

    def heed(self, slots: Collection[int] | None) -> None:
        assert slots is not None
        self.heeded.append(slots)

    def skip(self, slot: int, left: int) -> None:
        self.skipped.append((slot, left))

    def catch_up(self, requests: Sequence[HeadRequest]) -> None:
        self.caught_up += [request.slot for request in requests]
        self.reading()

    def stop(self) -> None:
        self.stopped = True

    def draft(self, requests: Sequence[HeadRequest]) -> list[list[int]]:
        self.asked += requests
        self.together.append(len(requests))
        self.slowed()
        self.lengths += [len(request.tokens) for request in requests]
        true = [oracle(self._lm, request.tokens, request.depth, request.sampling) for request in requests]
        return [self.tokens_at(len(request.tokens))(each) for request, each in zip(requests, true, strict=True)]


class TappedScript(Runner):
    """A scripted target as a runner, whose features are zeros. forwards: whether each was tapped."""

    kv_bytes = 0

    def __init__(self, lm: LanguageModel) -> None:
        self.lm, self.tapped = lm, torch.empty(0, 1)
        self.forwards: list[bool] = []

    def run(self, feeds: Sequence[Feed]) -> torch.Tensor:
        self.forwards.append(self.tapping)
        self.tapped = torch.zeros(sum(len(feed.tokens) for feed in feeds), 1) if self.tapping else self.tapped[:0]
        return self.lm.forward([feed._replace(wanted=max(1, feed.wanted)) for feed in feeds])

    def zero(self, slot: int, stop: int) -> None:
        self.lm.discard(slot)

    def copy(self, source: int, target: int, stop: int) -> None:
        self.lm.copy(source, target, stop)


class SayingHead:
    """A `Head` over the features of a `TappedScript`: it says what `tokens` makes of the right continuation."""

    width, kv_bytes = 1, 0
    most_depth: int | None = None

    def __init__(self, tokens: Callable[[list[int]], list[int]]) -> None:
        self.tokens = tokens
        self.drafts = 0
        self.slowed: Callable[[], None] = lambda: None
        self._lm = load_model(MODEL, slots=1)

    def read(self, feeds: Sequence[Feed], features: torch.Tensor) -> None:
        assert sum(len(feed.tokens) for feed in feeds) == len(features)

    def draft(
        self,
        feeds: Sequence[Feed],
        features: torch.Tensor,
        requests: Sequence[HeadRequest],
    ) -> list[list[int]]:
        self.read(feeds, features)
        self.drafts += len(requests)
        self.slowed()
        return [self.tokens(oracle(self._lm, each.tokens, each.depth, each.sampling)) for each in requests]

    def zero(self, slot: int, stop: int) -> None:
        """There is nothing."""

    def copy(self, source: int, target: int, stop: int) -> None:
        """There is nothing."""


def right(tokens: list[int]) -> list[int]:
    return tokens


def wrong(tokens: list[int]) -> list[int]:
    return [(token + 1) % 60 for token in tokens]


def first_right(tokens: list[int]) -> list[int]:
    return [*tokens[:1], *wrong(tokens[1:])]


def none(_tokens: list[int]) -> list[int]:
    return []


def rig_with(heads: ScriptedHeads, depth: HeadDepth | float = 20.0, **more: Any) -> Rig:
    """depth: or what a token of the head is thought to take."""
    drafting = HeadDrafting(heads, depth if isinstance(depth, HeadDepth) else HeadDepth({1: depth}))
    return Rig(MODEL, **{"ngram": False, "drafting": drafting, **more})


def takes(rig: Rig, us: float, heads: ScriptedHeads | None = None) -> Callable[[], None]:
    """Lets so much time pass; for each token of a draft, where it is of heads."""
    return lambda: setattr(rig, "now", rig.now + us * (1 if heads is None else heads.asked[-1].depth))


def kinds(rig: Rig) -> set[SourceKind]:
    verdicts = [decided.verdict for report in rig.reports for decided in report.decided]
    return {verdict.kind for verdict in verdicts if verdict.width}
