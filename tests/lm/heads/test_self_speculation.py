"""Drafting by some of the target's layers: as a loop over hidden states does it, and without a trace in the target."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from transformers import DynamicCache, PreTrainedModel

from specwire.core.draft import DraftingModel, HeadRequest
from specwire.core.law.sampling import Sampling
from specwire.core.model import Feed, ModelError, TreeFeed
from specwire.lm import LanguageModel, load_model
from specwire.lm.heads.self_speculation import SkimmingModel
from tests.lm import models

FAMILIES = ("llama", "qwen2", "qwen3", "llama-biased-tied")
GREEDY = Sampling()
LAYERS, SLOTS = 5, 3
SPECS = {"self:skip=1,3": (0, 2, 4), "self:exit=2": (0, 1), "self:skip=0": (1, 2, 3, 4)}


def built(folder: Path, kind: str = "llama", seed: int = 0) -> tuple[PreTrainedModel, str]:
    """A target of several layers, and where it is."""
    made = models.config(kind)
    made.num_hidden_layers = LAYERS
    if hasattr(made, "layer_types"):
        made.layer_types = ["full_attention"] * LAYERS
    target = models.build(made, seed)
    return target, models.save(target, folder / "target")


def skimming(where: str, spec: str = "self:skip=1,3", slots: int = SLOTS) -> SkimmingModel:
    lm = load_model(where, slots=slots, heads=spec, threads=1)
    assert isinstance(lm, SkimmingModel)
    assert isinstance(lm, DraftingModel)
    return lm


class ByHand:
    """Transformers' own model of the layers `kept` alone, over keys and values that the whole target wrote."""

    def __init__(self, target: PreTrainedModel, kept: Sequence[int]) -> None:
        self.target, self.kept = target, kept
        self.few: Any = copy.deepcopy(target)
        self.few.model.layers = torch.nn.ModuleList(self.few.model.layers[layer] for layer in kept)
        for place, layer in enumerate(self.few.model.layers):
            layer.self_attn.layer_idx = place

    @torch.no_grad()
    def draft(self, text: Sequence[int], depth: int) -> list[int]:
        """The best ids behind a text, one after the other."""
        cache, found = DynamicCache(), [text[-1]]
        if len(text) > 1:
            self.target(input_ids=torch.tensor([[*text[:-1]]]), past_key_values=cache)
            cache.layers = [cache.layers[layer] for layer in self.kept]
        for _ in range(depth):
            logits = self.few(input_ids=torch.tensor([found[-1:]]), past_key_values=cache).logits
            found.append(int(logits[0, -1].argmax()))
        return found[1:]


def some(random: Random, count: int) -> list[int]:
    return [random.randrange(3, models.VOCABULARY) for _ in range(count)]


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("kind", FAMILIES)
def test_it_drafts_what_a_loop_over_hidden_states_does(kind: str, spec: str, tmp_path: Path) -> None:
    target, where = built(tmp_path, kind)
    lm, text = skimming(where, spec), [3, 17, 8, 29, 11, 5, 23]
    lm.forward([Feed(1, 0, text[:4], 1), Feed(0, 0, text[:2], 1)])
    asked = [HeadRequest(1, text[:5], GREEDY, 4), HeadRequest(0, text[:3], GREEDY, 2), HeadRequest(2, [9], GREEDY, 3)]
    plain = ByHand(target, SPECS[spec])
    assert lm.draft(asked) == [plain.draft(each.tokens, each.depth) for each in asked]


