"""A Hugging Face causal model as OpenVINO GenAI reads it: a graph that keeps its KV cache, and a tokenizer."""

from __future__ import annotations

import warnings
from pathlib import Path

import openvino
import torch
from openvino import opset13 as opset
from openvino._offline_transformations import apply_make_stateful_transformation
from openvino_tokenizers import convert_tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from bench.stateless import Stateless

TEXT_INPUTS = ("input_ids", "attention_mask", "position_ids", "beam_idx")


def export(spec: str, folder: Path) -> None:
    """Write the model `spec` (a path or hub id) to a folder. The weights are stored as float32, which loses nothing.

    In which precision they are computed with is said when they are loaded.
    """
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(spec, dtype=torch.float32, attn_implementation="sdpa")
    folder.mkdir()
    openvino.save_model(_graph(model), folder / "openvino_model.xml", compress_to_fp16=False)
    tokenizer, detokenizer = convert_tokenizer(AutoTokenizer.from_pretrained(spec), with_detokenizer=True)
    openvino.save_model(tokenizer, folder / "openvino_tokenizer.xml")
    openvino.save_model(detokenizer, folder / "openvino_detokenizer.xml")
    model.config.save_pretrained(folder)
    model.generation_config.save_pretrained(folder)


@torch.inference_mode()
def _graph(model: PreTrainedModel) -> openvino.Model:
    stateless = Stateless(model.eval())
    with warnings.catch_warnings():  # tracing fixes what Python decides, as is meant here
        warnings.simplefilter("ignore")
        graph = openvino.convert_model(stateless, example_input=_example(stateless))
    past = [f"past.{index}" for index in range(2 * stateless.layers)]
    present = [f"present.{index}" for index in range(2 * stateless.layers)]
    for port, name in zip(graph.inputs, (*TEXT_INPUTS, *past), strict=True):
        port.get_tensor().set_names({name})
        port.get_node().set_partial_shape(openvino.PartialShape(_shape(stateless, name)))
    for port, name in zip(graph.outputs, ("logits", *present), strict=True):
        port.get_tensor().set_names({name})
    graph.validate_nodes_and_infer_types()
    apply_make_stateful_transformation(graph, dict(zip(past, present, strict=True)))
    _start_empty(graph, stateless)
    return graph


def _start_empty(graph: openvino.Model, stateless: Stateless) -> None:
    """Say what the cache is before the first token; the runtime's pass that pages the cache looks for this."""
    sessions = opset.gather(opset.shape_of(graph.input("input_ids"), "i64"), opset.constant([0]), opset.constant(0))
    rest = (opset.constant([size]) for size in (stateless.heads, 0, stateless.head_size))
    empty = opset.broadcast(opset.constant(0.0, dtype=openvino.Type.f32), opset.concat([sessions, *rest], axis=0))
    for operation in graph.get_ops():
        if operation.get_type_name() == "ReadValue":
            operation.set_arguments([empty])
    graph.validate_nodes_and_infer_types()


def _example(stateless: Stateless) -> tuple[torch.Tensor, ...]:
    """Inputs to trace with: two sessions, four new tokens behind three. A dimension of 1 would become a constant."""
    past = (torch.zeros(2, stateless.heads, 3, stateless.head_size) for _ in range(2 * stateless.layers))
    positions = torch.arange(3, 7).repeat(2, 1)
    beams = torch.arange(2, dtype=torch.int32)
    return torch.zeros(2, 4, dtype=torch.int64), torch.ones(2, 7, dtype=torch.int64), positions, beams, *past


def _shape(stateless: Stateless, name: str) -> list[int]:
    """-1: any."""
    if name == "beam_idx":
        return [-1]
    return [-1, -1] if name in TEXT_INPUTS else [-1, stateless.heads, -1, stateless.head_size]
