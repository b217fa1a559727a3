"""What the two trainings share: the models' shape and loss."""

from __future__ import annotations

import sys

import torch
from torch import nn
from transformers import LlamaConfig, PreTrainedModel

from demo_pair.train.data import VOCABULARY
from specwire.progress import LAST_LINE


def pair_config(*, width: int, inner: int, layers: int, heads: int) -> LlamaConfig:
    """The common configuration of target and drafter, without their sizes."""
    return LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=width,
        intermediate_size=inner,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=2,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        bos_token_id=0,
        eos_token_id=0,
    )


def tell(line: str) -> None:
    """A line of the training's record, on stdout; above the bar where there is one."""
    LAST_LINE.say(line, sys.stdout)


def logits_of(model: PreTrainedModel, ids: torch.Tensor) -> torch.Tensor:
    """(rows, length, vocabulary) logits in float32, computed under bfloat16 autocast."""
    with torch.autocast(ids.device.type, torch.bfloat16):
        logits: torch.Tensor = model(input_ids=ids, use_cache=False).logits
    return logits.float()


def next_token_loss(model: PreTrainedModel, windows: torch.Tensor) -> torch.Tensor:
    """Mean cross-entropy (nats per token) of the windows' next tokens."""
    logits = logits_of(model, windows[:, :-1])
    return nn.functional.cross_entropy(logits.flatten(0, 1), windows[:, 1:].flatten())


@torch.no_grad()
def held_out_loss(model: PreTrainedModel, windows: torch.Tensor, rows: int = 8) -> float:
    model.eval()
    losses = [next_token_loss(model, part).item() * len(part) for part in windows.split(rows)]
    model.train()
    return sum(losses) / len(windows)
