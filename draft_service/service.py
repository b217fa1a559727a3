"""An orchestrator's messages become validated commands, the drafter's replies messages, whichever end dialled.

Each connection is a link with handles of its own. An error in one session is a Refused for that session; the link goes
on.
"""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import logging
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from typing import Any, NamedTuple

import grpc
import grpc.aio

from draft_service.sessions import (
    AdvanceSession,
    BeginSession,
    CloseSession,
    Command,
    DraftedProposal,
    Dropped,
    LearnVocabulary,
    LoseLink,
    Opened,
    OpenSession,
    Replies,
    Reply,
    Sessions,
)
from specwire.core.draft import check_pace, check_tokens
from specwire.core.invalid import InvalidParameter
from specwire.core.law.constraint import Constraint
from specwire.core.law.sampling import Sampling
from specwire.core.model import SlotModel
from specwire.registry.entry import Load
from specwire.rpc.convert import pace_from_wire, proposal_to_wire, sampling_from_wire
from specwire.rpc.decoding import portions
from specwire.rpc.errors import StatusError, code_number
from specwire.rpc.link import Outbox
from specwire.rpc.model_info import answer
from specwire.rpc.service_thread import ServiceThread
from specwire.telemetry.metrics import Families, by_label, counter, gauge, histogram
from specwire.telemetry.tracing import LinkSpans
from specwire.text.constraints import Beginnings, Compiler, Found
from specwire.v1 import common_pb2, draft_pb2, draft_pb2_grpc

log = logging.getLogger(__name__)

DrafterThread = ServiceThread[Command, Replies, common_pb2.GetModelInfoResponse]

SHOWN_HEX = 12
# How the lists of a long message are taken.
IN_TURN = ("vocabularies", "opens", "advances", "closes")
# Ids of a target's vocabulary, and vocabularies on one link, at most.
MOST_IDS = 1 << 20
MOST_TOLD = 8


class OrchestratorLink:
    """One orchestrator; `push` stages a message for it, in the event loop."""

    def __init__(self, push: Callable[[draft_pb2.ConnectDraftResponse], object]) -> None:
        self._push = push

    def send(self, replies: list[Reply]) -> None:
        message = draft_pb2.ConnectDraftResponse()
        for reply in replies:
            match reply:
                case DraftedProposal(handle, proposal):
                    message.proposals.append(proposal_to_wire(proposal, handle))
                case Opened(handle):
                    message.opened.add(handle=handle)
                case Dropped(handle, code, text):
                    message.refused.add(handle=handle, code=code, message=text)
        self._push(message)


def deliver(replies: Replies) -> None:
    """Deliver what the drafter's thread reports."""
    for link, own in replies.items():
        link.send(own)


