"""Mistakes in requests and answers: tenants, turns, completions, text and its end."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from orchestrator.api import calls, requests
from orchestrator.ownership import Ownership
from orchestrator.peers.models import Models
from orchestrator.session.driver import SessionDriver
from orchestrator.session.output import Cursor, Output, Replay
from orchestrator.sessions import Orchestrator
from orchestrator.store.sqlite import SqliteStore
from orchestrator.tenants import Access
from specwire.client import Chunk
from specwire.client.stream import Resumption
from specwire.core.law.acceptance import RowSampling
from specwire.core.law.noise import Key
from specwire.core.messages import FinishReason
from specwire.core.text import Ending
from specwire.v1 import generation_pb2 as pb
from tests.patches import Patch, always_returning, with_awaited, with_result

# Who may ask


def begins_sessions_while_it_stops(patch: Patch) -> None:
    always_returning(patch, Orchestrator, "_check_welcome", None)


def parent_of_another_tenant_taken(patch: Patch) -> None:
    always_returning(patch, calls, "check_owner", None)


def request_id_joined_across_tenants(patch: Patch) -> None:
    original = SqliteStore.bind_request

    async def careless(self: SqliteStore, tenant: str, *rest: Any) -> Any:
        return await original(self, "", *rest)

    patch.setattr(SqliteStore, "bind_request", careless)
    # Else the second guard refuses what the first let by.
    patch.setattr(requests, "check_bound", lambda bound, _: bound)


def cache_shared_across_tenants(patch: Patch) -> None:
    always_returning(patch, Access, "cache_scope", b"everybody's")


# What is asked for


def request_id_joined_with_another_body(patch: Patch) -> None:
    always_returning(patch, requests, "check_same", None)


def parent_s_last_token_left_out(patch: Patch) -> None:
    with_awaited(patch, calls, "tokens_of", lambda tokens: tokens[:-1])


def completions_without_a_number(patch: Patch) -> None:
    original = requests._single

    def careless(request: pb.GenerateRequest, choice: int) -> pb.GenerateRequest:
        return original(request, 0)

    patch.setattr(requests, "_single", careless)


def completions_share_their_noise(patch: Patch) -> None:
    patch.setattr(RowSampling, "key", property(lambda self: Key(self.sampling.seed, 0, self.position)))


def lossy_not_marked(patch: Patch) -> None:
    def quiet(started: pb.Started) -> pb.Started:
        started.lossy = False
        return started

    with_result(patch, calls, "_started", quiet)


# Text and its end


def stop_string_cut_on_the_wrong_side_after_a_takeover(patch: Patch) -> None:
    """What was withheld when the session changed hands is taken for text that came before the stop string."""
    original = Ownership._drive

    def careless(self: Ownership, driver: SessionDriver, replay: Replay, *rest: Any) -> None:
        replay.scanner = self._scanner_of(driver.view.record)
        original(self, driver, replay, *rest)

    patch.setattr(Ownership, "_drive", careless)


def tokens_after_the_end_of_an_accepted_run(patch: Patch) -> None:
    original = Ending.cut

    def blind(self: Ending, position: int, tokens: Sequence[int]) -> tuple[int, FinishReason | None]:
        reason = original(self, position, tokens)[1]
        return len(tokens), reason

    patch.setattr(Ending, "cut", blind)


def ends_too_early(patch: Patch) -> None:
    always_returning(patch, Ending, "banned", ())


def text_made_by_the_latest_tokenizer(patch: Patch) -> None:
    patch.setattr(Models, "tokenizer_of", lambda self, record: self.all()[-1].tokenizer)


# Readers


def log_probabilities_lost_in_a_replay(patch: Patch) -> None:
    original = Replay._see

    def careless(self: Replay, index: int, token: int, outcome: Any, logprobs: Any) -> None:
        original(self, index, token, outcome, ())

    patch.setattr(Replay, "_see", careless)


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
