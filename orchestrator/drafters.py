"""The drafters of one session. Each stands for itself: the loss of one changes nothing for the others."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable

from orchestrator import messages
from orchestrator.drafting import DrafterOwner, SessionDrafter
from orchestrator.options import OrchestratorOptions
from orchestrator.output import OutputTimings
from orchestrator.peers import DrafterPeer, VerifierPeer
from orchestrator.stats import SessionStats
from orchestrator.store import SessionRecord
from orchestrator.timers import Timers
from specwire.core import effects as fx
from specwire.core import events as ev
from specwire.core.plan import parse_plan
from specwire.telemetry.logs import of_session
from specwire.v1 import verify_pb2

logger = logging.getLogger(__name__)

# Seconds after which a session that a drafter refused for the moment is placed again, doubled with every refusal.
RETRY = 1.0
MOST_RETRY = 30.0


class Drafters:
    """Up to `options.drafters_per_session` at a time. `refusals`: how often each refused this session.

    shown: a reader wants to see what they draft. place: give the session what it lacks.

    Invariant: sources rise, and are never used twice in a session.
    """

    def __init__(
        self,
        owner: DrafterOwner,
        record: SessionRecord,
        options: OrchestratorOptions,
        stats: SessionStats,
        timers: Timers,
        place: Callable[[], None],
    ) -> None:
        self.refusals: Counter[DrafterPeer] = Counter()
        self.shown = False
        self._owner = owner
        self._record = record
        # Under rules that weigh draft tokens by what one source drew them from, one source it is.
        most = 1 if record.sampling.weighed else options.drafters_per_session
        # A session that was begun elsewhere goes on here, but no drafter of this place is trusted with its text.
        self._most = most if record.drafting and record.sampling.rule in options.rules else 0
        self._fixed = parse_plan(options.plan)
        self._stats = stats
        self._timers = timers
        self._place = place
        self._verifier: VerifierPeer | None = None
        self._by_source: dict[int, SessionDrafter] = {}
        self._source = 0
        self._had: set[str] = set()
        self._retries: dict[DrafterPeer, float] = {}
        self._resting: set[str] = set()

    def __len__(self) -> int:
        return len(self._by_source)

    @property
    def missing(self) -> int:
        """How many more the session may have now; one that has just refused keeps its place for a while."""
        self._resting = {name for name in self._resting if self._timers.left(name) is not None}
        return max(0, self._most - len(self._by_source) - len(self._resting))

    def has(self, peer: DrafterPeer) -> bool:
        return any(drafting.peer is peer for drafting in self._by_source.values())

    # Who drafts

    def add(self, peer: DrafterPeer) -> None:
        """Have `peer` draft, too."""
        self._source += 1
        stats = self._stats.of_drafter(self._source, peer.info.model if peer.info is not None else "")
        drafting = SessionDrafter(
            self._source, peer, self._owner, self._record, self._fixed, stats, self._on_lost, self._on_refused
        )
        self._by_source[self._source] = drafting
        if self._verifier is not None:
            drafting.use_verifier(self._verifier, drafting.info.weights_fingerprint in self._had)
        self._had.add(drafting.info.weights_fingerprint)
        drafting.begin(self.shown)

    def use_verifier(self, verifier: VerifierPeer) -> None:
        """Another verifier: its forwards take another time, and it may be on another host."""
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

    def observe(self, event: ev.VerdictArrived, verdict: verify_pb2.Verdict, timings: OutputTimings) -> None:
        """A verdict came."""
        forward = messages.forward_of(timings.step, timings.verdict_received_ns)
        for drafting in list(self._by_source.values()):
            drafting.observe(event, verdict, forward, self.shown)

    def _on_lost(self, drafting: SessionDrafter) -> None:
        self._stats.drafter_losses += 1
        self._part(drafting)

    def _part(self, drafting: SessionDrafter) -> None:
        drafting.stats.lost = True
        self._forget(drafting)
        self._owner.apply(ev.DrafterLost(drafting.source))

    def _on_refused(self, drafting: SessionDrafter, message: str) -> None:
        shown = self._record.session_id[:8]
        logger.info("session %s: drafter refused: %s", shown, message, extra=of_session(shown))
        peer, name = drafting.peer, f"drafter {drafting.source}"
        self.refusals[peer] += 1
        if drafting.has_proposed:
            self._retries.pop(peer, None)
        retry = self._retries.get(peer, RETRY)
        self._retries[peer] = min(MOST_RETRY, 2 * retry)
        self._resting.add(name)
        self._timers.set(name, retry, self._place)
        self._stats.drafter_refusals += 1
        self._part(drafting)

    def _forget(self, drafting: SessionDrafter) -> None:
        self._by_source.pop(drafting.source, None)
        if self._verifier is not None:
            drafting.bequeath(self._verifier)

    # Effects

    def run(self, effect: fx.OpenDrafter | fx.AdvanceDrafter | fx.CloseDrafter) -> None:
        """For one that is gone nothing is to be done."""
        drafting = self._by_source.get(effect.source)
        if drafting is None:
            return
        match effect:
            case fx.OpenDrafter():
                drafting.open(effect)
            case fx.AdvanceDrafter():
                drafting.advance(effect)
            case fx.CloseDrafter():
                self._close(drafting)

    def _close(self, drafting: SessionDrafter) -> None:
        self._forget(drafting)
        drafting.close()

    def leave(self) -> None:
        """The session needs them no longer."""
        for drafting in list(self._by_source.values()):
            self._close(drafting)
