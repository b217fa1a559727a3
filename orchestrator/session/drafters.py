"""The drafters of one session: what each may send, how it is to draft, and what was learnt about it."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable
from typing import Protocol

from orchestrator.options import OrchestratorOptions
from orchestrator.peers.models import Info
from orchestrator.peers.peer import MOST_RELAYED, DrafterPeer, Experience, Quota, VerifierPeer, share_host
from orchestrator.session.output import OutputTimings, SessionView, Timers, with_drafts
from orchestrator.session.verifier import Broken, Tell, Unplaced
from orchestrator.store import SessionRecord
from specwire.core import messages
from specwire.core.draft import fitting
from specwire.core.messages import Pace, Verdict
from specwire.core.policy.controller import Controller, Fixed, Planner, branches_of, parse_plan
from specwire.core.policy.estimates import Forward, ForwardTimes
from specwire.core.session import Session, State
from specwire.rpc import convert
from specwire.telemetry.logs import of_session
from specwire.telemetry.tally import DrafterCounts
from specwire.telemetry.tracing import Span
from specwire.v1 import common_pb2, draft_pb2

# ----------------------------------------------------------------------------------------------------------------------
# One drafter of one session: its number there, what it may send, and how it is to draft.


class PlannedFor(Protocol):
    """A verifier as a drafter's planner sees it. forward_times: V(m). experience: what sessions there learnt.

    waits: it can wait for proposals.
    """

    @property
    def info(self) -> Info | None: ...

    @property
    def forward_times(self) -> ForwardTimes: ...

    @property
    def experience(self) -> Experience: ...

    @property
    def waits(self) -> bool: ...


class SessionDrafter:
    """A drafter's part in a session, from the moment it is assigned until it is lost, refuses, or is closed.

    `source` numbers it among all that the session ever had. Its planner learns from its own proposals only, so a poor
    drafter does not spoil the estimates of another one.

    Args:
        plan: auto, or a fixed plan for every session; see `specwire.core.policy.controller.parse_plan`.
        tell: is called with what happens. on_lost: the drafter or its link is gone. on_refused: it will not serve the
        session for now.
    """

    def __init__(
        self,
        source: int,
        peer: DrafterPeer,
        record: SessionRecord,
        plan: str,
        stats: DrafterCounts,
        tell: Tell,
        on_lost: Callable[[SessionDrafter], None],
        on_refused: Callable[[SessionDrafter, str], None],
    ) -> None:
        self.source = source
        self.peer = peer
        self.stats = stats
        self.info = peer.info or Info()
        self._record = record
        self._fixed = parse_plan(plan)
        self._branches = branches_of(plan)
        self._tell = tell
        self._on_lost = on_lost
        self._on_refused = on_refused
        self._quota, self._burst = Quota(), Quota(MOST_RELAYED)
        self._planner: Planner | None = None
        self._apart = False
        self._told = (Pace(), 0)
        self._learnt = False
        self._handle = peer.attach(self)
        self.has_proposed = False

    # How it drafts

    def use_verifier(self, verifier: PlannedFor, again: bool) -> None:
        """Plan for this verifier from now on. again: the drafter has another connection than before in this session."""
        shared = share_host(verifier.info or Info(), self.info)
        self._apart = not shared
        forward = verifier.forward_times
        if self._fixed is not None:
            self._planner = Fixed(self._fixed)
            return
        there = verifier.experience.recall(self._record, self.info)
        known = self._planner or there
        fresh = Controller(forward, shared, self._branches, verifier.waits)
        self._planner = known.successor(forward, shared, there) if known else fresh
        # Sessions that come while this one lasts decide with it (`InTurns`). One that moved there knows less of it than
        # who was there.
        if there is None or known is there or not there.plans_for(forward):
            verifier.experience.keep(self._record, self.info, self._planner)
        if again:
            self._planner.drafter_changed()

    def begin(self, shown: bool, renews: bool = False) -> None:
        """Open the drafter in the session, with the first plan. renews: see `DrafterReady`."""
        self._told = self._planned(shown)
        self._tell(messages.DrafterReady(self.source, *self._told, renews))

    def plan(self, shown: bool) -> None:
        """Plan again. shown: a reader wants to see what it drafts."""
        planned = self._planned(shown)
        if planned != self._told:
            self._told = planned
            self._tell(messages.PacePlanned(self.source, *planned))

    def _planned(self, shown: bool) -> tuple[Pace, int]:
        if self._planner is None:
            return self._told
        plan = self._planner.plan()
        if shown and self._apart and self._fixed is None:
            plan = with_drafts(plan)
        self.stats.plan = str(plan)
        return fitting(plan.pace, self._record.sampling), plan.due

    def observe(self, verdict: Verdict, forward: Forward | None, shown: bool) -> None:
        """A verdict came, of this source's tokens or not."""
        if self._planner is not None:
            self._planner.observe_verdict(verdict.seen_by(self.source), forward)
            self._learnt = True
            if self._planner.time_to_plan:
                self.plan(shown)

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
        if not 0.0 <= proposal.expected <= len(proposal.tokens):
            proposal.expected = 0.0  # an impossible estimate (NaN included) is none
        if self._planner is not None:
            seen = convert.proposal_from_wire(proposal) if proposal.parents else proposal
            self._planner.observe_proposal(seen, proposal.draft_us, time.monotonic_ns() / 1000)
        self._tell(messages.ProposalArrived(proposal))

    def on_refused_by_drafter(self, refused: common_pb2.Refused) -> None:
        self._on_refused(self, refused.message)

    def on_drafter_lost(self) -> None:
        self._on_lost(self)

    def on_broken(self, error: Exception) -> None:
        self._tell(Broken(error))

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
            pace=convert.pace_to_wire(effect.pace),
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
            pace=convert.pace_to_wire(effect.pace),
            epoch=epoch,
        )
        self.peer.link.send(draft_pb2.ConnectDraftRequest(advances=[advance]))

    def close(self) -> None:
        self.peer.close(self._handle, self._quota.owed)

    def bequeath(self, verifier: PlannedFor) -> None:
        """Leave what was learnt with this verifier to the next session."""
        if self._planner is not None and self._learnt and self._planner.plans_for(verifier.forward_times):
            verifier.experience.keep(self._record, self.info, self._planner)

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

    shown: a reader wants to see what they draft. tell: hears what happens.

    Invariant: sources rise, and are never used twice in a session.
    """

    def __init__(
        self,
        view: SessionView,
        options: OrchestratorOptions,
        timers: Timers,
        tell: Tell,
    ) -> None:
        self.refusals: Counter[DrafterPeer] = Counter()
        self.shown = False
        self._view = view
        record = view.record
        # Rules that weigh draft tokens by the distribution they were drawn from allow one source only.
        most = 1 if record.sampling.weighed else options.drafters_per_session
        # A session that was begun elsewhere under a rule not allowed here goes on without drafters.
        self._most = most if record.drafting and record.sampling.rule in options.rules else 0
        self._plan = options.plan
        self._timers = timers
        self._tell = tell
        self._session: Session
        self._verifier: VerifierPeer | None = None
        self._by_source: dict[int, SessionDrafter] = {}
        self._source = 0
        self._had: set[str] = set()
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
        drafting = SessionDrafter(
            self._source, peer, self._view.record, self._plan, stats, self._tell, self._on_lost, self._on_refused
        )
        self._by_source[self._source] = drafting
        if self._verifier is not None:
            drafting.use_verifier(self._verifier, drafting.info.weights_fingerprint in self._had)
        weights, before = drafting.info.weights_fingerprint, self._drew
        self._had.add(weights)
        self._drew = weights
        # With other weights than the last drafter's it would draw other tokens from the same noise (PROTOCOL.md, 6).
        drafting.begin(self.shown, self._view.record.sampling.weighed and before not in (None, weights))

    def use_verifier(self, verifier: VerifierPeer) -> None:
        """Adapt to another verifier: its forwards take another time, and it may be on another host."""
        self._verifier = verifier
        for drafting in self._by_source.values():
            drafting.use_verifier(verifier, again=False)
        self.plan()

    def show(self) -> None:
        """A reader wants to see what they draft, from now on."""
        self.shown = True
        self.plan()

    def plan(self) -> None:
        for drafting in list(self._by_source.values()):
            drafting.plan(self.shown)

    def observe(self, verdict: Verdict, timings: OutputTimings) -> None:
        """A verdict came."""
        step, forward = timings.step, None
        took_us = step.forward_us + step.choose_us
        if step.sessions and took_us:
            ended_us = timings.verdict_received_ns / 1000
            known = step.sessions, step.plain_us, step.drafts_us, step.waited_us
            forward = Forward(ended_us, took_us, *known)
        for drafting in list(self._by_source.values()):
            drafting.observe(verdict, forward, self.shown)

    def _on_lost(self, drafting: SessionDrafter) -> None:
        self._view.stats.drafter_losses += 1
        self._part(drafting)

    def _part(self, drafting: SessionDrafter) -> None:
        drafting.stats.lost = True
        self._forget(drafting)
        self._tell(messages.DrafterLost(drafting.source))

    def _on_refused(self, drafting: SessionDrafter, message: str) -> None:
        shown = self._view.record.session_id[:8]
        logger.info("session %s: drafter refused: %s", shown, message, extra=of_session(shown))
        peer, name = drafting.peer, f"drafter {drafting.source}"
        self.refusals[peer] += 1
        if drafting.has_proposed:
            self._retries.pop(peer, None)
        retry = self._retries.get(peer, RETRY)
        self._retries[peer] = min(MOST_RETRY, 2 * retry)
        self._resting.add(name)
        self._timers.set(name, retry, lambda: self._tell(Unplaced()))
        self._view.stats.drafter_refusals += 1
        self._part(drafting)

    def _forget(self, drafting: SessionDrafter) -> None:
        self._by_source.pop(drafting.source, None)
        if self._verifier is not None:
            drafting.bequeath(self._verifier)

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
