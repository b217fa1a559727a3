"""Medusa and Hydra beside a target: files of all conventions draft what a plain loop over transformers' states does."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import PreTrainedModel

from specwire.core.draft import HeadRequest
from specwire.core.law.sampling import Sampling
from specwire.core.model import Feed, ModelError
from specwire.lm import load_model
from specwire.lm.heads import openvino_heads
from specwire.lm.heads.medusa import MedusaRunner
from specwire.lm.heads.openvino_heads import MedusaOpenvino
from specwire.lm.heads.slots import HeadedModel
from specwire.lm.runners.openvino.graph import traced
from tests.lm import models
from tests.lm.heads.medusa_by_hand import (
    FORMATS,
    HEADS,
    HIDDEN,
    LAYERS,
    Tensors,
    expected,
    logits_of,
    state_of,
    written,
)
from tests.lm.heads.walk import walk

GREEDY = Sampling()
RUNTIMES = pytest.mark.parametrize("runtime", ["torch", "openvino"])
TEXT = [3, 17, 8, 29, 11, 5, 23]


def built(folder: Path, kind: str, form: str, seed: int = 0) -> tuple[PreTrainedModel, dict[str, Any], Tensors, str]:
    """A target and heads beside it; what the files of these say, and where the target is."""
    target = models.build(models.config(kind), seed)
    where = models.save(target, folder / "target")
    torch.manual_seed(seed + 7)
    config, tensors, name = FORMATS[form]()
    written(folder / "head", config, tensors, name)
    return target, config, tensors, where


def headed(target: str, head: Path, runtime: str = "torch") -> HeadedModel:
    lm = load_model(target, slots=3, runtime=runtime, heads=str(head), threads=1)
    assert isinstance(lm, HeadedModel)
    assert type(lm._head) is (MedusaOpenvino if runtime == "openvino" else MedusaRunner)
    return lm


@RUNTIMES
@pytest.mark.parametrize(
    ("form", "kind"),
    [*((form, "llama") for form in FORMATS), ("hydra", "qwen2"), ("medusa", "qwen3"), ("hydra", "llama-biased-tied")],
)
def test_every_convention_of_files_drafts_what_a_plain_loop_does(
    form: str, kind: str, runtime: str, tmp_path: Path
) -> None:
    """At each length of a text, so that heads that say the same everywhere would show; no deeper than the heads."""
    target, config, tensors, where = built(tmp_path, kind, form, seed=3)
    lm, found = headed(where, tmp_path / "head", runtime), set()
    assert lm.most_depth == HEADS
    lm.forward([Feed(1, 0, TEXT[:1], 1)])
    for length in range(2, len(TEXT) + 1):
        text = TEXT[:length]
        lm.forward([Feed(0, lm.cached(0), text[lm.cached(0) : -1], 1)])
        (drafted, shallow) = lm.draft([HeadRequest(0, text, GREEDY, 8), HeadRequest(1, TEXT[:2], GREEDY, 1)])
        assert drafted == expected(target, config, tensors, text, HEADS)
        assert shallow == expected(target, config, tensors, TEXT[:2], 1)
        found.add(tuple(drafted))
    assert len(found) > 2


def test_names_may_be_under_the_whole_model_s(tmp_path: Path) -> None:
    target, config, tensors, where = built(tmp_path, "llama", "medusa")
    (tmp_path / "head" / "medusa_lm_head.safetensors").unlink()
    named = {f"medusa_head.{name}": tensor for name, tensor in tensors.items()}
    written(tmp_path / "head", config, named, "model.safetensors")
    lm = headed(where, tmp_path / "head")
    lm.forward([Feed(0, 0, TEXT[:-1], 1)])
    assert lm.draft([HeadRequest(0, TEXT, GREEDY, 3)]) == [expected(target, config, tensors, TEXT, 3)]


@pytest.mark.parametrize("form", ["medusa", "medusa-vllm-shared"])
def test_all_heads_of_a_file_are_read_however_few_its_config_claims(form: str, tmp_path: Path) -> None:
    """Published configs of Medusa claim two of five, which its own code reads as five."""
    target, config, tensors, where = built(tmp_path, "llama", form)
    key = "medusa_num_heads" if "medusa_num_heads" in config else "num_heads"
    (tmp_path / "head" / "config.json").write_text(json.dumps({**config, key: 1}))
    lm = headed(where, tmp_path / "head")
    lm.forward([Feed(0, 0, TEXT[:-1], 1)])
    assert lm.draft([HeadRequest(0, TEXT, GREEDY, HEADS)]) == [expected(target, config, tensors, TEXT, HEADS)]


@pytest.mark.parametrize(
    ("form", "name"), [("medusa", "0.0.linear.weight_scale"), ("medusa-vllm-shared", "norm.weight"), ("hydra", "x")]
)
def test_a_tensor_that_would_be_left_out_is_named(form: str, name: str, tmp_path: Path) -> None:
    _, config, tensors, where = built(tmp_path, "llama", form)
    written(tmp_path / "head", config, {**tensors, name: torch.zeros(2)}, FORMATS[form]()[2])
    with pytest.raises(ModelError, match=f"{name}: is not part of the heads"):
        headed(where, tmp_path / "head")


@RUNTIMES
@pytest.mark.parametrize("form", ["medusa", "medusa-vllm-shared", "hydra"])
def test_in_bfloat16_it_drafts_what_float32_does_up_to_rounding(form: str, runtime: str, tmp_path: Path) -> None:
    target, config, tensors, where = built(tmp_path, "llama", form)
    lm = load_model(where, slots=1, dtype="bfloat16", runtime=runtime, heads=str(tmp_path / "head"), threads=1)
    assert isinstance(lm, HeadedModel)
    lm.forward([Feed(0, 0, TEXT[:-1], 1)])
    (drafted,) = lm.draft([HeadRequest(0, TEXT, GREEDY, HEADS)])
    state, tokens = state_of(target, config, TEXT), TEXT[-1:]
    for head, token in enumerate(drafted):
        logits, ids = logits_of(target, config, tensors, head, state, tokens)
        assert logits[ids == token] > logits.max() - 0.1 * logits.abs().max()
        tokens = [*tokens, token]


@RUNTIMES
@pytest.mark.parametrize("form", ["medusa", "hydra"])
def test_it_does_so_after_any_windows_rollbacks_copies_and_other_texts(form: str, runtime: str, tmp_path: Path) -> None:
    target, config, tensors, where = built(tmp_path, "llama", form, seed=1)
    lm = headed(where, tmp_path / "head", runtime)
    walk(lm, lambda text, depth, _: expected(target, config, tensors, text, depth), steps=80)
    assert lm.kv_bytes == load_model(where, slots=3, runtime=runtime).kv_bytes, "heads keep nothing of a text"


@RUNTIMES
def test_ids_that_are_no_tokens_are_not_said(runtime: str, tmp_path: Path) -> None:
    """Output layers are often longer than the vocabulary."""
    target, config, tensors, _ = built(tmp_path, "llama", "hydra")
    words = {f"w{index}": index for index in range(30)}
    where = models.save(target, tmp_path / "short", words)
    for head in range(HEADS):
        tensors[f"hydra_lm_head.{head}.bias"][30:] = 100.0
    written(tmp_path / "head", config, tensors, "hydra_lm_head.safetensors")
    lm = headed(where, tmp_path / "head", runtime)
    lm.forward([Feed(0, 0, TEXT[:-1], 1)])
    (drafted,) = lm.draft([HeadRequest(0, TEXT, GREEDY, 3)])
    assert len(drafted) == 3
    assert all(token < 30 for token in drafted)


@pytest.mark.parametrize(
    ("form", "change", "message"),
    [
        ("medusa", {"medusa_num_heads": 0}, "config.json: medusa_num_heads: must be at least 1, not 0"),
        ("medusa", {"medusa_num_heads": 1 << 40}, "medusa_lm_head.safetensors: 3.0.linear.weight: is not there"),
        ("medusa", {"medusa_num_layers": 3}, r"medusa_lm_head.safetensors: 0.2.linear.weight: is not there"),
        ("medusa", {"hidden_size": 64}, "hidden_size is 64, and target needs 32"),
        ("medusa", {"vocab_size": [3]}, r"vocab_size is \[3\], and target needs 50"),
        ("medusa-vllm", {"num_hidden_layers": 3}, r"model.safetensors: blocks.0.layers.2.weight: is not there"),
        ("medusa-vllm", {"truncated_vocab_size": 20}, "model.safetensors: token_map: is not there"),
        ("medusa-vllm", {"truncated_vocab_size": 60}, "truncated_vocab_size: must be at most vocab_size, 50, not 60"),
        ("medusa-vllm", {"medusa_fc_bias": True}, "model.safetensors: blocks.0.layers.0.bias: is not there"),
        ("medusa-vllm-truncated", {"truncated_vocab_size": 10}, r"token_map: is \(20,\), not \(10,\)"),
        (
            "hydra",
            {"hydra_head_arch": "prefix-mlp"},
            "config.json: hydra_head_arch: only mlp is served, not 'prefix-mlp'",
        ),
        ("hydra", {"grounded_heads": "yes"}, "config.json: grounded_heads: must be true or false, not 'yes'"),
        ("hydra", {"hidden_state_offset": 3}, "hidden_state_offset: must be at most the target's 2 layers, not 3"),
        ("hydra", {"grounded_heads": False}, r"hydra_mlp.0.0.linear.weight: is \(32, 64\), not \(32, 32\)"),
        ("hydra", {"hydra_num_heads": None}, "config.json: hydra_num_heads: must be a whole number, not None"),
    ],
)
def test_what_does_not_fit_is_refused(form: str, change: dict[str, Any], message: str, tmp_path: Path) -> None:
    _, config, _, where = built(tmp_path, "llama", form)
    (tmp_path / "head" / "config.json").write_text(json.dumps({**config, **change}))
    with pytest.raises(ModelError, match=message):
        headed(where, tmp_path / "head")


@pytest.mark.parametrize(
    ("form", "name", "tensor", "message"),
    [
        ("medusa", "1.2.weight", torch.zeros(50, 31), r"1.2.weight: is \(50, 31\), not \(50, 32\)"),
        ("medusa", "2.0.linear.bias", torch.zeros(1), r"2.0.linear.bias: is \(1,\), not \(32,\)"),
        ("medusa-vllm-shared", "lm_head.weight", torch.zeros(49, 32), r"lm_head.weight: is \(49, 32\), not \(50, 32\)"),
        ("medusa-vllm-truncated", "token_map", torch.arange(20) + 31, "token_map: points beyond the vocabulary of 50"),
        ("hydra", "hydra_mlp.1.0.linear.weight", torch.zeros(32, 64), r"is \(32, 64\), not \(32, 96\)"),
        ("hydra", "hydra_mlp.2.0.res_connection.bias", torch.zeros(2, 2), r"is \(2, 2\), not \(32,\)"),
    ],
)
def test_a_tensor_that_does_not_fit_is_named(
    form: str, name: str, tensor: torch.Tensor, message: str, tmp_path: Path
) -> None:
    _, config, tensors, where = built(tmp_path, "llama", form)
    written(tmp_path / "head", config, {**tensors, name: tensor}, FORMATS[form]()[2])
    with pytest.raises(ModelError, match=message):
        headed(where, tmp_path / "head")


def test_files_that_cannot_be_read_are_named(tmp_path: Path) -> None:
    _, _, _, where = built(tmp_path, "llama", "medusa")
    head = tmp_path / "head"
    (head / "medusa_lm_head.safetensors").write_bytes(b"no tensors")
    with pytest.raises(ModelError, match="medusa_lm_head.safetensors: cannot be read"):
        headed(where, head)
    (head / "medusa_lm_head.safetensors").rename(head / "medusa_lm_head.pt")
    with pytest.raises(
        ModelError, match=r"medusa_lm_head.pt: is a pickle, .* its tensors to medusa_lm_head.safetensors"
    ):
        headed(where, head)


@pytest.mark.parametrize("form", ["medusa-vllm-truncated", "hydra"])
def test_in_8_bits_openvino_says_what_torch_says_up_to_rounding(
    form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Large layers are rounded by both, each in its way; the logits of every head, of several texts at once."""
    _, _, _, where = built(tmp_path, "llama", form)
    monkeypatch.setattr(openvino_heads, "LEAST_ROUNDED", 0)
    both = headed(where, tmp_path / "head", "openvino"), headed(where, tmp_path / "head")
    feeds = [Feed(slot, 0, TEXT[1 : 3 + slot], 1) for slot in range(3)]
    found = list[list[torch.Tensor]]()
    for lm in both:
        lm.forward([feed._replace(tokens=TEXT[: len(feed.tokens)]) for feed in feeds])
        assert isinstance(lm._head, MedusaRunner)
        with torch.inference_mode():
            step = lm._head.read(feeds, lm._held(feeds))
            said = [step.logits.clone()]
            for depth in range(1, HEADS):
                step = lm._head.follow(feeds, step.states, depth)
                said.append(step.logits.clone())
        found.append(said)
    for rounded, whole in zip(*found, strict=True):
        assert not torch.equal(rounded, whole)
        assert (rounded - whole).abs().max() < 0.05 * whole.abs().max()


