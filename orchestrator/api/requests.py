"""From a client's request to a session's record: everything is checked here, before anything is started."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import secrets
import time
from array import array
from collections.abc import Sequence
from dataclasses import replace

import grpc

from orchestrator.admission import MOST_COMPLETIONS, MOST_NOTE_BYTES, MOST_REFERENCE_BYTES, MOST_REQUEST_ID
from orchestrator.chat.fields import check_count
from orchestrator.chat.models import ChatPrompt, demand
from orchestrator.options import UNLIMITED, OutputLengths
from orchestrator.peers.models import Target
from orchestrator.session.appender import store_statuses
from orchestrator.session.driver import SessionDriver
from orchestrator.sessions import Orchestrator
from orchestrator.store import Bound, DeletedSession, SessionRecord, SessionStore
from orchestrator.store.base import NONE_OF_IT
from orchestrator.tenants import check_owner, new_session_id
from specwire.core.invalid import (
    MOST_REFERENCE_TOKENS,
    MOST_REFERENCES,
    ContextExceeded,
    InvalidParameter,
    check_length,
    check_prediction,
    check_prompt,
)
from specwire.core.law.constraint import check_constraint
from specwire.core.law.sampling import DRAWN_SEED_BITS, Sampling
from specwire.core.placement import check_priority
from specwire.core.text import Stopping
from specwire.core.verify.references import check_lengths, checked_ids
from specwire.rpc import convert
from specwire.rpc.errors import StatusError
from specwire.telemetry.tracing import NO_SPAN, Span
from specwire.text.output import check_stops
from specwire.text.tokenizer import encode_aside
from specwire.v1 import common_pb2
from specwire.v1 import generation_pb2 as pb

SECRET_BYTES = 32
DIGEST_BYTES = 16
# Characters of a reference that are encoded at once.
DOCUMENT_PIECE = 1 << 16


async def record_of(
    request: pb.GenerateRequest,
    target: Target,
    tenant: str,
    seed: int,
    before: tuple[int, ...] = (),
    chat: ChatPrompt | None = None,
    lengths: OutputLengths = UNLIMITED,
    room: int = 1,
) -> SessionRecord:
    """A new session's record. seed: taken where the request has none. before: tokens that precede its prompt.

    chat: of a request whose prompt is one. room: tokens that must fit behind the prompt, 0 for one that is only scored.

    Raises:
        InvalidParameter: names the field and the value.
    """
    convert.check_known(request, "request")
    info = target.info
    prompt = [*before, *await prompt_tokens(request, target, chat)]
    check_prompt(prompt, info.vocabulary, target.context, "prompt" if chat is None else "messages", room)
    sources, asked = sources_of(request), common_pb2.Sampling()
    asked.CopyFrom(request.sampling)
    if chat is not None:
        demand(asked, chat.constraint, chat.form.thinking)
    sampling = convert.sampling_from_wire(asked, default_seed=seed, vocabulary=info.vocabulary)
    # The last token of a text that is only scored is where a session would decide its first.
    stopping = stopping_of(request.stopping, target, len(prompt) + room - 1, lengths)
    check_constraint(sampling.constraint, stopping, info.eos_ids)
    return SessionRecord(
        session_id=new_session_id(tenant),
        tenant=tenant,
        request_id=checked_request_id(request.request_id),
        prompt=tuple(prompt),
        sampling=sampling,
        stopping=stopping,
        stop=check_stops(tuple(request.stop)),
        drafting=sources.drafters,
        ngram=sources.ngram,
        heads=sources.heads,
        prediction=await prediction_tokens(request, target),
        references=await reference_tokens(request, target),
        echo=request.echo,
        weights_fingerprint=info.weights_fingerprint,
        vocabulary_fingerprint=info.vocabulary_fingerprint,
        tokenizer_fingerprint=info.tokenizer_hash,
        eos_ids=target.identity.eos_ids,
        model=info.model,
        dtype=info.dtype,
        created=time.time(),
        priority=check_priority(request.priority),
        parent=request.parent,
        request_digest=digest_of(request) if request.request_id else "",
        private=request.private,
        note=checked_kept("note", request.note),
        chat="" if chat is None else checked_kept("tools", str(chat.form)),
    )


class Seeds:
    """The seeds of requests, drawn for those that give none. One for all of an orchestrator's calls.

    A request with an id has the same seed each time, at all orchestrators with the same log: a repeated call may begin
    sessions that the first call did not get to. The seed cannot be predicted, nor derived from another tenant's or
    prompt's.
    """

    def __init__(self, store: SessionStore, kept_s: float) -> None:
        """kept_s: for how long from now a request with an id may be repeated."""
        self._store = store
        self._kept_s = kept_s
        self._secret = b""

    async def of(self, request: pb.GenerateRequest, tenant: str, prompts: int = 1) -> list[int]:
        """For each of its prompts, one for all of its completions. StatusError: the log does not answer."""
        if request.sampling.HasField("seed"):
            return [request.sampling.seed] * prompts
        if not request.request_id:
            return [secrets.randbits(DRAWN_SEED_BITS) for _ in range(prompts)]
        with store_statuses():  # each time: a lost log gets its secret back from any orchestrator that still knows it
            proposed = self._secret or secrets.token_bytes(SECRET_BYTES)
            self._secret = await self._store.shared_secret(proposed, self._kept_s)
        return [keyed_seed(self._secret, tenant, request.request_id, prompt) for prompt in range(prompts)]


def keyed_seed(secret: bytes, tenant: str, request_id: str, prompt: int) -> int:
    """HMAC-SHA256, its first bits; no other three give the same message."""
    message = f"{len(tenant)}:{tenant}{len(request_id)}:{request_id}{prompt}".encode()
    digest = hmac.digest(secret, message, "sha256")
    return int.from_bytes(digest, "big") >> len(digest) * 8 - DRAWN_SEED_BITS


def digest_of(request: pb.GenerateRequest) -> str:
    """Digest of the request, so that an id is not used for two different requests.

    Fields that say how one call is answered are left out: a repeated call may differ there.
    """
    asked = pb.GenerateRequest()
    asked.CopyFrom(request)
    for field in ("request_id", "provisional", "take_over", "n"):
        asked.ClearField(field)
    return hashlib.blake2b(asked.SerializeToString(deterministic=True), digest_size=DIGEST_BYTES).hexdigest()


async def prompt_tokens(request: pb.GenerateRequest, target: Target, chat: ChatPrompt | None = None) -> list[int]:
    kind = request.WhichOneof("prompt")
    if chat is not None:
        return await encoded(chat.text, target, "messages")
    if kind == "text":
        return await encoded(request.text, target)
    return list(request.tokens.ids) if kind == "tokens" else []


async def prediction_tokens(request: pb.GenerateRequest, target: Target) -> tuple[int, ...]:
    """Tokens of the predicted output; none without a prediction. One that is too long is refused unread."""
    if request.WhichOneof("prediction") == "prediction_text":
        size, most = len(request.prediction_text.encode()), target.most_prompt_bytes
        if size > most:
            raise InvalidParameter("prediction", f"{size} bytes of text are more than a context holds (at most {most})")
        tokens = await encoded(request.prediction_text, target)
    else:
        tokens = list(request.prediction_tokens.ids)
    return check_prediction(tokens, target.info.vocabulary, target.context)


async def reference_tokens(request: pb.GenerateRequest, target: Target) -> tuple[array[int], ...]:
    """Tokens of the request's references, each a document. Too many, or too long ones, are refused unread."""
    check_count("references", len(request.references), MOST_REFERENCES)
    texts = sum(len(part.text) for part in request.references)
    most = MOST_REFERENCE_TOKENS * target.longest
    if texts > most:
        raise InvalidParameter("references", f"{texts} characters of text are more than are read (at most {most})")
    documents: list[array[int]] = []
    for part in request.references:
        convert.check_known(part, "references")
        if part.WhichOneof("content") == "text":
            left = MOST_REFERENCE_TOKENS - sum(map(len, documents))
            documents.append(await _document_tokens(part.text, target, left))
        else:
            documents.append(checked_ids(part.tokens.ids, target.info.vocabulary))
        check_lengths(list(map(len, documents)))
    return tuple(documents)


