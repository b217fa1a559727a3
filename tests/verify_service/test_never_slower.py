"""Never slower is enforced: whatever a drafter does, 256 tokens take at most 3 % longer than plain decoding.

In virtual time: a forward of m rows takes V(m), everything else nothing. The drafters answer some time after a verdict.
"""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from specwire.core.verify.session import Allowance
from tests.verify_service.virtual import COUNT, PLAIN_US, PROMPT, Drafter, Virtual, good, silent


def wrong(truth: Sequence[int], done: int) -> tuple[list[int], float]:
    return [(token + 1) % 64 for token in truth[done : done + 8]], 1000.0


def right_for_a_while(truth: Sequence[int], done: int) -> tuple[list[int], float]:
    return list(truth[done : done + 8]) if done < 12 else [1] * 8, 1000.0


def wrong_and_wide(truth: Sequence[int], done: int) -> tuple[list[int], float]:
    return [truth[done], *((token + 1) % 64 for token in truth[done + 1 : done + 16])], 1000.0


def late(truth: Sequence[int], done: int) -> tuple[list[int], float]:
    return list(truth[done : done + 2]), 35_000.0


def moody(truth: Sequence[int], done: int) -> tuple[list[int], float]:
    """Prompt while it is trusted least."""
    return list(truth[done : done + 4]), 500.0 if done // 16 % 2 else 60_000.0


@pytest.mark.parametrize("growth", [0.0, 0.02, 0.05])
@pytest.mark.parametrize("due", [0, 8])
@pytest.mark.parametrize("drafter", [silent, wrong, wrong_and_wide, right_for_a_while, late, moody])
def test_never_slower(drafter: Drafter, due: int, growth: float) -> None:
    rig = Virtual(growth)
    assert rig.generate(drafter, due) <= COUNT * PLAIN_US / 0.97


@pytest.mark.parametrize("growth", [0.0, 0.05])
def test_good_drafter_pays(growth: float) -> None:
    """Four tokens for a wait of 2 ms and a forward of five rows."""
    rig = Virtual(growth)
    ideal = COUNT / 4 * (2000.0 + rig.cost(5))
    assert rig.generate(good, due=4) <= 1.15 * ideal


def test_the_first_token_waits_for_no_proposal() -> None:
    """Eight draft tokens are said to be due, and none ever comes: the first forward decides all the same."""
    rig = Virtual(0.0)
    rig.open(1, PROMPT, max_tokens=COUNT, allowance=Allowance(0, 1 << 20, 8))
    while not rig.tokens.get(1):
        assert rig.step() is None
    assert rig.now == PLAIN_US
