"""The sessions of one drafter without threads or wire: every chain follows the text, failures stay where they are."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from typing import Any
from unittest.mock import patch

import grpc
import pytest
import torch

from draft_service.service import deliver
from draft_service.sessions import (
    FAILED,
    LONG_TEXT_ROWS,
    AdvanceSession,
    BeginSession,
    DraftedProposal,
    DraftingSession,
    Dropped,
    Expansion,
    OpenSession,
    Reply,
    RowTimes,
    Sessions,
)
from specwire.core.draft import DraftSession, Drawn
from specwire.core.law.constraint import Matcher
from specwire.core.law.sampling import Sampling, with_rule
from specwire.core.messages import Pace
from specwire.lm import Feed, LanguageModel, load_model
from specwire.lm.guesses import guesses
from specwire.rpc.service_thread import Stop
from tests.orchestrator.stack import plain
from tests.verify_service.automaton import ASKED, Automaton, Walk

MODEL = "scripted:7:vocab=8"


class Recorder:
    """A link that remembers."""

    def __init__(self) -> None:
        self.replies: list[Reply] = []

    def send(self, replies: list[Reply]) -> None:
        self.replies += replies

    def take(self) -> list[Reply]:
        taken, self.replies = self.replies, []
        return taken

    def proposed(self, handle: int) -> list[int]:
        mine = [reply for reply in self.replies if isinstance(reply, DraftedProposal) and reply.handle == handle]
        return [token for reply in mine for token in reply.proposal.tokens]


class Faulty:
    """A model whose next forward fails: by an exception, or with NaN in the slots of `poisoned`."""

    def __init__(self, model: LanguageModel) -> None:
        self.model = model
        self.raises = False
        self.poisoned: frozenset[int] = frozenset()
        self.failed: frozenset[int] = frozenset()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.model, name)

    def forward(self, feeds: Sequence[Feed]) -> torch.Tensor:
        if self.raises:
            self.raises = False
            raise RuntimeError("out of memory")
        logits = self.model.forward(feeds)
        self.failed = self.poisoned & {feed.slot for feed in feeds}
        for row, feed in enumerate(feeds):
            if feed.slot in self.failed:
                logits[row] = torch.nan
                self.model.discard(feed.slot)
        return logits


def open_session(link: Recorder, handle: int, tokens: Iterable[int], pace: Pace = Pace(1, 3)) -> OpenSession:  # noqa: B008  # a frozen value
    return OpenSession(link, handle, tuple(tokens), Sampling(), pace)


def run(sessions: Sessions, most: int = 50) -> None:
    for _ in range(most):
        if not sessions.wanting:
            break
        sessions.step()
    sessions.deliver()


def test_long_texts_share_the_rows_of_a_forward() -> None:
    """However many sessions come with long texts at once, a forward is no longer: it has a limit in time."""
    model, fed = load_model(MODEL, slots=4), list[list[int]]()
    forward = model.forward

    def watched(feeds: Sequence[Feed]) -> torch.Tensor:
        fed.append([len(feed.tokens) for feed in feeds])
        return forward(feeds)

    model.forward = watched  # type: ignore[method-assign]
    sessions, link = Sessions(model, guesses, deliver), Recorder()
    texts = [[(7 * index + handle) % 8 for index in range(LONG_TEXT_ROWS + 50)] for handle in range(3)]
    for handle, text in enumerate(texts):
        sessions.apply(open_session(link, handle, text))
    run(sessions)
    assert max(map(sum, fed)) <= LONG_TEXT_ROWS
    assert [link.proposed(handle) for handle in range(3)] == [plain(MODEL, text, 3) for text in texts]


def test_a_failed_forward_drops_its_sessions_and_the_next_ones_work(caplog: pytest.LogCaptureFixture) -> None:
    model: Any = Faulty(load_model(MODEL, slots=2))
    sessions, link = Sessions(model, guesses, deliver), Recorder()
    sessions.apply(open_session(link, 1, [3]))
    sessions.apply(open_session(link, 2, [4]))
    model.raises = True
    with caplog.at_level(logging.CRITICAL, logger="draft_service.sessions"):
        run(sessions)
    dropped = [reply for reply in link.take() if isinstance(reply, Dropped)]
    internal = grpc.StatusCode.INTERNAL.value[0]
    assert [(each.handle, each.code) for each in dropped] == [(1, internal), (2, internal)]
    assert len(sessions) == 0
    sessions.apply(open_session(link, 3, [3]))
    sessions.apply(open_session(link, 4, [4]))
    run(sessions)
    assert link.proposed(3) == plain(MODEL, [3], 3)
    assert link.proposed(4) == plain(MODEL, [4], 3)


def test_logits_that_are_not_finite_drop_their_session_alone() -> None:
    model: Any = Faulty(load_model(MODEL, slots=2))
    sessions, link = Sessions(model, guesses, deliver), Recorder()
    sessions.apply(open_session(link, 1, [3], Pace(1, 3)))
    sessions.apply(open_session(link, 2, [4], Pace(1, 3)))
    model.poisoned = frozenset({1})
    run(sessions)
    (dropped,) = [reply for reply in link.replies if isinstance(reply, Dropped)]
    assert dropped.code == grpc.StatusCode.ABORTED.value[0]
    assert dropped.message == "the drafter's logits are not finite"
    survivor = 3 - dropped.handle
    assert link.proposed(survivor) == plain(MODEL, [2 + survivor], 3)
    assert len(sessions) == 1


def fails(*_: object, **__: object) -> Any:
    raise ZeroDivisionError("a bug, put there by the test")


@pytest.mark.parametrize("place", ["draw", "extend", "forward_ended", "take_proposal", "ask"])
def test_what_fails_for_one_session_costs_that_one_its_drafter(place: str, caplog: pytest.LogCaptureFixture) -> None:
    def draw(logits: torch.Tensor, rows: Sequence[int], places: Sequence[Expansion]) -> list[Drawn]:
        return fails() if any(each.drafting.handle == 2 for each in places) else guesses(logits, rows, places)

    model = load_model(MODEL, slots=3)
    sessions, link = Sessions(model, draw if place == "draw" else guesses, deliver), Recorder()
    for handle in (1, 2, 3):
        sessions.apply(open_session(link, handle, [2 + handle]))
    drafting = sessions._open[link, 2]
    owner: Any = DraftingSession if place == "ask" else DraftSession
    method = fails if place == "draw" else getattr(owner, place)

    def called(self: object, *args: object) -> Any:
        return fails() if self in (drafting, drafting.session) else method(self, *args)

    with patch.object(owner, place, called) if place != "draw" else nullcontext():
        run(sessions)
    assert [each for each in link.replies if isinstance(each, Dropped)] == [Dropped(2, 13, FAILED)]
    for handle in (1, 3):
        assert link.proposed(handle) == plain(MODEL, [2 + handle], 3)
    assert len(sessions) == 2
    assert len(sessions._free) == 1
    assert "ZeroDivisionError" in caplog.text


def test_it_looks_for_commands_between_tokens() -> None:
    """Endless drafting keeps it neither from taking in an advance nor from stopping."""
    model, link = load_model(MODEL, slots=1), Recorder()
    sessions = Sessions(model, guesses, deliver)
    commands: list[AdvanceSession | Stop] = [AdvanceSession(link, 1, 1, (2,), Pace(1, 99)), Stop()]
    forward = model.forward

    def interrupted(feeds: Sequence[Feed]) -> torch.Tensor:
        sessions.inbox.put(commands.pop(0))
        return forward(feeds)

    model.forward = interrupted  # type: ignore[method-assign]  # commands come during forwards
    sessions.inbox.put(open_session(link, 1, [3], Pace(1, 99)))
    sessions.run()
    bases = [reply.proposal.base for reply in link.replies if isinstance(reply, DraftedProposal)]
    assert (sessions.tally.drafted, bases) == (2, [1, 2])
    assert sessions.inbox.weight == 0
    assert sessions.step_began_s is None


# By turns: of the eight ids these two may stand, then those two; no text ends.
FORM = Automaton([{1: 1, 2: 1}, {3: 0, 4: 0}], frozenset(), vocabulary=8, end=0)
PROMPT = (3, 5)
DRAWN = Sampling(temperature=1.5, seed=3, constraint=ASKED)
CONSTRAINED = [Sampling(constraint=ASKED), DRAWN, with_rule(DRAWN, "rejection"), with_rule(DRAWN, "block")]


@pytest.mark.parametrize("sampling", CONSTRAINED, ids=lambda sampling: sampling.rule_name)
def test_only_what_the_constraint_allows_is_proposed(sampling: Sampling) -> None:
    """Also after a contradiction, which takes the matcher back. Without a matcher the model says something else."""
    sessions, link = constrained(sampling, Walk(FORM))
    first = link.proposed(1)
    assert (len(first), forbidden(link, [])) == (12, [])
    kept = [*first[:4], 3 - first[4]]  # the other one of 1 and 2
    link.take()
    sessions.apply(AdvanceSession(link, 1, len(PROMPT), tuple(kept), Pace(3, 12)))
    run(sessions)
    assert (len(link.proposed(1)), forbidden(link, kept)) == (12, [])
    _, unguided = constrained(sampling, None)
    assert len(unguided.proposed(1)) == 12
    assert forbidden(unguided, [])


def constrained(sampling: Sampling, matcher: Matcher | None) -> tuple[Sessions, Recorder]:
    """A session that has drafted as far as it may; nothing before its constraint is there."""
    sessions, link = Sessions(load_model(MODEL, slots=1), guesses, deliver), Recorder()
    sessions.apply(OpenSession(link, 1, PROMPT, sampling, Pace(3, 12), prompt_length=len(PROMPT), number=4))
    assert not sessions.wanting
    sessions.apply(BeginSession(link, 1, 4, matcher))
    run(sessions)
    return sessions, link


def forbidden(link: Recorder, output: Sequence[int]) -> list[tuple[int, int]]:
    """What was proposed behind `output`, or might have been drawn there, and may not stand: (place, id)."""
    found = []
    replies = [reply.proposal for reply in link.replies if isinstance(reply, DraftedProposal)]
    tokens = [token for proposal in replies for token in proposal.tokens]
    weights = [each for proposal in replies for each in proposal.weights]
    for place, token in enumerate(tokens):
        mask = FORM.mask((len(output) + place) % 2)
        possible = weights[place].ids if weights else (token,)
        assert token in possible
        found += [(place, each) for each in possible if not mask[each]]
    return found


def test_what_a_row_costs_is_learnt_from_forwards_of_different_widths() -> None:
    times = RowTimes()
    for rows in (1, 4, 2, 8) * 20:
        times.observe(rows, 1000.0 + 50.0 * rows)
    assert times.row_us == pytest.approx(50.0)
    assert times.at(16) == pytest.approx(1800.0)


def test_a_wide_forward_in_a_bad_moment_does_not_make_rows_dear_for_ever() -> None:
    times = RowTimes()
    for rows, us in ((1, 1000.0), (16, 90_000.0)):
        times.observe(rows, us)
    assert 0.0 < times.row_us <= (3 - 1) * 1000.0 / 15 + 1e-6
    tried = 0
    for _ in range(2000):
        rows = 16 if times.row_us == 0.0 else 1
        times.observe(rows, 1000.0 + 100.0 * rows)
        tried += rows > 1
    assert 4 <= tried <= 20, "a wide one is tried now and then, and tells at once what rows cost"
    assert times.at(16) == pytest.approx(2600.0, rel=0.1)
