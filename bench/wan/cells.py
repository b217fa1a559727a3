"""The grid: round trips, target, drafter, acceptance; and the cells of it that are measured over real sockets."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import product

from bench.wan.traces import GREEDY, Ranked, acceptance, ranked, with_ranks

RTTS_MS = (0.0, 10.0, 20.0, 50.0, 80.0, 120.0, 200.0)
V_MS = 30.0
DRAFTS_MS = (8.0, 3.0, 1.0)
SLOPES = (0.0, 0.02, 0.05)
ACCEPTANCES = (0.4, 0.6, 0.8, 0.9)
TOKENS = 256


# What each further token that a drafter's forward extends adds to it: a GPU's, and a CPU's.
LIGHT, HEAVY = 0.02, 0.10


@dataclass(frozen=True, slots=True)
class WanCell:
    """An emulated place and time: V(m) = V_ms (1 + slope (m - 1)), d(W) = draft_ms (1 + row_cost (W - 1))."""

    rtt_ms: float
    draft_ms: float
    acceptance: float
    slope: float
    V_ms: float = V_MS
    row_cost: float = LIGHT

    @property
    def name(self) -> str:
        return f"R{self.rtt_ms:g}-d{self.draft_ms:g}-a{self.acceptance:g}-s{self.slope:g}-b{self.row_cost:g}"

    @property
    def trace(self) -> Ranked:
        """What the drafter thinks of each output token."""
        return with_ranks(typical_trace(), self.acceptance)

    def heavy(self) -> WanCell:
        """The same with a drafter whose further tokens cost more."""
        return replace(self, row_cost=HEAVY)


def grid() -> Iterator[WanCell]:
    for slope, draft_ms, wanted, rtt_ms in product(SLOPES, DRAFTS_MS, ACCEPTANCES, RTTS_MS):
        yield WanCell(rtt_ms, draft_ms, wanted, slope)


# Half of the corners of (R, d, a, s), so that every two of them are seen in all four ways; then the middle.
CORNERS = (
    *(
        WanCell(0.0, 8.0, 0.4, 0.0),
        WanCell(0.0, 8.0, 0.9, 0.05),
        WanCell(0.0, 1.0, 0.4, 0.05),
        WanCell(0.0, 1.0, 0.9, 0.0),
    ),
    *(
        WanCell(200.0, 8.0, 0.4, 0.05),
        WanCell(200.0, 8.0, 0.9, 0.0),
        WanCell(200.0, 1.0, 0.4, 0.0),
        WanCell(200.0, 1.0, 0.9, 0.05),
    ),
)
MIDDLE = (
    *(
        WanCell(20.0, 8.0, 0.8, 0.0),
        WanCell(50.0, 8.0, 0.8, 0.0),
        WanCell(80.0, 8.0, 0.8, 0.0),
        WanCell(120.0, 3.0, 0.8, 0.02),
    ),
    *(
        WanCell(10.0, 3.0, 0.6, 0.02),
        WanCell(20.0, 1.0, 0.8, 0.02),
        WanCell(80.0, 3.0, 0.6, 0.0),
        WanCell(80.0, 1.0, 0.9, 0.05),
    ),
)
# A far drafter that is fast and not always right. A drafter in the verifier's box, for comparison.
FAR_AND_FAST, AT_HOME = WanCell(80.0, 3.0, 0.8, 0.0), WanCell(0.0, 8.0, 0.8, 0.0)
LIGHT_CELLS = (*CORNERS, *MIDDLE, FAR_AND_FAST, AT_HOME)
NAMED = (*LIGHT_CELLS, *(cell.heavy() for cell in LIGHT_CELLS))
# Where pipelining must show: the bars of this cell are stricter.
SHOWN = WanCell(80.0, 8.0, 0.8, 0.0)
# The default this far away is compared with textbook speculation AT_HOME.
AWAY = WanCell(20.0, 8.0, 0.8, 0.0)


@cache
def typical_trace() -> Ranked:
    """The recorded trace whose acceptance is nearest to that of all together: the least is turned in it."""
    traces = ranked(GREEDY)
    wanted = acceptance("".join(trace.bits for trace in traces))
    return min(traces, key=lambda trace: abs(acceptance(trace.bits) - wanted))


def chosen(names: Sequence[str]) -> tuple[WanCell, ...]:
    """Those of NAMED that are meant; all of them for no names. ValueError names one that is not there."""
    by_name = {cell.name: cell for cell in NAMED}
    unknown = [name for name in names if name not in by_name]
    if unknown:
        raise ValueError(f"cells: no cell {unknown[0]!r}; there are {', '.join(by_name)}")
    return tuple(by_name[name] for name in names) if names else NAMED
