"""The cells of the failover matrix; its rows are in `tests.faults.matrix`."""

from __future__ import annotations

from dataclasses import dataclass

STOPPED_S = 10.0
# Seconds of a fault that only keepalive notices: 10 s, as elsewhere, would end just when it does.
HELD_S = 13.0
# How long Redis is away where it does not come back at once, and a link is cut.
AWAY_S = 3.0
CUT_S = 5.0
# Seconds that the matrix's HTTP client waits for an event; comments on a silent stream (`--sse-keep-alive`) come later.
HTTP_SILENT_S = 5.0

NOTHING = "nothing"
PAUSE = "pause"


@dataclass(frozen=True, slots=True)
class Notice:
    """Within how many seconds, and by what."""

    within_s: float
    how: str

    def __str__(self) -> str:
        return f"{self.within_s:g} s: {self.how}"


# The end of a connection is noticed at once; the second is for processes that have no core just then.
ENDED = Notice(1.0, "connection ends")
SILENT = Notice(11.0, "keepalive")
NO_ANSWER = Notice(3.0, "no answer in 2 s")
NO_EVENT = Notice(HTTP_SILENT_S + 1.0, f"the client's read timeout, {HTTP_SILENT_S:g} s")
LOOK = Notice(2.0, "next poll")
NO_LOOK = Notice(6.0, "two polls unanswered")


@dataclass(frozen=True, slots=True)
class Cell:
    """One fault at one place.

    seen: by the client whose text streams. noticed: by whoever has to. then: who goes on, and how.
    bound_s: the longest pause on a machine that is not overloaded, the time away included; None: a step more than text
        takes between two chunks without the fault.
    also: further tests, FILE::FUNCTION within tests/faults, or FOLDER/FILE::FUNCTION within tests.
    outlasted: nobody can go on while the fault lasts, so that `bound_s` has its STOPPED_S in it.
    """

    where: str
    fault: str
    seen: str
    noticed: Notice
    then: str
    bound_s: float | None
    also: tuple[str, ...] = ()
    outlasted: bool = False

    @property
    def name(self) -> str:
        return f"{self.where}, {self.fault}".replace(" ", "-").replace(",", "")

    @property
    def pause(self) -> str:
        """`bound_s`, for people."""
        return "1 step" if self.bound_s is None else f"{self.bound_s:g}"

    @property
    def about_drafter(self) -> bool:
        return "drafter" in self.where

    @property
    def unseen(self) -> bool:
        """Whether no client's text may wait for it."""
        return self.bound_s is None

    @property
    def silent(self) -> bool:
        """Nobody answers, and no connection breaks, for STOPPED_S."""
        return self.fault in ("SIGSTOP", "stall")

    @property
    def over_at_once(self) -> bool:
        """Whether it may be over before anybody notices it."""
        return self.fault == "reset" or (self.where, self.fault) == ("Redis", "restart")


def held_s(cell: Cell) -> float:
    """Seconds for which nobody answers."""
    return HELD_S if cell.silent and cell.noticed.within_s >= SILENT.within_s else STOPPED_S
