"""Linear layers: packed where that is faster; with weights in 8 bits, and what they multiply."""

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import nn
from torch.nn import functional

from specwire.lm.model_config import CausalModel

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


def weights_of(layer: nn.Linear) -> LinearWeights:
    bias: torch.Tensor | None = layer.bias  # None where it has none, which its type does not tell
    return LinearWeights(layer.weight.detach(), None if bias is None else bias.detach())


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
# Weights in 8 bits: of each row every GROUP weights as integers from -127 to 127 and one scale.
#
# These are the blocks of a GGUF file's quantised tensors, so that a file of at most 8 bits is hardly rounded any
# further. Activations, embeddings, norms and biases keep the model's dtype ("weight-only"). Rounding is ours, so that
# the same weights come out for every fingerprint; the products are OpenVINO's.
#
# "Dynamic": what these layers multiply is rounded likewise, by row and group, while it is computed, as llama.cpp does.
# OpenVINO then multiplies integers (src/cpu/x64/jit_brgemm_src_quantization_kernel.cpp of its oneDNN).

LARGEST = 127
# Weights, and activations, that share a scale, as in llama.cpp's blocks. By groups of 128 activations and whole rows of
# weights SmolLM2's logits moved further, and no forward was quicker. Fingerprints have it.
GROUP = 32
# For rows of zeros.
LEAST_SCALE = 1e-12


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


# ----------------------------------------------------------------------------------------------------------------------
# Layers of heads that PyTorch computes in 8 bits, with one scale a row.

# Rows up to which PyTorch's product of bfloat16 with integers is quicker than one with the weights widened.
FEW = 16
# Likewise where it has wide registers.
MANY = 1 << 16
# Weights of a layer that `pack_rounded` rounds, at least: smaller ones stay in a processor's cache as they are.
LEAST_ROUNDED = 1 << 16


def rounded_rows(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Integers int8 (out, in) and scales float32 (out, 1) of a weight (out, in), to the nearest, ties to even."""
    exact = weight.float()
    scale = exact.abs().amax(dim=1, keepdim=True).div(LARGEST).clamp(min=LEAST_SCALE)
    return exact.div(scale).round_().to(torch.int8), scale


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
