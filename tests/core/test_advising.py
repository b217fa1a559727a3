"""What one drafter is told: no gap, whatever its pace was meanwhile."""

from __future__ import annotations

from specwire.core.draft import DraftSession
from specwire.core.messages import AdvanceDrafter, Effect, OpenDrafter, Pace
from specwire.core.session import Advised
from specwire.core.text import Text

AWAKE, PAUSED = Pace(2, 4), Pace(1, 0)


def advised(pace: Pace = AWAKE) -> Advised:
    return Advised(7, pace)


def plan(drafter: Advised, text: Text, pace: Pace) -> list[Effect]:
    drafter.plan(pace)
    return drafter.tell(text)


def decide(drafter: Advised, text: Text, *tokens: int) -> list[Effect]:
    position = len(text)
    text.extend(tokens)
    return drafter.advance(text, position, tokens)


def test_it_opens_with_the_whole_text() -> None:
    assert advised().open(Text([1, 2])) == [OpenDrafter(7, (1, 2), AWAKE)]


def test_what_is_decided_is_told_at_once() -> None:
    text = Text([1, 2])
    assert decide(advised(), text, 3, 4) == [AdvanceDrafter(7, 2, (3, 4), AWAKE)]


def test_one_that_is_paused_hears_it_when_it_goes_on() -> None:
    text, drafter = Text([1, 2]), advised()
    assert plan(drafter, text, PAUSED) == [AdvanceDrafter(7, 2, (), PAUSED)]
    assert decide(drafter, text, 3) == decide(drafter, text, 4) == []
    assert plan(drafter, text, PAUSED) == []
    assert plan(drafter, text, AWAKE) == [AdvanceDrafter(7, 2, (3, 4), AWAKE)]
    assert decide(drafter, text, 5) == [AdvanceDrafter(7, 4, (5,), AWAKE)]


def test_a_new_pace_goes_with_what_is_decided() -> None:
    text, drafter = Text([1, 2]), advised()
    drafter.plan(PAUSED)
    assert decide(drafter, text, 3) == [AdvanceDrafter(7, 2, (3,), PAUSED)]
    assert decide(drafter, text, 4) == []
    drafter.plan(AWAKE)
    assert decide(drafter, text, 5) == [AdvanceDrafter(7, 3, (4, 5), AWAKE)]


def test_a_new_verifier_gets_a_new_chain_also_after_a_pause() -> None:
    for paused in (False, True):
        text, drafter = Text([1, 2, 3]), advised()
        drafting = DraftSession(text.tokens, AWAKE)
        for token in (4, 5):
            drafting.drafted(token)
        first = drafting.take_proposal()
        assert first is not None
        assert first.chain == 0
        effects = plan(drafter, text, PAUSED) if paused else []
        effects += drafter.restart(text)
        effects += plan(drafter, text, AWAKE)
        for effect in effects:
            assert isinstance(effect, AdvanceDrafter)
            drafting.advance(effect.position, effect.tokens, effect.pace)
        assert (drafting.chain > 0, drafting.base) == (True, 3)
        assert drafting.text.tokens == text.tokens


def test_a_text_of_one_token_is_opened_again() -> None:
    assert advised().restart(Text([1])) == [OpenDrafter(7, (1,), AWAKE)]
