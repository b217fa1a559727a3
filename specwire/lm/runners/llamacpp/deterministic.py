"""`--deterministic` on llama.cpp: the bits of a row depend on its text alone.

A text has a cache of its own (a stream of llama.cpp's), where its cells lie in order. Flash attention computes each row
over those cells by itself, but for two cases, which are kept from it: one row of one text alone, whose cells it divides
among threads once there are 512, and blocks of 64 rows of a text. Products give rows the same bits where there are as
many as their kernel asks for: 2, or 8 of weights of the kinds Q4_K and Q6_K; the trial at load finds how many. So where
fewer are to be computed others follow them, which are taken out again. A text's prefix is copied to another slot, not
shared with it.

llama.cpp divides what it is fed into parts of equally many rows of successive sequences, and here it is fed such parts.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Any

import torch

from specwire.core.model import Feed
from specwire.lm.kv_cache import Sizes
from specwire.lm.runners.llamacpp.runner import TOGETHER, LlamaCppRunner, LlamaMemory
from specwire.lm.runners.llamacpp.sequences import SequenceRun

# Rows of a text that are computed at once.
MOST_ROWS = 32
# Rows of a forward, at least: what is tried.
LEAST_ROWS = (2, 8, 16)


class SeparateMemory(LlamaMemory):
    """Of sequences that share no cells."""

    def share(self, source: int, target: int, stop: int) -> None:
        self.put(target, self.state(source))
        self.remove(target, stop)


class DeterministicLlamaRunner(LlamaCppRunner):
    """`LlamaCppRunner` without branches, whose cells are counted by sequence: each has as many."""

    alike = True
    leasts = LEAST_ROWS
    least = LEAST_ROWS[0]
    cells = 256
    for_branches = 0
    memory = SeparateMemory

    def _parameters(self, sizes: Sizes, sequences: int, kv_type: str, threads: int) -> Any:
        params = super()._parameters(sizes, sequences, kv_type, threads)
        params.kv_unified = False
        params.flash_attn_type = self._llama.LLAMA_FLASH_ATTN_TYPE_ENABLED
        # No part may be divided once more.
        params.n_batch = params.n_ubatch = max(TOGETHER, sequences)
        return params

    def _most_cells(self, sizes: Sizes) -> int:
        return sizes.context + LEAST_ROWS[-1]

    def _needed(self, feeds: Sequence[Feed]) -> int:
        return max(feed.stop for feed in feeds) + self.least

    def _made(self, cells: int) -> Any:
        self._cells = cells
        self._params.n_ctx = cells * self._params.n_seq_max
        return self._llama.llama_init_from_model(self._weights.model, self._params)

    def _decoded(self, feeds: Sequence[Feed]) -> torch.Tensor:
        (runs,) = self._table.runs(feeds)
        found: list[list[torch.Tensor]] = [[] for _ in runs]
        try:
            for numbers, parts in _parts_of(runs):
                for number, some in zip(numbers, self._rows(parts), strict=True):
                    found[number].append(some)
        except (MemoryError, RuntimeError):
            self._table.lost(runs)
            raise
        return torch.cat([some for rows in found for some in rows])

    def _rows(self, parts: Sequence[SequenceRun]) -> list[torch.Tensor]:
        """Logits of each part, of one forward. Its last products have as many rows as are wanted."""
        least, rows = -(-self.least // len(parts)), len(parts[0].tokens)
        more = max(0, least - rows)
        wanted = [max(least, part.wanted + more) for part in parts]
        fed = [
            part._replace(tokens=[*part.tokens, *[part.tokens[-1]] * more], wanted=count)
            for part, count in zip(parts, wanted, strict=True)
        ]
        found = self._computed(fed).split(wanted)
        if more:
            for part in parts:
                self._memory.remove(part.sequence, part.position + rows)
        return [
            some[count - more - part.wanted : count - more]
            for some, part, count in zip(found, parts, wanted, strict=True)
        ]


def _parts_of(runs: Sequence[SequenceRun]) -> Iterator[tuple[list[int], list[SequenceRun]]]:
    """What is computed together: numbers of the runs, and as many rows of each, of successive sequences."""
    longest = max(len(run.tokens) for run in runs)
    for begin in range(0, longest, MOST_ROWS):
        pieces = [(number, _piece(run, begin)) for number, run in enumerate(runs) if len(run.tokens) > begin]
        pieces.sort(key=lambda piece: (len(piece[1].tokens), piece[1].sequence))
        for (rows, _), some in groupby(
            enumerate(pieces), lambda each: (len(each[1][1].tokens), each[1][1].sequence - each[0])
        ):
            together = [piece for _, piece in some]
            most = max(1, TOGETHER // rows)
            for at in range(0, len(together), most):
                numbers, parts = zip(*together[at : at + most], strict=True)
                yield [*numbers], [*parts]


def _piece(run: SequenceRun, begin: int) -> SequenceRun:
    """MOST_ROWS of it from `begin` on."""
    tokens = run.tokens[begin : begin + MOST_ROWS]
    silent = len(run.tokens) - run.wanted
    wanted = max(0, begin + len(tokens) - max(begin, silent))
    return run._replace(position=run.position + begin, tokens=tokens, wanted=wanted)
