"""OpenVINO computes the forward of the Llama family on CPUs, as a graph over pages of a cache.

The graph is built operation by operation over weights where they lie. Traced, a model of 30 layers takes half a minute,
and its weights take room in float32 too. Here each weight keeps its type and its memory: 8 or 16 bits, which the
runtime widens, or not, while it packs them. Rotations are looked up by position, not computed: in bfloat16 the runtime
would round the angles before it takes their cosine, and far positions be lost. Each operation also costs when a step
has another number of rows than the one before.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from functools import cache
from typing import Any

import numpy as np
import openvino
import torch
from openvino import opset13 as opset
from openvino.op import Constant, _PagedAttentionExtension
from torch import nn

from specwire.core.model import INT8_DYNAMIC, NONE, Feed
from specwire.lm.kv_cache import Runner, StoredSlots
from specwire.lm.linear import GROUP, PROBE_TOLERANCE, Int8Linear, LinearWeights, rounded_groups, side_by_side
from specwire.lm.model_config import CausalModel, window_of
from specwire.lm.runners.decoder import DecoderShape
from specwire.lm.runners.llama import Unsuited, optional, parameter, rotations_of, shape_of
from specwire.lm.runners.openvino.graph import (
    LOGITS,
    ROWS,
    CompiledGraph,
    PagedGraph,
    compile_options,
    name_ports,
    prompt_part,
    round_weights,
    traced,
    unrounded,
)

# Of the products that `rounds_activations` tries: whole groups, and two with a shorter one; more rows than kernels
# block, and how many of them are computed at once.
PROBE_WIDTHS, PROBE_ROWS, PROBE_FEEDS = (4 * GROUP, 2 * GROUP + GROUP // 2), 12, (1, 4)
TYPES = {
    torch.float32: openvino.Type.f32,
    torch.float16: openvino.Type.f16,
    torch.bfloat16: openvino.Type.bf16,
    torch.int8: openvino.Type.i8,
}
TAPPED = "tapped"
# Inputs beside the caches: of tokens; where they lie in pages, see `PagedGraph`; and which rows logits are wanted of.
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


class LayerGraph:
    """What graphs of decoder layers are built of: the target's, and those of heads.

    It reads weights where their model, or `held`, has them: both must outlive the graph.
    """

    def __init__(
        self, shape: DecoderShape, rotations: torch.Tensor, turned: int | None = None, least_rounded: int | None = None
    ) -> None:
        """rotations: see `runners.decoder.Model`. turned: dimensions of a head that they turn, None for all.

        least_rounded: weights of a product that are rounded to 8 bits, at least; None for those of an Int8Linear alone.
        """
        self.layers, self.queries, self.heads, self.size, self.epsilon = shape
        self.held: list[torch.Tensor] = []
        self._least_rounded = least_rounded
        self.inputs = {name: named_input(name, [-1], openvino.Type.i64) for name in TOKENS}
        self.inputs |= {name: named_input(name, [-1], openvino.Type.i32) for name in (*PAGES, ROWS)}
        self.inputs[LONGEST] = named_input(LONGEST, [], openvino.Type.i32)
        self._caches = [
            named_input(f"{kind}_cache.{layer}", [-1] * 4, openvino.Type.dynamic)
            for layer in range(self.layers)
            for kind in ("key", "value")
        ]
        self._half = (self.size if turned is None else turned) // 2
        self._angles = self._turns(rotations)

    def finished(self, outputs: Sequence[tuple[str, Any]], *further: Any) -> openvino.Model:
        """The graph to these, by name. further: inputs beside those that all have."""
        results = [opset.result(output) for _, output in outputs]
        graph = openvino.Model(results, [*self.inputs.values(), *further, *self._caches], "decoder")
        for port, (name, _) in zip(graph.outputs, outputs, strict=True):
            port.get_tensor().set_names({name})
        return graph

    def attended(self, index: int, attention: nn.Module, read: Any) -> Any:
        """What queries see (tokens, queries x size), of what the layer's attention reads (tokens, any)."""
        turned, size = self.queries + self.heads, self.size
        whole = self.product(read, [attention.get_submodule(f"{name}_proj") for name in "qkv"])
        both, value = _parts(whole, -1, [turned * size, self.heads * size])
        both = self._turned(attention, opset.reshape(both, _ints([0, 1, turned, size]), special_zero=True))
        both = opset.reshape(both, _ints([0, turned * size]), special_zero=True)
        flat = [*_parts(both, -1, [self.queries * size, self.heads * size]), value]
        told = [opset.constant(np.float32(size**-0.5)), _zeros(NO_WINDOW), _zeros(NO_SLOPES), self.inputs[LONGEST]]
        inputs = [*self._caches[2 * index : 2 * index + 2], *(self.inputs[name] for name in PAGES), *told]
        seen = _PagedAttentionExtension([*flat, *(each.output(0) for each in (*inputs, *map(_zeros, NOTHING)))])
        for kind in ("k", "v"):
            seen.get_rt_info()[f"num_{kind}_heads"] = self.heads
            seen.get_rt_info()[f"{kind}_head_size"] = size
        return seen.output(0)

    def fed_forward(self, x: Any, norm: torch.Tensor, mlp: nn.Module) -> Any:
        """The residual stream behind the gated layers."""
        gate, up, down = (mlp.get_submodule(f"{name}_proj") for name in ("gate", "up", "down"))
        first, second = _parts(self.product(self.normed(x, norm), [gate, up]), -1, 2 * [_rows(up)])
        return opset.add(x, self.product(opset.multiply(opset.swish(first), second), [down]))

    def _turned(self, attention: nn.Module, both: Any) -> Any:
        """Queries and keys (tokens, 1, queries + heads, size), normed where the model does so, turned by position.

        The turn is spelt as OpenVINO recognises it (`RoPEFusionGPTNEOX`): one operation, where others take five.
        """
        norms = [optional(attention, f"{name}_norm.weight") for name in "qk"]
        if norms[0] is not None and norms[1] is not None:
            each = (norms[0].expand(self.queries, -1), norms[1].expand(self.heads, -1))
            both = self.normed(both, torch.cat(each))
        rest = self.size - 2 * self._half
        first, second, *still = _parts(both, 3, [self._half, self._half, *[rest] * (rest > 0)])
        cos, sin = self._angles
        swapped = opset.concat([opset.multiply(second, opset.constant(np.float32(-1))), first, *still], axis=-1)
        return opset.add(opset.multiply(both, cos), opset.multiply(swapped, sin))

    def _turns(self, rotations: torch.Tensor) -> list[Any]:
        """Cosines and sines (tokens, 1, 1, size)."""
        angles = rotations[:, : self._half]
        cos, sin = (torch.cat((each, each), -1) for each in (angles.real, angles.imag))
        if self.size > 2 * self._half:
            ones = torch.ones(len(rotations), self.size - 2 * self._half)
            cos, sin = torch.cat((cos, ones), -1), torch.cat((sin, 0 * ones), -1)
        at = self.of_token("position_ids")
        return [opset.unsqueeze(self.looked_up(table, at), _ints([1, 2])) for table in (cos, sin)]

    def of_token(self, name: str) -> Any:
        """One of TOKENS (tokens,)."""
        return opset.convert(self.inputs[name], "i32")

    def looked_up(self, table: torch.Tensor, at: Any) -> Any:
        """Rows of a table, in float32."""
        return _widened(opset.gather(self._constant(table), at, opset.constant(np.int32(0))), table.dtype)

    def chosen(self, x: Any) -> Any:
        """Of x (tokens, ...) the rows that logits are wanted of."""
        return opset.gather(x, self.inputs[ROWS], opset.constant(0))

    def normed(self, x: Any, weight: torch.Tensor) -> Any:
        """The root-mean-square norm, spelt out as OpenVINO recognises it. weight: of the last dimensions of x."""
        mean = opset.reduce_mean(opset.power(x, opset.constant(np.float32(2))), _ints([-1]), keep_dims=True)
        root = opset.sqrt(opset.add(mean, opset.constant(np.float32(self.epsilon))))
        scaled = opset.multiply(x, opset.divide(opset.constant(np.float32(1)), root))
        own = weight.detach().float().unsqueeze(0)
        return opset.multiply(opset.constant(own.numpy()), scaled)

    def product(self, x: Any, linears: Sequence[nn.Module | LinearWeights], rows: int | None = None) -> Any:
        """Outputs of layers side by side, the first `rows` of them."""
        rounded = [linear for linear in linears if isinstance(linear, Int8Linear)]
        parts = [] if len(rounded) == len(linears) else [_weight(linear)[:rows] for linear in linears]
        if rounded and not parts:
            integers = side_by_side([linear.integers[:rows] for linear in rounded])
            scale = torch.cat([linear.scale[:rows] for linear in rounded])
            weight = unrounded(self._constant(integers.unflatten(1, (scale.shape[1], -1))), scale)
        elif self._least_rounded is not None and sum(part.numel() for part in parts) >= self._least_rounded:
            integers, scale = rounded_groups(torch.cat(parts))
            weight = unrounded(opset.constant(integers.unflatten(1, (scale.shape[1], -1)).numpy()), scale)
        else:
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


