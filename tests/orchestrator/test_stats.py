"""A session's figures: what counts as proposed, tested and accepted, and what saved a forward."""

from __future__ import annotations

from itertools import product

import pytest

from orchestrator.session.stats import stats_of
from specwire.core.messages import Outcome, SourceKind, Verdict
from specwire.telemetry.tally import DraftCounts, SessionStats, late_counts, window_counts

A, R, B, D = Outcome.ACCEPTED, Outcome.RECOVERED, Outcome.BONUS, Outcome.DIRECT


def verdict(
    width: int, *outcomes: Outcome, kind: SourceKind = SourceKind.DRAFTER, source: int = 0, met: int = 0
) -> Verdict:
    return Verdict(10, (7,) * len(outcomes), outcomes, width, kind=kind, source=source, met=met)


@pytest.mark.parametrize(
    ("width", "outcomes", "counts"),
    [
        (0, (D,), (0, 0, 0)),
        (0, (A,), (1, 1, 1)),  # arrived during the forward and agreed with its only row
        (0, (R,), (1, 1, 0)),
        (3, (A, R), (3, 2, 1)),
        (3, (R,), (3, 1, 0)),
        (3, (A, A, A, B), (3, 3, 3)),
        (3, (A, A, A, A), (4, 4, 4)),
        (3, (A, A, A, R), (4, 4, 3)),
        (5, (A, A), (5, 2, 2)),  # the text's end stood in the window: what is behind it was neither tested nor refused
    ],
)
def test_draft_tokens_are_proposed_tested_and_accepted(
    width: int, outcomes: tuple[Outcome, ...], counts: tuple[int, int, int]
) -> None:
    stats = SessionStats(started=0.0)
    stats.count_verdict(verdict(width, *outcomes))
    assert stats.drafted == DraftCounts(*counts)
    assert (stats.target_forwards, stats.forwards_saved) == (1, len(outcomes) - 1)
    assert sum(stats.tested_at) == window_counts(outcomes, width).tested
    assert sum(stats.accepted_at) == window_counts(outcomes, width).accepted


def test_accepted_is_never_more_than_tested_nor_that_more_than_proposed() -> None:
    """Whatever a verifier says, of all and of each source."""
    for width in range(4):
        for length in range(5):
            for outcomes in product(Outcome, repeat=length):
                for counts in (window_counts(outcomes, width), late_counts(outcomes, width)):
                    assert 0 <= counts.accepted <= counts.tested <= counts.proposed
    with pytest.raises(ValueError, match="more accepted than tested, or more tested than proposed"):
        DraftCounts(1, 2, 1)


def test_a_head_s_tokens_have_their_own_figures_in_a_reply() -> None:
    stats = SessionStats(started=0.0)
    stats.count_verdict(verdict(4, A, R, kind=SourceKind.HEAD))
    stats.count_verdict(verdict(2, A, A, B, kind=SourceKind.HEAD))
    stats.count_verdict(verdict(1, R, kind=SourceKind.NGRAM))
    stats.outcomes.update((A, R, A, A, B, R))
    told = stats_of(stats, 3)
    assert (told.proposed_head, told.tested_head, told.accepted_head) == (6, 4, 3)
    assert (told.proposed_ngram, told.tested_ngram, told.accepted_ngram) == (1, 1, 0)
    assert (told.proposed, told.tested, told.accepted) == (7, 5, 3)
    assert not told.drafters


def test_a_drafter_has_its_windows_and_its_tokens_that_came_late() -> None:
    stats = SessionStats(started=0.0)
    drafters = [stats.of_drafter(source, "a model") for source in (1, 2, 3)]
    stats.count_verdict(verdict(2, A, A, A, source=1, met=2))
    assert [each.drafts for each in drafters] == [DraftCounts(2, 2, 2), DraftCounts(1, 1, 1), DraftCounts()]
    stats.count_verdict(verdict(2, A, R, kind=SourceKind.NGRAM, source=0, met=0))
    assert sum(each.drafts.proposed for each in drafters) == stats.drafts[SourceKind.DRAFTER].proposed == 3


def test_of_what_others_decided_only_what_was_tested_is_known() -> None:
    """A session that was taken over: its output tells how tokens were decided, and so how many forwards ended."""
    stats = SessionStats(started=0.0)
    stats.count_verdict(verdict(3, A, R))
    stats.outcomes.update((A, R))
    stats.count_all((A, A, A, B, R, D, A, R))
    told = stats_of(stats, 3)
    assert (told.accepted, told.tested, told.proposed) == (4, 6, 3 + 4)
    assert told.tested == told.accepted + told.recovered
    assert (told.target_forwards, told.forwards_saved) == (1 + 3, 1)
