"""When whoever has to deal with a fault first knew of it, by its own words."""

from __future__ import annotations

import re
from collections.abc import Sequence

from tests.faults.cells import Cell
from tests.faults.matrix import CLIENTS_LINE, HTTP_LINE, JOINED_LINE
from tests.faults.parts import Service
from tests.faults.place import Place, said_since
from tests.faults.streams import Stream

LOST, DRAINING, LEFT, NO_LOG = (
    re.compile(form) for form in (r"^link to \S+ lost", " is draining$", " has left: ", ": the log (does not|has lost)")
)


def noticed(place: Place, cell: Cell, streams: Sequence[Stream], moment: float) -> float | None:
    """Seconds from `moment`, by the wall's clock, until somebody said so; None where nobody did."""
    if cell.where in ("orchestrator", CLIENTS_LINE, HTTP_LINE):
        told = [at for stream in streams for at in stream.breaks if at >= moment]
    else:
        sign = _sign(cell)
        told = [at for at, message in said_since(serving(place, cell), moment) if sign.search(message)]
    return max(0.0, min(told) - moment) if told else None


def _sign(cell: Cell) -> re.Pattern[str]:
    if "Redis" in cell.where:
        return NO_LOG
    if cell.where == JOINED_LINE:
        return LEFT
    return DRAINING if (cell.where, cell.fault) == ("verifier", "graceful stop") else LOST


def serving(place: Place, cell: Cell) -> Service:
    """The orchestrator through which the cell's streams go."""
    if cell.where == JOINED_LINE:
        return place.hub
    apart = "-" in cell.where or (cell.where, cell.fault) == ("verifier", "restart")
    return place.apart if apart else place.first
