"""The orchestrator's session, event by event; the machine's tests run it against the other parties."""

from __future__ import annotations

from collections import defaultdict

import pytest

from specwire.core import messages as ev
from specwire.core import messages as fx
from specwire.core.messages import FinishReason, Outcome, Pace, Proposal, Verdict
from specwire.core.session import TRANSITIONS, IllegalEvent, Session, State
from specwire.core.text import Text
from tests.core.script import LetterScanner
from tests.core.world import World, random_run

PROMPT = (1, 2)
D = Outcome.DIRECT


def session(*stops: str, buffer: int = 8) -> Session:
    return Session(Text(PROMPT), len(PROMPT), LetterScanner(stops), buffer)


def running(*stops: str, buffer: int = 8) -> Session:
    subject = session(*stops, buffer=buffer)
    subject.handle(ev.VerifierReady())
    subject.handle(ev.VerifierOpened(1, 2))
    return subject


def verdict(position: int, *tokens: int, attach: int = 1, finish: FinishReason | None = None) -> ev.VerdictArrived:
    return ev.VerdictArrived(attach, Verdict(position, tokens, (D,) * len(tokens), 0, finish))


def kinds(effects: list[fx.Effect]) -> list[str]:
    return [type(effect).__name__ for effect in effects]


# A token's way


def test_decided_then_durable_then_emitted() -> None:
    subject = running()
    assert subject.handle(verdict(2, 1)) == [fx.Append(2, (1,), (D,), None)]
    assert (subject.durable, subject.emitted, len(subject.text)) == (2, 2, 3)
    assert subject.handle(ev.Appended()) == [fx.Emit(2, (1,), (D,), "a", (1,), (1,))]
    assert (subject.durable, subject.emitted) == (3, 3)


def test_one_append_at_a_time_takes_all_that_was_decided_meanwhile() -> None:
    subject = running()
    subject.handle(verdict(2, 1))
    assert subject.handle(verdict(3, 2)) == []
    assert subject.handle(verdict(4, 1, 2)) == []
    emit, append = subject.handle(ev.Appended())
    assert isinstance(emit, fx.Emit)
    assert emit.tokens == (1,)
    assert append == fx.Append(3, (2, 1, 2), (D,) * 3, None)


def test_the_drafter_hears_before_the_log() -> None:
    subject = running()
    subject.handle(ev.DrafterReady(5))
    assert kinds(subject.handle(verdict(2, 1))) == ["AdvanceDrafter", "Append"]
    assert subject.handle(verdict(3, 2)) == [fx.AdvanceDrafter(5, 3, (2,), Pace())]


def test_the_last_append_finishes_in_the_same_script() -> None:
    subject = running()
    append, close = subject.handle(verdict(2, 1, 0, finish=FinishReason.EOS))
    assert append == fx.Append(2, (1, 0), (D, D), fx.End(FinishReason.EOS, "", 1))
    assert close == fx.CloseVerifier()
    assert subject.state == "ending"
    assert kinds(subject.handle(ev.Appended())) == ["Emit", "EmitEnd"]
    assert subject.state == "ended"


def test_a_verdict_without_tokens_may_end_the_session() -> None:
    """The text held its end already: the former owner died between the append and its acknowledgement."""
    subject = running()
    append = subject.handle(verdict(2, finish=FinishReason.LENGTH))[0]
    assert append == fx.Append(2, (), (), fx.End(FinishReason.LENGTH, "", 0))
    assert kinds(subject.handle(ev.Appended())) == ["EmitEnd"]


def test_a_refusal_after_the_end_was_decided_does_not_change_it() -> None:
    subject = running()
    subject.handle(verdict(2, 1))
    subject.handle(verdict(3, 0, finish=FinishReason.EOS))
    subject.handle(ev.VerifierRefused(1, "too late"))
    append = next(effect for effect in subject.handle(ev.Appended()) if isinstance(effect, fx.Append))
    assert append.end is not None
    assert append.end.reason is FinishReason.EOS


