"""The Llama family as an OpenVINO graph over pages, built operation by operation over weights where they lie.

Traced, as a head's few layers are, a model of 30 layers takes half a minute, and its weights take room in float32 too.
Here each weight keeps its type and its memory: 8 or 16 bits, which the runtime widens, or not, while it packs them.
Rotations are looked up by position, not computed: in bfloat16 the runtime would round the angles before it takes their
cosine, and far positions be lost. Each operation also costs when a step has another number of rows than the one before.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from typing import Any

import numpy as np
import openvino
import torch
from openvino import opset13 as opset
from openvino.op import Constant, _PagedAttentionExtension
from torch import nn

from specwire.lm.model_config import CausalModel, window_of
from specwire.lm.rounding import Int8Linear
from specwire.lm.runners.decoder import DecoderShape
from specwire.lm.runners.linear import side_by_side
from specwire.lm.runners.llama import Unsuited, optional, parameter, rotations_of
from specwire.lm.runners.openvino.graph import LOGITS, ROWS, name_ports, traced, unrounded

TYPES = {torch.float32: openvino.Type.f32, torch.bfloat16: openvino.Type.bf16, torch.int8: openvino.Type.i8}
TAPPED = "tapped"
# Inputs beside the caches: of tokens, or of sessions and pages (see `graph.paged`).
TOKENS = ("input_ids", "position_ids")
PAGES = ("past_lens", "subsequence_begins", "block_indices", "block_indices_begins")
LONGEST = "max_context_len"
# Further inputs of the attention, which say that nothing of the kind is wanted: windows, slopes, scores, turned pages,
# thresholds, sinks and what later versions have.
NO_WINDOW, NO_SLOPES = (np.int32, ()), (np.float32, (0,))
NOTHING: tuple[tuple[Any, tuple[int, ...]], ...] = (
    (np.int32, (0,)),
    (np.int32, (0,)),
    (np.int32, (0,)),
    (np.float32, (0,)),
    (np.float32, (0,)),
    (np.int32, ()),
    (np.int32, ()),
    (np.float32, (0, 0, 0, 0)),
    (np.int32, ()),
    (np.int32, (0,)),
    (np.int32, (0,)),
    (np.int32, (0,)),
    (np.int32, (0,)),
    (np.uint8, (0,)),
    (np.int32, (0,)),
)


class DecoderGraph:
    """`graph`: tokens and pages -> logits of chosen rows, and what is told of `taps`.

    It reads weights where the model, or `held`, has them: both must outlive the graph.
    """

    def __init__(
        self,
        model: CausalModel,
        shape: DecoderShape,
        context: int,
        vocabulary: int,
        taps: Sequence[int] = (),
        fuse: nn.Module | None = None,
    ) -> None:
        """taps: as `specwire.lm.runners.decoder.Decoder`. fuse: what is told of them; None for themselves.

        OpenVINO computes in float32 what leads to an output, as far back as the next product. So where taps themselves
        are told it does so with the whole residual stream, and a forward takes a quarter longer.
        """
        if window_of(model.config, context) is not None:
            raise Unsuited("attention slides")
        self.layers, self.queries, self.heads, self.size, self.epsilon = shape
        self.held: list[torch.Tensor] = []
        self._inputs = {name: _input(name, [-1], openvino.Type.i64) for name in TOKENS}
        self._inputs |= {name: _input(name, [-1], openvino.Type.i32) for name in (*PAGES, ROWS)}
        self._inputs[LONGEST] = _input(LONGEST, [], openvino.Type.i32)
        self._caches = [
            _input(f"{kind}_cache.{layer}", [-1] * 4, openvino.Type.dynamic)
            for layer in range(self.layers)
            for kind in ("key", "value")
        ]
        self._angles = self._turns(model, context)
        body = model.get_submodule("model")
        x = self._looked_up(parameter(body, "embed_tokens.weight"), self._of_token("input_ids"))
        streams = [x]
        for index, layer in enumerate(body.get_submodule("layers").children()):
            x = self._layer(index, layer, x)
            streams.append(x)
        rows = opset.gather(self._normed(x, parameter(body, "norm.weight")), self._inputs[ROWS], opset.constant(0))
        outputs = [self._product(rows, [model.get_submodule("lm_head")], vocabulary)]
        if taps:
            tapped = opset.concat([streams[tap] for tap in taps], axis=-1)
            outputs.append(tapped if fuse is None else _followed(tapped, fuse, len(taps) * model.config.hidden_size))
        self.graph = openvino.Model(
            [opset.result(output) for output in outputs], [*self._inputs.values(), *self._caches], "decoder"
        )
        for port, name in zip(self.graph.outputs, (LOGITS, TAPPED), strict=False):
            port.get_tensor().set_names({name})

    def _layer(self, index: int, layer: nn.Module, x: Any) -> Any:
        attention, mlp = layer.get_submodule("self_attn"), layer.get_submodule("mlp")
        q, k, v, output = (attention.get_submodule(f"{name}_proj") for name in "qkvo")
        gate, up, down = (mlp.get_submodule(f"{name}_proj") for name in ("gate", "up", "down"))
        whole = self._product(self._normed(x, parameter(layer, "input_layernorm.weight")), [q, k, v])
        x = opset.add(x, self._product(self._attended(index, attention, whole), [output]))
        whole = self._product(self._normed(x, parameter(layer, "post_attention_layernorm.weight")), [gate, up])
        first, second = _parts(whole, -1, 2 * [_rows(up)])
        return opset.add(x, self._product(opset.multiply(opset.swish(first), second), [down]))

    def _attended(self, index: int, attention: nn.Module, whole: Any) -> Any:
        """What queries see (tokens, queries x size), of queries, keys and values of all heads side by side."""
        turned, size = self.queries + self.heads, self.size
        both, value = _parts(whole, -1, [turned * size, self.heads * size])
        both = self._turned(attention, opset.reshape(both, _ints([0, 1, turned, size]), special_zero=True))
        both = opset.reshape(both, _ints([0, turned * size]), special_zero=True)
        flat = [*_parts(both, -1, [self.queries * size, self.heads * size]), value]
        told = [opset.constant(np.float32(size**-0.5)), _zeros(NO_WINDOW), _zeros(NO_SLOPES), self._inputs[LONGEST]]
        inputs = [*self._caches[2 * index : 2 * index + 2], *(self._inputs[name] for name in PAGES), *told]
        seen = _PagedAttentionExtension([*flat, *(each.output(0) for each in (*inputs, *map(_zeros, NOTHING)))])
        for kind in ("k", "v"):
            seen.get_rt_info()[f"num_{kind}_heads"] = self.heads
            seen.get_rt_info()[f"{kind}_head_size"] = size
        return seen.output(0)

    def _turned(self, attention: nn.Module, both: Any) -> Any:
        """Queries and keys (tokens, 1, queries + heads, size), normed where the model does so, turned by position.

        The turn is spelt as OpenVINO recognises it (`RoPEFusionGPTNEOX`): one operation, where others take five.
        """
        norms = [optional(attention, f"{name}_norm.weight") for name in "qk"]
        if norms[0] is not None and norms[1] is not None:
            each = (norms[0].expand(self.queries, -1), norms[1].expand(self.heads, -1))
            both = self._normed(both, torch.cat(each))
        first, second = _parts(both, 3, 2 * [self.size // 2])
        cos, sin = self._angles
        swapped = opset.concat([opset.multiply(second, opset.constant(np.float32(-1))), first], axis=-1)
        return opset.add(opset.multiply(both, cos), opset.multiply(swapped, sin))

    def _turns(self, model: CausalModel, context: int) -> list[Any]:
        """Cosines and sines (tokens, 1, 1, size)."""
        angles = rotations_of(model, context, self.size)
        at = self._of_token("position_ids")
        tables = (self._looked_up(torch.cat((each, each), -1), at) for each in (angles.real, angles.imag))
        return [opset.unsqueeze(table, _ints([1, 2])) for table in tables]

    def _of_token(self, name: str) -> Any:
        return opset.convert(self._inputs[name], "i32")

    def _looked_up(self, table: torch.Tensor, at: Any) -> Any:
        return _widened(opset.gather(self._constant(table), at, opset.constant(np.int32(0))), table.dtype)

    def _normed(self, x: Any, weight: torch.Tensor) -> Any:
        """The root-mean-square norm, spelt out as OpenVINO recognises it. weight: of the last dimensions of x."""
        mean = opset.reduce_mean(opset.power(x, opset.constant(np.float32(2))), _ints([-1]), keep_dims=True)
        root = opset.sqrt(opset.add(mean, opset.constant(np.float32(self.epsilon))))
        scaled = opset.multiply(x, opset.divide(opset.constant(np.float32(1)), root))
        return opset.multiply(opset.constant(weight.float().unsqueeze(0).numpy()), scaled)

    def _product(self, x: Any, linears: Sequence[nn.Module], rows: int | None = None) -> Any:
        """Outputs of layers side by side, the first `rows` of them."""
        rounded = [linear for linear in linears if isinstance(linear, Int8Linear)]
        if len(rounded) == len(linears):
            integers = side_by_side([linear.integers[:rows] for linear in rounded])
            scale = torch.cat([linear.scale[:rows] for linear in rounded])
            weight = unrounded(self._constant(integers.unflatten(1, (scale.shape[1], -1))), scale)
        else:
            parts = [_weight(linear)[:rows] for linear in linears]
            weight = _widened(self._constant(side_by_side(parts)), parts[0].dtype)
        product = opset.matmul(x, weight, False, True)
        biases = [_bias(linear)[:rows] for linear in linears]
        if not any(bias.any() for bias in biases):
            return product
        return opset.add(product, opset.constant(torch.cat(biases).view(1, -1).numpy()))

    def _constant(self, values: torch.Tensor) -> Any:
        """Over the same memory."""
        values = values.contiguous()
        self.held.append(values)
        data = values.view(torch.uint8).view(-1).numpy()
        return Constant(openvino.Tensor(data, openvino.Shape([*values.shape]), TYPES[values.dtype]), shared_memory=True)


def _rows(linear: nn.Module) -> int:
    return len(linear.integers) if isinstance(linear, Int8Linear) else len(_weight(linear))


def _weight(linear: nn.Module) -> torch.Tensor:
    if type(linear) is not nn.Linear:
        raise Unsuited(f"a layer is a {type(linear).__name__}")
    return parameter(linear, "weight")


def _bias(linear: nn.Module) -> torch.Tensor:
    bias = linear.bias if isinstance(linear, Int8Linear) else optional(linear, "bias")
    return torch.zeros(_rows(linear)) if bias is None else bias.detach().float()


def _widened(node: Any, dtype: torch.dtype) -> Any:
    """In float32. The runtime keeps shorter weights as they are."""
    if dtype == torch.float32:
        return node
    wide = opset.convert(node, "f32")
    wide.get_rt_info()["decompression_0"] = ""
    return wide


def _followed(x: Any, module: nn.Module, width: int) -> Any:
    """A module's output for x (tokens, 1, width). It is copied: it may share weights with the model."""
    part = traced(deepcopy(module).float(), (torch.zeros(2, 4, width),))
    name_ports(part, [(TAPPED, (-1, 1, width))], [TAPPED])
    (entry,), (end,) = part.get_parameters(), part.get_results()
    entry.output(0).replace(x.output(0))
    return end.input_value(0).get_node()


def _input(name: str, shape: Sequence[int], kind: Any) -> Any:
    made = opset.parameter(shape, kind, name=name)
    made.output(0).get_tensor().set_names({name})
    return made


def _parts(node: Any, axis: int, sizes: Sequence[int]) -> list[Any]:
    split = opset.variadic_split(node, opset.constant(axis), _ints(sizes))
    return [split.output(index) for index in range(len(sizes))]


def _ints(values: Sequence[int]) -> Any:
    return opset.constant(np.array(values, np.int64))


def _zeros(of: tuple[Any, tuple[int, ...]]) -> Any:
    kind, shape = of
    return opset.constant(np.zeros(shape, kind))
