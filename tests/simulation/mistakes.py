"""Known mistakes, put into the real code one at a time: what the simulation must catch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from orchestrator.peers.peer import Peer
from orchestrator.session.driver import SessionDriver
from orchestrator.session.log import Appender
from orchestrator.session.output import Cursor, Output
from orchestrator.store import AppendReply, Fenced, StoredSession, StoreUnavailable
from orchestrator.store.memory import MemoryStore
from specwire.client import Chunk
from specwire.client.resuming import Resumption
from specwire.core import messages as ev
from specwire.core import messages as fx
from specwire.core.draft import DraftSession
from specwire.core.limits import Ending
from specwire.core.messages import FinishReason, Pace, Verdict
from specwire.core.session import Session
from specwire.core.verify.chains import Chains
from specwire.core.verify.session import Allowance, Tail, VerifySession
from specwire.lm.scripted import ScriptedLM
from specwire.text import OutputText
from tests.simulation.occasions import (
    LINK_LOST,
    always,
    away_and_back,
    drafted,
    has,
    late_openings,
    left_behind,
    links_cut_and_a_slow_log,
    log_lost_under_way,
    short_and_well_drafted,
    taken_over,
)
from tests.simulation.patches import Patch, always_returning, with_result
from tests.simulation.scenario import Scenario, random_scenario
from verify_service.engine.reception import Reception


@dataclass(frozen=True)
class Mistake:
    """make: puts it in. by: what is said of it, a regular expression. shows: whether it can show in a scenario.

    scenarios: by seed.
    """

    make: Callable[[Patch], None]
    by: str
    shows: Callable[[Scenario], bool] = always
    scenarios: Callable[[int], Scenario] = random_scenario

    @property
    def name(self) -> str:
        return self.make.__name__


# The session


def emit_before_append(patch: Patch) -> None:
    original = Session._append

    def hasty(self: Session) -> list[fx.Effect]:
        effects = original(self)
        if not effects or self.in_flight is None or self.in_flight.emit is None:
            return effects
        emit, self.in_flight = self.in_flight.emit, replace(self.in_flight, emit=None)
        return [emit, *effects]

    patch.setattr(Session, "_append", hasty)


def flow_control_ignored(patch: Patch) -> None:
    patch.setattr(Session, "_earned", property(lambda self: self.durable + self.buffer))


def undurable_tokens_half_forgotten(patch: Patch) -> None:
    original = Session._on_verifier_lost

    def forgetful(self: Session, event: ev.VerifierLost) -> list[fx.Effect]:
        self._pending.clear()
        return original(self, event)

    patch.setattr(Session, "_on_verifier_lost", forgetful)


def stop_string_overlooked_at_an_append_s_end(patch: Patch) -> None:
    original = OutputText.push

    def careless(self: OutputText, tokens: Sequence[int]) -> Any:
        release = original(self, tokens)
        return replace(release, kept=len(tokens)) if release.stopped_at is None else replace(release, stopped_at=None)

    patch.setattr(OutputText, "push", careless)


def tokens_after_the_end_of_an_accepted_run(patch: Patch) -> None:
    original = Ending.cut

    def blind(self: Ending, position: int, tokens: Sequence[int]) -> tuple[int, FinishReason | None]:
        reason = original(self, position, tokens)[1]
        return len(tokens), reason

    patch.setattr(Ending, "cut", blind)


# The log and its owners


def fence_not_checked(patch: Patch) -> None:
    patch.setattr(MemoryStore, "_owned", lambda self, session_id, fence: self._log(session_id))


def append_repeated(patch: Patch) -> None:
    """What the log holds already is not compared: it is appended again."""
    original = MemoryStore._write

    def repeating(self: MemoryStore, log: Any, position: int, tokens: Any, outcomes: Any, logprobs: Any) -> None:
        original(self, log, min(len(log.tokens), max(position, len(log.tokens))), tokens, outcomes, logprobs)

    patch.setattr(MemoryStore, "_write", repeating)


def taken_for_success(patch: Patch, refusal: type[Exception]) -> None:
    original = Appender._write_once

    async def believing(self: Appender, effect: fx.Append) -> AppendReply:
        try:
            return await original(self, effect)
        except refusal:
            return AppendReply(effect.position + len(effect.tokens), False)

    patch.setattr(Appender, "_write_once", believing)


def unknown_outcome_taken_for_success(patch: Patch) -> None:
    taken_for_success(patch, StoreUnavailable)


def fenced_owner_goes_on(patch: Patch) -> None:
    taken_for_success(patch, Fenced)


def lost_log_begun_anew(patch: Patch) -> None:
    """What a restarted store lacks is written again without what was acknowledged since."""
    original: Callable[..., Any] = MemoryStore.recreate

    async def shorter(self: MemoryStore, record: Any, tokens: Any, outcomes: Any, *rest: Any) -> None:
        *others, logprobs, cancelled = rest
        await original(self, record, tokens[:-1], outcomes[:-1], *others, logprobs[:-1], cancelled)

    patch.setattr(MemoryStore, "recreate", shorter)


def same_fence_granted_twice(patch: Patch) -> None:
    """Nor does it count what the claimer knows."""
    original = MemoryStore.claim

    async def deaf(self: MemoryStore, session_id: str, owner: str, floor: int = 0) -> StoredSession:
        return await original(self, session_id, owner)

    patch.setattr(MemoryStore, "claim", deaf)
    patch.setattr(MemoryStore, "_next_fence", lambda self, old: max(1, old))


# The verifier


def credit_ignored(patch: Patch) -> None:
    def room(self: VerifySession) -> int:
        return 0 if self.finish is not None else self.ending.end - self.position

    patch.setattr(VerifySession, "room", property(room))


def stale_attach_accepted(patch: Patch) -> None:
    always_returning(patch, Reception, "_stale", None)


def chain_outlives_its_contradiction(patch: Patch) -> None:
    always_returning(patch, Chains, "advance", [])


def rollback_off_by_one(patch: Patch) -> None:
    original = ScriptedLM.rollback

    def sloppy(self: ScriptedLM, slot: int, length: int) -> None:
        original(self, slot, min(self.cached(slot), length + 1))

    patch.setattr(ScriptedLM, "rollback", sloppy)


def tail_delivered_from_its_start(patch: Patch) -> None:
    original = Tail.behind

    def twice(self: Tail, position: int, end: int) -> Sequence[Verdict] | None:
        return original(self, self._verdicts[0].position if self._verdicts else position, end)

    patch.setattr(Tail, "behind", twice)


def tail_kept_to_itself(patch: Patch) -> None:
    with_result(patch, Tail, "behind", lambda verdicts: None if verdicts is None else ())


def resumed_beyond_the_log(patch: Patch) -> None:
    """A verifier that holds less than the log says goes on where it stands."""
    original = VerifySession.resume

    def hasty(self: VerifySession, tokens: Sequence[int], allowance: Allowance, epoch: int) -> Sequence[Verdict] | None:
        known = tokens[: self.position]
        return original(self, known, allowance, epoch) if self.text.common_prefix(0, known) == len(known) else None

    patch.setattr(VerifySession, "resume", hasty)


# The drafter


def drafter_s_cache_not_rolled_back(patch: Patch) -> None:
    original = DraftSession.advance

    def sloppy(self: DraftSession, position: int, tokens: Sequence[int], pace: Pace, epoch: int) -> int:
        original(self, position, tokens, pace, epoch)
        return len(self.text)

    patch.setattr(DraftSession, "advance", sloppy)


def run_ahead_ignored(patch: Patch) -> None:
    patch.setattr(DraftSession, "wants_token", property(lambda self: self.in_flight < self.pace.run_ahead + 2))


# Peers, drivers and readers


def lost_verifier_not_told(patch: Patch) -> None:
    patch.setattr(Peer, "on_down", lambda self: self._on_change())


def reader_s_place_off_by_the_withheld_text(patch: Patch) -> None:
    original = Output.cursor_at

    def careless(self: Output, position: int) -> Cursor:
        cursor = original(self, position)
        return Cursor(cursor.tokens, self.text_ends[cursor.tokens - 1] if cursor.tokens else 0)

    patch.setattr(Output, "cursor_at", careless)


def library_s_hash_a_token_behind(patch: Patch) -> None:
    original = Resumption._extend

    def careless(self: Resumption, chunk: Chunk) -> None:
        original(self, replace(chunk, tokens=chunk.tokens[:-1]))
        self._position += 1

    patch.setattr(Resumption, "_extend", careless)


def tasks_left_behind(patch: Patch) -> None:
    async def careless(self: SessionDriver) -> None:
        self._timers.cancel_all()

    patch.setattr(SessionDriver, "close", careless)


MISTAKES = [
    Mistake(emit_before_append, "emitted is not what was shown"),
    Mistake(flow_control_ignored, "credit beyond what is earned"),
    Mistake(undurable_tokens_half_forgotten, "the verifier decided", scenarios=links_cut_and_a_slow_log),
    Mistake(stop_string_overlooked_at_an_append_s_end, "the log ends"),
    Mistake(
        tokens_after_the_end_of_an_accepted_run, "a verifier decided what cannot be", scenarios=short_and_well_drafted
    ),
    Mistake(fence_not_checked, "under fence", scenarios=taken_over),
    Mistake(append_repeated, "the log holds what cannot be", has("acks_lost")),
    Mistake(unknown_outcome_taken_for_success, "durable, acknowledged", has("effects_lost", "log_down")),
    Mistake(fenced_owner_goes_on, "prefix_hash|acknowledged", scenarios=taken_over),
    Mistake(lost_log_begun_anew, "acknowledged|DATA_LOSS|in the log", scenarios=log_lost_under_way),
    Mistake(same_fence_granted_twice, "was granted before", scenarios=taken_over),
    Mistake(credit_ignored, "a verifier decided, its credit"),
    Mistake(stale_attach_accepted, "generation served", scenarios=late_openings),
    Mistake(chain_outlives_its_contradiction, "a chain lives", drafted),
    Mistake(rollback_off_by_one, "cache", drafted),
    Mistake(tail_delivered_from_its_start, "the verifier decided", scenarios=links_cut_and_a_slow_log),
    Mistake(tail_kept_to_itself, "nothing more has happened|the verifier decided", scenarios=links_cut_and_a_slow_log),
    Mistake(resumed_beyond_the_log, "the verifier decided", scenarios=away_and_back),
    Mistake(drafter_s_cache_not_rolled_back, "cache is not its text's", drafted),
    Mistake(run_ahead_ignored, "drafted ahead", drafted),
    Mistake(lost_verifier_not_told, "nothing more has happened", scenarios=links_cut_and_a_slow_log),
    Mistake(reader_s_place_off_by_the_withheld_text, "a client reads", LINK_LOST),
    Mistake(library_s_hash_a_token_behind, "prefix_hash", scenarios=taken_over),
    Mistake(tasks_left_behind, "left running", scenarios=left_behind),
]