# Stop strings


def test_a_stop_string_cuts_tokens_and_text() -> None:
    subject = running("ba")
    append = subject.handle(verdict(2, 1, 2, 1, 2, 2))[0]
    assert isinstance(append, fx.Append)
    assert append.tokens == (1, 2, 1)
    assert append.end == fx.End(FinishReason.STOP_STRING, "", 1)
    assert subject.text.tokens == [1, 2, 1, 2, 1]
    emit, end = subject.handle(ev.Appended())
    assert isinstance(emit, fx.Emit)
    assert isinstance(end, fx.EmitEnd)
    assert emit.text + end.text == "a"


def test_a_stop_string_before_an_eos_wins_and_one_behind_the_end_does_not_exist() -> None:
    subject = running("ba")
    append = subject.handle(verdict(2, 2, 1, 0, finish=FinishReason.EOS))[0]
    assert isinstance(append, fx.Append)
    assert append.end is not None
    assert (append.tokens, append.end.reason) == ((2, 1), FinishReason.STOP_STRING)


def test_what_may_begin_a_stop_string_is_withheld_until_the_end() -> None:
    subject = running("bb")
    subject.handle(verdict(2, 1, 2))
    emit = subject.handle(ev.Appended())[0]
    assert isinstance(emit, fx.Emit)
    assert (emit.text, emit.text_ends) == ("a", (1, 2))
    subject.handle(verdict(4, 0, finish=FinishReason.EOS))
    end = subject.handle(ev.Appended())[-1]
    assert end == fx.EmitEnd(fx.End(FinishReason.EOS, "", 2), "b")


# The verifier


def test_it_opens_from_the_durable_text_with_a_new_attach() -> None:
    subject = session()
    assert subject.handle(ev.VerifierReady()) == [fx.OpenVerifier(1, PROMPT, 2, 10, 0)]
    subject.handle(ev.VerifierLost())
    assert subject.handle(ev.VerifierReady()) == [fx.OpenVerifier(2, PROMPT, 2, 10, 0)]


def test_it_reopens_once_all_that_was_decided_is_durable() -> None:
    subject = running()
    subject.handle(verdict(2, 1))
    subject.handle(verdict(3, 2))
    assert subject.handle(ev.VerifierLost()) == []
    assert subject.handle(ev.VerifierReady()) == []
    assert kinds(subject.handle(ev.Appended())) == ["Emit", "Append"]
    effects = subject.handle(ev.Appended())
    assert kinds(effects) == ["Emit", "OpenVerifier"]
    assert effects[1] == fx.OpenVerifier(2, (1, 2, 1, 2), 4, 10, 0)


def test_what_was_decided_without_a_link_is_told_behind_opened() -> None:
    subject = running()
    subject.handle(verdict(2, 1))
    subject.handle(ev.Appended())
    subject.handle(ev.VerifierLost())
    subject.handle(ev.VerifierReady())
    subject.handle(ev.VerifierOpened(2, 3))
    assert subject.handle(verdict(3, 2, 1, attach=2)) == [fx.Append(3, (2, 1), (D, D), None)]


def test_a_loss_leaves_the_drafter_where_it_is() -> None:
    subject = running()
    subject.handle(ev.DrafterReady(1))
    subject.handle(verdict(2, 1))
    subject.handle(verdict(3, 2, 1))
    assert subject.handle(ev.VerifierLost()) == []
    assert subject.text.tokens == [1, 2, 1, 2, 1]


def test_a_stop_string_in_what_a_lost_verifier_decided_ends_the_session() -> None:
    subject = running("ba")
    subject.handle(verdict(2, 1))
    subject.handle(verdict(3, 2, 1))
    subject.handle(ev.VerifierLost())
    append = next(effect for effect in subject.handle(ev.Appended()) if isinstance(effect, fx.Append))
    assert append.end is not None
    assert append.end.reason is FinishReason.STOP_STRING


