"""Who gets a session: by cases, and what holds for all of them."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specwire.core.placement import TWO, PlacementCandidate, PlacementRequest, Reason, place

WEIGHTS = "w"
A, B, C = (PlacementCandidate(name, WEIGHTS, slots=4) for name in "abc")
ANY = PlacementRequest("session", WEIGHTS)


def at(candidate: PlacementCandidate, sessions: int, **values: object) -> PlacementCandidate:
    return replace(candidate, sessions=sessions, **values)  # type: ignore[arg-type]  # of a test


def trip(candidate: PlacementCandidate, milliseconds: float, sessions: int = 0, **values: object) -> PlacementCandidate:
    return at(candidate, sessions, round_trip_us=1e3 * milliseconds, **values)


@pytest.mark.parametrize(
    ("candidates", "wish", "chosen", "reason"),
    [
        # Nobody, or nobody else.
        ([], ANY, "", None),
        ([replace(A, up=False), replace(C, fingerprint="x")], ANY, "", None),
        ([A, replace(B, up=False)], ANY, "a", Reason.ONLY),
        ([at(A, 9)], ANY, "a", Reason.ONLY),
        # Who is about to stop is the last resort, whatever speaks for it.
        ([replace(A, up=False), replace(B, draining=True), replace(C, fingerprint="x")], ANY, "b", Reason.ONLY),
        ([at(A, 9, fresh=False, refusals=3), replace(B, draining=True)], ANY, "a", Reason.ONLY),
        # Load is by slots; equals in order.
        ([A, B, C], ANY, "a", Reason.LOAD),
        ([at(A, 2), at(B, 1), at(C, 3)], ANY, "b", Reason.LOAD),
        ([at(A, 2), at(B, 3, slots=16)], ANY, "b", Reason.LOAD),
        ([at(A, 8), at(B, 6), at(C, 7)], ANY, "b", Reason.LOAD),  # all full: where least of them wait
        # The cache, wherever it is.
        ([A, at(B, 3)], replace(ANY, held_by="b"), "b", Reason.HOLDER),
        ([A, at(B, 4)], replace(ANY, held_by="b"), "b", Reason.HOLDER),  # it has its place there
        ([A, at(B, 3, region="far", fresh=False)], replace(ANY, held_by="b", near=("here",)), "b", Reason.HOLDER),
        ([A, replace(B, draining=True)], replace(ANY, held_by="b"), "a", Reason.ONLY),
        ([A, at(B, 3)], replace(ANY, parent_at="b"), "b", Reason.HOLDER),
        ([A, at(B, 4)], replace(ANY, parent_at="b"), "a", Reason.LOAD),  # the turn needs another place
        ([A, B], replace(ANY, held_by="gone", parent_at="b"), "b", Reason.HOLDER),
        ([A, B, C], replace(ANY, held_by="c", parent_at="b"), "c", Reason.HOLDER),
        # A heartbeat before room, room before nearness, nearness before load.
        ([replace(A, fresh=False), at(B, 4)], ANY, "b", Reason.LOAD),
        ([replace(A, fresh=False), replace(B, fresh=False, sessions=1)], ANY, "a", Reason.LOAD),
        ([at(A, 1, region="far"), at(B, 3, region="here")], replace(ANY, near=("here",)), "b", Reason.NEAR),
        ([at(A, 1, region="far"), at(B, 4, region="here")], replace(ANY, near=("here",)), "a", Reason.LOAD),
        ([replace(A, region="next"), at(B, 1, region="here")], replace(ANY, near=("here", "next")), "b", Reason.NEAR),
        ([at(A, 1), at(B, 1, region="next")], replace(ANY, near=("here", "next")), "b", Reason.NEAR),
        ([at(A, 1, region="far"), B], replace(ANY, near=("here",)), "b", Reason.LOAD),  # neither is near
        # Of one region, whose round trip is about the least; what was not measured may be near.
        ([trip(A, 40.0), trip(B, 20.0, 3)], ANY, "b", Reason.NEAR),
        ([trip(A, 40.0), trip(B, 20.0, 3), trip(C, 28.0)], ANY, "c", Reason.LOAD),
        ([trip(A, 0.3), trip(B, 5.2), trip(C, 0.1, 1)], ANY, "a", Reason.LOAD),
        ([trip(A, 40.0), trip(B, 20.0, 3), C], ANY, "c", Reason.LOAD),
        ([trip(A, 40.0), trip(B, 20.0, 4)], ANY, "a", Reason.LOAD),  # the nearer one is full
        ([trip(A, 20.0, region="far"), trip(B, 90.0, region="here")], replace(ANY, near=("here",)), "b", Reason.NEAR),
        # Refusals before all that.
        ([replace(A, refusals=1), at(B, 4, fresh=False)], ANY, "b", Reason.LOAD),
    ],
)
def test_cases(
    candidates: list[PlacementCandidate], wish: PlacementRequest, chosen: str, reason: Reason | None
) -> None:
    choice = place(candidates, wish)
    found = ("", None) if choice is None else (candidates[choice.index].name, choice.reason)
    assert found == (chosen, reason)


def test_two_are_drawn_evenly_and_the_less_loaded_one_is_taken() -> None:
    candidates = [
        PlacementCandidate(f"10.0.0.{number}:50061", WEIGHTS, slots=100, sessions=number) for number in range(10)
    ]
    wishes = [PlacementRequest(f"session-{number}", WEIGHTS, draws=TWO) for number in range(4500)]
    taken = Counter(choice.index for choice in (place(candidates, wish) for wish in wishes) if choice is not None)
    # Of 45 pairs the i-th is the lesser in 9 - i.
    expected = [4500 * (9 - number) / 45 for number in range(10)]
    assert taken[9] == 0
    assert all(abs(taken[number] - expected[number]) < 5 * expected[number] ** 0.5 + 1 for number in range(10))


def test_hearsay_does_not_send_everybody_to_one() -> None:
    """What is placed between two heartbeats: with the loads of the last one everybody would choose alike."""
    candidates = [PlacementCandidate(f"v{number}", WEIGHTS, slots=64, sessions=10) for number in range(8)]
    candidates[3] = replace(candidates[3], sessions=9)
    for draws, most in ((0, 80), (TWO, 40)):
        choices = [
            place(candidates, PlacementRequest(f"session-{number}", WEIGHTS, draws=draws)) for number in range(80)
        ]
        placed = Counter(choice.index for choice in choices if choice is not None)
        assert max(placed.values()) <= most
        assert (max(placed.values()) == 80) is (draws == 0)


CANDIDATES = st.lists(
    st.builds(
        PlacementCandidate,
        name=st.sampled_from("abcdef"),
        fingerprint=st.sampled_from(["w", "x"]),
        up=st.booleans(),
        draining=st.booleans(),
        fresh=st.booleans(),
        slots=st.integers(0, 4),
        sessions=st.integers(0, 6),
        region=st.sampled_from(["", "here", "next"]),
        refusals=st.integers(0, 2),
    ),
    max_size=6,
    unique_by=lambda candidate: candidate.name,
)
WISHES = st.builds(
    PlacementRequest,
    key=st.text(max_size=4),
    fingerprint=st.just("w"),
    held_by=st.sampled_from(["", "a", "b"]),
    parent_at=st.sampled_from(["", "a", "b"]),
    near=st.lists(st.sampled_from(["here", "next"]), unique=True).map(tuple),
    draws=st.sampled_from([0, TWO]),
)


def fits(candidate: PlacementCandidate) -> bool:
    return candidate.up and candidate.fingerprint == "w"


@given(CANDIDATES, WISHES)
def test_whoever_can_be_chosen_is_and_nobody_else(candidates: list[PlacementCandidate], wish: PlacementRequest) -> None:
    choice = place(candidates, wish)
    assert (choice is not None) == any(map(fits, candidates))
    assert choice is None or fits(candidates[choice.index])
    if choice is not None and candidates[choice.index].draining:
        assert all(each.draining for each in candidates if fits(each))
    assert place(candidates, wish) == choice


@given(CANDIDATES, WISHES)
def test_who_cannot_be_chosen_changes_nothing(candidates: list[PlacementCandidate], wish: PlacementRequest) -> None:
    fit = [each for each in candidates if fits(each)]
    whole, few = place(candidates, wish), place(fit, wish)
    assert (whole is None) == (few is None)
    assert whole is None or few is None or candidates[whole.index] == fit[few.index]


@given(CANDIDATES, WISHES)
def test_nobody_better_is_passed_over(candidates: list[PlacementCandidate], wish: PlacementRequest) -> None:
    """Without a holder: who stays, less refusals, a heartbeat, room, nearness, and where all are compared less load."""
    wish = replace(wish, held_by="", parent_at="")
    choice = place(candidates, wish)
    if choice is None:
        return

    def rank(each: PlacementCandidate) -> tuple[bool, int, bool, bool, int]:
        near = wish.near.index(each.region) if each.region in wish.near else len(wish.near)
        return each.draining, each.refusals, not each.fresh, each.sessions >= each.slots, near

    chosen = candidates[choice.index]
    for other in filter(fits, candidates):
        assert rank(chosen) <= rank(other)
        if not wish.draws and rank(chosen) == rank(other):
            assert chosen.load <= other.load


@given(CANDIDATES, WISHES)
def test_who_holds_the_session_keeps_it(candidates: list[PlacementCandidate], wish: PlacementRequest) -> None:
    fit = [each for each in candidates if fits(each)]
    fit = [each for each in fit if not each.draining] or fit
    holder = next((each for each in fit if each.name == wish.held_by), None)
    choice = place(candidates, wish)
    if holder is not None:
        assert choice is not None
        assert candidates[choice.index] == holder
        assert choice.reason is Reason.HOLDER
