"""How many sessions one verifier holds, by where their drafters are: python -m bench.capacity --help.

A verifier holds so many sessions if 95 % of them have 20 tokens per second or more while so many are always open, and
95 % of all pauses are shorter than 250 ms, in the median of a few runs. All sessions that begin in a run's window
count, however long they take. Devices are emulated, as in `bench.wan.run`: forwards are sleeps. A further
session of a batch lengthens the verifier's forward, and so does each draft token. A drafter in the verifier's box takes
its time from the verifier's device: the two compute in turns.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from itertools import pairwise, product
from pathlib import Path

from bench.batch.sessions import Asked, forget, generate
from bench.harness import RESULTS
from bench.harness.interleave import tracked
from bench.harness.interval import Estimate, percentile
from bench.harness.processes import in_processes
from bench.harness.record import write
from bench.harness.report import Bar, at_least, table
from bench.harness.runs import BenchError, Run
from bench.wan.cells import WanCell
from bench.wan.emulated import SEED
from bench.wan.places import places
from bench.wan.rig import Orchestration, WanPair, rig
from bench.wan.virtual import Software, as_simulated
from specwire import sim
from specwire.client import AsyncClient
from specwire.core.messages import MOST_WINDOW
from specwire.core.policy.estimates import expected_tokens
from specwire.rpc.process import say

OUT = RESULTS / "capacity.json"
LEAST_TOKENS_PER_SECOND, MOST_PAUSE_MS, OF_ALL = 20.0, 250.0, 0.95
DRAFT_MS, ACCEPTANCE = 8.0, 0.8
TOKENS = 128
# Drafters away from the verifier. In its box there is one.
DRAFTERS = 4
# Sessions of each place that are counted, one after the other; over sockets those that begin in so many seconds.
COUNTED = 3
WINDOW_S = 12.0
# Runs of the most sessions that are held, and of the fewest that are not, over sockets.
REPEATS = 3
# Share of d that each further session of a drafter's forward adds, as each further token does.
DRAFT_SLOPE = 0.02
MOST_SESSIONS = 64
V_MS = 30.0
# Of a run over sockets, of which a level that is hardly held takes half a minute.
LEVEL_LIMIT_S = 180.0
NEEDED = 1.6


@dataclass(frozen=True, slots=True)
class EmulatedTarget:
    """V(m, n) = 30 ms (1 + row (draft tokens) + session (n - 1)), of n sessions."""

    session: float
    row: float

    @property
    def name(self) -> str:
        return f"a session {100 * self.session:g} %, a draft token {100 * self.row:g} %"

    @property
    def limit(self) -> float:
        """What drafting may gain at most, by arithmetic: the best window is always at hand, and nothing else costs."""
        return max(self._held(window) for window in range(1, MOST_WINDOW + 1)) / self._held(0)

    def _held(self, window: int) -> int:
        tokens = expected_tokens([ACCEPTANCE] * window, window)
        forwards = tokens * 1000 / LEAST_TOKENS_PER_SECOND / V_MS
        return int((forwards - 1 + self.session) / (self.session + window * self.row))


@dataclass(frozen=True, slots=True)
class CapacityPlacement:
    """Where drafters are. shared: in the verifier's box, on its device."""

    name: str
    rtt_ms: float
    policy: sim.Policy
    shared: bool = False

    @property
    def drafters(self) -> int:
        return 1 if self.shared else DRAFTERS


# Long texts: a session's keys and values are read once, whatever its window. Short ones: all rows cost the same.
LONG, SHORT = EmulatedTarget(0.06, 0.02), EmulatedTarget(0.06, 0.06)
TARGETS = (LONG, SHORT)
WITHOUT = CapacityPlacement("without drafting", 20.0, sim.PLAIN)
# As many branches as two cores play for some 30 emulated sessions; more gain more.
EDGE = sim.parse_policy("auto:2")
NEAR, FAR = CapacityPlacement("edge, 20 ms", 20.0, EDGE), CapacityPlacement("edge, 80 ms", 80.0, EDGE)
BOX = CapacityPlacement("in the verifier's box", 0.0, sim.AUTO, shared=True)
PLACEMENTS = (WITHOUT, NEAR, FAR, BOX)


