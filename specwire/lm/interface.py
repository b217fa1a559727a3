"""The interface of a language model that computes tensors, as services use it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from specwire.core.model import Feed, SlotModel


class LanguageModel(SlotModel, Protocol):
    """A causal language model whose rows are logits."""

    def forward(self, feeds: Sequence[Feed]) -> torch.Tensor:
        """Feed tokens of several slots in one pass.

        Returns:
            float32 logits (sum of wanted, vocabulary) on the model's device, in the order of the feeds.

        Raises:
            ValueError: a feed is invalid; nothing was fed.
        """
        ...
