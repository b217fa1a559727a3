"""The three parties under every fault that the design admits, against plain decoding."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from specwire.core.messages import FinishReason, Outcome
from tests.core.mistakes import MISTAKES
from tests.core.script import VOCABULARY, Script
from tests.core.world import FAULTS, PROGRESS, SEEDS, STOPS, World, random_run
from tests.patches import Patch

NUMBERS = st.integers(0, 7)


class Machine(RuleBasedStateMachine):
    """Hypothesis chooses the events, and shrinks what breaks an invariant."""

    world: World

    @initialize(
        seed=st.integers(0, 2**32),
        quality=st.sampled_from((0, 5, 7, 8)),
        prompt=st.lists(st.integers(0, VOCABULARY - 1), min_size=1, max_size=3),
        max_tokens=st.integers(1, 40),
        stops=st.sampled_from(STOPS),
        buffer=st.integers(1, 12),
        other=st.sampled_from((0, 5, 7, 8)),
    )
    def start(
        self,
        seed: int,
        quality: int,
        prompt: list[int],
        max_tokens: int,
        stops: tuple[str, ...],
        buffer: int,
        other: int,
    ) -> None:
        self.world = World(Script(seed, quality), prompt, max_tokens, stops, buffer, other)

    @rule(action=st.sampled_from(PROGRESS), number=NUMBERS)
    def goes_on(self, action: str, number: int) -> None:
        self.world.step(action, number)

    @rule(number=NUMBERS)
    def works(self, number: int) -> None:
        """Hypothesis alone would seldom get far into a text."""
        for action in ("verifier_ready", "drafter_ready", "round"):
            self.world.step(action, number)

    @rule(action=st.sampled_from(FAULTS), number=NUMBERS)
    def fails(self, action: str, number: int) -> None:
        self.world.step(action, number)

    @precondition(lambda self: len(self.world.told_tokens) > 12)
    @rule()
    def is_cancelled(self) -> None:
        self.world.step("cancel")

    def teardown(self) -> None:
        if hasattr(self, "world"):
            self.world.finish()


TestMachine = Machine.TestCase
TestMachine.settings = settings(
    max_examples=60, stateful_step_count=60, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck)
)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_seeded_schedule_ends_with_the_oracle_s_text(seed: int) -> None:
    random_run(seed)


# What the schedules reach


def test_the_schedules_reach_every_kind_of_end_and_outcome() -> None:
    worlds = [random_run(seed) for seed in SEEDS]
    reasons = {world.end.reason for world in worlds if world.end}
    assert {FinishReason.EOS, FinishReason.STOP_STRING, FinishReason.LENGTH, FinishReason.CANCELLED} <= reasons
    assert {outcome for world in worlds for outcome in world.outcomes} == set(Outcome)


def test_the_schedules_reach_sessions_that_are_taken_over_with_what_they_decided_meanwhile() -> None:
    worlds = [random_run(seed) for seed in SEEDS]
    assert sum(world.resumed for world in worlds) > 50
    assert sum(world.delivered for world in worlds) > 50


def test_the_schedules_reach_trees() -> None:
    assert sum(random_run(seed).branched for seed in SEEDS) > 200


@pytest.mark.parametrize("unheard", [0, 3])
def test_a_link_that_is_cut_again_and_again_has_nothing_decided_twice(unheard: int) -> None:
    world = perfect()
    while not world.over:
        for action in ("verifier_ready", "drafter_ready", "round", "verifier_receives", "begin_forward", "end_forward"):
            world.step(action)
        world.step("cut_verifier")
        for _ in range(unheard):
            world.step("decide_unheard", 4)
    assert world.decided == len(world.told_tokens) - len(world.prompt)
    assert world.delivered > 0
    world.check_end()


def perfect() -> World:
    """A drafter that is always right, and no end in sight."""
    return World(Script(next(seed for seed in range(99) if long(seed)), quality=8), max_tokens=60, buffer=16)


def long(seed: int) -> bool:
    return len(World(Script(seed), max_tokens=60).oracle.raw) == 61


def accepted_in(world: World, rounds: int) -> int:
    before = len(world.outcomes)
    for _ in range(rounds):
        world.step("round", 4)
    return world.outcomes[before:].count(Outcome.ACCEPTED)


@pytest.mark.parametrize("first", ["verifier", "drafter"])
def test_drafts_are_of_use_whichever_peer_comes_first(first: str) -> None:
    """A drafter that never errs begins no chain of its own accord: it must begin one that the verifier sees."""
    world = perfect()
    peers = ["verifier_ready", "drafter_ready"] if first == "verifier" else ["drafter_ready", "verifier_ready"]
    for peer in peers:
        world.step(peer)
        for _ in range(4):
            world.step("drafter_receives")
            world.step("draft")
            world.step("relay")
    assert accepted_in(world, 6) >= 6


def test_drafts_are_of_use_after_a_pause_in_which_the_verifier_was_replaced() -> None:
    """Its chain had begun before: the new verifier knows nothing of that."""
    world = perfect()
    for action in ("verifier_ready", "drafter_ready", "round", "drafter_receives", *["draft"] * 4, "relay", "relay"):
        world.step(action)
    for action in ("offer", "offer", "change_pace", "kill_verifier", "verifier_ready"):
        world.step(action)
    assert not world.drafted
    assert not world.relayed
    world.step("change_pace", 4)  # the other drafter's, which is not there
    world.step("change_pace", 4)
    assert world.session.drafters[1].pace.run_ahead == 4
    assert accepted_in(world, 6) >= 6


def test_a_slow_client_holds_the_verifier_back_across_replacements() -> None:
    world = World(Script(3, quality=0), max_tokens=40, buffer=4)
    limit = len(world.prompt) + world.buffer
    for _ in range(5):
        world.step("verifier_ready")
        for _ in range(30):
            for action in ("verifier_receives", "begin_forward", "end_forward", "orchestrator_receives", "acknowledge"):
                world.step(action)
        assert len(world.log) <= limit
        world.step("cut_verifier")
    world.finish()


# Its teeth


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_caught(mistake: Callable[[Patch], None], monkeypatch: Patch) -> None:
    mistake(monkeypatch)
    with pytest.raises((AssertionError, RuntimeError)):
        for seed in SEEDS:
            random_run(seed)
