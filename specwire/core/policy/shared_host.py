"""A drafter on the verifier's host: whether both compute at once, and what the sessions of a batch decide together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from specwire.core.policy.estimates import (
    Contention,
    Estimates,
    Forward,
    ForwardTimes,
    affordable,
    lockstep_rate,
    smoothed,
    stream_rate,
)
from specwire.core.policy.tunables import (
    APART_SHARE,
    AWAITED_VERDICTS,
    DECAY,
    LEAST_ADVANTAGE,
    LEAST_TIMING_US,
    PROBE_EVERY,
    TRIAL_VERDICTS,
)

# ----------------------------------------------------------------------------------------------------------------------
# When what does not pay is tried again: a drafter that is off, and side by side. Pure.


@dataclass(slots=True)
class Tries:
    """When one way of drafting is tried, and what that costs.

    verdicts: since the last try began or, before the first, in all. Each is divided by the sessions that share its
    step, all of which a try delays. left: of the try under way, each divided by the sessions that try together.
    price_us: of the last one. spent_us: on the one under way. first: the one under way is a drafter's first, which
    measures it. It has no price: a drafter may be slow at its start. ended: one did, with the last verdict.
    """

    verdicts: float = 0.0
    left: float = 0.0
    price_us: float = 0.0
    spent_us: float = 0.0
    first: bool = False
    ended: bool = False

    def verdict(self, sessions: int = 1, cost_us: float = 0.0, ends: bool = False, together: int = 1) -> None:
        """Note a verdict. cost_us: by which the try under way delayed its step. ends: it ends with this verdict.

        sessions: of the step. together: of these, with one try. Each of them tells what a step was delayed by, so each
        counts for its part; in the try's last step only the one that ends it is counted.
        """
        self.verdicts += 1.0 / sessions
        under_way = self.left > 0
        if under_way:
            self.left = 0.0 if ends else max(0.0, self.left - 1.0 / together)
            self.spent_us += cost_us if ends else cost_us / together
        self.ended = under_way and not self.left
        if self.ended and self.spent_us and not self.first:
            self.price_us = self.spent_us

    def begins(self, verdict_us: float, most: int = TRIAL_VERDICTS) -> bool:
        """Whether a try of at most so many verdicts begins now. verdict_us: what a verdict takes without."""
        if self.verdicts < PROBE_EVERY or not affordable(self.price_us, self.verdicts * verdict_us):
            return False
        self.verdicts, self.left, self.spent_us, self.first = 0.0, float(most), 0.0, False
        return True

    def rest(self, price_us: float) -> None:
        """Begin to wait for the next try: the last one has cost so much."""
        self.verdicts, self.left, self.price_us = 0.0, 0.0, price_us


# ----------------------------------------------------------------------------------------------------------------------
# What a draft takes that the verifier waits for. Pure; microseconds.


class TimedChunk(NamedTuple):
    """A chunk that took `took_us` to draft.

    ended_us: when it arrived; None: not told. token_us: what one token took; None: not to be learnt from this chunk.
    """

    ended_us: float | None
    took_us: float
    token_us: float | None


class LastDraft:
    """Tells, with the next verdict, whether the verifier was idle while the last chunk was drafted.

    The first chunk of a session or of a probe begins in the middle of a forward, and takes as much longer as the two
    slow each other down. By that time alone a drafter looked too slow to be waited for, and stayed off.

    apart: whether the verifier was idle for the last chunk that a verdict has followed. chunks: that have come.
    """

    def __init__(self) -> None:
        self.apart = True
        self.chunks = 0
        self._chunk: TimedChunk | None = None
        self._ended_us: float | None = None

    def drafted(self, chunk: TimedChunk) -> None:
        """Note a chunk."""
        self._chunk = chunk
        self.chunks += 1

    def verdict(self, forward: Forward | None) -> float | None:
        """What a token took of the last chunk, if one came since the verdict before this one and tells that.

        A chunk whose times are not told counts as apart. A session's first one does not: its drafter has read the
        prompt for it.
        """
        chunk, before_us = self._chunk, self._ended_us
        self._chunk, self._ended_us = None, forward.ended_us if forward is not None else None
        if chunk is None:
            return None
        if forward is None or chunk.ended_us is None:
            self.apart = True
        elif self.chunks == 1 or before_us is None:
            self.apart = False
        else:
            began_us = chunk.ended_us - chunk.took_us
            overlap_us = max(0.0, before_us - began_us) + max(0.0, chunk.ended_us - forward.began_us)
            self.apart = overlap_us <= APART_SHARE * chunk.took_us
        return chunk.token_us


# ----------------------------------------------------------------------------------------------------------------------
# Whether drafter and verifier, on one host, should compute at once instead of taking turns. Pure; microseconds.
#
# Side by side hides the drafting behind the forwards, and stretches both by what they take from each other. That is
# measured (`specwire.core.policy.estimates`); where nothing is measured they take turns. Side by side is chosen by its
# expected rate. Because an expectation leaves something out, what both ways really brought is compared, too.


class Beside(NamedTuple):
    """Draft side by side; a token then takes `draft_us`."""

    draft_us: float
    reason: str


@dataclass(slots=True)
class _Brought:
    """Tokens that verdicts brought, and the time that passed until they came; decayed sums. verdicts: counted."""

    tokens: float = 0.0
    time_us: float = 0.0
    verdicts: int = 0

    def add(self, tokens: int, time_us: float) -> None:
        self.tokens = DECAY * self.tokens + tokens
        self.time_us = DECAY * self.time_us + time_us
        self.verdicts += 1

    def less_than(self, other: _Brought) -> bool:
        """Whether it was slower than the other; False while too little was seen."""
        seen = min(self.verdicts, other.verdicts) >= TRIAL_VERDICTS
        return seen and self.lost_us(other) > 0.0

    def lost_us(self, other: _Brought) -> float:
        """How much longer it took than the other would have for the same tokens; 0 where it was shorter."""
        return max(0.0, self.time_us - self.tokens * other.time_us / other.tokens) if other.tokens else 0.0


class SideBySide:
    """What one verifier and one drafter on its host cost each other; successive sessions share it.

    `active`: they compute side by side now.

    Args:
        forward: V(m) of the verifier.
        waits: it can take turns with the drafter. For one that cannot, plain decoding is what side by side replaces.
    """

    def __init__(self, forward: ForwardTimes, waits: bool = True) -> None:
        self.contention = Contention(forward)
        self.active = False
        self._waits = waits
        self._draft_us: float | None = None
        self._tries = Tries()
        self._brought_beside, self._brought_in_turns = _Brought(), _Brought()
        self._last_us: float | None = None
        self._alone = True

    def begin(self) -> None:
        """Begin another session: nothing is known of the time before its first verdict."""
        self._last_us = None

    def drafted(self, token_us: float) -> None:
        """Note how long a token took to draft while they were side by side."""
        self._draft_us = smoothed(self._draft_us, token_us)

    def verdict(self, tokens: int, forward: Forward | None) -> None:
        """Note a verdict of `tokens`. forward: None where it is not known."""
        if forward is not None and forward.sessions > 1:
            forward = None
        self._tries.verdict()
        ended_us = forward.ended_us if forward is not None else None
        self._alone = forward is not None
        if forward is not None:
            self.contention.forward(forward)
        if ended_us is not None and self._last_us is not None:
            brought = self._brought_beside if self.active else self._brought_in_turns
            brought.add(tokens, ended_us - self._last_us)
        self._last_us = ended_us

    def choose(self, rates: Sequence[float], agreement: float, draft_us: float, overhead_us: float) -> Beside | None:
        """How to draft side by side, or None: take turns.

        Args:
            rates, agreement: see `specwire.core.policy.estimates.stream_rate`.
            draft_us: a token's drafting while the verifier is idle.
            overhead_us: from a verdict to the proposal that answers it, without drafting.
        """
        chosen = self._choose(rates, agreement, draft_us, overhead_us)
        if self.active and chosen is None:
            self._tries.rest(self._brought_beside.lost_us(self._brought_in_turns))
        self.active = chosen is not None
        return chosen

    def _choose(self, rates: Sequence[float], agreement: float, draft_us: float, overhead_us: float) -> Beside | None:
        apart = self.contention.apart()
        if apart is None:
            return None  # the times of forwards are not told, or too few yet
        if not self._alone:
            return None  # in a batch the drafter would draft for all, of which one session's gain says nothing
        slowdown, together = self.contention.slowdown, self.contention.together()
        if self._tries.left and slowdown is None:
            return Beside(draft_us, "trying side by side")
        turns = _turns(rates if self._waits else (), draft_us, overhead_us, apart)
        if slowdown is not None and together is not None and not self._brought_beside.less_than(self._brought_in_turns):
            beside_us = self._draft_us or slowdown * draft_us
            speed = _beside(rates, agreement, beside_us, overhead_us, together)
            if speed > (1.0 if self.active else LEAST_ADVANTAGE) * turns:
                return Beside(beside_us, f"side by side, contention {slowdown:.2f}, gain {speed * apart.at(1):.2f}")
        at_best = _beside(rates, agreement, draft_us, overhead_us, apart)
        if at_best <= LEAST_ADVANTAGE * turns or not self._tries.begins(apart.at(1)):
            return None
        self._brought_beside = _Brought()
        return Beside(draft_us, "trying side by side")


def _turns(rates: Sequence[float], draft_us: float, overhead_us: float, forward: ForwardTimes) -> float:
    """The best rate of taking turns, plain decoding included; without rates of that alone."""
    windows = range(len(rates) + 1)
    return max(lockstep_rate(rates, window, draft_us, forward, overhead_us) for window in windows)


def _beside(
    rates: Sequence[float], agreement: float, draft_us: float, overhead_us: float, forward: ForwardTimes
) -> float:
    """A verdict finds the drafter in the middle of a token."""
    return stream_rate(rates, agreement, draft_us, forward, overhead_us + draft_us / 2, 1)


# ----------------------------------------------------------------------------------------------------------------------
# What the sessions of a batch decide together. Pure; microseconds.


@dataclass(slots=True)
class InTurns:
    """What the sessions of a verifier and of a drafter on its host know and decide together, where they share steps.

    All of a batch wait for whoever is waited for, and the drafter drafts for all of them in one pass. A drafter that
    pays for all may so pay for none alone: sessions that decided one by one did not begin, or stopped by the chance of
    their own texts while the others still waited. So all draft the same window, or none. What a step's sessions tell
    counts together as much as what one session alone tells: else the first few guesses of a crowd turned all off.

    Those of other tenants and of other orchestrators share the steps, but decide apart.

    known: acceptance and times, of all these sessions. probes: of a drafter that is off. window: of each session of a
    batch; 0: it is off. ignored: answers in a row that were in time and not tested. changes: how often the window
    changed, and a probe began or ended, so that all plan again at once. others_us: for which a verifier waits for other
    drafters. sessions: of these, in the last step. ended_us, heard: when the step under way ended, and its verdicts.
    """

    known: Estimates
    probes: Tries = field(default_factory=Tries)
    window: int = 0
    ignored: float = 0.0
    changes: int = 0
    others_us: float = 0.0
    sessions: int = 1
    ended_us: float | None = None
    heard: int = 0

    def begin(self) -> None:
        """Begin a session that is alone. Its verifier keeps a new ledger for it, and its drafter reads a prompt first.

        So a probe ends, but a first try that has not seen a draft apart yet begins anew.
        """
        self.ignored = 0.0
        anew = self.probes.first and not self.known.drafted_apart
        self.probes.left = float(AWAITED_VERDICTS) if anew else 0.0

    def verdict(self, forward: Forward | None) -> None:
        """Note a verdict. forward: of its step; None: the step is not known, and counts as one of its own.

        Of the first step all sessions are taken for these.
        """
        ended_us = forward.ended_us if forward is not None else None
        if ended_us is None or ended_us != self.ended_us:
            first = forward.sessions if forward is not None else 1
            self.sessions, self.heard, self.ended_us = self.heard or first, 0, ended_us
        self.heard += 1

    def waited(self, waited_us: float, heard: bool) -> None:
        """Note a step's wait. heard: for an answer to this session, it may be.

        While these sessions' own drafter is waited for nobody can tell what others' take: it fades, so that a batch
        does not draft for ever for others that have gone.
        """
        if heard or self.window:
            self.others_us *= DECAY ** (1.0 / self.sessions)
            return
        self.others_us = smoothed(self.others_us, waited_us, least=LEAST_TIMING_US)

    def decide(self, window: int) -> None:
        """Have each session of a batch draft so many tokens from now on."""
        if window != self.window:
            self.window = window
            self.changes += 1
