"""Weights in 8 bits: each row of a linear layer as integers from -127 to 127 and one scale.

Activations, embeddings, norms and biases keep the model's dtype ("weight-only"). Rounding is ours, so that the same
weights come out for every fingerprint; the products are OpenVINO's of a whole model, and PyTorch's of a head
(`specwire.lm.runners.linear`).

"Dynamic": what these layers multiply is rounded likewise, by row and group, while it is computed. OpenVINO then
multiplies integers (src/cpu/x64/jit_brgemm_src_quantization_kernel.cpp of its oneDNN).
"""

import torch
from torch import nn
from torch.nn import functional
from transformers import PreTrainedModel

LARGEST = 127
# Activations that share a scale: 32, 64 and 256 took more time with half a billion weights. No fingerprint has it, so
# another number needs another name than int8-dynamic.
GROUP = 128
# For rows of zeros.
LEAST_SCALE = 1e-12


def rounded(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Integers int8 (out, in) and scales float32 (out, 1) of a weight (out, in), to the nearest, ties to even."""
    exact = weight.float()
    scale = exact.abs().amax(dim=1, keepdim=True).div(LARGEST).clamp(min=LEAST_SCALE)
    return exact.div(scale).round_().to(torch.int8), scale


def rounded_layer(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """What an Int8Linear has of a weight: integers (out, in), and scales (out,) in the weight's dtype."""
    integers, scale = rounded(weight)
    return integers, scale.squeeze(1).to(weight.dtype)


def rounded_activations(x: torch.Tensor, group: int = GROUP) -> torch.Tensor:
    """Of x (rows, in) every `group` numbers of a row become integers from -127 to 127 times a scale of their own.

    To the nearest, ties to even. No row depends on another. The last group of a row may be shorter.
    """
    groups = functional.pad(x, (0, -x.shape[1] % group)).unflatten(1, (-1, group))
    scale = groups.abs().amax(dim=2, keepdim=True).div(LARGEST).clamp(min=LEAST_SCALE)
    integers: torch.Tensor = (groups * scale.reciprocal()).round_()
    return integers.mul_(scale).flatten(1)[:, : x.shape[1]]


class Int8Linear(nn.Module):
    """x (..., in) -> (x @ integers.T) * scale + bias; x rounded before that if `dynamic`: what OpenVINO is held to.

    Where x is narrower than a group OpenVINO rounds none of it, and so does nobody.
    """

    bias: torch.Tensor | None

    def __init__(self, linear: nn.Linear, dynamic: bool = False, empty: bool = False) -> None:
        """empty: the layer's weight holds nothing yet, and integers and scale are filled later."""
        super().__init__()
        self.dynamic = dynamic and linear.in_features >= GROUP
        self.in_features, self.out_features = linear.in_features, linear.out_features
        weight = linear.weight.detach()
        unfilled = torch.empty_like(weight, dtype=torch.int8), weight.new_empty(len(weight))
        integers, scale = unfilled if empty else rounded_layer(weight)
        self.integers = nn.Parameter(integers, requires_grad=False)
        self.scale = nn.Parameter(scale, requires_grad=False)
        self.bias = linear.bias

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = x.reshape(-1, x.shape[-1])
        if self.dynamic:
            rows = rounded_activations(rows)
        y = functional.linear(rows, self.integers.to(rows.dtype)) * self.scale
        y = y.reshape(*x.shape[:-1], len(self.integers))
        return y if self.bias is None else y + self.bias


def round_layers(model: PreTrainedModel, dynamic: bool, empty: bool = False) -> None:
    """Replace every linear layer, the output layer among them, by an Int8Linear; empty: see there."""
    for name, module in list(model.named_modules()):
        if isinstance(module, nn.Linear):
            parent, _, last = name.rpartition(".")
            setattr(model.get_submodule(parent), last, Int8Linear(module, dynamic, empty))


def is_dynamic(model: nn.Module) -> bool:
    """Whether activations of this model are rounded."""
    return any(isinstance(module, Int8Linear) and module.dynamic for module in model.modules())
