"""What one session's readers may be shown before it is decided; kept only where a reader has asked for it."""

from __future__ import annotations

from dataclasses import replace

from orchestrator.output import Output
from specwire.core.chain import Proposal
from specwire.core.drafting import Pace
from specwire.core.limits import Ending
from specwire.core.plan import Plan
from specwire.core.preview import Ahead, Preview, ProvisionalDraft, provisional
from specwire.core.scanning import PeekingScanner
from specwire.core.session import Session

SHOWN_PACE = Pace(1, 32)


def with_drafts(plan: Plan) -> Plan:
    """The plan for a session whose reader wants to see drafts: they go on where no gain of speed is expected from them.

    The verifier does not wait for them. Not for a drafter that would take computing time from the verifier.
    """
    return plan if plan.pace.run_ahead else replace(plan, pace=SHOWN_PACE, reason=f"shown; {plan.reason}")


class ProvisionalText:
    """Follows a session from the moment it is made: a chain that began before then is not known here.

    Readers are woken when the tokens have changed. The text is made when a reader takes it, so what a slow one skips
    costs nothing.
    """

    def __init__(
        self, session: Session, scanner: PeekingScanner, output: Output, vocabulary: int, ending: Ending
    ) -> None:
        self._session = session
        self._scanner = scanner
        self._output = output
        self._ending = ending
        self._preview = Preview(vocabulary, session.text)
        self._ahead = Ahead(session.emitted)
        self._made: ProvisionalDraft | None = None
        self._stopped = False

    def stop(self) -> None:
        """The session is driven elsewhere: nothing is provisional until it comes back."""
        self._stopped = True
        self._ahead, self._made = Ahead(self._session.emitted), None
        self._output.wake()

    def restart(self, session: Session, scanner: PeekingScanner) -> None:
        """The session is driven here again, as another one."""
        self._stopped = False
        self._session, self._scanner = session, scanner
        self._preview.follow(session.text)
        self.follow()

    def offer(self, proposal: Proposal) -> None:
        """Take in what a drafter proposes."""
        self._preview.offer(proposal, self._session.text)
        self.follow()

    def follow(self) -> None:
        """The session has moved."""
        if self._stopped:
            return
        self._preview.follow(self._session.text)
        ahead = Ahead.of(self._session, self._preview.tail(), self._ending)
        if ahead != self._ahead:
            self._ahead, self._made = ahead, None
            self._output.wake()

    def now(self) -> ProvisionalDraft:
        if self._made is None:
            self._made = provisional(self._ahead, self._session, self._scanner)
        return self._made
