"""The orchestrator's session, event by event; the machine's tests run it against the other parties."""

from __future__ import annotations

from collections import defaultdict

import pytest

from specwire.core import messages
from specwire.core.messages import FinishReason, Outcome, Pace, Proposal, SourcePace, Verdict
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
    subject.handle(messages.VerifierReady())
    subject.handle(messages.VerifierOpened(1, 2))
    return subject


def verdict(
    position: int, *tokens: int, attach: int = 1, finish: FinishReason | None = None
) -> messages.VerdictArrived:
    return messages.VerdictArrived(attach, Verdict(position, tokens, (D,) * len(tokens), 0, finish))


def kinds(effects: list[messages.Effect]) -> list[str]:
    return [type(effect).__name__ for effect in effects]


def test_one_append_at_a_time_takes_all_that_was_decided_meanwhile() -> None:
    subject = running()
    subject.handle(verdict(2, 1))
    assert subject.handle(verdict(3, 2)) == []
    assert subject.handle(verdict(4, 1, 2)) == []
    emit, append = subject.handle(messages.Appended())
    assert isinstance(emit, messages.Emit)
    assert emit.tokens == (1,)
    assert append == messages.Append(3, (2, 1, 2), (D,) * 3, None)


# A token's way


def test_the_drafter_hears_before_the_log() -> None:
    subject = running()
    subject.handle(messages.DrafterReady(5))
    assert kinds(subject.handle(verdict(2, 1))) == ["AdvanceDrafter", "Append"]
    assert subject.handle(verdict(3, 2)) == [messages.AdvanceDrafter(5, 3, (2,), Pace())]


def test_a_verdict_without_tokens_may_end_the_session() -> None:
    """The text held its end already: the former owner died between the append and its acknowledgement."""
    subject = running()
    append = subject.handle(verdict(2, finish=FinishReason.LENGTH))[0]
    assert append == messages.Append(2, (), (), messages.End(FinishReason.LENGTH, "", 0))
    assert kinds(subject.handle(messages.Appended())) == ["EmitEnd"]


def test_a_refusal_after_the_end_was_decided_does_not_change_it() -> None:
    subject = running()
    subject.handle(verdict(2, 1))
    subject.handle(verdict(3, 0, finish=FinishReason.EOS))
    subject.handle(messages.VerifierRefused(1, "too late"))
    append = next(effect for effect in subject.handle(messages.Appended()) if isinstance(effect, messages.Append))
    assert append.end is not None
    assert append.end.reason is FinishReason.EOS


# Stop strings


def test_a_stop_string_cuts_tokens_and_text() -> None:
    subject = running("ba")
    append = subject.handle(verdict(2, 1, 2, 1, 2, 2))[0]
    assert isinstance(append, messages.Append)
    assert append.tokens == (1, 2, 1)
    assert append.end == messages.End(FinishReason.STOP_STRING, "", 1)
    assert subject.text.tokens == [1, 2, 1, 2, 1]
    emit, end = subject.handle(messages.Appended())
    assert isinstance(emit, messages.Emit)
    assert isinstance(end, messages.EmitEnd)
    assert emit.text + end.text == "a"


def test_a_stop_string_before_an_eos_wins_and_one_behind_the_end_does_not_exist() -> None:
    subject = running("ba")
    append = subject.handle(verdict(2, 2, 1, 0, finish=FinishReason.EOS))[0]
    assert isinstance(append, messages.Append)
    assert append.end is not None
    assert (append.tokens, append.end.reason) == ((2, 1), FinishReason.STOP_STRING)


def test_what_may_begin_a_stop_string_is_withheld_until_the_end() -> None:
    subject = running("bb")
    subject.handle(verdict(2, 1, 2))
    emit = subject.handle(messages.Appended())[0]
    assert isinstance(emit, messages.Emit)
    assert (emit.text, emit.text_ends) == ("a", (1, 2))
    subject.handle(verdict(4, 0, finish=FinishReason.EOS))
    end = subject.handle(messages.Appended())[-1]
    assert end == messages.EmitEnd(messages.End(FinishReason.EOS, "", 2), "b")


