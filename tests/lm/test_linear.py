"""8 bits: integers that OpenVINO multiplies with, fingerprints of their own, refused where OpenVINO does not serve."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from transformers import PreTrainedModel

from specwire.core.model import QUANTIZATIONS, WEIGHTS16
from specwire.lm import Feed, LanguageModel, ModelError, linear, load_model
from specwire.lm.linear import (
    FEW,
    GROUP,
    Int8Linear,
    LinearWeights,
    PackedLinear,
    PlainLinear,
    pack,
    pack_rounded,
    round_layers,
    rounded_activations,
    rounded_groups,
    rounded_rows,
)
from specwire.lm.runners.openvino import runner as openvino
from specwire.lm.runners.openvino.graph import compile_options
from specwire.lm.runners.select import DYNAMIC_TOLERANCE
from tests.lm.models import VOCABULARY, build, config, plain, save

TEXT = [(7 * index + 3) % VOCABULARY for index in range(24)]


def test_each_row_has_its_own_scale_and_is_rounded_to_the_nearest() -> None:
    integers, scale = rounded_rows(torch.tensor([[1.27, -0.50, 0.004], [0.0, 0.0, 0.0], [-25.4, 12.7, 0.09]]))
    assert integers.tolist() == [[127, -50, 0], [0, 0, 0], [-127, 64, 0]]
    torch.testing.assert_close(scale[[0, 2], 0], torch.tensor([0.01, 0.2]))


def test_a_layer_rounds_groups_of_a_row_to_the_nearest_and_blocks_of_8_bits_not_at_all() -> None:
    """A GGUF file's Q8_0 has an integer and a scale in float16, too."""
    torch.manual_seed(1)
    stored, scales = torch.randint(-127, 128, (6, 3, GROUP)), torch.rand(6, 3, 1).half()
    stored[:, :, 0] = 127
    stored[0, 1] = 0
    integers, scale = rounded_groups((stored * scales.float()).flatten(1))
    assert torch.equal(integers.view_as(stored), stored.to(torch.int8))
    assert torch.equal(scale[1:], scales[1:, :, 0])
    integers, scale = rounded_groups(torch.randn(6, 3 * GROUP) * 1e-3)
    assert integers.abs().view_as(stored).amax(dim=2).eq(127).all()
    odd = Int8Linear(nn.Linear(GROUP + 1, 4))
    assert odd.scale.shape == (4, 1)


@pytest.mark.parametrize("rows", [1, FEW, FEW + 1])
@pytest.mark.parametrize("biased", [True, False])
@pytest.mark.parametrize("width", [48, 3 * GROUP])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_layer_multiplies_with_what_the_integers_stand_for(
    rows: int, biased: bool, width: int, dtype: torch.dtype
) -> None:
    torch.manual_seed(1)
    linear = nn.Linear(width, 32, bias=biased).to(dtype)
    layer = Int8Linear(linear)
    x = torch.randn(2, rows, width).to(dtype)
    group = width // layer.scale.shape[1]
    weight = layer.integers.float() * layer.scale.float().repeat_interleave(group, dim=1)
    torch.testing.assert_close(weight, linear.weight.float(), atol=float(layer.scale.max()) * 0.51, rtol=0)
    expected = nn.functional.linear(x.float(), weight, None if layer.bias is None else layer.bias.float())
    tolerance = 1e-5 if dtype == torch.float32 else 3e-2
    torch.testing.assert_close(layer(x).float(), expected, atol=tolerance, rtol=tolerance)


def test_activations_are_rounded_by_row_and_group() -> None:
    x = torch.tensor([[1.27, -0.504, 0.0, 0.0, 25.4], [0.0, 0.0, 12.7, 6.32, -2.54]])
    found = rounded_activations(x, group=2)
    torch.testing.assert_close(found, torch.tensor([[1.27, -0.5, 0.0, 0.0, 25.4], [0.0, 0.0, 12.7, 6.3, -2.54]]))
    assert torch.equal(found[1:], rounded_activations(x[1:], group=2))


@torch.inference_mode()
def test_a_dynamic_layer_multiplies_rounded_activations() -> None:
    torch.manual_seed(1)
    linear, x = nn.Linear(200, 32), torch.randn(2, 3, 200)
    exact, layer = Int8Linear(linear), Int8Linear(linear, dynamic=True)
    torch.testing.assert_close(layer(x), exact(rounded_activations(x.view(6, 200)).view(2, 3, 200)))
    assert not Int8Linear(nn.Linear(GROUP - 1, 32), dynamic=True).dynamic
    assert 1e-3 < float((layer(x) - exact(x)).abs().max()) < 0.1


def _logits(lm: LanguageModel) -> torch.Tensor:
    lm.forward([Feed(0, 0, TEXT[:13], 0)])
    return lm.forward([Feed(0, 13, TEXT[13:], 11)])


def _rounded(model: PreTrainedModel, dynamic: bool) -> torch.Tensor:
    """Logits of the model's own modules over rounded layers."""
    round_layers(model, dynamic)
    return plain(model, TEXT)[13:].float()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", ["llama-biased-tied", "qwen3"])
