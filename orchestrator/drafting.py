"""One drafter of one session: its number there, what it may send, and how it is to draft."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Protocol

from orchestrator import messages
from orchestrator.experience import share_host
from orchestrator.link import Info
from orchestrator.peers import DrafterPeer, VerifierPeer
from orchestrator.provisional import with_drafts
from orchestrator.quota import MOST_RELAYED, Quota
from orchestrator.stats import DrafterCounts
from orchestrator.store import SessionRecord
from specwire.core import effects as fx
from specwire.core import events as ev
from specwire.core.chain import Proposal
from specwire.core.contention import Forward
from specwire.core.controller import Controller
from specwire.core.drafting import Pace, fitting
from specwire.core.plan import Plan
from specwire.core.planner import Fixed, Planner
from specwire.rpc import convert
from specwire.telemetry.tracing import Span
from specwire.v1 import common_pb2, draft_pb2, verify_pb2


class DrafterOwner(Protocol):
    """The session, as its drafters see it. epoch: see `specwire.core.epoch`."""

    @property
    def epoch(self) -> int: ...
    @property
    def span(self) -> Span: ...
    def apply(self, event: ev.Event) -> None: ...
    def on_draft(self, proposal: Proposal, draft_us: int) -> None: ...
    def on_broken(self, error: Exception) -> None: ...


class SessionDrafter:
    """A drafter's part in a session, from the moment it is assigned until it is lost, refuses, or is closed.

    `source` numbers it among all that the session ever had. What its planner is told is its own doing only: a poor
    drafter must not spoil what is believed of another one.

    Args:
        fixed: a plan for every session, instead of a controller.
        on_lost: the drafter or its link is gone. on_refused: it will not serve the session for now.
    """

    def __init__(
        self,
        source: int,
        peer: DrafterPeer,
        owner: DrafterOwner,
        record: SessionRecord,
        fixed: Plan | None,
        stats: DrafterCounts,
        on_lost: Callable[[SessionDrafter], None],
        on_refused: Callable[[SessionDrafter, str], None],
    ) -> None:
        self.source = source
        self.peer = peer
        self.stats = stats
        self.info = peer.info or Info()
        self._owner = owner
        self._record = record
        self._fixed = fixed
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

    def use_verifier(self, verifier: VerifierPeer, again: bool) -> None:
        """Plan for this verifier from now on. again: the drafter's line is another one than it was in this session."""
        shared = share_host(verifier.info or Info(), self.info)
        self._apart = not shared
        forward = verifier.forward_times
        if self._fixed is not None:
            self._planner = Fixed(self._fixed)
            return
        known = self._planner or verifier.experience.recall(self._record.sampling.rule, self.info)
        self._planner = known.successor(forward, shared) if known else Controller(forward, shared)
        if again:
            self._planner.drafter_changed()

    def begin(self, shown: bool) -> None:
        """Have the session open it, with the first plan."""
        self._told = self._planned(shown)
        self._owner.apply(ev.DrafterReady(self.source, *self._told))

    def plan(self, shown: bool) -> None:
        """Plan anew. shown: a reader wants to see what it drafts."""
        planned = self._planned(shown)
        if planned != self._told:
            self._told = planned
            self._owner.apply(ev.PacePlanned(self.source, *planned))

    def _planned(self, shown: bool) -> tuple[Pace, int]:
        if self._planner is None:
            return self._told
        plan = self._planner.plan()
        if shown and self._apart and self._fixed is None:
            plan = with_drafts(plan)
        self.stats.plan = str(plan)
        return fitting(plan.pace, self._record.sampling), plan.due

    def observe(
        self, event: ev.VerdictArrived, verdict: verify_pb2.Verdict, forward: Forward | None, shown: bool
    ) -> None:
        """A verdict came, of this source's tokens or not."""
        decided = messages.decided(event, verdict, self.source, forward)
        if self._planner is not None:
            self._planner.observe_verdict(decided)
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
        known = replace(convert.proposal_from_wire(proposal), source=self.source)
        if self._planner is not None:
            self._planner.observe_proposal(known, proposal.draft_us, time.monotonic_ns() / 1000)
        self._owner.on_draft(known, proposal.draft_us)

    def on_refused_by_drafter(self, refused: common_pb2.Refused) -> None:
        self._on_refused(self, refused.message)

    def on_drafter_lost(self) -> None:
        self._on_lost(self)

    def on_broken(self, error: Exception) -> None:
        self._owner.on_broken(error)

    # To the drafter

    def open(self, effect: fx.OpenDrafter) -> None:
        self._ask(effect.pace.run_ahead)
        opened = messages.open_drafter(effect, self._record, self._handle, self._owner.epoch)
        opened.traceparent = self._owner.span.traceparent
        self.peer.link.send(draft_pb2.ConnectDraftRequest(opens=[opened]))

    def advance(self, effect: fx.AdvanceDrafter) -> None:
        self._ask(effect.pace.run_ahead)
        advance = messages.advance(effect, self._handle, self._owner.epoch)
        self.peer.link.send(draft_pb2.ConnectDraftRequest(advances=[advance]))

    def close(self) -> None:
        self.peer.close(self._handle, self._quota.owed)

    def bequeath(self, verifier: VerifierPeer) -> None:
        """Leave what was learnt beside this verifier to the next session."""
        if self._planner is not None and self._learnt:
            verifier.experience.keep(self._record.sampling.rule, self.info, self._planner)

    def _ask(self, run_ahead: int) -> None:
        self._quota.ask(run_ahead)
        self._burst.ask(run_ahead)