def test_a_loss_leaves_the_drafter_where_it_is() -> None:
    subject = running()
    subject.handle(messages.DrafterReady(1))
    subject.handle(verdict(2, 1))
    subject.handle(verdict(3, 2, 1))
    assert subject.handle(messages.VerifierLost()) == []
    assert subject.text.tokens == [1, 2, 1, 2, 1]


# The verifier


def test_a_stop_string_in_what_a_lost_verifier_decided_ends_the_session() -> None:
    subject = running("ba")
    subject.handle(verdict(2, 1))
    subject.handle(verdict(3, 2, 1))
    subject.handle(messages.VerifierLost())
    append = next(effect for effect in subject.handle(messages.Appended()) if isinstance(effect, messages.Append))
    assert append.end is not None
    assert append.end.reason is FinishReason.STOP_STRING


@pytest.mark.parametrize(
    ("event", "said"),
    [
        (verdict(3, 1), "decided 3 after 2"),
        (verdict(1, 1), "decided 1 after 2"),
        (verdict(2, *[1] * 9), "credit of 10"),
    ],
)
def test_a_verifier_that_breaks_the_order_ends_the_session(event: messages.Event, said: str) -> None:
    append = running().handle(event)[0]
    assert isinstance(append, messages.Append)
    assert append.tokens == ()
    assert append.end is not None
    assert append.end.reason is FinishReason.ERROR
    assert said in append.end.message


def test_a_verdict_with_too_few_outcomes_changes_nothing() -> None:
    subject = running()
    with pytest.raises(ValueError, match="one per token"):
        subject.handle(messages.VerdictArrived(1, Verdict(2, (1, 2), (D,), 0)))
    assert subject.text.tokens == list(PROMPT)


@pytest.mark.parametrize("opened", [False, True])
def test_a_refusal_ends_the_session_with_its_message(opened: bool) -> None:
    subject = running() if opened else session()
    if not opened:
        subject.handle(messages.VerifierReady())
    append = subject.handle(messages.VerifierRefused(1, "no slots"))[0]
    assert isinstance(append, messages.Append)
    assert append.end == messages.End(FinishReason.ERROR, "no slots", 0)


# Credit


def test_credit_rises_when_half_the_buffer_is_earned() -> None:
    subject = running(buffer=8)
    subject.handle(verdict(2, 1, 1, 1, 1))
    subject.handle(messages.Appended())
    assert subject.handle(messages.ClientTook(5)) == []
    assert subject.handle(messages.ClientTook(6)) == [messages.SendProgress(6, 14)]
    assert subject.handle(messages.ClientTook(4)) == []
    assert subject.taken == 6


def test_a_buffer_of_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="buffer"):
        session(buffer=0)


# The drafter


def test_a_drafter_opens_with_the_whole_decided_text() -> None:
    subject = running()
    subject.handle(verdict(2, 1))
    told = messages.OpenDrafter(3, (1, 2, 1), Pace()), messages.TellDrafters((3,))
    assert subject.handle(messages.DrafterReady(3)) == [*told]


def test_the_verifier_is_told_who_drafts() -> None:
    subject = session()
    assert kinds(subject.handle(messages.DrafterReady(1))) == ["OpenDrafter"], "nobody is there to be told"
    assert subject.handle(messages.VerifierReady())[0] == messages.OpenVerifier(1, PROMPT, 2, 10, (1,))
    assert messages.TellDrafters((1, 2)) in subject.handle(messages.DrafterReady(2))
    assert subject.handle(messages.DrafterLost(1)) == [messages.TellDrafters((2,))]


def planned(position: int, *paces: SourcePace, tokens: tuple[int, ...] = (3,)) -> messages.VerdictArrived:
    return messages.VerdictArrived(1, Verdict(position, tokens, (D,) * len(tokens), 0, paces=paces))