@pytest.mark.parametrize("event", [verdict(2, 1, attach=0), ev.VerifierOpened(0, 2), ev.VerifierRefused(0, "old")])
def test_an_older_connection_is_void(event: ev.Event) -> None:
    subject = running()
    assert subject.handle(event) == []
    assert (subject.state, subject.text.tokens) == (State.RUNNING, list(PROMPT))


@pytest.mark.parametrize(
    ("event", "said"),
    [
        (verdict(3, 1), "decided 3 after 2"),
        (verdict(1, 1), "decided 1 after 2"),
        (verdict(2, *[1] * 9), "credit of 10"),
    ],
)
def test_a_verifier_that_breaks_the_order_ends_the_session(event: ev.Event, said: str) -> None:
    append = running().handle(event)[0]
    assert isinstance(append, fx.Append)
    assert append.tokens == ()
    assert append.end is not None
    assert append.end.reason is FinishReason.ERROR
    assert said in append.end.message


def test_a_verdict_with_too_few_outcomes_changes_nothing() -> None:
    subject = running()
    with pytest.raises(ValueError, match="one per token"):
        subject.handle(ev.VerdictArrived(1, Verdict(2, (1, 2), (D,), 0)))
    assert subject.text.tokens == list(PROMPT)


@pytest.mark.parametrize("opened", [False, True])
def test_a_refusal_ends_the_session_with_its_message(opened: bool) -> None:
    subject = running() if opened else session()
    if not opened:
        subject.handle(ev.VerifierReady())
    append = subject.handle(ev.VerifierRefused(1, "no slots"))[0]
    assert isinstance(append, fx.Append)
    assert append.end == fx.End(FinishReason.ERROR, "no slots", 0)


# Credit


def test_credit_rises_when_half_the_buffer_is_earned() -> None:
    subject = running(buffer=8)
    subject.handle(verdict(2, 1, 1, 1, 1))
    subject.handle(ev.Appended())
    assert subject.handle(ev.ClientTook(5)) == []
    assert subject.handle(ev.ClientTook(6)) == [fx.SendProgress(6, 14, 0)]
    assert subject.handle(ev.ClientTook(4)) == []
    assert subject.taken == 6


def test_a_client_that_takes_nothing_earns_nothing() -> None:
    subject = running(buffer=2)
    subject.handle(verdict(2, 1, 1))
    assert kinds(subject.handle(ev.Appended())) == ["Emit"]
    subject.handle(ev.VerifierLost())
    assert subject.handle(ev.VerifierReady()) == [fx.OpenVerifier(2, (1, 2, 1, 1), 4, 4, 0)]
    assert subject.handle(ev.ClientTook(4)) == []
    assert subject.handle(ev.VerifierOpened(2, 4)) == [fx.SendProgress(4, 6, 0)]


def test_a_buffer_of_one_lets_one_token_through_at_a_time() -> None:
    subject = running(buffer=1)
    subject.handle(verdict(2, 1))
    subject.handle(ev.Appended())
    assert subject.handle(ev.ClientTook(3)) == [fx.SendProgress(3, 4, 0)]
    assert subject.handle(ev.ClientTook(3)) == []


def test_a_buffer_of_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="buffer"):
        session(buffer=0)


# The drafter


def test_a_drafter_opens_with_the_whole_decided_text() -> None:
    subject = running()
    subject.handle(verdict(2, 1))
    assert subject.handle(ev.DrafterReady(3)) == [fx.OpenDrafter(3, (1, 2, 1), Pace())]


def test_what_is_due_follows_the_drafter_s_presence() -> None:
    subject = running()
    plan = Pace(4, 4), 4
    assert subject.handle(ev.PacePlanned(1, *plan)) == [], "nobody is there"
    assert subject.handle(ev.DrafterReady(1, *plan)) == [fx.OpenDrafter(1, PROMPT, plan[0]), fx.SendProgress(2, 10, 4)]
    assert subject.handle(ev.PacePlanned(1, Pace(4, 4), 3)) == [fx.SendProgress(2, 10, 3)]
    assert subject.handle(ev.DrafterLost(1)) == [fx.SendProgress(2, 10, 0)]


