"""Known mistakes of the state machines, put into the real code one at a time.

The schedules of `test_machine.py` catch each of `MISTAKES`; the simulation imports some and must catch those too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from specwire.core import messages
from specwire.core.draft import DraftSession
from specwire.core.messages import FinishReason, Pace, SourceKind, Verdict
from specwire.core.session import Advised, Session
from specwire.core.stop_conditions import Ending
from specwire.core.text import Text
from specwire.core.verify.chains import Chains
from specwire.core.verify.session import Tail, VerifySession
from tests.patches import Patch, always_returning, with_result


def emit_before_append(patch: Patch) -> None:
    original = Session._append

    def hasty(self: Session) -> list[messages.Effect]:
        effects = original(self)
        if not effects or self.in_flight is None or self.in_flight.emit is None:
            return effects
        emit, self.in_flight = self.in_flight.emit, replace(self.in_flight, emit=None)
        return [emit, *effects]

    patch.setattr(Session, "_append", hasty)


def two_appends_in_flight(patch: Patch) -> None:
    original = Session._append

    def impatient(self: Session) -> list[messages.Effect]:
        self.in_flight = None
        return original(self)

    patch.setattr(Session, "_append", impatient)


def chain_outlives_its_contradiction(patch: Patch) -> None:
    always_returning(patch, Chains, "advance", [])


def drafter_s_rollback_off_by_one(patch: Patch) -> None:
    original = DraftSession.advance

    def sloppy(self: DraftSession, position: int, tokens: Sequence[int], pace: Pace) -> int:
        return original(self, position, tokens, pace) + 1

    patch.setattr(DraftSession, "advance", sloppy)


def stale_verdict_accepted(patch: Patch) -> None:
    original = Session._on_verdict

    def trusting(self: Session, event: messages.VerdictArrived) -> list[messages.Effect]:
        return original(self, replace(event, attach=self.attach))

    patch.setattr(Session, "_on_verdict", trusting)


def credit_ignored(patch: Patch) -> None:
    def room(self: VerifySession) -> int:
        return 0 if self.finish is not None else self.ending.end - self.position

    patch.setattr(VerifySession, "room", property(room))


def window_one_too_wide(patch: Patch) -> None:
    def window(self: VerifySession, most: int, kind: SourceKind) -> tuple[int, ...]:
        return self.chains.window(self.position, min(most, self.room))

    patch.setattr(VerifySession, "window", window)


def flow_control_ignored(patch: Patch) -> None:
    patch.setattr(Session, "_earned", property(lambda self: self.durable + self.buffer))


def undurable_tokens_half_forgotten(patch: Patch) -> None:
    original = Session._on_verifier_lost

    def forgetful(self: Session, event: messages.VerifierLost) -> list[messages.Effect]:
        self._pending.clear()
        return original(self, event)

    patch.setattr(Session, "_on_verifier_lost", forgetful)


def tail_delivered_from_its_start(patch: Patch) -> None:
    original = Tail.behind

    def twice(self: Tail, position: int, end: int) -> Sequence[Verdict] | None:
        return original(self, self._verdicts[0].position if self._verdicts else position, end)

    patch.setattr(Tail, "behind", twice)


def tail_kept_to_itself(patch: Patch) -> None:
    with_result(patch, Tail, "behind", lambda verdicts: None if verdicts is None else ())


def end_not_told_again(patch: Patch) -> None:
    original = Tail.behind

    def endless(self: Tail, position: int, end: int) -> Sequence[Verdict] | None:
        verdicts = original(self, position, end)
        return verdicts and [verdict._replace(finish=None) for verdict in verdicts]

    patch.setattr(Tail, "behind", endless)


def a_lost_link_lifts_the_limit(patch: Patch) -> None:
    def unbridled(self: VerifySession) -> None:
        self.allowance = replace(self.allowance, credit=self.ending.end)

    patch.setattr(VerifySession, "detach", unbridled)


def reopened_before_the_append_is_acknowledged(patch: Patch) -> None:
    original = Session._open_verifier

    def hasty(self: Session) -> list[messages.Effect]:
        in_flight, self.in_flight = self.in_flight, None
        effects = original(self)
        self.in_flight = in_flight
        return effects

    patch.setattr(Session, "_open_verifier", hasty)


def end_seen_at_a_run_s_last_token_only(patch: Patch) -> None:
    original = Ending.cut

    def hurried(self: Ending, position: int, tokens: Sequence[int]) -> tuple[int, FinishReason | None]:
        kept, reason = original(self, position + len(tokens) - 1, tokens[-1:])
        return kept + len(tokens) - 1, reason

    patch.setattr(Ending, "cut", hurried)


def only_the_first_drafter_is_told(patch: Patch) -> None:
    original = Session._advance

    def partial(self: Session, position: int, tokens: tuple[int, ...]) -> list[messages.Effect]:
        return original(self, position, tokens)[:1]

    patch.setattr(Session, "_advance", partial)


def one_drafter_s_loss_is_taken_for_all(patch: Patch) -> None:
    original = Session._on_drafter_lost

    def sweeping(self: Session, event: messages.DrafterLost) -> list[messages.Effect]:
        self.drafters.clear()
        return original(self, event)

    patch.setattr(Session, "_on_drafter_lost", sweeping)


def a_paused_drafter_is_not_told_what_it_missed(patch: Patch) -> None:
    original = Advised.advance

    def forgetful(self: Advised, text: Text, position: int, tokens: tuple[int, ...]) -> list[messages.Effect]:
        if self.pace.run_ahead:
            self.missed = None
        return original(self, text, position, tokens)

    patch.setattr(Advised, "advance", forgetful)


def one_drafter_s_plan_is_told_to_another(patch: Patch) -> None:
    original = Session._on_pace

    def confused(self: Session, event: messages.PacePlanned) -> list[messages.Effect]:
        return [
            replace(e, source=max(self.drafters)) if isinstance(e, messages.AdvanceDrafter) else e
            for e in original(self, event)
        ]

    patch.setattr(Session, "_on_pace", confused)


def only_the_first_drafter_is_closed(patch: Patch) -> None:
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
    drafter_s_rollback_off_by_one,
    stale_verdict_accepted,
    credit_ignored,
    window_one_too_wide,
    flow_control_ignored,
    undurable_tokens_half_forgotten,
    tail_delivered_from_its_start,
    tail_kept_to_itself,
    end_not_told_again,
    a_lost_link_lifts_the_limit,
    reopened_before_the_append_is_acknowledged,
    end_seen_at_a_run_s_last_token_only,
]
