"""VerifyService on the wire: messages become validated commands, the engine's reports become messages."""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import suppress
from typing import Any, NamedTuple, TypeVar

import grpc
import grpc.aio

from specwire.core.invalid import MOST_SCORED, Code, InvalidParameter, check_prediction
from specwire.core.law.constraint import Matcher, check_constraint
from specwire.core.law.sampling import MOST_LOGPROBS, TokenScore
from specwire.core.placement import check_priority
from specwire.core.text import Stopping
from specwire.core.verify.references import check_lengths, checked_ids
from specwire.core.verify.session import Allowance
from specwire.rpc.convert import (
    MOST_UINT64,
    bounded_fence,
    bounded_ledger_us,
    drafters_from_wire,
    logprobs_to_wire,
    paces_to_wire,
    proposal_from_wire,
    sampling_from_wire,
    saturated,
    stopping_from_wire,
    verdict_to_wire,
)
from specwire.rpc.decoding import LONG_BYTES, portions
from specwire.rpc.errors import Context, StatusError, code_of
from specwire.rpc.link import Outbox
from specwire.rpc.model_info import answer
from specwire.rpc.service_thread import ServiceThread, monotonic_us
from specwire.telemetry.tracing import LinkSpans
from specwire.text.constraints import Beginnings, Compiler, Found, NotInstalled
from specwire.text.sandbox import Busy
from specwire.v1 import common_pb2, verify_pb2, verify_pb2_grpc
from verify_service.engine.messages import (
    Admitted,
    Begun,
    Command,
    LinkLost,
    Opening,
    Refusal,
    Report,
    Reports,
    Scoring,
    StepTimings,
    Tick,
    TurnAway,
)
from verify_service.engine.session_manager import FAILED
from verify_service.usage import UsageLog

logger = logging.getLogger(__name__)

# ----------------------------------------------------------------------------------------------------------------------
# Messages of VerifyService <-> commands and reports. What is invalid is refused here, with the field's name.

# How the lists of a long message are taken: as `Tick`, whose closes come first, and again for what it opened.
IN_TURN = ("closes", "opens", "proposals", "progress", "drafters", "references", "closes", "forgotten")
# Scores from which writing them takes long enough for others of the event loop to feel it.
MANY = 512
MOST_SESSION_ID = 256
MOST_SCOPE = 64
SHOWN_HEX = 12
T = TypeVar("T")


def tick_from_wire(
    link: int,
    message: verify_pb2.ConnectVerifyRequest,
    info: common_pb2.GetModelInfoResponse,
    now_us: float,
    tenant: str = "",
) -> tuple[Tick, list[Refusal]]:
    """One message of a link as a command; what is refused counts as closed, so that nothing stays under its handle.

    tenant: whose link it is. Sessions and cached prefixes of other tenants are as if they were not there, whatever ids
    and scopes it names.
    """
    refusals: list[Refusal] = []
    opens = _read(message.opens, lambda each: opening_from_wire(each, info, now_us, tenant), refusals)
    references = _read(message.references, lambda part: checked_ids(part.tokens, info.vocabulary), refusals)
    drafters = _read(message.drafters, lambda told: drafters_from_wire(told.drafters), refusals)
    tick = Tick(
        link,
        now_us,
        tuple([opening for _, opening in opens]),
        tuple((proposal.handle, proposal_from_wire(proposal)) for proposal in message.proposals),
        tuple((progress.handle, allowance_from_wire(progress)) for progress in message.progress),
        (*(close.handle for close in message.closes), *(refusal.handle for refusal in refusals)),
        tuple(own_id(tenant, session_id) for session_id in message.forgotten),
        tuple(references),
        tuple(drafters),
    )
    return tick, refusals


def _read(parts: Iterable[Any], read: Callable[[Any], T], refusals: list[Refusal]) -> list[tuple[int, T]]:
    """By handle, what parts of a message say; `refusals` of the others are added."""
    found: list[tuple[int, T]] = []
    for part in parts:
        try:
            found.append((part.handle, read(part)))
        except InvalidParameter as error:
            refusals.append(Refusal(part.handle, Code.INVALID_ARGUMENT, str(error)))
        except StatusError as error:
            refusals.append(Refusal(part.handle, Code.FAILED_PRECONDITION, error.message))
    return found


