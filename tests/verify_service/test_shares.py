"""What tenants may have, and how they share steps, slots and time for prompts."""

from __future__ import annotations

import math
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specwire.core.invalid import InvalidParameter
from verify_service.engine.shares import LEEWAY, TenantLimits, TenantShares, fair_rows


def linear(rows: int) -> float:
    return 1000.0 * rows


def flat(rows: int) -> float:
    return 1000.0


def memory_bound(rows: int) -> float:
    """Flat up to 8 rows, and a row more costs 200 us from there on."""
    return 1000.0 + 200.0 * max(0, rows - 8)


def equal(_: str) -> float:
    return 1.0


def test_where_rows_cost_nothing_everybody_takes_part() -> None:
    assert fair_rows({"a": 1, "b": 15}, equal, flat) == {"a": 1, "b": 15}
    assert fair_rows({"b": 15}, equal, linear) == {"b": 15}
    assert fair_rows({}, equal, linear) == {}


def test_where_each_row_costs_the_same_tenants_have_equally_many() -> None:
    assert fair_rows({"a": 1, "b": 15}, equal, linear) == {"a": 1, "b": 1}
    assert fair_rows({"a": 4, "b": 15}, equal, linear) == {"a": 4, "b": 4}
    assert fair_rows({"a": 2, "b": 9, "c": 9}, equal, linear) == {"a": 2, "b": 2, "c": 2}


def test_what_is_free_is_had_by_whoever_wants_it() -> None:
    assert fair_rows({"a": 1, "b": 15}, equal, memory_bound) == {"a": 1, "b": 7}


def test_weights_are_shares() -> None:
    weights = {"a": 1.0, "b": 3.0}
    assert fair_rows({"a": 8, "b": 24}, weights.__getitem__, linear) == {"a": 8, "b": 24}
    assert fair_rows({"a": 24, "b": 6}, weights.__getitem__, linear) == {"a": 2, "b": 6}


@given(
    st.dictionaries(st.sampled_from("abcde"), st.tuples(st.integers(1, 20), st.floats(0.1, 10.0)), min_size=1),
    st.floats(0.0, 2.0),
)
def test_no_tenant_is_slower_than_its_share_allows(wanted: dict[str, tuple[int, float]], growth: float) -> None:
    def costs(rows: int) -> float:
        return 1.0 + growth * (rows - 1)

    demand = {tenant: sessions for tenant, (sessions, _) in wanted.items()}
    weights = {tenant: weight for tenant, (_, weight) in wanted.items()}
    rows = fair_rows(demand, weights.__getitem__, costs)
    assert all(1 <= rows[tenant] <= demand[tenant] for tenant in demand)
    whole = sum(weights.values())
    if sum(rows.values()) > len(demand):  # a row each is had in any case
        for tenant, sessions in demand.items():
            if len(demand) > 1:
                entitled = costs(math.ceil(sessions * whole / weights[tenant]))
                assert costs(sum(rows.values())) <= LEEWAY * entitled


def test_slots_go_to_whom_has_fewest_for_its_weight() -> None:
    shares = TenantShares({"a": TenantLimits(weight=2), "c": TenantLimits(slots=1)})
    assert shares.next_tenant(["a", "b"], {"a": 3, "b": 2}, {}) == "a"
    assert shares.next_tenant(["a", "b"], {"a": 4, "b": 2}, {"a": 7, "b": 9}) == "a"
    assert shares.next_tenant(["a", "b"], {"a": 4, "b": 2}, {"a": 9, "b": 7}) == "b"
    assert shares.next_tenant(["c"], {"c": 1}, {}) is None
    assert shares.next_tenant([], {}, {}) is None


def test_a_tenant_gives_way_only_where_that_is_fairer() -> None:
    shares = TenantShares({"a": TenantLimits(weight=2)})
    assert shares.gives_way("b", {"c": 4}) == "c"
    assert shares.gives_way("b", {"c": 2, "b": 1}) is None
    assert shares.gives_way("b", {"a": 2}) is None
    assert shares.gives_way("b", {"a": 3}) == "a"
    assert shares.gives_way("b", {"b": 4}) is None
    assert shares.gives_way("b", {}) is None


def test_over_a_long_time_a_tenant_decides_what_it_may() -> None:
    shares, now, decided = TenantShares({"ada": TenantLimits(tokens=100)}), 0.0, 0
    while now < 60e6:
        if shares.decides_us("ada", now) <= now:
            shares.count_decided("ada", 3)
            decided += 3
        now += 1e4
    assert 6000 <= decided <= 6000 + 100 + 3


def test_prompts_get_their_share_of_the_time_beside_others() -> None:
    """One tenant always has a prompt to feed, the other always decodes; a chunk takes 30 steps' time."""
    shares = TenantShares({"a": TenantLimits(weight=1), "b": TenantLimits(weight=2)})
    spent: Counter[str] = Counter()
    for _ in range(3000):
        if shares.owed_us("a") <= 0:
            shares.fed({"a": 512}, 30.0, 31.0, ["a", "b"])
            spent["a"] += 30
            spent["b"] += 1
        else:
            shares.fed({}, 0.0, 1.0, ["a", "b"])
            spent["b"] += 1
    assert spent["a"] / spent.total() == pytest.approx(1 / 3, abs=0.02)
    assert shares.prefilled == {"a": 512 * (spent["a"] // 30)}


def test_who_is_alone_owes_nobody_anything() -> None:
    shares = TenantShares({})
    shares.fed({"a": 512}, 30.0, 31.0, ["a", "b"])
    assert shares.owed_us("a") == 30.0
    shares.fed({"a": 512}, 30.0, 31.0, ["a"])
    assert shares.owed_us("a") == 0.0


@pytest.mark.parametrize(
    ("limits", "message"),
    [
        ({"weight": 0.0}, "weight must be from 0.001 to 1000, not 0"),
        ({"weight": math.nan}, "weight must be from 0.001 to 1000, not nan"),
        ({"sessions": 0}, "sessions must be at least 1, not 0"),
        ({"kv_bytes": -1}, "kv_bytes must be at least 1, not -1"),
    ],
)
def test_what_is_no_limit_is_named(limits: dict[str, float], message: str) -> None:
    with pytest.raises(InvalidParameter, match=message):
        TenantLimits(**limits)  # type: ignore[arg-type]
