"""The simulator: the real engine, a real drafter's sessions and the core, under a virtual clock.

No deciding code is written a second time here; a model's forward takes the time that a cell says.

    from specwire.sim import AUTO, PLAIN, Cell, best_textbook, fixed, optimum, simulate, stream_wait, textbook

    cell = Cell(V_us=30_000, slope=0.02, draft_us=8_000, rtt_us=80_000, acceptance=0.8, seed=1, tokens=256)
    result = simulate(cell, AUTO)  # planned by the verifier; also CHAIN (it never branches), PLAIN, textbook(k),
                                   # fixed("stream:2,32,4"), fixed("lockstep:4"), stream_wait(chunk, run_ahead),
                                   # parse_policy("...")
    result.tokens_per_second, result.elapsed_us, result.ledger_us, result.plans  # plans: (time_us, reason, pace)

    again = simulate(cell, learnt=result.learnt)  # the next session starts from what this one learnt

    best = optimum(cell)               # Best(policy, result) of a sweep of fixed settings that do not branch
    optimum_of_trees(cell, best)       # Best(policy, result) of some that do
    best_textbook(cell)                # Best(policy, result) over k
    optimum_over(cells)                # BestOfAll(policy, tokens_per_second) over several sessions

    headed = replace(cell, head=(0.8, 0.7, 0.6), head_us=3_000)  # beside the target; simulate(headed, HEADS): alone

    simulate_batch(cells, AUTO, sessions=8)  # Batch(tokens, elapsed_us, plans): cells in turn, a full batch
    simulate_fleet(Fleet(sessions=1000, verifiers=2, drafters=8, V_us=..., ...), AUTO)  # a pool, Poisson arrivals

A cell is one session. Times are microseconds. The same cell and policy give the same result, always.
"""

from specwire.sim.fleet import FleetResult, SimFleet, simulate_fleet
from specwire.sim.optimum import Best, BestOfAll, best_textbook, optimum, optimum_of_trees, optimum_over
from specwire.sim.simulation import (
    AUTO,
    CHAIN,
    HEADS,
    PLAIN,
    RULE,
    Batch,
    Cell,
    InvalidCell,
    Policy,
    Result,
    fixed,
    parse_policy,
    simulate,
    simulate_batch,
    stream_wait,
    textbook,
)

__all__ = [
    "AUTO",
    "CHAIN",
    "HEADS",
    "PLAIN",
    "RULE",
    "Batch",
    "Best",
    "BestOfAll",
    "Cell",
    "FleetResult",
    "InvalidCell",
    "Policy",
    "Result",
    "SimFleet",
    "best_textbook",
    "fixed",
    "optimum",
    "optimum_of_trees",
    "optimum_over",
    "parse_policy",
    "simulate",
    "simulate_batch",
    "simulate_fleet",
    "stream_wait",
    "textbook",
]
