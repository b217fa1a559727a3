"""From a client's request to a session's record: everything is checked here, before anything is started."""

from __future__ import annotations

import asyncio
import hashlib
import secrets
import time

from orchestrator.link import Info
from orchestrator.store import SessionRecord
from orchestrator.target import Target
from orchestrator.tenants import new_session_id
from specwire.core.admission import check_priority
from specwire.core.limits import Stopping, check_constraint, check_prediction, check_prompt
from specwire.core.sampling import InvalidParameter
from specwire.rpc import convert
from specwire.text import check_stops, encode
from specwire.v1 import common_pb2, generation_pb2

MOST_REQUEST_ID = 128
SEED_BITS = 64
DIGEST_BYTES = 16
# Bytes of text from which encoding takes long enough for other sessions to feel it.
LONG_TEXT = 4096


async def record_of(
    request: generation_pb2.GenerateRequest, target: Target, tenant: str, before: tuple[int, ...] = ()
) -> SessionRecord:
    """A new session's record. `before`: tokens that its prompt goes on behind.

    Raises:
        InvalidParameter: names the field and the value.
    """
    convert.check_known(request, "request")
    info = target.info
    prompt = [*before, *await prompt_tokens(request, target)]
    check_prompt(prompt, info.vocabulary, info.context)
    drafting, ngram = drafting_of(request.drafting)
    seed = secrets.randbits(SEED_BITS)
    sampling, _ = convert.sampling_from_wire(request.sampling, default_seed=seed, vocabulary=info.vocabulary)
    stopping = stopping_of(request.stopping, info, info.context - len(prompt))
    check_constraint(sampling.constraint, stopping, info.eos_ids)
    return SessionRecord(
        session_id=new_session_id(tenant),
        tenant=tenant,
        request_id=checked_request_id(request.request_id),
        prompt=tuple(prompt),
        sampling=sampling,
        stopping=stopping,
        stop=checked_stop(tuple(request.stop)),
        drafting=drafting,
        ngram=ngram,
        prediction=await prediction_tokens(request, target),
        echo=request.echo,
        weights_fingerprint=info.weights_fingerprint,
        vocabulary_fingerprint=info.vocabulary_fingerprint,
        tokenizer_fingerprint=info.tokenizer_hash,
        dtype=info.dtype,
        created=time.time(),
        priority=check_priority(request.priority),
        parent=request.parent,
        request_digest=digest_of(request) if request.request_id else "",
    )


def digest_of(request: generation_pb2.GenerateRequest) -> str:
    """Of what is asked for, so that a request id is not used for two different things.

    What says how one call is answered, not which session it is, is left out: a repeated call may differ there.
    """
    asked = generation_pb2.GenerateRequest()
    asked.CopyFrom(request)
    for field in ("request_id", "provisional", "take_over", "n"):
        asked.ClearField(field)
    return hashlib.blake2b(asked.SerializeToString(deterministic=True), digest_size=DIGEST_BYTES).hexdigest()


async def prompt_tokens(request: generation_pb2.GenerateRequest, target: Target) -> list[int]:
    kind = request.WhichOneof("prompt")
    if kind == "text":
        return await encoded(request.text, target)
    return list(request.tokens.ids) if kind == "tokens" else []


async def prediction_tokens(request: generation_pb2.GenerateRequest, target: Target) -> tuple[int, ...]:
    """What the output may look like, none without a prediction; one that is too long is refused unread."""
    if request.WhichOneof("prediction") == "prediction_text":
        size, most = len(request.prediction_text.encode()), target.most_prompt_bytes
        if size > most:
            raise InvalidParameter("prediction", f"{size} bytes of text are more than a context holds (at most {most})")
        tokens = await encoded(request.prediction_text, target)
    else:
        tokens = list(request.prediction_tokens.ids)
    return check_prediction(tokens, target.info.vocabulary, target.info.context)


async def encoded(text: str, target: Target) -> list[int]:
    """The text's tokens, without holding up the event loop; what cannot fit is refused unread."""
    size, most = len(text.encode()), target.most_prompt_bytes
    if size > most:
        context = target.info.context
        raise InvalidParameter("prompt", f"{size} bytes of text do not fit a context of {context} (at most {most})")
    if size < LONG_TEXT:
        return encode(target.tokenizer, text)
    # Of the library's calls, only those for batches release the interpreter's lock.
    batch = await asyncio.to_thread(target.tokenizer.encode_batch, [text], add_special_tokens=False)
    return list(batch[0].ids)


def stopping_of(wire: common_pb2.Stopping, info: Info, room: int) -> Stopping:
    """max_tokens 0 means all that the context has room for; more than that is refused, not clipped."""
    if wire.max_tokens > room:
        raise InvalidParameter(
            "max_tokens", f"{wire.max_tokens} do not fit: the context has room for {room} more tokens"
        )
    return convert.stopping_from_wire(wire, default_max_tokens=room, vocabulary=info.vocabulary, eos_ids=info.eos_ids)


def checked_stop(stop: tuple[str, ...]) -> tuple[str, ...]:
    check_stops(stop)
    return stop


def checked_request_id(request_id: str) -> str:
    if len(request_id) > MOST_REQUEST_ID:
        raise InvalidParameter("request_id", f"at most {MOST_REQUEST_ID} characters are allowed, not {len(request_id)}")
    return request_id


def drafting_of(value: generation_pb2.Drafting) -> tuple[bool, bool]:
    """Whether drafters may propose, and whether the verifier may, from the text itself."""
    if value not in generation_pb2.Drafting.values():
        raise InvalidParameter("drafting", f"{value} is not a known value")
    drafters = value not in (generation_pb2.DRAFTING_OFF, generation_pb2.DRAFTING_NGRAM)
    ngram = value not in (generation_pb2.DRAFTING_OFF, generation_pb2.DRAFTING_DRAFTERS)
    return drafters, ngram
