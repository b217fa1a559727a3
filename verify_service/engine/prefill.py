"""Which prompts a step feeds and how much of them; less where memory is short."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TypeVar

from specwire.core.model import out_of_memory
from specwire.core.policy.scheduler import Share, StepCandidate
from specwire.core.policy.tunables import PREFILL_ROWS
from verify_service.engine.sessions import Held

W = TypeVar("W")

# ----------------------------------------------------------------------------------------------------------------------
# What a step does when memory is short: smaller forwards are tried before a session is given up.

# Chunks of a prompt that are not cut any smaller.
LEAST_CHUNK = 32
OUT_OF_MEMORY_MESSAGE = "the target's forward ran out of memory"


class ShortOfMemory(Exception):
    """A forward lacked memory and has decided nothing."""


@contextmanager
def detect_out_of_memory() -> Iterator[None]:
    """Turns an allocator's failure within it into ShortOfMemory, whatever the runtime raises."""
    try:
        yield
    except Exception as error:
        if out_of_memory(error):
            raise ShortOfMemory(str(error)) from error
        raise


class StepLimits:
    """The largest forward. It shrinks for good once memory ran out: free memory does not grow.

    prefill_rows: tokens of waiting prompts. most_rows: of all sessions together; only draft tokens are cut to it.
    """

    def __init__(self) -> None:
        self.prefill_rows = PREFILL_ROWS
        self.most_rows = math.inf

    def lower(self, shares: Sequence[Share]) -> bool:
        """A forward of `shares` was too large; returns whether the next one will be smaller."""
        widest, windows = max(share.fresh for share in shares), sum(share.window for share in shares)
        if widest > LEAST_CHUNK:
            self.prefill_rows = max(LEAST_CHUNK, min(widest, self.prefill_rows) // 2)
        elif windows:
            self.most_rows = sum(share.rows for share in shares) - (windows + 1) // 2
        return widest > LEAST_CHUNK or windows > 0


# ----------------------------------------------------------------------------------------------------------------------
# Whose prompt is fed first where several wait: tenants share a step's prefill.


class PromptTurns:
    """The tenant that was fed least while others' prompts waited goes first.

    Among its prompts the most urgent goes first, then the one that came first. No tenant gets ahead of another by
    claiming to be urgent, as in `specwire.core.placement`. Start-time fair queueing (Goyal, Vin, Cheng 1996): a new
    tenant begins where the least served one is.

    An orchestrator's tenants are scopes here. Where the verifier has tenants of its own (`Held.tenant`), they take
    turns by weight, and the scopes of each within its turns.
    """

    def __init__(self, weight: Callable[[str], float] = lambda _: 1.0) -> None:
        # Tokens fed to scopes that wait; the same for tenants that wait, divided by their weight.
        self._fed: dict[bytes, float] = {}
        self._fed_of: dict[str, float] = {}
        self._weight = weight

    def ordered(self, candidates: Sequence[StepCandidate], held: Mapping[int, Held]) -> Sequence[StepCandidate]:
        """Shares without a prompt first, as they are; then prompts in turn. held: sessions by slot."""
        prompts = [held[each.slot] for each in candidates if each.uncached > 1]
        if not prompts:
            self._fed.clear()
            self._fed_of.clear()
            return candidates
        came_us: dict[bytes, float] = {}
        for each in prompts:
            came_us[each.scope] = min(each.came_us, came_us.get(each.scope, each.came_us))
        self._fed = _joined(self._fed, came_us)
        self._fed_of = _joined(self._fed_of, {each.tenant for each in prompts})

        def turn(candidate: StepCandidate) -> tuple[float, str, float, float, bytes, int, float]:
            if candidate.uncached == 1:
                return -1.0, "", 0.0, 0.0, b"", 0, 0.0
            own = held[candidate.slot]
            fed, came = self._fed[own.scope], came_us[own.scope]
            return self._fed_of[own.tenant], own.tenant, fed, came, own.scope, -own.priority, own.came_us

        return sorted(candidates, key=turn)

    def took(self, shares: Sequence[tuple[Share, Held]]) -> None:
        """A step feeds these."""
        for share, held in shares:
            if held.scope in self._fed and (share.fresh > 1 or not share.decides):
                self._fed[held.scope] += share.fresh
            if held.tenant in self._fed_of and (share.fresh > 1 or not share.decides):
                self._fed_of[held.tenant] += share.fresh / self._weight(held.tenant)


def _joined(fed: Mapping[W, float], waiting: Iterable[W]) -> dict[W, float]:
    """Tokens fed to those that wait. A new one begins where the least served one is."""
    present = set(waiting)
    least = min((tokens for whose, tokens in fed.items() if whose in present), default=0.0)
    return {whose: fed.get(whose, least) for whose in present}