class DecoderGraph(LayerGraph):
    """`graph`: tokens and pages -> logits of chosen rows, and what is told of `taps`."""

    def __init__(
        self,
        model: CausalModel,
        context: int,
        vocabulary: int,
        taps: Sequence[int] = (),
        fuse: nn.Module | None = None,
    ) -> None:
        """taps: as `specwire.lm.runners.decoder.Decoder`. fuse: what is told of them; None for themselves.

        OpenVINO computes in float32 what leads to an output, as far back as the next product. So where taps themselves
        are told it does so with the whole residual stream, and a forward takes a quarter longer. What a product makes
        of them costs nothing that can be seen (SmolLM2 with the included head: 11.6 ms a row, with and without it).
        """
        if window_of(model.config, context) is not None:
            raise Unsuited("attention slides")
        shape = shape_of(model)
        super().__init__(shape, rotations_of(model, context, shape.head_dim))
        body = model.get_submodule("model")
        x = self.looked_up(parameter(body, "embed_tokens.weight"), self.of_token("input_ids"))
        streams = [x]
        for index, layer in enumerate(body.get_submodule("layers").children()):
            x = self._layer(index, layer, x)
            streams.append(x)
        rows = self.chosen(self.normed(x, parameter(body, "norm.weight")))
        outputs = [(LOGITS, self.product(rows, [model.get_submodule("lm_head")], vocabulary))]
        if taps:
            tapped = opset.concat([streams[tap] for tap in taps], axis=-1)
            width = len(taps) * model.config.hidden_size
            outputs.append((TAPPED, tapped if fuse is None else _followed(tapped, fuse, width)))
        self.graph = self.finished(outputs)

    def _layer(self, index: int, layer: nn.Module, x: Any) -> Any:
        attention = layer.get_submodule("self_attn")
        seen = self.attended(index, attention, self.normed(x, parameter(layer, "input_layernorm.weight")))
        x = opset.add(x, self.product(seen, [attention.get_submodule("o_proj")]))
        return self.fed_forward(x, parameter(layer, "post_attention_layernorm.weight"), layer.get_submodule("mlp"))


