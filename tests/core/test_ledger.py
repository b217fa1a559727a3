"""The ledger bounds what any drafter can cost, in virtual time."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest

from specwire.core.policy.costs import Ledger, part_of
from specwire.core.policy.tunables import TOLERATED_SHARE, TOLERATED_STEPS

V = 1000.0
TOKENS = 256
Guess = Callable[[int], bool]


def run(window: int, growth: float, right: Guess, wait: float = 0.0) -> float:
    """Microseconds for TOKENS tokens; `right(position)` says whether the drafter guesses it."""
    ledger, elapsed, decided = Ledger(), 0.0, 0
    while decided < TOKENS:
        width = min(window, max(0, int((ledger.spare_us(V) - wait) / (V * growth))))
        accepted = 0
        while accepted < width and right(decided + accepted):
            accepted += 1
        spent = V * (1 + growth * width) + (wait if width else 0.0)
        ledger.charge(spent, accepted + 1, V)
        elapsed += spent
        decided += accepted + 1
    return elapsed / decided * TOKENS


@pytest.mark.parametrize("growth", [0.02, 0.05])
@pytest.mark.parametrize("window", [1, 4, 8, 12, 16])
@pytest.mark.parametrize("luck", [0, 1, 4, 16, 64])
def test_right_at_first_then_wrong_for_ever_costs_at_most_three_percent(growth: float, window: int, luck: int) -> None:
    assert run(window, growth, lambda position: position < luck) <= TOKENS * V / 0.97


def test_without_the_ledger_the_same_drafter_costs_much_more() -> None:
    always = TOKENS * V * (1 + 0.05 * 8)
    assert always > 1.3 * run(8, 0.05, lambda position: position < 1)


@pytest.mark.parametrize("wait", [0.0, V / 4])
def test_a_drafter_that_alternates_luck_cannot_exceed_the_bound(wait: float) -> None:
    for period in range(2, 12):
        assert run(4, 0.05, lambda position, p=period: position % p == 0, wait) <= 1.03 * TOKENS * V  # type: ignore[misc] # p is bound early


def test_a_good_drafter_is_never_held_back() -> None:
    assert run(4, 0.05, lambda position: position % 4 != 0) < 0.5 * TOKENS * V


def test_debt_is_repaid_by_gains_only() -> None:
    ledger = Ledger()
    ledger.charge((TOLERATED_STEPS + 2) * V, 1, V)
    assert ledger.spare_us(V) < 0
    ledger.charge(V, 3, V)
    assert ledger.balance_us == (TOLERATED_STEPS - 1) * V
    assert ledger.spare_us(V) >= 0


def test_plain_steps_never_put_a_session_into_debt() -> None:
    ledger = Ledger()
    for _ in range(1000):
        ledger.charge(V, 1, V)
        assert ledger.spare_us(V) >= 0


def test_a_reattached_session_keeps_its_debt() -> None:
    assert Ledger(balance_us=(TOLERATED_STEPS + 1) * V).spare_us(V) < 0


def batch(windows: Sequence[int], growth: float, right: Sequence[bool], steps: int) -> tuple[float, list[Ledger]]:
    """Seconds of V that `steps` of a batch take beyond plain ones, and the ledgers of its sessions.

    Session i wants windows[i] rows; all of them are right if right[i], else none.
    """
    ledgers, beyond = [Ledger() for _ in windows], 0.0
    for _ in range(steps):
        bearable = [max(0, int(each.spare_us(V) / len(windows) / (V * growth))) for each in ledgers]
        widths = [min(pair) for pair in zip(windows, bearable, strict=True)]
        spent = V * (1 + growth * sum(widths))
        beyond += spent / V - 1
        for ledger, width, good in zip(ledgers, widths, right, strict=True):
            cost = V + part_of(width, sum(widths), len(widths)) * (spent - V)
            ledger.charge(spent, width + 1 if good else 1, V, cost)
    return beyond, ledgers


def test_drafters_that_are_all_wrong_cost_a_batch_no_more_than_one_costs_a_session() -> None:
    beyond, _ = batch([4] * 16, 0.02, [False] * 16, 256)
    assert 1.0 < beyond <= 0.03 * 256


def test_nobody_is_in_debt_for_windows_of_others() -> None:
    """Sixteen good drafters but one: its session alone decodes plainly, the one without windows owes nothing."""
    _, ledgers = batch([4] * 14 + [4, 0], 0.02, [True] * 14 + [False, True], 256)
    assert all(ledger.balance_us < -100 * V for ledger in ledgers[:14])
    assert 0 < ledgers[14].balance_us <= ledgers[14].elapsed_us * TOLERATED_SHARE + TOLERATED_STEPS * V
    assert ledgers[15].balance_us == pytest.approx(0.0)


def test_what_all_are_charged_is_what_the_windows_took() -> None:
    windows = [3, 0, 8, 1]
    assert sum(part_of(each, sum(windows), len(windows)) for each in windows) == pytest.approx(len(windows))
    assert part_of(0, 0, 4) == 1.0


@pytest.mark.parametrize("alone_after", [0, 8, 64, 250])
@pytest.mark.parametrize("growth", [1.5, 2.7, 8.0])
def test_a_text_whose_batch_shrinks_loses_no_more_than_its_share_and_steps_of_it(
    growth: float, alone_after: int
) -> None:
    """All that it may lose at its beginning is lost in a batch; from some token on it is decided alone."""
    ledger, batch_us = Ledger(), growth * V
    for decided in range(TOKENS):
        plain_us = batch_us if decided <= alone_after else V
        wasted_us = max(0.0, ledger.spare_us(plain_us))
        ledger.charge(plain_us + wasted_us, 1, plain_us)
    assert 2 * batch_us <= ledger.balance_us <= TOLERATED_SHARE * ledger.elapsed_us + TOLERATED_STEPS * batch_us
