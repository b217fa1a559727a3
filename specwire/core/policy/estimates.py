"""Expected speeds, and what they are computed from: forward times, acceptance, agreement, draft times."""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import ceil, exp, log, prod
from statistics import median
from typing import Any, NamedTuple, Protocol

from specwire.core.messages import ProposedChunk
from specwire.core.policy.tunables import (
    AGREEMENT_DECAY,
    APART_SHARE,
    CALIBRATED,
    DECAY,
    DOUBTED_AFTER,
    ELSEWHERE_WEIGHT,
    ENOUGH,
    EXPLORED_SHARE,
    FORGOTTEN_AFTER,
    INHERITED_COMPARISONS,
    LATER_WEIGHT,
    LEAST_SEEN,
    LEAST_SPREAD,
    OUTLIER,
    PACE_WEIGHT,
    PLAIN_PACE_WEIGHT,
    PRIOR_RATES,
    PRIOR_WEIGHT,
    SEEN_STEPS,
    STEP_OUTLIER,
    SURE_CLASSES,
    TIMING_WEIGHT,
)
from specwire.core.text import Tree

# A probability counts for at least this, so that it has a logarithm.
LEAST_PROBABILITY = 1e-9

# ----------------------------------------------------------------------------------------------------------------------
# Expected-speed formulas: what a window is worth, and when waiting for a proposal pays.


def interpolated(points: Mapping[Any, float], at: float) -> float:
    """Interpolate linearly between `points`, whose keys ascend; constant before the first and behind the last."""
    known: float | None = points.get(at)
    if known is not None:
        return known
    places = list(points)
    index = bisect_left(places, at)
    if index in (0, len(places)):
        return points[places[max(0, index - 1)]]
    low, high = places[index - 1], places[index]
    share: float = (at - low) / (high - low)
    return points[low] * (1 - share) + points[high] * share


