"""Opens, resumes and ends sessions; gathers the reports for each link.

Every request of a peer ends in an answer for one session, never in an exception. What fails for a session ends that
one.
"""

from __future__ import annotations

import logging
import math
from array import array
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from specwire.core.invalid import Code
from specwire.core.messages import AssignedDrafter, FinishReason, Proposal, Verdict
from specwire.core.model import ModelLost, SlotModel, out_of_memory
from specwire.core.policy.drafters import LearntDrafters
from specwire.core.policy.estimates import AcceptanceByPosition
from specwire.core.text import Ending
from specwire.core.verify.chains import Offer
from specwire.core.verify.references import ReferenceRoom, References
from specwire.core.verify.session import Allowance, RunningSession, VerifySession
from specwire.core.verify.shared_texts import VOTED_PRIORS, ScopeTexts, SharedIndex, SharedTexts
from specwire.core.verify.text_sources import NgramSource
from verify_service.engine.batch import OUT_OF_MEMORY_MESSAGE
from verify_service.engine.messages import (
    Admitted,
    Begun,
    Decided,
    Opening,
    QueuePatience,
    Refusal,
    Report,
    Reports,
    Tick,
)
from verify_service.engine.sessions import NO_SLOT, Held, Roster, SlotQueue
from verify_service.engine.shares import TenantShares

logger = logging.getLogger(__name__)

# Milliseconds after which who found no slot, or has all that it may have, is told to ask again.
RETRY_MS = 1000
# What a session is told that ends by a fault of the verifier's.
FAILED = "the verifier failed at this session; its log says why"


