"""A causal model as a function of tensors, its KV cache among them: the form in which a graph can be traced."""

from __future__ import annotations

from abc import abstractmethod

import torch
from torch import nn


class Stateless(nn.Module):
    """Attention stays one operation, which runtimes recognise.

    Attributes:
        layers: number of layers; each has keys and values.
        heads, head_size: of keys and values.
    """

    layers: int
    heads: int
    head_size: int

    @abstractmethod
    def forward(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor,
        position_ids: torch.Tensor,
        beam_idx: torch.Tensor,
        *past: torch.Tensor,
    ) -> tuple[torch.Tensor, ...]:
        """Logits of the new tokens, and the cache with them behind `past`.

        Args:
            input_ids, position_ids: (sessions, new tokens).
            attention_mask: (sessions, all tokens), 0 where there is padding.
            beam_idx: (sessions,), which row of `past` each session goes on from.
            past: of each layer in turn keys and values, (sessions, heads, positions, head_size).
        """
        ...


def causal_mask(attention_mask: torch.Tensor, new: int) -> torch.Tensor:
    """Additive (sessions, 1, new, all): of all tokens, the last `new` see those before them that are no padding."""
    whole = attention_mask.shape[1]
    at = torch.arange(whole)
    seen = (at <= at[whole - new :, None]) & (attention_mask[:, None, None, :] > 0)
    return torch.where(seen, 0.0, torch.finfo(torch.float32).min)
