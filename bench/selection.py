"""The fastest of a peer's settings takes part: a pass over some prompts decides before the measurement."""

from __future__ import annotations

from collections.abc import Sequence

from bench.results import VariantResult
from bench.runs import Row
from specwire.rpc.process import say

PROMPTS = 8
WARM_UP_PROMPTS = 2


def warm_up(rows: Sequence[Row], prompts: Sequence[Sequence[int]], tokens: int) -> None:
    for row in rows:
        for prompt in prompts[:WARM_UP_PROMPTS]:
            row.run(prompt, tokens)


def fastest(rows: Sequence[Row], prompts: Sequence[Sequence[int]], tokens: int) -> tuple[list[VariantResult], Row]:
    """What each row reaches on the first prompts, and the one with the most tokens per second."""
    prompts = prompts[:PROMPTS]
    decided = len(prompts) * tokens
    speeds: list[tuple[float, float]] = []  # tokens per second, per forward
    for row in rows:
        warm_up([row], prompts[:1], tokens)
        runs = [row.run(prompt, tokens) for prompt in prompts]
        speeds.append((decided / sum(run.seconds for run in runs), decided / sum(run.forwards for run in runs)))
        say(f"bench: {row.label}: {speeds[-1][0]:.1f} tokens/s")
    best = max(range(len(rows)), key=lambda index: speeds[index][0])
    found = [VariantResult(row.label, *speeds[index], index == best) for index, row in enumerate(rows)]
    return found, rows[best]
