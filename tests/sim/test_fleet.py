"""Pools: every session ends, places are bounded, and more machines help."""

from __future__ import annotations

from dataclasses import replace

import pytest

from specwire.sim import AUTO, PLAIN, InvalidCell, SimFleet, simulate_fleet

FLEET = SimFleet(
    sessions=24,
    verifiers=2,
    drafters=4,
    V_us=20_000.0,
    slope=0.002,
    draft_us=2_000.0,
    arrivals_per_second=20.0,
    rtts_us=(1_000.0, 60_000.0),
    tokens=32,
    prompt=8,
    slots=8,
    seed=1,
)


def test_every_session_gets_its_tokens() -> None:
    for policy in (AUTO, PLAIN):
        result = simulate_fleet(FLEET, policy)
        assert (result.sessions, result.tokens) == (24, 24 * 32)
        assert result.most_at_once <= 16
        assert 0.0 < result.verifier_share <= 1.0
        assert list(result.first_us) == sorted(result.first_us)


def test_the_same_fleet_gives_the_same_result() -> None:
    assert simulate_fleet(FLEET) == simulate_fleet(FLEET)


def test_one_plain_session_is_a_cell() -> None:
    fleet = replace(FLEET, sessions=1, rtts_us=(60_000.0,), prompt=1)
    result = simulate_fleet(fleet, PLAIN)
    assert result.first_us[0] == pytest.approx(60_000 + 20_000)
    assert result.per_token_us[0] == pytest.approx(20_000)


def test_sessions_wait_for_a_place() -> None:
    crowded = simulate_fleet(replace(FLEET, verifiers=1, slots=2, arrivals_per_second=1000.0), PLAIN)
    assert crowded.most_at_once == 2
    assert crowded.first_us[2] > 10 * crowded.first_us[0] or crowded.first_us[0] > 32 * 20_000


def test_two_pools_decode_what_one_does_twice() -> None:
    """Pools share nothing: the same load on twice the machines has twice the speed, within what chance does."""
    one = simulate_fleet(replace(FLEET, sessions=64, arrivals_per_second=200.0), PLAIN)
    two = simulate_fleet(replace(FLEET, sessions=128, arrivals_per_second=400.0, verifiers=4, drafters=8), PLAIN)
    assert two.tokens_per_second == pytest.approx(2 * one.tokens_per_second, rel=0.1)


@pytest.mark.parametrize("slope", [0.02, 0.05])
@pytest.mark.parametrize("acceptance", [0.05, 0.4, 0.8])
def test_a_full_verifier_is_not_slower_for_drafting(slope: float, acceptance: float) -> None:
    """And no session is left behind: one that had bad luck among windows of others is not in debt for theirs."""
    full = SimFleet(
        sessions=16,
        verifiers=1,
        drafters=1,
        V_us=100_000.0,
        slope=slope,
        draft_us=3_000.0,
        draft_slope=0.02,
        arrivals_per_second=1000.0,
        rtts_us=(1_000.0,),
        acceptance=acceptance,
        prompt=16,
        tokens=256,
    )
    drafted, plain = simulate_fleet(full, AUTO), simulate_fleet(full, PLAIN)
    assert drafted.tokens_per_second >= 0.98 * plain.tokens_per_second
    assert max(drafted.per_token_us) <= 1.02 * max(plain.per_token_us)


@pytest.mark.parametrize("field", ["sessions", "verifiers", "slots", "arrivals_per_second"])
def test_invalid_fleets(field: str) -> None:
    with pytest.raises(InvalidCell, match=f"^{field}: must be"):
        replace(FLEET, **{field: 0})  # type: ignore[arg-type]  # any field, by name


def test_each_session_may_have_a_trace_of_its_own() -> None:
    """A guess that is known to be right is one that is always drawn right."""
    drawn = replace(FLEET, acceptance=1.0)
    assert simulate_fleet(replace(drawn, traces=[(True,)] * FLEET.sessions)) == simulate_fleet(drawn)
    unlucky = simulate_fleet(replace(drawn, traces=[(False,), *[(True,)] * (FLEET.sessions - 1)]))
    assert max(unlucky.per_token_us) > 1.5 * max(simulate_fleet(drawn).per_token_us)


@pytest.mark.parametrize("traces", [[(True,)] * (FLEET.sessions - 1), [()] * FLEET.sessions])
def test_invalid_traces(traces: list[tuple[bool, ...]]) -> None:
    with pytest.raises(InvalidCell, match=r"^traces: must be one for each of 24 sessions"):
        replace(FLEET, traces=traces)
