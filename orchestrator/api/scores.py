"""Log-probabilities of prompts and of given continuations: asked of a verifier beside the sessions, by any protocol.

A text's rows are computed anew, whatever a verifier has kept of it: what is reused has no log-probabilities. So they
are the same whoever asked for that text before. Only what the continuations of one call share is computed once.
"""

from __future__ import annotations

import asyncio
import hashlib
import secrets
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain, islice

import grpc

from orchestrator.api.requests import checked_request_id, encoded, record_of
from orchestrator.peers.models import Target
from orchestrator.sessions import Orchestrator
from orchestrator.store import SessionRecord
from specwire.core.invalid import MOST_SCORED, MOST_SCORED_PARTS, ContextExceeded, InvalidParameter
from specwire.core.messages import TokenLogprobs
from specwire.rpc import convert
from specwire.rpc.channel import Backoff
from specwire.rpc.errors import RETRY_AFTER, StatusError
from specwire.v1 import common_pb2, verify_pb2
from specwire.v1 import generation_pb2 as pb

# Worth asking again, or elsewhere: all slots are taken; the link was lost, or the verifier stops.
WORTH_REPEATING = (grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.UNAVAILABLE)
# Of a continuation, encoded one behind the other: a few ms.
PARTS_AT_ONCE = 64
FIRST_PAUSE_S, MOST_PAUSE_S = 0.02, RETRY_AFTER
SCORE_ID_BYTES = 16
MISCOUNTED = "the verifier told another number of log-probabilities"


@dataclass(frozen=True, slots=True)
class PromptScores:
    """A prompt's tokens, and for each but the first its log-probability given those before it.

    told: as the verifier told them, since decoded ones take twenty times the memory. ranks: how many ids were at least
    as probable. Both have one entry less than `tokens`.
    """

    tokens: tuple[int, ...]
    told: Sequence[common_pb2.TokenLogprobs] = ()
    ranks: Sequence[int] = ()

    @property
    def logprobs(self) -> Iterator[TokenLogprobs]:
        """Each is decoded as it is read. Raises StatusError."""
        for each in self.told:
            try:
                yield from convert.logprobs_from_wire([each])
            except InvalidParameter as error:
                raise StatusError(grpc.StatusCode.INTERNAL, f"the verifier told no {error}") from None


class PromptScorer:
    """One for all of an orchestrator's calls."""

    def __init__(self, orchestrator: Orchestrator) -> None:
        self._orchestrator = orchestrator

    async def score(
        self,
        request: pb.GenerateRequest,
        target: Target,
        tenant: str,
        top: int | None,
        time_left: float | None,
        request_id: str = "",
    ) -> PromptScores:
        """The request's prompt, with the `top` most probable ids at each token; None: its tokens only.

        It counts as one of the tenant's sessions while it lasts, and its tokens as a prompt's. request_id: of the call;
        repeated with it, it counts once in records of usage.

        Raises:
            InvalidParameter: as of a session with this request.
            StatusError: as `Orchestrator.admit`; RESOURCE_EXHAUSTED or UNAVAILABLE, no verifier took it for as long as
                a session waits for one; DEADLINE_EXCEEDED.
        """
        record = await record_of(_prompt_only(request), target, tenant, seed=0, room=0)
        tokens = record.prompt
        named = _score_id(tenant, request_id)
        asked = verify_pb2.ScoreRequest(tokens=tokens, from_position=1, top=top, score_id=named)
        nothing = top is None or len(tokens) < 2
        scored = await self._admitted(record, target, None if nothing else asked, time_left)
        if len(scored.scored) != len(scored.log_probabilities) or len(scored.ranks) != len(scored.log_probabilities):
            raise StatusError(grpc.StatusCode.INTERNAL, MISCOUNTED)
        return PromptScores(tokens, scored.scored, scored.ranks)

    async def continuations(
        self, request: pb.ScoreTextRequest, target: Target, tenant: str, time_left: float | None
    ) -> pb.ScoreTextResponse:
        """The request's continuations, behind a prefix that is computed once. Raises as `score`."""
        prefix, texts = await _texts_of(request, target)
        whole = max(([*prefix, *chain.from_iterable(parts)] for parts in texts), key=len)
        if len(whole) > target.context:
            message = f"one of {len(whole) - len(prefix)} tokens behind a prefix of {len(prefix)} does not fit"
            raise ContextExceeded("continuations", message, target.context)
        longest = _prompt_only(pb.GenerateRequest(tokens=pb.TokenIds(ids=whole)))
        record = await record_of(longest, target, tenant, seed=0, room=0)
        flat = [tuple(chain.from_iterable(parts)) for parts in texts]
        asked = verify_pb2.ScoreRequest(
            tokens=[*prefix, *flat[0]],
            from_position=len(prefix),
            others=[verify_pb2.Continuation(tokens=tokens) for tokens in flat[1:]],
            score_id=_score_id(tenant, checked_request_id(request.request_id)),
        )
        charged = replace(record, prompt=(*prefix, *chain.from_iterable(flat)))
        told = iter((await self._admitted(charged, target, asked, time_left)).log_probabilities)
        return pb.ScoreTextResponse(
            prefix_tokens=len(prefix),
            scores=[
                pb.TextScore(
                    parts=[pb.PartScore(tokens=part, log_probabilities=islice(told, len(part))) for part in parts]
                )
                for parts in texts
            ],
        )

    async def _admitted(
        self, record: SessionRecord, target: Target, asked: verify_pb2.ScoreRequest | None, time_left: float | None
    ) -> verify_pb2.ScoreResponse:
        """The answer to `asked`, nothing for None, with the record's prompt charged to its tenant.

        It is charged from the beginning, and stays so if its caller leaves: a verifier computes it by then. What none
        computed is given back.
        """
        await self._orchestrator.admit(record)
        used = len(record.prompt)
        try:
            async with asyncio.timeout(time_left):
                return verify_pb2.ScoreResponse() if asked is None else await self._ask(asked, target)
        except TimeoutError:
            raise StatusError(grpc.StatusCode.DEADLINE_EXCEEDED, "the request's timeout has passed") from None
        except StatusError:
            used = 0
            raise
        finally:
            self._orchestrator.dismiss(record, used)

    async def _ask(self, asked: verify_pb2.ScoreRequest, target: Target) -> verify_pb2.ScoreResponse:
        longest = max(len(asked.tokens), *(asked.from_position + len(other.tokens) for other in asked.others), 0)
        count = len(asked.tokens) - asked.from_position + sum(len(other.tokens) for other in asked.others)
        clock, pauses = asyncio.get_running_loop().time, Backoff(FIRST_PAUSE_S, MOST_PAUSE_S)
        until = clock() + self._orchestrator.options.verifier_wait
        while True:
            try:
                scored = await self._orchestrator.pool.scoring_peer(target.identity, longest).score(asked)
            except StatusError as error:
                if error.code not in WORTH_REPEATING or clock() >= until:
                    raise
                await asyncio.sleep(pauses.next())
                continue
            if len(scored.log_probabilities) != count:
                raise StatusError(grpc.StatusCode.INTERNAL, MISCOUNTED)
            return scored