class ForwardTimes:
    """V(m): time of one session's forward of m positions, in microseconds; measured at start, refined while running.

    Between known widths V is linear; beyond the last it grows by the last slope (at least zero).

    A machine that others share may be twice as slow a second later, with all that it computes. So the widths' times are
    kept as they would be on the machine as it was measured, and `pace` tells how many times as long they take now,
    which every step shows, whatever its width. What another width takes beside a plain step shows where one follows the
    other: by the median of the last SEEN_STEPS pairs, since either may have met something else on the machine. A width
    that does not run is soon thought to be as it was measured again: what was too dear once would never be tried.
    """

    def __init__(self, measured: Mapping[int, float]) -> None:
        if not measured or min(measured) < 1:
            raise ValueError(f"measured: needs times of at least one width, from 1 on, not {dict(measured)}")
        self._given = self._times = dict(sorted(measured.items()))
        self._plain = min(measured)
        self.pace = 1.0
        # By width, times as long as it was measured beside a plain step; and plain steps since any was forgotten.
        self._seen: dict[int, deque[float]] = {}
        self._unseen = 0
        # Width of the last step, and the pace that it showed. Likewise the last plain one, and steps since.
        self._last: tuple[int, float] | None = None
        self._confirmed, self._since = 1.0, 0

    @property
    def points(self) -> dict[int, float]:
        """Microseconds by known width, as they are by now."""
        return {rows: self.pace * time_us for rows, time_us in self._times.items()}

    def at(self, rows: int) -> float:
        """V(rows), in microseconds."""
        return self.pace * self.measured(rows)

    def measured(self, rows: int) -> float:
        """V(rows) on the machine as it was measured."""
        return _beyond_the_last(self._times, rows)

    def observe(self, rows: int, microseconds: float) -> None:
        """Refine the pace, and a width beside a plain step. A single slow step (a scheduler's hiccup) moves it little.

        The plain step's time is what the others are measured by, and is left as it is.
        """
        shown = min(max(microseconds / self.measured(rows), self.pace / OUTLIER), self.pace * OUTLIER)
        taken = microseconds / _beyond_the_last(self._given, rows)
        last, self._last = self._last, (rows, taken)
        plain = rows == self._plain
        self.pace *= (shown / self.pace) ** (PLAIN_PACE_WEIGHT if plain else PACE_WEIGHT)
        self._since += 1
        if plain:
            self._confirmed, self._since = shown, 0
            self._forget()
        if last is not None and plain != (last[0] == self._plain):
            self._note(*((last[0], last[1] / taken) if plain else (rows, taken / last[1])))

    def interrupted(self) -> None:
        """What comes next does not follow the last step."""
        self._last = None

    @property
    def doubtful(self) -> bool:
        """Whether a plain step should show if the machine has changed, or what windows cost: windows alone cannot tell.

        Two are asked for, of which the first may be slow for what the window left behind.
        """
        changed = not 1 / STEP_OUTLIER < self.pace / self._confirmed < STEP_OUTLIER
        return changed and self._since >= DOUBTED_AFTER

    def told(self, rows: int, step_us: float, plain_us: float) -> None:
        """Refine by a step of one session that its verifier tells of.

        A plain step counts as the verifier says (`plain_us`; 0: it did not say). This one may have taken longer, beside
        a drafter on the verifier's host, and where plain steps are thought too slow any window seems to pay.
        """
        if plain_us:
            self.pace = plain_us / self._times[self._plain]
        if rows > self._plain:
            self._note(rows, step_us / (self.pace * _beyond_the_last(self._given, rows)))

    def _note(self, rows: int, taken: float) -> None:
        """A step of so many rows took so many times as long as measured, beside a plain one."""
        if rows <= max(self._given):
            self._seen.setdefault(rows, deque(maxlen=SEEN_STEPS)).append(taken)
            self._refine()

    def _forget(self) -> None:
        """Of a plain step: now and then one step of each width is forgotten."""
        self._unseen += 1
        if self._unseen >= FORGOTTEN_AFTER and self._seen:
            self._unseen = 0
            for rows, taken in list(self._seen.items()):
                taken.popleft()
                if not taken:
                    del self._seen[rows]
            self._refine()

    def _refine(self) -> None:
        """Wider ones than any that was seen take as much longer, or less so; narrower ones as long as was measured.

        None takes less than a narrower one, nor more than plain steps for all its rows.
        """
        known = {rows: typical(taken) for rows, taken in sorted(self._seen.items()) if len(taken) >= LEAST_SEEN}
        narrowest, plain_us, least_us = min(known, default=0), self._given[self._plain], 0.0
        times: dict[int, float] = {}
        for rows in sorted({*self._given, *known}):
            taken_us = _beyond_the_last(self._given, rows)
            if rows < narrowest:  # measured longer it met something else on the machine
                taken_us = min(taken_us, known[narrowest] * _beyond_the_last(self._given, narrowest))
            elif known:
                taken_us *= interpolated(known, rows)
            least_us = times[rows] = max(least_us, min(taken_us, plain_us * ceil(rows / self._plain)))
        self._times = times


def _beyond_the_last(times: Mapping[int, float], rows: int) -> float:
    """Linear between widths; beyond the last it grows by the last slope, at least zero."""
    widths = list(times)
    if rows <= widths[-1] or len(widths) == 1:
        return interpolated(times, rows)
    last = times[widths[-1]]
    slope = (last - times[widths[-2]]) / (widths[-1] - widths[-2])
    return last + max(0.0, slope) * (rows - widths[-1])


