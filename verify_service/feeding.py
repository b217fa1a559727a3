"""Whose prompt is fed first, where several wait: tenants share a step's budget."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from specwire.core.shares import Share, StepCandidate
from verify_service.roster import Held


class PromptTurns:
    """That tenant goes first of which least was fed while prompts of others waited, too; of one tenant's prompts the
    most urgent, then that which came first. No tenant gets ahead of another by claiming to be urgent, as in
    `specwire.core.admission`.

    Start-time fair queueing (Goyal, Vin, Cheng 1996): who comes begins where the least served of those present is.
    """

    def __init__(self) -> None:
        # Tokens, by tenants that wait.
        self._fed: dict[bytes, int] = {}

    def ordered(self, candidates: Sequence[StepCandidate], held: Mapping[int, Held]) -> Sequence[StepCandidate]:
        """Those without a prompt to feed as they are, then prompts in turn. held: sessions by slot."""
        prompts = [held[each.slot] for each in candidates if each.uncached > 1]
        if not prompts:
            self._fed.clear()
            return candidates
        came_us: dict[bytes, float] = {}
        for each in prompts:
            came_us[each.scope] = min(each.came_us, came_us.get(each.scope, each.came_us))
        least = min((fed for scope, fed in self._fed.items() if scope in came_us), default=0)
        self._fed = {scope: self._fed.get(scope, least) for scope in came_us}

        def turn(candidate: StepCandidate) -> tuple[int, float, bytes, int, float]:
            if candidate.uncached == 1:
                return -1, 0.0, b"", 0, 0.0
            own = held[candidate.slot]
            return self._fed[own.scope], came_us[own.scope], own.scope, -own.priority, own.came_us

        return sorted(candidates, key=turn)

    def took(self, shares: Sequence[tuple[Share, Held]]) -> None:
        """A step feeds these."""
        for share, held in shares:
            if held.scope in self._fed and (share.fresh > 1 or not share.decides):
                self._fed[held.scope] += share.fresh
