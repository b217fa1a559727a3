"""More known mistakes: about stopping, tenants, turns, completions, options, rules, queues, orphans, deletion, and
about what is unequal, long, partial or hostile.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

import grpc

from orchestrator import pool
from orchestrator import pool as placing
from orchestrator.api import calls as completions
from orchestrator.api import calls as generating
from orchestrator.api import calls as turns
from orchestrator.api import replies
from orchestrator.api import requests as repeats
from orchestrator.log_health import LogHealth
from orchestrator.ownership import ownership
from orchestrator.ownership import sweeper as sweeping
from orchestrator.ownership.ownership import Cancellations, Ownership
from orchestrator.ownership.sweeper import Sweeper
from orchestrator.peers import models
from orchestrator.peers.models import Models
from orchestrator.peers.models import identity_of as of_a_session
from orchestrator.peers.peer import VerifierPeer
from orchestrator.session.driver import SessionDriver
from orchestrator.session.log import Appender
from orchestrator.session.output import Replay
from orchestrator.sessions import Orchestrator
from orchestrator.store import StoredSession, StoreError
from orchestrator.store.memory import MemoryStore
from orchestrator.tenants import Access
from specwire.core import placement
from specwire.core.law import acceptance as judging
from specwire.core.law.sampling import History
from specwire.core.limits import Ending
from specwire.core.messages import EmitEnd, FinishReason
from specwire.core.placement import Waiting
from specwire.lm.sampler import Key, RowSampling
from specwire.rpc.model_service import Identity
from specwire.v1 import generation_pb2 as pb
from tests.simulation import occasions
from tests.simulation.mistakes import Mistake
from tests.simulation.patches import Patch, always_awaited, always_returning, with_awaited, with_result
from tests.simulation.store import SimStore
from verify_service import service
from verify_service.engine import seating as waiting
from verify_service.engine.seating import Slots

# Processes that stop


def emits_in_stopping_what_is_not_acknowledged(patch: Patch) -> None:
    original = SessionDriver.leave

    def hasty(self: SessionDriver) -> None:
        in_flight = self.session.in_flight
        if in_flight is not None and in_flight.emit is not None:
            self.output.add(in_flight.emit)
        original(self)

    patch.setattr(SessionDriver, "leave", hasty)


def begins_sessions_while_it_stops(patch: Patch) -> None:
    always_returning(patch, Orchestrator, "_check_welcome", None)


def opens_sessions_while_it_stops(patch: Patch) -> None:
    always_returning(patch, service, "turned_away", [])


# Tenants


def parent_of_another_tenant_taken(patch: Patch) -> None:
    always_returning(patch, turns, "check_owner", None)


def request_id_joined_across_tenants(patch: Patch) -> None:
    original = MemoryStore.bind_request

    async def careless(self: MemoryStore, tenant: str, *rest: Any) -> Any:
        return await original(self, "", *rest)

    patch.setattr(MemoryStore, "bind_request", careless)
    patch.setattr(repeats, "check_bound", lambda bound, _: bound)  # else the second guard refuses what the first let by


def cache_shared_across_tenants(patch: Patch) -> None:
    always_returning(patch, Access, "cache_scope", b"everybody's")


# What is asked for


def request_id_joined_with_another_body(patch: Patch) -> None:
    always_returning(patch, repeats, "check_same", None)


def parent_s_last_token_left_out(patch: Patch) -> None:
    with_awaited(patch, generating, "tokens_of", lambda tokens: tokens[:-1])


def completions_without_a_number(patch: Patch) -> None:
    original = completions._single

    def careless(request: pb.GenerateRequest, choice: int) -> pb.GenerateRequest:
        return original(request, 0)

    patch.setattr(completions, "_single", careless)


def completions_share_their_noise(patch: Patch) -> None:
    patch.setattr(RowSampling, "key", property(lambda self: Key(self.sampling.seed, 0, self.position)))


def lossy_not_marked(patch: Patch) -> None:
    def quiet(started: pb.Started) -> pb.Started:
        started.lossy = False
        return started

    with_result(patch, replies, "started", quiet)


def log_probabilities_lost_in_a_replay(patch: Patch) -> None:
    original = Replay._see

    def careless(self: Replay, index: int, token: int, outcome: Any, logprobs: Any) -> None:
        original(self, index, token, outcome, ())

    patch.setattr(Replay, "_see", careless)


def penalties_forget_the_log(patch: Patch) -> None:
    """A verifier that takes a session over counts its own tokens only."""
    original = History.__init__

    def forgetful(self: History, prompt: Sequence[int], output: Sequence[int] = ()) -> None:
        original(self, prompt)

    patch.setattr(History, "__init__", forgetful)


def ends_too_early(patch: Patch) -> None:
    always_returning(patch, Ending, "banned", ())


def stop_string_cut_on_the_wrong_side_after_a_takeover(patch: Patch) -> None:
    """What was withheld when the session changed hands is taken for text that came before the stop string."""
    original = Ownership._drive

    def careless(self: Ownership, driver: SessionDriver, replay: Replay, *rest: Any) -> None:
        replay.scanner = self._scanner_of(driver.record)
        original(self, driver, replay, *rest)

    patch.setattr(Ownership, "_drive", careless)


def end_of_a_replay_cut_elsewhere(patch: Patch) -> None:
    def longer(end: EmitEnd) -> EmitEnd:
        return replace(end, text=end.text + " ")

    with_result(patch, Replay, "end", longer)


# The verifier


def refused_draft_token_accepted(patch: Patch) -> None:
    always_returning(patch, judging, "_replacement", None)


def copied_prefix_too_long(patch: Patch) -> None:
    def careless(self: Slots, source: int, target: int, length: int) -> None:
        self._lm.copy(source, target, min(length + 1, self._lm.cached(source)))

    patch.setattr(Slots, "copy", careless)


def urgent_sessions_passed_over(patch: Patch) -> None:
    def latest(rooms: Any, places: Any, turns: Any) -> Waiting | None:
        return max(rooms, key=lambda each: each.arrival, default=None)

    patch.setattr(waiting, "next_in_turn", latest)


# Ends


def living_sessions_swept(patch: Patch) -> None:
    async def everybody(self: MemoryStore, roll: str, again_s: float, most: int) -> list[str]:
        return list(self._rolls.get(roll, {}))

    patch.setattr(MemoryStore, "missed", everybody)
    always_returning(patch, Sweeper, "due", FinishReason.CANCELLED)


def orphans_left_alone(patch: Patch) -> None:
    always_awaited(patch, MemoryStore, "missed", [])


def cancellation_in_the_log_overlooked(patch: Patch) -> None:
    with_awaited(patch, Appender, "_attempt", lambda _: False)


def cancellation_lost_with_the_log(patch: Patch) -> None:
    always_awaited(patch, Cancellations, "repeat", None)


def deleted_session_written_again(patch: Patch) -> None:
    """What is deleted leaves no trace, not even that it was deleted."""
    original = MemoryStore.delete

    async def thorough(self: MemoryStore, session_id: str) -> None:
        await original(self, session_id)
        self._deleted.clear()

    patch.setattr(MemoryStore, "delete", thorough)


def deadline_forgotten_by_the_next_owner(patch: Patch) -> None:
    def endless(log: StoredSession) -> StoredSession:
        return replace(log, record=replace(log.record, deadline=0.0))

    with_awaited(patch, MemoryStore, "claim", endless)


# What is unequal, long, partial or hostile


def unlike(patch: Patch, **same: Any) -> None:
    """Parts of what makes models equal are not looked at: they are the same for all."""
    of_a_verifier = Identity.of
    patch.setattr(Identity, "of", staticmethod(lambda info: replace(of_a_verifier(info), **same)))
    for module in (models, placing, pool):
        patch.setattr(module, "identity_of", lambda record: replace(of_a_session(record), **same))


def verifiers_compared_by_weights_alone(patch: Patch) -> None:
    unlike(patch, tokenizer="", eos_ids=())


def end_of_sequence_of_the_new_verifier(patch: Patch) -> None:
    unlike(patch, eos_ids=())


def context_of_the_new_verifier(patch: Patch) -> None:
    patch.setattr(
        placement, "_fits", lambda candidate, wish: candidate.up and candidate.fingerprint == wish.fingerprint
    )


def former_verifier_trusted(patch: Patch) -> None:
    always_returning(patch, VerifierPeer, "serves", True)


def text_made_by_the_latest_tokenizer(patch: Patch) -> None:
    patch.setattr(Models, "tokenizer_of", lambda self, record: self.all()[-1].tokenizer)


def cancellation_acknowledged_without_the_log(patch: Patch) -> None:
    original: Any = Cancellations.ask

    async def hasty(self: Cancellations, session_id: str, driven: Any = None) -> None:
        if driven is None:
            await original(self, session_id)
            return
        with suppress(StoreError):
            await self._store.cancel(session_id)

    patch.setattr(Cancellations, "ask", hasty)


def promise_dropped_while_the_log_is_silent(patch: Patch) -> None:
    async def impatient(self: Cancellations, session_id: str, promise: Any) -> None:
        with suppress(StoreError):
            await promise.say(session_id)

    patch.setattr(Cancellations, "_repeat", impatient)


def deletion_not_promised(patch: Patch) -> None:
    async def brief(self: Cancellations, session_id: str, driven: Any = None) -> None:
        await self._store.delete(session_id)

    patch.setattr(Cancellations, "delete", brief)


def cut_off_counted_by_attempts(patch: Patch) -> None:
    """Whoever attempts something is awake, but what it has may be old."""
    patch.setattr(Appender, "_may_be_forgotten", property(lambda self: False))


def hidden_by_a_clock_set_back(patch: Patch) -> None:
    patch.setattr(Appender, "_since", lambda self, moment: self._clock() - moment[1])


def damaged_log_claimed(patch: Patch) -> None:
    """As a script does that takes the fence before anybody has read the log."""
    original = SimStore.check

    def careless(self: SimStore, name: str, args: tuple[Any, ...]) -> None:
        log = self.memory._logs.get(str(args[0])) if args else None
        if name == "claim" and log is not None:
            log.fence = self.memory._next_fence(log.fence)
        original(self, name, args)

    patch.setattr(SimStore, "check", careless)


def fences_by_the_log_s_clock_alone(patch: Patch) -> None:
    always_returning(patch, ownership, "floor", 0)


def stale_at_the_verifier_for_good(patch: Patch) -> None:
    fences_by_the_log_s_clock_alone(patch)

    def hopeless(self: SessionDriver, fence: int) -> None:
        self.on_refused(grpc.StatusCode.FAILED_PRECONDITION, f"fence: superseded by {fence}")

    patch.setattr(SessionDriver, "on_newer_fence", hopeless)


def living_sessions_swept_after_a_jump_of_the_clock(patch: Patch) -> None:
    patch.setattr(sweeping, "CONFIRM_S", 0.0)


def ready_without_a_log(patch: Patch) -> None:
    always_awaited(patch, LogHealth, "_note", None)


def session_begun_without_memory(patch: Patch) -> None:
    """As a script does whose first write frees some."""
    original = SimStore.check

    def careless(self: SimStore, name: str, args: tuple[Any, ...]) -> None:
        if name != "create":
            original(self, name, args)

    patch.setattr(SimStore, "check", careless)


FURTHER_MISTAKES = [
    Mistake(emits_in_stopping_what_is_not_acknowledged, "emitted, acknowledged", scenarios=occasions.told_to_stop),
    Mistake(
        begins_sessions_while_it_stops, "was begun by an orchestrator that stops", scenarios=occasions.told_to_stop
    ),
    Mistake(
        opens_sessions_while_it_stops, "was opened at a verifier that stops", scenarios=occasions.verifier_told_to_stop
    ),
    Mistake(parent_of_another_tenant_taken, "another tenant's session", scenarios=occasions.two_tenants),
    Mistake(request_id_joined_across_tenants, "a client reads a session of", scenarios=occasions.two_tenants),
    Mistake(cache_shared_across_tenants, "cached, and never had", scenarios=occasions.two_tenants),
    Mistake(request_id_joined_with_another_body, "the prompt, asked for", scenarios=occasions.two_bodies),
    Mistake(parent_s_last_token_left_out, "the prompt, asked for", scenarios=occasions.next_turns),
    Mistake(completions_without_a_number, "sampling, asked for", scenarios=occasions.several_completions),
    Mistake(
        completions_share_their_noise, "a verifier decided what cannot be", scenarios=occasions.several_completions
    ),
    Mistake(lossy_not_marked, "lossy, by rule", scenarios=occasions.lossy),
    Mistake(log_probabilities_lost_in_a_replay, "log-probabilities, due", scenarios=occasions.reported_and_taken_over),
    Mistake(penalties_forget_the_log, "a verifier decided what cannot be", scenarios=occasions.penalised_and_moved),
    Mistake(ends_too_early, "a verifier decided what cannot be", scenarios=occasions.not_to_end_early),
    Mistake(
        stop_string_cut_on_the_wrong_side_after_a_takeover,
        "text, of tokens",
        scenarios=occasions.stopped_by_strings_and_taken_over,
    ),
    Mistake(end_of_a_replay_cut_elsewhere, "text, of tokens", scenarios=occasions.taken_over),
    Mistake(
        refused_draft_token_accepted, "a verifier decided what cannot be", scenarios=occasions.weighed_and_badly_drafted
    ),
    Mistake(copied_prefix_too_long, "cache", scenarios=occasions.shared_prompts),
    Mistake(urgent_sessions_passed_over, "whose turn it was", scenarios=occasions.a_queue),
    Mistake(living_sessions_swept, "cancelled by nobody", scenarios=occasions.long_lived),
    Mistake(orphans_left_alone, "runs for ever", scenarios=occasions.orphaned),
    Mistake(cancellation_in_the_log_overlooked, "it goes on, cancelled", scenarios=occasions.cancelled_elsewhere),
    Mistake(cancellation_lost_with_the_log, "it goes on, cancelled", scenarios=occasions.cancelled_elsewhere_and_lost),
    Mistake(deleted_session_written_again, "that was deleted is written", scenarios=occasions.deleted_elsewhere),
    Mistake(
        deadline_forgotten_by_the_next_owner,
        "goes on after its deadline",
        scenarios=occasions.passed_on_before_its_deadline,
    ),
    Mistake(
        verifiers_compared_by_weights_alone,
        "cannot be|the log ends|a client reads",
        scenarios=occasions.unequal_somehow,
    ),
    Mistake(
        end_of_sequence_of_the_new_verifier, "decided what cannot be|the log ends", scenarios=occasions.unequal_ends
    ),
    Mistake(context_of_the_new_verifier, "the log ends|INVALID_ARGUMENT", scenarios=occasions.unequal_contexts),
    Mistake(former_verifier_trusted, "decided what cannot be|the log ends", scenarios=occasions.swapped),
    Mistake(
        text_made_by_the_latest_tokenizer, "text, of tokens|a client reads", scenarios=occasions.unequal_tokenizers
    ),
    Mistake(
        cancellation_acknowledged_without_the_log,
        "it goes on, cancelled",
        scenarios=occasions.cancelled_in_an_outage,
    ),
    Mistake(
        promise_dropped_while_the_log_is_silent,
        "it goes on, cancelled",
        scenarios=occasions.cancelled_before_an_outage,
    ),
    Mistake(deletion_not_promised, "it goes on, deleted", scenarios=occasions.deleted_before_a_loss),
    Mistake(cut_off_counted_by_attempts, "had ended runs again", scenarios=occasions.ended_elsewhere_and_forgotten),
    Mistake(hidden_by_a_clock_set_back, "had ended runs again", scenarios=occasions.forgotten_by_a_clock),
    Mistake(damaged_log_claimed, "was refused, and has changed", scenarios=occasions.damaged_and_taken),
    Mistake(fences_by_the_log_s_clock_alone, "was granted before", scenarios=occasions.failed_over),
    Mistake(stale_at_the_verifier_for_good, "superseded", scenarios=occasions.failed_over_without_the_claimer),
    Mistake(
        living_sessions_swept_after_a_jump_of_the_clock,
        "cancelled by nobody",
        scenarios=occasions.long_lived_and_a_jump,
    ),
    Mistake(ready_without_a_log, "it is ready, and its log", scenarios=occasions.cancelled_in_an_outage),
    Mistake(session_begun_without_memory, "that cannot be logged", scenarios=occasions.out_of_memory),
]