class AcceptanceByPosition:
    """P(accept | tested) for each position of the window: decayed counts with a weak prior.

    A verifier has one for each source of a session, which under exact rules also counts paths that it has not tested. A
    controller has one of windows that were tested, over sessions: planned by the verifier's, batches were slower (LOG).

    Invariant: no position from `_reach` on was ever tested. `_rates`, `_expected`: of the first positions, and by
    number of positions, until something is observed.
    """

    def __init__(self, most: int = 32, prior: float = PRIOR_RATES[0]) -> None:
        self._prior = prior
        self._tested = [0.0] * most
        self._accepted = [0.0] * most
        self._reach = 0
        self._rates: list[float] = []
        self._expected: dict[int, float] = {}

    def observe(self, tested: int, accepted: int, weight: float = 1.0) -> None:
        """Note a window of `tested` draft tokens, the first `accepted` of which were accepted.

        Tokens behind a refused one do not count as tested, because their context was wrong. weight: of the window,
        where several of one step are noted.
        """
        decay = DECAY**weight
        judged = min(tested, accepted + 1, len(self._tested))
        for index in range(judged):
            self._tested[index] = self._tested[index] * decay + weight
            self._accepted[index] = self._accepted[index] * decay + (weight if index < accepted else 0.0)
        # Beyond the window nothing is learnt. What a few tests showed there fades, or windows would stay short.
        self._rates.clear()
        self._expected.clear()
        for index in range(tested, self._reach):
            self._tested[index] *= decay
            self._accepted[index] *= decay
        self._reach = max(self._reach, judged)

    def faded(self, weight: float) -> AcceptanceByPosition:
        """A copy that weighs at most `weight` tests a position, so that what was learnt elsewhere is overruled soon."""
        copy = AcceptanceByPosition(len(self._tested), self._prior)
        copy._reach = self._reach
        for index, tested in enumerate(self._tested[: self._reach]):
            share = min(1.0, weight / tested) if tested else 0.0
            copy._tested[index], copy._accepted[index] = tested * share, self._accepted[index] * share
        return copy

    def rates(self, most: int, prior: float | None = None) -> list[float]:
        """Acceptance of the first `most` positions. Each is shrunk towards the one before: later ones are tested less.

        prior: what the first is expected to be, where more is known.
        """
        if prior is not None:
            return self._shrunk(most, prior)
        if len(self._rates) < most:
            self._rates = self._shrunk(most, self._prior)
        return self._rates[:most]

    def expected(self, window: int) -> float:
        """Tokens that a window is expected to decide: see `expected_tokens`."""
        known = self._expected.get(window)
        if known is None:
            known = self._expected[window] = expected_tokens(self.rates(window), window)
        return known

    def _shrunk(self, most: int, prior: float) -> list[float]:
        rates: list[float] = []
        for index in range(most):
            bounded = min(index, len(self._tested) - 1)
            weight = LATER_WEIGHT if index else PRIOR_WEIGHT
            prior = (self._accepted[bounded] + weight * prior) / (self._tested[bounded] + weight)
            rates.append(prior)
        return rates


class Rates(Protocol):
    """P(accept | tested) by position, of what is proposed."""

    def rates(self, most: int) -> list[float]: ...
    def expected(self, window: int) -> float: ...


class PathRates(NamedTuple):
    """Of one proposal whose tokens are not like those of others."""

    chances: tuple[float, ...]

    def rates(self, most: int) -> list[float]:
        return [*self.chances[:most]]

    def expected(self, window: int) -> float:
        return expected_tokens(self.chances, window)


class AcceptanceByConfidence:
    """P(accept | tested) by the probability that a head gives its likeliest token, whatever the position.

    Decayed counts in SURE_CLASSES classes, each with a weak prior: the probability itself. Beside them is kept how far
    they were off (Brier 1950), and how far what positions tell was off: a head whose probabilities tell less is not
    `trusted`.
    """

    def __init__(self) -> None:
        self._seen, self._right = [0.0] * SURE_CLASSES, [0.0] * SURE_CLASSES
        self._own_error = self._other_error = 0.0

    @property
    def trusted(self) -> bool:
        return self._own_error < self._other_error

    def chance(self, sure: float) -> float:
        known = _class_of(sure)
        prior = (known + 0.5) / SURE_CLASSES
        return (self._right[known] + PRIOR_WEIGHT * prior) / (self._seen[known] + PRIOR_WEIGHT)

    def observe(self, sure: Sequence[float], rates: Sequence[float], tested: int, accepted: int) -> None:
        """Note draft tokens, as `AcceptanceByPosition.observe` does. rates: what their positions told."""
        for index in range(min(tested, accepted + 1, len(sure))):
            known, right = _class_of(sure[index]), float(index < accepted)
            own, other = self.chance(sure[index]) - right, rates[index] - right
            self._own_error = AGREEMENT_DECAY * self._own_error + own * own
            self._other_error = AGREEMENT_DECAY * self._other_error + other * other
            self._seen[known] = AGREEMENT_DECAY * self._seen[known] + 1.0
            self._right[known] = AGREEMENT_DECAY * self._right[known] + right


