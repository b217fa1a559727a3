"""The three parties under every fault that the design admits, against plain decoding; and the machine's teeth."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from specwire.core import effects as fx
from specwire.core import events as ev
from specwire.core.acceptance import Outcome
from specwire.core.advising import Advised
from specwire.core.chain import Chains, SourceKind
from specwire.core.drafting import DraftSession, Pace
from specwire.core.limits import Ending, FinishReason
from specwire.core.session import Session
from specwire.core.tail import Tail, Verdict
from specwire.core.text import Text
from specwire.core.verification import Allowance, VerifySession
from tests.core.script import VOCABULARY, Script
from tests.core.world import FAULTS, PROGRESS, STOPS, World, random_run

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

SEEDS = range(150)


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


def test_drafts_are_of_use_again_after_the_verifier_was_replaced() -> None:
    world = perfect()
    world.step("verifier_ready")
    world.step("drafter_ready")
    assert accepted_in(world, 4) >= 4
    world.step("cut_verifier")
    world.step("round")
    world.step("verifier_ready")
    assert accepted_in(world, 4) >= 4


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


def test_what_the_client_took_while_the_verifier_was_away_counts() -> None:
    world = World(Script(next(s for s in range(99) if long(s)), quality=0), max_tokens=60, buffer=4)
    world.step("verifier_ready")
    for _ in range(10):
        for action in ("verifier_receives", "begin_forward", "end_forward", "orchestrator_receives", "acknowledge"):
            world.step(action)
    assert len(world.log) == 5
    world.step("cut_verifier")
    world.step("verifier_ready")
    world.step("client_takes", 7)
    world.finish()


# Its teeth: known mistakes, each caught by the same schedules


def emit_before_append(patch: pytest.MonkeyPatch) -> None:
    original = Session._append

    def hasty(self: Session) -> list[fx.Effect]:
        effects = original(self)
        emit = self.in_flight.emit if self.in_flight else None
        return [emit, *effects] if effects and emit else effects

    patch.setattr(Session, "_append", hasty)


def two_appends_in_flight(patch: pytest.MonkeyPatch) -> None:
    original = Session._append

    def impatient(self: Session) -> list[fx.Effect]:
        self.in_flight = None
        return original(self)

    patch.setattr(Session, "_append", impatient)


def chain_outlives_its_contradiction(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Chains, "advance", lambda self, position, tokens: [])


def rollback_off_by_one(patch: pytest.MonkeyPatch) -> None:
    original = DraftSession.advance

    def sloppy(self: DraftSession, position: int, tokens: Sequence[int], pace: Pace) -> int:
        return original(self, position, tokens, pace) + 1

    patch.setattr(DraftSession, "advance", sloppy)


def stale_attach_accepted(patch: pytest.MonkeyPatch) -> None:
    original = Session._on_verdict

    def trusting(self: Session, event: ev.VerdictArrived) -> list[fx.Effect]:
        return original(self, replace(event, attach=self.attach))

    patch.setattr(Session, "_on_verdict", trusting)


def credit_ignored(patch: pytest.MonkeyPatch) -> None:
    def room(self: VerifySession) -> int:
        return 0 if self.finish is not None else self.ending.end - self.position

    patch.setattr(VerifySession, "room", property(room))


def window_one_too_wide(patch: pytest.MonkeyPatch) -> None:
    def window(self: VerifySession, most: int, kind: SourceKind) -> tuple[int, ...]:
        return self.chains.window(self.position, min(most, self.room))

    patch.setattr(VerifySession, "window", window)


def flow_control_ignored(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Session, "_earned", property(lambda self: self.durable + self.buffer))


def undurable_tokens_half_forgotten(patch: pytest.MonkeyPatch) -> None:
    original = Session._on_verifier_lost

    def forgetful(self: Session, event: ev.VerifierLost) -> list[fx.Effect]:
        self._pending.clear()
        return original(self, event)

    patch.setattr(Session, "_on_verifier_lost", forgetful)


def tail_delivered_from_its_start(patch: pytest.MonkeyPatch) -> None:
    original = Tail.behind

    def twice(self: Tail, position: int, end: int) -> Sequence[Verdict] | None:
        return original(self, self._verdicts[0].position if self._verdicts else position, end)

    patch.setattr(Tail, "behind", twice)


def tail_kept_to_itself(patch: pytest.MonkeyPatch) -> None:
    original = VerifySession.resume

    def silent(self: VerifySession, tokens: Sequence[int], allowance: Allowance) -> Sequence[Verdict] | None:
        return None if original(self, tokens, allowance) is None else []

    patch.setattr(VerifySession, "resume", silent)


def end_not_told_again(patch: pytest.MonkeyPatch) -> None:
    original = Tail.behind

    def endless(self: Tail, position: int, end: int) -> Sequence[Verdict] | None:
        verdicts = original(self, position, end)
        return verdicts and [replace(verdict, finish=None) for verdict in verdicts]

    patch.setattr(Tail, "behind", endless)


def resumed_although_the_log_is_ahead(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Text, "common_prefix", lambda self, position, tokens: len(tokens))


def a_lost_link_lifts_the_limit(patch: pytest.MonkeyPatch) -> None:
    def unbridled(self: VerifySession) -> None:
        self.allowance = replace(self.allowance, credit=self.ending.end)

    patch.setattr(VerifySession, "detach", unbridled)


def reopened_before_the_append_is_acknowledged(patch: pytest.MonkeyPatch) -> None:
    original = Session._open_verifier

    def hasty(self: Session) -> list[fx.Effect]:
        in_flight, self.in_flight = self.in_flight, None
        effects = original(self)
        self.in_flight = in_flight
        return effects

    patch.setattr(Session, "_open_verifier", hasty)


def end_seen_at_a_run_s_last_token_only(patch: pytest.MonkeyPatch) -> None:
    original = Ending.cut

    def hurried(self: Ending, position: int, tokens: Sequence[int]) -> tuple[int, FinishReason | None]:
        kept, reason = original(self, position + len(tokens) - 1, tokens[-1:])
        return kept + len(tokens) - 1, reason

    patch.setattr(Ending, "cut", hurried)


def only_the_first_drafter_is_told(patch: pytest.MonkeyPatch) -> None:
    original = Session._advance

    def partial(self: Session, position: int, tokens: tuple[int, ...]) -> list[fx.Effect]:
        return original(self, position, tokens)[:1]

    patch.setattr(Session, "_advance", partial)


def one_drafter_s_loss_is_taken_for_all(patch: pytest.MonkeyPatch) -> None:
    original = Session._on_drafter_lost

    def sweeping(self: Session, event: ev.DrafterLost) -> list[fx.Effect]:
        self.drafters.clear()
        return original(self, event)

    patch.setattr(Session, "_on_drafter_lost", sweeping)


def a_paused_drafter_is_not_told_what_it_missed(patch: pytest.MonkeyPatch) -> None:
    original = Advised.advance

    def forgetful(self: Advised, text: Text, position: int, tokens: tuple[int, ...]) -> list[fx.Effect]:
        if self.pace.run_ahead:
            self.missed = None
        return original(self, text, position, tokens)

    patch.setattr(Advised, "advance", forgetful)


def one_drafter_s_plan_is_told_to_another(patch: pytest.MonkeyPatch) -> None:
    original = Session._on_pace

    def confused(self: Session, event: ev.PacePlanned) -> list[fx.Effect]:
        return [
            replace(e, source=max(self.drafters)) if isinstance(e, fx.AdvanceDrafter) else e
            for e in original(self, event)
        ]

    patch.setattr(Session, "_on_pace", confused)


def only_the_first_drafter_is_closed(patch: pytest.MonkeyPatch) -> None:
    original = Session._close_drafters
    patch.setattr(Session, "_close_drafters", lambda self: original(self)[:1])


MISTAKES = [
    only_the_first_drafter_is_told,
    one_drafter_s_loss_is_taken_for_all,
    a_paused_drafter_is_not_told_what_it_missed,
    one_drafter_s_plan_is_told_to_another,
    only_the_first_drafter_is_closed,
    emit_before_append,
    two_appends_in_flight,
    chain_outlives_its_contradiction,
    rollback_off_by_one,
    stale_attach_accepted,
    credit_ignored,
    window_one_too_wide,
    flow_control_ignored,
    undurable_tokens_half_forgotten,
    tail_delivered_from_its_start,
    tail_kept_to_itself,
    end_not_told_again,
    resumed_although_the_log_is_ahead,
    a_lost_link_lifts_the_limit,
    reopened_before_the_append_is_acknowledged,
    end_seen_at_a_run_s_last_token_only,
]


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_caught(mistake: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch) -> None:
    mistake(monkeypatch)
    with pytest.raises((AssertionError, RuntimeError)):
        for seed in SEEDS:
            random_run(seed)
