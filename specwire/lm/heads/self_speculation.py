"""Drafting with the target's own layers, some left out: Draft & Verify (Zhang et al. 2023, arXiv 2309.08168), SWIFT
(Xia et al. 2024, arXiv 2410.06916), and early exit as in LayerSkip (Elhoushi et al. 2024, arXiv 2404.16710).

No weights are added, and no keys and values: those of the text, which the whole target wrote, are read as they are.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch

from specwire.core.draft import DraftingModel, HeadRequest
from specwire.core.model import Feed, ModelError, ModelInfo
from specwire.lm.guesses import draft_behind
from specwire.lm.kv_cache import CachedLM, Runner

PREFIX = "self:"
SKIP, EXIT = "skip", "exit"
WANTED = f"must be {SKIP}=LAYER,LAYER,... or {EXIT}=LAYER"


class SkimmingModel(CachedLM, DraftingModel):
    """A target that drafts by some of its layers.

    A draft row is computed by the layers `kept`: the first is of the text's last token, the others are of what was
    drafted before. Each reads the target's own keys and values of the text, and those of the draft rows before it,
    which lie beyond the slot's valid length. The next forward writes all layers of each row of its window anew.
    """

    def __init__(
        self, runner: Runner, info: ModelInfo, slots: int, unassigned: Sequence[int], kept: Sequence[int]
    ) -> None:
        super().__init__(runner, info, slots, unassigned)
        self.kept = tuple(kept)

    def unread(self, slot: int) -> int | None:
        """None of any text: it is read as the target wrote it."""
        return 0

    def heed(self, slots: Collection[int] | None) -> None:
        """Nothing is kept for it beside the target's own keys and values."""

    def skip(self, slot: int, left: int) -> None:
        """Nothing is unread."""

    def catch_up(self, requests: Sequence[HeadRequest]) -> None:
        """Nothing is unread."""

    def stop(self) -> None:
        """There is nothing that it holds."""

    def draft(self, requests: Sequence[HeadRequest]) -> list[list[int]]:
        """See `draft_behind`."""

        def forward(going: Sequence[int], drafted: Sequence[Sequence[int]]) -> torch.Tensor:
            return self.skim([_next(requests[at], drafted[at]) for at in going], self.kept)

        return draft_behind(self, requests, forward)


def _next(request: HeadRequest, drafted: Sequence[int]) -> Feed:
    last = drafted[-1] if drafted else request.tokens[-1]
    return Feed(request.slot, len(request.tokens) - 1 + len(drafted), [last], 1)


# ----------------------------------------------------------------------------------------------------------------------
# Which layers: named in `--heads`.


def is_self(spec: str) -> bool:
    """Whether what `--heads` names is the target itself."""
    return spec.startswith(PREFIX)


def kept_layers(spec: str, layers: int) -> tuple[int, ...]:
    """The layers that draft for a target that has so many. ModelError that names the value."""
    word, equals, value = spec.removeprefix(PREFIX).partition("=")
    if equals and word == EXIT:
        kept = range(_number(spec, value))
        if not 0 < len(kept) < layers:
            raise ModelError(f"heads: {spec}: {EXIT} must be from 1 to {layers - 1} of {layers} layers, not {value}")
        return tuple(kept)
    if equals and word == SKIP:
        return _without(spec, [_number(spec, part) for part in value.split(",")], layers)
    raise ModelError(f"heads: {spec}: {WANTED}")


def _number(spec: str, text: str) -> int:
    if not (text.isascii() and text.isdecimal()):
        raise ModelError(f"heads: {spec}: {text!r} is no layer's number")
    return int(text)


def _without(spec: str, skip: Sequence[int], layers: int) -> tuple[int, ...]:
    """The other layers."""
    for layer in skip:
        if not 0 <= layer < layers:
            raise ModelError(f"heads: {spec}: {SKIP}: layer {layer} is none of the target's 0 to {layers - 1}")
        if skip.count(layer) > 1:
            raise ModelError(f"heads: {spec}: {SKIP}: layer {layer} is named twice")
    if not 0 < len(skip) < layers:
        raise ModelError(f"heads: {spec}: {SKIP}: must leave out some of {layers} layers, not {len(skip)}")
    return tuple(layer for layer in range(layers) if layer not in skip)
