"""With `deterministic` a row's bits depend on its text alone, whatever was computed with it, before it and where."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import LlamaConfig, PreTrainedConfig

from specwire.lm import Feed, LanguageModel, ModelError, load_model
from specwire.lm.kv_cache import CachedLM, Runner, Sizes
from specwire.lm.linear import LinearWeights
from specwire.lm.runners.deterministic import ALONE, WIDTHS, DeterministicRunner, agreeing_widths
from specwire.lm.runners.llama import LlamaRunner
from specwire.lm.runners.select import trial_of
from specwire.lm.runners.trial import Trial
from tests.lm.families import ALONE as ALIBI
from tests.lm.families import SERVED, SLIDING
from tests.lm.models import CONTEXT, ROTARY, VOCABULARY, build, config, save

LENGTH = 40
# Long sums, for which the kernels here go another way where there is a single row.
LONG = LlamaConfig(**{**ROTARY, "hidden_size": 64, "intermediate_size": 1408})
MODELS: dict[str, PreTrainedConfig] = {
    "llama": config("llama-biased-tied"),
    "long": LONG,
    "qwen3": config("qwen3"),
    **{name: family.config() for name, family in (("moe", SERVED[-1]), ("sliding", SLIDING[3]), ("alibi", ALIBI[0]))},
}
# Names of models, and threads.
RUNS = [*((kind, 1) for kind in MODELS), ("long", 2), ("moe", 2)]


@pytest.fixture(autouse=True)
def threads(request: pytest.FixtureRequest) -> Iterator[None]:
    """How many compute: one, unless a test asks for more."""
    before = torch.get_num_threads()
    torch.set_num_threads(getattr(request, "param", 1))
    yield
    torch.set_num_threads(before)


def _alone(lm: LanguageModel, text: list[int]) -> torch.Tensor:
    """Every token in a forward of its own."""
    return torch.cat([lm.forward([Feed(0, position, [token], 1)]) for position, token in enumerate(text)])


def _mixed(lm: LanguageModel, texts: list[list[int]], seed: int) -> torch.Tensor:
    """Logits (texts, LENGTH, vocabulary) of the texts in random company, in windows, with rollbacks."""
    choice = random.Random(seed)
    found = torch.full((len(texts), LENGTH, lm.info.vocabulary), torch.nan)
    held = [0] * len(texts)
    while min(held) < LENGTH:
        feeds = []
        for slot in choice.sample(range(len(texts)), choice.randint(1, len(texts))):
            start = choice.randint(max(0, held[slot] - 3), min(held[slot], LENGTH - 1))
            stop = min(LENGTH, start + choice.choice((1, 1, 2, 5, 19)))
            feeds.append(Feed(slot, start, texts[slot][start:stop], stop - start))
            held[slot] = stop
        rows = lm.forward(feeds)
        for feed, part in zip(feeds, rows.split([feed.wanted for feed in feeds]), strict=True):
            found[feed.slot, feed.start : feed.stop] = part
    return found


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("kind", "threads"), RUNS, indirect=["threads"])
def test_rows_have_the_same_bits_alone_and_in_any_company(kind: str, dtype: str, tmp_path: Path) -> None:
    folder = save(build(MODELS[kind]), tmp_path)
    lone, shared = (
        load_model(folder, slots=slots, dtype=dtype, context=context, deterministic=True)
        for slots, context in ((1, CONTEXT), (3, CONTEXT - 5))
    )
    assert isinstance(lone, CachedLM)
    assert isinstance(lone.runner, DeterministicRunner)
    assert lone.runner.widths == ALONE or isinstance(lone.runner.runner, LlamaRunner), "blocks are for our own decoder"
    assert lone.info.deterministic
    choice = random.Random(3)
    texts = [[choice.randrange(VOCABULARY) for _ in range(LENGTH)] for _ in range(3)]
    expected = torch.stack([_alone(lone, text) for text in texts])
    assert torch.equal(_mixed(shared, texts, seed=1), expected)
    assert torch.equal(_mixed(shared, texts, seed=2), expected)


def test_without_it_rows_may_depend_on_their_company(tmp_path: Path) -> None:
    """Else the tests above would show nothing."""
    lm = load_model(save(build(config("olmo")), tmp_path), slots=1)
    text = [(11 * index + 4) % VOCABULARY for index in range(LENGTH)]
    alone = _alone(lm, text)
    assert not torch.equal(lm.forward([Feed(0, 0, text, LENGTH)]), alone)
    assert not lm.info.deterministic


class Fickle(nn.Module):
    """Rows of blocks of fewer than `few`, of more than `many`, or at `place`, come out a little different."""

    def __init__(self, few: int = 1, many: int = WIDTHS[-1], place: int | None = None) -> None:
        super().__init__()
        self.few, self.many, self.place = few, many, place

    def forward(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        y = torch.stack([weight @ row for row in x])
        if not self.few <= len(x) <= self.many:
            y = y * (1 + 2**-20)
        if self.place is not None and len(x) > self.place:
            y[self.place] *= 1 + 2**-20
        return y


def test_only_widths_that_agree_with_each_other_are_taken() -> None:
    layers = [LinearWeights(torch.randn(24, 16), None), LinearWeights(torch.randn(8, 24), torch.randn(8))]
    assert agreeing_widths(Fickle(), layers, torch.float32) == WIDTHS
    assert agreeing_widths(Fickle(few=3, many=20), layers, torch.float32) == (4, 8, 16)
    assert agreeing_widths(Fickle(place=2), layers, torch.float32) == ALONE


class FickleRunner(DeterministicRunner):
    """Rows from the tenth of a window on, or those behind another text's, come out a little different."""

    def __init__(self, runner: Runner, slots: int, *, wide: bool, beside: bool) -> None:
        super().__init__(runner, ALONE, slots)
        self._wide, self._beside = wide, beside

    def run(self, feeds: Sequence[Feed]) -> torch.Tensor:
        rows = super().run(feeds)
        if self._beside and len(feeds) > 1:
            rows[-1] *= 1 + 2**-20
        if self._wide:
            rows[9:] *= 1 + 2**-20
        return rows