def taken(
    link: int,
    message: verify_pb2.ConnectVerifyRequest,
    info: common_pb2.GetModelInfoResponse,
    now_us: float,
    tenant: str,
    late: list[Refusal],
) -> tuple[Tick, verify_pb2.ConnectVerifyResponse, Counter[str]]:
    """A message as a command; what is answered at once: refusals, `late` among them; and how many, by status."""
    tick, refusals = tick_from_wire(link, message, info, now_us, tenant)
    refusals += late
    codes = Counter(refusal.code.name.lower() for refusal in refusals)
    return tick, verify_pb2.ConnectVerifyResponse(refused=map(refusal_to_wire, refusals)), codes


def opening_from_wire(
    message: verify_pb2.Open, info: common_pb2.GetModelInfoResponse, now_us: float = 0.0, tenant: str = ""
) -> Opening:
    """Raises InvalidParameter, or StatusError (FAILED_PRECONDITION) for another vocabulary."""
    check_vocabulary(message.vocabulary_fingerprint, info.vocabulary_fingerprint)
    if not 1 <= len(message.session_id) <= MOST_SESSION_ID:
        raise InvalidParameter(
            "session_id", f"must have 1 to {MOST_SESSION_ID} characters, not {len(message.session_id)}"
        )
    check_tokens(message.tokens, info.vocabulary, 1, info.context - 1)
    if not 1 <= message.prompt_length <= len(message.tokens):
        raise InvalidParameter(
            "prompt_length", f"must be from 1 to the {len(message.tokens)} tokens, not {message.prompt_length}"
        )
    sampling, stopping = sampling_from_wire(message.sampling, vocabulary=info.vocabulary), _stopping(message, info)
    check_constraint(sampling.constraint, stopping, info.eos_ids)
    return Opening(
        message.handle,
        own_id(tenant, message.session_id),
        bounded_fence(message.fence),
        message.attach,
        tuple(message.tokens),
        message.prompt_length,
        sampling,
        stopping,
        allowance_from_wire(message.progress),
        now_us + message.deadline_ms * 1000.0 if message.deadline_ms else None,
        bounded_ledger_us(message.ledger_us),
        not message.no_ngram,
        message.epoch,
        own_scope(tenant, _scope(message.cache_scope)),
        check_priority(message.priority),
        check_prediction(message.prediction, info.vocabulary, info.context),
        # An older orchestrator knows of n-grams only, and who turns these off means any guess of the verifier's.
        not message.no_head and (message.head_alone or not message.no_ngram),
        tenant,
        message.share_text,
        check_lengths(message.reference_lengths),
        drafters_from_wire(message.drafters),
    )


def own_id(tenant: str, session_id: str) -> str:
    """The engine's id of a tenant's session."""
    return f"{tenant}\n{session_id}" if tenant else session_id


def own_scope(tenant: str, scope: bytes) -> bytes:
    return b"%b\n%b" % (tenant.encode(), scope) if tenant and scope else scope


def _scope(scope: bytes) -> bytes:
    if len(scope) > MOST_SCOPE:
        raise InvalidParameter("cache_scope", f"must have at most {MOST_SCOPE} bytes, not {len(scope)}")
    return scope


def _stopping(message: verify_pb2.Open, info: common_pb2.GetModelInfoResponse) -> Stopping:
    if not message.HasField("progress"):
        raise InvalidParameter("progress", "is required")
    return stopping_from_wire(message.stopping, vocabulary=info.vocabulary, eos_ids=info.eos_ids)


def check_vocabulary(theirs: str, ours: str) -> None:
    if theirs != ours:
        raise StatusError(
            grpc.StatusCode.FAILED_PRECONDITION,
            f"vocabulary_fingerprint: the session's vocabulary is {theirs[:SHOWN_HEX] or '(none)'}, "
            f"this target's is {ours[:SHOWN_HEX]}",
        )