def test_a_plan_made_while_opening_is_told_when_open() -> None:
    subject = session()
    subject.handle(ev.VerifierReady())
    subject.handle(ev.DrafterReady(1))
    subject.handle(ev.PacePlanned(1, Pace(2, 2), 2))
    assert subject.handle(ev.VerifierOpened(1, 2)) == [fx.SendProgress(2, 10, 2)]


def test_a_changed_pace_wakes_the_drafter() -> None:
    subject = running()
    subject.handle(ev.DrafterReady(1))
    assert subject.handle(ev.PacePlanned(1, Pace(1, 9), 0)) == [fx.AdvanceDrafter(1, 2, (), Pace(1, 9))]
    assert subject.handle(ev.PacePlanned(1, Pace(1, 9), 0)) == []


def test_the_loss_of_a_former_drafter_means_nothing() -> None:
    subject = running()
    subject.handle(ev.DrafterReady(2))
    assert subject.handle(ev.DrafterLost(1)) == []
    assert list(subject.drafters) == [2]


def test_each_drafter_is_told_at_its_own_pace() -> None:
    subject = running()
    quick, paused = Pace(4, 8), Pace(1, 0)
    subject.handle(ev.DrafterReady(1, quick, 2))
    assert subject.handle(ev.DrafterReady(2, paused, 0)) == [fx.OpenDrafter(2, PROMPT, paused)]
    assert subject.handle(verdict(2, 3))[0] == fx.AdvanceDrafter(1, 2, (3,), quick)
    slow = Pace(1, 1)
    assert subject.handle(ev.PacePlanned(2, slow, 0)) == [fx.AdvanceDrafter(2, 2, (3,), slow)]
    told = [effect for effect in subject.handle(verdict(3, 4)) if isinstance(effect, fx.AdvanceDrafter)]
    assert told == [fx.AdvanceDrafter(1, 3, (4,), quick), fx.AdvanceDrafter(2, 3, (4,), slow)]


def test_the_loss_of_one_drafter_leaves_the_other_what_it_was() -> None:
    subject = running()
    subject.handle(ev.DrafterReady(1, Pace(4, 4), 4))
    assert subject.handle(ev.DrafterReady(2, Pace(2, 2), 2)) == [fx.OpenDrafter(2, PROMPT, Pace(2, 2))], "4 stays due"
    assert subject.handle(ev.DrafterLost(1)) == [fx.SendProgress(2, 10, 2)]
    of_one, of_other = (Proposal(source, 0, 2, 0, (1,), 7) for source in (1, 2))
    assert subject.handle(ev.ProposalArrived(of_one)) == []
    assert subject.handle(ev.ProposalArrived(of_other)) == [fx.RelayProposal(of_other)]
    assert subject.handle(verdict(2, 3))[0] == fx.AdvanceDrafter(2, 2, (3,), Pace(2, 2))


def test_all_drafters_begin_a_new_chain_for_a_verifier_that_opens_and_all_are_closed() -> None:
    subject = session()
    for source in (1, 2):
        subject.handle(ev.DrafterReady(source))
    restarts = subject.handle(ev.VerifierReady())[1:]
    assert [(e.source, e.tokens) for e in restarts if isinstance(e, fx.AdvanceDrafter)] == [
        (1, ()),
        (1, (2,)),
        (2, ()),
        (2, (2,)),
    ]
    closing = subject.handle(ev.OwnerLost())
    assert closing == [fx.CloseVerifier(), fx.CloseDrafter(1), fx.CloseDrafter(2)]
    assert subject.drafters == {}