async def _document_tokens(text: str, target: Target, most: int) -> array[int]:
    """A text's tokens. A long one is encoded line by line, some thousand characters at a time.

    The library takes some hundred bytes for each token that it finds. What is encoded apart may have other tokens at
    the seams, and a guess is wrong there. InvalidParameter: more than `most` tokens; what follows is not encoded.
    """
    tokens, at = array("I"), 0
    while at < len(text):
        end = len(text) if len(text) - at <= DOCUMENT_PIECE else at + DOCUMENT_PIECE
        if end < len(text):
            end = text.rfind("\n", at, end) + 1 or end
        piece, at = text[at:end], end
        tokens.extend(await encode_aside(target.tokenizer, piece))
        if len(tokens) > most:
            message = f"more than the {MOST_REFERENCE_TOKENS} tokens that are allowed together"
            raise InvalidParameter("references", message)
        await asyncio.sleep(0)  # others of the event loop feel many short ones as they feel a long one
    return tokens


def check_copies(request: pb.GenerateRequest, sessions: int) -> None:
    """Refuse references that are too long to be copied for each of so many sessions."""
    check_count("references", len(request.references), MOST_REFERENCES)
    size = sum(part.ByteSize() for part in request.references)
    if size * sessions > MOST_REFERENCE_BYTES:
        message = f"{size} bytes for each of {sessions} sessions are more than {MOST_REFERENCE_BYTES} for all of them"
        raise InvalidParameter("references", message)


