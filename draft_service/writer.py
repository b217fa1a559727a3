"""Texts that a drafter writes for callers by itself, by plain decoding, in the forwards that draft for orchestrators.

Drafting goes first. Texts have the slots that no session has; where a session finds none, a text is set aside: what is
written stays, and is fed again, in another slot, before it goes on. Which token comes next depends on the text and its
sampling alone, so being set aside, as being in company, costs time only (and the last bit of a logit).

Belongs to the thread of `draft_service.sessions`, which computes the forwards, and owns the slots.
"""

from __future__ import annotations

from bisect import insort_left, insort_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from draft_service.commands import ReplyLink, WriteText, Written
from specwire.core.law.sampling import History, Sampling, Seen
from specwire.core.messages import TokenLogprobs
from specwire.core.model import Feed
from specwire.core.text import Ending


class TextPlace(NamedTuple):
    """The place behind a text, whose token is to be chosen; see `specwire.lm.law.sampler.NextPlace`."""

    position: int
    sampling: Sampling
    seen: Seen | None
    banned: tuple[int, ...]


# The token at each of the places, from its row of what a forward returned, and its report, if it wants one: `rows` says
# from which. Of tensors: `specwire.lm.law.sampler.choose_plainly`.
Choose = Callable[[Any, Sequence[int], Sequence[TextPlace]], list[tuple[int, TokenLogprobs | None]]]


@dataclass(slots=True, eq=False)
class PlainText:
    """A text that is being written.

    tokens: all of them, the prompt's first. history: the same, counted; only where penalties look at it. slot: None
    while it waits for one.
    """

    link: ReplyLink
    tokens: list[int]
    sampling: Sampling
    ending: Ending
    priority: int
    history: History | None
    slot: int | None = None

    def place(self) -> TextPlace:
        position = len(self.tokens)
        seen = None if self.history is None else self.history.seen()
        return TextPlace(position, self.sampling, seen, self.ending.banned(position))

    def go_on(self, token: int, logprobs: TokenLogprobs | None) -> Written:
        """Add the token that was chosen for its place."""
        _, finish = self.ending.cut(len(self.tokens), (token,))
        self.tokens.append(token)
        if self.history is not None:
            self.history.extend((token,))
        return Written(token, logprobs, finish)


class TextFeed(NamedTuple):
    """What a forward feeds of a text; it wants a row only where that is all that the slot lacks."""

    text: PlainText
    feed: Feed


class Writer:
    """The texts of all callers. `texts`: how many; while there are none, a drafter's step looks no further.

    Invariant: a text of `_running` has a slot, one of `_waiting` has none; the latter are in the order in which they
    get one, by falling priority, then by arrival.
    """

    def __init__(self) -> None:
        self._running: dict[ReplyLink, PlainText] = {}
        self._waiting: list[PlainText] = []
        self.texts = 0

    @property
    def running(self) -> int:
        """How many texts have a slot."""
        return len(self._running)

    @property
    def waiting(self) -> int:
        """How many have none."""
        return len(self._waiting)

    def wants(self, free: Sequence[int]) -> bool:
        """Whether a forward would bring any text on, `free` being the slots that nobody has."""
        return bool(self._running) or bool(self._waiting and free)

    def add(self, asked: WriteText) -> None:
        history = History(asked.tokens) if asked.sampling.penalised else None
        text = PlainText(asked.link, [*asked.tokens], asked.sampling, asked.ending, asked.priority, history)
        insort_right(self._waiting, text, key=_turn)
        self.texts += 1

    def end(self, link: ReplyLink) -> int | None:
        """End a link's text, if it has one; returns the slot that becomes free."""
        text, slot = self._running.pop(link, None), None
        if text is None:
            self._waiting = [each for each in self._waiting if each.link is not link]
        else:
            slot, text.slot = text.slot, None
        self.texts = len(self._running) + len(self._waiting)
        return slot

    def seat(self, free: list[int]) -> None:
        """Give texts that wait the slots that are `free`, which are taken off the list."""
        while free and self._waiting:
            text = self._waiting.pop(0)
            text.slot = free.pop()
            self._running[text.link] = text

    def set_aside(self) -> int | None:
        """The slot of the text that has to wait again, first of its priority; None where no text has a slot."""
        if not self._running:
            return None
        text = max(reversed(self._running.values()), key=_turn)  # of several the one that got its slot last
        del self._running[text.link]
        insort_left(self._waiting, text, key=_turn)
        slot, text.slot = text.slot, None
        return slot

    def feeds(self, cached: Callable[[int], int], most: int) -> list[TextFeed]:
        """What the next forward feeds of them.

        cached: how much a slot holds. most: rows of what is longer than a token; the texts that came first get them.
        """
        feeds, left = list[TextFeed](), most
        for text in self._running.values():
            if text.slot is None:
                continue
            start = cached(text.slot)
            lacks = len(text.tokens) - start
            rows = 1 if lacks == 1 else min(lacks, left)
            left -= rows if lacks > 1 else 0
            if rows:
                fed = text.tokens[start : start + rows]
                feeds.append(TextFeed(text, Feed(text.slot, start, fed, int(rows == lacks))))
        return feeds


def _turn(text: PlainText) -> int:
    return -text.priority
