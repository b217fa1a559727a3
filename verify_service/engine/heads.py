"""What a head drafts for the next step, of all sessions at once."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from specwire.core.draft import HeadRequest
from specwire.core.policy.estimates import expected_tokens
from specwire.core.policy.heads import HeadDepth
from specwire.core.policy.tunables import PROBE_WINDOW
from specwire.core.verify.session import VerifySession
from specwire.core.verify.text_sources import HeadSource, promise
from verify_service.engine.sessions import Held

logger = logging.getLogger(__name__)


class Heads(Protocol):
    """A head beside the target, over the target's slots."""

    def catch_up(self, requests: Sequence[HeadRequest]) -> None:
        """Read what `draft` would have to read before it drafts."""
        ...

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
        asked = [
            _Asked(slot, held.session, source, most)
            for slot, held in decoding.items()
            if (source := held.session.head) is not None and _wants(held.session, source, alone, plain_us, most)
        ]
        if not asked:
            return
        began_us = now_us()
        depth = self._depth.choose([each.rates for each in asked], len(decoding), V)
        trying = depth == 0
        if trying:
            if not self._depth.due(began_us):
                return
            asked, depth = [max(asked, key=_untested_us)], min(PROBE_WINDOW, self._depth.most)
        try:
            self._propose(self._heads, asked, depth, decoding.values(), now_us)
        except Exception as error:
            logger.warning("the head failed, and is switched off: %s: %s", type(error).__name__, error)
            logger.debug("where it failed", exc_info=True)
            self._heads = None
        if trying:
            self._depth.tried(now_us() - began_us)

    def _propose(
        self, heads: Heads, asked: Sequence[_Asked], depth: int, held: Collection[Held], now_us: Callable[[], float]
    ) -> None:
        """All of a step's sessions wait for the head, and those that it drafts for pay, whatever comes of it.

        What it reads before it first drafts behind a text is like the rest of that prompt's prefill: nobody pays.
        """
        requests = [each.request(depth) for each in asked]
        unread = [request for each, request in zip(asked, requests, strict=True) if not each.source.read]
        began_us = read_us = now_us()
        if unread:
            heads.catch_up(unread)
            read_us = now_us()
        drafted = heads.draft(requests)
        for each, tokens in zip(asked, drafted, strict=True):
            each.source.read = True
            each.source.propose(tokens)
        ended_us = now_us()
        took_us = ended_us - read_us
        self._depth.observe(len(asked), depth, took_us, ended_us)
        for one in held:
            one.running.since_us += ended_us - began_us
        for each in asked:
            each.session.ledger.charge(took_us, 0, 0.0, took_us * len(held) / len(asked))


@dataclass(frozen=True, slots=True)
class _Asked:
    """A session that a head may draft for."""

    slot: int
    session: VerifySession
    source: HeadSource
    most: int

    @property
    def rates(self) -> list[float]:
        return self.source.acceptance.rates(self.most)

    def request(self, depth: int) -> HeadRequest:
        session = self.session
        return HeadRequest(self.slot, session.text.tokens, session.sampling, min(depth, session.room - 1))


def _untested_us(asked: _Asked) -> float:
    return asked.session.ledger.elapsed_us - asked.source.tested_us


def _wants(session: VerifySession, source: HeadSource, alone: bool, plain_us: float, most: int) -> bool:
    """Whether a head's tokens could be tested next, and are not there yet.

    A session whose ledger is used up could not bear a window, and drafting is charged to it as well. alone: what the
    text itself proposes is looked up in any case, and may promise more than a head could. most: tokens of the head.
    """
    if not session.trusting or session.room < 2 or source.proposed:
        return False
    if session.ledger.spare_us(plain_us) <= 0.0:
        return False
    if not alone or session.ngram is None:
        return True
    return promise(session.ngram.look()) < expected_tokens(source.acceptance.rates(most), most)
