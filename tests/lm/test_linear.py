"""Linear layers, packed or not, are x @ weight.T + bias."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from specwire.lm.linear import LinearWeights, PackedLinear, PlainLinear, pack


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

    def missing(*_: object) -> torch.Tensor:
        raise RuntimeError("no such operator in this build")

    monkeypatch.setattr("specwire.lm.linear._reorder", missing)
    multiply, unpacked = pack(layers)
    assert isinstance(multiply, PlainLinear)
    assert unpacked == layers


def test_one_layer_that_cannot_be_packed_leaves_all_as_they_are() -> None:
    layers = [LinearWeights(torch.randn(8, 4), None), LinearWeights(torch.full((8, 4), torch.inf), None)]
    assert isinstance(pack(layers)[0], PlainLinear)
