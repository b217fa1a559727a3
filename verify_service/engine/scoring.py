"""Scores given texts between steps, a chunk at a time, so that a long text delays no session by more than a chunk.

Where tenants share the verifier a text counts as a session of its tenant, and its chunks as those of a prompt: they
wait for the others' share of the time.
"""

from __future__ import annotations

import logging
from collections import Counter, deque
from dataclasses import dataclass, field

from specwire.core.invalid import Code
from specwire.core.law.sampling import TokenScore
from specwire.core.model import Feed, ModelLost, SlotModel
from verify_service.engine.batch import (
    OUT_OF_MEMORY_MESSAGE,
    RowSampler,
    ShortOfMemory,
    StepSharing,
    detect_out_of_memory,
)
from verify_service.engine.messages import Refusal, Scoring
from verify_service.engine.session_manager import RETRY_MS, SessionManager

logger = logging.getLogger(__name__)

CHUNK_ROWS = 256


@dataclass(slots=True, eq=False)
class ScoringJob:
    """scored: how many of its texts are."""

    request: Scoring
    slot: int
    done: list[TokenScore] = field(default_factory=list)
    scored: int = 0

    @property
    def fed(self) -> int:
        """Tokens that were computed."""
        return self.request.fed

    @property
    def text(self) -> tuple[int, ...]:
        """The one that is being scored."""
        request = self.request
        if not self.scored:
            return request.tokens
        return request.tokens[: request.from_position] + request.others[self.scored - 1]


class Scorer:
    """Borrows a free slot for each request, whose texts follow each other there behind what they have in common.

    `jobs`: what is left to do.
    """

    def __init__(
        self, lm: SlotModel, sampler: RowSampler, sessions: SessionManager, sharing: StepSharing | None = None
    ) -> None:
        self._lm = lm
        self._sampler = sampler
        self._sessions = sessions
        self._sharing = sharing
        self.jobs: deque[ScoringJob] = deque()

    @property
    def tenants(self) -> set[str]:
        """Whose texts are here."""
        return {job.request.tenant for job in self.jobs}

    @property
    def lent(self) -> list[tuple[str, int]]:
        """Tenant and slot of each text that is here."""
        return [(job.request.tenant, job.slot) for job in self.jobs]

    def turn(self, idle: bool) -> ScoringJob | None:
        """The text whose turn it is, if one may go on now: the first one, of the tenant that owes the others least.

        idle: nothing else is to be computed, so that none waits for others' share.
        """
        sharing = self._sharing
        if sharing is None:
            return self.jobs[0] if self.jobs else None
        able = {tenant for tenant in self.tenants if sharing.paced(tenant) and (idle or not sharing.waits(tenant))}
        jobs = (job for job in self.jobs if job.request.tenant in able)
        return min(jobs, key=lambda job: sharing.shares.owed_us(job.request.tenant), default=None)

    # Taking in

    def add(self, request: Scoring) -> None:
        message = self._beyond_limits(request.tenant)
        slot = self._slot_for(request.tenant) if message is None else None
        if slot is not None:
            self.jobs.append(ScoringJob(request, slot))
        else:
            self._refuse(request, message or f"all {self._lm.slots} slots of this verifier are taken")

    def _refuse(self, request: Scoring, message: str) -> None:
        if self._sharing is not None:
            self._sharing.shares.count_refused(request.tenant)
        request.reply(Refusal(0, Code.RESOURCE_EXHAUSTED, message, retry_ms=RETRY_MS))

    def _beyond_limits(self, tenant: str) -> str | None:
        """Why its tenant may not have one more text scored; None if it may."""
        if self._sharing is None:
            return None
        limits, own = self._sharing.shares.of(tenant), [each for each in self._sessions.roster if each.tenant == tenant]
        scoring = sum(job.request.tenant == tenant for job in self.jobs)
        for what, count, most in (
            ("sessions", len(own) + scoring, limits.sessions),
            ("slots", sum(not each.waiting for each in own) + scoring, limits.slots),
        ):
            if most is not None and count >= most:
                return f"this tenant has {count} {what}, texts to score among them, of at most {most}"
        return None

    def _slot_for(self, tenant: str) -> int | None:
        """A slot, if need be that of the last text of a tenant with more of them, if it has not begun."""
        lend = self._sessions.slot_queue.lend
        slot = lend()
        if slot is None and self._sharing is not None:
            counts = Counter(job.request.tenant for job in self.jobs)
            other = self._sharing.shares.gives_way(tenant, counts)
            late = (job for job in reversed(self.jobs) if job.request.tenant == other and not job.fed)
            if other is not None and (job := next(late, None)) is not None:
                self._end(job)
                self._refuse(job.request, "its slot was taken for another tenant, which has fewer")
                slot = lend()
        return slot

    # Computing

    def run_chunk(self, job: ScoringJob) -> None:
        """Run one forward of it."""
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

    def _advance(self, job: ScoringJob) -> list[TokenScore] | Refusal | None:
        """The scores once all texts are fed, a refusal, or None where there is more to do."""
        tokens, first = job.text, job.request.from_position
        start = self._lm.cached(job.slot)
        stop = min(start + CHUNK_ROWS, len(tokens) - 1)
        # The row of position p holds the distribution of token p + 1.
        wanted = max(0, stop - max(start, first - 1))
        job.request.fed += stop - start
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

    def _end(self, job: ScoringJob) -> None:
        self.jobs.remove(job)
        self._sessions.slot_queue.slots.give_back(job.slot)
