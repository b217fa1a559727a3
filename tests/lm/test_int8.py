"""Weights in 8 bits: the same integers for every runtime, a fingerprint of their own, refused where they miss most."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from specwire.lm import Feed, LanguageModel, ModelError, load_model
from specwire.lm.runners import linear
from specwire.lm.runners.linear import FEW, Int8Linear, LinearWeights, pack, pack_rounded, rounded
from tests.lm.families import SERVED
from tests.lm.models import VOCABULARY, build, config, save

TEXT = [(7 * index + 3) % VOCABULARY for index in range(24)]


def test_each_row_has_its_own_scale_and_is_rounded_to_the_nearest() -> None:
    integers, scale = rounded(torch.tensor([[1.27, -0.50, 0.004], [0.0, 0.0, 0.0], [-25.4, 12.7, 0.09]]))
    assert integers.tolist() == [[127, -50, 0], [0, 0, 0], [-127, 64, 0]]
    torch.testing.assert_close(scale[[0, 2], 0], torch.tensor([0.01, 0.2]))


@pytest.mark.parametrize("rows", [1, FEW, FEW + 1])
@pytest.mark.parametrize("biased", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_layer_multiplies_with_what_the_integers_stand_for(rows: int, biased: bool, dtype: torch.dtype) -> None:
    torch.manual_seed(1)
    linear = nn.Linear(48, 32, bias=biased).to(dtype)
    layer = Int8Linear(linear)
    x = torch.randn(2, rows, 48).to(dtype)
    weight = layer.integers.float() * layer.scale.float()[:, None]
    expected = nn.functional.linear(x.float(), weight, None if layer.bias is None else layer.bias.float())
    tolerance = 1e-5 if dtype == torch.float32 else 3e-2
    torch.testing.assert_close(layer(x).float(), expected, atol=tolerance, rtol=tolerance)


def _logits(lm: LanguageModel) -> torch.Tensor:
    lm.forward([Feed(0, 0, TEXT[:13], 0)])
    return lm.forward([Feed(0, 13, TEXT[13:], 11)])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", ["llama-biased-tied", "qwen3"])
def test_runtimes_agree_on_the_rounded_model(kind: str, dtype: str, tmp_path: Path) -> None:
    folder = save(build(config(kind)), tmp_path)
    whole = _logits(load_model(folder, slots=1))
    torch_lm, openvino_lm = (
        load_model(folder, slots=1, dtype=dtype, quantization="int8", runtime=runtime, threads=1)
        for runtime in ("torch", "openvino")
    )
    on_torch, on_openvino = _logits(torch_lm), _logits(openvino_lm)
    scale = float(whole.abs().max())
    assert float((on_torch - on_openvino).abs().max()) < scale * (1e-4 if dtype == "float32" else 1 / 16)
    assert float((on_torch - whole).abs().max()) > scale * 1e-3  # it was rounded
    assert openvino_lm.info.runtime == "openvino"
    assert torch_lm.info.quantization == openvino_lm.info.quantization == "int8"
    assert torch_lm.info.weights_fingerprint == openvino_lm.info.weights_fingerprint


def test_rounding_and_dtype_are_in_the_fingerprint(tmp_path: Path) -> None:
    folder = save(build(config("llama")), tmp_path)
    kinds = [(dtype, quantization) for dtype in ("float32", "bfloat16") for quantization in ("none", "int8")]
    infos = [load_model(folder, slots=1, dtype=dtype, quantization=quantization).info for dtype, quantization in kinds]
    assert len({info.weights_fingerprint for info in infos}) == len(kinds)
    assert len({info.vocabulary_fingerprint for info in infos}) == 1


@pytest.mark.parametrize("name", ["GPT-2", "Qwen3-MoE"])
def test_weights_outside_of_linear_layers_are_refused(name: str, tmp_path: Path) -> None:
    family = next(family for family in SERVED if family.name == name)
    with pytest.raises(ModelError, match=r"int8 rounds linear layers, and \w+ keeps .* outside of them"):
        load_model(save(build(family.config()), tmp_path), slots=1, quantization="int8")


def test_an_unknown_quantization_is_named() -> None:
    with pytest.raises(ModelError, match="quantization: must be one of none, int8, not 'int4'"):
        load_model("scripted:1", slots=1, quantization="int4")


@pytest.mark.parametrize("rows", [1, FEW, FEW + 1])
def test_what_need_not_be_exact_is_rounded_where_it_is_large(rows: int) -> None:
    torch.manual_seed(0)
    large, biased, small = (
        LinearWeights(torch.randn(out, 256), None if out != 320 else torch.randn(out)) for out in (384, 320, 16)
    )
    multiply, packed = pack_rounded([large, biased, small])
    assert [layer.weight.dtype for layer in packed] == [torch.int8, torch.int8, torch.float32]
    x = torch.randn(rows, 256)
    for own, layer in zip(packed, (large, biased, small), strict=True):
        exact = x @ layer.weight.T + (0.0 if layer.bias is None else layer.bias)
        got = multiply(x, *own)
        assert got.dtype == torch.float32
        assert float((got - exact).norm() / exact.norm()) < 0.02


def test_where_products_with_integers_are_wrong_or_missing_nothing_is_rounded(monkeypatch: pytest.MonkeyPatch) -> None:
    layers = [LinearWeights(torch.randn(384, 256), None)]
    monkeypatch.setattr(linear, "_rounding_works", lambda: False)
    assert type(pack_rounded(layers)[0]) is type(pack(layers)[0])
