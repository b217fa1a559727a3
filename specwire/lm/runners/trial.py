"""A trial at load: a runner is held to rows of logits that its model gives for a text by itself."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from specwire.core.model import Feed, TreeFeed, out_of_memory
from specwire.lm.kv_cache import Runner
from specwire.lm.model_config import first_line
from specwire.lm.remembered import recalled, remember

logger = logging.getLogger(__name__)

# Different ids of a text that is made up.
TRIAL_IDS = 12
# Rows of windows that are compared with steps of one token each, bit for bit: narrow ones, and one that ends elsewhere
# in the blocks of a product.
EXACT_ROWS = (2, 3, 8, 11)
# Other texts that are beside it.
BESIDE = 3


class Trial:
    """A text, and what its model says of it.

    Args:
        text: shorter than the context.
        split: where it is cut in two.
        expected: logits behind its tokens from `split` on, then behind the first ones.
        measure: how far rows are from those expected, in units of what is tolerated: up to 1 they agree.
    """

    def __init__(
        self,
        text: Sequence[int],
        split: int,
        expected: torch.Tensor,
        measure: Callable[[torch.Tensor, torch.Tensor], float],
    ) -> None:
        self._text, self._split, self._expected, self._measure = [*text], split, expected, measure

    @torch.inference_mode()
    def held(self, runner: Runner, slots: int) -> float:
        """`deviation`, of a runner with so many slots, which are zero again. One that differs in trees takes none."""
        off = self.deviation(runner, slots)
        if off <= 1 and runner.branches:
            runner.branches = self._takes_trees(runner, slots)
        runner.invariant = off <= 1 and runner.alike and self.is_invariant(runner, slots)
        if not runner.invariant:
            logger.info("%s rounds a row by what it is computed with: guesses may tip near-ties", type(runner).__name__)
        runner.zero(slots - 1, len(self._text) + 1)
        return off

    @torch.inference_mode()
    def deviation(self, runner: Runner, slots: int) -> float:
        """How far the runner is from what is expected.

        It extends by another token than the text's, rolls back, and extends again by one token, then by many, beside a
        shorter text in another slot where there is one. The last slot holds the text then.
        """
        text, split, last = self._text, self._split, slots - 1
        short = len(self._expected) - len(text) + split if last > 0 else 0
        other = int(self._expected[0].argmin())  # a row of it that stayed would tell
        runner.run([Feed(last, 0, [*text[:split], other], 1)])
        alone = runner.run([Feed(last, split, text[split : split + 1], 1)]).clone()
        feeds = [Feed(last, split, text[split:], len(text) - split)]
        if short:
            feeds.append(Feed(0, 0, text[:short], short))
        rows = torch.cat((alone, runner.run(feeds)))
        if short:
            runner.zero(0, short)
        return self._off(rows, torch.cat((self._expected[:1], self._expected))[: len(rows)])

    @torch.inference_mode()
    def is_invariant(self, runner: Runner, slots: int) -> bool:
        """Whether rows of windows, and beside other texts, have the bits of steps of one token each.

        All behind the text's first part, which stays in the last slot.
        """
        text, split, last = self._text, max(1, self._split), slots - 1
        if len(text) <= max(split, 4):
            return False
        counts = sorted({*EXACT_ROWS, runner.widest})
        steps = [Feed(last, at, text[at : at + 1], 1) for at in range(split, min(split + counts[-1], len(text)))]
        runner.run([Feed(last, 0, text[:split], 1)])
        alone = torch.cat([runner.run([step]).clone() for step in steps])
        window = text[split : split + len(steps)]
        for count in (min(count, len(steps)) for count in counts):
            if not torch.equal(runner.run([Feed(last, split, window[:count], count)]), alone[:count]):
                return False
        # Beside other texts in the slots before, which some runners compute together: windows, then steps.
        others = range(max(0, last - BESIDE), last)
        windows = [Feed(slot, 0, text[: len(steps)], len(steps)) for slot in others]
        rows = runner.run([*windows, Feed(last, split, window, len(window))])
        held = torch.equal(rows[-len(steps) :], alone)
        for at, count in ((0, 3), (3, 1)):
            rows = runner.run([*(Feed(slot, at, text[at : at + count], count) for slot in others), steps[-1]])
            held = held and torch.equal(rows[-1:], alone[-1:])
        for slot in others:
            runner.zero(slot, max(4, len(steps)))
        return held

    @torch.inference_mode()
    def tree_deviation(self, runner: Runner, slots: int) -> float:
        """Likewise of a branch whose rows are not its positions, and of the line that is left of it, behind the above.

        Behind the text stand two tokens beside the branch's first two, and rows are kept before the last is fed.
        Infinity for a text that is too short.
        """
        text, trunk, slot = self._text, len(self._text) - 4, slots - 1
        if trunk < max(self._split, 1):
            return math.inf
        other = text[: trunk + 2][-2:][::-1]
        ancestors = ((), (), (trunk + 1,), (trunk + 1,), (trunk + 1, trunk + 3))
        nodes = [other[0], text[trunk], other[1], *text[trunk + 1 : trunk + 3]]
        rows = runner.run([Feed(slot, trunk, nodes, 5, TreeFeed(trunk, ancestors))])[[1, 3, 4]]
        runner.keep(slot, trunk, (trunk + 1, trunk + 3, trunk + 4))
        rows = torch.cat((rows, runner.run([Feed(slot, trunk + 3, text[trunk + 3 :], 1)])))
        at = trunk - self._split
        return self._off(rows, self._expected[at : at + 4])

    def _off(self, rows: torch.Tensor, expected: torch.Tensor) -> float:
        return self._measure(rows[:, : expected.shape[1]].float().to(expected.device), expected)

    def _takes_trees(self, runner: Runner, slots: int) -> bool:
        name = type(runner).__name__
        try:
            off = self.tree_deviation(runner, slots)
        except Exception as failure:  # models fail in many ways at a mask that they cannot take
            if out_of_memory(failure):
                raise
            logger.info("%s takes no trees: %s", name, first_line(failure))
            return False
        if not off <= 1:
            logger.info("%s takes no trees: its logits are others than in a line (%.1f times the tolerance)", name, off)
        return off <= 1


def made_up(count: int, vocabulary: int) -> list[int]:
    """A text of so many tokens."""
    return [(7 * (at % TRIAL_IDS) + 3) % vocabulary for at in range(count)]


# ----------------------------------------------------------------------------------------------------------------------
# A trial that was passed is remembered: it would say the same again of the same weights, code, libraries, processor and
# options. Of a model of 1.5 billion weights it takes seconds of a start, beside other work half a minute.

# Bytes of weights from which on that is worth a file.
WORTH_BYTES = 64 << 20


class PassedTrial(NamedTuple):
    """What a trial found: see `Trial.held`. invariant: as the runner has it since."""

    off: float
    invariant: bool


def held_once(trial: Callable[[], Trial], runner: Runner, slots: int, size: int, *tried: object) -> float:
    """`Trial.held`, or what it said when the same was tried before on this machine.

    size: bytes of the weights. tried: what decides it beside this project's code, libraries and processor, each with a
    `repr` that tells all of it; it is `Runner.decided_by` then.
    """
    if size < WORTH_BYTES:
        return trial().held(runner, slots)
    runner.decided_by = (type(runner).__name__, slots, *tried)
    passed = _passed(recalled("trial", *runner.decided_by))
    if passed is not None:
        logger.info("%s passed its trial before", type(runner).__name__)
        runner.invariant = passed.invariant
        return passed.off
    branches = runner.branches
    off = trial().held(runner, slots)
    # Why it takes no trees after all may not be so the next time.
    if off <= 1 and runner.branches == branches:
        remember(PassedTrial(off, runner.invariant)._asdict(), "trial", *runner.decided_by)
    return off


def _passed(found: Any) -> PassedTrial | None:
    """None where nothing is remembered, or nothing that was passed."""
    try:
        passed = PassedTrial(float(found["off"]), found["invariant"] is True)
    except (ValueError, TypeError, KeyError):
        return None
    return passed if 0 <= passed.off <= 1 else None
