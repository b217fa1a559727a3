"""Log-probabilities of prompts: asked of a verifier beside the sessions, for whichever protocol wants them.

A prompt's rows are computed anew, whatever a verifier has kept of it: what is reused has no log-probabilities. So they
are the same whoever asked for that prompt before.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

import grpc

from orchestrator.api.requests import record_of
from orchestrator.peers.models import Target
from orchestrator.sessions import Orchestrator
from orchestrator.store import SessionRecord
from specwire.rpc.channel import Backoff
from specwire.rpc.errors import RETRY_AFTER, StatusError
from specwire.v1 import common_pb2, verify_pb2
from specwire.v1 import generation_pb2 as pb

# Worth asking again, or elsewhere: all slots are taken; the link was lost, or the verifier stops.
WORTH_REPEATING = (grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.UNAVAILABLE)
FIRST_PAUSE_S, MOST_PAUSE_S = 0.02, RETRY_AFTER


@dataclass(frozen=True, slots=True)
class PromptScores:
    """A prompt's tokens, and for each but the first its log-probability given those before it.

    ranks: how many ids were at least as probable. Both have one entry less than `tokens`.
    """

    tokens: tuple[int, ...]
    logprobs: Sequence[common_pb2.TokenLogprobs] = ()
    ranks: Sequence[int] = ()


class PromptScorer:
    """One for all of an orchestrator's calls."""

    def __init__(self, orchestrator: Orchestrator) -> None:
        self._orchestrator = orchestrator

    async def score(
        self, request: pb.GenerateRequest, target: Target, tenant: str, top: int | None, time_left: float | None
    ) -> PromptScores:
        """The request's prompt, with the `top` most probable ids at each token; None: its tokens only.

        It counts as one of the tenant's sessions while it lasts, and its tokens as a prompt's.

        Raises:
            InvalidParameter: as of a session with this request.
            StatusError: as `Orchestrator.admit`; RESOURCE_EXHAUSTED or UNAVAILABLE, no verifier took it for as long as
                a session waits for one; DEADLINE_EXCEEDED.
        """
        record = await record_of(_prompt_only(request), target, tenant, seed=0)
        await self._orchestrator.admit(record)
        used = 0
        try:
            async with asyncio.timeout(time_left):
                scores = await self._score(record, target, top)
            used = len(record.prompt)
            return scores
        except TimeoutError:
            raise StatusError(grpc.StatusCode.DEADLINE_EXCEEDED, "the request's timeout has passed") from None
        finally:
            self._orchestrator.dismiss(record, used)

    async def _score(self, record: SessionRecord, target: Target, top: int | None) -> PromptScores:
        tokens = record.prompt
        if top is None or len(tokens) < 2:
            return PromptScores(tokens)
        asked = verify_pb2.ScoreRequest(tokens=tokens, from_position=1, top=top)
        clock, pauses = asyncio.get_running_loop().time, Backoff(FIRST_PAUSE_S, MOST_PAUSE_S)
        until = clock() + self._orchestrator.options.peer_timeout
        while True:
            try:
                scored = await self._orchestrator.pool.scoring_peer(target.identity, len(tokens)).score(asked)
            except StatusError as error:
                if error.code not in WORTH_REPEATING or clock() >= until:
                    raise
                await asyncio.sleep(pauses.next())
                continue
            if len(scored.scored) != len(tokens) - 1 or len(scored.ranks) != len(tokens) - 1:
                raise StatusError(grpc.StatusCode.INTERNAL, "the verifier told another number of log-probabilities")
            return PromptScores(tokens, scored.scored, scored.ranks)


def _prompt_only(request: pb.GenerateRequest) -> pb.GenerateRequest:
    """The request as one that generates as little as there can be, and stands for itself."""
    asked = pb.GenerateRequest()
    asked.CopyFrom(request)
    for name in ("request_id", "parent", "n", "prediction_text", "prediction_tokens"):
        asked.ClearField(name)
    asked.stopping.CopyFrom(common_pb2.Stopping(max_tokens=1))
    return asked
