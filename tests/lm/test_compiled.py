"""Static shapes: the same logits as the model itself, whatever is padded, and nothing written where it should not be.

Through PyTorch's capture and functionalisation, without its code generator: that takes minutes.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from specwire.core.model import ModelInfo
from specwire.lm import Feed, ModelError, load_model
from specwire.lm.kv_cache import CachedLM
from specwire.lm.runners.compiled import Backend, Bucket, Buckets, CompiledRunner, packed
from tests.lm.models import CONTEXT, TOLERANCE, VOCABULARY, build, capture_alone, config, plain, save
from tests.lm.walk import Texts

SLOTS = 3
# A row for each slot, fewer, and one alone.
BUCKETS = Buckets(rows=(1, 2, 3), columns=(1, 4), spans=(16, CONTEXT))
FEW = Buckets(rows=(3,), columns=(4,), spans=(CONTEXT,))
TAPS = (2, 0)


def compiled(
    kind: str, buckets: Buckets = BUCKETS, backend: str | Backend = "aot_eager", taps: Sequence[int] = ()
) -> tuple[PreTrainedModel, CachedLM]:
    model = build(config(kind))
    runner = CompiledRunner(model, SLOTS, CONTEXT, VOCABULARY, buckets, backend, taps)
    info = ModelInfo("tiny", kind, VOCABULARY, CONTEXT, (), "float32", "cpu", "", "")
    return model, CachedLM(runner, info, SLOTS)


@pytest.mark.parametrize("kind", ["llama-biased-tied", "qwen3"])
def test_a_walk_through_every_bucket_and_beyond_gives_the_model_s_logits(kind: str) -> None:
    model, lm = compiled(kind, backend="eager")
    texts = Texts(model, lm, seed=5)
    for _ in range(12):
        texts.step()


def test_what_is_tapped_is_the_model_s_own_of_every_token_fed(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the order of the feeds: of windows, padded or not, and of chunks that fit no bucket."""
    model, lm = compiled("qwen3", backend="eager", taps=TAPS)
    texts, runner, kinds = Texts(model, lm, seed=6), lm.runner, set[tuple[bool, bool]]()
    assert isinstance(runner, CompiledRunner)
    run = runner.run

    def checked(feeds: Sequence[Feed]) -> torch.Tensor:
        logits = run(feeds)
        expected = [streams(model, texts.held[feed.slot])[feed.start : feed.stop] for feed in feeds]
        torch.testing.assert_close(runner.tapped, torch.cat(expected), atol=TOLERANCE, rtol=TOLERANCE)
        kinds.add((len(feeds) > 1, BUCKETS.fit(feeds) is not None))
        return logits

    monkeypatch.setattr(runner, "run", checked)
    for _ in range(16):
        texts.step()
    assert len(kinds) == 4


@torch.inference_mode()
def streams(model: PreTrainedModel, text: Sequence[int]) -> torch.Tensor:
    """What enters the first layer and what leaves the last one, in the order of TAPS."""
    held: list[torch.Tensor] = []
    names = ("model.layers.0", "model.norm")
    hooks = [model.get_submodule(name).register_forward_pre_hook(lambda _, x: held.append(x[0][0])) for name in names]
    plain(model, text)
    for hook in hooks:
        hook.remove()
    first, last = held
    return torch.cat((last, first), dim=-1)


def test_nothing_is_tapped_where_nobody_asks_and_logits_are_the_same_bits() -> None:
    _, silent = compiled("llama", FEW, backend="eager")
    _, telling = compiled("llama", FEW, backend="eager", taps=TAPS)
    feeds = [Feed(1, 0, [5, 9, 4], 2), Feed(0, 0, [8], 1)]
    assert torch.equal(silent.forward(feeds), telling.forward(feeds))
    for lm, count in ((silent, 0), (telling, 4 * 64)):
        assert isinstance(lm.runner, CompiledRunner)
        assert lm.runner.tapped.numel() == count
    assert silent.runner.decoder(packed(feeds, FEW.all()[0], CONTEXT, SLOTS), CONTEXT)[1] is None  # type: ignore[attr-defined]


def test_padding_is_written_to_nobody_s_slot() -> None:
    model, lm = compiled("llama", buckets=FEW)
    text = [5, 9, 4, 8, 6]
    lm.forward([Feed(0, 0, text, 1), Feed(2, 0, text, 1)])
    before = [[cache[slot].clone() for slot in range(SLOTS)] for cache in lm.runner._caches()]  # type: ignore[attr-defined]
    lm.forward([Feed(1, 0, text[:2], 1)])
    after = [[cache[slot].clone() for slot in range(SLOTS)] for cache in lm.runner._caches()]  # type: ignore[attr-defined]
    for was, now in zip(before, after, strict=True):
        assert torch.equal(was[0], now[0])
        assert torch.equal(was[2], now[2])
        assert torch.count_nonzero(now[1][2:]) == 0
    logits = lm.forward([Feed(0, 5, [7], 1), Feed(1, 2, text[2:], 3)])
    torch.testing.assert_close(logits[0], plain(model, [*text, 7])[-1], atol=TOLERANCE, rtol=TOLERANCE)
    torch.testing.assert_close(logits[1:], plain(model, text)[2:], atol=TOLERANCE, rtol=TOLERANCE)


