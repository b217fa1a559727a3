"""Prompts that wait for a step's budget: tenants take turns, and one tenant's go by priority."""

from __future__ import annotations

from collections.abc import Mapping

from specwire.core.policy.tunables import PREFILL_ROWS
from tests.verify_service.rig import Rig, oracle

Prompt = tuple[int, ...]


def prompt(number: int, length: int = 2 * PREFILL_ROWS) -> Prompt:
    """No two begin alike."""
    return tuple((number * 7 + index * index) % 60 + 1 for index in range(length))


def steps_to_first_tokens(rig: Rig, handles: int, most: int = 40) -> Mapping[int, int]:
    """After how many steps each session had decided something."""
    found: dict[int, int] = {}
    for step in range(1, most):
        rig.step()
        found |= {handle: step for handle, tokens in rig.tokens.items() if tokens and handle not in found}
        if len(found) == handles:
            return found
    raise AssertionError(f"only {found} in {most} steps")


def test_long_prompts_of_one_tenant_do_not_keep_another_s_short_one_waiting() -> None:
    rig = Rig(slots=8, context=1200)
    for handle in (1, 2, 3):
        rig.open(handle, prompt(handle), scope=b"a", max_tokens=4)
    rig.step()
    rig.open(4, prompt(4, 50), scope=b"b", max_tokens=4)
    first = steps_to_first_tokens(rig, 4)
    assert first[4] == 2  # all three would take five more
    assert sorted(first, key=first.__getitem__) == [1, 4, 2, 3]
    rig.run()
    assert rig.tokens[3] == oracle(rig.lm, prompt(3), 4)


def test_tenants_share_the_budget_however_many_prompts_each_has() -> None:
    rig = Rig(slots=8, context=1200)
    for handle in (1, 2, 3):
        rig.open(handle, prompt(handle), scope=b"a", max_tokens=2)
    for handle in (4, 5):
        rig.open(handle, prompt(handle), scope=b"b", priority=100, max_tokens=2)
    first = steps_to_first_tokens(rig, 5)
    assert sorted(first, key=first.__getitem__) == [1, 4, 2, 5, 3]


def test_the_urgent_prompts_of_one_tenant_go_first() -> None:
    rig = Rig(slots=8, context=1200)
    for handle, priority in ((1, 0), (2, -5), (3, 7)):
        rig.open(handle, prompt(handle), scope=b"a", priority=priority, max_tokens=2)
    first = steps_to_first_tokens(rig, 3)
    assert sorted(first, key=first.__getitem__) == [3, 1, 2]