def scores_to_wire(scores: Sequence[TokenScore], whole: bool) -> verify_pb2.ScoreResponse:
    """whole: with ranks, and the most probable ids."""
    told = scores if whole else []
    return verify_pb2.ScoreResponse(
        log_probabilities=[each.logprobs.logprob for each in scores],
        scored=logprobs_to_wire(each.logprobs for each in told),
        ranks=[each.rank for each in told],
    )


async def _scores(done: asyncio.Future[list[TokenScore] | Refusal]) -> list[TokenScore]:
    """Raises StatusError where the engine refuses."""
    result = await done
    if isinstance(result, Refusal):
        raise StatusError(code_of(result.code), result.message, result.retry_ms / 1000 or None)
    return result


def check_tokens(tokens: Sequence[int], vocabulary: int, least: int, most: int) -> None:
    if not least <= len(tokens) <= most:
        raise InvalidParameter("tokens", f"must be from {least} to {most} tokens, not {len(tokens)}")
    if max(tokens) >= vocabulary:
        raise InvalidParameter("tokens", f"token id {max(tokens)} is outside 0..{vocabulary - 1}")


def allowance_from_wire(message: verify_pb2.Progress) -> Allowance:
    return Allowance(message.durable, message.credit)


def report_to_wire(report: Report) -> verify_pb2.ConnectVerifyResponse:
    return verify_pb2.ConnectVerifyResponse(
        opened=[_opened(each) for each in report.admitted],
        verdicts=[verdict_to_wire(each.verdict, each.handle, each.attach) for each in report.decided],
        refused=[refusal_to_wire(each) for each in report.refused],
        timings=_timings(report.timings) if report.timings else None,
    )


def set_apart(report: Report) -> set[int]:
    """Take out of `report` what cannot be written; returns whose that is: these sessions are refused instead."""
    broken = {each.handle for each in report.admitted if not _writable(Report(admitted=[each]))}
    broken |= {each.handle for each in report.decided if not _writable(Report(decided=[each]))}
    report.admitted = [each for each in report.admitted if each.handle not in broken]
    report.decided = [each for each in report.decided if each.handle not in broken]
    report.refused = [each for each in report.refused if _writable(Report(refused=[each]))]
    report.refused += [Refusal(handle, Code.INTERNAL, FAILED) for handle in sorted(broken)]
    if not _writable(Report(timings=report.timings)):
        report.timings = None
    return broken


def _writable(report: Report) -> bool:
    try:
        report_to_wire(report)
    except Exception:
        return False
    return True


def refusal_to_wire(refusal: Refusal) -> common_pb2.Refused:
    return common_pb2.Refused(
        handle=refusal.handle,
        code=int(refusal.code),
        message=refusal.message,
        fence=refusal.fence,
        retry_after_ms=refusal.retry_ms,
    )


def _opened(admitted: Admitted) -> verify_pb2.Opened:
    return verify_pb2.Opened(
        handle=admitted.handle,
        attach=admitted.attach,
        position=admitted.position,
        resumed=admitted.resumed,
        tail=[verdict_to_wire(each.verdict, each.handle, each.attach) for each in admitted.tail],
        cached=admitted.cached,
        paces=paces_to_wire(admitted.paces),
    )


LONG_TIMINGS = ("step", "forward_ended_ns")


def _timings(timings: StepTimings) -> verify_pb2.StepTimings:
    """Their fields have the same names. A process that was stopped for an hour has measured what fits in none."""
    return verify_pb2.StepTimings(
        **{
            name: saturated(value, MOST_UINT64) if name in LONG_TIMINGS else saturated(value)
            for name, value in timings._asdict().items()
        }
    )


# ----------------------------------------------------------------------------------------------------------------------
# Which sessions the links have open: a verifier that stops waits for them.


class Presence:
    """Counts by link and handle; in the event loop."""

    def __init__(self) -> None:
        self._open: set[tuple[int, int]] = set()
        self._none = asyncio.Event()
        self._none.set()

    def came(self, link: int, handles: Iterable[int]) -> None:
        self._open |= {(link, handle) for handle in handles}
        self._note()

    def went(self, link: int, handles: Iterable[int]) -> None:
        """Handles that are not open may be among them."""
        self._open -= {(link, handle) for handle in handles}
        self._note()

    def lost(self, link: int) -> None:
        """All of a link's."""
        self._open = {each for each in self._open if each[0] != link}
        self._note()

    def _note(self) -> None:
        if self._open:
            self._none.clear()
        else:
            self._none.set()

    async def none_left(self, seconds: float) -> None:
        """Return when none is open any more, after `seconds` at the latest."""
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._none.wait()


