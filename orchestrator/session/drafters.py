"""The drafters of one session: what each may send, and what it is told. How it drafts its verifier plans."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Sequence

from orchestrator.options import OrchestratorOptions
from orchestrator.peers.models import Info
from orchestrator.peers.peer import MOST_RELAYED, DrafterPeer, Quota, VerifierPeer, known_by, share_host
from orchestrator.session.output import SessionListener, SessionView
from orchestrator.session.stats import TracedProposal
from orchestrator.store import SessionRecord
from specwire.core import messages
from specwire.core.draft import fitting
from specwire.core.messages import AssignedDrafter, SourcePace, first_pace
from specwire.core.session import Session, State
from specwire.rpc import convert
from specwire.telemetry.logs import tell
from specwire.telemetry.tally import DrafterCounts
from specwire.telemetry.tracing import Span
from specwire.v1 import common_pb2, draft_pb2

# ----------------------------------------------------------------------------------------------------------------------
# One drafter of one session: its number there, what it may send, and how it is to draft.


class SessionDrafter:
    """A drafter's part in a session, from the moment it is assigned until it is lost, refuses, or is closed.

    `source` numbers it among all that the session ever had.

    Args:
        plan: auto, or a fixed plan for every session; see `specwire.core.messages.parse_plan`.
        tell: is called with events. on_lost: the drafter or its link is gone. on_refused: it will not serve the session
        for now. on_broken: a bug of ours.
    """

    def __init__(
        self,
        source: int,
        peer: DrafterPeer,
        record: SessionRecord,
        plan: str,
        stats: DrafterCounts,
        tell: Callable[[messages.Event], None],
        on_lost: Callable[[SessionDrafter], None],
        on_refused: Callable[[SessionDrafter, str], None],
        on_broken: Callable[[Exception], None],
    ) -> None:
        self.source = source
        self.peer = peer
        self.stats = stats
        self.info = peer.info or Info()
        self._record = record
        self._plan = plan
        self._tell = tell
        self._on_lost = on_lost
        self._on_refused = on_refused
        self._on_broken = on_broken
        self._quota, self._burst = Quota(), Quota(MOST_RELAYED)
        self._handle = peer.attach(self)
        self.has_proposed = False

    def told(self, verifier: Info | None) -> AssignedDrafter:
        """What a verifier is told of it."""
        return AssignedDrafter(self.source, known_by(self._record, self.info), self.shares_cores(verifier), self._plan)

    def shares_cores(self, verifier: Info | None) -> bool:
        return verifier is not None and share_host(verifier, self.info)

    def begin(self, verifier: Info | None, renews: bool = False) -> None:
        """Open the drafter in the session. renews: see `DrafterReady`."""
        self._tell(messages.DrafterReady(self.source, first_pace(self._plan, self.shares_cores(verifier)), renews))

    # From the drafter

    def on_proposal(self, proposal: common_pb2.Proposal) -> None:
        if not self._quota.take(len(proposal.tokens)):
            self.peer.link.cut("the drafter sent more tokens than it was asked for")
            return
        self.has_proposed = True
        if not self._burst.take(len(proposal.tokens)):
            return  # what a stall held back: old, and too much for the verifier at once
        # It is relayed as it came, without fields that this version does not know; the verifier judges the rest
        # (`Chains.offer`).
        proposal.source = self.source
        proposal.DiscardUnknownFields()
        # One too many is out of range as well, and no flood.
        del proposal.parents[len(proposal.tokens) + 1 :]
        del proposal.weights[len(proposal.tokens) + 1 if self._record.sampling.weighed else 0 :]
        self._tell(messages.ProposalArrived(proposal))

    def on_refused(self, refused: common_pb2.Refused) -> None:
        self._on_refused(self, refused.message)

    def on_lost(self) -> None:
        self._on_lost(self)

    def on_broken(self, error: Exception) -> None:
        self._on_broken(error)

    # To the drafter

    def open(self, effect: messages.OpenDrafter, epoch: int, span: Span) -> None:
        self._ask(effect.pace.nodes)
        record = self._record
        self.peer.tell_vocabulary(record.vocabulary_fingerprint)
        opened = draft_pb2.OpenDraft(
            handle=self._handle,
            tokens=effect.tokens,
            sampling=convert.sampling_to_wire(record.sampling),
            vocabulary_fingerprint=record.vocabulary_fingerprint,
            pace=convert.pace_to_wire(fitting(effect.pace, record.sampling)),
            epoch=epoch,
            prompt_length=len(record.prompt),
            traceparent=span.traceparent,
        )
        self.peer.link.send(draft_pb2.ConnectDraftRequest(opens=[opened]))

    def advance(self, effect: messages.AdvanceDrafter, epoch: int) -> None:
        self._ask(effect.pace.nodes)
        advance = draft_pb2.Advance(
            handle=self._handle,
            position=effect.position,
            tokens=effect.tokens,
            pace=convert.pace_to_wire(fitting(effect.pace, self._record.sampling)),
            epoch=epoch,
        )
        self.peer.link.send(draft_pb2.ConnectDraftRequest(advances=[advance]))

    def close(self) -> None:
        self.peer.close(self._handle, self._quota.owed)

    def _ask(self, tokens: int) -> None:
        self._quota.ask(tokens)
        self._burst.ask(tokens)


# ----------------------------------------------------------------------------------------------------------------------
# The drafters of one session. They are independent: the loss of one changes nothing for the others.

logger = logging.getLogger(__name__)

# Seconds until a session that a drafter refused for the moment is placed again; doubled with every refusal.
RETRY = 1.0
MOST_RETRY = 30.0


class Drafters:
    """Up to `options.drafters_per_session` at a time. `refusals`: how often each refused this session.

    driver: hears what happens.

    Invariant: sources rise, and are never used twice in a session.
    """

    def __init__(self, view: SessionView, options: OrchestratorOptions, driver: SessionListener) -> None:
        self.refusals: Counter[DrafterPeer] = Counter()
        self._view = view
        record = view.record
        # Rules that weigh draft tokens by the distribution they were drawn from allow one source only.
        most = 1 if record.sampling.weighed else options.drafters_per_session
        # A session that was begun elsewhere under a rule not allowed here goes on without drafters.
        self._most = most if record.drafting and record.sampling.rule in options.rules else 0
        self._plan = options.plan
        self._timers = view.timers
        self._driver = driver
        self._session: Session
        self._verifier: VerifierPeer | None = None
        self._by_source: dict[int, SessionDrafter] = {}
        self._source = 0
        self._drew: str | None = None
        self._retries: dict[DrafterPeer, float] = {}
        self._resting: set[str] = set()

    def __len__(self) -> int:
        return len(self._by_source)

    def drive(self, session: Session) -> None:
        """Draft for `session` from now on: this one, under its fence."""
        self._session = session

    @property
    def missing(self) -> int:
        """How many more drafters the session may have now; one that has just refused still counts for a while."""
        if self._session.state not in (State.WAITING, State.OPENING, State.RUNNING):
            return 0
        self._resting = {name for name in self._resting if self._timers.left(name) is not None}
        return max(0, self._most - len(self._by_source) - len(self._resting))

    def has(self, peer: DrafterPeer) -> bool:
        return any(drafting.peer is peer for drafting in self._by_source.values())

    # Who drafts

    def add(self, peer: DrafterPeer) -> None:
        """Let `peer` draft, too."""
        self._source += 1
        stats = self._view.stats.of_drafter(self._source, peer.info.model if peer.info is not None else "")
        reports = self._hear, self._on_lost, self._on_refused, self._driver.on_broken
        drafting = SessionDrafter(self._source, peer, self._view.record, self._plan, stats, *reports)
        self._by_source[self._source] = drafting
        weights, before = drafting.info.weights_fingerprint, self._drew
        self._drew = weights
        # With other weights than the last drafter's it would draw other tokens from the same noise (PROTOCOL.md, 6).
        renews = self._view.record.sampling.weighed and before not in (None, weights)
        drafting.begin(self._info, renews)

    def use_verifier(self, verifier: VerifierPeer) -> None:
        """It may be on the host of some of them."""
        self._verifier = verifier

    def told(self, sources: Sequence[int]) -> list[AssignedDrafter]:
        """What the verifier is told of these."""
        return [self._by_source[source].told(self._info) for source in sources if source in self._by_source]

    @property
    def _info(self) -> Info | None:
        """Of the verifier."""
        return None if self._verifier is None else self._verifier.info

    def note(self, paces: Sequence[SourcePace]) -> None:
        """The verifier has planned."""
        for each in paces:
            if (drafting := self._by_source.get(each.source)) is not None:
                drafting.stats.planned = each.reason

    def _hear(self, event: messages.Event) -> None:
        if self._view.trace is not None:
            match event:
                case messages.ProposalArrived(proposal=common_pb2.Proposal() as proposal):
                    self._view.trace(TracedProposal.of(proposal))
        self._driver.apply(event)

    def _on_lost(self, drafting: SessionDrafter) -> None:
        self._view.stats.drafter_losses += 1
        self._part(drafting)

    def _part(self, drafting: SessionDrafter) -> None:
        drafting.stats.lost = True
        self._forget(drafting)
        self._driver.apply(messages.DrafterLost(drafting.source))

    def _on_refused(self, drafting: SessionDrafter, message: str) -> None:
        tell(logger, self._view.record.session_id, "drafter refused: %s", message)
        peer, name = drafting.peer, f"drafter {drafting.source}"
        self.refusals[peer] += 1
        if drafting.has_proposed:
            self._retries.pop(peer, None)
        retry = self._retries.get(peer, RETRY)
        self._retries[peer] = min(MOST_RETRY, 2 * retry)
        self._resting.add(name)
        self._timers.set(name, retry, self._driver.on_unplaced)
        self._view.stats.drafter_refusals += 1
        self._part(drafting)

    def _forget(self, drafting: SessionDrafter) -> None:
        self._by_source.pop(drafting.source, None)

    # Effects; one for a drafter that is gone is ignored

    def open(self, effect: messages.OpenDrafter) -> None:
        if (drafting := self._by_source.get(effect.source)) is not None:
            drafting.open(effect, self._epoch, self._view.span)

    def advance(self, effect: messages.AdvanceDrafter) -> None:
        if (drafting := self._by_source.get(effect.source)) is not None:
            drafting.advance(effect, self._epoch)

    def close(self, effect: messages.CloseDrafter) -> None:
        if (drafting := self._by_source.get(effect.source)) is not None:
            self._close(drafting)

    @property
    def _epoch(self) -> int:
        return self._session.epoch(self._view.record.sampling.weighed)

    def _close(self, drafting: SessionDrafter) -> None:
        self._forget(drafting)
        drafting.close()

    def leave(self) -> None:
        """The session needs them no longer."""
        for drafting in list(self._by_source.values()):
            self._close(drafting)
