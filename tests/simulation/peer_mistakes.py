"""Mistakes of verifiers and drafters, and of mixing up verifiers."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

from draft_service.sessions import DraftingSession, Sessions
from orchestrator import pool
from orchestrator.peers import models
from orchestrator.peers.models import identity_of as of_a_session
from orchestrator.peers.peer import Peer, VerifierPeer
from specwire.core.draft import DraftSession
from specwire.core.law import acceptance
from specwire.core.law.sampling import History
from specwire.core.messages import Verdict
from specwire.core.placement import Waiting
from specwire.core.verify.session import Allowance, VerifySession
from specwire.lm.scripted import ScriptedLM
from specwire.rpc.model_info import Identity
from tests.patches import Patch, always_returning
from tests.simulation.services import HeadFault
from verify_service import service
from verify_service.engine import sessions
from verify_service.engine.heads import HeadDrafting
from verify_service.engine.session_manager import SessionManager
from verify_service.engine.slots import Slots

# The verifier


def stale_opening_accepted(patch: Patch) -> None:
    always_returning(patch, SessionManager, "_stale", None)


def resumed_beyond_the_log(patch: Patch) -> None:
    """A verifier that holds less than the log says goes on where it stands."""
    original = VerifySession.resume

    def hasty(self: VerifySession, tokens: Sequence[int], allowance: Allowance, epoch: int) -> Sequence[Verdict] | None:
        known = tokens[: self.position]
        return original(self, known, allowance, epoch) if self.text.common_prefix(0, known) == len(known) else None

    patch.setattr(VerifySession, "resume", hasty)


def verifier_s_rollback_off_by_one(patch: Patch) -> None:
    original = ScriptedLM.rollback

    def sloppy(self: ScriptedLM, slot: int, length: int) -> None:
        original(self, slot, min(self.cached(slot), length + 1))

    patch.setattr(ScriptedLM, "rollback", sloppy)


def refused_draft_token_accepted(patch: Patch) -> None:
    always_returning(patch, acceptance, "_replacement", None)


def copied_prefix_too_long(patch: Patch) -> None:
    def careless(self: Slots, source: int, target: int, length: int) -> None:
        self._lm.copy(source, target, min(length + 1, self._lm.cached(source)))

    patch.setattr(Slots, "copy", careless)


def penalties_forget_the_log(patch: Patch) -> None:
    """A verifier that takes a session over counts its own tokens only."""
    original = History.__init__

    def forgetful(self: History, prompt: Sequence[int], output: Sequence[int] = ()) -> None:
        original(self, prompt)

    patch.setattr(History, "__init__", forgetful)


def urgent_sessions_passed_over(patch: Patch) -> None:
    def latest(rooms: Any, places: Any, turns: Any) -> Waiting | None:
        return max(rooms, key=lambda each: each.arrival, default=None)

    patch.setattr(sessions, "next_in_turn", latest)


def opens_sessions_while_it_stops(patch: Patch) -> None:
    always_returning(patch, service, "turned_away", [])


# Heads


def failed_head_asked_again(patch: Patch) -> None:
    def forgiving(self: HeadDrafting, *step: Any) -> None:
        if self._heads is not None:
            with suppress(HeadFault):
                self._draft(self._heads, *step)

    patch.setattr(HeadDrafting, "draft", forgiving)


# The drafter


def drafter_s_cache_not_rolled_back(patch: Patch) -> None:
    original = Sessions._settle

    def sloppy(self: Sessions, drafting: DraftingSession, kept: int) -> None:
        for node in drafting.rows:
            node.decided = True
        original(self, drafting, kept)

    patch.setattr(Sessions, "_settle", sloppy)


def run_ahead_ignored(patch: Patch) -> None:
    def wants_token(self: DraftSession) -> bool:
        ahead = self.in_flight + self._taken + 1
        fits = self.context is None or self.decided + ahead < self.context
        return self.probability is not None and ahead < self.allowed + 3 and fits

    patch.setattr(DraftSession, "wants_token", property(wants_token))


def pruned_rows_kept(patch: Patch) -> None:
    """Of the rows of a tree as many stay as shall, but the first ones."""
    patch.setattr(ScriptedLM, "keep", lambda self, slot, start, rows: self.rollback(slot, start + len(rows)))


# Which verifier


def lost_verifier_not_told(patch: Patch) -> None:
    patch.setattr(Peer, "on_down", lambda self: self._on_change())


def former_verifier_trusted(patch: Patch) -> None:
    always_returning(patch, VerifierPeer, "serves", True)


def unlike(patch: Patch, **same: Any) -> None:
    """Parts of what makes models equal are not looked at: they are the same for all."""
    of_a_verifier = Identity.of
    patch.setattr(Identity, "of", staticmethod(lambda info: replace(of_a_verifier(info), **same)))
    for module in (models, pool):
        patch.setattr(module, "identity_of", lambda record: replace(of_a_session(record), **same))


def verifiers_compared_by_weights_alone(patch: Patch) -> None:
    unlike(patch, tokenizer="", eos_ids=())
