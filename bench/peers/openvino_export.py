"""Writes a model as OpenVINO GenAI reads it: python -m bench.peers.openvino_export MODEL FOLDER PACKAGES.

A graph that keeps its KV cache, with the weights as float32, which loses nothing. In which precision they are computed
with is said when they are loaded. Its tokenizer is converted by a package of OpenVINO's that lies in the environment of
the libraries, whose folder of packages is named last.
"""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import openvino
import torch
from openvino import opset13 as opset
from openvino._offline_transformations import apply_make_stateful_transformation
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer, Cache, PreTrainedModel

from specwire.lm.runners.openvino.graph import LOGITS, name_ports, traced

INPUTS = ("input_ids", "attention_mask", "position_ids", "beam_idx")
# Sessions and new tokens that the graph is traced with. A dimension of 1 would become a constant.
SESSIONS, NEW = 2, 4


class GivenCache(Cache):
    """Holds what came before, (sessions, heads, positions, size) for each layer's keys and values in turn."""

    def __init__(self, past: tuple[torch.Tensor, ...]) -> None:
        super().__init__(layers=[])
        self.tensors = list(past)

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *_: object, **__: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        for index, new in ((2 * layer_idx, key_states), (2 * layer_idx + 1, value_states)):
            self.tensors[index] = torch.cat((self.tensors[index], new), dim=2)
        return self.tensors[2 * layer_idx], self.tensors[2 * layer_idx + 1]


class Stateless(nn.Module):
    """The model itself, its modules unchanged, whose KV cache comes in and goes out as plain tensors."""

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self.model = model

    def forward(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor,
        position_ids: torch.Tensor,
        beam_idx: torch.Tensor,
        *past: torch.Tensor,
    ) -> tuple[torch.Tensor, ...]:
        """attention_mask: (sessions, all tokens), 0 for padding. beam_idx: which row of `past` each goes on from."""
        cache = GivenCache(tuple(each.index_select(0, beam_idx) for each in past))
        at = torch.arange(attention_mask.shape[1])
        seen = (at <= at[attention_mask.shape[1] - input_ids.shape[1] :, None]) & (attention_mask[:, None, None, :] > 0)
        result = self.model(
            input_ids=input_ids,
            attention_mask=torch.where(seen, 0.0, torch.finfo(torch.float32).min),
            position_ids=position_ids,
            past_key_values=cache,
            use_cache=True,
        )
        return (result.logits, *cache.tensors)


def stateful(model: PreTrainedModel) -> openvino.Model:
    """The graph (INPUTS) -> logits, whose state is the cache, empty before the first token."""
    config = model.config
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    caches = range(2 * config.num_hidden_layers)
    tokens, beams = torch.zeros(SESSIONS, NEW, dtype=torch.int64), torch.arange(SESSIONS, dtype=torch.int32)
    before = (torch.zeros(SESSIONS, heads, 3, size) for _ in caches)
    mask = torch.ones(SESSIONS, 3 + NEW, dtype=torch.int64)
    graph = traced(Stateless(model), (tokens, mask, tokens.clone(), beams, *before))
    past, present = ([f"{name}.{index}" for index in caches] for name in ("past", "present"))
    given = [(name, [-1] if name == "beam_idx" else [-1, -1]) for name in INPUTS]
    name_ports(graph, [*given, *((name, [-1, heads, -1, size]) for name in past)], [LOGITS, *present])
    apply_make_stateful_transformation(graph, dict(zip(past, present, strict=True)))
    sessions = opset.gather(opset.shape_of(graph.input("input_ids"), "i64"), opset.constant([0]), opset.constant(0))
    shape = opset.concat([sessions, *(opset.constant([length]) for length in (heads, 0, size))], axis=0)
    empty = opset.broadcast(opset.constant(0.0, dtype=openvino.Type.f32), shape)
    for operation in graph.get_ops():
        if operation.get_type_name() == "ReadValue":
            operation.set_arguments([empty])
    graph.validate_nodes_and_infer_types()
    return graph


def main() -> int:
    spec, folder = sys.argv[1], Path(sys.argv[2])
    sys.path.append(sys.argv[3])  # behind our own: of what both have, ours is taken
    convert = importlib.import_module("openvino_tokenizers").convert_tokenizer
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(spec, dtype=torch.float32, attn_implementation="sdpa")
    folder.mkdir()
    openvino.save_model(stateful(model), folder / "openvino_model.xml", compress_to_fp16=False)
    tokenizer, detokenizer = convert(AutoTokenizer.from_pretrained(spec), with_detokenizer=True)
    openvino.save_model(tokenizer, folder / "openvino_tokenizer.xml")
    openvino.save_model(detokenizer, folder / "openvino_detokenizer.xml")
    model.config.save_pretrained(folder)
    model.generation_config.save_pretrained(folder)
    return 0


if __name__ == "__main__":
    sys.exit(main())
