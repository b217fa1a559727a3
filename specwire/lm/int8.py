"""Weights in 8 bits: each row of a linear layer as integers from -127 to 127 and one scale.

Activations, embeddings, norms and biases keep the model's dtype ("weight-only"). Rounding is ours, so that the same
weights come out for every runtime and fingerprint; the products are PyTorch's and OpenVINO's own.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional
from transformers import PreTrainedModel

from specwire.lm.interface import ModelError

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
    """ModelError for a model whose weights lie outside of linear layers: rounding would pass most of it over."""
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
