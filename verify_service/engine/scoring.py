"""Scores given texts between steps, a chunk at a time, so that a long text delays no session by more than a chunk."""

from __future__ import annotations

import logging
from collections import deque
from dataclasses import dataclass, field

from specwire.core.invalid import Code
from specwire.core.model import Feed, ModelLost, SlotModel
from verify_service.engine.batch import OUT_OF_MEMORY_MESSAGE, RowSampler, ShortOfMemory, detect_out_of_memory
from verify_service.engine.messages import Refusal, Scoring, TokenScore
from verify_service.engine.session_manager import SessionManager

logger = logging.getLogger(__name__)

CHUNK_ROWS = 256


@dataclass(slots=True)
class _ScoringJob:
    request: Scoring
    slot: int
    done: list[TokenScore] = field(default_factory=list)
    scored: int = 0  # how many of its texts

    @property
    def text(self) -> tuple[int, ...]:
        """The one that is being scored."""
        request = self.request
        if not self.scored:
            return request.tokens
        return request.tokens[: request.from_position] + request.others[self.scored - 1]


class Scorer:
    """Borrows a free slot for each request, whose texts follow each other there behind what they have in common.

    `jobs`: requests under way, and those that wait.
    """

    def __init__(self, lm: SlotModel, sampler: RowSampler, sessions: SessionManager) -> None:
        self._lm = lm
        self._sampler = sampler
        self._sessions = sessions
        self.jobs: deque[_ScoringJob] = deque()

    def add(self, request: Scoring) -> None:
        slot = self._sessions.scheduler.lend()
        if slot is None:
            message = f"all {self._lm.slots} slots of this verifier are taken"
            request.reply(Refusal(0, Code.RESOURCE_EXHAUSTED, message))
            return
        self.jobs.append(_ScoringJob(request, slot))

    def run_chunk(self) -> None:
        """Run one forward of the first text."""
        job = self.jobs[0]
        try:
            with detect_out_of_memory():
                answer = None if job.request.cancelled else self._advance(job)
        except ModelLost:
            raise
        except ShortOfMemory as short:
            logger.warning("short of memory for scoring: %s", short)
            answer = Refusal(0, Code.RESOURCE_EXHAUSTED, OUT_OF_MEMORY_MESSAGE)
        except Exception:
            logger.exception("scoring failed")
            answer = Refusal(0, Code.INTERNAL, "the target's forward failed; the verifier's log says why")
        if answer is not None or job.request.cancelled:
            self._end(job)
        if answer is not None:
            job.request.reply(answer)

    def abandon(self) -> None:
        """Refuse the texts that are left: the verifier stops."""
        for job in list(self.jobs):
            self._end(job)
            job.request.reply(Refusal(0, Code.UNAVAILABLE, "the verifier is stopping"))

    def _advance(self, job: _ScoringJob) -> list[TokenScore] | Refusal | None:
        """The scores once all texts are fed, a refusal, or None where there is more to do."""
        tokens, first = job.text, job.request.from_position
        start = self._lm.cached(job.slot)
        stop = min(start + CHUNK_ROWS, len(tokens) - 1)
        # The row of position p holds the distribution of token p + 1.
        wanted = max(0, stop - max(start, first - 1))
        rows = self._lm.forward([Feed(job.slot, start, tokens[start:stop], wanted)])
        if job.slot in self._lm.failed:
            return Refusal(0, Code.ABORTED, f"the target's logits before position {stop} are not finite")
        job.done += self._sampler.score(rows, tokens[stop - wanted + 1 : stop + 1], job.request.top) if wanted else []
        if stop < len(tokens) - 1:
            return None
        job.scored += 1
        if job.scored > len(job.request.others):
            return job.done
        # The row before the first scored token is computed again: it holds that token's distribution.
        self._lm.rollback(job.slot, first - 1)
        return None

    def _end(self, job: _ScoringJob) -> None:
        self.jobs.remove(job)
        self._sessions.scheduler.slots.give_back(job.slot)
