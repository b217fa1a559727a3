"""Mistakes of the session log and of sessions' owners: what is written, who may write, and how a session ends."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import Any

import grpc

from orchestrator import ownership
from orchestrator.ownership import Cancellations
from orchestrator.session.appender import Appender
from orchestrator.session.driver import SessionDriver
from orchestrator.session.output import SessionFailure
from orchestrator.store import AppendReply, Fenced, StoredSession, StoreError, StoreUnavailable
from orchestrator.store.health import LogHealth
from orchestrator.store.sqlite import SessionRow, SqliteStore
from orchestrator.sweeper import Sweeper
from specwire.core import messages
from specwire.core.messages import FinishReason
from tests.patches import Patch, always_awaited, always_returning, with_awaited
from tests.simulation.store import SimStore

# What is written


def fence_not_checked(patch: Patch) -> None:
    patch.setattr(SqliteStore, "_owned", lambda self, session_id, fence: self._log(session_id))


def append_repeated(patch: Patch) -> None:
    """What the log holds already is not compared: it is appended again."""
    original = SqliteStore._grown

    def repeating(self: SqliteStore, log: SessionRow, position: int, *rest: Any) -> SessionRow:
        return original(self, log, log.length, *rest)

    patch.setattr(SqliteStore, "_grown", repeating)


def taken_for_success(patch: Patch, refusal: type[Exception]) -> None:
    original = Appender._write_and_mend

    async def believing(self: Appender, effect: messages.Append) -> AppendReply:
        try:
            return await original(self, effect)
        except refusal:
            return AppendReply(effect.position + len(effect.tokens), False)

    patch.setattr(Appender, "_write_and_mend", believing)


def unknown_outcome_taken_for_success(patch: Patch) -> None:
    taken_for_success(patch, StoreUnavailable)


def fenced_owner_goes_on(patch: Patch) -> None:
    taken_for_success(patch, Fenced)


def lost_log_begun_anew(patch: Patch) -> None:
    """What a restarted store lacks is written again without what was acknowledged since."""
    original: Callable[..., Any] = SqliteStore.recreate

    async def shorter(self: SqliteStore, record: Any, logged: Any, *rest: Any) -> None:
        parts = logged.tokens, logged.outcomes, logged.logprobs
        tokens, outcomes, logprobs = (tuple(part[:-1]) for part in parts)
        await original(self, record, messages.Append(0, tokens, outcomes, logprobs=logprobs), *rest)

    patch.setattr(SqliteStore, "recreate", shorter)


def damaged_log_claimed(patch: Patch) -> None:
    """As a script does that takes the fence before anybody has read the log."""
    original = SimStore.check

    def careless(self: SimStore, name: str, args: tuple[Any, ...]) -> None:
        log = self.held(str(args[0])) if name == "claim" else None
        if log is not None:
            self.memory._save(log._replace(fence=self.memory._next_fence(log.fence)))
        original(self, name, args)

    patch.setattr(SimStore, "check", careless)


def session_begun_without_memory(patch: Patch) -> None:
    """As a script does whose first write frees some."""
    original = SimStore.check

    def careless(self: SimStore, name: str, args: tuple[Any, ...]) -> None:
        if name != "create":
            original(self, name, args)

    patch.setattr(SimStore, "check", careless)


def ready_without_a_log(patch: Patch) -> None:
    always_awaited(patch, LogHealth, "_note", None)


# Fences


def fences_by_the_log_s_clock_alone(patch: Patch) -> None:
    always_returning(patch, ownership, "known_here", (0, 0))


def stale_at_the_verifier_for_good(patch: Patch) -> None:
    fences_by_the_log_s_clock_alone(patch)

    def hopeless(self: SessionDriver, fence: int) -> None:
        self.on_verifier_failed(SessionFailure(grpc.StatusCode.FAILED_PRECONDITION, f"fence: superseded by {fence}"))

    patch.setattr(SessionDriver, "on_newer_fence", hopeless)


# Owners that stop, or were cut off


def emits_in_stopping_what_is_not_acknowledged(patch: Patch) -> None:
    original = SessionDriver.leave

    def hasty(self: SessionDriver) -> None:
        in_flight = self.session.in_flight
        if in_flight is not None and in_flight.emit is not None:
            self.view.output.add(in_flight.emit)
        original(self)

    patch.setattr(SessionDriver, "leave", hasty)


def tasks_left_behind(patch: Patch) -> None:
    async def careless(self: SessionDriver) -> None:
        self.view.timers.cancel_all()

    patch.setattr(SessionDriver, "close", careless)


def cut_off_counted_by_attempts(patch: Patch) -> None:
    """Whoever attempts something is awake, but what it has may be old."""
    patch.setattr(Appender, "_may_be_forgotten", property(lambda self: False))


# Ends


def living_sessions_swept(patch: Patch) -> None:
    async def everybody(self: SqliteStore, roll: str, again_s: float, most: int) -> list[str]:
        return [each for (each,) in self._db.execute("SELECT session_id FROM rolls WHERE roll = ?", (roll,))]

    patch.setattr(SqliteStore, "missed", everybody)
    always_returning(patch, Sweeper, "due", FinishReason.CANCELLED)


def orphans_left_alone(patch: Patch) -> None:
    always_awaited(patch, SqliteStore, "missed", [])


def cancellation_in_the_log_overlooked(patch: Patch) -> None:
    with_awaited(patch, Appender, "_attempt", lambda _: False)


def promise_dropped_while_the_log_is_silent(patch: Patch) -> None:
    async def impatient(self: Cancellations, session_id: str, promise: Any) -> None:
        with suppress(StoreError):
            await promise.say(session_id)

    patch.setattr(Cancellations, "_repeat", impatient)


def deletion_not_promised(patch: Patch) -> None:
    async def brief(self: Cancellations, session_id: str, driven: Any = None) -> None:
        await self._store.delete(session_id)

    patch.setattr(Cancellations, "delete", brief)


def deleted_session_written_again(patch: Patch) -> None:
    """What is deleted leaves no trace, not even that it was deleted."""
    original = SqliteStore.delete

    async def thorough(self: SqliteStore, session_id: str) -> None:
        await original(self, session_id)
        self._db.execute("DELETE FROM deleted")

    patch.setattr(SqliteStore, "delete", thorough)


def deadline_forgotten_by_the_next_owner(patch: Patch) -> None:
    def endless(log: StoredSession) -> StoredSession:
        return replace(log, record=replace(log.record, deadline=0.0))

    with_awaited(patch, SqliteStore, "claim", endless)
