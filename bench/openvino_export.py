"""A Hugging Face causal model as OpenVINO GenAI reads it: a graph that keeps its KV cache, and a tokenizer."""

from __future__ import annotations

from pathlib import Path

import openvino
import torch
from openvino_tokenizers import convert_tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from bench.stateless import HuggingFaceStateless
from specwire.lm.runners.openvino_graph import stateful


def export(spec: str, folder: Path) -> None:
    """Write the model `spec` (a path or hub id) to a folder. The weights are stored as float32, which loses nothing.

    In which precision they are computed with is said when they are loaded.
    """
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(spec, dtype=torch.float32, attn_implementation="sdpa")
    folder.mkdir()
    openvino.save_model(stateful(HuggingFaceStateless(model)), folder / "openvino_model.xml", compress_to_fp16=False)
    tokenizer, detokenizer = convert_tokenizer(AutoTokenizer.from_pretrained(spec), with_detokenizer=True)
    openvino.save_model(tokenizer, folder / "openvino_tokenizer.xml")
    openvino.save_model(detokenizer, folder / "openvino_detokenizer.xml")
    model.config.save_pretrained(folder)
    model.generation_config.save_pretrained(folder)
