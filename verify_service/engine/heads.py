"""What a head drafts for the next step, of all sessions at once."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from specwire.core.draft import DraftingModel, HeadRequest
from specwire.core.messages import PROBE_WINDOW
from specwire.core.policy.heads import FeatureRetention, HeadDepth
from specwire.core.policy.tunables import (
    EXPLORED_SHARE,
    LEAST_BEHIND,
    LEAST_READ,
    LET_BE,
    PREFILL_ROWS,
    READ_AT,
    RISKED_SHARE,
)
from specwire.core.policy.windows import least_charge_us
from specwire.core.verify.session import VerifySession
from specwire.core.verify.text_sources import HeadSource
from verify_service.engine.batch import ShortOfMemory, detect_out_of_memory
from verify_service.engine.sessions import Held

logger = logging.getLogger(__name__)

# Unread positions up to which a head reads a text while it drafts. More than that it reads before, for all texts
# together. A text that was left alone for LET_BE steps has no more.
FEW_UNREAD = 2 * LET_BE


@dataclass(frozen=True, slots=True)
class DraftedStep:
    """The next step: sessions by slot of which a token is decided, others whose prompts are fed, and V(m) of the step.

    plain_us: of a session alone; batch_us: of these, by which their ledgers are kept. pace: how slow the machine is.
    """

    decoding: Mapping[int, Held]
    prompts: Mapping[int, Held]
    V: Callable[[int], float]
    plain_us: float
    batch_us: float
    pace: float = 1.0

    @property
    def beginning(self) -> frozenset[int]:
        """Slots of which nothing was decided yet: prompts, and texts whose prompts were there, in slots of others."""
        begun = [slot for slot, held in self.decoding.items() if held.session.ledger.tokens == 0]
        return frozenset([*self.prompts, *begun])

    def spare_us(self, held: Held) -> float:
        """What a head and its windows may cost a session now; negative in debt."""
        return held.session.head_spare_us(self.batch_us, self.plain_us) - held.running.waited_us


@dataclass(slots=True)
class _Asked:
    """A session that a head may draft for. reads: of the `unread` positions, the last ones that it is to read."""

    slot: int
    session: VerifySession
    source: HeadSource
    unread: int
    spare_us: float
    depth: int = 0
    reads: int = 0

    @property
    def request(self) -> HeadRequest:
        session = self.session
        return HeadRequest(self.slot, session.text.tokens, session.sampling, min(self.depth, session.room - 1))

    @property
    def behind(self) -> bool:
        return self.unread > FEW_UNREAD

    def waiting(self, step: DraftedStep) -> int:
        """Sessions that wait while it reads. The first reading is like a prompt's prefill: its own does not count."""
        return len(step.decoding) - (not self.source.read and self.slot in step.decoding)


