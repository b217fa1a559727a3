"""What each tenant of a verifier may have, and how tenants share its steps. Pure: times are arguments.

A *tenant* is whoever a link's token or certificate names; all of its links count together. It has limits of its own,
and a weight: its share beside others that want something at the same time. What nobody else wants costs nobody
anything, and is had by whoever wants it.

- *Rows of a step.* The guarantee is that of generalised processor sharing (Parekh, Gallager 1993), in forwards: a step
  is at most `LEEWAY` longer than one in which all tenants had as many sessions for their weight as the tenant with the
  fewest. On hardware on which more rows take no longer, every session takes part in every step. Elsewhere the sessions
  of a tenant that has many take turns.
- *Prompts.* While other tenants decode, a tenant's prompts get its share of the time: what a chunk has taken is waited
  for, by the others' share over its own, before the next one.
- *Tokens and prompt tokens per second.* Buckets that hold a second's worth: what exceeds them waits.
- *Sessions and keys and values.* What exceeds them is refused.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields

from specwire.core.invalid import InvalidParameter
from specwire.core.policy.estimates import V

# How much longer than tenants' shares allow a step may be: what others' further rows add below that is all but free. It
# bounds what a flood may cost a neighbour.
LEEWAY = 1.05
# Seconds whose tokens a tenant may decide, or feed, at once after it was quiet: a window, or a chunk of a prompt, is
# not cut in two for its limit.
BURST_S = 1.0

MOST_WEIGHT = 1000.0
# The label of tenants without an entry of their own: names that peers choose are no labels.
OTHER = "other"


@dataclass(frozen=True, slots=True)
class TenantLimits:
    """What a tenant may have; None for no limit. InvalidParameter of `tenants` names a limit that is none.

    weight: its share beside others', which have 1 by default. sessions: open at once, waiting ones included. slots:
    sessions that have one at a time; further ones wait. kv_bytes: of keys and values that its sessions may come to.
    tokens: decided per second. rows: of a step. prefill: tokens of prompts per second.
    """

    weight: float = 1.0
    sessions: int | None = None
    slots: int | None = None
    kv_bytes: int | None = None
    tokens: int | None = None
    rows: int | None = None
    prefill: int | None = None

    def __post_init__(self) -> None:
        if not 1 / MOST_WEIGHT <= self.weight <= MOST_WEIGHT:  # nor NaN
            raise InvalidParameter("tenants", f"weight must be from 0.001 to 1000, not {self.weight:g}")
        for each in fields(self)[1:]:
            value = getattr(self, each.name)
            if value is not None and value < 1:
                raise InvalidParameter("tenants", f"{each.name} must be at least 1, not {value}")


NO_LIMITS = TenantLimits()


class _Bucket:
    """Tokens that may be spent now; it is emptied below zero by what is known only once it is spent."""

    def __init__(self, per_second: float, now_us: float) -> None:
        self._per_us = per_second / 1e6
        self._most = self._left = per_second * BURST_S
        self._since_us = now_us

    def ready_us(self, now_us: float) -> float:
        """When something may be spent: now, or later."""
        self._left = min(self._most, self._left + (now_us - self._since_us) * self._per_us)
        self._since_us = now_us
        return now_us if self._left > 0 else now_us - self._left / self._per_us + 1.0

    def spend(self, tokens: int) -> None:
        self._left -= tokens


def fair_rows(demand: Mapping[str, int], weight: Callable[[str], float], V: V) -> dict[str, int]:
    """How many sessions of each tenant take part in a step, of those that could: at least one of each.

    demand: sessions with something to decide, at least 1 of every tenant.
    """
    total, whole = sum(demand.values()), sum(map(weight, demand))
    entitled = (math.ceil(sessions * whole / weight(tenant)) for tenant, sessions in demand.items())
    limit_us = LEEWAY * min(map(V, entitled), default=0.0)
    if len(demand) < 2 or V(total) <= limit_us:
        return dict(demand)
    rows = next((m for m in range(total - 1, len(demand), -1) if V(m) <= limit_us), len(demand))
    given = dict.fromkeys(demand, 1)
    for _ in range(rows - len(demand)):
        open_ones = (tenant for tenant in demand if given[tenant] < demand[tenant])
        given[min(open_ones, key=lambda tenant: (given[tenant] + 1) / weight(tenant))] += 1
    return given


class TenantShares:
    """The tenants of one verifier.

    `refused` sessions, `decided` tokens, `prefilled` tokens of prompts, `rows` of decoding steps, `kv_byte_us` (bytes
    of keys and values held, by microseconds): by label, since the start.

    Args:
        named: limits by tenant. other: of every tenant that is not named, each for itself.
    """

    def __init__(self, named: Mapping[str, TenantLimits], other: TenantLimits = NO_LIMITS) -> None:
        self.named = dict(named)
        self._other = other
        self._tokens: dict[str, _Bucket] = {}
        self._prefill: dict[str, _Bucket] = {}
        # Microseconds of others' work that a tenant's next prompt waits for.
        self._owed_us: dict[str, float] = {}
        self.refused: Counter[str] = Counter()
        self.decided: Counter[str] = Counter()
        self.prefilled: Counter[str] = Counter()
        self.rows: Counter[str] = Counter()
        self.kv_byte_us: Counter[str] = Counter()

    def renew(self, named: Mapping[str, TenantLimits], other: TenantLimits = NO_LIMITS) -> None:
        """Other limits from now on; what was counted stays. From any thread."""
        self.named, self._other = dict(named), other
        self._tokens, self._prefill = {}, {}

    def of(self, tenant: str) -> TenantLimits:
        return self.named.get(tenant, self._other)

    def weight(self, tenant: str) -> float:
        return self.of(tenant).weight

    def label(self, tenant: str) -> str:
        """What it is called in figures."""
        return tenant if tenant in self.named else OTHER

    # What is refused

    def refusal(self, tenant: str, sessions: int, kv_bytes: int) -> str | None:
        """Why it may not have so many sessions, or so much for them, the new one included; None if it may."""
        limits = self.of(tenant)
        if limits.sessions is not None and sessions > limits.sessions:
            reason = f"this tenant has {sessions - 1} sessions open, of at most {limits.sessions}"
        elif limits.kv_bytes is not None and kv_bytes > limits.kv_bytes:
            reason = f"this tenant's sessions may come to {kv_bytes} bytes of keys and values, of {limits.kv_bytes}"
        else:
            return None
        self.count_refused(tenant)
        return reason

    def count_refused(self, tenant: str) -> None:
        self.refused[self.label(tenant)] += 1

    # Whose turn it is for a slot

    def next_tenant(self, waiting: Iterable[str], places: Mapping[str, int], latest: Mapping[str, int]) -> str | None:
        """The tenant with the fewest `places` for its weight; of equals the one whose `latest` turn is longest ago.

        places: slots of each. None if none may have one more.
        """

        def has_room(tenant: str) -> bool:
            most = self.of(tenant).slots
            return most is None or places.get(tenant, 0) < most

        def turn(tenant: str) -> tuple[float, int, str]:
            return places.get(tenant, 0) / self.weight(tenant), latest.get(tenant, -1), tenant

        return min(filter(has_room, waiting), key=turn, default=None)

    def gives_way(self, tenant: str, places: Mapping[str, int]) -> str | None:
        """The tenant that has most slots for its weight, if after giving one to `tenant` it has no fewer than that."""
        most = max(places, key=lambda each: places[each] / self.weight(each), default=None)
        if most is None or most == tenant:
            return None
        after = (places[most] - 1) / self.weight(most)
        return most if after >= (places.get(tenant, 0) + 1) / self.weight(tenant) else None

    # What waits

    def decides_us(self, tenant: str, now_us: float) -> float:
        """When it may decide: now, or once its tokens per second allow it."""
        limit = self.of(tenant).tokens
        return now_us if limit is None else _of(self._tokens, tenant, limit, now_us).ready_us(now_us)

    def feeds_us(self, tenant: str, now_us: float) -> float:
        """When it may feed a prompt, by its prompt tokens per second."""
        limit = self.of(tenant).prefill
        return now_us if limit is None else _of(self._prefill, tenant, limit, now_us).ready_us(now_us)

    def count_decided(self, tenant: str, tokens: int) -> None:
        self.decided[self.label(tenant)] += tokens
        if (bucket := self._tokens.get(tenant)) is not None:
            bucket.spend(tokens)

    def count_held(self, tenant: str, kv_bytes: int, microseconds: float) -> None:
        self.kv_byte_us[self.label(tenant)] += round(kv_bytes * microseconds)

    def count_rows(self, tenant: str, rows: int) -> None:
        self.rows[self.label(tenant)] += rows

    def owed_us(self, tenant: str) -> float:
        """Microseconds of others' work that its next prompt waits for, while there is any."""
        return self._owed_us.get(tenant, 0.0)

    def fed(self, tokens: Mapping[str, int], extra_us: float, step_us: float, active: Iterable[str]) -> None:
        """A step has fed prompts, of so many `tokens` by tenant, or none.

        extra_us: what that took beyond the step without it. step_us: all of the step. active: tenants that wanted to
        take part in it.
        """
        present = set(active) | set(tokens)
        for tenant, fed in tokens.items():
            self.prefilled[self.label(tenant)] += fed
            if (bucket := self._prefill.get(tenant)) is not None:
                bucket.spend(fed)
        if len(present) < 2:
            self._owed_us.clear()
            return
        whole, all_fed = sum(map(self.weight, present)), sum(tokens.values())
        left = {tenant: owed - step_us for tenant, owed in self._owed_us.items() if tenant not in tokens}
        for tenant, fed in tokens.items():
            own = self.weight(tenant)
            left[tenant] = self.owed_us(tenant) + extra_us * fed / all_fed * (whole - own) / own
        self._owed_us = {tenant: owed for tenant, owed in left.items() if owed > 0}


def _of(buckets: dict[str, _Bucket], tenant: str, limit: int, now_us: float) -> _Bucket:
    if tenant not in buckets:
        buckets[tenant] = _Bucket(limit, now_us)
    return buckets[tenant]