class DraftHandler:
    """Takes what links say to a drafter whose model is described by `info`. `room`: see ServiceThread."""

    def __init__(self, drafter: DrafterThread, info: common_pb2.GetModelInfoResponse) -> None:
        self.info = info
        self.room = drafter.room
        self._drafter = drafter
        self._numbers = itertools.count(1)
        self._beginnings = Beginnings(Compiler(info.tokenizer_json, info.vocabulary, info.eos_ids))
        self._spans = LinkSpans("specwire.draft")
        self._told: dict[OrchestratorLink, dict[str, LearnVocabulary]] = {}
        drafter.on_reports = deliver

    async def stop(self) -> None:
        """End the tasks that it has started."""
        await self._beginnings.stop()

    def lose(self, link: OrchestratorLink) -> None:
        """The link is gone, and its sessions with it."""
        self._beginnings.lost(link)
        self._told.pop(link, None)
        self._drafter.send(LoseLink(link))
        self._spans.lose(link)

    async def take(self, message: draft_pb2.ConnectDraftRequest, link: OrchestratorLink) -> None:
        """Where it has many parts, others of the event loop go on in between."""
        for portion in portions(message, IN_TURN):
            self.take_at_once(portion, link)
            if portion is not message:
                await asyncio.sleep(0)

    def take_at_once(self, message: draft_pb2.ConnectDraftRequest, link: OrchestratorLink) -> None:
        """In the order that is right for a tick in which one session is opened, advanced and closed."""
        for told in message.vocabularies:
            self._take_vocabulary(told, link)
        for opening in message.opens:
            self._take_open(opening, link)
        for advance in message.advances:
            self._take_advance(advance, link)
        if message.closes:
            self._beginnings.over(link, (close.handle for close in message.closes))
        for close in message.closes:
            self._take_close(close, link)

    def _take_close(self, close: common_pb2.Close, link: OrchestratorLink) -> None:
        self._drafter.send(CloseSession(link, close.handle))
        self._spans.end(link, close.handle)

    def _take_vocabulary(self, told: draft_pb2.TargetVocabulary, link: OrchestratorLink) -> None:
        """One that is too large, or one too many, is as one that was not told: its sessions are refused."""
        known = self._told.setdefault(link, {})
        if not 0 < told.vocabulary <= MOST_IDS or len(known) >= MOST_TOLD:
            log.warning("a vocabulary of %d ids is not taken; this link told %d", told.vocabulary, len(known))
            return
        digest = hashlib.sha256(told.SerializeToString(deterministic=True)).hexdigest()
        eos_ids = frozenset(told.eos_ids)
        known[told.fingerprint] = learn = LearnVocabulary(digest, told.tokenizer_zlib, told.vocabulary, eos_ids)
        self._drafter.send(learn)

    def _take_open(self, opening: draft_pb2.OpenDraft, link: OrchestratorLink) -> None:
        self._spans.begin(link, opening.handle, opening.traceparent, tokens=len(opening.tokens))
        try:
            opened = self._open(opening, link)
        except (InvalidParameter, StatusError) as error:
            self._refuse(opening.handle, error, link)
            return
        self._drafter.send(opened)
        if opened.sampling.constraint is not None:
            self._begin(opened, opened.sampling.constraint, link)

    def _begin(self, opened: OpenSession, constraint: Constraint, link: OrchestratorLink) -> None:
        """Where the constraint cannot be compiled, drafts are made without it, and the target refuses them."""

        def tell(found: Found) -> None:
            if isinstance(found, Exception):
                log.info("drafting without a %s: %s", constraint.kind, type(found).__name__)
            matcher = None if isinstance(found, Exception) else found
            self._drafter.send(BeginSession(link, opened.handle, opened.number, matcher))

        self._beginnings.begin(link, constraint, opened.tokens[opened.prompt_length :], tell, opened.handle)

    def _take_advance(self, advance: draft_pb2.Advance, link: OrchestratorLink) -> None:
        """The drafter's thread checks the ids: sessions of different vocabularies may share the link."""
        try:
            if advance.position == 0 and not advance.tokens:
                raise InvalidParameter("position", "0 without tokens leaves no text")
            tokens, pace = tuple(advance.tokens), pace_from_wire(advance.pace)
        except InvalidParameter as error:
            self._refuse(advance.handle, error, link)
            return
        self._drafter.send(AdvanceSession(link, advance.handle, advance.position, tokens, pace, advance.epoch))

    def _open(self, opening: draft_pb2.OpenDraft, link: OrchestratorLink) -> OpenSession:
        mapped = self._mapped(opening.vocabulary_fingerprint, link)
        vocabulary = self.info.vocabulary if mapped is None else mapped.width
        tokens = check_tokens(opening.tokens, vocabulary)
        if not tokens:
            raise InvalidParameter("tokens", "must not be empty")
        sampling = sampling_from_wire(opening.sampling, vocabulary=vocabulary)
        if mapped is not None:
            sampling = _for_another_vocabulary(sampling)
        prompt_length = opening.prompt_length or len(tokens)
        if prompt_length > len(tokens):
            raise InvalidParameter("prompt_length", f"must be at most the {len(tokens)} tokens, not {prompt_length}")
        pace = pace_from_wire(opening.pace)
        check_pace(pace, sampling)
        number = next(self._numbers)
        digest = "" if mapped is None else mapped.digest
        return OpenSession(link, opening.handle, tokens, sampling, pace, opening.epoch, prompt_length, number, digest)

    def _mapped(self, theirs: str, link: OrchestratorLink) -> LearnVocabulary | None:
        """What was told of a vocabulary that is not the drafter's; None if it is. StatusError if nothing was told."""
        ours = self.info.vocabulary_fingerprint
        told = self._told.get(link, {}).get(theirs)
        if theirs != ours and told is None:
            raise StatusError(
                grpc.StatusCode.FAILED_PRECONDITION,
                f"vocabulary_fingerprint: the verifier's vocabulary is {theirs[:SHOWN_HEX] or '(none)'}..., "
                f"this drafter's is {ours[:SHOWN_HEX]}...",
            )
        return None if theirs == ours else told

    def _refuse(self, handle: int, error: InvalidParameter | StatusError, link: OrchestratorLink) -> None:
        """Refuse, and end what may be open under this handle."""
        self._spans.end(link, handle, str(error))
        self._drafter.send(CloseSession(link, handle))
        if isinstance(error, StatusError):
            link.send([Dropped(handle, code_number(error.code), error.message)])
        else:
            link.send([Dropped(handle, code_number(grpc.StatusCode.INVALID_ARGUMENT), str(error))])


