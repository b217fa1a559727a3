"""Time per step: a forward of several sessions' windows, and the greedy choice at every row."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from transformers import PreTrainedModel

from bench.harness.interleave import schedule
from bench.harness.interval import Estimate, estimate
from specwire.core.law.acceptance import RowSampling
from specwire.core.law.sampling import Sampling
from specwire.lm import Feed, LanguageModel
from specwire.lm.law.sampler import choose

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


GREEDY = Sampling(temperature=0.0)
# Of each shape in a repeat, after one that does not count.
STEPS = 10


@dataclass(frozen=True, slots=True)
class StepLine:
    """rows: sessions; window: positions of each. floor_ms: see Floor."""

    rows: int
    window: int
    ms: Estimate
    floor_ms: float
    to_floor: Estimate


def measure_steps(
    lm: LanguageModel, text: Sequence[int], shapes: Sequence[tuple[int, int]], repeats: int, floor: Floor
) -> list[StepLine]:
    """All shapes in turn; each feeds the end of the text behind the rest of it."""
    prefix = len(text) - max(window for _, window in shapes)
    _fill(lm, text[:prefix], max(rows for rows, _ in shapes))
    times: dict[tuple[int, int], list[float]] = {shape: [] for shape in shapes}
    for _, _, index in schedule(repeats, 1, len(shapes)):
        rows, window = shapes[index]
        _step(lm, text, prefix, rows, window)
        seconds = [_step(lm, text, prefix, rows, window) for _ in range(STEPS)]
        times[shapes[index]].append(sorted(seconds)[len(seconds) // 2])
    for slot in range(lm.slots):
        lm.discard(slot)
    return [_line(shape, seconds, floor.seconds(shape[0], prefix + shape[1])) for shape, seconds in times.items()]


def _fill(lm: LanguageModel, text: Sequence[int], rows: int) -> None:
    lm.forward([Feed(0, 0, text, 0)])
    for slot in range(1, rows):
        lm.copy(0, slot, len(text))


def _step(lm: LanguageModel, text: Sequence[int], prefix: int, rows: int, window: int) -> float:
    """Seconds. The choice waits for the device."""
    tokens = text[prefix : prefix + window]
    began = time.perf_counter()
    logits = lm.forward([Feed(slot, prefix, tokens, window) for slot in range(rows)])
    choose(logits, [RowSampling(prefix + 1 + at, GREEDY) for _ in range(rows) for at in range(window)])
    return time.perf_counter() - began


def _line(shape: tuple[int, int], seconds: Sequence[float], floor: float) -> StepLine:
    to_floor = estimate([each / floor for each in seconds])
    return StepLine(*shape, estimate([1e3 * each for each in seconds]), 1e3 * floor, to_floor)
