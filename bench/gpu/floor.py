"""The least time of a step: its weights and its keys and values, read once at the speed that this memory reaches."""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch
from transformers import PreTrainedModel

TIMES = 10


@dataclass(frozen=True, slots=True)
class Floor:
    """weight_bytes: read in every forward; position_bytes: keys and values of one position; bandwidth: bytes/s."""

    weight_bytes: int
    position_bytes: int
    bandwidth: float

    def seconds(self, rows: int, positions: int) -> float:
        """Of a forward of `rows` sessions that attend to so many positions each."""
        return (self.weight_bytes + rows * positions * self.position_bytes) / self.bandwidth


def weight_bytes(model: PreTrainedModel) -> int:
    """All weights but the embeddings, of which a forward reads a row for each token."""
    embedding = model.get_input_embeddings().weight
    return sum(each.nbytes for each in model.parameters() if each is not embedding)


def bandwidth(device: torch.device, size: int) -> float:
    """Bytes per second that a copy of `size` bytes reads and writes, the best of a few."""
    source = torch.zeros(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    best = float("inf")
    for _ in range(TIMES):
        wait_for(device)
        began = time.perf_counter()
        target.copy_(source)
        wait_for(device)
        best = min(best, time.perf_counter() - began)
    return 2 * size / best


def wait_for(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
