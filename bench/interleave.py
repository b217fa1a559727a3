"""Which row runs when: each prompt goes through all rows before the next one, and every row gets every turn.

Slow drift of the machine (heat, neighbours) then falls on all rows alike, as do after-effects of the row before.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from bench.runs import Row, Sample
from specwire.progress import Bar


def schedule(repeats: int, prompts: int, rows: int) -> Iterator[tuple[int, int, int]]:
    """Yield (repeat, prompt, row); the order of the rows rotates from prompt to prompt and from repeat to repeat."""
    for repeat in range(repeats):
        for prompt in range(prompts):
            for turn in range(rows):
                yield repeat, prompt, (turn + prompt + repeat) % rows


def interleave(
    rows: Sequence[Row],
    prompts: Sequence[Sequence[int]],
    tokens: int,
    repeats: int,
    progress: Callable[[Sample], None],
) -> list[Sample]:
    """Every row on every prompt, `repeats` times; `progress` is called after each run's clock has stopped."""
    samples = []
    with Bar("measuring", repeats * len(prompts) * len(rows)) as bar:
        for repeat, prompt, index in schedule(repeats, len(prompts), len(rows)):
            row = rows[index]
            sample = Sample(repeat, prompt, row.key, row.run(prompts[prompt], tokens))
            samples.append(sample)
            progress(sample)
            bar.update(note=f"repeat {repeat + 1} of {repeats}")
    return samples