def _rows(linear: nn.Module | LinearWeights) -> int:
    return len(linear.integers) if isinstance(linear, Int8Linear) else len(_weight(linear))


def _weight(linear: nn.Module | LinearWeights) -> torch.Tensor:
    if isinstance(linear, LinearWeights):
        return linear.weight
    if type(linear) is not nn.Linear:
        raise Unsuited(f"a layer is a {type(linear).__name__}")
    return parameter(linear, "weight")


def _bias(linear: nn.Module | LinearWeights) -> torch.Tensor:
    bias = linear.bias if isinstance(linear, Int8Linear | LinearWeights) else optional(linear, "bias")
    return torch.zeros(_rows(linear)) if bias is None else bias.detach().float()


def _widened(node: Any, dtype: torch.dtype) -> Any:
    """In float32. The runtime keeps shorter weights as they are."""
    if dtype == torch.float32:
        return node
    wide = opset.convert(node, "f32")
    wide.get_rt_info()["decompression_0"] = ""
    return wide


def _followed(x: Any, module: nn.Module, width: int) -> Any:
    """A module's output for x (tokens, width). It is copied: it may share weights with the model."""
    part = traced(deepcopy(module).float(), (torch.zeros(2, width),))
    name_ports(part, [(TAPPED, (-1, width))], [TAPPED])
    (entry,), (end,) = part.get_parameters(), part.get_results()
    entry.output(0).replace(x.output(0))
    return end.input_value(0).get_node()


def named_input(name: str, shape: Sequence[int], kind: Any) -> Any:
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


