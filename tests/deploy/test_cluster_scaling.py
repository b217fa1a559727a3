"""How many replicas a load gets: single decisions, and a simulated day."""

from __future__ import annotations

import math
import random
from dataclasses import asdict, replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deploy.cluster.commands import scaling
from deploy.cluster.fleet import are_known
from deploy.cluster.rollout import ReplicaName, ReplicaPlace
from deploy.cluster.scaling import RETRY_S, PoolLoad, ScalingActions, ScalingController, ScalingState, decide, every
from deploy.cluster.schema import ScalingRule, parse
from specwire.registry.entry import Load, Role, ServedModel, ServiceEntry, ServiceState

RULE = ScalingRule(least=1, most=4)
SLOTS = 16
STEP_S = 5.0


def reading(replicas: int, demand: int) -> PoolLoad:
    slots = replicas * SLOTS
    return PoolLoad(replicas, min(demand, slots), max(0, demand - slots), slots)


def play(rule: ScalingRule, demands: list[int], count: int = 1) -> list[int]:
    """Replicas after each look at the demand of that moment; what is asked for is there at the next."""
    memory, counts = ScalingState(), []
    for look, demand in enumerate(demands):
        count, memory = decide(rule, memory, reading(count, demand), look * STEP_S)
        counts.append(count)
    return counts


def looked(rule: ScalingRule, seen: list[PoolLoad]) -> list[int]:
    """What each look asks for."""
    memory, counts = ScalingState(), []
    for look, each in enumerate(seen):
        count, memory = decide(rule, memory, each, look * STEP_S)
        counts.append(count)
    return counts


def test_a_queue_that_stays_gets_what_it_needs_at_once() -> None:
    counts = play(RULE, [40] * 10)
    assert counts[:3] == [1, 1, 3]
    assert set(counts[2:]) == {3}
    assert math.ceil(40 / (RULE.high * SLOTS)) == 3


@pytest.mark.parametrize(("demands", "count"), [([20, 10] * 40, 1), ([20] * 500, 2)])
def test_a_queue_that_passes_changes_nothing_nor_does_what_is_between_high_and_low(
    demands: list[int], count: int
) -> None:
    assert set(play(RULE, demands, count)) == {count}


def test_an_empty_pool_shrinks_slowly_one_by_one() -> None:
    counts = play(RULE, [0] * 200, count=4)
    looks = [counts.index(wanted) for wanted in (3, 2, 1)]
    assert looks == [60, 120, 180]
    assert counts[-1] == 1


def test_sessions_that_wait_too_long_count_although_there_are_slots() -> None:
    waits = replace(reading(2, 20), queue_s=RULE.queue_s + 0.1)
    assert looked(RULE, [waits] * 3) == [2, 2, 3]
    assert looked(RULE, [replace(waits, queue_s=RULE.queue_s)] * 9) == [2] * 9


def test_nothing_shrinks_while_somebody_waits() -> None:
    quiet = replace(reading(2, 0), queue_s=RULE.queue_s + 0.1, replicas=2)
    rule = replace(RULE, most=2)
    assert looked(rule, [quiet] * 100) == [2] * 100
    assert min(looked(rule, [replace(quiet, queue_s=0.0)] * 100)) == 1


def test_what_is_being_started_is_not_asked_for_twice() -> None:
    starting = PoolLoad(2, 16, 8, 16, queue_s=9.0, ready=1)
    assert looked(RULE, [starting] * 20) == [2] * 20
    there = PoolLoad(2, 16, 16, 32, queue_s=9.0)
    assert looked(RULE, [*[starting] * 9, there, there, there]) == [2] * 11 + [3]


def test_what_is_away_does_not_keep_a_pool_large() -> None:
    assert looked(RULE, [PoolLoad(3, 2, 0, 32, ready=2)] * 61)[-1] == 2


@pytest.mark.parametrize(("there", "least", "most", "wanted"), [(0, 1, 4, 1), (6, 1, 4, 4), (1, 2, 4, 2)])
def test_bounds_are_kept_at_once(there: int, least: int, most: int, wanted: int) -> None:
    assert decide(ScalingRule(least, most), ScalingState(), reading(there, 5), 0.0)[0] == wanted


def test_replicas_that_say_nothing_are_left_alone() -> None:
    assert decide(RULE, ScalingState(0.0, 0.0), PoolLoad(2, 0, 0, 0), 1e9)[0] == 2


@pytest.mark.parametrize(
    "wrong",
    [
        {"least": 2, "most": 1},
        {"least": 0, "most": 0},
        {"high": 0.5, "low": 0.8},
        {"high": 1.2},
        {"grow_after_s": -1.0},
        {"queue_s": -1.0},
    ],
)
def test_a_rule_that_makes_no_sense(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="must "):
        replace(RULE, **wrong)  # type: ignore[arg-type]  # of a test


