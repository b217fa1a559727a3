"""Takes sessions in and lets them go; gathers what is to be said to each link.

Whatever a peer asks ends in an answer for one session, never in an exception.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable

from specwire.core.limits import Ending, FinishReason
from specwire.core.running import Running
from specwire.core.verification import Allowance, Verdict, VerifySession
from specwire.lm import LanguageModel
from verify_service.commands import Admitted, Code, Decided, Opening, Proposed, Refusal, Report, Reports, Tick
from verify_service.roster import Held, Roster


class Reception:
    """Owns the roster. `counts`: what was ignored, by reason. ngram: sessions may guess from their own text."""

    def __init__(self, lm: LanguageModel, now_us: Callable[[], float], ngram: bool = True) -> None:
        self.roster = Roster(lm.slots)
        self.reports: Reports = {}
        self.counts: Counter[str] = Counter()
        self._lm = lm
        self._ngram = ngram
        self._now_us = now_us
        self._eos_ids = frozenset(lm.info.eos_ids)

    def report(self, link: int) -> Report:
        return self.reports.setdefault(link, Report())

    def take_reports(self) -> Reports:
        reports, self.reports = self.reports, {}
        return reports

    # Commands

    def tick(self, tick: Tick) -> None:
        """Closes come first, so that opens find slots, and again for what one message opened and closed."""
        self._close(tick)
        for opening in tick.opens:
            self._open(tick.link, opening)
        for proposed in tick.proposals:
            self._propose(tick, proposed)
        for handle, allowance in tick.progress:
            self._allow(tick, handle, allowance)
        self._close(tick)

    def link_lost(self, link: int) -> None:
        for held in self.roster.on(link):
            self.release(held)
        self.reports.pop(link, None)

    def _close(self, tick: Tick) -> None:
        for handle in tick.closes:
            held = self.roster.get(tick.link, handle)
            if held is not None:
                self.release(held)

    def _propose(self, tick: Tick, proposed: Proposed) -> None:
        held = self.roster.get(tick.link, proposed.handle)
        if held is None:
            self.counts["proposal for an unknown session"] += 1
            return
        held.running.propose(proposed.proposal, tick.arrived_us)

    def _allow(self, tick: Tick, handle: int, allowance: Allowance) -> None:
        held = self.roster.get(tick.link, handle)
        if held is None:
            self.counts["progress of an unknown session"] += 1
            return
        held.running.allow(allowance, tick.arrived_us)

    # Taking in

    def _open(self, link: int, opening: Opening) -> None:
        """After a refusal nothing is held under the handle."""
        refusal = self._supersede(link, opening)
        if refusal is None:
            refusal = self._admit(link, opening)
        if refusal is not None:
            self.report(link).refused.append(refusal)

    def _supersede(self, link: int, opening: Opening) -> Refusal | None:
        """The newest (fence, attach) of a session wins; its older holder is dropped and told."""
        same_handle = self.roster.get(link, opening.handle)
        if same_handle is not None:
            self.release(same_handle)
        if opening.generation < self.roster.newest(opening.session_id):
            fence, attach = self.roster.newest(opening.session_id)
            return Refusal(
                opening.handle,
                Code.FAILED_PRECONDITION,
                f"fence: ({opening.fence}, {opening.attach}) is older than ({fence}, {attach}), seen for this session",
            )
        self.roster.remember(opening)
        older = self.roster.holder(opening.session_id)
        if older is not None:
            self.fail(older, Code.FAILED_PRECONDITION, f"fence: superseded by {opening.generation} of this session")
        return None

    def _admit(self, link: int, opening: Opening) -> Refusal | None:
        session = self._session(opening)
        if session.finish is not None:
            self._admitted(link, opening)
            self._finished(link, opening.handle, opening.attach, session)
            return None
        slot = self.roster.take_slot()
        if slot is None:
            message = f"all {self._lm.slots} slots of this verifier are taken"
            return Refusal(opening.handle, Code.RESOURCE_EXHAUSTED, message)
        held = Held(
            link,
            opening.handle,
            opening.attach,
            opening.session_id,
            slot,
            Running(session, self._now_us()),
            opening.deadline_us,
        )
        self.roster.add(held)
        self._admitted(link, opening)
        return None

    def _session(self, opening: Opening) -> VerifySession:
        info = self._lm.info
        ending = Ending.of(opening.stopping, opening.prompt_length, self._eos_ids, info.context)
        session = VerifySession.opened(
            opening.tokens,
            opening.prompt_length,
            opening.sampling,
            ending,
            opening.allowance,
            info.vocabulary,
            ngram=self._ngram and opening.ngram,
        )
        session.ledger.balance_us = float(opening.ledger_us)
        return session

    def _admitted(self, link: int, opening: Opening) -> None:
        self.report(link).admitted.append(Admitted(opening.handle, opening.attach, len(opening.tokens)))

    def _finished(self, link: int, handle: int, attach: int, session: VerifySession) -> None:
        """Tell only that the session is over."""
        verdict = Verdict(session.position, (), (), 0, session.finish)
        self.report(link).decided.append(Decided(handle, attach, verdict, 0, round(session.ledger.balance_us)))

    # Letting go

    @property
    def next_deadline_us(self) -> float:
        return min((held.deadline_us for held in self.roster if held.deadline_us is not None), default=math.inf)

    def expire(self, now_us: float) -> None:
        """End the sessions whose deadline has passed."""
        if self.next_deadline_us > now_us:
            return
        for held in [each for each in self.roster if each.deadline_us is not None and each.deadline_us <= now_us]:
            held.session.finish = FinishReason.DEADLINE
            self._finished(held.link, held.handle, held.attach, held.session)
            self.release(held)

    def fail(self, held: Held, code: Code, message: str) -> None:
        """Drop a session and tell its link why."""
        self.release(held)
        self.report(held.link).refused.append(Refusal(held.handle, code, message))

    def release(self, held: Held) -> None:
        self.roster.remove(held)
        self._lm.discard(held.slot)