# ----------------------------------------------------------------------------------------------------------------------
# VerifyService itself: each Connect stream is a link to the engine's thread.

EngineThread = ServiceThread[Command, Reports, common_pb2.GetModelInfoResponse]
Responses = Outbox[verify_pb2.ConnectVerifyResponse]
ConnectContext = grpc.aio.ServicerContext[verify_pb2.ConnectVerifyRequest, verify_pb2.ConnectVerifyResponse]
InfoContext = grpc.aio.ServicerContext[common_pb2.GetModelInfoRequest, common_pb2.GetModelInfoResponse]
ScoreContext = grpc.aio.ServicerContext[verify_pb2.ScoreRequest, verify_pb2.ScoreResponse]

STOPPING = "the verifier is stopping"
# Seconds for ended links to tell their peers.
FAREWELL_S = 1.0
# Characters of a session's id in traces, as in logs: the whole id is the right to read the session.
SHOWN_CHARACTERS = 8


class VerifyLink(NamedTuple):
    """A Connect stream: what goes out on it, and a future whose exception ends it."""

    outbox: Responses
    broken: asyncio.Future[None]

    def end(self, message: str) -> None:
        """End the stream with UNAVAILABLE: the peer may go on elsewhere."""
        if not self.broken.done():
            self.broken.set_exception(StatusError(grpc.StatusCode.UNAVAILABLE, message))


def turned_away(message: verify_pb2.ConnectVerifyRequest) -> list[Refusal]:
    """Remove the opens, and close their handles: after a refusal nothing is held under a handle."""
    handles = [opening.handle for opening in message.opens]
    message.ClearField("opens")
    message.closes.extend(common_pb2.Close(handle=handle) for handle in handles)
    return [Refusal(handle, Code.UNAVAILABLE, STOPPING) for handle in handles]


def matcher_or_refusal(handle: int, found: Found) -> Matcher | Refusal:
    """The command that tells the engine what became of a session's constraint."""
    match found:
        case InvalidParameter():
            return Refusal(handle, Code.INVALID_ARGUMENT, str(found))
        case NotInstalled():
            return Refusal(handle, Code.FAILED_PRECONDITION, str(found))
        case Busy():
            return Refusal(handle, Code.RESOURCE_EXHAUSTED, str(found))
        case _:
            return found


def trace(spans: LinkSpans, link: int, report: Report) -> None:
    """Write a step's reports onto the spans of its sessions."""
    for admitted in report.admitted:
        spans.event(link, admitted.handle, "seated", position=admitted.position, cached=admitted.cached)
    for decided in report.decided:
        if decided.verdict.finish is not None:
            spans.event(link, decided.handle, "decided", end=decided.verdict.end, reason=decided.verdict.finish.name)
    for refusal in report.refused:
        spans.end(link, refusal.handle, refusal.message)