def _class_of(sure: float) -> int:
    return min(SURE_CLASSES - 1, int(SURE_CLASSES * sure))


class AcceptanceByRank:
    """P(a child is the decided token | its parent was decided), by rank among siblings.

    Decayed counts with a weak prior.
    """

    def __init__(self) -> None:
        self._seen = [0.0] * len(PRIOR_RATES)
        self._right = [0.0] * len(PRIOR_RATES)
        self.rates = list(PRIOR_RATES)

    def observe(self, siblings: int, right: int | None) -> None:
        """Note what was decided behind a node with so many children: the one of rank `right`, or none of them."""
        for rank, prior in enumerate(PRIOR_RATES[:siblings]):
            self._seen[rank] = self._seen[rank] * DECAY + 1.0
            self._right[rank] = self._right[rank] * DECAY + (rank == right)
            self.rates[rank] = (self._right[rank] + PRIOR_WEIGHT * prior) / (self._seen[rank] + PRIOR_WEIGHT)


class CandidateRates:
    """P(a drafter's candidate is the decided token), by its rank and by how sure the drafter is of its best one."""

    def __init__(self) -> None:
        self._seen = [0.0] * SURE_CLASSES
        self._right = [[0.0] * len(PRIOR_RATES) for _ in range(SURE_CLASSES)]

    def chances(self, scores: Sequence[float]) -> tuple[int, list[float]]:
        """The class of these scores, which fall from 0 (nats), and the log of each candidate's probability."""
        shares = [exp(score) for score in scores]
        whole = sum(shares)
        known = min(SURE_CLASSES - 1, int(SURE_CLASSES / whole))
        seen, right = self._seen[known] + ELSEWHERE_WEIGHT, self._right[known]
        own = ELSEWHERE_WEIGHT / whole
        rates = [(times + own * share) / seen for share, times in zip(shares, right, strict=False)]
        for rank in reversed(range(len(rates) - 1)):
            # A worse rank that was right more often, by chance, is not put first: the better one counts as likely.
            rates[rank] = max(rates[rank], rates[rank + 1])
        chances = [log(min(1.0, max(rate, LEAST_PROBABILITY))) for rate in rates]
        return known, chances

    def observe(self, known: int, rank: int | None) -> None:
        """Note which candidate of a place of class `known` was decided; None: another token."""
        right = self._right[known]
        self._seen[known] = AGREEMENT_DECAY * self._seen[known] + 1.0
        for at in range(len(right)):
            right[at] = AGREEMENT_DECAY * right[at] + (at == rank)


class RowTimes:
    """How long a drafter's forward of so many rows takes: a line, fitted to decayed sums; microseconds.

    Until forwards of different widths were seen, rows are thought to cost nothing: then wide ones are tried. What a row
    was seen to cost is forgotten slowly while none is added: one that was measured in a bad moment is tried again.
    """

    def __init__(self) -> None:
        self._count = self._rows = self._times = self._squares = self._products = 0.0
        self.row_us = 0.0

    def observe(self, rows: int, time_us: float) -> None:
        """Note a forward. Schedulers have hiccups: it counts for at most OUTLIER times what was expected."""
        if self._count:
            time_us = min(time_us, OUTLIER * self.at(rows))
        self._count = DECAY * self._count + 1.0
        self._rows = DECAY * self._rows + rows
        self._times = DECAY * self._times + time_us
        self._squares = DECAY * self._squares + rows * rows
        self._products = DECAY * self._products + rows * time_us
        spread = self._squares - self._rows**2 / self._count
        if spread > LEAST_SPREAD * self._count:
            self.row_us = max(0.0, (self._products - self._rows * self._times / self._count) / spread)

    def spurned(self) -> None:
        """Note that no row was added because it seemed too dear."""
        self.row_us *= 1.0 - EXPLORED_SHARE

    def at(self, rows: int) -> float:
        """What a forward of so many rows is expected to take; 1.0 where none was seen."""
        if not self._count:
            return 1.0
        mean = self._rows / self._count
        return max(1.0, self._times / self._count + self.row_us * (rows - mean))