def test_the_least_bucket_that_takes_the_feeds_is_used() -> None:
    one, wide = Feed(0, 3, [1], 1), Feed(1, 14, [1, 2, 3], 1)
    assert BUCKETS.fit([one]) == Bucket(1, 1, 16)
    assert BUCKETS.fit([one, wide, Feed(2, 0, [1], 1)]) == Bucket(3, 4, CONTEXT)
    assert BUCKETS.fit([Feed(0, 0, [1] * 5, 1)]) is None
    assert len(BUCKETS.all()) == 12


def test_a_service_s_buckets_grow_by_fours_up_to_its_slots_and_its_context() -> None:
    """A short text is not padded to the whole context: every layer would copy that, for each session of the bucket."""
    assert Buckets.usual(4, 32) == Buckets((1, 4), (1, 4, 8, 32), (32,))
    assert Buckets.usual(1, 20) == Buckets((1,), (1, 4, 8), (20,))
    assert Buckets.usual(128, 8192) == Buckets((1, 8, 32, 128), (1, 4, 8, 32), (512, 2048, 8192))
    assert Buckets.usual(24, 4096).fit([Feed(0, 400, [1] * 5, 1)] * 3) == Bucket(8, 8, 512)


def test_one_layer_is_compiled_for_each_bucket_whatever_the_number_of_layers() -> None:
    """Or a start takes as many times longer."""
    captured: list[int] = []

    def counting(graph: torch.fx.GraphModule, _inputs: list[torch.Tensor]) -> Callable[..., Any]:
        captured.append(len(graph.graph.nodes))
        return graph.forward

    torch.compiler.reset()
    _, lm = compiled("llama", backend=counting)
    assert isinstance(lm.runner, CompiledRunner)
    assert len(lm.runner.decoder.layers) > 1
    assert len(captured) == len(BUCKETS.all())
    lm.forward([Feed(0, 0, [5, 9, 4], 1), Feed(2, 0, [8], 1)])
    assert len(captured) == len(BUCKETS.all())


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("kind", ["llama-biased-tied", "qwen3"])
def test_cuda_graphs_replayed_in_another_thread_give_the_model_s_logits(kind: str) -> None:
    """A service loads in one thread and computes in another."""
    model = build(config(kind))
    on_gpu = copy.deepcopy(model).to("cuda")  # type: ignore[arg-type]
    runner = CompiledRunner(on_gpu, SLOTS, CONTEXT, VOCABULARY, BUCKETS, taps=TAPS)
    assert set(runner._recordings) == set(BUCKETS.all())
    texts = Texts(
        model, CachedLM(runner, ModelInfo("tiny", kind, VOCABULARY, CONTEXT, (), "float32", "cuda:0", "", ""), SLOTS), 5
    )
    with ThreadPoolExecutor(1) as pool:
        for _ in range(12):
            pool.submit(texts.step).result()


def test_a_model_from_disk_is_compiled_and_serves_the_model_s_logits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[dict[str, Any]] = []
    real = torch.compile

    def compile_(function: Callable[..., Any], **options: Any) -> Any:
        calls.append(options)
        return real(function, **options)

    capture_alone(monkeypatch)
    monkeypatch.setattr(torch, "compile", compile_)
    model = build(config("llama"))
    lm = load_model(save(model, tmp_path), slots=1, compiled=True)
    assert isinstance(lm, CachedLM)
    assert not lm.branches
    assert isinstance(lm.runner, CompiledRunner)
    assert [call["dynamic"] for call in calls] == [False]
    text = [5, 9, 4, 8, 6]
    logits = torch.cat([lm.forward([Feed(0, 0, text[:2], 2)]), lm.forward([Feed(0, 2, text[2:], 3)])])
    torch.testing.assert_close(logits, plain(model, text), atol=TOLERANCE, rtol=TOLERANCE)


@pytest.mark.parametrize(
    ("kind", "options", "reason"),
    [
        ("gpt2", {}, "serves the Llama family"),
        ("llama", {"deterministic": True}, "needs torch, without"),
    ],
)
def test_what_cannot_be_compiled_is_not_served_otherwise(
    kind: str, options: dict[str, bool], reason: str, tmp_path: Path
) -> None:
    folder = save(build(config(kind)), tmp_path)
    with pytest.raises(ModelError, match=f"compiled: {reason}"):
        load_model(folder, slots=1, compiled=True, **options)  # type: ignore[arg-type]