@pytest.mark.parametrize(("wide", "beside"), [(False, False), (True, False), (False, True)])
def test_the_trial_at_load_finds_bits_that_depend_on_what_is_computed_together(wide: bool, beside: bool) -> None:
    model, sizes = build(config("llama")), Sizes(2, CONTEXT, VOCABULARY)
    runner = FickleRunner(LlamaRunner(model, 3, CONTEXT, VOCABULARY), 2, wide=wide, beside=beside)
    assert trial_of(model, sizes).held(runner, 2) <= 1
    assert runner.invariant is not (wide or beside)


def test_openvino_serves_deterministically_where_a_trial_finds_that_it_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A window that is computed as a prompt is has other bits, on any processor."""
    folder = save(build(LONG), tmp_path)
    how: Any = {"slots": 2, "dtype": "float32"}
    monkeypatch.setattr(Trial, "is_invariant", lambda *_: True)
    assert load_model(folder, runtime="openvino", deterministic=True, **how).info.runtime == "openvino"
    monkeypatch.undo()
    monkeypatch.setattr("specwire.lm.runners.openvino.graph.prompt_part", lambda feed: len(feed.tokens))
    monkeypatch.setattr("specwire.lm.runners.openvino.runner.prompt_part", lambda feed: len(feed.tokens))
    assert not load_model(folder, runtime="openvino", **how).info.deterministic
    with pytest.raises(ModelError, match="deterministic: openvino rounds a row of this LlamaForCausalLM by what"):
        load_model(folder, runtime="openvino", deterministic=True, **how)
    instead = load_model(folder, runtime="auto", deterministic=True, **how)
    assert (instead.info.runtime, instead.info.deterministic) == ("torch", True)