def test_a_verifier_that_opens_plans_at_once() -> None:
    subject = session()
    subject.handle(messages.VerifierReady())
    subject.handle(messages.DrafterReady(1))
    opened = messages.VerifierOpened(1, 2, (SourcePace(1, Pace(1, 9)), SourcePace(7, Pace(1, 1))))
    assert subject.handle(opened) == [messages.AdvanceDrafter(1, 2, (), Pace(1, 9))]


def test_a_pace_goes_with_the_tokens_of_its_verdict() -> None:
    subject = running()
    subject.handle(messages.DrafterReady(1))
    assert subject.handle(planned(2, SourcePace(1, Pace(1, 9))))[0] == messages.AdvanceDrafter(1, 2, (3,), Pace(1, 9))
    assert subject.handle(planned(3, SourcePace(1, Pace(1, 9))))[0] == messages.AdvanceDrafter(1, 3, (3,), Pace(1, 9))


def test_a_drafter_of_other_weights_draws_in_an_epoch_of_its_own() -> None:
    subject = running()
    before = subject.epoch(weighed=True)
    subject.handle(verdict(2, 1))
    subject.handle(messages.Appended())
    assert subject.handle(messages.DrafterReady(2, renews=True)) == [
        messages.OpenVerifier(2, (1, 2, 1), 3, subject.credit, (2,)),
        messages.OpenDrafter(2, (1, 2, 1), Pace()),
    ]
    assert (subject.state, subject.attach) == (State.OPENING, 2)
    assert subject.epoch(weighed=True) != before
    assert subject.handle(verdict(3, 1)) == [], "of the former connection: it is told again"


def test_it_is_told_nothing_before_that_epoch_begins() -> None:
    subject = running()
    subject.handle(verdict(2, 1))
    for event in (messages.DrafterReady(2, renews=True), planned(3, SourcePace(2, Pace(2, 2)))):
        assert subject.handle(event) == [], "the append is under way"
    emit, *opening = subject.handle(messages.Appended())
    assert isinstance(emit, messages.Emit)
    assert opening == [
        messages.OpenVerifier(2, (1, 2, 1), 3, subject.credit, (2,)),
        messages.OpenDrafter(2, (1, 2, 1), Pace()),
    ]
    opened = messages.VerifierOpened(2, 3, (SourcePace(2, Pace(3, 3)),))
    assert subject.handle(opened) == [messages.AdvanceDrafter(2, 3, (), Pace(3, 3))]


def test_where_no_verifier_is_there_the_next_one_s_epoch_will_do() -> None:
    subject = session()
    assert subject.handle(messages.DrafterReady(1, renews=True)) == []
    assert kinds(subject.handle(messages.VerifierReady())) == ["OpenVerifier", "OpenDrafter"]
    assert subject.attach == 1


def test_the_loss_of_a_former_drafter_means_nothing() -> None:
    subject = running()
    subject.handle(messages.DrafterReady(2))
    assert subject.handle(messages.DrafterLost(1)) == []
    assert list(subject.drafters) == [2]


def test_each_drafter_is_told_at_its_own_pace() -> None:
    subject = running()
    quick, paused = Pace(4, 8), Pace(1, 0)
    subject.handle(messages.DrafterReady(1, quick))
    assert subject.handle(messages.DrafterReady(2, paused))[0] == messages.OpenDrafter(2, PROMPT, paused)
    assert subject.handle(verdict(2, 3))[0] == messages.AdvanceDrafter(1, 2, (3,), quick)
    slow = Pace(1, 1)
    effects = subject.handle(planned(3, SourcePace(2, slow), tokens=(4,)))
    told = [effect for effect in effects if isinstance(effect, messages.AdvanceDrafter)]
    assert told == [messages.AdvanceDrafter(1, 3, (4,), quick), messages.AdvanceDrafter(2, 2, (3, 4), slow)]


