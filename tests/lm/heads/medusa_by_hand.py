"""Files of Medusa and Hydra as others write them, with random tensors, and a plain loop by the names in them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch.nn.functional import silu
from transformers import PreTrainedModel

from tests.lm import models

HIDDEN, HEADS, LAYERS = 32, 3, 2
Tensors = dict[str, torch.Tensor]


def random_of(*shape: int) -> torch.Tensor:
    return torch.randn(*shape) * 0.3


def original() -> tuple[dict[str, Any], Tensors, str]:
    """As FasterDecoding/Medusa keeps it."""
    tensors: Tensors = {}
    for head in range(HEADS):
        for layer in range(LAYERS):
            tensors[f"{head}.{layer}.linear.weight"] = random_of(HIDDEN, HIDDEN)
            tensors[f"{head}.{layer}.linear.bias"] = random_of(HIDDEN)
        tensors[f"{head}.{LAYERS}.weight"] = random_of(models.VOCABULARY, HIDDEN)
    config = {"medusa_num_heads": HEADS, "medusa_num_layers": LAYERS, "base_model_name_or_path": "a target"}
    return config, tensors, "medusa_lm_head.safetensors"


def vllm(**more: Any) -> tuple[dict[str, Any], Tensors, str]:
    """As vLLM reads it."""
    tensors: Tensors = {}
    for head in range(HEADS):
        for layer in range(LAYERS):
            tensors[f"blocks.{head}.layers.{layer}.weight"] = random_of(HIDDEN, HIDDEN)
            if more.get("medusa_fc_bias"):
                tensors[f"blocks.{head}.layers.{layer}.bias"] = random_of(HIDDEN)
        tensors[f"lm_heads.{head}.weight"] = random_of(models.VOCABULARY, HIDDEN)
    sizes = {"model_type": "medusa", "hidden_size": HIDDEN, "vocab_size": models.VOCABULARY}
    return {**sizes, "num_heads": HEADS, "num_hidden_layers": LAYERS, **more}, tensors, "model.safetensors"


def vllm_shared() -> tuple[dict[str, Any], Tensors, str]:
    """One output layer for all heads: the shape of blockwise parallel decoding."""
    config, tensors, name = vllm(original_lm_head=True)
    shared = tensors["lm_heads.0.weight"]
    kept = {own: tensor for own, tensor in tensors.items() if not own.startswith("lm_heads.")}
    return config, {**kept, "lm_head.weight": shared}, name


def vllm_truncated() -> tuple[dict[str, Any], Tensors, str]:
    config, tensors, name = vllm(truncated_vocab_size=20, logit_scale=0.5, medusa_fc_bias=True)
    ids = torch.arange(20) * 2 + 3
    for head in range(1, HEADS):  # of the first head all rows are kept
        tensors[f"lm_heads.{head}.weight"] = tensors[f"lm_heads.{head}.weight"][ids]
    return config, {**tensors, "token_map": ids}, name


def hydra(grounded: bool = True, offset: int = 0) -> tuple[dict[str, Any], Tensors, str]:
    """As zankner/Hydra keeps it; the target's embedding is in its files too."""
    tensors: Tensors = {"input_embed_fn.weight": random_of(models.VOCABULARY, HIDDEN)}
    for head in range(HEADS):
        for layer in range(LAYERS):
            width = HIDDEN * (head + 2) if grounded and layer == 0 else HIDDEN
            tensors[f"hydra_mlp.{head}.{layer}.linear.weight"] = random_of(HIDDEN, width)
            tensors[f"hydra_mlp.{head}.{layer}.linear.bias"] = random_of(HIDDEN)
            if width > HIDDEN:
                tensors[f"hydra_mlp.{head}.{layer}.res_connection.weight"] = random_of(HIDDEN, width)
                tensors[f"hydra_mlp.{head}.{layer}.res_connection.bias"] = random_of(HIDDEN)
        tensors[f"hydra_lm_head.{head}.weight"] = random_of(models.VOCABULARY, HIDDEN)
        tensors[f"hydra_lm_head.{head}.bias"] = random_of(models.VOCABULARY)
    config = {"hydra_num_heads": HEADS, "hydra_num_layers": LAYERS, "hydra_head_arch": "mlp"}
    return {**config, "grounded_heads": grounded, "hidden_state_offset": offset}, tensors, "hydra_lm_head.safetensors"


FORMATS: dict[str, Callable[[], tuple[dict[str, Any], Tensors, str]]] = {
    "medusa": original,
    "medusa-vllm": vllm,
    "medusa-vllm-shared": vllm_shared,
    "medusa-vllm-truncated": vllm_truncated,
    "hydra": hydra,
    "hydra-ungrounded": lambda: hydra(grounded=False),
    "hydra-earlier": lambda: hydra(offset=1),
}


def written(folder: Path, config: dict[str, Any], tensors: Tensors, name: str) -> None:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file({own: tensor.contiguous() for own, tensor in tensors.items()}, folder / name)


@torch.no_grad()
def state_of(target: PreTrainedModel, config: dict[str, Any], text: list[int]) -> torch.Tensor:
    """Behind the last token but one, as transformers tells it: the last state it tells is behind the norm."""
    told = target(input_ids=torch.tensor([text[:-1]]), output_hidden_states=True, use_cache=False).hidden_states
    state: torch.Tensor = told[-1 - config.get("hidden_state_offset", 0)][0, -1]
    return state


def logits_of(
    target: PreTrainedModel, config: dict[str, Any], tensors: Tensors, head: int, state: torch.Tensor, tokens: list[int]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Of one head, by the names of its file, and the ids that they are of. tokens: those behind the state's."""
    x = state
    if config.get("grounded_heads"):
        embedding = target.get_parameter(models.EMBEDDING).detach()
        x = torch.cat([state, *(embedding[token] for token in tokens[: head + 1])])
    for layer in range(LAYERS):
        names = (f"{head}.{layer}.linear", f"blocks.{head}.layers.{layer}", f"hydra_mlp.{head}.{layer}.linear")
        (name,) = (name for name in names if f"{name}.weight" in tensors)
        inner = tensors[f"{name}.weight"] @ x + tensors.get(f"{name}.bias", torch.zeros(HIDDEN))
        through = f"hydra_mlp.{head}.{layer}.res_connection"
        if f"{through}.weight" in tensors:
            x = tensors[f"{through}.weight"] @ x + tensors[f"{through}.bias"]
        x = x + silu(inner)
    last = (f"{head}.{LAYERS}", f"lm_heads.{head}", f"hydra_lm_head.{head}", "lm_head")
    name = next(name for name in last if f"{name}.weight" in tensors)
    ids, weight = torch.arange(models.VOCABULARY), tensors[f"{name}.weight"]
    if "token_map" in tensors:
        ids = tensors["token_map"]
        weight = weight[ids] if len(weight) > len(ids) else weight
    logits = weight @ x
    if f"{name}.bias" in tensors:
        logits = logits + tensors[f"{name}.bias"]
    return logits * config.get("logit_scale", 1.0), ids


def expected(
    target: PreTrainedModel, config: dict[str, Any], tensors: Tensors, text: list[int], depth: int
) -> list[int]:
    state, tokens = state_of(target, config, text), text[-1:]
    for head in range(min(depth, HEADS)):
        logits, ids = logits_of(target, config, tensors, head, state, tokens)
        tokens = [*tokens, int(ids[logits.argmax()])]
    return tokens[1:]
