"""What the two trainings share: the models' shape, optimisers, schedule and loss."""

from __future__ import annotations

import sys
from dataclasses import dataclass

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


@dataclass(frozen=True)
class Schedule:
    """Warm-up, constant, then linear decay to zero: the decay can start from any checkpoint of the constant part."""

    peak: float
    warmup: int
    steps: int
    decay: int

    def rate(self, step: int) -> float:
        """Learning rate of 0-based `step`."""
        rising = (step + 1) / self.warmup
        falling = (self.steps - step) / self.decay
        return self.peak * min(1.0, rising, falling)


class Optimiser:
    """Muon (Jordan et al. 2024) for the layers' matrices, AdamW for embeddings and norms, one learning rate.

    Invariant: every trainable parameter belongs to exactly one of the two.
    """

    def __init__(self, model: nn.Module, schedule: Schedule) -> None:
        self.schedule = schedule
        named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
        matrices = [p for name, p in named if p.ndim == 2 and "embed" not in name]
        others = [p for name, p in named if p.ndim != 2 or "embed" in name]
        self.parameters = matrices + others
        self.optimisers: list[torch.optim.Optimizer] = [
            torch.optim.Muon(matrices, lr=schedule.peak, weight_decay=0.1, adjust_lr_fn="match_rms_adamw"),
            torch.optim.AdamW(others, lr=schedule.peak, betas=(0.9, 0.95), weight_decay=0.0),
        ]

    def step(self, index: int) -> None:
        torch.nn.utils.clip_grad_norm_(self.parameters, 1.0)
        for optimiser in self.optimisers:
            for group in optimiser.param_groups:
                group["lr"] = self.schedule.rate(index)
            optimiser.step()
            optimiser.zero_grad(set_to_none=True)

    def state(self) -> list[dict[str, object]]:
        return [o.state_dict() for o in self.optimisers]

    def load(self, state: list[dict[str, object]]) -> None:
        for optimiser, saved in zip(self.optimisers, state, strict=True):
            optimiser.load_state_dict(saved)


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