def test_the_loss_of_one_drafter_leaves_the_other_what_it_was() -> None:
    subject = running()
    subject.handle(messages.DrafterReady(1, Pace(4, 4)))
    subject.handle(messages.DrafterReady(2, Pace(2, 2)))
    assert subject.handle(messages.DrafterLost(1)) == [messages.TellDrafters((2,))]
    of_one, of_other = (Proposal(source, 0, 2, 0, (1,), 7) for source in (1, 2))
    assert subject.handle(messages.ProposalArrived(of_one)) == []
    assert subject.handle(messages.ProposalArrived(of_other)) == [messages.RelayProposal(of_other)]
    assert subject.handle(verdict(2, 3))[0] == messages.AdvanceDrafter(2, 2, (3,), Pace(2, 2))


def test_all_drafters_begin_a_new_chain_for_a_verifier_that_opens_and_all_are_closed() -> None:
    subject = session()
    for source in (1, 2):
        subject.handle(messages.DrafterReady(source))
    restarts = subject.handle(messages.VerifierReady())[1:]
    assert [(e.source, e.tokens) for e in restarts if isinstance(e, messages.AdvanceDrafter)] == [
        (1, ()),
        (1, (2,)),
        (2, ()),
        (2, (2,)),
    ]
    closing = subject.handle(messages.OwnerLost())
    assert closing == [messages.CloseVerifier(), messages.CloseDrafter(1), messages.CloseDrafter(2)]
    assert subject.drafters == {}


def test_proposals_are_relayed_once_the_verifier_was_asked_to_open() -> None:
    proposal = Proposal(0, 0, 2, 0, (1,), 7)
    subject = session()
    subject.handle(messages.DrafterReady(0))
    assert subject.handle(messages.ProposalArrived(proposal)) == []
    subject.handle(messages.VerifierReady())
    assert subject.handle(messages.ProposalArrived(proposal)) == [messages.RelayProposal(proposal)]
    subject.handle(messages.VerifierOpened(1, 2))
    assert subject.handle(messages.ProposalArrived(proposal)) == [messages.RelayProposal(proposal)]
    subject.handle(messages.DrafterLost(0))
    assert subject.handle(messages.ProposalArrived(proposal)) == []


def test_with_a_text_of_one_token_it_is_opened_again() -> None:
    subject = Session(Text([3]), 1, LetterScanner(()))
    subject.handle(messages.DrafterReady(1))
    assert subject.handle(messages.VerifierReady())[1:] == [messages.OpenDrafter(1, (3,), Pace())]


# The end


@pytest.mark.parametrize("waiting", [True, False])
def test_a_cancelled_session_appends_its_end(waiting: bool) -> None:
    subject = session() if waiting else running()
    append = subject.handle(messages.EndRequested(FinishReason.CANCELLED))[0]
    assert append == messages.Append(2, (), (), messages.End(FinishReason.CANCELLED, "", 0))
    assert subject.handle(messages.EndRequested(FinishReason.DEADLINE)) == []
    assert kinds(subject.handle(messages.Appended())) == ["EmitEnd"]


def test_an_end_waits_for_the_append_under_way_and_takes_what_was_decided_before_it() -> None:
    subject = running()
    subject.handle(messages.DrafterReady(1))
    subject.handle(verdict(2, 1))
    subject.handle(verdict(3, 2))
    assert subject.handle(messages.EndRequested(FinishReason.DEADLINE)) == []
    assert subject.handle(verdict(4, 1)) == []
    _, append, *closing = subject.handle(messages.Appended())
    assert isinstance(append, messages.Append)
    assert append == messages.Append(3, (2,), (D,), messages.End(FinishReason.DEADLINE, "", 2))
    assert closing == [messages.CloseVerifier(), messages.CloseDrafter(1)]


def test_an_end_survives_the_loss_of_the_verifier() -> None:
    subject = running()
    subject.handle(verdict(2, 1))
    subject.handle(verdict(3, 0, finish=FinishReason.EOS))
    assert subject.handle(messages.VerifierLost()) == []
    assert subject.handle(messages.VerifierReady()) == []
    assert kinds(subject.handle(messages.Appended())) == ["Emit", "Append", "CloseVerifier"]
    assert kinds(subject.handle(messages.Appended())) == ["Emit", "EmitEnd"]


