"""A drafter's session: its chain, its rollback (an absolute position), its chunks and its run-ahead."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specwire.core.draft import Desynchronised, DraftSession, Drawn
from specwire.core.invalid import InvalidParameter
from specwire.core.messages import Pace, Proposal
from specwire.core.text import hash_of

PROMPT = [4, 0, 2]


def drafted(*tokens: int, pace: Pace = Pace(2, 4)) -> DraftSession:  # noqa: B008 # frozen
    session = DraftSession(PROMPT, pace)
    for token in tokens:
        session.drafted(token)
    return session


def test_a_chunk_is_due_when_it_is_full() -> None:
    session = drafted(5)
    assert session.take_proposal() is None
    session.drafted(6)
    assert session.take_proposal() == Proposal(0, 0, 3, 0, (5, 6), hash_of(PROMPT))
    assert session.take_proposal() is None


def test_a_part_of_a_chunk_is_due_when_no_more_may_be_drafted() -> None:
    session = drafted(5, pace=Pace(4, 1))
    assert not session.wants_token
    assert session.take_proposal() == Proposal(0, 0, 3, 0, (5,), hash_of(PROMPT))


def test_run_ahead_bounds_the_drafting_and_an_advance_frees_it() -> None:
    session = drafted(5, 6, 7, 8)
    assert not session.wants_token
    session.advance(3, (5,), Pace(2, 4))
    assert session.in_flight == 3
    assert session.wants_token


def test_run_ahead_zero_pauses() -> None:
    assert not DraftSession(PROMPT, Pace(1, 0)).wants_token


def test_an_advance_without_tokens_changes_the_pace_only() -> None:
    session = drafted(5, 6)
    assert session.advance(3, (), Pace(1, 9)) == 5
    assert (session.chain, session.in_flight, session.pace) == (0, 2, Pace(1, 9))


def test_an_advance_may_go_back() -> None:
    """A verifier was replaced before its last tokens were durable."""
    session = drafted(5, 6, 7)
    session.advance(3, (5, 6), Pace(2, 4))
    assert session.advance(4, (), Pace(2, 4)) == 4
    assert (session.line, session.decided, session.base) == ([*PROMPT, 5], 4, 4)
    assert session.advance(4, (8,), Pace(2, 4)) == 4
    assert session.line == [*PROMPT, 5, 8]


def test_an_advance_may_go_back_to_position_zero() -> None:
    session = drafted(5)
    assert session.advance(0, (), Pace(2, 4)) == 0
    assert session.line == []


def test_a_full_context_ends_the_drafting_and_sends_what_there_is() -> None:
    session = DraftSession(PROMPT, Pace(4, 4), chain=7, context=5)
    session.drafted(5)
    assert session.wants_token
    session.drafted(6)
    assert not session.wants_token
    assert session.take_proposal() == Proposal(0, 7, 3, 0, (5, 6), hash_of(PROMPT))


def test_an_advance_beyond_the_decided_text_is_desynchronised_and_changes_nothing() -> None:
    session = drafted(5, 6)
    with pytest.raises(Desynchronised, match="advance at 4, but only 3"):
        session.advance(4, (6,), Pace(9, 9))
    assert (session.line, session.decided, session.pace) == ([*PROMPT, 5, 6], 3, Pace(2, 4))


@pytest.mark.parametrize(
    ("field", "pace"),
    [
        ("chunk", (0, 4, 1)),
        ("run_ahead", (1, -1, 1)),
        ("branches", (1, 1, 0)),
    ],
)
def test_a_bad_pace_is_refused(field: str, pace: tuple[int, int, int]) -> None:
    with pytest.raises(InvalidParameter, match=field):
        Pace(*pace)


STEP = st.tuples(st.integers(-2, 0), st.lists(st.integers(0, 1), max_size=3)) | st.integers(0, 1)


@given(st.lists(STEP, max_size=30), st.integers(1, 3), st.integers(0, 5))
def test_rollback_leaves_a_cache_that_holds_the_text(
    steps: list[tuple[int, list[int]] | int], chunk: int, ahead: int
) -> None:
    """A cache cut to what `advance` returns, then fed to the end, always equals the text; chunks are contiguous."""
    pace = Pace(chunk, ahead)
    session, cache, decided = DraftSession([1], pace), [1], [1]
    sent: dict[int, list[int]] = {}
    for step in steps:
        if isinstance(step, int):
            if session.wants_token:
                session.drafted(step)
        else:
            position = max(0, session.decided + step[0])
            decided = decided[:position] + step[1]
            cache = cache[: session.advance(position, step[1], pace)]
        assert cache == session.line[: len(cache)]
        cache = list(session.line)
        assert session.line[: session.decided] == decided
        assert session.base <= len(session.line)
        assert session.in_flight <= ahead
        while proposal := session.take_proposal():
            chain = sent.setdefault(proposal.chain, [])
            assert proposal.offset == len(chain)
            chain += proposal.tokens
            assert session.line[proposal.base : proposal.base + len(chain)] == chain


@pytest.mark.parametrize(
    ("pace", "sent", "decided", "lateness"),
    [
        (Pace(2, 4), 4, 2, (2, 0)),
        (Pace(2, 4), 2, 3, (3, 1)),
        (Pace(2, 4), 0, 1, (1, 1)),
        (Pace(2, 4), 4, 5, (4, 0)),  # the bonus token lies beyond the run-ahead
        (Pace(2, 4), 2, 9, (4, 2)),
        (Pace(1, 0), 0, 3, (0, 0)),  # paused: nothing was asked for
    ],
)
def test_what_it_was_late_for(pace: Pace, sent: int, decided: int, lateness: tuple[int, int]) -> None:
    session = drafted(*range(5, 5 + sent), pace=pace)
    while session.take_proposal() is not None:
        pass
    assert session.lateness(len(PROMPT) + decided) == lateness


def test_who_goes_back_was_late_for_nothing() -> None:
    assert drafted(5, 6).lateness(2) == (0, 0)


# Trees


def branching(pace: Pace = Pace(1, 16, branches=2)) -> DraftSession:  # noqa: B008 # frozen
    return DraftSession(PROMPT, pace, branching=True)


def extended(session: DraftSession, *drawn: Drawn) -> list[tuple[int, ...]]:
    """The paths that one forward extends, each by what was drawn for it."""
    nodes = [session.take() for _ in drawn]
    paths = [session.path(node) for node in nodes]
    for node, found in zip(nodes, drawn, strict=True):
        session.extend(node, found)
    session.forward_ended()
    return paths


def sure(*tokens: int) -> Drawn:
    """All but certain of the first."""
    return Drawn(tokens, scores=(0.0, *(-9.0 for _ in tokens[1:])))


def torn(*tokens: int) -> Drawn:
    """Nearly as likely each."""
    return Drawn(tokens, scores=tuple(-0.1 * rank for rank in range(len(tokens))))


def test_the_likeliest_places_are_extended_first_runners_up_included() -> None:
    session = branching()
    assert extended(session, torn(5, 6)) == [()]
    assert extended(session, sure(7, 1), sure(8, 1)) == [(5,), (6,)]
    assert extended(session, sure(9, 1), sure(9, 1)) == [(5, 7), (6, 8)]
    assert session.line == [*PROMPT, 5, 7, 9]


def test_the_run_ahead_counts_nodes() -> None:
    session = branching(Pace(1, 2, branches=2))
    extended(session, torn(5, 6, 7))
    extended(session, torn(1, 2), torn(3, 4))
    assert session.in_flight == 4
    assert not session.wants_token
    session.advance(3, (6,), session.pace)
    assert session.in_flight == 1
    assert session.wants_token


def test_what_is_hardly_ever_decided_is_not_extended() -> None:
    session = branching()
    while session.wants_token:
        extended(session, Drawn((5, 6), scores=(0.0, -0.7)))
    depth = len(session.line) - len(PROMPT)
    assert 2 < depth < 16


def test_a_session_that_may_not_branch_makes_a_chain_whatever_its_pace_says() -> None:
    session = DraftSession(PROMPT, Pace(1, 8, branches=8))
    assert session.branches == 1
    session.drafted(5)
    session.drafted(6)
    assert session.take_proposal() == Proposal(0, 0, 3, 0, (5,), hash_of(PROMPT))
    assert session.take_proposal() == Proposal(0, 0, 3, 1, (6,))
    assert DraftSession(PROMPT, Pace(1, 8, branches=8), weighed=True, branching=True).branches == 1


def test_a_piece_is_as_deep_as_its_chunk_though_runners_up_wait_in_it() -> None:
    session = branching(Pace(3, 32, branches=4))
    pieces = []
    extended(session, torn(5, 6))
    for _ in range(8):
        extended(session, torn(5, 6), torn(5, 6))
        pieces.append(session.take_proposal() is not None)
    assert pieces == [False, True, False, False, True, False, False, True]


def test_a_session_that_turns_to_chains_keeps_the_likeliest_line_and_drafts_on() -> None:
    session = branching(Pace(1, 16, branches=4))
    extended(session, torn(5, 6))
    extended(session, torn(7, 1), torn(8, 1))
    extended(session, torn(9, 1), torn(9, 1), torn(2, 1), torn(3, 1))
    session.take_proposal()
    session.advance(3, (), Pace(4, 4))
    assert session.line == [*PROMPT, 5, 7, 9]
    assert session.in_flight == 3
    session.drafted(0)
    assert not session.wants_token
    assert session.line == [*PROMPT, 5, 7, 9, 0]
    session.advance(3, (5, 7), Pace(4, 4))
    session.drafted(2)
    assert session.line == [*PROMPT, 5, 7, 9, 0, 2]


def test_a_sent_runner_up_that_was_given_up_for_a_chain_may_still_be_decided() -> None:
    session = branching(Pace(1, 16, branches=4))
    extended(session, torn(5, 6))
    extended(session, torn(7, 1), torn(8, 1))
    session.take_proposal()
    session.advance(3, (), Pace(4, 4))
    session.advance(3, (6,), Pace(4, 4))
    assert (session.chain, session.base, session.in_flight) == (1, 4, 0)


def test_a_position_is_late_where_the_line_that_was_sent_ends_before_it() -> None:
    """However deep a branch was sent that is pruned by now."""
    session = branching(Pace(1, 16, branches=2))
    extended(session, torn(5, 6))
    extended(session, sure(7, 1), sure(8, 1))
    extended(session, sure(2, 1))
    session.take_proposal()
    assert session.lateness(7) == (4, 1)
    session.advance(3, (6,), session.pace)
    assert session.lateness(7) == (3, 2)


def test_what_a_drafter_is_torn_between_is_learnt() -> None:
    """It gives its second thought little, and is wrong about that: so it comes to extend it first."""
    session = branching(Pace(1, 64, branches=4))
    position = len(PROMPT)
    for _ in range(60):
        extended(session, Drawn((5, 6), scores=(0.0, -0.5)))
        session.advance(position, (6,), session.pace)
        position += 1
    extended(session, Drawn((5, 6), scores=(0.0, -0.5)))
    first, second = session.root.chances
    assert first == second  # a worse rank is never thought likelier
    assert second > -0.75
