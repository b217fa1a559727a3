"""A session in an engine: what its next step may cost it, and what it is charged for. Pure; microseconds throughout.

The engine and the simulator share it: one of them runs forwards, the other takes their time to be V(m).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from specwire.core.chain import Offer, Proposal
from specwire.core.constraint import Matcher
from specwire.core.expectation import DueAnswer, Expectations
from specwire.core.shares import MOST_WINDOW, Awaited, StepCandidate
from specwire.core.tail import Verdict
from specwire.core.verification import Allowance, VerifySession

LIVE = (Offer.STARTED, Offer.EXTENDED)


@dataclass(slots=True, eq=False)
class RunningSession:
    """`since_us`: when the time that the session's next verdict costs began."""

    session: VerifySession
    since_us: float
    expectations: Expectations = field(default_factory=Expectations)

    def propose(self, proposal: Proposal, arrived_us: float) -> Offer:
        """A proposal arrived."""
        offer = self.session.offer(proposal)
        live = offer in LIVE
        if live or offer is Offer.CONTRADICTED:
            self.expectations.proposal(proposal.source, proposal.base, proposal.offset, arrived_us, live)
        return offer

    def allow(self, allowance: Allowance, arrived_us: float) -> None:
        """Progress arrived. Time without room is nobody's cost."""
        paused = self.session.room == 0
        self.session.allow(allowance)
        if paused:
            self.since_us = arrived_us

    def begin(self, matcher: Matcher, now_us: float) -> None:
        """See VerifySession.begin. Time before it is nobody's cost."""
        self.session.begin(matcher)
        self.since_us = now_us

    def resume(
        self, tokens: Sequence[int], allowance: Allowance, now_us: float, epoch: int = 0
    ) -> Sequence[Verdict] | None:
        """See VerifySession.resume. Another connection has other delays; the ledger's balance stays: it is newer."""
        paused = self.session.room == 0
        verdicts = self.session.resume(tokens, allowance, epoch)
        if verdicts is not None:
            self.expectations = Expectations()
            self.since_us = now_us if paused else self.since_us
        return verdicts

    def candidate(self, slot: int, cached: int, plain_us: float, waited_us: float, look: bool = True) -> StepCandidate:
        """The session as the scheduler sees it.

        waited_us: since the last step. plain_us: of a session alone. look: for what the verifier itself may guess.
        """
        session = self.session
        source, drafted, at_hand, room = session.source, 0, 0, session.room
        if source is not None:
            drafted = len(session.window(MOST_WINDOW))
            # A part of a chunk may be at hand that no window can take: it is not missing for that.
            at_hand = max(drafted, len(session.chains.window(session.position, MOST_WINDOW)))
        missing = max(0, min(session.allowance.due, MOST_WINDOW, room - 1) - at_hand)
        due = self.expectations.due(plain_us) if missing > 0 else None
        if source is None:
            source = due.source if due is not None else 0
        return StepCandidate(
            slot,
            room,
            session.position - cached,
            drafted,
            session.ledger.spare_us(plain_us) - waited_us,
            session.chains.acceptance(source),
            None if due is None else Awaited(missing, due.expected_us, due.latest_us, due.chance),
            missing,
            session.look() if look else None,
            guess_untested_us=session.guess_untested_us,
            chain_untested_us=session.chain_untested_us,
            whole=session.whole(MOST_WINDOW),
        )

    def decided(self, now_us: float, tokens: int, plain_us: float | None, waited_us: float, part: float) -> DueAnswer:
        """A verdict of `tokens` goes out, and is charged for the time since the last one.

        Args:
            plain_us: the plain step of the same batch. None: this step was it (no draft token tested, nothing waited
                for), or a prompt shared it.
            waited_us: the step waited for proposals.
            part: of what the step took beyond waiting and the plain step, for windows: see `part_of`.

        Returns:
            The delay from a verdict to the proposal of a source that answered it, to be reported with this one.
        """
        spent_us = now_us - self.since_us
        if plain_us is None:
            self.session.ledger.charge(spent_us, tokens, spent_us / tokens)
        else:
            cost_us = plain_us + waited_us + part * (spent_us - plain_us - waited_us)
            self.session.ledger.charge(spent_us, tokens, plain_us, cost_us)
        self.since_us = now_us
        return self.expectations.verdict(self.session.position, now_us, waited_us > 0)

    def nothing_decided(self, now_us: float) -> None:
        """Charge a step that decided no token, for the time since the last verdict."""
        self.session.ledger.charge(now_us - self.since_us, 0, 0.0)
        self.since_us = now_us
