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
from transformers import AutoModelForCausalLM, AutoTokenizer, Cache, PreTrainedModel

from specwire.lm.runners.openvino.graph import Stateless, causal_mask, stateful


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


class HuggingFaceStateless(Stateless):
    """The model itself, its modules unchanged, whose KV cache comes in and goes out as plain tensors."""

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self.model = model
        config = model.config
        self.layers = config.num_hidden_layers
        self.heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
        self.head_size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads

    def forward(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor,
        position_ids: torch.Tensor,
        beam_idx: torch.Tensor,
        *past: torch.Tensor,
    ) -> tuple[torch.Tensor, ...]:
        cache = GivenCache(tuple(each.index_select(0, beam_idx) for each in past))
        result = self.model(
            input_ids=input_ids,
            attention_mask=causal_mask(attention_mask, input_ids.shape[1]),
            position_ids=position_ids,
            past_key_values=cache,
            use_cache=True,
        )
        return (result.logits, *cache.tensors)


def main() -> int:
    spec, folder = sys.argv[1], Path(sys.argv[2])
    sys.path.append(sys.argv[3])  # behind our own: of what both have, ours is taken
    convert = importlib.import_module("openvino_tokenizers").convert_tokenizer
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(spec, dtype=torch.float32, attn_implementation="sdpa")
    folder.mkdir()
    openvino.save_model(stateful(HuggingFaceStateless(model)), folder / "openvino_model.xml", compress_to_fp16=False)
    tokenizer, detokenizer = convert(AutoTokenizer.from_pretrained(spec), with_detokenizer=True)
    openvino.save_model(tokenizer, folder / "openvino_tokenizer.xml")
    openvino.save_model(detokenizer, folder / "openvino_detokenizer.xml")
    model.config.save_pretrained(folder)
    model.generation_config.save_pretrained(folder)
    return 0


if __name__ == "__main__":
    sys.exit(main())
