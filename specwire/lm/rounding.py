"""Weights in 8 bits: of each row of a linear layer every GROUP weights as integers from -127 to 127 and one scale.

These are the blocks of a GGUF file's quantised tensors, so that a file of at most 8 bits is hardly rounded any further.
Activations, embeddings, norms and biases keep the model's dtype ("weight-only"). Rounding is ours, so that the same
weights come out for every fingerprint; the products are OpenVINO's. Heads that PyTorch computes
(`specwire.lm.runners.linear`) have one scale a row.

"Dynamic": what these layers multiply is rounded likewise, by row and group, while it is computed, as llama.cpp does.
OpenVINO then multiplies integers (src/cpu/x64/jit_brgemm_src_quantization_kernel.cpp of its oneDNN).
"""

import torch
from torch import nn
from torch.nn import functional

from specwire.lm.model_config import CausalModel

LARGEST = 127
# Weights, and activations, that share a scale, as in llama.cpp's blocks. By groups of 128 activations and whole rows of
# weights SmolLM2's logits moved further, and no forward was quicker. Fingerprints have it.
GROUP = 32
# For rows of zeros.
LEAST_SCALE = 1e-12


def rounded_rows(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Integers int8 (out, in) and scales float32 (out, 1) of a weight (out, in), to the nearest, ties to even."""
    exact = weight.float()
    scale = exact.abs().amax(dim=1, keepdim=True).div(LARGEST).clamp(min=LEAST_SCALE)
    return exact.div(scale).round_().to(torch.int8), scale


def group_of(width: int) -> int:
    """How many weights of a row of `width` share a scale: all of one that does not consist of whole groups."""
    return width if width % GROUP else GROUP


def rounded_groups(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """What an Int8Linear has of a weight (out, in): integers (out, in), and scales (out, groups) in float16.

    The integers are to the nearest by the scales as float16 has them.
    """
    groups = weight.float().unflatten(1, (-1, group_of(weight.shape[1])))
    scale = groups.abs().amax(dim=2).div(LARGEST).clamp(min=LEAST_SCALE).half()
    steps = scale.float().clamp(min=LEAST_SCALE)[:, :, None]
    return groups.div(steps).round_().clamp_(-LARGEST, LARGEST).to(torch.int8).flatten(1), scale


def rounded_activations(x: torch.Tensor, group: int = GROUP) -> torch.Tensor:
    """Of x (rows, in) every `group` numbers of a row become integers from -127 to 127 times a scale of their own.

    To the nearest, ties to even. No row depends on another. The last group of a row may be shorter.
    """
    groups = functional.pad(x, (0, -x.shape[1] % group)).unflatten(1, (-1, group))
    scale = groups.abs().amax(dim=2, keepdim=True).div(LARGEST).clamp(min=LEAST_SCALE)
    integers: torch.Tensor = (groups * scale.reciprocal()).round_()
    return integers.mul_(scale).flatten(1)[:, : x.shape[1]]


class Int8Linear(nn.Module):
    """x (..., in) -> x @ (integers * scale).T + bias; x rounded before that if `dynamic`: what OpenVINO is held to.

    Where x is narrower than a group OpenVINO rounds none of it, and so does nobody.
    """

    bias: torch.Tensor | None

    def __init__(self, linear: nn.Linear, dynamic: bool = False, empty: bool = False) -> None:
        """empty: the layer's weight holds nothing yet, and integers and scale are filled later."""
        super().__init__()
        self.dynamic = dynamic and linear.in_features >= GROUP
        self.in_features, self.out_features = linear.in_features, linear.out_features
        weight = linear.weight.detach()
        groups = self.in_features // group_of(self.in_features)
        unfilled = torch.empty_like(weight, dtype=torch.int8), weight.new_empty(len(weight), groups).half()
        integers, scale = unfilled if empty else rounded_groups(weight)
        self.integers = nn.Parameter(integers, requires_grad=False)
        self.scale = nn.Parameter(scale, requires_grad=False)
        self.bias = linear.bias

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = x.reshape(-1, x.shape[-1])
        if self.dynamic:  # sums of integers are not rounded to x's dtype
            bias = None if self.bias is None else self.bias.float()
            y = functional.linear(rounded_activations(rows.float()), self.weights(), bias)
        else:
            y = functional.linear(rows, self.weights().to(rows.dtype), self.bias)
        return y.to(x.dtype).reshape(*x.shape[:-1], len(self.integers))

    def weights(self) -> torch.Tensor:
        """What integers and scales stand for: float32 (out, in)."""
        groups: torch.Tensor = self.integers.float().unflatten(1, (self.scale.shape[1], -1))
        return groups.mul(self.scale.float()[:, :, None]).flatten(1)


def round_layers(model: CausalModel, dynamic: bool, empty: bool = False) -> None:
    """Replace every linear layer, the output layer among them, by an Int8Linear; empty: see there."""
    for name, module in list(model.named_modules()):
        if isinstance(module, nn.Linear):
            parent, _, last = name.rpartition(".")
            setattr(model.get_submodule(parent), last, Int8Linear(module, dynamic, empty))


def is_dynamic(model: nn.Module) -> bool:
    """Whether activations of this model are rounded."""
    return any(isinstance(module, Int8Linear) and module.dynamic for module in model.modules())