class HeadDrafting:
    """Lets a head draft where that is expected to pay. A head that fails is switched off, and ends nothing.

    One that only lacked memory is asked again later: sessions end, and what they held is free then.

    All of a step's sessions wait for it, and those that it drafts for are charged, whatever comes of it: each for its
    part of the forwards that draft for it. Before it first drafts for a text it reads that text. This is like the
    prefill of a prompt: only the time of others is charged, and it is done only where it is expected to pay several
    times over. Where others wait, only so much of the text's end is read as its ledger can well bear: charged for a
    whole prompt, no text of a large batch could bear a draft. What the head leaves unread later is charged whole,
    because a head that is seldom asked reads much for little.

    Ledgers are kept by the batch's plain step, which they are charged against, and not by that of a session alone, but
    for what a text borrows of tokens to come.

    Keeping features makes a step longer. So it is done for sessions that take a head's tokens and can bear that and a
    draft, and only while the head drafts for any. When it is to draft again it begins behind what was not kept.
    """

    def __init__(self, heads: DraftingModel, depth: HeadDepth) -> None:
        self._heads: DraftingModel | None = heads
        self._depth = depth
        self._let_be = 0
        # When drafting was last thought of, it would have paid for the batch, but no session could bear the charge.
        self._in_vain = False
        # Memory was short when it last drafted, and until when it is left alone for that.
        self._short, self._short_until_us = False, 0.0
        # Whether features are to be kept, whether any session wants it, and how long they are kept while nobody drafts.
        self._heeding, self._tapping, self._kept = True, False, FeatureRetention()
        # Sessions, of which tokens are decided next, whose features are kept.
        self._takers: list[Held] = []
        # Slots whose texts began when it was last looked whether to keep features, and whether a text has begun
        # since drafting was last thought of.
        self._beginning: frozenset[int] = frozenset()
        self._begun = False
        # What drafts of the present try may still take; 0 for none.
        self._trying_us = 0.0

    @property
    def works(self) -> bool:
        return self._heads is not None

    def tapped_us(self, sessions: int) -> float:
        """What of the last step, of so many sessions, was for features."""
        return self._depth.tapped_us(sessions) if self._tapping else 0.0

    def draft(self, step: DraftedStep, now_us: Callable[[], float], tell: Callable[[], None]) -> None:
        """Draft for those of the sessions that want it. tell: what is to be said, before anything is computed."""
        if self._heads is None:
            return
        began_us, self._depth.pace = now_us(), step.pace
        try:
            with detect_out_of_memory():
                if began_us >= self._short_until_us:
                    self._draft(self._heads, step, now_us, tell)
            self._heed(self._heads, step, began_us)
        except ShortOfMemory as short:
            self._wait(short, began_us, now_us())
        except Exception as error:
            logger.warning("the head failed, and is switched off: %s: %s", type(error).__name__, error)
            logger.debug("where it failed", exc_info=True)
            self._heads.stop()
            self._heads, self._tapping, self._takers = None, False, []
        took_us = now_us() - began_us
        for held in (*step.decoding.values(), *step.prompts.values()):
            held.running.since_us += took_us

    def _wait(self, short: ShortOfMemory, began_us: float, ended_us: float) -> None:
        """Leave it alone, for so long that what ends like this takes EXPLORED_SHARE of the time; said once in a row."""
        if not self._short:
            logger.warning("the head is short of memory, and drafts nothing until there is some: %s", short)
        self._short, self._short_until_us = True, ended_us + (ended_us - began_us) / EXPLORED_SHARE

    def _draft(
        self, heads: DraftingModel, step: DraftedStep, now_us: Callable[[], float], tell: Callable[[], None]
    ) -> None:
        budget, began_us = PREFILL_ROWS, now_us()
        self._kept.steps += 1
        if self._rests(step, began_us):
            self._let_be += 1
            return
        self._let_be = 0
        if not self._heeding:
            if self._may_keep(step, began_us) and self._would_draft(heads, step, began_us):
                self._heeding = True
                self._kept.begins()
            return
        if long := self._long_prompts(heads, step, began_us):
            tell()
            budget -= self._read(heads, _within(long, budget), step, now_us)
        thought_us = now_us()
        wanted = [each for each in _asked(heads, step.decoding, step) if self._wants(each, step)]
        asked = self._chosen(wanted, step, began_us) if wanted else []
        self._in_vain = len(wanted) > 0 and not asked and self._depth.pays and len(step.decoding) > 1
        if not asked:
            self._kept.thoughts += len(wanted) > 0 and self._trying_us <= 0.0 and not self._gathering(heads, step)
            return
        thought_us = now_us() - thought_us
        tell()
        tried, kept_us = not self._depth.pays, self._kept.spent_us
        ready = [each for each in asked if not each.behind]
        behind = _within([each for each in asked if each.behind], budget)
        if behind:
            self._read(heads, behind, step, now_us)
        self._propose(heads, [*ready, *behind], step, now_us, thought_us)
        if tried:
            self._tried(now_us() - began_us, kept_us)
        else:
            self._trying_us = 0.0

    def _may_keep(self, step: DraftedStep, now_us: float) -> bool:
        """Whether features may be kept again: of texts that begin, for a try, or when their time is bearable."""
        tried = not self._depth.pays and not self._kept.untried and self._depth.due(now_us)
        return len(step.beginning) > 0 or tried or self._kept.again(len(step.decoding), now_us)

    def _gathering(self, heads: DraftingModel, step: DraftedStep) -> bool:
        """Whether of some text still too little is kept to draft behind it."""
        return any(step.decoding.get(held.slot) is held and heads.unread(held.slot) is None for held in self._takers)

    def _tried(self, took_us: float, kept_us: float) -> None:
        """Drafting took so long, and keeping features before. That was for this try alone, which goes on as long."""
        begins = self._trying_us <= 0.0
        self._depth.tried(took_us + kept_us, begins)
        self._trying_us = (kept_us if begins else self._trying_us - kept_us) - took_us
        self._heeding = self._trying_us > 0.0

    def _rests(self, step: DraftedStep, now_us: float) -> bool:
        """Whether it is too soon to think of drafting again: where a batch gains nothing, that takes time too."""
        beginning = step.beginning
        if beginning:
            self._in_vain, self._begun = False, True  # a text that begins has lost nothing yet
        elif self._begun:
            self._begun, self._beginning = False, frozenset()
            return False
        if self._let_be >= LET_BE or self._trying_us > 0.0:
            return False
        if not self._heeding:
            before, self._beginning = self._beginning, beginning
            return beginning <= before  # of a text that begins the head may have all
        return self._in_vain or not (self._depth.pays or self._depth.due(now_us))

    def _heed(self, heads: DraftingModel, step: DraftedStep, now_us: float) -> None:
        """Keep the features of those that take a head's tokens, if of any."""
        if self._heeding and self._kept.over(self._depth.pays and not self._in_vain):
            self._heeding, self._trying_us = False, 0.0
            self._kept.dropped(len(step.decoding), now_us, self._depth.due(now_us))
        takers: dict[int, Held] = {}
        if self._heeding:
            takers = {**step.decoding, **step.prompts}
            for _ in range(2):  # the fewer they are, the more each is charged
                share = len(step.decoding) / max(1, len(takers.keys() & step.decoding.keys()))
                bears = partial(self._bears_features, heads, step=step, share=share)
                takers = {slot: held for slot, held in takers.items() if bears(slot, held)}
        self._tapping = len(takers) > 0
        heads.heed(takers)
        self._takers = [held for slot, held in takers.items() if slot in step.decoding]

    def _bears_features(self, heads: DraftingModel, slot: int, held: Held, step: DraftedStep, share: float) -> bool:
        """Whether features of a session are kept: a head may draft for it, and it can bear what they take.

        That is a step's; of a text that the head must begin in the middle, those of all steps until it may draft. And
        it must bear a draft: one that could not paid for features until its end, and came to bear none. What tries take
        is limited otherwise, but one in debt could take part in none. share: its part of what features take, times the
        sessions that wait for that.
        """
        if not _takes(held.session):
            return False
        spare_us = step.spare_us(held)
        if not self._depth.pays:
            return spare_us > 0.0
        cost_us = self._depth.tapped_us(len(step.decoding))
        if cost_us and slot in step.decoding:
            steps = LEAST_BEHIND if heads.unread(slot) is None else 1
            cost_us = steps * cost_us * share + self._depth.least_us(len(step.decoding), step.V)
        return cost_us <= max(0.0, spare_us)

    def charge_features(self, sessions: int) -> None:
        """Charge those whose features the last step kept, for so many sessions' time; tries are limited otherwise."""
        self._kept.spent_us += self.tapped_us(sessions)
        if not self._depth.pays:
            return
        for held in self._takers:
            cost_us = self.tapped_us(sessions) * sessions / len(self._takers)
            held.session.ledger.charge(0.0, 0, 0.0, cost_us, head=True)

    def _would_draft(self, heads: DraftingModel, step: DraftedStep, now_us: float) -> bool:
        """Whether the head would draft, or be tried, if it knew the texts; those that begin are thought to decode."""
        coming = replace(step, decoding={**step.decoding, **step.prompts}, prompts={})
        wanted = [each for each in _asked(heads, coming.decoding, coming, known=True) if self._wants(each, coming)]
        return len(wanted) > 0 and len(self._chosen(wanted, coming, now_us)) > 0

    def _long_prompts(self, heads: DraftingModel, step: DraftedStep, now_us: float) -> list[_Asked]:
        """Prompts of which much is unread, where drafting behind them is expected to pay for that.

        By what is known now: of a new service no text may have been drafted for, and another text may pay less.
        """
        long = [each for each in _asked(heads, step.prompts, step) if each.unread > READ_AT]
        if not long or not self._would_draft(heads, step, now_us):
            return []
        # Of one that cannot bear all of it only the end is read, once it is there.
        return [each for each in long if self._readable(each, 1, step) and each.reads == each.unread]

    def _wants(self, asked: _Asked, step: DraftedStep) -> bool:
        """Whether a head's tokens could be tested next, are not there yet, and decide more in a time than the text.

        A session in debt does not: it could bear no draft, and choosing one at every step would cost more than it wins.
        """
        session = asked.session
        if asked.spare_us <= 0.0 or not session.trusting or session.room < 2 or asked.source.proposed:
            return False
        held = step.decoding[asked.slot]
        if session.ngram is None or not held.looked:
            return True
        # A guess that its ledger does not bear is none.
        spare_us = session.ledger.spare_us(step.plain_us) - held.running.waited_us
        bears = spare_us >= least_charge_us(1, len(step.decoding), step.V)
        guess = session.ngram.look() if bears else None
        guessed = () if guess is None else guess.acceptance.rates(min(len(guess.tokens), session.room - 1))
        rates = asked.source.acceptance.rates(self._depth.most)
        return self._depth.beats(guessed, rates, len(step.decoding), step.V)

    def _chosen(self, asked: Sequence[_Asked], step: DraftedStep, now_us: float) -> list[_Asked]:
        """The sessions to draft for, and how deep. Where drafting does not pay it is tried now and then.

        All sessions wait for each forward, so what pays for many need not pay where only a few can bear the charge.
        """
        most, decoding = self._depth.most, len(step.decoding)
        rates = {each.slot: each.source.acceptance.rates(most) for each in asked}
        depth = self._depth.choose(list(rates.values()), decoding, step.V)
        if depth == 0:
            return self._to_try(asked, step) if self._trying_us > 0.0 or self._depth.due(now_us) else []
        able = [each for each in asked if self._readable(each, len(asked), step)]
        while able and depth:
            for each in able:
                each.depth = self._borne(each, depth, len(able), step)
            # A session that can bear only a shallower draft is left out where that does not pay.
            left = [
                each
                for each in able
                if each.depth == depth
                or (each.depth and self._depth.gains(rates[each.slot], each.depth, len(able), decoding, step.V))
            ]
            if len(left) == len(asked):
                self._level(left, step)
                return left
            asked = able = left
            depth = self._depth.choose([rates[each.slot] for each in left], decoding, step.V) if left else 0
        return []

    def _to_try(self, asked: Sequence[_Asked], step: DraftedStep) -> list[_Asked]:
        """All whose texts are known, since features are kept for all, and one whose text has still to be read."""
        behind = [each for each in asked if each.behind]
        able = [each for each in asked if not each.behind]
        if behind:
            longest = max(behind, key=lambda each: each.session.untested_us)
            self._reach(longest, step)
            able.append(longest)
        while able:
            for each in able:
                each.depth = self._borne(each, min(PROBE_WINDOW, self._depth.most), len(able), step)
            if all(each.depth for each in able):
                self._level(able, step)
                break
            able = [each for each in able if each.depth]
        return able

    def _borne(self, asked: _Asked, depth: int, sessions: int, step: DraftedStep) -> int:
        spare_us = asked.spare_us - self._owed_us(asked, step)
        return self._depth.borne(depth, sessions, len(step.decoding), step.V, spare_us)

    def _readable(self, asked: _Asked, sessions: int, step: DraftedStep) -> bool:
        if not asked.behind:
            return True
        self._reach(asked, step)
        step_us = step.V(len(step.decoding)) if step.decoding else step.plain_us
        worth = self._depth.worth_reading(asked.reads, sessions, step_us)
        return worth and self._owed_us(asked, step) <= asked.spare_us

    def _reach(self, asked: _Asked, step: DraftedStep) -> None:
        """Choose how much of its text is read: all where nobody waits, else as much as it can well bear.

        Of a text that the head has read, all that the ledger allows: what is left out would void what it knows.
        """
        asked.reads = asked.unread
        if waiting := asked.waiting(step):
            share = 1.0 if asked.source.read else RISKED_SHARE
            bearable = self._depth.readable(share * asked.spare_us / waiting)
            asked.reads = int(min(asked.unread, max(LEAST_READ, bearable)))

    def _level(self, asked: Sequence[_Asked], step: DraftedStep) -> None:
        """Shorten drafts whose ledgers could not bear the forwards that few share, now that all depths are known."""
        decoding = len(step.decoding)
        dear = list(asked)
        while dear:
            depths = [each.depth for each in asked]
            row_us = (step.V(decoding + sum(depths)) - step.V(decoding)) / sum(depths)
            parts_us = self._depth.parts_us(depths)
            dear = [
                each
                for each, part_us in zip(asked, parts_us, strict=True)
                if each.depth > 1
                and decoding * (part_us + row_us * each.depth)
                > RISKED_SHARE * (each.spare_us - self._owed_us(each, step))
            ]
            for each in dear:
                each.depth -= 1

    def _owed_us(self, asked: _Asked, step: DraftedStep) -> float:
        """What the session will be charged for reading."""
        return asked.waiting(step) * self._depth.reading_us(asked.reads) if asked.behind else 0.0

    def _read(
        self, heads: DraftingModel, behind: Sequence[_Asked], step: DraftedStep, now_us: Callable[[], float]
    ) -> int:
        """Have the head read these texts; returns how many positions that were."""
        self._kept.read()
        began_us, rows = now_us(), sum(each.reads for each in behind)
        for each in behind:
            if each.reads < each.unread:
                heads.skip(each.slot, each.reads)
        heads.catch_up([each.request for each in behind])
        took_us = now_us() - began_us
        charged_us = self._depth.reading_us(rows)
        self._depth.read(rows, took_us)
        for each in behind:
            if waiting := each.waiting(step):
                each.session.ledger.charge(took_us, 0, 0.0, charged_us * waiting * each.reads / rows, head=True)
            each.source.read, each.unread = True, 1
        return rows

    def _propose(
        self,
        heads: DraftingModel,
        asked: Sequence[_Asked],
        step: DraftedStep,
        now_us: Callable[[], float],
        thought_us: float,
    ) -> None:
        """Draft for `asked`. thought_us: time that choosing them took; it is charged."""
        if not asked:
            return
        self._kept.drafted(self._depth.pays)
        requests, began_us = [each.request for each in asked], now_us()
        deepening = self._depth.deepening(
            [each.source.acceptance.rates(each.depth) for each in asked],
            [each.source.confidence for each in asked],
            len(step.decoding),
            step.V,
        )
        drafted = heads.draft(requests, deepening.goes_on)
        self._short = False
        for each, tokens, sure in zip(asked, drafted, deepening.sure, strict=True):
            each.source.propose(tokens, sure)
        ended_us, forwards = now_us(), max(map(len, drafted))
        took_us = ended_us - began_us
        idle_rows = sum(max(0, each.unread - each.depth - 1) for each in asked)
        charged_us = self._depth.charged_us(len(asked), forwards, took_us, idle_rows)
        self._depth.observe(len(asked), forwards, took_us, ended_us, idle_rows)
        parts = self._depth.parts([len(tokens) for tokens in drafted])
        for each, part in zip(asked, parts, strict=True):
            own_us = thought_us / len(asked) + charged_us * part
            each.session.ledger.charge(thought_us + took_us, 0, 0.0, own_us * len(step.decoding), head=True)


def _takes(session: VerifySession) -> bool:
    """Whether a head may draft for it."""
    return session.head is not None and session.trusting


def _asked(heads: DraftingModel, sessions: Mapping[int, Held], step: DraftedStep, known: bool = False) -> list[_Asked]:
    """The sessions of the step that the head can draft for.

    known: as if all their texts could be read, of which it has still to read LEAST_READ where it never did.
    """
    asked: list[_Asked] = []
    for slot, held in sessions.items():
        if (source := held.session.head) is None:
            continue
        begun = 0 if source.read else min(LEAST_READ, held.session.position)
        unread = begun if known else heads.unread(slot)
        if unread is not None:
            asked.append(_Asked(slot, held.session, source, unread, step.spare_us(held)))
    return asked


def _within(asked: Sequence[_Asked], budget: int) -> list[_Asked]:
    """The first ones, as many as may be read in one step; one in any case."""
    chosen: list[_Asked] = []
    for each in asked:
        if chosen and each.reads > budget:
            break
        chosen.append(each)
        budget -= each.reads
    return chosen