def check_size(prompt: str | Sequence[int], target: Target, field: str = "prompt", room: int = 1) -> None:
    """Refuse a text that is too long for the context, without encoding it. Raises ContextExceeded."""
    check_length(prompt, target.context, target.longest, field, room)


async def encoded(text: str, target: Target, field: str = "prompt") -> list[int]:
    """The text's tokens, without holding up the event loop; what cannot fit is refused unread."""
    check_size(text, target, field)
    return await encode_aside(target.tokenizer, text)


def stopping_of(
    wire: common_pb2.Stopping, target: Target, prompt_length: int, lengths: OutputLengths = UNLIMITED
) -> Stopping:
    """It is fixed here, so that the text ends at one length, whichever verifiers have the session.

    Raises:
        ContextExceeded, InvalidParameter: so many tokens do not fit or are not allowed, and the request does not permit
            to lower them.
    """
    asked, room, room_now = wire.max_tokens, target.context - prompt_length, target.context_now - prompt_length
    if asked and not wire.fit_context:
        lengths.check(asked)
        if asked > room:
            raise ContextExceeded(
                "max_tokens", f"{asked} do not fit, the prompt leaves room for {room}", target.context
            )
    fitted = common_pb2.Stopping()
    fitted.CopyFrom(wire)
    if not asked or wire.fit_context:
        fitted.max_tokens = lengths.lowered(asked, room_now if room_now > 0 else room)
    return convert.stopping_from_wire(fitted, vocabulary=target.info.vocabulary, eos_ids=target.info.eos_ids)


def checked_request_id(request_id: str) -> str:
    if len(request_id) > MOST_REQUEST_ID:
        raise InvalidParameter("request_id", f"at most {MOST_REQUEST_ID} characters are allowed, not {len(request_id)}")
    return request_id


def checked_kept(field: str, text: str) -> str:
    """What the log keeps with a session."""
    size = len(text.encode())
    if size > MOST_NOTE_BYTES:
        raise InvalidParameter(field, f"at most {MOST_NOTE_BYTES} bytes are kept, not {size}")
    return text


def sources_of(request: pb.GenerateRequest) -> pb.Sources:
    """What may propose draft tokens. Raises InvalidParameter."""
    value = request.drafting
    if value not in pb.Drafting.values():
        raise InvalidParameter("drafting", f"{value} is not a known value")
    if request.HasField("sources"):
        if value != pb.DRAFTING_UNSPECIFIED:
            raise InvalidParameter("sources", "contradicts drafting: give one of the two")
        return request.sources
    drafters = value not in (pb.DRAFTING_OFF, pb.DRAFTING_NGRAM)
    ngram = value not in (pb.DRAFTING_OFF, pb.DRAFTING_DRAFTERS)
    return pb.Sources(drafters=drafters, ngram=ngram, heads=drafters and ngram)


# ----------------------------------------------------------------------------------------------------------------------
# Calls under a request id: the first one begins a session, the others join it, whichever orchestrator they come to.
#
# The id is bound to the session before its log is written, so that of calls that cross one begins it. Only what was
# admitted is bound: a call that is refused leaves nothing behind. The binding names the session and the digest of what
# was asked for; another request under the same id is refused. A session whose log is gone (its retention is over, it
# was deleted, or the log was lost) leaves its id to a new session, with an id of its own, which nobody can take for the
# old one.

# How often an id may turn out to stand for a session that is gone by then.
ATTEMPTS = 3


