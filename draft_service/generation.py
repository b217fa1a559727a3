"""GenerationService at a drafter: texts that its model writes alone, for callers that want no target's.

They are plain decoding, by the law that a target's texts follow (`specwire.lm.law.sampler.choose_plainly`). A text
lives as long as its call: nothing is logged, so `Started` has no session id, and what needs one is UNIMPLEMENTED. What
a request says of speed alone (drafting, sources, prediction, private, provisional, request_id, take_over) changes
nothing here; what would change the text, and is not served, is refused by its name.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import NoReturn

import grpc

from draft_service.commands import Dropped, Reply, WriteText, Written
from draft_service.service import DraftHandler
from specwire.core.invalid import InvalidParameter, check_length, check_prompt
from specwire.core.law.sampling import DRAWN_SEED_BITS, Sampling
from specwire.core.messages import FinishReason, Outcome
from specwire.core.placement import check_priority
from specwire.core.text import Ending, hash_of
from specwire.rpc import convert
from specwire.rpc.errors import Context, StatusError, code_of
from specwire.rpc.keys import Keys
from specwire.rpc.model_info import described
from specwire.rpc.versions import agreed
from specwire.telemetry.tracing import Side, parent_in, spanned
from specwire.text import OutputText, TokenizerError, check_stops, encode_aside, load_tokenizer, longest_token
from specwire.v1 import common_pb2, generation_pb2_grpc
from specwire.v1 import generation_pb2 as pb

# Texts at once, those that wait for a slot included.
MOST_TEXTS = 256
# Tokens that wait for a caller who does not read. With reports of their chances they are some megabytes.
MOST_UNREAD = 2048
KEEPS_NOTHING = "a drafter keeps no sessions: its texts end with the call that asked for them"


class TextModel:
    """What texts are written by: a drafter's handler, and its model's tokenizer."""

    def __init__(self, handler: DraftHandler) -> None:
        self.handler = handler
        self.info = handler.info
        try:
            self.tokenizer = load_tokenizer(handler.info.tokenizer_json)
        except TokenizerError as error:
            raise StatusError(grpc.StatusCode.FAILED_PRECONDITION, str(error)) from None
        self._longest = longest_token(self.tokenizer)

    async def asked(self, request: pb.GenerateRequest, link: TextStream) -> WriteText:
        """What the request asks for. Raises InvalidParameter; StatusError (NOT_FOUND): another model."""
        check_served(request, self.info.model)
        prompt = await self._prompt(request)
        sampling = sampling_of(request.sampling, self.info.vocabulary)
        fitted = convert.fitted_stopping(request.stopping, len(prompt), self.info.context)
        stopping = convert.stopping_from_wire(fitted, vocabulary=self.info.vocabulary, eos_ids=self.info.eos_ids)
        ending = Ending.of(stopping, len(prompt), frozenset(self.info.eos_ids), self.info.context)
        return WriteText(link, tuple(prompt), sampling, ending, check_priority(request.priority))

    async def _prompt(self, request: pb.GenerateRequest) -> Sequence[int]:
        given = request.text if request.WhichOneof("prompt") == "text" else request.tokens.ids
        check_length(given, self.info.context, self._longest)
        prompt = await encode_aside(self.tokenizer, given) if isinstance(given, str) else given
        check_prompt(prompt, self.info.vocabulary, self.info.context)
        return prompt


def check_served(request: pb.GenerateRequest, model: str) -> None:
    """Refuse what asks for another text than a drafter can write."""
    convert.check_known(request, "request")
    if request.model not in ("", model):
        raise StatusError(grpc.StatusCode.NOT_FOUND, f"model: {request.model!r} is not served here; {model!r} is")
    for name in ("chat", "parent", "note"):
        if request.HasField("chat") if name == "chat" else getattr(request, name):
            raise InvalidParameter(name, "needs an orchestrator: a drafter writes what follows one text or token ids")
    if request.n > 1:
        raise InvalidParameter("n", f"must be at most 1 at a drafter, not {request.n}: ask with another choice")
    check_stops(tuple(request.stop))


def sampling_of(wire: common_pb2.Sampling, vocabulary: int) -> Sampling:
    """How tokens are drawn; a seed is drawn where there is none. Raises InvalidParameter."""
    seed = secrets.randbits(DRAWN_SEED_BITS)
    sampling, rule = convert.sampling_from_wire(wire, default_seed=seed, vocabulary=vocabulary)
    if sampling.acceptance is not None:
        raise InvalidParameter("rule", f"{rule} judges draft tokens, and a drafter's own text has none: leave it out")
    if sampling.constraint is not None:
        raise InvalidParameter(str(sampling.constraint.kind), "needs an orchestrator: a drafter's texts have any form")
    return sampling


# ----------------------------------------------------------------------------------------------------------------------
# One text, from the drafter's thread to its caller.


class TextStream:
    """What the thread has told of a text, and its caller was not told yet. unread: ends a text that nobody reads."""

    def __init__(self, unread: Callable[[TextStream], None]) -> None:
        self._unread = unread
        self._written: list[Written] = []
        self._failure: StatusError | None = None
        self._news = asyncio.Event()

    def send(self, replies: list[Reply]) -> None:
        """See `ReplyLink`."""
        for reply in replies:
            if isinstance(reply, Written) and self._failure is None:
                self._written.append(reply)
            elif isinstance(reply, Dropped):
                self.fail(StatusError(code_of(reply.code), reply.message))
        self._news.set()
        if len(self._written) > MOST_UNREAD:
            message = f"the caller does not read: more than {MOST_UNREAD} tokens of its text wait for it"
            self.fail(StatusError(grpc.StatusCode.RESOURCE_EXHAUSTED, message))
            self._written.clear()
            self._unread(self)

    def fail(self, error: StatusError) -> None:
        """End it with that status, once all that was written is told."""
        self._failure = self._failure or error
        self._news.set()

    async def next(self) -> list[Written]:
        """Wait for more, and take all there is. Raises StatusError."""
        await self._news.wait()
        self._news.clear()
        if not self._written and self._failure is not None:
            raise self._failure
        written, self._written = self._written, []
        if self._failure is not None:
            self._news.set()
        return written


@dataclass(slots=True)
class Telling:
    """Tells a caller of its text: events from what was written. Times are of the monotonic clock, in ns."""

    asked: WriteText
    output: OutputText
    began_ns: int = field(default_factory=time.monotonic_ns)
    first_ns: int = 0
    told: int = 0

    def started(self, prompt: pb.Prompt | None) -> pb.GenerateResponse:
        tokens = self.asked.tokens
        sampling = convert.sampling_to_wire(self.asked.sampling)
        started = pb.Started(prompt_tokens=len(tokens), sampling=sampling, prompt_hash=hash_of(tokens), prompt=prompt)
        return pb.GenerateResponse(started=started)

    def chunk(self, written: Sequence[Written]) -> tuple[pb.GenerateResponse, FinishReason | None]:
        """The event, and why the text ends with it. No token behind a stop string belongs to it."""
        self.first_ns = self.first_ns or time.monotonic_ns()
        position = len(self.asked.tokens) + self.told
        release = self.output.push([each.token for each in written])
        kept = written[: release.kept]
        self.told += len(kept)
        told = [each.logprobs for each in kept if each.logprobs is not None]
        chunk = pb.Chunk(
            position=position,
            tokens=[each.token for each in kept],
            outcomes=convert.outcomes_to_wire([Outcome.DIRECT] * len(kept)),
            text=release.text,
            text_ends=release.text_ends,
            direct=len(kept),
            logprobs=convert.logprobs_to_wire(told),
        )
        finish = FinishReason.STOP_STRING if release.stopped_at is not None else kept[-1].finish
        return pb.GenerateResponse(chunk=chunk), finish

    def finished(self, reason: FinishReason) -> pb.GenerateResponse:
        text, now = self.output.finish(), time.monotonic_ns()
        stats = pb.Stats(
            prompt_tokens=len(self.asked.tokens),
            output_tokens=self.told,
            target_forwards=self.told,
            direct=self.told,
            time_to_first_token_us=(self.first_ns - self.began_ns) // 1000,
            duration_us=(now - self.began_ns) // 1000,
        )
        end = pb.Finished(reason=convert.reason_to_wire(reason), text=text, text_length=self.output.length, stats=stats)
        return pb.GenerateResponse(finished=end)


# ----------------------------------------------------------------------------------------------------------------------
# The service.


class GenerationServicer(generation_pb2_grpc.GenerationServiceServicer):
    """Serves a drafter whose model is loaded. Every call's text ends with the call, however that ends."""

    def __init__(self, handler: DraftHandler, keys: Keys | None = None) -> None:
        """keys: who may call; None: everybody."""
        self._handler = handler
        self._keys = keys
        self._model: TextModel | None = None
        self._reading = asyncio.Lock()
        self._streams: set[TextStream] = set()
        self._leaving: StatusError | None = None
        self._idle = asyncio.Event()
        self._idle.set()

    def replace(self, handler: DraftHandler) -> None:
        """Write by another version of the model from now on; texts of the former one end."""
        self._end_all("the drafter takes another version of its model: ask again")
        self._handler, self._model = handler, None

    async def leave(self, grace: float) -> None:
        """Take no more texts, let those that run go on for so many seconds, then end them. Idempotent."""
        self._leaving = StatusError(grpc.StatusCode.UNAVAILABLE, "the drafter is stopping")
        try:
            async with asyncio.timeout(grace):
                await self._idle.wait()
        except TimeoutError:
            self._end_all(self._leaving.message)

    def _end_all(self, why: str) -> None:
        for stream in self._streams:
            stream.fail(StatusError(grpc.StatusCode.UNAVAILABLE, why))

    async def Generate(self, request: pb.GenerateRequest, context: Context) -> AsyncIterator[pb.GenerateResponse]:
        stream, parent = TextStream(self._let_go), parent_in(context.invocation_metadata())
        with self._counted(stream):
            self._check_caller(context)
            model = await self._text_model()
            asked = await model.asked(request, stream)
            telling = Telling(asked, OutputText(model.tokenizer, tuple(request.stop)))
            with spanned("specwire.write", Side.SERVER, parent, prompt_tokens=len(asked.tokens)):
                yield telling.started(_echo(model, asked) if request.echo else None)
                await model.handler.room()
                model.handler.write(asked)
                try:
                    finish = None
                    while finish is None:
                        chunk, finish = telling.chunk(await stream.next())
                        yield chunk
                    yield telling.finished(finish)
                finally:
                    model.handler.end_text(stream)

    def _check_caller(self, context: Context) -> None:
        """What was learnt of texts is told to their tenants alone. StatusError: PERMISSION_DENIED."""
        caller = "" if self._keys is None else self._keys.holder(context.invocation_metadata() or ())
        if not agreed(self._handler.info, caller):
            message = "this drafter has learnt of tenants' texts, and writes for these alone"
            raise StatusError(grpc.StatusCode.PERMISSION_DENIED, message)

    @contextmanager
    def _counted(self, stream: TextStream) -> Iterator[None]:
        """Raises StatusError: UNAVAILABLE, RESOURCE_EXHAUSTED."""
        if self._leaving is not None:
            raise self._leaving
        if len(self._streams) >= MOST_TEXTS:
            message = f"{len(self._streams)} texts are being written or wait for a slot of this drafter"
            raise StatusError(grpc.StatusCode.RESOURCE_EXHAUSTED, message)
        self._streams.add(stream)
        self._idle.clear()
        try:
            yield
        finally:
            self._leave(stream)

    def _let_go(self, stream: TextStream) -> None:
        """Its caller does not read: its call may last, and holds nothing any more."""
        self._handler.end_text(stream)
        self._leave(stream)

    def _leave(self, stream: TextStream) -> None:
        self._streams.discard(stream)
        if not self._streams:
            self._idle.set()

    async def _text_model(self) -> TextModel:
        """Of the present handler; its tokenizer is read once somebody wants a text. Raises StatusError."""
        async with self._reading:  # once, however many want one
            while self._model is None:
                handler = self._handler
                model = await asyncio.to_thread(TextModel, handler)
                if handler is self._handler:
                    self._model = model
            return self._model

    async def GetServerInfo(self, request: pb.GetServerInfoRequest, context: Context) -> pb.GetServerInfoResponse:
        info = described(self._handler.info)
        return pb.GetServerInfoResponse(target=info, targets=[info])

    async def Watch(self, request: pb.WatchRequest, context: Context) -> NoReturn:
        raise StatusError(grpc.StatusCode.UNIMPLEMENTED, KEEPS_NOTHING)

    async def GetSession(self, request: pb.GetSessionRequest, context: Context) -> NoReturn:
        raise StatusError(grpc.StatusCode.UNIMPLEMENTED, KEEPS_NOTHING)

    async def Cancel(self, request: pb.CancelRequest, context: Context) -> NoReturn:
        raise StatusError(grpc.StatusCode.UNIMPLEMENTED, KEEPS_NOTHING)

    async def DeleteSession(self, request: pb.DeleteSessionRequest, context: Context) -> NoReturn:
        raise StatusError(grpc.StatusCode.UNIMPLEMENTED, KEEPS_NOTHING)

    async def ScoreText(self, request: pb.ScoreTextRequest, context: Context) -> NoReturn:
        raise StatusError(grpc.StatusCode.UNIMPLEMENTED, "a drafter scores no texts: ask an orchestrator")


def _echo(model: TextModel, asked: WriteText) -> pb.Prompt:
    return pb.Prompt(tokens=asked.tokens, text=model.tokenizer.decode(list(asked.tokens)))