def test_logits_are_those_of_a_model_that_never_drafted_to_the_bit(tmp_path: Path) -> None:
    """Whatever windows, trees, rollbacks, copies and discards come between, in whatever slots."""
    target, where = built(tmp_path, seed=2)
    lm, other, random = skimming(where), load_model(where, slots=SLOTS, threads=1), Random(7)
    texts: dict[int, list[int]] = {}
    drafted: set[tuple[int, ...]] = set()
    plain = ByHand(target, lm.kept)
    for _ in range(250):
        for slot in range(SLOTS):
            if slot not in texts or len(texts[slot]) > 30 or random.random() < 0.05:
                for each in (lm, other):
                    each.discard(slot)
                texts[slot] = some(random, random.randint(1, 9))
        if random.random() < 0.15:
            source, into = random.sample(range(SLOTS), 2)
            shared = random.randint(0, lm.cached(source))
            for each in (lm, other):
                each.copy(source, into, shared)
            texts[into] = [*texts[source][:shared], *some(random, random.randint(1, 3))]
        chosen = random.sample(range(SLOTS), random.randint(1, SLOTS))
        window_of = {slot: some(random, random.randint(0, 4)) for slot in chosen}
        feeds = [fed(lm, slot, texts[slot], window, random) for slot, window in window_of.items()]
        assert torch.equal(lm.forward(feeds), other.forward(feeds))
        for feed in feeds:
            decide(lm, other, feed, texts[feed.slot], len(window_of[feed.slot]), random)
        ready = [slot for slot in texts if lm.cached(slot) == len(texts[slot]) - 1 and random.random() < 0.7]
        asked = [HeadRequest(slot, texts[slot], GREEDY, random.randint(1, 4)) for slot in ready]
        held = [lm.cached(slot) for slot in range(SLOTS)]
        found = lm.draft(asked)
        assert held == [lm.cached(slot) for slot in range(SLOTS)]
        assert found == [plain.draft(each.tokens, each.depth) for each in asked]
        drafted.update(map(tuple, found))
    assert len(drafted) > 50, "a draft that always says the same would show nothing"


def fed(lm: LanguageModel, slot: int, text: list[int], window: list[int], random: Random) -> Feed:
    """The text's rest, and behind it a window: a line, or two paths."""
    start = lm.cached(slot)
    rest = text[start:]
    if len(rest) != 1 or len(window) < 2 or random.random() < 0.5:
        return Feed(slot, start, [*rest, *window], 1 + len(window))
    first = len(window) // 2
    ancestors = [(), *((start, *range(start + 1, start + 1 + at)) for at in range(first))]
    ancestors += [(start, *range(start + 1 + first, start + 1 + at)) for at in range(first, len(window))]
    return Feed(slot, start, [*rest, *window], 1 + len(window), TreeFeed(start, tuple(ancestors)))


def decide(lm: LanguageModel, other: LanguageModel, feed: Feed, text: list[int], window: int, random: Random) -> None:
    """Keep some of a window, and let another token follow it."""
    before = feed.stop - window
    if feed.tree is None:
        rows = [*range(before, before + random.randint(0, window))]
    else:
        leaf = random.randrange(len(feed.tokens))
        rows = [row for row in (*feed.tree.ancestors[leaf], feed.start + leaf) if row >= before]
    for each in (lm, other):
        each.keep(feed.slot, before, rows)
    text += [feed.tokens[row - feed.start] for row in rows] + some(random, 1)


def test_a_discarded_slot_is_zero_also_where_only_drafts_were(tmp_path: Path) -> None:
    _, where = built(tmp_path)
    lm = skimming(where)
    lm.forward([Feed(1, 0, [3, 17, 8], 1)])
    lm.draft([HeadRequest(1, [3, 17, 8, 29], GREEDY, 5)])
    assert lm.written(1) == 8
    assert lm.runner._cache[:, 1, :, 3:8].abs().amax(dim=(1, 2, 3)).gt(0).tolist() == [  # type: ignore[attr-defined]
        layer in lm.kept for layer in range(LAYERS)
    ]
    lm.discard(1)
    assert not lm.runner._cache.any()  # type: ignore[attr-defined]


def test_nothing_is_written_beyond_the_context_and_a_text_may_be_one_token(tmp_path: Path) -> None:
    target, where = built(tmp_path)
    lm, text = skimming(where), [3 + index % 40 for index in range(models.CONTEXT)]
    lm.forward([Feed(0, 0, text[:-3], 1)])
    assert lm.draft([HeadRequest(0, text[:-2], GREEDY, 8)]) == [ByHand(target, lm.kept).draft(text[:-2], 2)]
    lm.forward([Feed(0, models.CONTEXT - 3, text[-3:-1], 1)])
    assert lm.draft([HeadRequest(0, text, GREEDY, 8), HeadRequest(1, [5], GREEDY, 0)]) == [[], []]
    assert lm.written(0) == models.CONTEXT - 1
    assert len(lm.draft([HeadRequest(1, [5], GREEDY, 99)])[0]) == models.CONTEXT - 1
    assert not lm.runner._cache[:, 2].any()  # type: ignore[attr-defined]