class VerifyServicer(verify_pb2_grpc.VerifyServiceServicer):
    """Serves the engine whose model is loaded and described by `info`. Each Connect stream is a link.

    `refused`: sessions, by status.

    Args:
        tenant: whose link a call is; None where there are no tenants.
        usage: where it is told what sessions used, if anywhere.
    """

    def __init__(
        self,
        thread: EngineThread,
        info: common_pb2.GetModelInfoResponse,
        tenant: Callable[[Context], str] | None = None,
        usage: UsageLog | None = None,
    ) -> None:
        self._tenant = tenant
        self._usage = usage
        self._thread = thread
        self._info = info
        self._numbers = itertools.count()
        self._links: dict[int, VerifyLink] = {}
        self._presence = Presence()
        self._empty = asyncio.Event()
        self._draining = False
        self.refused: Counter[str] = Counter()
        compiler = Compiler(info.tokenizer_json, info.vocabulary, info.eos_ids)
        self._beginnings = Beginnings(compiler)
        self._spans = LinkSpans("specwire.verify")
        thread.on_reports = self._deliver

    def _deliver(self, reports: Reports) -> None:
        """About once a step, in the event loop."""
        for link, report in reports.items():
            message = self._written(link, report)
            try:
                self._account(link, report)
            except Exception:
                logger.exception("a report is missing in traces or usage")
            if link in self._links:
                self._links[link].outbox.push(message)

    def _written(self, link: int, report: Report) -> verify_pb2.ConnectVerifyResponse:
        """What cannot be written for a session ends that one."""
        try:
            return report_to_wire(report)
        except Exception:
            logger.exception("a report cannot be written as it is")
        broken = tuple(set_apart(report))
        if broken:
            self._thread.send(Tick(link, monotonic_us(), closes=broken))
        return report_to_wire(report)

    def _account(self, link: int, report: Report) -> None:
        if report.refused:
            self._presence.went(link, (refusal.handle for refusal in report.refused))
            self.refused.update(refusal.code.name.lower() for refusal in report.refused)
        trace(self._spans, link, report)
        if self._usage is not None:
            self._usage.reported(link, report)

    @property
    def links(self) -> int:
        return len(self._links)

    async def drain(self, grace: float) -> None:
        """Take no new links or sessions; give the present sessions `grace` seconds to end, then end the links."""
        self._draining = True
        for link in self._links.values():
            link.outbox.push(verify_pb2.ConnectVerifyResponse(draining=True))
        self._thread.send(TurnAway(STOPPING))
        await self._presence.none_left(grace)
        for link in self._links.values():
            link.end(STOPPING)
        await self._wait_until_empty(FAREWELL_S)
        await self._beginnings.stop()

    async def _wait_until_empty(self, seconds: float) -> None:
        self._empty.clear()
        with suppress(TimeoutError):
            if self._links:
                async with asyncio.timeout(seconds):
                    await self._empty.wait()

    async def GetModelInfo(
        self, request: common_pb2.GetModelInfoRequest, _: InfoContext
    ) -> common_pb2.GetModelInfoResponse:
        return answer(self._info, request)

    async def Score(self, request: verify_pb2.ScoreRequest, context: ScoreContext) -> verify_pb2.ScoreResponse:
        check_tokens(request.tokens, self._info.vocabulary, 2, self._info.context)
        if not 1 <= request.from_position < len(request.tokens):
            raise InvalidParameter(
                "from_position", f"must be from 1 to {len(request.tokens) - 1}, not {request.from_position}"
            )
        if request.top > MOST_LOGPROBS:
            raise InvalidParameter("top", f"must be from 0 to {MOST_LOGPROBS}, not {request.top}")
        if len(request.score_id) > MOST_SESSION_ID:
            raise InvalidParameter(
                "score_id", f"at most {MOST_SESSION_ID} characters are allowed, not {len(request.score_id)}"
            )
        if len(request.others) >= MOST_SCORED:
            raise InvalidParameter("others", f"at most {MOST_SCORED - 1} are allowed, not {len(request.others)}")
        for other in request.others:
            check_tokens(other.tokens, self._info.vocabulary, 1, self._info.context - request.from_position)
        tenant, began_s = self._whose(context), time.monotonic()
        scoring, done = self._scoring(request, tenant)
        self._thread.send(scoring)
        try:
            scores = await _scores(done)
        except asyncio.CancelledError:  # its caller has left: no further chunk is computed
            scoring.cancelled = True
            if self._usage is not None and scoring.fed:
                self._usage.left(request, tenant, scoring.fed, time.monotonic() - began_s)
            raise
        if self._usage is not None:
            await self._usage.scored(request, tenant, len(scores), time.monotonic() - began_s)
        written = scores, request.HasField("top")
        return await asyncio.to_thread(scores_to_wire, *written) if len(scores) > MANY else scores_to_wire(*written)

    def _whose(self, context: Context) -> str:
        """The tenant; "" where there are none."""
        return "" if self._tenant is None else self._tenant(context)

    def _scoring(
        self, request: verify_pb2.ScoreRequest, tenant: str
    ) -> tuple[Scoring, asyncio.Future[list[TokenScore] | Refusal]]:
        """What the engine is asked, and its answer."""
        loop = asyncio.get_running_loop()
        done: asyncio.Future[list[TokenScore] | Refusal] = loop.create_future()

        def settle(result: list[TokenScore] | Refusal) -> None:
            if not done.done():
                done.set_result(result)

        def reply(result: list[TokenScore] | Refusal) -> None:
            loop.call_soon_threadsafe(settle, result)

        others = tuple(tuple(other.tokens) for other in request.others)
        tokens = tuple(request.tokens)
        return Scoring(tokens, request.from_position, reply, request.top, others=others, tenant=tenant), done

    async def Connect(self, requests: AsyncIterator[verify_pb2.ConnectVerifyRequest], context: ConnectContext) -> None:
        if self._draining:
            raise StatusError(grpc.StatusCode.UNAVAILABLE, STOPPING)
        tenant = self._whose(context)
        broken: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        link = VerifyLink(Responses(context.write, lambda error: link.end(str(error))), broken)
        number = next(self._numbers)
        self._links[number] = link
        reading = asyncio.ensure_future(self._read(requests, number, link.outbox, tenant))
        try:
            done, _ = await asyncio.wait([reading, broken], return_when=asyncio.FIRST_COMPLETED)
            for future in done:
                future.result()
        finally:
            reading.cancel()
            broken.cancel()
            self._thread.send(LinkLost(number))
            self._forget(number)
            await link.outbox.close()

    def _forget(self, number: int) -> None:
        self._beginnings.lost(number)
        del self._links[number]
        self._presence.lost(number)
        self._spans.lose(number)
        if self._usage is not None:
            self._usage.link_lost(number)
        if not self._links:
            self._empty.set()

    def _note(self, link: int, message: verify_pb2.ConnectVerifyRequest, tick: Tick) -> None:
        """Sessions were opened or closed. Closes come first, so that a handle may be used again."""
        self._presence.came(link, (opening.handle for opening in tick.opens))
        self._presence.went(link, tick.closes)
        self._beginnings.over(link, tick.closes)
        for close in message.closes:
            self._spans.end(link, close.handle)
        opened = {opening.handle for opening in tick.opens}
        for opening in [each for each in message.opens if each.handle in opened]:
            session, tokens = opening.session_id[:SHOWN_CHARACTERS], len(opening.tokens)
            self._spans.begin(link, opening.handle, opening.traceparent, session=session, tokens=tokens)
        if self._usage is not None:
            self._usage.closed(link, tick.closes)
            for begun in tick.opens:
                self._usage.opened(link, begun)

    def _begin(self, link: int, opening: Opening) -> None:
        """Compile its constraint; the engine has the session already and waits for that."""
        constraint = opening.sampling.constraint
        if constraint is None:
            return

        def tell(found: Found) -> None:
            self._thread.send(
                Begun(link, opening.handle, opening.generation, matcher_or_refusal(opening.handle, found))
            )

        output, whose = opening.tokens[opening.prompt_length :], None if self._tenant is None else opening.tenant
        self._beginnings.begin(link, constraint, output, tell, opening.handle, whose)

    async def _read(
        self, requests: AsyncIterator[verify_pb2.ConnectVerifyRequest], link: int, outbox: Responses, tenant: str = ""
    ) -> None:
        async for message in requests:
            for portion in portions(message, IN_TURN):
                await self._take(portion, link, outbox, tenant)
                if portion is not message:
                    await asyncio.sleep(0)

    async def _take(self, message: verify_pb2.ConnectVerifyRequest, link: int, outbox: Responses, tenant: str) -> None:
        late = turned_away(message) if self._draining else []
        said = link, message, self._info, monotonic_us(), tenant, late
        is_long = message.ByteSize() > LONG_BYTES
        tick, refused, codes = await asyncio.to_thread(taken, *said) if is_long else taken(*said)
        if tick.opens or tick.closes:
            self._note(link, message, tick)
        if codes:
            self.refused.update(codes)
            outbox.push(refused)
        self._thread.send(tick)
        for opening in tick.opens:
            self._begin(link, opening)
        await self._thread.room()