def test_a_day_of_load_is_followed_without_flapping() -> None:
    """A wave of two hours with noise, four times: who waits is few, and replicas come and go with the wave only."""
    noise = random.Random(11)
    demands = [
        max(0, round(26 + 24 * math.sin(look * STEP_S / 7200 * math.tau) + noise.gauss(0, 2)))
        for look in range(4 * 1440)
    ]
    counts = play(RULE, demands)
    moves = sum(1 for before, after in pairwise(counts) if before != after)
    waiting = sum(1 for count, demand in zip(counts, demands, strict=True) if demand > count * SLOTS)
    assert {1, 4} <= set(counts)
    assert moves <= 4 * 2 * 4
    assert waiting <= len(demands) // 50
    assert sum(counts) < 0.85 * 4 * len(counts)


@given(demand=st.integers(0, 64), count=st.integers(1, 4))
def test_a_steady_load_comes_to_rest(demand: int, count: int) -> None:
    counts = play(RULE, [demand] * 400, count)
    assert len(set(counts[-150:])) == 1


# ----------------------------------------------------------------------------------------------------------------------
# What an autoscaler asks for, given what it sees of the replicas and what they say in the registry.

CONFIG = parse("""
redis: redis://127.0.0.1:6379/0
pools:
  large: {kind: verify, model: "scripted:7", min_replicas: 0, max_replicas: 4, options: {slots: 4, grace: 20}}
  fixed: {kind: verify, model: "scripted:8"}
  small: {kind: draft, model: "scripted:9", max_replicas: 3}
""")
LARGE, _, SMALL, _ = CONFIG.groups
START_S, MARGIN_S = 600.0, 30.0
FULL, IDLE = Load(4, 0, 0), Load(0, 0, 4)


def large(number: int, digest: str = LARGE.digest) -> ReplicaName:
    return ReplicaName("large", digest, number)


def small(number: int) -> ReplicaName:
    return ReplicaName("small", SMALL.digest, number)


class Site:
    """Replicas and what they say; orders are carried out at once."""

    def __init__(self) -> None:
        self.places: dict[ReplicaName, ReplicaPlace | None] = {}
        self.loads: dict[ReplicaName, Load] = {}
        self.others: list[ServiceEntry] = []
        self.now = 1000.0
        self._controller = ScalingController(CONFIG, START_S, MARGIN_S)

    def serve(self, name: ReplicaName, load: Load) -> None:
        self.places[name], self.loads[name] = ReplicaPlace(f"{name.group}:{name.number + 1}", "node"), load

    def look(self, passed: float = 5.0) -> ScalingActions:
        self.now += passed
        orders = self._controller.look(self.places, self._entries(), self.now)
        for name in orders.start:
            self.places[name] = None
        for name in orders.kill:
            self.places.pop(name, None)
        for name in orders.drain:
            place = self.places[name]
            self.places[name] = place and replace(place, draining=True)
        return orders

    def looks(self, seconds: float) -> list[ScalingActions]:
        return [self.look() for _ in range(round(seconds / 5))]

    def _entries(self) -> list[ServiceEntry]:
        found = []
        for number, (name, load) in enumerate(sorted(self.loads.items())):
            place = self.places.get(name)
            if place is not None and place.address:
                role = Role.DRAFTER if name.group == "small" else Role.VERIFIER
                state = ServiceState.DRAINING if place.draining else ServiceState.SERVING
                found.append(ServiceEntry(f"{number:032x}", role, place.known_as, slots=4, load=load, state=state))
        return found + self.others


@pytest.fixture
def site() -> Site:
    """Give one with a small replica, which the pool cannot be without."""
    site = Site()
    site.serve(small(0), IDLE)
    return site


def started(orders: list[ScalingActions]) -> list[ReplicaName]:
    return [name for each in orders for name in each.start]


def drained(orders: list[ScalingActions]) -> list[ReplicaName]:
    return [name for each in orders for name in each.drain]


def test_a_full_pool_grows_and_its_new_replica_is_waited_for(site: Site) -> None:
    site.serve(large(0), FULL)
    assert started(site.looks(15)) == [large(1)]
    assert started(site.looks(300)) == []
    site.serve(large(1), FULL)
    assert started(site.looks(15)) == [large(2)]


def test_the_emptiest_goes_and_of_equals_the_newest_and_its_name_is_not_given_again_before_it_has_gone(
    site: Site,
) -> None:
    for number, running in enumerate((0, 0, 1)):
        site.serve(large(number), Load(running, 0, 4 - running))
    assert drained(site.looks(305)) == [large(1)]
    for number in (0, 2):
        site.serve(large(number), FULL)
    assert started(site.looks(15)) == [large(3)]
    del site.places[large(1)]
    site.serve(large(3), FULL)
    assert started(site.looks(15)) == [large(1)]