def test_a_text_whose_last_token_is_cached_is_no_one_s_to_draft_for(tmp_path: Path) -> None:
    """Its rows would be written over."""
    _, where = built(tmp_path)
    lm = skimming(where)
    lm.forward([Feed(0, 0, [3, 17, 8], 1)])
    for text in ([3, 17, 8], [3, 17, 8, 29, 5]):
        with pytest.raises(ValueError, match=f"slot 0 holds 3 positions of {len(text)}"):
            lm.draft([HeadRequest(0, text, GREEDY, 2)])
    for feed in (Feed(0, 2, [5], 1), Feed(0, 4, [5], 1), Feed(0, 3, [3] * models.CONTEXT, 1), Feed(0, 3, [99], 1)):
        with pytest.raises(ValueError, match=r"start: slot 0 holds 3|context is 48|outside the vocabulary"):
            lm.skim([feed], lm.kept)
    assert lm.written(0) == 3


def test_what_is_not_finite_is_a_failure_and_leaves_nothing_behind(tmp_path: Path) -> None:
    """A NaN would poison attention even where it is masked, of neighbours too."""
    target, where = built(tmp_path)
    models.poison(target, 29, torch.nan)
    target.save_pretrained(where)
    lm, other = skimming(where), load_model(where, slots=SLOTS, threads=1)
    feeds = [Feed(slot, 0, [3, 17, 8 + slot], 1) for slot in range(2)]
    assert torch.equal(lm.forward(feeds), other.forward(feeds))
    with pytest.raises(FloatingPointError, match=r"logits by the layers \[0, 2, 4\] are not finite"):
        lm.draft([HeadRequest(0, [3, 17, 8, 29], GREEDY, 3), HeadRequest(1, [3, 17, 9, 5], GREEDY, 3)])
    feeds = [Feed(0, 2, [5], 1), Feed(1, 3, [5, 6, 7], 3)]  # in one attention over six rows of each
    got = lm.forward(feeds)
    assert bool(got.isfinite().all())
    assert torch.equal(got, other.forward(feeds))


# Which layers


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("self:skip=1,5", r"self:skip=1,5: skip: layer 5 is none of the target's 0 to 4"),
        ("self:skip=1,1", r"skip: layer 1 is named twice"),
        ("self:skip=", r"self:skip=: '' is no layer's number"),
        ("self:skip=1,,2", r"'' is no layer's number"),
        ("self:skip=1,x", r"'x' is no layer's number"),
        ("self:skip=-1", r"'-1' is no layer's number"),
        ("self:skip=²", r"'²' is no layer's number"),
        ("self:skip=0,1,2,3,4", r"must leave out some of 5 layers, not 5"),
        ("self:exit=0", r"self:exit=0: exit must be from 1 to 4 of 5 layers, not 0"),
        ("self:exit=5", r"exit must be from 1 to 4 of 5 layers, not 5"),
        ("self:exit=a", r"'a' is no layer's number"),
        ("self:leave=2", r"self:leave=2: must be skip=LAYER,LAYER,... or exit=LAYER"),
        ("self:/nowhere.json", r"self:/nowhere.json: must be skip="),
        ("self:", r"self:: must be skip="),
    ],
)
def test_layers_that_cannot_be_left_out_are_refused_by_name(spec: str, message: str, tmp_path: Path) -> None:
    _, where = built(tmp_path)
    with pytest.raises(ModelError, match=message):
        skimming(where, spec)


def test_where_it_is_not_served_it_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    _, where = built(tmp_path)
    for option, message in (
        ({"deterministic": True}, "heads: skipped layers are not served with deterministic"),
        ({"compiled": True}, "heads: skipped layers are not served with compile"),
        ({"runtime": "openvino"}, "heads: skipped layers need the runtime torch or auto"),
    ):
        with pytest.raises(ModelError, match=message):
            load_model(where, slots=1, heads="self:skip=1", **option)
    _, other = built(tmp_path / "olmo", "olmo")
    with pytest.raises(ModelError, match="heads: a OlmoForCausalLM is not computed by a runner that can leave layers"):
        load_model(other, slots=1, heads="self:skip=1")
    with pytest.raises(ModelError, match="heads: a scripted model has no layers to skip"):
        load_model("scripted:1", slots=1, heads="self:skip=1")
    assert load_model(where, slots=1, heads="self:skip=1", runtime="auto").info.runtime == "torch"
    assert any(record.message.startswith("heads: skipped layers are computed by torch") for record in caplog.records)