def expected_tokens(rates: Sequence[float], window: int) -> float:
    """Tokens that a window is expected to decide: 1 + a_1 + a_1 a_2 + ... (Leviathan et al. 2023, equation 1)."""
    total = product = 1.0
    for rate in rates[:window]:
        product *= rate
        total += product
    return total


def lockstep_rate(
    rates: Sequence[float],
    window: int,
    draft_us: float,
    forward: ForwardTimes,
    overhead_us: float,
    waited_us: float = 0.0,
) -> float:
    """Tokens per microsecond when the drafter drafts `window` tokens while the verifier waits, then the reverse.

    waited_us: time for which the verifier waits in any case, for others of the batch.
    """
    drafting_us = window * draft_us + overhead_us if window else 0.0
    return expected_tokens(rates, window) / (max(waited_us, drafting_us) + forward.at(window + 1))


def stream_rate(
    rates: Sequence[float], agreement: float, draft_us: float, forward: ForwardTimes, delay_us: float, chunk: int
) -> float:
    """Tokens per microsecond when the drafter streams, on hardware of its own, and the verifier never waits.

    A renewal argument. After a contradiction the verifier goes on alone. A new chain catches up with it `delay_us` and
    a chunk later, if it guessed each of the n tokens decided meanwhile; every wrong one begins a chain anew, so the
    steps alone are those until the first run of n right guesses. While a chain lives, a step tests what was drafted
    during the last one, at most len(rates) tokens.

    agreement: P(a draft token is the decided one), tested or not.
    """
    plain_us = forward.at(1)
    lead_us = plain_us - draft_us
    if lead_us <= 0:
        return 1.0 / plain_us
    run = agreement ** ceil((delay_us + chunk * draft_us) / lead_us)
    alone = (1.0 - run) / (1.0 - agreement) if agreement < 1.0 else 1.0
    tokens, time_us = _live(rates, agreement, draft_us, forward)
    return (alone + run * tokens) / (alone * plain_us + run * time_us)


def waiting_rate(
    rates: Sequence[float], agreement: float, draft_us: float, forward: ForwardTimes, delay_us: float, chunk: int
) -> float:
    """The same when the verifier waits for the new chain's first chunk instead of going on alone."""
    tokens, time_us = _live(rates, agreement, draft_us, forward)
    survives = prod(rates[:chunk]) * agreement
    first_us = delay_us + chunk * draft_us + forward.at(chunk + 1)
    return (expected_tokens(rates, chunk) + survives * tokens) / (first_us + survives * time_us)


def _live(rates: Sequence[float], agreement: float, draft_us: float, forward: ForwardTimes) -> tuple[float, float]:
    """Tokens, and microseconds, of the steps that a live chain feeds until it is contradicted."""
    window = _best_window(rates, max(1, min(len(rates), int(forward.at(1) / draft_us))), forward)
    steps = 1.0 / (1.0 - min(prod(rates[:window]) * agreement, 0.999))
    return steps * expected_tokens(rates, window), steps * forward.at(window + 1)


def _best_window(rates: Sequence[float], most: int, forward: ForwardTimes) -> int:
    return max(range(1, most + 1), key=lambda window: expected_tokens(rates, window) / forward.at(window + 1))


def worth_waiting(
    decided_now: float, gained: float, forward_now_us: float, forward_then_us: float, wait_us: float
) -> bool:
    """Whether to wait `wait_us` for proposals that raise the step's expected tokens by `gained`.

    (B + g) / (V(m + n) + w) > B / V(m), docs/HOW_IT_WORKS.md.
    """
    return (decided_now + gained) * forward_now_us > decided_now * (forward_then_us + wait_us)