class OpenvinoRunner(StoredSlots, Runner):
    """`Runner` with the weights of a Hugging Face model of MODEL_TYPES, which can be freed."""

    alike = True

    def __init__(
        self,
        model: CausalModel,
        slots: int,
        context: int,
        vocabulary: int,
        dtype: torch.dtype,
        threads: int,
        quantization: str = NONE,
        taps: Sequence[int] = (),
        fuse: nn.Module | None = None,
    ) -> None:
        """Compute in `computed_in(dtype)` with the weights of a model, which may be rounded to 8 bits.

        Raises Unsuited for a model that only looks like the family, and whatever OpenVINO raises for one that it cannot
        trace, page or compile.
        """
        decoder = DecoderGraph(model, context, vocabulary, taps, fuse)
        self.taps, self.tapped = taps, torch.empty(0)
        graph = decoder.graph
        group = GROUP if quantization == INT8_DYNAMIC else 0
        self._graph = PagedGraph(graph, slots, context, dtype, threads, group)
        self.store, self._decoder = self._graph.pages, decoder

    def run(self, feeds: Sequence[Feed]) -> torch.Tensor:
        parts = [prompt_part(feed) for feed in feeds]
        both = [at for at, feed in enumerate(feeds) if 1 < parts[at] < len(feed.tokens)]
        return self._in_turn(feeds, parts, both) if both else self._run(feeds)

    def _in_turn(self, feeds: Sequence[Feed], parts: Sequence[int], both: Sequence[int]) -> torch.Tensor:
        """Prompts' parts of some feeds, then all the rest: rows behind such a part would not see it in one forward."""
        before, behind = list[Feed](), [*feeds]
        for at in both:
            feed, rest = feeds[at], feeds[at].tokens[parts[at] :]
            wanted = max(0, feed.wanted - len(rest))
            before.append(feed._replace(tokens=feed.tokens[: parts[at]], wanted=wanted, rows=0))
            behind[at] = feed._replace(start=feed.start + parts[at], tokens=rest, wanted=feed.wanted - wanted)
        logits, told = self._run(before).clone(), self.tapped
        late = self._run(behind)
        if self._tells:
            self.tapped = _joined(both, told, [len(each.tokens) for each in before], self.tapped, behind)
        if not any(feed.wanted for feed in before):
            return late
        first = iter(logits.split([max(feed.wanted, 1) for feed in before]))
        rows = [*late.split([max(feed.wanted, 1) for feed in behind])]
        for at, feed in zip(both, before, strict=True):
            own = next(first)
            rows[at] = torch.cat((own, rows[at])) if feed.wanted else rows[at]
        return torch.cat(rows)

    @property
    def _tells(self) -> bool:
        return len(self.taps) > 0 and self.tapping

    def _run(self, feeds: Sequence[Feed]) -> torch.Tensor:
        fed = self._graph.run(feeds)
        if self._tells:
            self.tapped = self._graph.told(TAPPED)[:fed].clone()
        return self._graph.told(LOGITS)


def _joined(
    both: Sequence[int], first: torch.Tensor, counts: Sequence[int], late: torch.Tensor, behind: Sequence[Feed]
) -> torch.Tensor:
    """States of tokens, feed by feed: of the feeds `both` the first ones come before the late ones."""
    states = [*late.split([len(feed.tokens) for feed in behind])]
    for at, own in zip(both, first.split([*counts]), strict=True):
        states[at] = torch.cat((own, states[at]))
    return torch.cat(states)


@cache
def rounds_activations() -> bool:
    """Whether OpenVINO multiplies as an `Int8Linear` that is dynamic, each row as if it were alone.

    Where it does not it says nothing and multiplies floats: without instructions for products of integers (VNNI).
    """
    return all(map(_rounds, PROBE_WIDTHS))


def _rounds(width: int) -> bool:
    wave = torch.arange(width * (width + PROBE_ROWS), dtype=torch.float64).square().mul(0.7).sin().float()
    wave = wave.view(-1, width)
    x, layer = wave[:PROBE_ROWS].clone(), nn.Linear(width, width, bias=False, device="meta")
    layer.weight = nn.Parameter(wave[PROBE_ROWS:].clone(), requires_grad=False)
    x[0, :GROUP] = 0.0
    graph = traced(layer, (x,))
    name_ports(graph, [("x", (-1, width))], ["y"])
    round_weights(graph)
    compiled = CompiledGraph(graph, compile_options(torch.float32, 1, GROUP))

    def product(rows: torch.Tensor) -> torch.Tensor:
        compiled.give("x", rows.numpy())
        compiled.request.infer()
        return torch.tensor(compiled.request.get_tensor("y").data)

    together, expected = product(x), Int8Linear(layer, dynamic=True)(x)
    apart = [torch.cat([product(rows) for rows in x.split(count)]) for count in PROBE_FEEDS]
    off = float((together - expected).abs().max() / expected.abs().max())
    return off <= PROBE_TOLERANCE[torch.float32] and all(torch.equal(together, each) for each in apart)