class SessionManager:
    """Owns the roster and the slots. `counts`: what was ignored or dropped, by reason.

    `texts`: of sessions, to propose from. `references`: of requests. `drafters`: what sessions learnt of theirs.

    Args:
        ngram: sessions may guess from their own text; without, from `known` only. detach_grace_us: how long a session
        is kept after it lost its link, or after an end that nobody acknowledged. patience: with sessions that find no
        slot. offers: where outcomes of proposals are counted. head: sessions take what a head proposes. shares: what
        tenants may have; None where there are none. text_memory: bytes for texts of sessions, which others of their
        scope may be proposed, and as many again for requests' own references.
        known: documents that sessions may be proposed, too.
    """

    def __init__(
        self,
        lm: SlotModel,
        now_us: Callable[[], float],
        ngram: bool,
        detach_grace_us: float,
        patience: QueuePatience = QueuePatience(),  # noqa: B008 # frozen
        offers: Counter[Offer] | None = None,
        head: bool = False,
        shares: TenantShares | None = None,
        text_memory: int = 0,
        known: ScopeTexts | None = None,
    ) -> None:
        self.roster = Roster()
        self.reports: Reports = {}
        self.counts: Counter[str] = Counter()
        self._offers: Counter[Offer] = Counter() if offers is None else offers
        self._lm = lm
        self._ngram = ngram
        # How often a head's tokens are accepted, of all sessions: of texts drawn by noise apart from greedy ones.
        self._head = {drawn: AcceptanceByPosition() for drawn in (False, True)} if head else None
        self.drafters = LearntDrafters()
        # When the last forwards began and ended.
        self.forwards: deque[tuple[float, float]] = deque(maxlen=4)
        self._now_us = now_us
        self._grace_us = detach_grace_us
        self._patience = patience
        self.slot_queue = SlotQueue(lm, self.roster, patience, self.counts, now_us, self._seated, shares)
        self._shares = shares
        self._position_bytes = lm.kv_bytes // (lm.slots * lm.info.context)
        self._eos_ids = frozenset(lm.info.eos_ids)
        self._known = known
        self.texts = SharedTexts(text_memory, lambda scope: any(held.scope == scope for held in self.roster))
        self.references = ReferenceRoom(text_memory, self._held_references)

    def report(self, link: int) -> Report:
        known = self.reports.get(link)
        if known is None:
            known = self.reports[link] = Report()
        return known

    def report_of(self, held: Held) -> Report:
        """The report for its link; nobody reads that of a session without a link."""
        return self.report(held.link) if held.attached else Report()

    def take_reports(self) -> Reports:
        reports, self.reports = self.reports, {}
        return reports

    # Commands

    def tick(self, tick: Tick) -> None:
        """Take a message in. Closes come first, so that opens find slots, and again for what it opened and closed."""
        self._close(tick)
        for opening in tick.opens:
            with self.containing(None, tick.link, opening.handle):
                self._open(tick.link, opening)
        said: tuple[tuple[str, Sequence[tuple[int, Any]], Callable[[Held, Any, Tick], None]], ...] = (
            ("proposal for", tick.proposals, self._propose),
            ("progress of", tick.progress, self._allow),
            ("drafters of", tick.drafters, self._assign),
            ("references of", tick.references, self._refer),
        )
        for what, each_told, take in said:
            for handle, told in each_told:
                with self.containing(None, tick.link, handle):
                    held = self.roster.get(tick.link, handle)
                    if held is None:
                        self.counts[f"{what} an unknown session"] += 1
                    else:
                        take(held, told, tick)
        self._close(tick)
        for session_id in tick.forgotten:
            self.slot_queue.forget(session_id)
            self.texts.forget(session_id)
            deleted = self.roster.holder(session_id)
            if deleted is not None and deleted.session.references is not None:
                deleted.session.references.drop()

    def begun(self, begun: Begun) -> None:
        """Start a session whose constraint is compiled, or refuse it.

        The handle may belong to another session by now, or to another connection of this one.
        """
        held = self.roster.get(begun.link, begun.handle)
        if held is None or (held.fence, held.attach) != begun.generation or held.session.matcher is not None:
            return
        if isinstance(begun.found, Refusal):
            self.fail(held, begun.found.code, begun.found.message)
        else:
            held.running.begin(begun.found, self._now_us())
            if not held.waiting:
                self._seated(held)

    def link_lost(self, link: int) -> None:
        """Detach a lost link's sessions. They decide up to their credit until their owner is back or given up."""
        for held in self.roster.on(link):
            self._detach(held)
        self.reports.pop(link, None)

    def turn_away(self, message: str) -> None:
        for held in [each for each in self.roster if each.waiting]:
            self.fail(held, Code.UNAVAILABLE, message)

    def _close(self, tick: Tick) -> None:
        for handle in tick.closes:
            held = self.roster.get(tick.link, handle)
            if held is not None:
                self.release(held)

    def _refer(self, held: Held, tokens: array[int], _: Tick) -> None:
        if held.session.references is not None:
            self.references.add(held.session.references, tokens)

    def _assign(self, held: Held, drafters: Sequence[AssignedDrafter], _: Tick | None = None) -> None:
        held.session.assign(drafters, lambda known_by: self.drafters.of(held.scope, known_by), waits=True)

    def _propose(self, held: Held, proposal: Proposal, tick: Tick) -> None:
        self._offers[held.running.propose(proposal, tick.arrived_us, self.forwards)] += 1

    def _allow(self, held: Held, allowance: Allowance, tick: Tick) -> None:
        held.running.allow(allowance, tick.arrived_us)
        self.slot_queue.unpark(held)

    # Taking in

    def _open(self, link: int, opening: Opening) -> None:
        """Open a session, or refuse it; after a refusal nothing is held under the handle."""
        self._vacate(link, opening)
        refusal = self._stale(opening)
        if refusal is None:
            self.roster.remember(opening)
            refusal = self._serve(link, opening)
        if refusal is not None:
            self.report(link).refused.append(refusal)

    def _vacate(self, link: int, opening: Opening) -> None:
        held = self.roster.get(link, opening.handle)
        if held is None:
            return
        if held.session_id == opening.session_id and not held.waiting and held.session.ready:
            self._part(held)
        else:
            self.release(held)

    def _stale(self, opening: Opening) -> Refusal | None:
        """Refuse all but the newest (fence, attach) of a session."""
        fence, attach = self.roster.newest(opening.session_id)
        if opening.generation >= (fence, attach):
            return None
        message = f"fence: ({opening.fence}, {opening.attach}) is older than ({fence}, {attach}), seen for this session"
        return Refusal(opening.handle, Code.FAILED_PRECONDITION, message, fence)

    def _serve(self, link: int, opening: Opening) -> Refusal | None:
        """If the session is held already, tell its older connection, and take over what can be used."""
        held = self.roster.holder(opening.session_id)
        if held is None:
            return self._admit(link, opening)
        if held.attached:
            message = f"fence: superseded by {opening.generation} of this session"
            refusal = Refusal(held.handle, Code.FAILED_PRECONDITION, message, opening.fence)
            self.report(held.link).refused.append(refusal)
        if held.waiting or not held.session.ready:
            self.release(held)
            return self._admit(link, opening)
        if self._resume(held, link, opening):
            return None
        self.counts["held session opened with another text"] += 1
        if held.session.references is not None:
            held.session.references.drop()  # what takes its place may need their memory
        return self._admit(link, opening, held)

    def _resume(self, held: Held, link: int, opening: Opening) -> bool:
        """Go on where the held session stands, without a prefill, if a fresh one would decide the same.

        Its ledger goes on too: Open's balance is that of an earlier verdict.
        """
        session = held.session
        held_for = (held.prompt_length, session.sampling, session.ending)
        if held_for != (opening.prompt_length, opening.sampling, self._ending(opening)):
            return False
        verdicts = held.running.resume(opening.tokens, opening.allowance, self._now_us(), opening.epoch)
        if verdicts is None:
            return False
        self.roster.attach(held, link, opening)
        held.deadline_us, held.scope, held.priority = opening.deadline_us, opening.scope, opening.priority
        held.tenant = opening.tenant
        session.drafters = {}  # its sources are numbered anew, and nothing that was told before counts
        self._assign(held, opening.drafters)
        if session.references is not None and opening.references:
            session.references.restart(opening.references)
        balance_us = round(session.ledger.balance_us)
        known = (verdict._replace(ledger_us=balance_us) for verdict in verdicts)
        tail = tuple(Decided(opening.handle, opening.attach, verdict) for verdict in known)
        self._admitted(held, len(opening.tokens), resumed=True, tail=tail)
        if session.finish is not None:
            self.linger(held)
        return True

    def _admit(self, link: int, opening: Opening, former: Held | None = None) -> Refusal | None:
        """`former`: the held session, with another text. Its cache is kept as far as the texts agree."""
        session = self._session(opening)
        if session.finish is not None:
            if former is not None:
                self.release(former)
            admitted = Admitted(opening.handle, opening.attach, len(opening.tokens))
            self.report(link).admitted.append(admitted)
            self._finished(self.report(link), opening.handle, opening.attach, session)
            return None
        held = Held(
            link,
            opening.handle,
            opening.fence,
            opening.attach,
            opening.session_id,
            NO_SLOT,
            opening.prompt_length,
            RunningSession(session, self._now_us()),
            opening.deadline_us,
            scope=opening.scope,
            priority=opening.priority,
            tenant=opening.tenant,
            most_length=min(self._lm.info.context, opening.prompt_length + opening.stopping.max_tokens),
        )
        self._assign(held, opening.drafters)
        if former is not None:
            self.slot_queue.succeed(former, held)
            return None
        beyond = self._beyond_limits(held)
        if beyond is not None:
            return Refusal(held.handle, Code.RESOURCE_EXHAUSTED, beyond, retry_ms=RETRY_MS)
        reason = self.slot_queue.enter(held)
        return None if reason is None else self._slotless(held, reason)

    def _slotless(self, held: Held, message: str) -> Refusal:
        """It found no slot."""
        if self._shares is not None:
            self._shares.count_refused(held.tenant)
        return Refusal(held.handle, Code.RESOURCE_EXHAUSTED, message, retry_ms=RETRY_MS)

    def _beyond_limits(self, held: Held) -> str | None:
        """Why its tenant may not have this session, too. Sessions without a link count as long as they are kept."""
        if self._shares is None:
            return None
        own = [each for each in (*self.roster, held) if each.tenant == held.tenant]
        kv_bytes = sum(each.most_length for each in own) * self._position_bytes
        return self._shares.refusal(held.tenant, len(own), kv_bytes)

    def _ending(self, opening: Opening) -> Ending:
        return Ending.of(opening.stopping, opening.prompt_length, self._eos_ids, self._lm.info.context)

    def _session(self, opening: Opening) -> VerifySession:
        session = VerifySession.opened(
            opening.tokens,
            opening.prompt_length,
            opening.sampling,
            self._ending(opening),
            opening.allowance,
            self._lm.info.vocabulary,
            ngram=opening.ngram,
            epoch=opening.epoch,
            prediction=opening.prediction,
            head=self._head[opening.sampling.temperature > 0.0] if self._head is not None and opening.head else None,
            others=lambda text: self._others(opening, text),
            own_text=self._ngram,
            references=lambda: self._references(opening),
            learnt=lambda: self._learnt(opening),
        )
        session.ledger.balance_us = float(opening.ledger_us)
        return session

    def _others(self, opening: Opening, text: Sequence[int]) -> list[NgramSource]:
        """What else may be proposed behind a text."""
        shared = self._shared(opening)
        found = []
        if shared is not None:
            index, drawn = SharedIndex(shared, text, opening.session_id), opening.sampling.temperature > 0.0
            found.append(NgramSource(text, index=index, learnt=shared.learnt[drawn]))
        if self._known is not None:  # what it learns of them no other session is told
            found.append(NgramSource(text, index=SharedIndex(self._known, text), priors=VOTED_PRIORS))
        return found

    def _learnt(self, opening: Opening) -> Sequence[AcceptanceByPosition] | None:
        """What its tenant's sessions found of guesses from their own texts. Another tenant is not told."""
        shared = self._shared(opening)
        return None if shared is None else shared.learnt_own[opening.sampling.temperature > 0.0]

    def _shared(self, opening: Opening) -> ScopeTexts | None:
        return self.texts.of(opening.scope) if opening.shared else None

    def _references(self, opening: Opening) -> References | None:
        """Those of a new session, which is to be proposed from them."""
        if not opening.references:
            return None
        references = self.references.begin(opening.references)
        if references is None:
            self.counts["references of a request: without room"] += 1
        return references

    def _held_references(self) -> list[References]:
        # Of a copy: figures are asked for beside the engine's thread.
        return [held.session.references for held in list(self.roster) if held.session.references is not None]

    def _seated(self, held: Held) -> None:
        if held.session.ready and not held.told:
            self._admitted(held, held.session.position)

    def _admitted(self, held: Held, position: int, resumed: bool = False, tail: tuple[Decided, ...] = ()) -> None:
        """`position`: the length of the text that it was opened with."""
        cached, held.told = min(position, self._lm.cached(held.slot)), True
        paces = held.running.new_paces()
        admitted = Admitted(held.handle, held.attach, position, resumed, tail, cached, paces)
        self.report(held.link).admitted.append(admitted)

    def _finished(self, report: Report, handle: int, attach: int, session: VerifySession) -> None:
        """Tell only that the session is over."""
        balance_us = round(session.ledger.balance_us)
        verdict = Verdict(session.position, (), (), 0, session.finish, ledger_us=balance_us)
        report.decided.append(Decided(handle, attach, verdict))

    # Letting go

    @property
    def next_deadline_us(self) -> float:
        expiring_us = min((held.expires_us for held in self.roster), default=math.inf)
        return min(expiring_us, self.slot_queue.next_parking_us)

    def expire(self, now_us: float) -> None:
        """End sessions whose deadline has passed, and drop those that were kept long enough."""
        for held in [each for each in self.roster if each.expires_us <= now_us]:
            if held.until_us <= now_us and held.waiting:
                message = f"no slot of this verifier came free within {self._patience.wait_us / 1e6:g} s"
                self.report(held.link).refused.append(self._slotless(held, message))
            elif held.until_us <= now_us:
                self.counts["session let go that nobody came back for"] += 1
            else:
                if not held.told:
                    self.report(held.link).admitted.append(Admitted(held.handle, held.attach, held.session.position))
                held.session.finish = FinishReason.DEADLINE
                self._finished(self.report_of(held), held.handle, held.attach, held.session)
            self.release(held)

    def linger(self, held: Held) -> None:
        """Keep an ended session until its owner closes it: the verdict with the end may be lost."""
        if held.session.references is not None:
            held.session.references.drop()
        if self._grace_us > 0:
            self.roster.rest(held, self._now_us() + self._grace_us)
        else:
            self.release(held)

    def _detach(self, held: Held) -> None:
        if self._grace_us > 0 and not held.waiting and held.session.ready:
            self._part(held)
        else:
            self.release(held)

    def _part(self, held: Held) -> None:
        held.session.detach()
        self.roster.detach(held, self._now_us() + self._grace_us)

    @contextmanager
    def containing(self, held: Held | None, link: int = 0, handle: int = 0) -> Iterator[None]:
        """What fails within is this session's own and ends it; who else takes part in the step goes on.

        A lost model is everybody's. None: whatever session is held under the handle by then, if one is.
        """
        try:
            yield
        except ModelLost:
            raise
        except Exception as error:
            held = held or self.roster.get(link, handle)
            if held is not None:
                self._break_off(held, error)
            else:
                logger.error("a command of a session failed", exc_info=error)
                self.report(link).refused.append(Refusal(handle, Code.INTERNAL, FAILED))

    def _break_off(self, held: Held, error: Exception) -> None:
        logger.error("a session failed at position %d", held.session.position, exc_info=error)
        if not self.roster.contains(held):
            return
        if out_of_memory(error):
            self.fail(held, Code.RESOURCE_EXHAUSTED, OUT_OF_MEMORY_MESSAGE)
        else:
            self.fail(held, Code.INTERNAL, FAILED)

    def fail(self, held: Held, code: Code, message: str) -> None:
        """Drop a session and tell its link why. A failed session leaves nothing."""
        self.report_of(held).refused.append(Refusal(held.handle, code, message))
        held.scope = b""
        self.texts.forget(held.session_id)
        self.release(held)

    def give_up(self, held: Held) -> None:
        """Fail a session whose constraint allows neither a token nor the end, or asks for too much."""
        self.fail(held, *held.session.dead_end)

    def release(self, held: Held) -> None:
        self.slot_queue.leave(held)