def affordable(cost: float, since: float) -> bool:
    """Whether what does not pay may be tried again, so long `since` the last time, to see whether it would by now.

    It is one rule for all that is tried: tries cost at most EXPLORED_SHARE of the time between them. Both are in
    microseconds, or in steps.
    """
    return cost <= EXPLORED_SHARE * since


def smoothed(known: float | None, value: float, weight: float = TIMING_WEIGHT, least: float = 0.0) -> float:
    """Exponentially weighted mean. An outlier counts for at most three times what is known, or `least` if that is more.

    A value that may be near zero and grow needs a `least`, or it stays near zero.
    """
    if known is None:
        return value
    return known + weight * (min(value, OUTLIER * max(known, least)) - known)


def likely(seen_us: float, expected_us: float) -> float:
    """Clip a step's time, so that a hiccup of the machine counts the same in steps with drafts and without."""
    return min(max(seen_us, expected_us / STEP_OUTLIER), STEP_OUTLIER * expected_us)


def typical(values: Sequence[float]) -> float:
    """Median of timings, which a scheduler's hiccup does not move."""
    return float(median(values))


# ----------------------------------------------------------------------------------------------------------------------
# Whether a drafter's own probabilities foretell what is accepted, so that they may end a chain.


@dataclass(slots=True)
class Calibration:
    """How well a drafter's own estimates foretell acceptance: decayed sums over tested windows.

    windows: those counted. expected: accepted tokens that were foretold for them. accepted: those that were accepted.
    announced: tokens foretold since the last window.
    """

    windows: float = 0.0
    expected: float = 0.0
    accepted: float = 0.0
    announced: float = 0.0

    def announce(self, expected: float) -> None:
        """Note a proposal's estimate; 0 is none."""
        self.announced += expected

    def settle(self, accepted: int) -> None:
        """Note that `accepted` tokens of the window that held the announced ones were accepted."""
        if self.announced:
            self.windows = DECAY * self.windows + 1.0
            self.expected = DECAY * self.expected + self.announced
            self.accepted = DECAY * self.accepted + accepted
        self.announced = 0.0

    @property
    def trusted(self) -> bool:
        low, high = CALIBRATED
        return self.windows >= ENOUGH and low * self.expected <= self.accepted <= high * self.expected


# ----------------------------------------------------------------------------------------------------------------------
# How often a drafter's tokens are the decided ones, tested or not.
#
# Far from the verifier most chains are contradicted before a token of theirs can be tested, and then acceptance by
# position learns next to nothing. Under greedy and coupled a draft token is right exactly if it equals the decided one,
# so chains are compared with the text, whoever decided it and whenever they arrived.

# Decided tokens that are kept for chains still on their way.
REMEMBERED_CHAINS = 1024


