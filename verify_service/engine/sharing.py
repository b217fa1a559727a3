"""Which sessions take part in a step, where tenants share a verifier (`specwire.core.policy.shares`)."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence

from specwire.core.model import SlotModel
from specwire.core.policy.costs import StepCosts
from specwire.core.policy.scheduler import StepCandidate
from specwire.core.policy.shares import TenantShares, fair_rows
from verify_service.engine.batch import Part
from verify_service.engine.sessions import Held, Roster


class StepSharing:
    """Sessions that are left out of a step are charged for none of its time.

    `next_us`: when one of those may go on that wait for their tenant's tokens per second; infinite if none does.
    """

    def __init__(
        self, shares: TenantShares, costs: StepCosts, roster: Roster, lm: SlotModel, now_us: Callable[[], float]
    ) -> None:
        self.shares = shares
        self._roster = roster
        self._lm = lm
        self._position_bytes = lm.kv_bytes // (lm.slots * lm.info.context)
        self._costs = costs
        self.next_us = math.inf
        self._now_us = now_us
        self._steps = 0
        self._left_out: list[Held] = []
        self._looked_us = now_us()
        self._active: frozenset[str] = frozenset()
        # First tokens that prompts decided, which their tenants have had beside their rows.
        self._firsts: Counter[str] = Counter()

    def able(self, ready: Sequence[Held]) -> list[Held]:
        """Those whose tenants' tokens per second allow it."""
        now_us = self._now_us()
        passed_us, self._looked_us = now_us - self._looked_us, now_us
        for held in self._left_out:
            held.running.since_us = min(now_us, held.running.since_us + passed_us)
        for held in self._roster:
            if not held.waiting:
                kept = self._lm.cached(held.slot) * self._position_bytes
                self.shares.count_held(held.tenant, kept, passed_us)
        at_us = {tenant: self.shares.decides_us(tenant, now_us) for tenant in {held.tenant for held in ready}}
        self.next_us = min((at for at in at_us.values() if at > now_us), default=math.inf)
        self._left_out = [held for held in ready if at_us[held.tenant] > now_us]
        return [held for held in ready if at_us[held.tenant] <= now_us]

    def chosen(self, shown: Sequence[StepCandidate], held: Mapping[int, Held]) -> list[StepCandidate]:
        """The candidates that take part. A tenant's sessions that have waited for most steps go first.

        held: sessions by slot.
        """
        self._active = frozenset(held[each.slot].tenant for each in shown)
        decoding = [each for each in shown if each.uncached == 1]
        able = Counter(held[each.slot].tenant for each in decoding)
        demand = {tenant: min(sessions, self._limit(tenant) or sessions) for tenant, sessions in able.items()}
        rows = fair_rows(demand, self.shares.weight, self._costs.plain)
        left = Counter({tenant: self._less_firsts(tenant, rows[tenant], demand[tenant]) for tenant in rows})
        taken: list[StepCandidate] = []
        for each in sorted(decoding, key=lambda each: (held[each.slot].served, held[each.slot].came_us)):
            tenant = held[each.slot].tenant
            if left[tenant] > 0:
                left[tenant] -= 1
                most = self._limit(tenant)
                taken.append(each if most is None else each._replace(room=min(each.room, most // rows[tenant])))
        taken += [each for each in shown if each.uncached > 1 and self._feeds(held[each.slot].tenant, demand)]
        present = {each.slot for each in taken}
        self._left_out += [held[each.slot] for each in shown if each.slot not in present]
        return taken

    def _less_firsts(self, tenant: str, rows: int, demand: int) -> int:
        """Its rows of this step, less the first tokens that its prompts decided: who opens much gets no more for that.

        A tenant that may have all that it wants has taken nothing from anybody.
        """
        if rows == demand:
            self._firsts[tenant] = 0
            return rows
        paid = min(self._firsts[tenant], rows - 1)
        self._firsts[tenant] -= paid
        return rows - paid

    def _limit(self, tenant: str) -> int | None:
        """Rows of a step, at least 1."""
        return self.shares.of(tenant).rows

    def _feeds(self, tenant: str, decoding: Mapping[str, int]) -> bool:
        now_us = self._now_us()
        at_us = self.shares.feeds_us(tenant, now_us)
        if at_us > now_us:
            self.next_us = min(self.next_us, at_us)
            return False
        return self.shares.owed_us(tenant) <= 0 or not any(other != tenant for other in decoding)

    def took(self, parts: Sequence[Part], forward_us: float) -> None:
        """Account for a step."""
        self._steps += 1
        fed: Counter[str] = Counter()
        decoding = rows = 0
        for part in parts:
            part.held.served = self._steps
            if part.share.fresh > 1 or not part.share.decides:
                fed[part.held.tenant] += part.share.fresh
                known = self._firsts[part.held.tenant]
                self._firsts[part.held.tenant] = min(known + part.share.decides, self._lm.slots)
            else:
                decoding, rows = decoding + 1, rows + part.share.rows
                self.shares.count_rows(part.held.tenant, part.share.rows)
        without_us = self._costs.of(decoding)(rows) if fed and decoding else 0.0
        extra_us = max(0.0, forward_us - without_us)
        self.shares.fed(fed, extra_us, forward_us, self._active)