def test_proposals_are_relayed_once_the_verifier_was_asked_to_open() -> None:
    proposal = Proposal(0, 0, 2, 0, (1,), 7)
    subject = session()
    subject.handle(ev.DrafterReady(0))
    assert subject.handle(ev.ProposalArrived(proposal)) == []
    subject.handle(ev.VerifierReady())
    assert subject.handle(ev.ProposalArrived(proposal)) == [fx.RelayProposal(proposal)]
    subject.handle(ev.VerifierOpened(1, 2))
    assert subject.handle(ev.ProposalArrived(proposal)) == [fx.RelayProposal(proposal)]
    subject.handle(ev.DrafterLost(0))
    assert subject.handle(ev.ProposalArrived(proposal)) == []


def test_an_open_drafter_begins_a_new_chain_for_a_verifier_that_opens() -> None:
    subject = session()
    subject.handle(ev.DrafterReady(1))
    back, forward = subject.handle(ev.VerifierReady())[1:]
    assert (back, forward) == (fx.AdvanceDrafter(1, 1, (), Pace()), fx.AdvanceDrafter(1, 1, (2,), Pace()))


def test_with_a_text_of_one_token_it_is_opened_again() -> None:
    subject = Session(Text([3]), 1, LetterScanner(()))
    subject.handle(ev.DrafterReady(1))
    assert subject.handle(ev.VerifierReady())[1:] == [fx.OpenDrafter(1, (3,), Pace())]


# The end


@pytest.mark.parametrize("waiting", [True, False])
def test_a_cancelled_session_appends_its_end(waiting: bool) -> None:
    subject = session() if waiting else running()
    append = subject.handle(ev.EndRequested(FinishReason.CANCELLED))[0]
    assert append == fx.Append(2, (), (), fx.End(FinishReason.CANCELLED, "", 0))
    assert subject.handle(ev.EndRequested(FinishReason.DEADLINE)) == []
    assert kinds(subject.handle(ev.Appended())) == ["EmitEnd"]


def test_an_end_waits_for_the_append_under_way_and_takes_what_was_decided_before_it() -> None:
    subject = running()
    subject.handle(ev.DrafterReady(1))
    subject.handle(verdict(2, 1))
    subject.handle(verdict(3, 2))
    assert subject.handle(ev.EndRequested(FinishReason.DEADLINE)) == []
    assert subject.handle(verdict(4, 1)) == []
    _, append, *closing = subject.handle(ev.Appended())
    assert isinstance(append, fx.Append)
    assert append == fx.Append(3, (2,), (D,), fx.End(FinishReason.DEADLINE, "", 2))
    assert closing == [fx.CloseVerifier(), fx.CloseDrafter(1)]


def test_an_end_survives_the_loss_of_the_verifier() -> None:
    subject = running()
    subject.handle(verdict(2, 1))
    subject.handle(verdict(3, 0, finish=FinishReason.EOS))
    assert subject.handle(ev.VerifierLost()) == []
    assert subject.handle(ev.VerifierReady()) == []
    assert kinds(subject.handle(ev.Appended())) == ["Emit", "Append", "CloseVerifier"]
    assert kinds(subject.handle(ev.Appended())) == ["Emit", "EmitEnd"]


def test_nothing_follows_the_end() -> None:
    subject = running()
    subject.handle(ev.EndRequested(FinishReason.CANCELLED))
    subject.handle(ev.Appended())
    later: list[ev.Event] = [
        verdict(2, 1),
        ev.VerifierLost(),
        ev.DrafterReady(4),
        ev.DrafterLost(4),
        ev.ProposalArrived(Proposal(4, 0, 2, 0, (1,), 0)),
        ev.PacePlanned(4, Pace(1, 1), 1),
        ev.ClientTook(2),
        ev.Appended(),
        ev.EndRequested(FinishReason.ERROR, "late"),
        ev.VerifierRefused(1, "late"),
        ev.OwnerLost(),
    ]
    assert [subject.handle(event) for event in later] == [[]] * len(later)
    assert subject.state is State.ENDED