def _for_another_vocabulary(sampling: Sampling) -> Sampling:
    """Without a constraint, which the target alone applies. StatusError under rules that no mapped token satisfies."""
    if sampling.weighed:
        # The drafter may read the same text in other tokens each time: one place could then be drawn for twice.
        message = f"sampling.rule: {sampling.rule} needs a drafter of the target's vocabulary, which this one maps"
        raise StatusError(grpc.StatusCode.FAILED_PRECONDITION, message)
    return replace(sampling, constraint=None)


class LoadedDrafter(NamedTuple):
    """A drafter whose thread runs, its handler, and what its figures are read of."""

    thread: DrafterThread
    handler: DraftHandler
    sessions: Sessions
    model: SlotModel

    def families(self) -> Families:
        """Read beside the thread: each number is right by itself, and all are of about the same moment."""
        tally, model = self.sessions.tally, self.model
        used = sum(model.cached(slot) for slot in range(model.slots)) / (model.slots * model.info.context)
        open_ones, refused = {"open": len(self.sessions)}, dict(tally.refused)
        yield by_label(gauge, "sessions", "Sessions by state.", "state", open_ones)
        yield counter("sessions_opened_total", "Sessions that were opened.", tally.opened)
        yield by_label(
            counter, "sessions_refused_total", "Sessions that were not served, by status.", "status", refused
        )
        yield gauge("slots", "Sessions that fit at once.", model.slots)
        yield gauge("kv_cache_usage_ratio", "Positions in use of all there are.", used)
        yield histogram("forward_seconds", "Forwards of the model, and drawing from them.", tally.forward_s)
        yield histogram("batch_rows", "Rows of a forward.", tally.rows)
        yield counter("drafted_tokens_total", "Draft tokens drawn.", tally.drafted)
        yield counter("proposed_tokens_total", "Draft tokens sent in proposals.", tally.proposed)
        yield counter("due_positions_total", "Decided positions within the run-ahead.", tally.due)
        yield counter("late_positions_total", "Those of them for which nothing was proposed in time.", tally.late)
        yield counter("rollbacks_total", "Contradicted chains: the cache goes back.", tally.rollbacks)

    def load(self) -> Load:
        """The load that the registry is told."""
        return Load(len(self.sessions), 0, max(0, self.model.slots - len(self.sessions)))

    async def stop(self) -> None:
        """End the thread, and the handler's tasks. Idempotent."""
        try:
            await self.handler.stop()
        finally:
            await self.thread.stop()


# ----------------------------------------------------------------------------------------------------------------------
# DraftService for orchestrators that dial: each Connect stream is a link.

Context = grpc.aio.ServicerContext[draft_pb2.ConnectDraftRequest, draft_pb2.ConnectDraftResponse]


class DraftServicer(draft_pb2_grpc.DraftServiceServicer):
    """Serves a drafter whose model is loaded."""

    def __init__(self, handler: DraftHandler) -> None:
        self._handler = handler
        # Done once links are to end.
        self._leaving: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def leave(self) -> None:
        """End every link: their sessions only get slower, and their orchestrators may find another drafter."""
        if not self._leaving.done():
            self._leaving.set_result(None)

    async def GetModelInfo(
        self, request: common_pb2.GetModelInfoRequest, _: Context
    ) -> common_pb2.GetModelInfoResponse:
        return answer(self._handler.info, request)

    async def Connect(self, requests: AsyncIterator[draft_pb2.ConnectDraftRequest], context: Context) -> None:
        broken: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        outbox = Outbox(context.write, lambda _: broken.set_result(None))
        link = OrchestratorLink(outbox.push)
        reading = asyncio.ensure_future(_read(requests, link, self._handler))
        try:
            ends: set[asyncio.Future[Any]] = {reading, broken, self._leaving}
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            if outbox.failed is not None:
                raise StatusError(grpc.StatusCode.UNAVAILABLE, str(outbox.failed))
            if self._leaving.done():
                raise StatusError(grpc.StatusCode.UNAVAILABLE, "the drafter is stopping")
            reading.result()
        finally:
            reading.cancel()
            self._handler.lose(link)
            await outbox.close()


async def _read(
    requests: AsyncIterator[draft_pb2.ConnectDraftRequest], link: OrchestratorLink, handler: DraftHandler
) -> None:
    async for message in requests:
        await handler.take(message, link)
        await handler.room()
