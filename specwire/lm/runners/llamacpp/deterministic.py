"""`--deterministic` on llama.cpp: the bits of a row depend on its text alone.

A text has a cache of its own (a stream of llama.cpp's), where its cells lie in order; each has as many cells as the
longest text needs. Flash attention computes each row over those cells by itself, but for two cases, which are kept from
it: one row of one text alone, whose cells it divides among threads (beyond 256 positions), and blocks of 64 rows of a
text. Products give rows the same bits where their number suits the kernels: two or more, or of weights of the kinds
Q4_K and Q6_K a multiple of four from eight on; the trial at load finds which. So further rows follow those that are to
be computed, and are taken out again. A text's prefix is copied to another slot, not shared with it.

llama.cpp divides what it is fed into parts of equally many rows of successive sequences, each of them a product of its
own; so that these are the ones that were tried, no more than one such part is fed at once.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from specwire.core.model import Feed
from specwire.lm.kv_cache import Sizes
from specwire.lm.runners.llamacpp.runner import TOGETHER, LlamaCppRunner, LlamaMemory
from specwire.lm.runners.llamacpp.sequences import SequenceRun

# Rows of a text that are computed at once.
MOST_ROWS = 32
# A trial's text goes beyond the cells that flash attention takes whole, and its end has such a window.
TRIAL_TOKENS, TRIAL_TAIL = 300, MOST_ROWS + 4
# What is tried as numbers of a forward's rows: at least so many, and multiples.
ROW_COUNTS = ((2, 1), (8, 4), (16, 16))


class SeparateMemory(LlamaMemory):
    """Of sequences that share no cells."""

    def share(self, source: int, target: int, stop: int) -> None:
        """Raises RuntimeError; the target is empty then."""
        try:
            self.put(target, self.state(source))
        except RuntimeError:
            self.remove(target, 0)
            raise
        self.remove(target, stop)


class DeterministicLlamaRunner(LlamaCppRunner):
    """`LlamaCppRunner` without branches, whose cells are counted by sequence: each has as many."""

    alike = True
    widest = MOST_ROWS
    row_counts = ROW_COUNTS
    rows = ROW_COUNTS[0]
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

    @classmethod
    def slot_cells(cls, context: int) -> int:
        """llama.cpp rounds them up."""
        return -(-(context + MOST_ROWS) // cls.cells) * cls.cells

    def _most_cells(self, sizes: Sizes) -> int:
        return self.slot_cells(sizes.context)

    def _needed(self, feeds: Sequence[Feed]) -> int:
        return max(feed.stop for feed in feeds) + MOST_ROWS

    def _made(self, cells: int) -> Any:
        self._cells = cells
        self._params.n_ctx = cells * self._params.n_seq_max
        return self._llama.llama_init_from_model(self._weights.model, self._params)

    def _decoded(self, feeds: Sequence[Feed]) -> torch.Tensor:
        (runs,) = self._table.runs(feeds)
        found: list[list[torch.Tensor]] = [[] for _ in runs]
        try:
            for group in self._forwards(runs):
                for (number, _), rows in zip(group, self._rows_of([part for _, part in group]), strict=True):
                    found[number].append(rows)
        except (MemoryError, RuntimeError):
            self._table.lost(runs)
            raise
        return torch.cat([rows for some in found for rows in some])

    def _forwards(self, runs: Sequence[SequenceRun]) -> Iterator[list[tuple[int, SequenceRun]]]:
        """What is computed together, one behind the other: as many tokens of some runs, with the runs' numbers."""
        for begin in range(0, max(len(run.tokens) for run in runs), MOST_ROWS):
            pieces = [(number, _piece(run, begin)) for number, run in enumerate(runs) if len(run.tokens) > begin]
            pieces.sort(key=lambda piece: (len(piece[1].tokens), piece[1].sequence))
            group: list[tuple[int, SequenceRun]] = []
            for number, piece in pieces:
                if group and not self._joins(group[-1][1], piece, len(group)):
                    yield group
                    group = []
                group.append((number, piece))
            yield group

    def _joins(self, last: SequenceRun, piece: SequenceRun, count: int) -> bool:
        alike = len(piece.tokens) == len(last.tokens) and piece.sequence == last.sequence + 1
        return alike and (count + 1) * self._fed(len(piece.tokens), count + 1) <= TOGETHER

    def _fed(self, rows: int, parts: int) -> int:
        """Rows that are fed of each of so many parts, for these rows."""
        least, multiple = self.rows
        fed = max(rows, -(-least // parts))
        while fed * parts % multiple:
            fed += 1
        return fed

    def _rows_of(self, parts: Sequence[SequenceRun]) -> list[torch.Tensor]:
        """Logits of each part, of one forward. Its last products have as many rows as are wanted: all, or none."""
        rows = len(parts[0].tokens)
        fed = self._fed(rows, len(parts))
        wanted = fed if any(part.wanted for part in parts) else 0
        found = self._computed(
            [part._replace(tokens=[*part.tokens, *[part.tokens[-1]] * (fed - rows)], wanted=wanted) for part in parts]
        )
        if fed > rows:
            for part in parts:
                self._memory.remove(part.sequence, part.position + rows)
        each = found.view(len(parts), wanted, self._weights.width)
        return [some[rows - part.wanted : rows] for some, part in zip(each, parts, strict=True)]


def _piece(run: SequenceRun, begin: int) -> SequenceRun:
    """MOST_ROWS of it from `begin` on."""
    tokens = run.tokens[begin : begin + MOST_ROWS]
    silent = len(run.tokens) - run.wanted
    wanted = max(0, begin + len(tokens) - max(begin, silent))
    return run._replace(position=run.position + begin, tokens=tokens, wanted=wanted)