def test_a_fenced_owner_emits_and_appends_nothing_more() -> None:
    subject = running()
    subject.handle(ev.DrafterReady(1))
    subject.handle(verdict(2, 1))
    assert subject.handle(ev.OwnerLost()) == [fx.CloseVerifier(), fx.CloseDrafter(1)]
    for event in (ev.Appended(), verdict(3, 1), ev.EndRequested(FinishReason.CANCELLED), ev.OwnerLost()):
        assert subject.handle(event) == []
    assert subject.state is State.FENCED


# What a driver must not do


@pytest.mark.parametrize("event", [ev.VerifierReady(), ev.Appended()])
def test_an_illegal_event_raises_and_changes_nothing(event: ev.Event) -> None:
    subject = running()
    before = (subject.state, subject.durable, list(subject.text.tokens), subject.attach)
    with pytest.raises(IllegalEvent):
        subject.handle(event)
    assert (subject.state, subject.durable, list(subject.text.tokens), subject.attach) == before


def test_a_broken_counter_is_noticed_at_once() -> None:
    subject = running()
    subject.emitted = 5
    with pytest.raises(AssertionError, match="emitted 5 <= durable 2"):
        subject.handle(ev.ClientTook(2))


# The table


def test_schedules_reach_exactly_the_transitions_of_the_table(monkeypatch: pytest.MonkeyPatch) -> None:
    """None of the listed ones is dead; beside them an event of an older connection changes nothing."""
    seen: dict[type[ev.Event], dict[State, set[State]]] = defaultdict(lambda: defaultdict(set))
    original = Session.handle

    def watched(self: Session, event: ev.Event) -> list[fx.Effect]:
        before = self.state
        effects = original(self, event)
        seen[type(event)][before].add(self.state)
        return effects

    monkeypatch.setattr(Session, "handle", watched)
    for seed in range(120):
        random_run(seed)
    for ending in ("cancel", "refuse"):
        end_everywhere(ending)
    for event, transitions in TRANSITIONS.items():
        for state, targets in transitions.items():
            reached = seen[event][state]
            assert targets <= reached <= targets | {state}, f"{event.__name__} in {state}: {reached}"


def end_everywhere(ending: str) -> None:
    """End a session after each of its first events."""
    way: list[ev.Event] = [ev.VerifierReady(), ev.VerifierOpened(1, 2), verdict(2, 1), ev.VerifierLost()]
    for count in range(len(way) + 1):
        subject = session()
        for event in way[:count]:
            subject.handle(event)
        if ending == "cancel":
            subject.handle(ev.EndRequested(FinishReason.CANCELLED))
        else:
            subject.handle(ev.VerifierRefused(subject.attach, "no"))
        while subject.in_flight is not None:
            subject.handle(ev.Appended())
        subject.handle(ev.OwnerLost())
        subject.handle(ev.OwnerLost())


def test_the_same_events_give_the_same_effects() -> None:
    def effects() -> list[str]:
        world, recorded = World(random_run(7).script), []
        original = world.run
        world.run = lambda effect: (recorded.append(repr(effect)), original(effect))[1]  # type: ignore[method-assign,func-returns-value]  # the test steps in between
        world.finish()
        return recorded

    assert effects() == effects()


def test_a_paused_drafter_hears_all_that_it_missed_when_it_goes_on() -> None:
    subject = running()
    subject.handle(ev.DrafterReady(1))
    paused, awake = Pace(1, 0), Pace(4, 4)
    assert subject.handle(ev.PacePlanned(1, paused, 0)) == [fx.AdvanceDrafter(1, 2, (), paused)]
    assert "AdvanceDrafter" not in kinds(subject.handle(verdict(2, 3)))
    assert "AdvanceDrafter" not in kinds(subject.handle(verdict(3, 4, 5)))
    assert subject.handle(ev.PacePlanned(1, awake, 4))[0] == fx.AdvanceDrafter(1, 2, (3, 4, 5), awake)
    assert fx.AdvanceDrafter(1, 5, (6,), awake) in subject.handle(verdict(5, 6))
