"""Drafters that break one condition of exactness each, and send honest weights: the test has to refuse them. So it has
to refuse a verifier that takes a head's tokens without a test.

They are patches of the real ones, for the time of a `with`. A token is *sure* where the drafter gives it more than
an equal share. They draw with noise of their own: with the target's noise such mistakes become smaller, since the
replacement of a token that is held back is then often the same token.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

from specwire.core.draft import DraftRow, DraftSession
from specwire.core.law.noise import draw_quantised
from specwire.core.messages import Proposal, SourceKind, Verdict, Weights
from specwire.core.verify.session import VerifySession
from specwire.lm import guesses
from verify_service.engine import batch

TRIES = 16
PATIENCE_US = 60e3
Drawn = tuple[int, Weights]


def _sure(token: int, weights: Weights) -> bool:
    return weights.of(token) * len(weights.ids) > weights.total


def _again(weights: Weights, place: DraftRow, attempt: int = 0) -> int:
    """Draws with its own random numbers."""
    return draw_quantised(weights, place.seed ^ (attempt + 1), place.sampling.choice, place.position)


def _apart(weights: Weights, place: DraftRow) -> Drawn:
    """Nothing wrong with it."""
    return _again(weights, place), weights


def _restarting(weights: Weights, place: DraftRow) -> Drawn:
    """A token that is not sure is drawn again."""
    drawn = (_again(weights, place, attempt) for attempt in range(TRIES))
    return next((token for token in drawn if _sure(token, weights)), weights.ids[0]), weights


def _longest_of_two(weights: Weights, place: DraftRow) -> Drawn:
    """Of two chains, the one that the drafter expects to get further."""
    return max((_again(weights, place, attempt) for attempt in range(2)), key=weights.of), weights


_propose = DraftSession.take_proposal


def _next(session: DraftSession) -> Drawn | None:
    """The token that would be sent next."""
    node = session.unsent[0] if session.unsent else None
    return (node.token, node.weights) if node is not None and node.weights is not None else None


def _stopping(session: DraftSession) -> Proposal | None:
    """The chain ends before a token that is not sure."""
    following = _next(session)
    return _propose(session) if following is not None and _sure(*following) else None


def _flushing(session: DraftSession) -> Proposal | None:
    """A token that is not sure goes out at once; another one waits for company, until it is too late."""
    following = _next(session)
    return _propose(session) if following is not None and not _sure(*following) else None


# How each draws, and what it sends of that.
BIASED = {
    "value-dependent flush": (_apart, _flushing),
    "value-dependent stop": (_apart, _stopping),
    "longest of two chains": (_longest_of_two, _propose),
    "value-dependent restart": (_restarting, _propose),
}


_resolve = VerifySession.resolve


def _trusting(
    session: VerifySession, chosen: Sequence[int], window: Sequence[int], kind: SourceKind, *more: Any
) -> Verdict:
    """A head's tokens are taken as if the target had chosen them."""
    if kind is SourceKind.HEAD:
        chosen = [*window, chosen[-1]]
    return _resolve(session, chosen, window, kind, *more)


BIASED_VERIFIERS = {"a head's tokens on trust": _trusting}


@contextmanager
def biased(name: str) -> Iterator[None]:
    """Have the drafters of this process draft so, or its verifiers decide so.

    Where drafters hold tokens back, verifiers wait for these, but not for long. The others are waited for as ever: on a
    busy machine nothing of theirs would be tested else.
    """
    if name in BIASED_VERIFIERS:
        with patch.object(VerifySession, "resolve", BIASED_VERIFIERS[name]):
            yield
        return
    drawn, take_proposal = BIASED[name]
    patience_us = batch.PATIENCE_US if take_proposal is _propose else PATIENCE_US
    with (
        patch.object(guesses, "_drawn", drawn),
        patch.object(DraftSession, "take_proposal", take_proposal),
        patch.object(batch, "PATIENCE_US", patience_us),
    ):
        yield