@dataclass(frozen=True, slots=True)
class CapacityLevel:
    """So many sessions at once. tokens_per_second: of a session, that which 95 % reach, and the median.

    pause_ms: that which 95 % are shorter than. counted: sessions, of `runs`, of which the rest is the median.
    window, forward_ms: draft tokens of a session in a forward, and what that takes; None where it was measured over
    sockets.
    """

    sessions: int
    least: float
    median: float
    pause_ms: float
    counted: int
    runs: int = 1
    window: float | None = None
    forward_ms: float | None = None

    @property
    def held(self) -> bool:
        return self.least >= LEAST_TOKENS_PER_SECOND and self.pause_ms < MOST_PAUSE_MS


@dataclass(frozen=True, slots=True)
class Capacity:
    """The most sessions that are held, and all levels that were tried."""

    target: EmulatedTarget
    placement: CapacityPlacement
    levels: tuple[CapacityLevel, ...]

    @property
    def sessions(self) -> int:
        return max((level.sessions for level in self.levels if level.held), default=0)

    @property
    def best(self) -> CapacityLevel | None:
        return next((level for level in self.levels if level.sessions == self.sessions), None)


def most_held(level: Callable[[int], CapacityLevel], guess: int, repeats: int = 1) -> tuple[CapacityLevel, ...]:
    """Try levels, from `guess` on, until one is held and the next one is not, by so many runs of these two."""
    runs: dict[int, list[CapacityLevel]] = {guess: [level(guess)]}
    step = 1 if runs[guess][0].held else -1
    while 0 < guess <= MOST_SESSIONS and runs[guess][0].held == (step > 0):
        guess = max(0, guess + step)
        step *= 2
        if guess:
            runs[guess] = [level(guess)]
    while True:
        tried = {sessions: _median(runs[sessions]) for sessions in sorted(runs)}
        held = max((n for n, one in tried.items() if one.held), default=0)
        missed = min((n for n, one in tried.items() if not one.held and n > held), default=held + 1)
        if missed - held > 1:
            # One that was run again and is not held after all is most likely too many by one.
            middle = missed - 1 if len(runs[missed]) > 1 else (held + missed) // 2
            runs[middle] = [level(middle)]
            continue
        again = next((n for n in (held, missed) if n in runs and len(runs[n]) < repeats), None)
        if again is None:
            return tuple(tried.values())
        runs[again].append(level(again))


def _median(runs: Sequence[CapacityLevel]) -> CapacityLevel:
    """Of runs of one level."""
    return replace(
        runs[0],
        least=statistics.median(run.least for run in runs),
        median=statistics.median(run.median for run in runs),
        pause_ms=statistics.median(run.pause_ms for run in runs),
        counted=sum(run.counted for run in runs),
        runs=len(runs),
    )


# In virtual time


def simulated(asked: tuple[EmulatedTarget, CapacityPlacement]) -> Capacity:
    target, placement = asked
    guess = round((30.0 / LEAST_TOKENS_PER_SECOND - 1.0) / target.session)
    return Capacity(target, placement, most_held(partial(simulate_level, target, placement), guess))


