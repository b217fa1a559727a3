"""When memory is short for a forward: smaller ones are tried before a session is given up."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from specwire.core.scheduler import PREFILL_ROWS
from specwire.core.shares import Share
from specwire.lm.memory import out_of_memory

# Chunks of a prompt that are not cut any smaller.
LEAST_CHUNK = 32
MESSAGE = "the target's forward ran out of memory"


class ShortOfMemory(Exception):
    """Of a forward that decided nothing."""


@contextmanager
def watched() -> Iterator[None]:
    """Within it, an allocator's failure becomes ShortOfMemory, whatever the runtime raises for one."""
    try:
        yield
    except Exception as error:
        if out_of_memory(error):
            raise ShortOfMemory(str(error)) from error
        raise


class Budget:
    """What a forward takes at most; less once it ran out of memory, and for good: what is free does not grow.

    prefill_rows: tokens of waiting prompts. most_rows: in all, as far as draft tokens are concerned.
    """

    def __init__(self) -> None:
        self.prefill_rows = PREFILL_ROWS
        self.most_rows = math.inf

    def lower(self, shares: Sequence[Share]) -> bool:
        """A forward of `shares` was too large. Whether the next one will be smaller."""
        widest, windows = max(share.fresh for share in shares), sum(share.window for share in shares)
        if widest > LEAST_CHUNK:
            self.prefill_rows = max(LEAST_CHUNK, min(widest, self.prefill_rows) // 2)
        elif windows:
            self.most_rows = sum(share.rows for share in shares) - (windows + 1) // 2
        return widest > LEAST_CHUNK or windows > 0
