"""Linear layers: packed where that is faster, and with weights in 8 bits."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import nn
from torch.nn import functional
from transformers import PreTrainedModel

from specwire.core.model import ModelError

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
# Weights in 8 bits: each row of a linear layer as integers from -127 to 127 and one scale. Activations, embeddings,
# norms and biases keep the model's dtype ("weight-only"). Rounding is ours, so that the same weights come out for every
# runtime and fingerprint; the products are PyTorch's and OpenVINO's own.

LARGEST = 127
# For rows of zeros.
LEAST_SCALE = 1e-12
# Rows up to which PyTorch's product of bfloat16 with integers is quicker than one with the weights widened.
FEW = 16


def rounded(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Integers int8 (out, in) and scales float32 (out, 1) of a weight (out, in), to the nearest, ties to even."""
    exact = weight.float()
    scale = exact.abs().amax(dim=1, keepdim=True).div(LARGEST).clamp(min=LEAST_SCALE)
    return exact.div(scale).round_().to(torch.int8), scale


class Int8Linear(nn.Module):
    """x (..., in) -> (x @ integers.T) * scale + bias."""

    integers: torch.Tensor
    scale: torch.Tensor
    bias: torch.Tensor | None

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        integers, scale = rounded(linear.weight.detach())
        self.register_buffer("integers", integers)
        self.register_buffer("scale", scale.squeeze(1).to(linear.weight.dtype))
        self.bias = linear.bias

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = x.reshape(-1, x.shape[-1])
        y = self._product(rows).reshape(*x.shape[:-1], len(self.integers))
        return y if self.bias is None else y + self.bias

    def _product(self, rows: torch.Tensor) -> torch.Tensor:
        if len(rows) <= FEW and rows.dtype == torch.bfloat16 and rows.device.type == "cpu":
            product: torch.Tensor = torch.ops.aten._weight_int8pack_mm(rows, self.integers, self.scale)
            return product
        return functional.linear(rows, self.integers.to(rows.dtype)) * self.scale


def check_int8(model: PreTrainedModel) -> None:
    """ModelError for a model whose weights lie outside of linear layers: most of them would not be rounded."""
    covered = {
        f"{name}.weight" for name, module in model.named_modules() if isinstance(module, nn.Linear | nn.Embedding)
    }
    other = next((name for name, weight in model.named_parameters() if weight.dim() > 1 and name not in covered), None)
    if other is not None:
        raise ModelError(
            f"quantization: int8 rounds linear layers, and {type(model).__name__} keeps {other} outside of them"
        )


def round_layers(model: PreTrainedModel) -> None:
    """Replace every linear layer, the output layer among them, by an Int8Linear."""
    for name, module in list(model.named_modules()):
        if isinstance(module, nn.Linear):
            parent, _, last = name.rpartition(".")
            setattr(model.get_submodule(parent), last, Int8Linear(module))