def simulate_level(target: EmulatedTarget, placement: CapacityPlacement, sessions: int) -> CapacityLevel:
    cell = replace(
        as_simulated(cell_of(target, placement), Software(), TOKENS),
        session_slope=target.session,
        draft_slope=DRAFT_SLOPE,
        shared_host=placement.shared,
    )
    # The first ones are of all lengths, so that sessions do not end together.
    first = [replace(cell, tokens=1 + TOKENS * (number + 1) // sessions) for number in range(sessions)]
    cells = [*first, *[cell] * ((COUNTED + 2) * sessions)]
    batch = sim.simulate_batch(cells, placement.policy, sessions, placement.drafters)
    speeds = [1e6 * (one.tokens - one.first_tokens) / (one.last_us - one.first_us) for one in batch.begun]
    pauses = [pause / 1000 for one in batch.begun for pause in one.pauses_us]
    return level_of(sessions, speeds, pauses, batch.window, batch.forward_us / 1000)


def cell_of(target: EmulatedTarget, placement: CapacityPlacement) -> WanCell:
    return WanCell(placement.rtt_ms, DRAFT_MS, ACCEPTANCE, target.row)


def level_of(
    sessions: int,
    speeds: Sequence[float],
    pauses_ms: Sequence[float],
    window: float | None = None,
    forward_ms: float | None = None,
) -> CapacityLevel:
    least = percentile(speeds, 100 * (1 - OF_ALL))
    pause = percentile(pauses_ms, 100 * OF_ALL)
    return CapacityLevel(sessions, least, percentile(speeds, 50), pause, len(speeds), 1, window, forward_ms)


# Over sockets


def measured(target: EmulatedTarget, placement: CapacityPlacement, guess: int) -> Capacity:
    with serving(target, placement) as address, asyncio.Runner() as runner:
        levels = most_held(lambda sessions: runner.run(_level(address, placement, sessions)), guess, REPEATS)
    return Capacity(target, placement, levels)


@contextmanager
def serving(target: EmulatedTarget, placement: CapacityPlacement) -> Iterator[str]:
    """The processes of a placement; the orchestrator's address."""
    with ExitStack() as owned:
        where = owned.enter_context(places())
        folder = Path(owned.enter_context(tempfile.TemporaryDirectory(prefix="specwire-wan-")))
        started = owned.enter_context(rig(where, emulated(target, placement, folder), [_plan(placement)]))
        started.shape(placement.rtt_ms)
        (address,) = started.addresses.values()
        yield address


def _plan(placement: CapacityPlacement) -> Orchestration:
    """Whether there is drafting, a request says."""
    return Orchestration(placement.policy.name) if placement.policy.drafting else Orchestration()


def emulated(target: EmulatedTarget, placement: CapacityPlacement, folder: Path) -> WanPair:
    cell, ranks = cell_of(target, placement), folder / "ranks"
    ranks.write_text(cell.trace.played(1))
    turns = f":turns={folder / 'device'}" if placement.shared else ""
    verifier = f"scripted:{SEED}:delay_ms={cell.V_ms:g}:row_cost={target.row:g}:session_cost={target.session:g}"
    drafter = f"scripted:{SEED}:delay_ms={DRAFT_MS:g}:row_cost={cell.row_cost:g}:session_cost={DRAFT_SLOPE:g}"
    device = "cloud" if placement.shared else "edge"
    return WanPair(
        f"{verifier}:device=cloud{turns}",
        f"{drafter}:ranks={ranks}:device={device}{turns}",
        slots=MOST_SESSIONS,
        drafters=placement.drafters,
    )


async def _level(address: str, placement: CapacityPlacement, sessions: int) -> CapacityLevel:
    """So many sessions, each followed by the next at once, until all have ended that began within the window."""
    async with AsyncClient(address) as client:
        # A session's tokens take so long where the level is just held.
        begin = time.monotonic() + TOKENS / LEAST_TOKENS_PER_SECOND
        load = CapacityLoad(Asked(client, placement.name, placement.policy.drafting), sessions, begin, begin + WINDOW_S)
        try:
            async with asyncio.timeout(LEVEL_LIMIT_S), asyncio.TaskGroup() as group:
                for place in range(sessions):
                    group.create_task(load.follow(place))
        except TimeoutError:
            raise BenchError(f"{placement.name}: {sessions} sessions: {LEVEL_LIMIT_S:g} s were not enough") from None
    if not load.counted:
        raise BenchError(f"{placement.name}: {sessions} sessions: none began within {WINDOW_S:g} s")
    pauses = [pause for run in load.counted for pause in pauses_ms(run)]
    speeds = [speed(run) for run in load.counted]
    found = level_of(sessions, speeds, pauses)
    say(f"bench: {placement.name}: {sessions} sessions: {found.least:.1f} tokens/s, {found.pause_ms:.0f} ms")
    return found


@dataclass(slots=True)
class CapacityLoad:
    """So many `places`, each with a session, which the next one follows.

    begin, end: of the window, on the monotonic clock. under_way: sessions that began in it; counted: those that ended.
    """

    asked: Asked
    places: int
    begin: float
    end: float
    under_way: int = 0
    counted: list[Run] = field(default_factory=list)

    @property
    def over(self) -> bool:
        """Whether the window is, and nothing that began in it is under way."""
        return time.monotonic() > self.end and not self.under_way

    async def follow(self, place: int) -> None:
        """Sessions of one place. The first ones are of all lengths, so that they do not end together."""
        tokens = 1 + TOKENS * (place + 1) // self.places
        while not self.over:
            counts = self.begin <= time.monotonic() <= self.end
            self.under_way += counts
            session_id, run = await generate(self.asked, (1 + place % 60,), tokens)
            if counts:
                self.under_way -= 1
                self.counted.append(run)
            await forget(self.asked.client, [session_id])
            tokens = TOKENS


def pauses_ms(run: Run) -> list[float]:
    return [(after.received_ns - before.received_ns) / 1e6 for before, after in pairwise(run.arrivals)]


def speed(run: Run) -> float:
    """Tokens per second behind the first arrival."""
    first, last = run.arrivals[0], run.arrivals[-1]
    return 1e9 * (len(run.tokens) - first.tokens) / (last.received_ns - first.received_ns)


# What is told


def bars(found: Sequence[Capacity]) -> list[Bar]:
    """Of targets whose forward allows so much: nobody can beat arithmetic."""
    by_place = {(one.target, one.placement): one.sessions for one in found}
    return [
        at_least(f"{target.name}: sessions, edge at 20 ms / without", _exact(by_place[target, NEAR] / without), NEEDED)
        for target in TARGETS
        if target.limit >= NEEDED
        if (without := by_place.get((target, WITHOUT), 0)) and (target, NEAR) in by_place
    ]


def _exact(value: float) -> Estimate:
    return Estimate(value, value, value, 1.0)


def bound(one: Capacity) -> float | None:
    """1 + k d / V: what a drafter away may gain over one that takes its time from the verifier's device."""
    level = one.best
    if level is None or level.window is None or level.forward_ms is None:
        return None
    together = DRAFT_MS * (1 + DRAFT_SLOPE * (level.sessions - 1))
    return 1 + level.window * together / level.forward_ms


def report(found: Sequence[Capacity], virtual: Sequence[Capacity]) -> str:
    expected = {(one.target, one.placement): one for one in virtual}
    head = ("a verifier's forward, 30 ms and", "drafters", "sessions", "simulated", "/ without", "pause p95", "bound")
    measured_at = {(one.target, one.placement): one.sessions for one in found}
    rows = []
    for (target, placement), one in expected.items():
        sessions, without = (measured_at.get((target, each)) for each in (placement, WITHOUT))
        shown = next((each for each in found if (each.target, each.placement) == (target, placement)), one)
        rows.append(
            (
                target.name,
                placement.name,
                "-" if sessions is None else str(sessions),
                str(one.sessions),
                f"{(sessions or one.sessions) / (without or expected[target, WITHOUT].sessions):.2f}",
                "-" if shown.best is None else f"{shown.best.pause_ms:.0f} ms",
                f"{limit:.2f}" if placement in (NEAR, FAR) and (limit := bound(one)) else "",
            )
        )
    limits = {target: target.limit for target, _ in expected}
    said = [
        *table(head, rows),
        "bound: 1 + k d / V, of a drafter away over one in the box, as simulated",
        *(f"{target.name}: arithmetic allows {limit:.2f} times without" for target, limit in limits.items()),
    ]
    return "\n".join([*said, *(_judged(bar) for bar in bars(found))])


def _judged(bar: Bar) -> str:
    return f"{'holds' if bar.holds else 'MISSED'}: {bar.name} {bar.value:.2f} >= {bar.needed:g}"


def parser() -> argparse.ArgumentParser:
    line = argparse.ArgumentParser(
        prog="python -m bench.capacity", description="How many sessions a verifier holds, by where drafters are."
    )
    line.add_argument("--virtual", action="store_true", help="in virtual time only; nothing is written")
    line.add_argument("--out", type=Path, default=OUT, metavar="FILE", help="JSON")
    return line


def main(argv: Sequence[str] | None = None) -> int:
    args = parser().parse_args(argv)
    places_of = list(product(TARGETS, PLACEMENTS))
    virtual = list(tracked(in_processes(simulated, places_of), len(places_of), "placements in virtual time"))
    found: list[Capacity] = []
    try:
        for one in virtual if not args.virtual else ():
            found.append(measured(one.target, one.placement, max(1, one.sessions)))
    except BenchError as error:
        say(f"bench: error: {error}")
        return 1
    if found:
        write(args.out, written(found, virtual), args, [])
    print(report(found, virtual))
    return 0 if all(bar.holds for bar in bars(found)) else 1


def written(found: Sequence[Capacity], virtual: Sequence[Capacity]) -> dict[str, object]:
    def shown(one: Capacity) -> dict[str, object]:
        return {
            "target": asdict(one.target),
            "placement": one.placement.name,
            "sessions": one.sessions,
            "bound": bound(one),
            "limit": one.target.limit,
            "levels": [asdict(level) for level in one.levels],
        }

    return {
        "needs": {"tokens_per_second": LEAST_TOKENS_PER_SECOND, "pause_ms": MOST_PAUSE_MS, "of_all": OF_ALL},
        "measured": [shown(one) for one in found],
        "simulated": [shown(one) for one in virtual],
        "bars": [asdict(bar) for bar in bars(found)],
    }


if __name__ == "__main__":
    sys.exit(main())
