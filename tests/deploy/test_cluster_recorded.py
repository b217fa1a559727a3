"""The policy on recorded load: sessions that a deployment on a Ray cluster served, and what its autoscaler saw.

`python -m tests.integration.scaled_load tests/deploy/recorded_load.json` recorded it.
"""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from deploy.cluster.scaling import PoolLoad, ScalingState, decide
from deploy.cluster.schema import ScalingRule, parse
from tests.deploy.pool_model import BEAT_S, PoolModel

RECORD: dict[str, Any] = json.loads((Path(__file__).parent / "recorded_load.json").read_text())
SCALING: dict[str, float] = RECORD["scaling"]
LEAST, MOST = RECORD["bounds"]
SESSIONS = sorted((each["at"], each["seconds"]) for each in RECORD["sessions"])
FILE = f"""
redis: redis://127.0.0.1:6379/0
pools:
  target:
    {{kind: verify, model: "scripted:7", min_replicas: {LEAST}, max_replicas: {MOST}, scaling: {json.dumps(SCALING)}}}
"""
CONFIG = parse(FILE)
EVERY_S = 1.0
# From then on few sessions come.
CROWD_OVER_S = 55.0
# Behind the last session: long enough to shrink to the least.
AFTER_S = 60.0


def start_s() -> float:
    """How long the first replica that was asked for took until it served."""
    looks = RECORD["looks"]
    asked = next(look["at"] for look in looks if look["wanted"] > look["reading"]["ready"])
    return float(next(look["at"] for look in looks if look["reading"]["ready"] > LEAST) - asked)


def played(config_text: str = FILE, sessions: list[tuple[float, float]] = SESSIONS) -> PoolModel:
    model = PoolModel(parse(config_text), RECORD["slots"], start_s())
    model.play(sessions, sessions[-1][0] + AFTER_S)
    return model


@pytest.fixture(scope="module")
def model() -> PoolModel:
    """Give the recorded sessions, played again."""
    return played()


def test_what_was_seen_leads_to_what_was_done() -> None:
    memory = ScalingState()
    rule = ScalingRule(LEAST, MOST, **SCALING)
    for look in RECORD["looks"]:
        wanted, memory = decide(rule, memory, PoolLoad(**look["reading"]), look["at"])
        assert wanted == look["wanted"], look


def moves(counts: list[int]) -> list[int]:
    return [after - before for before, after in pairwise(counts) if after != before]


def test_it_grew_once_and_shrank_once(model: PoolModel) -> None:
    """As it was recorded, and as it is played again: one crowd, so one way up and one way down."""
    recorded = [look["reading"]["replicas"] for look in RECORD["looks"]]
    for counts in (recorded, [count for _, count in model.counts]):
        signs = [move > 0 for move in moves(counts)]
        assert (max(counts), counts[-1]) == (MOST, LEAST)
        assert signs == sorted(signs, reverse=True)
        assert all(move == -1 for move in moves(counts) if move < 0)


def test_nobody_waits_longer_than_a_replica_takes_to_come(model: PoolModel) -> None:
    """A crowd is seen, confirmed as long as the rule says, and served once a replica is there, or a slot is free."""
    longest = max(seconds for _, seconds in SESSIONS)
    bound = SCALING["grow_after_s"] + 2 * EVERY_S + BEAT_S + start_s() + longest
    recorded = [(each["at"], each["first_s"]) for each in RECORD["sessions"]]
    assert len(model.waits) == len(recorded)
    for waits in (model.waits, recorded):
        assert max(waited for _, waited in waits) <= bound
        assert max(waited for came, waited in waits if came > CROWD_OVER_S) <= SCALING["queue_s"]


def test_the_model_waits_as_the_deployment_did(model: PoolModel) -> None:
    """Not to the second, but as many sessions, within a quarter: else the bounds above were of something else."""
    limit = SCALING["queue_s"]
    recorded = sum(each["first_s"] > limit for each in RECORD["sessions"])
    assert abs(sum(waited > limit for _, waited in model.waits) - recorded) <= len(SESSIONS) / 4


def test_without_the_policy_they_would_wait_far_longer(model: PoolModel) -> None:
    alone = played(FILE.replace(f"max_replicas: {MOST}", "max_replicas: 1"))
    assert max(waited for _, waited in alone.waits) > 2 * max(waited for _, waited in model.waits)


@pytest.mark.parametrize("speed", [0.5, 2.0])
def test_other_speeds_do_not_make_it_flap(speed: float) -> None:
    """The same sessions, denser and thinner: it never shrinks and grows again within the time it shrinks after."""
    model = played(sessions=[(at / speed, seconds) for at, seconds in SESSIONS])
    changed = [(at, after - before) for (_, before), (at, after) in pairwise(model.counts) if after != before]
    for (earlier, down), (later, up) in pairwise(changed):
        assert not (down < 0 < up and later - earlier < SCALING["shrink_after_s"] / 2)
