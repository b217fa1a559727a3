"""A drafter that keeps to the protocol never exceeds its quota; one that does not is found out."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from orchestrator.peers.peer import MOST_RELAYED, Quota
from specwire.core.draft import DraftSession
from specwire.core.messages import Pace

paces = st.builds(Pace, st.integers(1, 5), st.integers(0, 12))
# How far an advance goes back, what it decides (0: what the drafter guessed), the pace, and tokens drafted after it.
advances = st.tuples(st.integers(0, 3), st.lists(st.integers(0, 1), max_size=6), paces, st.integers(0, 15))


def draft(session: DraftSession, most: int) -> list[int]:
    """Draft up to `most` tokens; the sizes of the proposals that this brings."""
    sizes = []
    for _ in range(most):
        while (proposal := session.take_proposal()) is not None:
            sizes.append(len(proposal.tokens))
        if session.wants_token:
            session.drafted(0)
    return sizes


@given(paces, st.lists(advances, max_size=20))
def test_an_honest_drafter_stays_within_it(pace: Pace, events: list[tuple[int, list[int], Pace, int]]) -> None:
    quota, session = Quota(), DraftSession((0,) * 4, pace, 0, 1000)
    quota.ask(pace.run_ahead)
    for back, tokens, wanted, drafted in events:
        assert all(quota.take(size) for size in draft(session, drafted))
        quota.ask(wanted.run_ahead)
        session.advance(max(1, session.decided - back), tokens, wanted)
    assert all(quota.take(size) for size in draft(session, 50))


def test_more_than_was_asked_for_is_refused() -> None:
    quota = Quota()
    assert not quota.take(1)
    quota = Quota()
    quota.ask(4)
    assert [quota.take(3), quota.take(0), quota.take(0)] == [True, True, False]


def test_a_silent_drafter_does_not_save_up_a_flood() -> None:
    quota = Quota(100)
    for _ in range(100):
        quota.ask(32)
    assert quota.take(100)
    assert not quota.take(1)


def test_what_is_refused_is_not_charged() -> None:
    quota = Quota()
    quota.ask(4)
    assert [quota.take(5), quota.take(4)] == [False, True]


def test_a_line_that_stalls_for_long_owes_what_was_asked() -> None:
    quota = Quota()
    for _ in range(300):
        quota.ask(128)
    sizes = [15] * 300
    assert sum(sizes) > MOST_RELAYED
    assert all(quota.take(size) for size in sizes)