class Repeats:
    """Repeated request ids; one object for all of an orchestrator's calls."""

    def __init__(self, orchestrator: Orchestrator) -> None:
        self._orchestrator = orchestrator

    async def session_for(self, record: SessionRecord, deadline: float | None, span: Span) -> SessionDriver:
        """The session that the record's request id stands for, which begins now if there is none.

        deadline, span: as of `Orchestrator.open`.

        Raises:
            StatusError: ALREADY_EXISTS, the id stands for another request; or as `Orchestrator.open` and `join`.
        """
        try:
            await self._orchestrator.admit(record)
        except (StatusError, InvalidParameter):
            joined = await self._joined_if_bound(record, span)
            if joined is None:
                raise
            return joined
        try:
            bound = await self._claim_id(record)
        except BaseException:
            self._orchestrator.dismiss(record)
            raise
        if bound.session_id == record.session_id:
            return await self._orchestrator.begin(record, deadline, span)
        self._orchestrator.dismiss(record)
        check_same(bound, record)
        return await self._joined(bound, span) or await self._orchestrator.open(
            replace(record, session_id=bound.session_id), deadline, span
        )

    async def begun(self, request: pb.GenerateRequest, tenant: str) -> SessionDriver | None:
        """The session that the request has begun under its id, if it has one and did. Raises as `session_for`."""
        if not request.request_id or len(request.request_id) > MOST_REQUEST_ID:
            return None
        named, digest = request.request_id, digest_of(request)
        asked = SessionRecord("", (), Sampling(), Stopping(1), tenant=tenant, request_id=named, request_digest=digest)
        return await self._joined_if_bound(asked, NO_SPAN)

    async def _claim_id(self, record: SessionRecord) -> Bound:
        """The session that the id stands for: the new one, an existing one, or one that is just beginning somewhere."""
        bound = await self._bind(record, "")
        for _ in range(ATTEMPTS):
            if bound.session_id == record.session_id or await self._is_there(bound):
                return bound
            gone, bound = bound, await self._bind(record, bound.session_id)
            if bound.session_id == gone.session_id:
                return bound  # bound a moment ago: the first to create its log has begun it
        raise StatusError(grpc.StatusCode.UNAVAILABLE, f"request_id: {record.request_id!r} changes hands too often")

    async def _bind(self, record: SessionRecord, gone: str) -> Bound:
        options = self._orchestrator.options
        kept = options.session_ttl + options.retention
        asked = (record.tenant, record.request_id, record.session_id, kept, record.request_digest, gone)
        with store_statuses():
            return check_bound(await self._orchestrator.store.bind_request(*asked), record)

    async def _joined_if_bound(self, record: SessionRecord, span: Span) -> SessionDriver | None:
        """Join a session that has begun, while no new session is taken."""
        with store_statuses():
            bound = await self._orchestrator.store.bound_request(record.tenant, record.request_id)
        if bound is None or not await self._is_there(check_bound(bound, record)):
            return None
        check_same(bound, record)
        return await self._joined(bound, span)

    async def _joined(self, bound: Bound, span: Span) -> SessionDriver | None:
        """None where it has no log yet."""
        driver = await self._orchestrator.roster.find(bound.session_id)
        if driver is None and await self._is_there(bound):
            driver = await self._orchestrator.join(bound.session_id, traceparent=span.traceparent)
        return driver

    async def _is_there(self, bound: Bound) -> bool:
        if self._orchestrator.roster.knows(bound.session_id):
            return True
        with store_statuses():
            try:
                return await self._orchestrator.store.tail(bound.session_id, NONE_OF_IT) is not None
            except DeletedSession:
                return False


def check_bound(bound: Bound, record: SessionRecord) -> Bound:
    """StatusError (DATA_LOSS) where the log binds the id to something that is no session id of this tenant."""
    try:
        check_owner(bound.session_id, record.tenant)
    except StatusError as error:
        message = f"request_id: what {record.request_id!r} stands for is damaged in the log"
        raise StatusError(grpc.StatusCode.DATA_LOSS, message) from error
    return bound


def check_same(bound: Bound, record: SessionRecord) -> None:
    """StatusError (ALREADY_EXISTS) where the id came with another request first, as far as that is known."""
    if bound.digest and bound.digest != record.request_digest:
        message = f"request_id: {record.request_id!r} stands for another request than this one; choose a new id"
        raise StatusError(grpc.StatusCode.ALREADY_EXISTS, message)


# ----------------------------------------------------------------------------------------------------------------------
# Several completions of one prompt: each a session of its own.


def single_requests(request: pb.GenerateRequest) -> list[pb.GenerateRequest]:
    """One request for each of the request's completions; the caller gives all the same seed.

    Raises: InvalidParameter: too many, or an option that makes sense for one only.
    """
    if request.n <= 1:
        return [request]
    if request.n > MOST_COMPLETIONS:
        raise InvalidParameter("n", f"must be from 0 to {MOST_COMPLETIONS}, not {request.n}")
    if request.sampling.choice:
        raise InvalidParameter("choice", f"must be 0 where n is {request.n}, not {request.sampling.choice}")
    if request.request_id:
        raise InvalidParameter("request_id", f"stands for one session, so n must be 1, not {request.n}")
    check_copies(request, request.n)
    return [_single(request, choice) for choice in range(request.n)]


def _single(request: pb.GenerateRequest, choice: int) -> pb.GenerateRequest:
    single = pb.GenerateRequest()
    single.CopyFrom(request)
    single.ClearField("n")
    single.sampling.choice = choice
    return single
