"""Which of a target's layers to leave out while it drafts, found on a user's own texts (SWIFT, Xia et al. 2024).

Layers are left out one after the other, each time the one without which most draft tokens stay right. Of the sets on
that way the one is taken that is expected to decide most tokens per unit of time.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch

from specwire.core.model import Feed, ModelError, ModelInfo, SlotModel, TreeFeed
from specwire.core.policy.estimates import expected_tokens
from specwire.core.policy.tunables import MOST_HEAD_DEPTH
from specwire.lm.heads.self_speculation import LayerChoice
from specwire.lm.kv_cache import CachedLM
from specwire.progress import ProgressBar
from specwire.text.tokenizer import TokenizerError, encode, load_tokenizer

# Every so many-th window is held out.
HELD_OUT_EVERY = 5
TIMED_ROUNDS = 12


class Gain(NamedTuple):
    """Expected tokens for the time of one by plain decoding, at the depth that is best."""

    tokens: float
    depth: int


class FoundLayers(NamedTuple):
    """Layers to skip, P(accept) of a draft token without them, and what that gains."""

    skip: tuple[int, ...]
    acceptance: float
    gain: Gain


def gain_of(acceptance: float, share: float) -> Gain:
    """(1 + a + ... + a^k) / (1 + k share), for the best k. share: of a forward's time that a draft row takes."""
    rates = [acceptance] * MOST_HEAD_DEPTH
    depths = range(1, MOST_HEAD_DEPTH + 1)
    return max(Gain(expected_tokens(rates, depth) / (1 + depth * share), depth) for depth in depths)


def search(
    layers: int,
    acceptance: Callable[[Sequence[int]], float],
    share: Callable[[int], float],
    tell: Callable[[str], None],
) -> FoundLayers:
    """The best set on a greedy way through all of them.

    It ends where even a draft by a single layer would have to be right more often to gain as much as was found.

    Args:
        layers: that there are, at least 2.
        acceptance: of a draft by these layers.
        share: of a forward's time that so many layers take.
    """
    skip: tuple[int, ...] = ()
    best: FoundLayers | None = None
    with ProgressBar("layers", layers * (layers + 1) // 2 - 1) as bar:
        done = 0
        while len(skip) < layers - 1:
            tried: list[tuple[float, int]] = []
            for layer in (each for each in range(layers) if each not in skip):
                kept = [each for each in range(layers) if each != layer and each not in skip]
                tried.append((acceptance(kept), layer))
                done += 1
                bar.at(done, f"{len(skip) + 1} skipped")
            rate, layer = max(tried)
            skip = tuple(sorted((*skip, layer)))
            found = FoundLayers(skip, rate, gain_of(rate, share(layers - len(skip))))
            tell(f"skips {listed(skip)}: acceptance {rate:.3f}, gain {found.gain.tokens:.3f}")
            if best is None or found.gain.tokens > best.gain.tokens:
                best = found
            if gain_of(rate, share(1)).tokens <= best.gain.tokens:
                break
    if best is None:
        raise ValueError(f"layers: at least 2 are needed, not {layers}")
    return best


def listed(layers: Sequence[int]) -> str:
    """As `--heads self:skip=` has them."""
    return ",".join(map(str, layers))


class TextWindows:
    """Windows of text in the slots of a model, each `size` tokens long in a context twice as long.

    A draft row of each position is computed in one pass: it lies behind the text, and sees what a first draft row sees
    there while the text is decided, the target's own keys and values before its position, and itself.
    """

    def __init__(self, lm: CachedLM, windows: Sequence[Sequence[int]]) -> None:
        """windows: one for each of the first slots."""
        self._lm, self._windows = lm, windows
        size = len(windows[0])
        self._tree = TreeFeed(0, tuple(tuple(range(position)) for position in range(size)))
        self._told = [
            lm.forward([Feed(slot, 0, window, size)]).argmax(dim=1) for slot, window in enumerate(self._windows)
        ]

    def acceptance(self, kept: Sequence[int], slots: Sequence[int]) -> float:
        """How often the best id by the layers `kept` is the target's, over the windows of these slots."""
        right = sum(self._right(slot, kept) for slot in slots)
        return right / sum(len(self._windows[slot]) for slot in slots)

    def _right(self, slot: int, kept: Sequence[int]) -> int:
        window = self._windows[slot]
        try:
            rows = self._lm.skim([Feed(slot, len(window), window, len(window), self._tree)], kept)
        except FloatingPointError:
            return 0
        return int((rows.argmax(dim=1) == self._told[slot]).sum())


def shares(lm: CachedLM, layers: int) -> Callable[[int], float]:
    """Of a forward of one row the share that a draft row by so many layers takes, as measured behind slot 0's text."""
    times: dict[int, float] = {}
    for _ in range(TIMED_ROUNDS):
        for count in (1, layers):
            began = time.perf_counter()
            lm.skim([Feed(0, lm.cached(0), [0], 1)], range(count)).argmax(dim=1).tolist()
            times[count] = min(times.get(count, float("inf")), time.perf_counter() - began)
    each = max(0.0, times[layers] - times[1]) / (layers - 1)
    return lambda count: min(1.0, (times[1] + (count - 1) * each) / times[layers])


def windows_of(texts: Iterator[str], info: ModelInfo, size: int, most: int) -> list[list[int]]:
    """Up to `most` windows of `size` tokens, spread over the texts, each of which an end-of-text id leads if there is
    one. ModelError for a target without a tokenizer, and for texts that are too short for two windows.
    """
    try:
        tokenizer = load_tokenizer(info.tokenizer_json)
    except TokenizerError as error:
        raise ModelError(f"target: {info.name}: {error}") from error
    ids: list[int] = []
    for text in texts:
        ids += [*info.eos_ids[:1], *encode(tokenizer, text)]
    whole = len(ids) // size
    if whole < 2:
        raise ModelError(f"data: {len(ids)} tokens are less than two windows of {size}")
    count = min(most, whole)
    return [ids[at * size : (at + 1) * size] for at in (index * whole // count for index in range(count))]


@torch.inference_mode()
def choose_layers(lm: SlotModel, windows: Sequence[Sequence[int]], tell: Callable[[str], None]) -> LayerChoice:
    """Fill a model's slots with windows, and search. Acceptance and gain are those on the windows held out.

    Raises:
        ModelError: the model cannot leave layers out.
    """
    if not isinstance(lm, CachedLM) or lm.runner.layers < 2:
        raise ModelError(f"target: a {lm.info.architecture} is not computed by a runner that can leave layers out")
    layers = lm.runner.layers
    filled = TextWindows(lm, windows)
    held_out = range(0, len(windows), HELD_OUT_EVERY)
    chosen_by = [slot for slot in range(len(windows)) if slot not in held_out]
    share = shares(lm, layers)
    half = share(layers // 2)
    tell(f"{layers} layers; a draft row takes {share(1):.2f} of a forward by one, {half:.2f} by half of them")
    found = search(layers, lambda kept: filled.acceptance(kept, chosen_by), share, tell)
    kept = [layer for layer in range(layers) if layer not in found.skip]
    acceptance = filled.acceptance(kept, held_out)
    gain = gain_of(acceptance, share(len(kept)))
    return LayerChoice(
        target=lm.info.name,
        weights_fingerprint=lm.info.weights_fingerprint,
        layers=layers,
        skip=found.skip,
        acceptance=round(acceptance, 4),
        depth=gain.depth,
        gain=round(gain.tokens, 4),
    )
