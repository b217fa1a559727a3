"""A second runtime for CPUs: OpenVINO computes the forward of the Llama family.

The weights are those of `runners.decoder`. Rotations are looked up by position, not computed: traced from the model's
own modules, OpenVINO rounds the angles to bfloat16 before it takes their cosine, and far positions are lost.
Each operation also costs when a step has another number of rows than the one before; here are half as many.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import openvino
import torch
from torch import nn
from torch.nn import functional

from specwire.core.model import INT8_DYNAMIC, NONE, Feed
from specwire.lm.kv_cache import Runner
from specwire.lm.model_config import CausalModel
from specwire.lm.rounding import GROUP, Int8Linear
from specwire.lm.runners.decoder import DecoderShape, Layer, Model
from specwire.lm.runners.linear import PROBE_TOLERANCE, LinearWeights
from specwire.lm.runners.llama import shape_of
from specwire.lm.runners.openvino.decoder import TAPPED, DecoderGraph
from specwire.lm.runners.openvino.graph import (
    LOGITS,
    CompiledGraph,
    OverPages,
    PagedGraph,
    Stateless,
    causal_mask,
    compile_options,
    name_ports,
    normed,
    prompt_part,
    repeated,
    round_weights,
    traced,
    without,
)

# Of the products that `rounds_activations` tries: whole groups, and two with a shorter one; more rows than kernels
# block, and how many of them are computed at once.
PROBE_WIDTHS, PROBE_ROWS, PROBE_FEEDS = (4 * GROUP, 2 * GROUP + GROUP // 2), 12, (1, 4)


class OpenvinoDecoder(Stateless):
    """A model of the family, in float32, as a function of tensors."""

    cos: torch.Tensor
    sin: torch.Tensor

    def __init__(
        self, shape: DecoderShape, model: Model, taps: Sequence[int] = (), fuse: nn.Module | None = None
    ) -> None:
        """taps: as `specwire.lm.runners.decoder.Decoder`. fuse: what is told of them; None for themselves.

        OpenVINO computes in float32 what leads to an output, as far back as the next product. So where taps themselves
        are told it does so with the whole residual stream, and a forward takes a quarter longer.
        """
        super().__init__()
        self._fuse = nn.Identity() if fuse is None else fuse
        self._taps, self.told = tuple(taps), (TAPPED,) if taps else ()
        self.layers, self.queries, self.heads, self.head_size, self.epsilon = shape
        angles = model.rotations
        # Signs of the rotation: (a, b) -> (a cos - b sin, b cos + a sin).
        self.register_buffer("cos", torch.cat((angles.real, angles.real), dim=-1))
        self.register_buffer("sin", torch.cat((-angles.imag, angles.imag), dim=-1))
        self._model = model
        self._qkv = [_in_halves(layer.qkv, shape) for layer in model.layers]
        self._head_norms = [_norms_in_halves(layer, shape) for layer in model.layers]

    def forward(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor,
        position_ids: torch.Tensor,
        beam_idx: torch.Tensor,
        *past: torch.Tensor,
    ) -> tuple[torch.Tensor, ...]:
        held = [each.index_select(0, beam_idx) for each in past]
        mask = causal_mask(attention_mask, input_ids.shape[1])
        cos, sin = self.turns(position_ids)
        x = functional.embedding(input_ids, self._model.embedding)
        streams = [x]
        for index, layer in enumerate(self._model.layers):
            query, key, value = self.projected(index, normed(x, layer.attention_norm, self.epsilon), cos, sin)
            for at, fresh in ((2 * index, key), (2 * index + 1, value)):
                held[at] = torch.cat((held[at], fresh), dim=2)
            seen = self.attended(query, held[2 * index], held[2 * index + 1], mask)
            x = self.fed_forward(layer, x, seen)
            streams.append(x)
        tapped = [self._fuse(torch.cat([streams[tap] for tap in self._taps], dim=-1))] if self._taps else []
        return functional.linear(normed(x, self._model.norm, self.epsilon), *self._model.head), *held, *tapped

    def turns(self, position_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosines and sines (sessions, tokens, 1, head_size)."""
        return (
            functional.embedding(position_ids, self.cos).unsqueeze(2),
            functional.embedding(position_ids, self.sin).unsqueeze(2),
        )

    def fed_forward(self, layer: Layer, x: torch.Tensor, seen: torch.Tensor) -> torch.Tensor:
        """What a layer makes of a stream and of what its attention saw."""
        x = x + functional.linear(seen, *layer.output)
        gate, up = functional.linear(normed(x, layer.mlp_norm, self.epsilon), *layer.gate_up).chunk(2, dim=-1)
        return x + functional.linear(functional.silu(gate) * up, *layer.down)

    def projected(
        self, index: int, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Queries, keys and values (sessions, heads, tokens, head_size); the first two turned by their positions."""
        size, turned = self.head_size, self.queries + self.heads
        both, value = functional.linear(x, *self._qkv[index]).split((turned * size, self.heads * size), dim=-1)
        both = both.view(*x.shape[:2], turned, size)
        norm = self._head_norms[index]
        if norm is not None:
            both = normed(both, norm, self.epsilon)
        first, second = both.chunk(2, dim=-1)
        both = both * cos + torch.cat((second, first), dim=-1) * sin
        query, key = both.split((self.queries, self.heads), dim=2)
        value = value.view(*x.shape[:2], self.heads, size)
        return query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)

    def attended(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """(sessions, tokens, queries x head_size). The paged operation undoes the repetition of keys and values."""
        key, value = (repeated(each, self.queries) for each in (key, value))
        seen = functional.scaled_dot_product_attention(query, key, value, attn_mask=mask)
        return seen.transpose(1, 2).reshape(query.shape[0], query.shape[2], self.queries * self.head_size)


def _in_halves(qkv: LinearWeights, shape: DecoderShape) -> LinearWeights:
    """Rows of q and k reordered: dimensions that are rotated together lie half a head apart, not side by side."""
    order = _order(shape)
    return LinearWeights(qkv.weight[order], None if qkv.bias is None else qkv.bias[order])


def _norms_in_halves(layer: Layer, shape: DecoderShape) -> torch.Tensor | None:
    return None if layer.head_norm is None else layer.head_norm[:, _half_order(shape.head_dim)]


def _order(shape: DecoderShape) -> torch.Tensor:
    turned, values = shape.heads + shape.kv_heads, shape.kv_heads
    starts = torch.arange(turned) * shape.head_dim
    first = (starts[:, None] + _half_order(shape.head_dim)).reshape(-1)
    return torch.cat((first, torch.arange(turned * shape.head_dim, (turned + values) * shape.head_dim)))


def _half_order(head_dim: int) -> torch.Tensor:
    """Undoes the order of pairs."""
    return torch.arange(head_dim).view(-1, 2).t().reshape(-1)


class OpenvinoRunner(OverPages, Runner):
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
        decoder = DecoderGraph(model, shape_of(model), context, vocabulary, taps, fuse)
        self.taps, self.tapped = taps, torch.empty(0)
        graph = decoder.graph
        quiet = without(graph, TAPPED) if taps and not _is_product(graph, TAPPED) else None
        group = GROUP if quantization == INT8_DYNAMIC else 0
        self._graph = PagedGraph(graph, slots, context, dtype, threads, quiet=quiet, group=group)
        self._pages, self._decoder = self._graph.pages, decoder

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
        fed = self._graph.run(feeds, telling=self._tells)
        if self._tells:
            self.tapped = self._graph.told(TAPPED)[:fed].clone()
        return self._graph.told(LOGITS)


def _is_product(graph: openvino.Model, output: str) -> bool:
    """Whether a product computes this output, as a head's fused states.

    Then it costs nothing that can be seen (SmolLM2 with the included head: 11.6 ms a row, 14 for four, with and without
    it), while a graph without it has all weights in memory again.
    """
    told: str = graph.output(output).get_node().input_value(0).get_node().get_type_name()
    return told == "MatMul"


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
