"""What a head drafts for the next step, of all sessions at once."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from specwire.core.draft import DraftingModel, HeadRequest
from specwire.core.messages import PROBE_WINDOW
from specwire.core.policy.estimates import affordable
from specwire.core.policy.heads import HeadDepth, HeadedText
from specwire.core.policy.tunables import EXPLORED_SHARE, LEAST_BEHIND, TRIAL_VERDICTS
from specwire.core.verify.session import VerifySession
from specwire.core.verify.text_sources import HeadSource, promise
from verify_service.engine.batch import ShortOfMemory, detect_out_of_memory
from verify_service.engine.sessions import Held

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class DraftedStep:
    """The next step: sessions by slot of which a token is decided, others whose prompts are fed, and V(m) of the step.

    plain_us: of a step that decides one token for each. pace: how slow the machine is.
    """

    decoding: Mapping[int, Held]
    prompts: Mapping[int, Held]
    V: Callable[[int], float]
    plain_us: float
    pace: float = 1.0

    @property
    def beginning(self) -> frozenset[int]:
        """Slots of which nothing was decided yet: prompts, and texts whose prompts were there, in slots of others."""
        begun = [slot for slot, held in self.decoding.items() if held.session.ledger.elapsed_us == 0.0]
        return frozenset([*self.prompts, *begun])

    def spare_us(self, held: Held) -> float:
        """What the session's ledger can bear now; negative in debt."""
        return held.session.ledger.spare_us(self.plain_us) - held.running.waited_us


@dataclass(frozen=True, slots=True)
class _Asked:
    """A session that a head may draft for. reads: of the `unread` positions, the last ones that it is to read.

    unread: None where too little was kept to draft behind it. instead: see HeadedText.
    """

    slot: int
    session: VerifySession
    source: HeadSource
    spare_us: float
    unread: int | None
    reads: int = 0
    instead: float = 0.0

    @property
    def behind(self) -> int:
        """Positions that are read before the draft."""
        return self.reads if self.reads > LEAST_BEHIND else 0

    def text(self, most: int) -> HeadedText:
        rates = self.source.acceptance.rates(most)
        return HeadedText(rates, self.spare_us, self.behind, self.source.read, self.instead)

    def request(self, depth: int) -> HeadRequest:
        session = self.session
        return HeadRequest(self.slot, session.text.tokens, session.sampling, min(depth, session.room - 1))