def _score_id(tenant: str, request_id: str) -> str:
    """What verifiers know a score by: the same for all that is asked of them for a call, and for its repeats."""
    if not request_id:
        return secrets.token_hex(SCORE_ID_BYTES)
    return hashlib.sha256(f"{len(tenant)}:{tenant}{request_id}".encode()).hexdigest()


def _prompt_only(request: pb.GenerateRequest) -> pb.GenerateRequest:
    """The request as one that generates as little as there can be, and stands for itself."""
    asked = pb.GenerateRequest()
    asked.CopyFrom(request)
    for name in ("request_id", "parent", "n", "prediction_text", "prediction_tokens"):
        asked.ClearField(name)
    asked.stopping.max_tokens, asked.stopping.min_tokens, asked.stopping.fit_context = 1, 0, False
    return asked


async def _texts_of(request: pb.ScoreTextRequest, target: Target) -> tuple[list[int], list[list[list[int]]]]:
    """The prefix's tokens, and those of each continuation by parts. Raises InvalidParameter, which names the field."""
    convert.check_known(request, "request")
    if not 1 <= len(request.continuations) <= MOST_SCORED:
        message = f"must be from 1 to {MOST_SCORED}, not {len(request.continuations)}"
        raise InvalidParameter("continuations", message)
    count = sum(len(text.parts) for text in request.continuations)
    if count > MOST_SCORED_PARTS:
        raise InvalidParameter("continuations", f"at most {MOST_SCORED_PARTS} parts in all are allowed, not {count}")
    prefix = await _part_tokens(request.prefix, "prefix", target)
    texts = []
    for number, text in enumerate(request.continuations):
        field = f"continuations[{number}]"
        convert.check_known(text, field)
        if not text.parts:
            raise InvalidParameter(f"{field}.parts", "must not be empty")
        parts = []
        for index, part in enumerate(text.parts):
            if index % PARTS_AT_ONCE == PARTS_AT_ONCE - 1:
                await asyncio.sleep(0)  # others of the event loop feel many short ones as they feel a long one
            parts.append(await _part_tokens(part, f"{field}.parts[{index}]", target))
        texts.append(parts)
    return prefix, texts


async def _part_tokens(part: pb.TextPart, field: str, target: Target) -> list[int]:
    convert.check_known(part, field)
    if part.WhichOneof("content") == "text":
        tokens = await encoded(part.text, target, field)
    else:
        tokens = list(part.tokens.ids)
    if not tokens:
        raise InvalidParameter(field, "must not be empty")
    if max(tokens) >= target.info.vocabulary:
        raise InvalidParameter(field, f"token id {max(tokens)} is outside 0..{target.info.vocabulary - 1}")
    return tokens
