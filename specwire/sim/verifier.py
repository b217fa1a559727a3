"""A verifier under a virtual clock: the real engine, whose target takes the time that a forward is said to take.

Planning takes no time here, so what a step decides is told at its end.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import count
from typing import Any

from specwire.core.draft import DraftingModel, HeadRequest
from specwire.core.law.acceptance import RowChoice
from specwire.core.law.sampling import TokenScore
from specwire.core.messages import MOST_WINDOW, SourceKind, TokenLogprobs
from specwire.core.model import Feed, ModelInfo
from specwire.core.policy.costs import StepCosts
from specwire.core.policy.estimates import ForwardTimes
from specwire.core.policy.heads import HeadDepth
from specwire.core.policy.tunables import LEAST_BEHIND, MOST_HEAD_DEPTH
from specwire.core.policy.windows import Share, StepCandidate, StepPlan
from specwire.sim.clock import Clock, Machine
from specwire.sim.guesses import VOCABULARY
from specwire.telemetry.tally import DraftCounts
from verify_service.engine.batch import Part
from verify_service.engine.engine import Engine, Rest, UnderWay
from verify_service.engine.heads import HeadDrafting
from verify_service.engine.messages import Opening, Report, Reports, Tick

# Widths at which V(m) is known at start; a linear V is known everywhere.
WIDTHS = (1, 2, 4, 8, 16, 32)
BATCHES, DEPTHS = (4, 16), (1, 4)
CONTEXT = 1 << 24
# Sessions of one verifier, unless said otherwise.
SLOTS = 64
# What a head drafts for a session: so many tokens from a position on.
HeadSays = Callable[[int, int], list[int]]


@dataclass(frozen=True, slots=True)
class ForwardCost:
    """Time of a forward: V(1)(1 + slope * draft tokens + session_slope * further sessions), and of prompts beside it.

    V_us: V(1), microseconds. slope: share of it per draft token tested. session_slope: share of it per further session
    of the batch. prefill_us: microseconds per prompt token. steps: instead of both slopes, V(m) / V(1) of the first
    rows; of further ones it grows as between the first and the last of these.
    """

    V_us: float
    slope: float
    session_slope: float
    prefill_us: float = 0.0
    steps: Sequence[float] = ()

    def at(self, sessions: int, drafted: int, prefill: int = 0) -> float:
        further = self.session_slope * max(0, sessions - 1) + self.slope * drafted
        if self.steps:
            further = self._stepped(max(1, sessions) + drafted)
        return self.V_us * (1.0 + further) + self.prefill_us * prefill

    def _stepped(self, rows: int) -> float:
        known, last = len(self.steps), self.steps[-1]
        if rows <= known:
            return self.steps[rows - 1] - 1.0
        return last - 1.0 + (rows - known) * (last - 1.0) / max(1, known - 1)

    def of(self, feeds: Sequence[Feed]) -> float:
        drafted = sum(max(0, feed.wanted - 1) for feed in feeds)
        prefill = sum(len(feed.tokens) - max(1, feed.wanted) for feed in feeds)
        return self.at(len(feeds), drafted, prefill)

    def measured(self) -> ForwardTimes:
        """V(m) of one session, as a verifier measures it at start."""
        return ForwardTimes({rows: self.at(1, rows - 1) for rows in WIDTHS})

    def batches(self) -> dict[tuple[int, int], float]:
        """Likewise of several, by (sessions, positions of each)."""
        return {
            (sessions, depth): self.at(sessions, sessions * (depth - 1)) for sessions in BATCHES for depth in DEPTHS
        }


class SimModel:
    """A `SlotModel` that computes nothing: its slots are integers. spent_us: what its last forward takes.

    branches: it takes feeds that branch.
    """

    failed: frozenset[int] = frozenset()
    kv_bytes = state_bytes = 0
    most_window = MOST_WINDOW

    def __init__(self, slots: int, cost: Callable[[Sequence[Feed]], float], branches: bool = False) -> None:
        self.info = ModelInfo("simulated", "Simulated", VOCABULARY, CONTEXT, (), "float32", "cpu", "", "", "simulated")
        self.spent_us = 0.0
        self.branches = branches
        self._cost = cost
        self._cached = [0] * slots

    @property
    def slots(self) -> int:
        return len(self._cached)

    def cached(self, slot: int) -> int:
        return self._cached[slot]

    def rollback(self, slot: int, length: int) -> None:
        if length > self._cached[slot]:
            raise ValueError(f"rollback: slot {slot} holds {self._cached[slot]}, not {length}")
        self._cached[slot] = length

    def keep(self, slot: int, start: int, rows: Sequence[int]) -> None:
        if list(rows) != sorted(set(rows)) or not all(start <= row < self._cached[slot] for row in rows):
            raise ValueError(f"keep: slot {slot} holds {self._cached[slot]}, not {list(rows)} from {start}")
        self._cached[slot] = start + len(rows)

    def discard(self, slot: int) -> None:
        self._cached[slot] = 0

    def copy(self, source: int, target: int, length: int) -> None:
        self._cached[target] = length

    def forward(self, feeds: Sequence[Feed]) -> None:
        """Without rows: who reads them knows what they say."""
        for feed in feeds:
            if feed.start > self._cached[feed.slot]:
                raise ValueError(f"feed: slot {feed.slot} holds {self._cached[feed.slot]}, not {feed.start}")
            self._cached[feed.slot] = feed.stop
        self.spent_us = self._cost(feeds)


class SimTexts:
    """A `RowSampler` to which the target says what `texts` say, by session and position."""

    def __init__(self) -> None:
        self.texts: dict[str, Callable[[int], int]] = {}

    def choose(self, _: object, parts: Sequence[Part], heard: Callable[[Part], bool]) -> list[RowChoice]:
        return [self._choice(part) for part in parts]

    def _choice(self, part: Part) -> RowChoice:
        position, target = part.held.session.position, self.texts[part.held.session_id]
        return RowChoice([target(position + index) for index in range(part.wanted)])

    def score(self, _: object, tokens: Sequence[int], __: int) -> list[TokenScore]:
        return [TokenScore(TokenLogprobs(0.0), 1)] * len(tokens)


class SimHead(DraftingModel):
    """A head beside the target, which computes nothing, and reads in no time.

    Args:
        forward_us: of each of its forwards, for however many sessions; `drafted_us` is what its last draft took.
        tapped_us: by which a forward of the target is longer where features are kept for the head.
        most: tokens that it can draft in a row.
        says: so many tokens behind a request's text.
    """

    def __init__(
        self,
        forward_us: float,
        tapped_us: float,
        most: int,
        says: Callable[[HeadRequest, int], list[int]],
        clock: Clock,
    ) -> None:
        self.depth = HeadDepth({1: forward_us}, min(most, MOST_HEAD_DEPTH), tapped_us={1: tapped_us})
        self.drafted_us = 0.0
        self._forward_us, self._tapped_us = forward_us, tapped_us
        self._says, self._clock = says, clock
        self._heeded: frozenset[int] | None = None
        # Of slots whose features are kept: from which position on, and up to which.
        self._known: dict[int, tuple[int, int]] = {}

    def forward_us(self, feeds: Sequence[Feed]) -> float:
        """What a forward of the target takes longer for features."""
        tapped_us = 0.0
        for feed in feeds:
            if self._heeded is None or feed.slot in self._heeded:
                origin, _ = self._known.get(feed.slot, (feed.start, 0))
                self._known[feed.slot] = (origin if feed.start else 0, feed.stop)
                tapped_us = self._tapped_us
            else:
                self._known.pop(feed.slot, None)
        return tapped_us

    def unread(self, slot: int) -> int | None:
        origin, stop = self._known.get(slot, (1, 1))
        return 1 if origin == 0 or stop - origin >= LEAST_BEHIND else None

    def heed(self, slots: Collection[int] | None) -> None:
        self._heeded = None if slots is None else frozenset(slots)

    def skip(self, slot: int, left: int) -> None:
        """It reads in no time: there is nothing to leave out."""

    def catch_up(self, requests: Sequence[HeadRequest]) -> None:
        """It reads in no time."""

    def stop(self) -> None:
        self._heeded = frozenset()

    def draft(self, requests: Sequence[HeadRequest]) -> list[list[int]]:
        depths = [min(request.depth, self.depth.most) for request in requests]
        self.drafted_us += self._clock.computed_us(self._forward_us * max(depths))
        return [self._says(request, depth) for request, depth in zip(requests, depths, strict=True)]


def by_thumb(candidates: Sequence[StepCandidate], *_: object) -> StepPlan:
    """Test all of each guess, whatever it costs; a stand-in for `schedule`."""
    shares: list[Share] = []
    for each in candidates:
        if each.uncached == 1 and each.guess is not None:
            width = min(MOST_WINDOW, len(each.guess.tokens), each.room - 1)
            shares.append(Share(each.slot, 1, width, True, each.guess.kind))
        else:
            shares.append(Share(each.slot, each.uncached, 0, True))
    return StepPlan(tuple(shares))


class SteppedEngine(Engine):
    """The real engine, except that its forward ends when it is told to. under_way: the present forward."""

    under_way: UnderWay | None = None
    _resting: tuple[Rest, float] | None = None

    def _forward(self, parts: Sequence[Part]) -> None:
        self.under_way = self.begin(parts)

    @property
    def computing(self) -> bool:
        return self.under_way is not None

    def turn(self, now_us: float, ended_us: float) -> Rest | None:
        """What its thread does between two waits: end the forward, whose computing ended at `ended_us`, and step.

        Returns how long there is nothing to do; None where a forward is under way, or the engine has stopped.
        """
        under_way, self.under_way = self.under_way, None
        if under_way is not None:
            self.end(under_way, ended_us)
        else:
            rest, since_us = self._resting or (Rest(now_us), self._pauses.forward_ended_us)
            self.rested(rest, now_us - since_us)
        rest_now: Rest | None = None
        while rest_now is None and not self.computing and not self.stopped:
            rest_now = self.step()
        # A head may have drafted meanwhile, by the engine's own clock.
        self._resting = (rest_now, self._now_us()) if rest_now is not None else None
        return rest_now


class SimVerifier:
    """What the engine's thread does, as actions of a clock. Commands may come at any time.

    Args:
        step_us: software between a forward and its verdicts.
        patient: see `verify_service.engine.batch.patiently`.
        head_us, head_most: of a head beside the target: a forward, and how many tokens it can draft; 0 for none.
        tapped_us: what a forward of the target takes longer where features are kept for it.
    """

    def __init__(
        self,
        clock: Clock,
        machine: Machine,
        cost: ForwardCost,
        step_us: float = 0.0,
        patient: bool = False,
        slots: int = SLOTS,
        head_us: float = 0.0,
        head_most: int = 0,
        tapped_us: float = 0.0,
    ) -> None:
        self._cost = cost
        self.model = SimModel(slots, self._forward_us)
        self._clock = clock
        self._texts = SimTexts()
        self._head = SimHead(head_us, tapped_us, head_most, self._says, clock) if head_most else None
        self._headed: dict[str, HeadSays] = {}
        costs = StepCosts(cost.measured(), cost.batches())
        self.engine = SteppedEngine(
            self.model,
            self._texts,
            costs,
            self._deliver,
            self._now_us,
            patient,
            detach_grace_us=0.0,
            drafting=None if self._head is None else HeadDrafting(self._head, self._head.depth),
        )
        self._machine = machine
        self._step_us = step_us
        self._links: dict[int, Callable[[Report], None]] = {}
        self._numbers = count()
        self._turn = 0
        self._woken = False
        self._busy_until_us = 0.0

    def _forward_us(self, feeds: Sequence[Feed]) -> float:
        return self._cost.of(feeds) + (0.0 if self._head is None else self._head.forward_us(feeds))

    def _now_us(self) -> float:
        """As its thread sees it, which a head keeps busy between two actions of the clock."""
        return self._clock.now_us + (0.0 if self._head is None else self._head.drafted_us)

    @property
    def drafts(self) -> DraftCounts:
        """What became of drafters' tokens and of guesses from the text, those that arrived during forwards included."""
        return self.engine.tally.drafted

    @property
    def decided(self) -> int:
        """Tokens."""
        return sum(self.engine.tally.outcomes.values())

    def link(self, hear: Callable[[Report], None]) -> int:
        """A connection, by number; `hear` is told what is said on it."""
        number = next(self._numbers)
        self._links[number] = hear
        return number

    @property
    def headed(self) -> DraftCounts:
        """What became of a head's tokens, of these."""
        return self.engine.tally.drafts[SourceKind.HEAD]

    def open(self, link: int, opening: Opening, target: Callable[[int], int], head: HeadSays | None = None) -> None:
        """target: what the session's text says at a position. head: what the head drafts from one on, and how deep."""
        self._texts.texts[opening.session_id] = target
        if head is not None:
            self._headed[opening.session_id] = head
        self.send(link, opens=(opening,))

    def send(self, link: int, **parts: Any) -> None:
        """A message arrives; parts: see Tick. Those of one instant are taken in together."""
        self.engine.inbox.put(Tick(link, self._clock.now_us, **parts))
        if not self.engine.computing and not self._woken:
            self._woken = True
            self._clock.after(0.0, self._wake)

    def _deliver(self, reports: Reports) -> None:
        for link, report in reports.items():
            self._links[link](report)

    def _says(self, request: HeadRequest, depth: int) -> list[int]:
        session_id = next(held.session_id for held in self.engine.roster if held.slot == request.slot)
        return self._headed[session_id](len(request.tokens), depth)

    # Steps

    def _wake(self) -> None:
        if self._clock.now_us < self._busy_until_us:
            self._clock.after(self._busy_until_us - self._clock.now_us, self._wake)
            return
        self._woken = False
        if not self.engine.computing:
            self._go_on(self._clock.now_us)

    def _alarm(self, turn: int) -> None:
        if turn == self._turn and not self._woken:
            self._go_on(self._clock.now_us)

    def _go_on(self, ended_us: float) -> None:
        now_us = self._clock.now_us
        if self._head is not None:
            self._head.drafted_us = 0.0
        rest = self.engine.turn(now_us, ended_us)
        drafted_us = self._now_us() - now_us
        self._turn += 1
        if rest is None:
            self._machine.use(drafted_us + self.model.spent_us, self._computed)
            return
        self._busy_until_us = now_us + drafted_us
        if rest.until_us < math.inf:
            self._clock.after(max(drafted_us, rest.until_us - now_us), partial(self._alarm, self._turn))

    def _computed(self) -> None:
        decide = partial(self._go_on, self._clock.now_us)
        if self._step_us:
            self._clock.after(self._step_us, decide)
        else:
            decide()