def test_what_drains_too_long_is_killed(site: Site) -> None:
    for number in range(2):
        site.serve(large(number), Load(number, 0, 4))
    assert drained(site.looks(305)) == [large(0)]
    assert [each.kill for each in site.looks(LARGE.grace + MARGIN_S)] == [[]] * 10
    assert site.look().kill == [large(0)]
    assert site.places.keys() == {large(1), small(0)}


def test_what_another_one_told_to_drain_is_not_counted(site: Site) -> None:
    for number in range(2):
        site.serve(large(number), FULL)
    site.places[large(0)] = ReplicaPlace("large:1", "node", draining=True)
    orders = site.looks(15)
    assert started(orders) == [large(2)]
    assert orders[0].looks[0].reading.running == 4


def test_who_never_gets_ready_goes_and_is_not_tried_again_at_once(site: Site) -> None:
    site.serve(large(0), FULL)
    site.looks(15)
    assert all(not each.kill for each in site.looks(START_S + 5))
    [orders] = site.looks(5)
    assert (orders.kill, orders.notes[-1]) == ([large(1)], f"{large(1)}: not ready within 600 s")
    assert started(site.looks(RETRY_S - 5)) == []
    assert started(site.looks(20)) == [large(1)]


def test_who_cannot_start_says_why(site: Site) -> None:
    site.serve(large(0), FULL)
    site.looks(15)
    site.places[large(1)] = ReplicaPlace("", "node", error="the model is not there")
    orders = site.look()
    assert (orders.kill, orders.notes) == ([large(1)], [f"{large(1)}: the model is not there"])
    assert started(site.looks(RETRY_S - 5)) == []


def test_a_pool_that_is_being_updated_is_left_alone(site: Site) -> None:
    site.serve(large(0), FULL)
    site.serve(large(0, "00"), FULL)
    orders = site.looks(60)
    assert not any(each.start or each.drain or each.kill for each in orders)
    assert {look.pool for each in orders for look in each.looks} == {"small"}


def test_a_pool_of_none_wakes_up_for_sessions_that_no_verifier_has(site: Site) -> None:
    assert site.look().start == []
    site.others = [ServiceEntry("f" * 32, Role.ORCHESTRATOR, "front:1", load=Load(0, 2, 0))]
    assert site.look().start == [large(0)]


def test_a_replica_that_dies_is_not_replaced_beside_ray(site: Site) -> None:
    for number in range(2):
        site.serve(large(number), Load(2, 0, 2))
    site.places[large(1)] = None
    assert not any(each.start or each.drain or each.kill for each in site.looks(60))


def test_status_says_what_was_seen_of_pools_whose_bounds_differ(site: Site) -> None:
    """Also of a replica that is registered at another address than it listens on."""
    site.serve(large(0), Load(4, 2, 0, 1.25))
    site.places[large(0)] = ReplicaPlace("10.0.0.1:5", "node", registered="large:1")
    looks = [asdict(look) for each in site.looks(10) for look in each.looks]
    assert [look["pool"] for look in looks] == ["large", "small"] * 2
    assert looks[0]["reading"]["ready"] == 1
    assert scaling(looks)[0] == ("large: replicas 1, wanted 1; slots taken 4 of 4; waiting 2, longest 1.2 s")
    assert len(scaling(looks)) == 2
    assert scaling([]) == []


@pytest.mark.parametrize(("grow_after_s", "seconds"), [(10, 5.0), (300, 5.0), (3, 1.5), (0, 0.5)])
def test_it_looks_twice_before_a_pool_may_grow(grow_after_s: float, seconds: float) -> None:
    pool = f'{{kind: verify, model: "scripted:7", max_replicas: 2, scaling: {{grow_after_s: {grow_after_s}}}}}'
    assert every(parse(f"redis: redis://a:1\npools: {{a: {pool}}}")) == seconds


def test_new_replicas_are_known_once_every_orchestrator_uses_them() -> None:
    def entry(number: int, role: Role, identity: str, state: ServiceState = ServiceState.SERVING) -> ServiceEntry:
        models = (ServedModel("m", "", "", identity),)
        return ServiceEntry(f"{number:032x}", role, f"{role}:{number + 1}", models=models, state=state)

    verifier = entry(0, Role.VERIFIER, "bb")
    behind, there = entry(1, Role.ORCHESTRATOR, "aa"), entry(2, Role.ORCHESTRATOR, "bb")
    leaving = entry(3, Role.ORCHESTRATOR, "aa", ServiceState.DRAINING)
    assert not are_known([verifier.address], [there])
    assert not are_known([verifier.address], [verifier, behind, there])
    assert are_known([verifier.address], [verifier, there, leaving])
