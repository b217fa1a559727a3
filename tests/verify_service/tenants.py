"""Tenants at an engine under test: Ada, who behaves, and Bob, who floods."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from tests.verify_service.rig import Rig
from verify_service.engine.messages import QueuePatience
from verify_service.engine.shares import TenantShares

PROMPT = (5, 6, 7)
ENDLESS = 10_000


def decided(rig: Rig) -> Counter[str]:
    """Tokens by tenant; a handle below 100 is Ada's, the others are Bob's."""
    counts: Counter[str] = Counter()
    for handle, tokens in rig.tokens.items():
        counts["ada" if handle < 100 else "bob"] += len(tokens)
    return counts


def floods(rig: Rig, sessions: int, **changes: object) -> None:
    for handle in range(100, 100 + sessions):
        rig.open(handle, (handle % 60, 3, 4), link=1, tenant="bob", max_tokens=ENDLESS, **changes)


def stepped(rig: Rig, steps: int, before: Callable[[], None] = lambda: None) -> None:
    for _ in range(steps):
        before()
        rest = rig.step()
        if rest is not None:
            rig.now = max(rig.now, min(rest.until_us, rig.now + 1e6))


def big(growth: float, shares: TenantShares | None, slots: int = 16, queue: int = 0) -> Rig:
    patience = QueuePatience(queue)
    return Rig(slots=slots, context=4096, ngram=False, growth=growth, shares=shares, patience=patience)
