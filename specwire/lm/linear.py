"""Linear layers that are fast where they run."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import nn
from torch.nn import functional

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


class PlainLinear(nn.Module):
    """x (rows, in) -> x @ weight.T + bias (rows, out)."""

    def forward(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        return functional.linear(x, weight, bias)


class PackedLinear(nn.Module):
    """The same for weights in oneDNN's layout."""

    def forward(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        return pointwise(x, weight, bias)


def pack(layers: Sequence[LinearWeights]) -> tuple[nn.Module, list[LinearWeights]]:
    """How to multiply by these layers fastest where that is right here, and their weights in the form that it takes."""
    first = layers[0].weight
    if first.device.type == "cpu" and first.dtype in PROBE_TOLERANCE:
        packed = [_packed(*layer) for layer in layers]
        fit = [layer for layer in packed if layer is not None]
        if len(fit) == len(layers):
            return PackedLinear(), fit
    return PlainLinear(), list(layers)


def _packed(weight: torch.Tensor, bias: torch.Tensor | None) -> LinearWeights | None:
    """The layer in oneDNN's layout, or None where this build or processor has none that agrees with the plain one."""
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
