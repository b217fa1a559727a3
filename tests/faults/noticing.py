"""When whoever has to deal with a fault first knew of it, by its own words."""

from __future__ import annotations

import re
from collections.abc import Sequence

from tests.faults.cells import Cell
from tests.faults.matrix import CLIENTS_LINE, HTTP_LINE, JOINED_LINE, REGISTRYS_LINE
from tests.faults.parts import Service
from tests.faults.place import Place, said_since
from tests.faults.streams import Stream

# Of the one drafter that has dialled in, of the log, of the registry.
LEFT, NO_LOG, NO_REGISTRY = (
    re.compile(form) for form in (" has left: ", ": the log (does not|has lost)", "; what is known stays in use$")
)


def noticed(place: Place, cell: Cell, streams: Sequence[Stream], moment: float) -> float | None:
    """Seconds from `moment`, by the wall's clock, until somebody said so; None where nobody did, or had to."""
    if cell.fault == "none":
        return None
    if cell.where in ("orchestrator", CLIENTS_LINE, HTTP_LINE):
        told = [at for stream in streams for at in stream.breaks if at >= moment]
    else:
        sign = _sign(place, cell)
        told = [at for at, message in said_since(serving(place, cell), moment) if sign.search(message)]
    return max(0.0, min(told) - moment) if told else None


def _sign(place: Place, cell: Cell) -> re.Pattern[str]:
    if "Redis" in cell.where:
        return NO_LOG
    if cell.where == REGISTRYS_LINE:
        return NO_REGISTRY
    if cell.where == JOINED_LINE:
        return LEFT
    victim = re.escape(_victim(place, cell))
    drains = (cell.where, cell.fault) == ("verifier", "graceful stop")
    return re.compile(rf"^{victim} is draining$" if drains else rf"^link to {victim} lost")


def _victim(place: Place, cell: Cell) -> str:
    """Where whoever has to notice has dialled what is lost."""
    lines = place.lines
    if "-" in cell.where:
        return lines.of(cell.where).address
    through = {"verifier": lines.verifier, "drafter": lines.drafter}
    victims = {"verifier": place.verifiers[0], "drafter": place.drafter}
    return (through if serving(place, cell) is place.apart else victims)[cell.where].address


def serving(place: Place, cell: Cell) -> Service:
    """The orchestrator through which the cell's streams go."""
    if cell.where == JOINED_LINE:
        return place.hub
    if cell.where == REGISTRYS_LINE:
        return place.second
    apart = "-" in cell.where or (cell.where, cell.fault) == ("verifier", "restart")
    return place.apart if apart else place.first
