"""One attention for several short feeds: what a dozen small operations for each session cost is paid once.

Slots that lie side by side are one stretch of the cache, which is read in place, of every slot as many positions as the
longest text has; a mask hides what is behind each row's own. Where slots lie far apart, or one text is much longer than
the others, that would read more than it saves, and each feed has an attention of its own.
"""

# No postponed annotations here: TorchScript reads them as they stand.

from collections.abc import Sequence
from typing import NamedTuple

import torch

from specwire.lm.interface import Feed

LEAST_FEEDS = 2
# Tokens of a feed: windows, and the ends of prompts.
MOST_COLUMNS = 32
# Positions that are read, as a multiple of those that there are.
MOST_WASTE = 4


class Batch(NamedTuple):
    """The first `feeds` of a forward, which have `rows` tokens, in B slots from `first` on; M columns, L positions.

    places: (rows x 2 kv_heads,) where their keys and values go among a layer's (slots x 2 kv_heads x context) vectors.
    cells: (rows,) where each row stands among B x M. mask: additive (B, 1, M x group, L), each column `group` times.
    """

    feeds: int
    rows: int
    first: int
    slots: int
    columns: int
    span: int
    places: torch.Tensor
    cells: torch.Tensor
    mask: torch.Tensor
    straight: bool


class Layout(NamedTuple):
    """Of a cache (layers, slots, 2 kv_heads, context, head_dim): kv = 2 kv_heads; group: queries of each key head."""

    kv: int
    context: int
    group: int
    dtype: torch.dtype
    device: torch.device


def nothing(layout: Layout) -> Batch:
    """No feed is computed together with another."""
    indices = torch.empty(0, dtype=torch.long, device=layout.device)
    mask = torch.empty(0, dtype=layout.dtype, device=layout.device)
    return Batch(0, 0, 0, 0, 0, 0, indices, indices, mask, True)


def leading(feeds: Sequence[Feed]) -> int:
    """How many of the first feeds, no two of a slot, are worth one attention; 0 for none."""
    count = next((at for at, feed in enumerate(feeds) if len(feed.tokens) > MOST_COLUMNS), len(feeds))
    if count < LEAST_FEEDS:
        return 0
    slots, stops = [feed.slot for feed in feeds[:count]], [feed.stop for feed in feeds[:count]]
    read = (max(slots) - min(slots) + 1) * max(stops)
    return count if read <= MOST_WASTE * sum(stops) else 0


def batch_of(feeds: Sequence[Feed], layout: Layout) -> Batch:
    """The first feeds as one; see `leading`."""
    count = leading(feeds)
    if count == 0:
        return nothing(layout)
    chosen = feeds[:count]
    first = min(feed.slot for feed in chosen)
    slots = max(feed.slot for feed in chosen) - first + 1
    columns, span = max(len(feed.tokens) for feed in chosen), max(feed.stop for feed in chosen)
    at = [(feed, index) for feed in chosen for index in range(len(feed.tokens))]
    cells = [(feed.slot - first) * columns + index for feed, index in at]
    positions = [feed.start + index for feed, index in at]
    vectors = [feed.slot * layout.kv * layout.context + feed.start + index for feed, index in at]
    # What stands in no cell sees position 0 of its slot, and is dropped: a row that sees nothing would not be finite.
    last = [0] * (slots * columns)
    for cell, position in zip(cells, positions, strict=True):
        last[cell] = position
    heads = torch.arange(layout.kv, device=layout.device) * layout.context
    return Batch(
        count,
        len(at),
        first,
        slots,
        columns,
        span,
        (torch.tensor(vectors, device=layout.device).unsqueeze(1) + heads).flatten(),
        torch.tensor(cells, device=layout.device),
        _mask(torch.tensor(last, device=layout.device).view(slots, columns, 1), span, layout),
        cells == list(range(slots * columns)),
    )


def _mask(last: torch.Tensor, span: int, layout: Layout) -> torch.Tensor:
    """Additive (B, 1, M x group, L) from the last position that each cell sees (B, M, 1)."""
    hidden = torch.arange(span, device=last.device) > last
    mask = torch.zeros(hidden.shape, dtype=layout.dtype, device=last.device).masked_fill_(hidden, float("-inf"))
    return mask.repeat_interleave(layout.group, dim=1).unsqueeze(1)
