"""A storm: many edges with two sessions each on two verifiers. One is killed under load.

Where each verifier has room for all, both are replaced in turn afterwards. Where one has room for three quarters, some
of its sessions wait there while the other one is away, and some are refused and ask again.

`python -m tests.simulation.storm --edges 500` plays what two cores cannot play with processes.
Every text must be plain decoding's. Times are virtual; a forward takes the same time for any rows.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partialmethod
from itertools import pairwise
from typing import Any
from unittest.mock import patch

from orchestrator.session.output import Output
from specwire.core.messages import Emit
from tests.simulation.checks import Checks
from tests.simulation.loop import SimLoop
from tests.simulation.requests import SimRequest
from tests.simulation.run import Outcome, run
from tests.simulation.scenario import Fault, Scenario
from tests.simulation.services import Model
from verify_service.engine.messages import Opening
from verify_service.engine.session_manager import SessionManager

PER_EDGE, TOKENS, FORWARD_S = 2, 100, 0.25
# When edges begin, and within how many seconds; when the first verifier is killed, and for how long it is away.
BEGIN_S, SPREAD_S, KILL_S, AWAY_S = 0.5, 1.0, 4.0, 4.0
# When the second verifier, and then the first one, is ended in order and started anew.
REPLACED_S = (12.0, 18.0)
# Edges up to which every invariant is held against the parties after every callback.
MOST_WATCHED = 30
MOST_STEPS = 1_000_000_000
# Seconds of a moment in which opens are counted.
MOMENT_S = 0.1


@dataclass(frozen=True, slots=True)
class Storm:
    """What became of it.

    back_s: from the kill until each session had a token that came behind it. pause_s: the longest between two tokens of
    a session, until the update would begin; rolling_pause_s: from then on. opens: of sessions at verifiers, all in all;
    burst: the most in a moment, from a second behind the kill until then, when those come again that found no slot.
    """

    outcome: Outcome
    back_s: float
    pause_s: float
    rolling_pause_s: float
    opens: int
    burst: int


def scenario(edges: int, short: bool, seed: int = 0) -> Scenario:
    """short: of slots; then an eighth of all sessions may wait for one."""
    sessions = edges * PER_EDGE
    requests = tuple(
        SimRequest(
            round(BEGIN_S + SPREAD_S * number / sessions, 3),
            at=number // PER_EDGE,
            prompt=(3 + number % 4, 4, 5),
            max_tokens=TOKENS,
            ignore_eos=True,
            drafting=2,
        )
        for number in range(sessions)
    )
    killed = Fault(KILL_S, "crash", "verifier-0", AWAY_S)
    replaced = (Fault(at, "stop", f"verifier-{1 - number}", 0.5) for number, at in enumerate(REPLACED_S))
    return Scenario(
        seed,
        verifiers=2,
        drafters=0,
        orchestrators=edges,
        slots=sessions * 3 // 4 if short else sessions,
        forward=FORWARD_S,
        delay=(0.005, 0.04),
        queue=max(1, sessions // 8),
        requests=requests,
        faults=(killed,) if short else (killed, *replaced),
    )


def play(asked: Scenario) -> Storm:
    """Never raises for what the project's code does: `outcome.found` says what did not hold."""
    tokens: defaultdict[Output, list[float]] = defaultdict(list)
    opened: list[float] = []
    add, opening = Output.add, SessionManager._open

    def added(self: Output, emit: Emit, *timings: Any) -> None:
        if emit.tokens:
            tokens[self].append(asyncio.get_running_loop().time())
        add(self, emit, *timings)

    def opens(self: SessionManager, link: int, asked: Opening) -> None:
        opened.append(asyncio.get_running_loop().time())
        opening(self, link, asked)

    with ExitStack() as patched:
        patched.enter_context(patch.object(Output, "add", added))
        patched.enter_context(patch.object(SessionManager, "_open", opens))
        patched.enter_context(patch.object(Model, "cost", lambda self, rows: self.seconds))
        patched.enter_context(
            patch.object(SimLoop, "run_until", partialmethod(SimLoop.run_until, most_steps=MOST_STEPS))
        )
        if asked.orchestrators > MOST_WATCHED:
            patched.enter_context(patch.object(Checks, "after_step", lambda self: None))
        outcome = run(asked)
    texts = list(tokens.values())
    first = [next((at for at in text if at > KILL_S), KILL_S) for text in texts]
    pauses = [(then, then - before) for text in texts for before, then in pairwise(text)]
    moments = Counter(int(at / MOMENT_S) for at in opened if KILL_S + 1 < at <= REPLACED_S[0])
    return Storm(
        outcome,
        max(first, default=KILL_S) - KILL_S,
        max((pause for then, pause in pauses if then <= REPLACED_S[0]), default=0.0),
        max((pause for then, pause in pauses if then > REPLACED_S[0]), default=0.0),
        len(opened),
        max(moments.values(), default=0),
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit code: 1 if something did not hold."""
    parser = argparse.ArgumentParser(prog="python -m tests.simulation.storm", description=__doc__)
    parser.add_argument("--edges", type=int, default=500, metavar="N", help="how many (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, metavar="SEED", help="of chance (default: %(default)s)")
    args = parser.parse_args(arguments)
    if args.edges < 1:
        parser.error(f"--edges: must be at least 1, not {args.edges}")
    storms = [(asked, play(asked)) for asked in (scenario(args.edges, short, args.seed) for short in (False, True))]
    for asked, storm in storms:
        print("\n".join(told(asked, storm)), flush=True)
    return 1 if any(storm.outcome.found for _, storm in storms) else 0


def told(asked: Scenario, storm: Storm) -> Iterator[str]:
    ends = ", ".join(f"{count} {end}" for end, count in sorted(storm.outcome.ends.items()))
    yield f"{asked.orchestrators} edges, {asked.sessions} sessions, 2 verifiers of {asked.slots} slots: {ends}"
    yield f"  one is killed, and back after {AWAY_S:g} s: all have text again after {storm.back_s:.1f} s"
    if asked.slots < asked.sessions:
        yield f"  {storm.opens} opens; of those that came again, at most {storm.burst} within {MOMENT_S:g} s"
    else:
        yield f"  both are replaced in turn: the longest pause is {storm.rolling_pause_s:.1f} s"
    yield from storm.outcome.found[:5]


if __name__ == "__main__":
    sys.exit(main())