class HeadDrafting:
    """Lets a head draft where that is expected to pay. A head that fails is switched off, and ends nothing.

    One that only lacked memory is asked again later: sessions end, and what they held is free then.

    All of a step's sessions wait for it, and those that it drafts for are charged, whatever comes of it. Of a text it
    reads no more than a ledger can well bear, from the end: what it makes of the rest changes little.

    Keeping features makes a step longer. So it is done only while the head drafts, or is tried. When it is to draft
    again it begins behind what was not kept. What was kept, and drafted, in vain is a small share of the time until the
    next time (`affordable`).
    """

    def __init__(self, heads: DraftingModel, depth: HeadDepth) -> None:
        self._heads: DraftingModel | None = heads
        self._depth = depth
        # Memory was short when it last drafted, and until when it is left alone for that.
        self._short, self._short_until_us = False, 0.0
        # Whether features are kept, for a try or because drafts pay, and the sessions whose are, of those that decode.
        self._keeping = self._trying = False
        self._takers: list[Held] = []
        # Of the time since drafts last paid: its steps, what features and drafts took, and when it ended.
        self._idle = 0
        self._features_us = self._drafts_us = self._ended_us = 0.0
        # Steps in which drafting is not thought of, and slots whose texts began when it last was.
        self._rest, self._beginning = 0, frozenset[int]()

    @property
    def works(self) -> bool:
        return self._heads is not None

    def tapped_us(self, sessions: int) -> float:
        """What of the last step, of so many sessions, was for features."""
        return self._depth.tapped_us(sessions) if self._takers else 0.0

    def charge_features(self, sessions: int) -> None:
        """Charge those whose features the last step kept, for so many sessions' time; tries are limited otherwise."""
        self._features_us += self.tapped_us(sessions)
        for held in () if self._trying else self._takers:
            held.session.ledger.charge(0.0, 0, 0.0, self.tapped_us(sessions) * sessions / len(self._takers))

    def draft(self, step: DraftedStep, now_us: Callable[[], float], tell: Callable[[], None]) -> None:
        """Draft for those of the sessions that want it. tell: what is to be said, before anything is computed."""
        if self._heads is None:
            return
        began_us, self._depth.pace = now_us(), step.pace
        try:
            with detect_out_of_memory():
                if began_us >= self._short_until_us:
                    self._draft(self._heads, step, now_us, tell)
            self._heed(self._heads, step, self._keeping and began_us >= self._short_until_us)
        except ShortOfMemory as short:
            self._wait(short, began_us, now_us())
        except Exception as error:
            logger.warning("the head failed, and is switched off: %s: %s", type(error).__name__, error)
            logger.debug("where it failed", exc_info=True)
            self._heads.stop()
            self._heads, self._takers = None, []
        took_us = now_us() - began_us
        for held in (*step.decoding.values(), *step.prompts.values()):
            held.running.since_us += took_us

    def _wait(self, short: ShortOfMemory, began_us: float, ended_us: float) -> None:
        """Leave it alone, for so long that what ends like this takes EXPLORED_SHARE of the time; said once in a row."""
        if not self._short:
            logger.warning("the head is short of memory, and drafts nothing until there is some: %s", short)
        self._short, self._short_until_us = True, ended_us + (ended_us - began_us) / EXPLORED_SHARE

    def _heed(self, heads: DraftingModel, step: DraftedStep, keeping: bool) -> None:
        """Keep the features of those that take a head's tokens and are not in debt, if of any."""
        sessions = {**step.decoding, **step.prompts} if keeping else {}
        takers = {slot: held for slot, held in sessions.items() if _takes(held) and step.spare_us(held) > 0.0}
        heads.heed(takers)
        self._takers = [held for slot, held in takers.items() if slot in step.decoding]

    def _draft(
        self, heads: DraftingModel, step: DraftedStep, now_us: Callable[[], float], tell: Callable[[], None]
    ) -> None:
        self._idle += 1
        if self._rests(step):
            return
        # Features of a prompt are kept where the head is expected to pay behind it.
        texts = step.decoding if self._keeping else {**step.decoding, **step.prompts}
        asked = [each for slot, held in texts.items() if (each := self._asked(heads, slot, held, step, len(texts)))]
        pays = self._chosen(asked, step, len(texts))[1] > 0
        if not self._keeping:
            self._keep(pays, step, now_us())
            return
        ready = [each for each in asked if each.unread is not None]
        drafted, depth = self._chosen(ready, step, len(texts)) if pays else ((), 0)
        if not depth and self._trying:
            depth = min(PROBE_WINDOW, self._depth.most)
            able = self._depth.able([each.text(depth) for each in ready], depth, len(texts), step.V)
            drafted = [ready[at] for at in able]
        if drafted:
            tell()
            self._propose(heads, drafted, depth, step, now_us)
        if drafted and pays:
            self._idle, self._features_us, self._drafts_us, self._trying = 0, 0.0, 0.0, False
        elif self._idle > (2 if pays or self._trying else 1) * LEAST_BEHIND or (
            drafted and self._drafts_us >= self._features_us
        ):
            self._keeping = self._trying = False
            self._ended_us = now_us()
        elif asked and not pays and not self._trying:
            self._rest = TRIAL_VERDICTS

    def _rests(self, step: DraftedStep) -> bool:
        """Whether it is too soon to think of drafting again, which takes time too; of a text that begins it is not."""
        before, self._beginning = self._beginning, step.beginning
        if self._rest and self._beginning == before:
            self._rest -= 1
            return True
        return False

    def _keep(self, pays: bool, step: DraftedStep, now_us: float) -> None:
        """Keep features from now on, if drafts would pay, or for a try, where what was last in vain is long ago."""
        least_us = self._depth.drafting_us(1, min(PROBE_WINDOW, self._depth.most))
        lost_us, since_us = self._features_us + self._drafts_us, now_us - self._ended_us
        self._trying = not pays and affordable(max(least_us, lost_us), since_us)
        self._keeping = self._trying or (pays and (len(step.beginning) > 0 or affordable(lost_us, since_us)))
        self._rest = 0 if self._keeping else TRIAL_VERDICTS
        if self._keeping:
            self._idle, self._features_us, self._drafts_us = 0, 0.0, 0.0

    def _asked(self, heads: DraftingModel, slot: int, held: Held, step: DraftedStep, sessions: int) -> _Asked | None:
        """The session, if a head's tokens could be tested next and promise more than what is there for nothing."""
        session, source = held.session, held.session.head
        if source is None or not _takes(held) or session.room < 2 or source.proposed:
            return None
        spare_us = step.spare_us(held)
        if spare_us <= 0.0:
            return None
        guess = session.ngram.look() if session.ngram is not None and held.looked else None
        instead = max(0.0, promise(guess) - 1.0)
        if 1.0 + instead >= source.acceptance.expected(self._depth.most):
            return None
        unread = heads.unread(slot)
        bearable = self._depth.readable(spare_us / 2 / sessions)
        reads = 0 if unread is None else int(min(unread, max(LEAST_BEHIND, bearable)))
        return _Asked(slot, session, source, spare_us, unread, reads, instead)

    def _chosen(self, asked: Sequence[_Asked], step: DraftedStep, sessions: int) -> tuple[list[_Asked], int]:
        if not asked:
            return [], 0
        texts = [each.text(self._depth.most) for each in asked]
        places, depth = self._depth.choose(texts, sessions, step.V)
        return [asked[at] for at in places], depth

    def _propose(
        self,
        heads: DraftingModel,
        asked: Sequence[_Asked],
        depth: int,
        step: DraftedStep,
        now_us: Callable[[], float],
    ) -> None:
        """Read what is to be read, draft, and charge all of them alike."""
        began_us = now_us()
        for each in asked:
            if each.unread is not None and each.reads < each.unread:
                heads.skip(each.slot, each.reads)
        if behind := [each.request(depth) for each in asked if each.behind]:
            heads.catch_up(behind)
        drafted = heads.draft([each.request(depth) for each in asked])
        self._short = False
        for each, tokens in zip(asked, drafted, strict=True):
            each.source.propose(tokens)
            each.source.read = True
        took_us, rows = now_us() - began_us, sum(each.behind for each in asked)
        self._drafts_us += took_us
        forwards = max(1, *map(len, drafted))
        charged_us = self._depth.observe(len(asked), forwards, rows, took_us)
        for each in asked:
            each.session.ledger.charge(took_us, 0, 0.0, charged_us * len(step.decoding) / len(asked))


def _takes(held: Held) -> bool:
    """Whether a head may draft for it."""
    return held.session.head is not None and held.session.trusting
