"""The machine's teeth: known mistakes, each caught by the schedules that the machine passes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest

from specwire.core import messages as ev
from specwire.core import messages as fx
from specwire.core.draft import DraftSession
from specwire.core.limits import Ending
from specwire.core.messages import FinishReason, Pace, SourceKind, Verdict
from specwire.core.session import Advised, Session
from specwire.core.text import Text
from specwire.core.verify.chains import Chains
from specwire.core.verify.session import Allowance, Tail, VerifySession
from tests.core.world import SEEDS, random_run


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
        return verdicts and [verdict._replace(finish=None) for verdict in verdicts]

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
