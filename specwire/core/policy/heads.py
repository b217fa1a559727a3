"""How deep a head drafts for the next step: as deep as is expected to pay, or not at all. Pure; microseconds."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from math import inf
from operator import mul

from specwire.core.messages import PROBE_WINDOW
from specwire.core.policy.estimates import (
    AcceptanceByConfidence,
    AcceptanceByPosition,
    ForwardTimes,
    affordable,
    smoothed,
)
from specwire.core.policy.tunables import (
    LEAST_BEHIND,
    LEAST_GAIN,
    LET_BE,
    MOST_HEAD_DEPTH,
    READ_FOR,
    RISKED_SHARE,
    STEP_OUTLIER,
    STEP_WEIGHT,
)

# Steps without a draft behind which features are no longer kept, at the latest: where drafting does not pay, when a try
# had time to wait for its features; else later, because a head that begins anew has lost the text before.
IDLE_UNPAID, IDLE_PAID = LEAST_BEHIND + LET_BE, 4 * LET_BE


@dataclass(frozen=True, slots=True)
class LearntHead:
    """What all sessions together learnt of a head: how often its tokens are accepted."""

    by_position: AcceptanceByPosition = field(default_factory=AcceptanceByPosition)
    by_confidence: AcceptanceByConfidence = field(default_factory=AcceptanceByConfidence)


class HeadAcceptance:
    """Of texts that are drawn by noise apart from greedy ones."""

    def __init__(self) -> None:
        self._greedy, self._drawn = LearntHead(), LearntHead()

    def of(self, temperature: float) -> LearntHead:
        return self._drawn if temperature > 0.0 else self._greedy


class HeadDepth:
    """Depths are chosen by V(m), by the acceptance of each session's positions, and by what the head's forwards take.

    Args:
        forward_us: of a forward of the head for so many sessions, measured at start; refined here.
        most: tokens that the head can draft in a row, or that are ever asked of one.
        row_us: of a position of a text that is read; refined here.
        first_us: as forward_us, of the first forward of a draft, with what is done once; None: no longer than others.
        tapped_us: by which a step of so many sessions is longer where its features are kept; None: by nothing.

    pays: whether it did when it was last asked, or nobody asked yet. pace: how slow the machine is now, as its steps
    tell (`ForwardTimes.pace`): with it all of this takes longer.
    """

    def __init__(
        self,
        forward_us: Mapping[int, float],
        most: int = MOST_HEAD_DEPTH,
        row_us: float = 0.0,
        first_us: Mapping[int, float] | None = None,
        tapped_us: Mapping[int, float] | None = None,
    ) -> None:
        self.most = most
        self.pays = True
        self.pace = 1.0
        self._long = False
        self._forward = ForwardTimes(forward_us)
        self._first = ForwardTimes(forward_us if first_us is None else first_us)
        self._tapped = ForwardTimes({1: 0.0} if tapped_us is None else tapped_us)
        self._scale = 1.0
        self._drafted_us = self._tried_us = 0.0
        self._row_us = row_us
        # Share of plain steps' time that drafting was last expected to save, and the tokens in a microsecond with it.
        self._saved = self._rate = 0.0

    def drafting_us(self, sessions: int, depth: int) -> float:
        """What so many forwards are expected to take."""
        return self.pace * self._scale * self._measured_us(sessions, depth)

    def tapped_us(self, decoding: int) -> float:
        """What a step of so many sessions takes longer for its features."""
        return self.pace * self._tapped.at(decoding)

    def _measured_us(self, sessions: int, depth: int) -> float:
        return self._first.at(sessions) + (depth - 1) * self._forward.at(sessions)

    def charged_us(self, sessions: int, forwards: int, took_us: float, rows: int = 0) -> float:
        """What so many forwards, which also read so many rows, are charged with: what they are expected to take.

        A hiccup of the machine is not the head's doing: one of 50 ms, charged as it is, left a session without a head
        for a thousand tokens. But two long drafts in a row are none.
        """
        expected_us = self.drafting_us(sessions, forwards) + self.pace * rows * self._row_us
        before, self._long = self._long, took_us > STEP_OUTLIER * expected_us
        return took_us if before and self._long else expected_us

    def observe(self, sessions: int, forwards: int, took_us: float, now_us: float, rows: int = 0) -> None:
        """The head has drafted for so many sessions, as deep as it ran forwards.

        rows: that it read beside, of steps in which it drafted nothing. Were their time taken for the drafts', a head
        that rested for a while would seem too slow ever after.
        """
        if forwards:
            expected_us = self.pace * (self._measured_us(sessions, forwards) + rows * self._row_us)
            self._scale = smoothed(self._scale, took_us / expected_us, STEP_WEIGHT)
        self._drafted_us = now_us

    def due(self, now_us: float) -> bool:
        """Whether drafting may be tried although it does not pay.

        A try is for all sessions whose texts are known. It is expected to take as long as the last one took, and at
        least as long as a draft for one session.
        """
        cost_us = max(self.drafting_us(1, min(PROBE_WINDOW, self.most)), self._tried_us)
        return affordable(cost_us, now_us - self._drafted_us)

    def tried(self, took_us: float, begins: bool) -> None:
        """It took so long, with all that had to be read and kept before. begins: else the same try goes on."""
        self._tried_us = took_us if begins else self._tried_us + took_us

    def choose(self, rates: Sequence[Sequence[float]], decoding: int, V: Callable[[int], float]) -> int:
        """The depth for a step of `decoding` sessions, for some of which the head may draft; 0 for none.

        rates: of each of these, P(accept | tested) by position. V: of steps whose features nobody keeps.
        """
        sessions, tapped_us = len(rates), self.tapped_us(decoding)
        decided = [list(accumulate(each[: self.most], mul)) for each in rates]
        tokens = float(decoding)
        best, best_rate = 0, LEAST_GAIN * decoding / V(decoding)
        for depth in range(1, self.most + 1):
            tokens += sum(each[depth - 1] for each in decided)
            rate = tokens / (V(decoding + depth * sessions) + tapped_us + self.drafting_us(sessions, depth))
            if rate > best_rate:
                best, best_rate = depth, rate
        self.pays, self._rate = best > 0, best_rate
        self._saved = 1.0 - decoding / V(decoding) / best_rate if best else 0.0
        return best

    def further_us(self, sessions: int) -> float:
        """What one forward more is expected to take."""
        return self.pace * self._scale * self._forward.at(sessions)

    def deepening(
        self,
        rates: Sequence[Sequence[float]],
        known: Sequence[AcceptanceByConfidence],
        decoding: int,
        V: Callable[[int], float],
    ) -> Deepening:
        """Of a draft at the depth that was chosen last. known: of each text. For the rest see `choose`."""
        return Deepening(rates, known, decoding, V, self.further_us(len(rates)), self._rate if self.pays else 0.0)

    def least_us(self, decoding: int, V: Callable[[int], float]) -> float:
        """About the least that a session is charged for one draft token and its test: alone, or together with all."""
        alone_us = (self.drafting_us(1, 1) + V(decoding + 1) - V(decoding)) * decoding
        return max(0.0, min(alone_us, self.drafting_us(decoding, 1) + V(2 * decoding) - V(decoding)))

    def parts_us(self, drafted: Sequence[int]) -> list[float]:
        """What a draft is expected to take of each text's time, by how many tokens are drafted for it.

        A forward is shared by those for which it drafts; the first one, which reads, by all.
        """
        parts = [0.0] * len(drafted)
        for depth in range(max(1, *drafted)):
            live = [at for at, tokens in enumerate(drafted) if tokens > depth or depth == 0]
            took_us = self.pace * self._scale * (self._forward if depth else self._first).at(len(live))
            for at in live:
                parts[at] += took_us / len(live)
        return parts

    def parts(self, drafted: Sequence[int]) -> list[float]:
        """Each text's part of a draft's time; they add up to 1."""
        each_us = self.parts_us(drafted)
        return [part_us / sum(each_us) for part_us in each_us]

    def reading_us(self, rows: int) -> float:
        """What so many positions of a text are expected to take, in a forward of their own."""
        return self.drafting_us(1, 1) + self.pace * rows * self._row_us

    def readable(self, time_us: float) -> float:
        """How many positions are expected to be read in so long; inf where only the forward takes time."""
        left_us = time_us - self.drafting_us(1, 1)
        if left_us <= 0.0:
            return 0.0
        return left_us // (self.pace * self._row_us) if self._row_us > 0.0 else inf

    def worth_reading(self, rows: int, sessions: int, step_us: float) -> bool:
        """Whether the head should read so many positions of a text, of `sessions` that it drafts for in a step.

        That must take no longer than is gained on READ_FOR further tokens.
        """
        return self.reading_us(rows) * sessions <= READ_FOR * step_us * self._saved

    def read(self, rows: int, took_us: float) -> None:
        """It has read so many positions of texts."""
        further_us = max(0.0, took_us - self.drafting_us(1, 1))
        self._row_us = smoothed(self._row_us or None, further_us / rows / self.pace)

    def beats(self, guessed: Sequence[float], rates: Sequence[float], decoding: int, V: Callable[[int], float]) -> bool:
        """Whether at some depth more tokens are decided in a step's time than with a guess that is there already.

        guessed: P(accept | tested) of the guess's tokens, of which the best window counts; without any, a plain step.
        rates: of the head's positions. decoding: sessions of the step. The others decide one token each, and share the
        head's forwards.
        """
        others, tokens, promised = decoding - 1, 1.0, 1.0
        least_rate = decoding / V(decoding)
        for window, product in enumerate(accumulate(guessed, mul), 1):
            promised += product
            least_rate = max(least_rate, (others + promised) / V(decoding + window))
        for depth, product in enumerate(accumulate(rates, mul), 1):
            tokens += product
            time_us = V(decoding + depth) + self.drafting_us(decoding, depth) / decoding
            if others + tokens > least_rate * time_us:
                return True
        return False

    def borne(self, depth: int, sessions: int, decoding: int, V: Callable[[int], float], spare_us: float) -> int:
        """The greatest depth up to `depth` that a session's ledger can bear if all of it is wrong, the window as well.

        More than one token may risk only RISKED_SHARE of what is left, or a bad beginning would use it up at once. The
        session is one of `sessions` that are drafted for; all `decoding` ones wait for the drafts.
        """
        for borne in range(depth, 0, -1):
            window_us = V(decoding + borne * sessions) - V(decoding)
            risked_us = (self.drafting_us(sessions, borne) + window_us) * decoding / sessions
            if risked_us <= (spare_us if borne == 1 else RISKED_SHARE * spare_us):
                return borne
        return 0

    def gains(
        self, rates: Sequence[float], depth: int, sessions: int, decoding: int, V: Callable[[int], float]
    ) -> bool:
        """Whether so deep a draft pays, for `sessions` like the one that has these `rates`."""
        tokens: float = decoding + sessions * sum(accumulate(rates[:depth], mul))
        time_us = V(decoding + depth * sessions) + self.tapped_us(decoding) + self.drafting_us(sessions, depth)
        least_rate = LEAST_GAIN * decoding / V(decoding)
        return tokens > least_rate * time_us


@dataclass(slots=True)
class FeatureRetention:
    """How long features are kept while nothing is drafted that pays, and when they are kept again.

    Where drafting was thought of in vain they are kept until it is thought of again; or no longer at all where they
    were kept in vain the last time, too. In the middle of a text the head needs some before it can draft. So there they
    are kept again only when what they took in vain is at most EXPLORED_SHARE of the time since, or when half of the
    batch has gone, by which all was weighed.

    steps, thoughts: since the head was last used, and how often it was thought of in vain. spent_us: what features took
    of these steps. paid: it drafted because that pays, since they are kept. in_vain: the last time it did not. untried:
    nor could any text bear the try that was due then. lost_us, dropped_us, sessions: what they took in vain, until
    when, and how large the batch was then.
    """

    steps: int = 0
    thoughts: int = 0
    spent_us: float = 0.0
    paid: bool = False
    in_vain: bool = False
    untried: bool = False
    lost_us: float = 0.0
    dropped_us: float = -inf
    sessions: int = 0

    def read(self) -> None:
        """The head read texts, and may draft behind them."""
        self.steps = self.thoughts = 0

    def drafted(self, pays: bool) -> None:
        """The head drafted. pays: not for a try."""
        self.read()
        self.spent_us, self.untried = 0.0, False
        if pays:
            self.paid, self.in_vain = True, False

    def begins(self) -> None:
        """Features are kept from now on."""
        self.read()
        self.spent_us, self.paid = 0.0, False

    def over(self, pays: bool) -> bool:
        """Whether they are kept no longer. pays: drafting, when it was last thought of."""
        if pays:
            return self.steps > IDLE_PAID
        return self.thoughts > (0 if self.in_vain else 1) or self.steps > IDLE_UNPAID

    def dropped(self, sessions: int, now_us: float, due: bool) -> None:
        """They are kept no longer, in a batch of so many sessions. due: a try was."""
        self.lost_us, self.dropped_us = 0.0 if self.paid else self.spent_us, now_us
        self.sessions, self.in_vain, self.untried = sessions, not self.paid, due

    def again(self, sessions: int, now_us: float) -> bool:
        """Whether they may be kept again, in the middle of texts."""
        return 2 * sessions <= self.sessions or affordable(self.lost_us, now_us - self.dropped_us)


class Deepening:
    """Ends a draft where no further forward is expected to pay, by how sure the head is of what it has drafted.

    The tokens that some number of further forwards are expected to decide must be worth their time, and that of the
    rows that test them, at the rate that the step was expected to have. So where a head's probabilities tell nothing,
    a draft is as deep as it was chosen; a try is, too.

    Args:
        rates, known: of each text, P(accept | tested) by position, and by how sure the head is.
        forward_us: of a further forward. rate: tokens in a microsecond; 0.0 for a try.

    sure: what was told of each text's tokens.
    """

    def __init__(
        self,
        rates: Sequence[Sequence[float]],
        known: Sequence[AcceptanceByConfidence],
        decoding: int,
        V: Callable[[int], float],
        forward_us: float,
        rate: float,
    ) -> None:
        self.sure: list[list[float]] = [[] for _ in rates]
        self._rates, self._known = rates, known
        self._decoding, self._V = decoding, V
        self._forward_us, self._rate = forward_us, rate
        # P(all that was drafted is accepted).
        self._whole = [1.0] * len(rates)

    def goes_on(self, live: Sequence[int], sure: Sequence[float]) -> bool:
        """See `GoOn`."""
        telling = False
        for at, each in zip(live, sure, strict=True):
            drafted, known = self.sure[at], self._known[at]
            telling = telling or known.trusted
            self._whole[at] *= known.chance(each) if known.trusted else self._rates[at][len(drafted)]
            drafted.append(each)
        return not telling or self._pays(live)

    def _pays(self, live: Sequence[int]) -> bool:
        rows, rate = self._decoding + sum(map(len, self.sure)), self._rate
        now_us = self._V(rows)
        least = rate * (self._V(rows + len(live)) - now_us) / len(live)
        ahead = [(self._whole[at], self._rates[at][len(self.sure[at]) :]) for at in live]
        # Of other texts no further token would be tested.
        worth = [(whole, rates) for whole, rates in ahead if rates and whole * rates[0] > least]
        tokens, reached = 0.0, [whole for whole, _ in worth]
        for more in range(1, max((len(rates) for _, rates in worth), default=0) + 1):
            reached = [
                whole * rates[more - 1] if more <= len(rates) else 0.0
                for whole, (_, rates) in zip(reached, worth, strict=True)
            ]
            tokens += sum(reached)
            if tokens >= rate * (self._V(rows + more * len(worth)) - now_us + more * self._forward_us):
                return True
        return False