@RUNTIMES
@pytest.mark.parametrize(
    ("form", "first"),
    [("medusa-vllm-shared", "lm_head"), ("medusa", f"0.{LAYERS}"), ("hydra", "hydra_lm_head.0")],
)
def test_of_an_output_layer_that_all_heads_share_there_is_one_copy(
    form: str, first: str, runtime: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether the file has it once or equal for each head: as many weights, and what each head by itself drafts."""
    target, config, tensors, where = built(tmp_path, "llama", form, seed=3)
    for own in ("weight", "bias"):
        for head in range(1, HEADS):
            name = f"{first.replace('0', str(head), 1)}.{own}"
            if name in tensors:
                tensors[name] = tensors[f"{first}.{own}"].clone()
    written(tmp_path / "head", config, tensors, FORMATS[form]()[2])
    graphs = list[Any]()

    def trace(part: nn.Module, example: tuple[torch.Tensor, ...]) -> Any:
        graphs.append(traced(part, example))
        return graphs[-1]

    monkeypatch.setattr(openvino_heads, "traced", trace)
    lm = headed(where, tmp_path / "head", runtime)
    assert isinstance(lm._head, MedusaRunner)
    constants = [op for graph in graphs for op in graph.get_ops() if op.get_type_name() == "Constant"]
    large = [op for op in constants if op.data.size == models.VOCABULARY * HIDDEN]
    assert len(lm._head._head.outputs) + len(large) == 1
    for length in range(2, len(TEXT) + 1):
        lm.forward([Feed(0, lm.cached(0), TEXT[lm.cached(0) : length - 1], 1)])
        assert lm.draft([HeadRequest(0, TEXT[:length], GREEDY, HEADS)]) == [
            expected(target, config, tensors, TEXT[:length], HEADS)
        ]
