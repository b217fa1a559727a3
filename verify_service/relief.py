"""When memory is short for a forward: smaller ones are tried before a session is given up."""

from __future__ import annotations

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
    """prefill_rows: how many tokens of waiting prompts a forward takes; fewer once it ran out of memory with them."""

    def __init__(self) -> None:
        self.prefill_rows = PREFILL_ROWS

    def lower(self, shares: Sequence[Share]) -> bool:
        """A forward of `shares` was too large. Whether the next one will be smaller."""
        widest = max(share.fresh for share in shares)
        if widest <= LEAST_CHUNK:
            return False
        self.prefill_rows = max(LEAST_CHUNK, min(widest, self.prefill_rows) // 2)
        return True
