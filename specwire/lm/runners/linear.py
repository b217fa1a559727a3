"""Linear layers: packed where that is faster, and with weights in 8 bits, and what they multiply."""

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import nn
from torch.nn import functional

from specwire.lm.rounding import rounded_rows

PROBE_ROWS = 3
PROBE_TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 2e-2}

# The call below, for TorchScript: its source language has no way to write an empty list of optional numbers.
POINTWISE = """
graph(%x : Tensor, %weight : Tensor, %bias : Tensor?):
  %attr : str = prim::Constant[value="none"]()
  %scalars : Scalar?[] = prim::ListConstruct()
  %algorithm : str = prim::Constant[value=""]()
  %y : Tensor = mkldnn::_linear_pointwise(%x, %weight, %bias, %attr, %scalars, %algorithm)
  return (%y)
"""


class LinearWeights(NamedTuple):
    """Weight (out, in), or its packed form, and bias (out,) of one linear layer."""

    weight: torch.Tensor
    bias: torch.Tensor | None


def side_by_side(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """Rows of all parts; the same memory where they lie one behind the other."""
    first = parts[0]
    ends = [part.data_ptr() + part.nbytes for part in parts]
    whole = all(part.is_contiguous() and part.dtype == first.dtype for part in parts)
    memory = first.untyped_storage()
    fits = ends[-1] <= memory.data_ptr() + memory.nbytes()
    if whole and fits and all(end == part.data_ptr() for end, part in zip(ends, parts[1:], strict=False)):
        return first.as_strided((sum(map(len, parts)), *first.shape[1:]), first.stride())
    return torch.cat([*parts])


class PlainLinear(nn.Module):
    """x (rows, in) -> x @ weight.T + bias (rows, out)."""

    def forward(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        return functional.linear(x, weight, bias)


class PackedLinear(nn.Module):
    """The same for weights in oneDNN's layout."""

    def forward(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        return pointwise(x, weight, bias)


def pack(layers: Sequence[LinearWeights]) -> tuple[nn.Module, list[LinearWeights]]:
    """The fastest way to multiply by these layers that is right here, and their weights in the form that it needs."""
    first = layers[0].weight
    if first.device.type == "cpu" and first.dtype in PROBE_TOLERANCE:
        packed = [_packed(*layer) for layer in layers]
        fit = [layer for layer in packed if layer is not None]
        if len(fit) == len(layers):
            return PackedLinear(), fit
    return PlainLinear(), list(layers)


def _packed(weight: torch.Tensor, bias: torch.Tensor | None) -> LinearWeights | None:
    """The layer in oneDNN's layout, or None where that does not agree with the plain product here."""
    probe = torch.linspace(-1, 1, PROBE_ROWS * weight.shape[1]).view(PROBE_ROWS, -1).to(weight.dtype)
    try:
        layout = _reorder(weight)
        got, expected = pointwise(probe, layout, bias).float(), functional.linear(probe, weight, bias).float()
    except (AttributeError, RuntimeError):
        return None
    scale = max(float(expected.abs().max()), 1e-6)
    agrees = float((got - expected).abs().max()) <= PROBE_TOLERANCE[weight.dtype] * scale
    return LinearWeights(layout, bias) if agrees else None


def _reorder(weight: torch.Tensor) -> torch.Tensor:
    layout: torch.Tensor = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous())
    return layout


def _pointwise(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    y: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
    return y


def _compiled_pointwise() -> Callable[[torch.Tensor, torch.Tensor, torch.Tensor | None], torch.Tensor]:
    """`_pointwise` as a TorchScript function, which can be called from Python and from TorchScript alike."""
    try:
        function: Callable[[torch.Tensor, torch.Tensor, torch.Tensor | None], torch.Tensor]
        function = torch._C._create_function_from_graph("pointwise", torch._C.parse_ir(POINTWISE))
    except (AttributeError, RuntimeError):
        return _pointwise
    return function


pointwise = _compiled_pointwise()


# ----------------------------------------------------------------------------------------------------------------------
# The same of a head's layers in 8 bits.

# Rows up to which PyTorch's product of bfloat16 with integers is quicker than one with the weights widened.
FEW = 16
# Likewise where it has wide registers.
MANY = 1 << 16
# Weights of a layer that `pack_rounded` rounds, at least: smaller ones stay in a processor's cache as they are.
LEAST_ROUNDED = 1 << 16


class RoundedLinear(nn.Module):
    """Layers in 8 bits beside ones that are not. The former's `bias` is (1, out), scales, or (2, out), bias behind."""

    def __init__(self) -> None:
        super().__init__()
        self.few = MANY if "AVX512" in torch.backends.cpu.get_cpu_capability() else FEW

    def forward(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        if weight.dtype != torch.int8 or bias is None:
            return functional.linear(x, weight, bias)
        if x.size(0) <= self.few:
            y = torch._weight_int8pack_mm(x.to(torch.bfloat16), weight, bias[0].to(torch.bfloat16)).to(x.dtype)
        else:
            y = functional.linear(x, weight.to(x.dtype)) * bias[0]
        return y if bias.size(0) == 1 else y + bias[1]


def pack_rounded(layers: Sequence[LinearWeights]) -> tuple[nn.Module, list[LinearWeights]]:
    """As `pack`, for what need not be exact: large layers in 8 bits, of which a forward of few rows reads less."""
    if layers[0].weight.device.type != "cpu" or not _rounding_works():
        return pack(layers)
    return RoundedLinear(), [layer if layer.weight.numel() < LEAST_ROUNDED else _rounded(layer) for layer in layers]


def _rounded(layer: LinearWeights) -> LinearWeights:
    integers, scale = rounded_rows(layer.weight)
    beside = scale.T.to(layer.weight.dtype)
    return LinearWeights(integers, beside if layer.bias is None else torch.cat((beside, layer.bias[None])))


@lru_cache(maxsize=1)
def _rounding_works() -> bool:
    """Whether PyTorch's product with integers is right here."""
    x = torch.linspace(-1, 1, PROBE_ROWS * 64).view(PROBE_ROWS, 64).bfloat16()
    weight = (torch.arange(64 * 64) % 251 - 125).view(64, 64).to(torch.int8)
    scale = torch.full((64,), 2.0**-7, dtype=torch.bfloat16)
    try:
        got = torch.ops.aten._weight_int8pack_mm(x, weight, scale).float()
    except (AttributeError, RuntimeError):
        return False
    expected = x.float() @ weight.float().T * 2.0**-7
    tolerance = PROBE_TOLERANCE[torch.bfloat16] * float(expected.abs().max())
    return float((got - expected).abs().max()) <= tolerance