def test_openvino_computes_the_rounded_model(kind: str, dtype: str, tmp_path: Path) -> None:
    model = build(config(kind))
    folder, whole = save(model, tmp_path), plain(model, TEXT)[13:]
    lm = load_model(folder, slots=1, dtype=dtype, quantization="int8", runtime="openvino", threads=1)
    found, expected = _logits(lm), _rounded(model.to(getattr(torch, dtype)), dynamic=False)
    scale = float(whole.abs().max())
    assert float((found - expected).abs().max()) < scale * (1e-4 if dtype == "float32" else 1 / 16)
    assert float((found - whole).abs().max()) > scale * 1e-3  # it was rounded
    assert (lm.info.runtime, lm.info.quantization) == ("openvino", "int8")


@pytest.mark.skipif(not openvino.rounds_activations(), reason="needs VNNI, without which int8-dynamic is refused")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", ["llama-biased-tied", "qwen3"])
def test_openvino_rounds_activations_as_our_layers_do(kind: str, dtype: str, tmp_path: Path) -> None:
    """Near them is all that can be asked of whole models."""
    model = build(config(kind))
    folder = save(model, tmp_path)
    how: Any = {"dtype": dtype, "threads": 1}
    exact = _logits(load_model(folder, slots=1, quantization="int8", runtime="openvino", **how))
    lm = load_model(folder, slots=1, quantization="int8-dynamic", runtime="auto", **how)
    found, scale = _logits(lm), float(exact.abs().max())
    expected = _rounded(model.to(getattr(torch, dtype)), dynamic=True)
    assert float((found - expected).abs().max()) <= scale * DYNAMIC_TOLERANCE
    assert float((found - exact).abs().max()) > scale * 1e-3  # they were rounded
    assert (lm.info.runtime, lm.info.quantization) == ("openvino", "int8-dynamic")


def test_an_openvino_that_multiplies_floats_is_found_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(openvino, "compile_options", lambda dtype, threads, group: compile_options(dtype, threads))
    assert not openvino.rounds_activations.__wrapped__()
    monkeypatch.setattr(openvino, "rounds_activations", lambda: False)
    folder = save(build(config("llama")), tmp_path)
    for runtime in ("openvino", "auto"):
        with pytest.raises(ModelError, match="runtime: openvino needs VNNI instructions for int8-dynamic"):
            load_model(folder, slots=1, quantization="int8-dynamic", runtime=runtime)


def test_rounding_and_dtype_are_in_the_fingerprint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = save(build(config("llama")), tmp_path)
    monkeypatch.setattr(openvino, "rounds_activations", lambda: True)
    kinds = [(dtype, quantization) for dtype in ("float32", "bfloat16") for quantization in QUANTIZATIONS]
    kinds.remove(("bfloat16", WEIGHTS16))
    infos = [
        load_model(folder, slots=1, dtype=dtype, quantization=quantization, runtime="openvino").info
        for dtype, quantization in kinds
    ]
    assert len({info.weights_fingerprint for info in infos}) == len(kinds)
    assert len({info.vocabulary_fingerprint for info in infos}) == 1


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("gpt2", {}),
        ("llama", {"runtime": "torch"}),
        ("llama", {"compiled": True}),
        ("llama", {"heads": "self:skip=1"}),
    ],
)
def test_what_openvino_does_not_compute_is_refused_before_weights_are_read(
    kind: str, options: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = save(build(config(kind)), tmp_path)
    monkeypatch.setattr("specwire.lm.pretrained.pretrained", None)
    with pytest.raises(ModelError, match=r"^quantization: int8 is computed by openvino .* for llama, mistral, qwen2, "):
        load_model(folder, slots=1, quantization="int8", **{"runtime": "auto", **options})


def test_an_unknown_quantization_is_named() -> None:
    with pytest.raises(ModelError, match="quantization: must be one of none, int8, int8-dynamic, bfloat16, not 'int4'"):
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


# ----------------------------------------------------------------------------------------------------------------------
# Linear layers, packed or not, are x @ weight.T + bias.


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("biased", [True, False])
@pytest.mark.parametrize("rows", [1, 3, 17])
def test_linear(rows: int, biased: bool, dtype: torch.dtype) -> None:
    source = torch.Generator().manual_seed(0)
    weight = torch.randn(24, 16, generator=source).to(dtype)
    bias = torch.randn(24, generator=source).to(dtype) if biased else None
    x = torch.randn(rows, 16, generator=source).to(dtype)
    expected = functional.linear(x, weight, bias)
    tolerance = 1e-5 if dtype == torch.float32 else 5e-2
    multiply, layers = pack([LinearWeights(weight, bias)])
    torch.testing.assert_close(multiply(x, *layers[0]), expected, atol=tolerance, rtol=tolerance)


def test_layers_are_packed_only_where_the_operators_are_there(monkeypatch: pytest.MonkeyPatch) -> None:
    layers = [LinearWeights(torch.randn(8, 4), None), LinearWeights(torch.randn(3, 8), torch.randn(3))]
    assert isinstance(pack(layers)[0], PackedLinear)
    unfit = LinearWeights(torch.full((8, 4), torch.inf), None)
    assert isinstance(pack([*layers, unfit])[0], PlainLinear), "one that cannot be packed leaves all as they are"

    def missing(*_: object) -> torch.Tensor:
        raise RuntimeError("no such operator in this build")

    monkeypatch.setattr("specwire.lm.linear._reorder", missing)
    multiply, unpacked = pack(layers)
    assert isinstance(multiply, PlainLinear)
    assert unpacked == layers
