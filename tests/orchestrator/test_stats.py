"""A session's figures: what counts as proposed, and acceptance by position."""

from __future__ import annotations

import pytest

from orchestrator.stats import SessionStats
from specwire.core.acceptance import Outcome
from specwire.core.chain import SourceKind
from specwire.core.events import VerdictArrived

A, R, B, D = Outcome.ACCEPTED, Outcome.RECOVERED, Outcome.BONUS, Outcome.DIRECT


@pytest.mark.parametrize(
    ("tested", "outcomes", "proposed"),
    [
        (0, (D,), 0),
        (0, (A,), 1),  # arrived during the forward and agreed with its only row
        (0, (R,), 1),
        (3, (A, R), 3),
        (3, (A, A, A, B), 3),
        (3, (A, A, A, A), 4),
        (3, (A, A, A, R), 4),
    ],
)
def test_late_draft_tokens_count_as_proposed(tested: int, outcomes: tuple[Outcome, ...], proposed: int) -> None:
    stats = SessionStats(started=0.0)
    stats.count_verdict(VerdictArrived(1, 10, (7,) * len(outcomes), outcomes), tested)
    assert (stats.proposed, stats.target_forwards) == (proposed, 1)
    assert outcomes.count(A) <= stats.proposed


def test_acceptance_is_counted_up_to_the_first_refusal() -> None:
    stats = SessionStats(started=0.0)
    stats.count_verdict(VerdictArrived(1, 10, (7, 7, 7), (A, A, R)), 5)
    assert stats.tested_at[:4] == [1, 1, 1, 0]
    assert stats.accepted_at[:4] == [1, 1, 0, 0]


def test_kinds_of_sources_are_counted_apart() -> None:
    stats = SessionStats(started=0.0)
    stats.count_verdict(VerdictArrived(1, 10, (7, 7, 7), (A, A, R)), 5)
    stats.count_verdict(VerdictArrived(1, 13, (7, 7, 7, 7), (A, A, A, A), kind=SourceKind.NGRAM), 3)
    assert (stats.proposed, stats.proposed_ngram, stats.accepted_ngram) == (9, 3, 3)