@dataclass(slots=True)
class Agreement:
    """P(a source had the decided token | it had all before it in this tree), as decayed counts with a weak prior.

    For a chain: that its next token is the decided one. For a tree that branches: that one of several is. No verifier
    keeps it: an orchestrator beside a far drafter has drafts and text a round trip before a verifier could tell.
    """

    compared: float = 0.0
    equal: float = 0.0
    _decided: dict[int, int] = field(default_factory=dict)
    _source: int = -1
    _newest: int = -1
    _tree: Tree | None = None

    @property
    def rate(self) -> float:
        return (self.equal + PRIOR_WEIGHT * PRIOR_RATES[0]) / (self.compared + PRIOR_WEIGHT)

    def faded(self, weight: float) -> Agreement:
        """A copy without the tree that counts for at most `weight` comparisons."""
        share = min(1.0, weight / self.compared) if self.compared else 0.0
        return Agreement(share * self.compared, share * self.equal)

    def proposal(self, proposal: ProposedChunk) -> None:
        """Take in a piece of a tree; one of a tree that is over or unknown, or behind a gap, is ignored."""
        if proposal.source != self._source:
            # Another drafter, or the same one connected again: its trees are numbered anew.
            self._source, self._newest = proposal.source, -1
        if proposal.chain > self._newest and proposal.offset == 0:
            self._newest, self._tree = proposal.chain, Tree(proposal.chain, proposal.base)
        tree = self._tree
        if tree is None or (proposal.chain, proposal.base) != (self._newest, tree.base) or proposal.offset > tree.size:
            return
        known = tree.size - proposal.offset
        tokens, parents = proposal.tokens[known:], proposal.parents[known:]
        if len(tree.nodes) + len(tokens) > REMEMBERED_CHAINS or len(proposal.parents) not in (0, len(proposal.tokens)):
            return
        tree.extend(tokens, parents or range(tree.size - 1, tree.size + len(tokens) - 1))
        self._compare(tree)

    def decided(self, position: int, tokens: Sequence[int]) -> None:
        """Compare the tree with tokens decided at position, position + 1, ..."""
        for at, token in enumerate(tokens, position):
            self._decided[at] = token
        if self._tree is not None:
            self._compare(self._tree)
        while len(self._decided) > REMEMBERED_CHAINS:
            del self._decided[next(iter(self._decided))]

    def _compare(self, tree: Tree) -> None:
        """Follow the text as far as the tree has tokens for it. Siblings of a contradicted token may still come."""
        while tree.branches and (token := self._decided.get(tree.position)) is not None:
            equal = tree.step(token)
            self.compared = AGREEMENT_DECAY * self.compared + 1.0
            self.equal = AGREEMENT_DECAY * self.equal + equal


@dataclass(slots=True)
class Estimates:
    """What an orchestrator knows of a drafter and its verifier. Times are microseconds; None: nothing was seen yet.

    acceptance: of windows that were tested. agreement: of all that was drafted. draft_us: a token's drafting while the
    verifier is idle; until it was seen so (drafted_apart), what it took beside a forward. overhead_us: from a verdict
    to the proposal that answers it, drafting apart.
    """

    acceptance: AcceptanceByPosition = field(default_factory=AcceptanceByPosition)
    agreement: Agreement = field(default_factory=Agreement)
    calibration: Calibration = field(default_factory=Calibration)
    draft_us: float | None = None
    overhead_us: float | None = None
    drafted_apart: bool = False

    def drafted(self, token_us: float, weight: float, apart: bool) -> None:
        """Note how long a token took to draft. apart: while the verifier was idle.

        The first one apart replaces what was measured beside forwards. From then on one beside a forward says only that
        a token takes at most so long, and at least a part of it: the two are assumed to slow each other down by at most
        OUTLIER.
        """
        if self.draft_us is None or (apart and not self.drafted_apart):
            self.draft_us, self.drafted_apart = token_us, apart
            return
        if self.drafted_apart and not apart:
            token_us = min(max(self.draft_us, token_us / OUTLIER), token_us)
        self.draft_us = smoothed(self.draft_us, token_us, weight)

    def faded(self) -> Estimates:
        """A copy for the next session, whose text is another: what it shows overrules what this one has shown soon."""
        return Estimates(
            self.acceptance.faded(ELSEWHERE_WEIGHT),
            self.agreement.faded(INHERITED_COMPARISONS),
            replace(self.calibration, announced=0.0),
            self.draft_us,
            self.overhead_us,
            self.drafted_apart,
        )


# ----------------------------------------------------------------------------------------------------------------------
# What a draft takes that the verifier waits for. Pure; microseconds. Times are instants on one clock, of when messages
# arrived: both take about as long to come.


class Forward(NamedTuple):
    """A forward.

    sessions: that took part. plain_us, drafts_us: what a step of so many is expected to take without draft tokens, and
    what one for each would add, as the verifier knows them; 0: it did not say. waited_us: for proposals, before it.
    """

    ended_us: float
    took_us: float
    sessions: int = 1
    plain_us: float = 0.0
    drafts_us: float = 0.0
    waited_us: float = 0.0

    @property
    def began_us(self) -> float:
        return self.ended_us - self.took_us


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
