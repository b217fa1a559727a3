"""A causal model as an OpenVINO graph, traced once with its KV cache as arguments.

The usual converter reports usage statistics; the frontend below it, which is called here, does not.
"""

from __future__ import annotations

import warnings

import openvino
import torch
from openvino import opset13 as opset
from openvino._offline_transformations import (
    apply_make_stateful_transformation,
    apply_moc_transformations,
    paged_attention_transformation,
)
from openvino.frontend import FrontEndManager
from openvino.frontend.pytorch.ts_decoder import TorchScriptPythonDecoder

from specwire.lm.int8 import rounded
from specwire.lm.stateless import Stateless

TEXT_INPUTS = ("input_ids", "attention_mask", "position_ids", "beam_idx")
ROWS = "rows"


@torch.inference_mode()
def stateful(stateless: Stateless) -> openvino.Model:
    """The graph (input_ids, attention_mask, position_ids, beam_idx) -> logits; its state is the cache.

    The weights, float32, are shared with the module.
    """
    with warnings.catch_warnings():  # tracing fixes what Python decides, as is meant here
        warnings.simplefilter("ignore")
        frontend = FrontEndManager().load_by_framework("pytorch")
        decoder = TorchScriptPythonDecoder(stateless.eval(), example_input=_example(stateless))
        graph = openvino.Model(frontend.convert(frontend.load(decoder)))
    # What the converter does too; the pass that pages the cache needs the shapes that this finds.
    apply_moc_transformations(graph, cf=False, smart_reshape=True)
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


def paged(stateless: Stateless) -> openvino.Model:
    """The graph over a cache in pages (blocks of positions) that the caller owns, logits of chosen rows only.

    Inputs beside the caches: the tokens of all sessions one behind the other (`input_ids`, `position_ids`), where each
    session's begin (`subsequence_begins`) and how much of it is cached (`past_lens`), its pages (`block_indices`,
    `block_indices_begins`), the longest text (`max_context_len`), and of which tokens logits are wanted (`rows`).
    """
    graph = stateful(stateless)
    paged_attention_transformation(graph)
    _select_rows(graph)
    return graph


def round_weights(graph: openvino.Model) -> None:
    """Put integers and scales in the place of each product's weights, as OpenVINO recognises compressed ones."""
    for node in graph.get_ordered_ops():
        source = node.input_value(1).get_node() if node.get_type_name() == "MatMul" else None
        if source is None or source.get_type_name() != "Constant":
            continue
        integers, scale = rounded(torch.tensor(source.data))
        wide = opset.convert(opset.constant(integers.numpy(), dtype=openvino.Type.i8), "f32")
        node.input(1).replace_source_output(opset.multiply(wide, opset.constant(scale.numpy())).output(0))
    graph.validate_nodes_and_infer_types()


def _start_empty(graph: openvino.Model, stateless: Stateless) -> None:
    """Say what the cache is before the first token; the pass that pages the cache looks for this."""
    sessions = opset.gather(opset.shape_of(graph.input("input_ids"), "i64"), opset.constant([0]), opset.constant(0))
    rest = (opset.constant([size]) for size in (stateless.heads, 0, stateless.head_size))
    empty = opset.broadcast(opset.constant(0.0, dtype=openvino.Type.f32), opset.concat([sessions, *rest], axis=0))
    for operation in graph.get_ops():
        if operation.get_type_name() == "ReadValue":
            operation.set_arguments([empty])
    graph.validate_nodes_and_infer_types()


def _select_rows(graph: openvino.Model) -> None:
    """Put a selection of rows before the output layer, whose product is the largest of a forward."""
    rows = opset.parameter([-1], openvino.Type.i32, name=ROWS)
    rows.output(0).get_tensor().set_names({ROWS})
    node = graph.output("logits").get_node()
    while node.get_type_name() != "MatMul":
        node = node.input_value(0).get_node()
    chosen = opset.gather(node.input_value(0), rows, opset.constant(0))
    node.input(0).replace_source_output(chosen.output(0))
    graph.add_parameters([rows])
    graph.validate_nodes_and_infer_types()


def _example(stateless: Stateless) -> tuple[torch.Tensor, ...]:
    """Inputs to trace with: two sessions, four new tokens behind three. A dimension of 1 would become a constant."""
    past = (torch.zeros(2, stateless.heads, 3, stateless.head_size) for _ in range(2 * stateless.layers))
    tokens, beams = torch.zeros(2, 4, dtype=torch.int64), torch.arange(2, dtype=torch.int32)
    # Positions are all 0, which the shortest context has too: values are not traced.
    return tokens, torch.ones(2, 7, dtype=torch.int64), tokens.clone(), beams, *past


def _shape(stateless: Stateless, name: str) -> list[int]:
    """-1: any."""
    if name == "beam_idx":
        return [-1]
    return [-1, -1] if name in TEXT_INPUTS else [-1, stateless.heads, -1, stateless.head_size]
