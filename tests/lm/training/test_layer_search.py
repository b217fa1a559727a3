"""The search for layers to skip: its way, what it measures, and what it is told to read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import combinations
from math import prod
from pathlib import Path

import pytest
import torch

from specwire.core.model import ModelError
from specwire.lm import load_model
from specwire.lm.kv_cache import CachedLM
from specwire.lm.training.layer_search import TextWindows, choose_layers, gain_of, search, windows_of
from tests.lm import models
from tests.lm.heads.test_self_speculation import LAYERS, ByHand, built

SIZE = 12
TEXTS = [[3 + (7 * at * at + 5 * window) % 40 for at in range(SIZE)] for window in range(3)]
WORDS = {word: index for index, word in enumerate(["?", "a", "<end>", *"bcdefgh"])}


def loaded(where: str, slots: int = 3) -> CachedLM:
    lm = load_model(where, slots=slots, context=2 * SIZE, threads=1)
    assert isinstance(lm, CachedLM)
    return lm


def test_the_gain_is_the_best_depth_s() -> None:
    """Expected tokens over the time that they take."""
    a, share = 0.8, 0.3
    by_depth = {depth: sum(a**power for power in range(depth + 1)) / (1 + depth * share) for depth in range(1, 9)}
    assert gain_of(a, share).tokens == pytest.approx(max(by_depth.values()))
    assert by_depth[gain_of(a, share).depth] == max(by_depth.values())
    assert gain_of(0.1, 0.5).tokens == pytest.approx(1.1 / 1.5)
    assert gain_of(1.0, 0.1).depth == 8


@pytest.mark.parametrize(
    "losses", [[0.5, 0.02, 0.3, 0.04, 0.4, 0.01], [0.01] * 6, [0.9] * 6, [0.3, 0.05, 0.05, 0.05, 0.05, 0.3]]
)
def test_it_finds_what_trying_every_set_does_where_losses_multiply(losses: list[float]) -> None:
    layers = len(losses)

    def acceptance(kept: Sequence[int]) -> float:
        return prod(1 - losses[layer] for layer in range(layers) if layer not in kept)

    def share(count: int) -> float:
        return 0.05 + 0.95 * count / layers

    def gain(skip: tuple[int, ...]) -> float:
        kept = [layer for layer in range(layers) if layer not in skip]
        return gain_of(acceptance(kept), share(len(kept))).tokens

    every = [skip for count in range(1, layers) for skip in combinations(range(layers), count)]
    said: list[str] = []
    found = search(layers, acceptance, share, said.append)
    assert found.gain.tokens == pytest.approx(gain(found.skip)) == pytest.approx(max(map(gain, every)))
    assert len(said) < layers


def test_it_ends_where_nothing_more_can_be_gained() -> None:
    tried: list[Sequence[int]] = []

    def acceptance(kept: Sequence[int]) -> float:
        tried.append(kept)
        return 0.0 if len(kept) < 9 else 0.9

    assert len(search(10, acceptance, lambda count: count / 10, lambda _: None).skip) == 1
    assert len(tried) == 10 + 9


@pytest.mark.parametrize("kept", [(0, 2, 4), (0, 1), (1, 2, 3, 4)])
@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3"])
def test_acceptance_is_what_a_loop_counts(kind: str, kept: tuple[int, ...], tmp_path: Path) -> None:
    """At every position: the first draft token behind the text that ends there, and the target's own."""
    target, where = built(tmp_path, kind)
    lm, plain, right = loaded(where), ByHand(target), 0
    windows = TextWindows(lm, TEXTS)
    for text in TEXTS[1:]:
        told = models.plain(target, text).argmax(dim=1).tolist()
        right += sum(plain.draft(text[: at + 1], 1, kept) == [told[at]] for at in range(SIZE))
    assert windows.acceptance(kept, [1, 2]) == right / (2 * SIZE)
    assert windows.acceptance(range(LAYERS), range(3)) == 1.0
    assert [lm.cached(slot) for slot in range(3)] == [SIZE] * 3


def test_a_layer_that_adds_nothing_is_found_and_logits_that_are_not_finite_are_never_right(tmp_path: Path) -> None:
    target, _ = built(tmp_path)
    with torch.no_grad():
        for name in ("self_attn.o_proj", "mlp.down_proj"):
            target.get_parameter(f"model.layers.3.{name}.weight").mul_(0.01)
    said: list[str] = []
    lm = loaded(models.save(target, tmp_path / "idle"))
    choice = choose_layers(lm, TEXTS, said.append)
    assert 3 in choice.skip
    assert said[1].startswith("skips 3: acceptance ")
    assert (choice.layers, choice.weights_fingerprint) == (LAYERS, lm.info.weights_fingerprint)
    windows = TextWindows(lm, TEXTS)
    lm.runner._cache[:, 0, :, 0] = torch.nan  # type: ignore[attr-defined]
    assert windows.acceptance((0, 1, 2, 4), [0]) == 0.0


def test_windows_are_spread_over_the_texts_and_each_text_is_led_by_its_end(tmp_path: Path) -> None:
    info = load_model(models.save(models.build(models.config("llama")), tmp_path / "target", WORDS), slots=1).info
    texts = ["a b c", "d", "e f g h"]
    assert windows_of(iter(texts), info, 2, 9) == [[2, 1], [3, 4], [2, 5], [2, 6], [7, 8]]
    assert windows_of(iter(texts), info, 2, 2) == [[2, 1], [2, 5]]
    with pytest.raises(ModelError, match="data: 2 tokens are less than two windows of 2"):
        windows_of(iter(["a"]), info, 2, 9)
    with pytest.raises(ModelError, match=r"target: target: tokenizer_json: is empty"):
        windows_of(iter(texts), replace(info, tokenizer_json=b""), 2, 9)


def test_models_that_cannot_leave_layers_out_are_refused(tmp_path: Path) -> None:
    models.save(models.build(models.config("gpt2")), tmp_path / "gpt2")
    for spec in (str(tmp_path / "gpt2"), "scripted:1"):
        with pytest.raises(ModelError, match=r"target: a \w+ is not computed by a runner that can leave layers out"):
            choose_layers(load_model(spec, slots=2), TEXTS[:2], print)