def test_nothing_follows_the_end() -> None:
    subject = running()
    subject.handle(messages.EndRequested(FinishReason.CANCELLED))
    subject.handle(messages.Appended())
    later: list[messages.Event] = [
        verdict(2, 1),
        messages.VerifierLost(),
        messages.DrafterReady(4),
        messages.DrafterLost(4),
        messages.ProposalArrived(Proposal(4, 0, 2, 0, (1,), 0)),
        messages.ClientTook(2),
        messages.Appended(),
        messages.EndRequested(FinishReason.ERROR, "late"),
        messages.VerifierRefused(1, "late"),
        messages.OwnerLost(),
    ]
    assert [subject.handle(event) for event in later] == [[]] * len(later)
    assert subject.state is State.ENDED


def test_a_fenced_owner_emits_and_appends_nothing_more() -> None:
    subject = running()
    subject.handle(messages.DrafterReady(1))
    subject.handle(verdict(2, 1))
    assert subject.handle(messages.OwnerLost()) == [messages.CloseVerifier(), messages.CloseDrafter(1)]
    for event in (
        messages.Appended(),
        verdict(3, 1),
        messages.EndRequested(FinishReason.CANCELLED),
        messages.OwnerLost(),
    ):
        assert subject.handle(event) == []
    assert subject.state is State.FENCED


# What a driver must not do


@pytest.mark.parametrize("event", [messages.VerifierReady(), messages.Appended()])
def test_an_illegal_event_raises_and_changes_nothing(event: messages.Event) -> None:
    subject = running()
    before = (subject.state, subject.durable, list(subject.text.tokens), subject.attach)
    with pytest.raises(IllegalEvent):
        subject.handle(event)
    assert (subject.state, subject.durable, list(subject.text.tokens), subject.attach) == before


def test_a_broken_counter_is_noticed_at_once() -> None:
    subject = running()
    subject.emitted = 5
    with pytest.raises(AssertionError, match="emitted 5 <= durable 2"):
        subject.handle(messages.ClientTook(2))


# The table


def test_schedules_reach_exactly_the_transitions_of_the_table(monkeypatch: pytest.MonkeyPatch) -> None:
    """None of the listed ones is dead; beside them an event of an older connection changes nothing."""
    seen: dict[type[messages.Event], dict[State, set[State]]] = defaultdict(lambda: defaultdict(set))
    original = Session.handle

    def watched(self: Session, event: messages.Event) -> list[messages.Effect]:
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
    way: list[messages.Event] = [
        messages.VerifierReady(),
        messages.VerifierOpened(1, 2),
        verdict(2, 1),
        messages.VerifierLost(),
    ]
    for count in range(len(way) + 1):
        subject = session()
        for event in way[:count]:
            subject.handle(event)
        if ending == "cancel":
            subject.handle(messages.EndRequested(FinishReason.CANCELLED))
        else:
            subject.handle(messages.VerifierRefused(subject.attach, "no"))
        while subject.in_flight is not None:
            subject.handle(messages.Appended())
        subject.handle(messages.OwnerLost())
        subject.handle(messages.OwnerLost())


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
    subject.handle(messages.DrafterReady(1))
    paused, awake = Pace(1, 0), Pace(4, 4)
    assert subject.handle(planned(2, SourcePace(1, paused)))[0] == messages.AdvanceDrafter(1, 2, (3,), paused)
    assert "AdvanceDrafter" not in kinds(subject.handle(verdict(3, 4, 5)))
    back = planned(5, SourcePace(1, awake), tokens=(6,))
    assert subject.handle(back)[0] == messages.AdvanceDrafter(1, 3, (4, 5, 6), awake)
    assert messages.AdvanceDrafter(1, 6, (7,), awake) in subject.handle(verdict(6, 7))
