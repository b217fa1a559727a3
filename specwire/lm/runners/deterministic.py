"""`--deterministic`: the bits of a row depend on its text alone, not on how many are computed together, or with whom.

Floating-point sums depend on their order, and kernels choose it by shape. So the row of position p is computed in
shapes that p alone determines: its attention is one query over p + 1 keys. Only the matrix products, which read all of
the weights, are shared by several rows. Their block sizes are those for which the kernels of this machine were found to
give each row the same bits at every place in the block. Where none were found each row is computed alone, which is
right by construction. A prompt is fed the same way, so a text that another verifier of this kind prefills goes on with
the same bits.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from specwire.core.model import Feed
from specwire.lm.kv_cache import Runner, StoredSlots
from specwire.lm.linear import LinearWeights

# Block sizes that are tried, and the size that the others are compared with, which any step can use.
WIDTHS = (1, 2, 4, 8, 16, 32, 64)
REFERENCE = 8
ALONE = (1,)
# Rows computed for the comparison, and by how many they are shifted in their blocks.
ROWS, SHIFT = 192, 5


class DeterministicRunner(StoredSlots, Runner):
    """`Runner` that feeds another one single rows, in blocks of the given numbers of them.

    That other runner must take several feeds of one slot in order, and compute all but matrix products row by row;
    it has a slot more than this one, number `spare`, for the rows that fill a block up. With blocks of one row neither
    is asked of it.
    """

    alike = True

    def __init__(self, runner: Runner, widths: Sequence[int], spare: int) -> None:
        self.runner = self.store = runner
        self.widths = tuple(sorted(widths))
        self._filler = Feed(spare, 0, (0,), 1)

    def run(self, feeds: Sequence[Feed]) -> torch.Tensor:
        rows = [
            Feed(feed.slot, feed.start + index, (token,), 1)
            for feed in feeds
            for index, token in enumerate(feed.tokens)
        ]
        widest = self.widths[-1]
        logits = torch.cat([self._run(rows[begin : begin + widest]) for begin in range(0, len(rows), widest)])
        kept = [index >= len(feed.tokens) - max(feed.wanted, 1) for feed in feeds for index in range(len(feed.tokens))]
        return logits[torch.tensor(kept, device=logits.device)]

    def _run(self, block: Sequence[Feed]) -> torch.Tensor:
        width = next(width for width in self.widths if width >= len(block))
        return self.runner.run([*block, *[self._filler] * (width - len(block))])[: len(block)]


@torch.inference_mode()
def agreeing_widths(multiply: nn.Module, layers: Sequence[LinearWeights], dtype: torch.dtype) -> tuple[int, ...]:
    """Those of WIDTHS whose blocks give each row the bits that REFERENCE gives it, by trial, or ALONE.

    A kernel's order of summation depends on shapes, so one layer of each shape is tried, on random numbers: another
    order shows in some of the thousands of sums.
    """
    shapes = {(tuple(layer.weight.shape), layer.bias is None): layer for layer in layers}
    widths: tuple[int, ...] = WIDTHS
    for layer in shapes.values():
        widths = tuple(width for width in widths if width in _agreeing(multiply, layer, dtype))
    return widths or ALONE


def _agreeing(multiply: nn.Module, layer: LinearWeights, dtype: torch.dtype) -> tuple[int, ...]:
    source = torch.Generator().manual_seed(0)
    rows = torch.randn(ROWS, layer.weight.shape[1], generator=source).to(dtype)
    expected = _in_blocks(multiply, layer, rows, REFERENCE)
    shifted = _in_blocks(multiply, layer, rows.roll(SHIFT, 0), REFERENCE).roll(-SHIFT, 0)
    if not torch.equal(shifted, expected):
        return ()
    return tuple(width for width in WIDTHS if torch.equal(_in_blocks(multiply, layer, rows, width), expected))


def _in_blocks(multiply: nn.Module, layer: LinearWeights, rows: torch.Tensor, width: int) -> torch.Tensor:
    return torch.cat([multiply(block, *layer) for block in rows.split(width)])
