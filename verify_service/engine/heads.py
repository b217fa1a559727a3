"""What a head drafts for the next step, of all sessions at once."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Protocol

from specwire.core.draft import HeadRequest
from specwire.core.policy.estimates import expected_tokens
from specwire.core.policy.heads import HeadDepth
from specwire.core.verify.session import VerifySession
from specwire.core.verify.text_sources import promise
from verify_service.engine.sessions import Held

logger = logging.getLogger(__name__)


class Heads(Protocol):
    """A head beside the target, over the target's slots."""

    def draft(self, requests: Sequence[HeadRequest]) -> list[list[int]]:
        """Behind each text up to as many tokens as are asked for."""
        ...


class HeadDrafting:
    """Lets a head draft where that is expected to pay. A head that fails is switched off, and ends nothing."""

    def __init__(self, heads: Heads, depth: HeadDepth) -> None:
        self._heads: Heads | None = heads
        self._depth = depth

    def draft(self, decoding: Mapping[int, Held], V: Callable[[int], float], now_us: Callable[[], float]) -> None:
        """Draft for those of the sessions, by slot, of which a token is decided next. V(m): their step of m rows."""
        if self._heads is None:
            return
        alone, plain_us = len(decoding) == 1, V(len(decoding))
        most = self._depth.most
        asked = [(slot, held.session) for slot, held in decoding.items() if _wants(held.session, alone, plain_us, most)]
        if not asked:
            return
        began_us = now_us()
        rates = [session.head.acceptance.rates(most) for _, session in asked if session.head is not None]
        depth = self._depth.choose(rates, len(decoding), V, began_us)
        if not depth:
            return
        requests = [
            HeadRequest(slot, session.text.tokens, session.sampling, min(depth, session.room - 1))
            for slot, session in asked
        ]
        try:
            drafted = self._heads.draft(requests)
        except Exception as error:
            logger.warning("the head failed, and is switched off: %s: %s", type(error).__name__, error)
            logger.debug("where it failed", exc_info=True)
            self._heads = None
            return
        for (_, session), tokens in zip(asked, drafted, strict=True):
            if session.head is not None:
                session.head.propose(tokens)
        ended_us = now_us()
        self._depth.observe(len(asked), depth, ended_us - began_us, ended_us)
        _charge(decoding.values(), [session for _, session in asked], ended_us - began_us)


def _charge(held: Collection[Held], drafted_for: Sequence[VerifySession], took_us: float) -> None:
    """All of a step's sessions wait for the head; those that it drafted for pay, whatever comes of it."""
    for each in held:
        each.running.since_us += took_us
    for session in drafted_for:
        session.ledger.charge(took_us, 0, 0.0, took_us * len(held) / len(drafted_for))


def _wants(session: VerifySession, alone: bool, plain_us: float, most: int) -> bool:
    """Whether a head's tokens could be tested next, and are not there yet.

    A session whose ledger is used up could not bear a window, and drafting is charged to it as well. alone: what the
    text itself proposes is looked up in any case, and may promise more than a head could. most: tokens of the head.
    """
    if session.head is None or not session.trusting or session.room < 2 or session.head.proposed:
        return False
    if session.ledger.spare_us(plain_us) <= 0.0:
        return False
    if not alone or session.ngram is None:
        return True
    return promise(session.ngram.look()) < expected_tokens(session.head.acceptance.rates(most), most)
