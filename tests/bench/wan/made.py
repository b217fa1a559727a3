"""Made-up sessions and cells for tests that need no process."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from bench.harness.runs import Run, Sample
from bench.wan.cells import SHOWN, WanCell
from bench.wan.disciplines import CHAIN, DEFAULT, PLAIN, STREAM_WAIT, TEXTBOOK, measured_in
from bench.wan.emulated import EmulatedTimes
from bench.wan.virtual import ExpectedCell
from bench.wan.wire import Hop, Wire

TOKENS = tuple(range(100))
SPEEDS = {PLAIN: 33.0, TEXTBOOK: 24.0, STREAM_WAIT: 32.0, CHAIN: 34.0, DEFAULT: 43.0}
SETTINGS = {
    TEXTBOOK: "textbook:8",
    STREAM_WAIT: "stream-wait:1,16",
    "optimum of chains": "stream:2,32",
    "optimum": "stream:2,32,0,4",
}


def samples(speeds: Mapping[str, Sequence[float]], first_s: float = 0.115) -> list[Sample]:
    """Sessions of 100 tokens, one for each speed."""
    return [
        Sample(repeat, 0, row, Run(TOKENS, len(TOKENS) / speed, first_s, 50, tested=80, accepted=60))
        for row, each in speeds.items()
        for repeat, speed in enumerate(each)
    ]


def steady(speeds: Mapping[str, float], repeats: int = 7) -> list[Sample]:
    return samples({row: [speed] * repeats for row, speed in speeds.items()})


def expected(cell: WanCell = SHOWN, optimum_of_chains: float = 35.0, optimum: float = 44.0) -> ExpectedCell:
    speeds = {name: SPEEDS[name] for name in measured_in(cell)}
    return ExpectedCell(cell, speeds, dict(SETTINGS), optimum_of_chains, optimum)


def measured(speeds: Mapping[str, float] = SPEEDS, cell: WanCell = SHOWN) -> EmulatedTimes:
    known = {name: speeds[name] for name in measured_in(cell) if name in speeds}
    return EmulatedTimes(expected(cell), steady(known), {"0.5": 0.1})


def wire(bytes_per_proposed: float = 11.0) -> Wire:
    up = Hop("orchestrator to verifier", {"proposals": 400 * bytes_per_proposed}, {"proposals": 400}, 100)
    return Wire("greedy", (up, Hop("verifier to orchestrator", {"verdicts": 2000.0}, {"verdicts": 100}, 80)), 100)
