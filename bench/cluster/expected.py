"""The simulator's figure for a row: the same pool of emulated devices, and software that takes no time."""

from __future__ import annotations

import numpy as np

from bench.cluster.crowd import prompt
from bench.cluster.settings import AGREE, DRAFT_MS, FLOOD, PROMPT, SLOPE, SLOTS, V_MS, WIDE, ClusterRow
from specwire import sim
from specwire.lm.scripted import Script

# All at once, nearly: the simulator's sessions arrive by chance.
ARRIVALS_PER_SECOND = 10_000.0


def simulated(row: ClusterRow) -> float | None:
    """Tokens per second; None where the devices are not what limits it."""
    if row == FLOOD:
        return None
    slope = 0.0 if row in WIDE else SLOPE
    fleet = sim.SimFleet(
        sessions=row.at_once,
        verifiers=row.verifiers,
        drafters=1,
        V_us=1000 * V_MS,
        slope=slope,
        draft_us=1000 * DRAFT_MS,
        arrivals_per_second=ARRIVALS_PER_SECOND,
        rtts_us=(0.0,),
        acceptance=AGREE,
        traces=[trace(row, turn) for turn in range(row.at_once)] if row.drafting else (),
        prompt=PROMPT,
        prefill_us=1000 * V_MS * slope,
        tokens=row.tokens,
        slots=row.at_once if row in WIDE else SLOTS,
    )
    return sim.simulate_fleet(fleet, sim.AUTO if row.drafting else sim.PLAIN).tokens_per_second


def trace(row: ClusterRow, turn: int) -> tuple[bool, ...]:
    """Of a row's session: whether the drafter's guess is the target's token, all along the text.

    A row ends with its slowest session, so the simulation must have the same right guesses.
    """
    target, drafter = Script.parse(row.model), Script.parse(f"{row.model}:agree={AGREE}")
    state, right = 0, []
    for token in prompt(turn):
        state = target.extend(state, token)
    for _ in range(row.tokens):
        token = int(np.argmax(target.logits(state)))
        right.append(int(np.argmax(drafter.logits(state))) == token)
        state = target.extend(state, token)
    return tuple(right)
