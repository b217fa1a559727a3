"""Seeded simulations of whole deployments: every invariant after every callback, every text against plain decoding."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest

from tests.simulation.loop import SimLoop, Stuck, in_strand
from tests.simulation.mistake_scenarios import moved_between_heads
from tests.simulation.mistakes import MISTAKES, Mistake
from tests.simulation.requests import SimRequest
from tests.simulation.run import Violation, check, run
from tests.simulation.scenario import Fault, Scenario, random_scenario
from tests.simulation.shrink import check_and_shrink, formatted

SEEDS = range(200)
# Seeds within which every known mistake is caught.
CAUGHT_WITHIN = 400


@pytest.mark.parametrize("seed", SEEDS)
def test_nothing_that_goes_wrong_changes_a_text(seed: int) -> None:
    check_and_shrink(random_scenario(seed))


@pytest.mark.parametrize("seed", [4, 22, 44, 88])
def test_a_seed_runs_in_the_same_way_every_time(seed: int) -> None:
    scenario = random_scenario(seed)
    assert run(scenario).trace == run(scenario).trace


@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda mistake: mistake.name)
def test_a_mistake_is_caught(mistake: Mistake, monkeypatch: pytest.MonkeyPatch) -> None:
    mistake.make(monkeypatch)
    scenarios = map(mistake.scenarios, dict.fromkeys((mistake.first, *range(CAUGHT_WITHIN))))
    found = next(found for s in scenarios if mistake.shows(s) and (found := run(s).found))
    assert re.search(mistake.by, "\n".join(found)), f"found otherwise: {found}"


def test_many_kinds_of_end_and_of_recovery_are_reached() -> None:
    outcomes = [run(random_scenario(seed)) for seed in range(60)]
    ends = {end for outcome in outcomes for end in outcome.ends}
    assert {"EOS", "LENGTH", "STOP_STRING", "CANCELLED", "left"} <= ends
    reached = sum((outcome.reached for outcome in outcomes), Counter())
    assert {name for name, often in reached.items() if often} == {
        "branched",
        "headed",
        "switched_off",
        "claims",
        "restored",
        "resumed",
        "shared",
        "queued",
        "orphans",
    }


@pytest.mark.parametrize("heads", [("good", ""), ("", "good"), ("good", "good"), ("frail", "frail")], ids=" then ".join)
def test_a_session_goes_on_with_or_without_a_head(heads: tuple[str, str]) -> None:
    """The verifier that has the sessions is cut off; texts are checked as ever."""
    reached: Counter[str] = Counter()
    for seed in range(3):
        outcome = check(moved_between_heads(seed, heads))
        assert dict(outcome.ends).keys() <= {"LENGTH", "EOS"}
        reached += outcome.reached
    assert reached["headed"]
    assert bool(reached["passed_on"]) is ("" in heads)
    assert bool(reached["switched_off"]) is ("frail" in heads)


# Its tools


def test_a_failure_is_made_small_and_can_be_run_again(monkeypatch: pytest.MonkeyPatch) -> None:
    mistake = next(each for each in MISTAKES if each.name == "lost_log_begun_anew")
    mistake.make(monkeypatch)
    scenario = next(s for s in map(mistake.scenarios, range(CAUGHT_WITHIN)) if run(s).found)
    with pytest.raises(Violation) as failed:
        check_and_shrink(scenario)
    found, _, program = str(failed.value).partition("To see it again:")
    assert re.search(mistake.by, found)
    names: dict[str, Any] = {}
    with pytest.raises(Violation) as again:
        exec(program, names)
    small = eval(str(again.value).splitlines()[-1], names)
    assert 1 <= len(small.faults) <= 2
    assert len(small.requests) == 1
    assert program.endswith(f"check({formatted(small)})")


def test_a_session_that_is_followed_may_end_while_its_follower_stops() -> None:
    """Found by seed 1144: it had been taken for one that the follower began."""
    same = SimRequest(0.536, 1, (9, 5, 11, 2, 6, 11), 17, stop=("7 3",), request_id="a", drafting=2)
    requests = (same, SimRequest(0.573, 0, (9,), 1), replace(same, start=0.562, at=0))
    stop = Fault(0.599, "stop", "orchestrator-0", 14.154)
    check(Scenario(1144, orchestrators=2, forward=0.2, draft=0.002, agree=0.0, requests=requests, faults=(stop,)))


def test_an_orchestrator_that_comes_back_without_its_drafter_ends_its_orphans() -> None:
    """Found by seed 7145: it waited for the drafter for as long as for a verifier, and served nobody meanwhile."""
    request = SimRequest(start=0.538, at=0, prompt=(4, 6, 3, 10, 10), max_tokens=1, timeout=0.95, library=True)
    faults = (
        Fault(start=0.608, kind="crash", target="orchestrator-0", seconds=0.3),
        Fault(start=0.9, kind="stop", target="drafter-0", seconds=12.995),
    )
    check(Scenario(7145, forward=0.05, draft=0.002, agree=0.9, requests=(request,), faults=faults))


def test_a_session_may_end_because_its_reader_was_cut_off_for_too_long() -> None:
    """Found by seed 4721: the library comes back after 15.7 s, and is told that readers may be away for 12 s."""
    request = SimRequest(start=0.536, at=0, prompt=(1, 1, 1, 9), max_tokens=40, library=True)
    fault = Fault(start=1.433, kind="close", target="orchestrator-0-client", seconds=15.718)
    for grace, reason in ((12.0, "CANCELLED"), (30.0, "LENGTH")):
        outcome = run(Scenario(4721, forward=0.05, buffer=2, detach_grace=grace, requests=(request,), faults=(fault,)))
        assert not outcome.found
        assert dict(outcome.ends) == {reason: 1}


def new_loop(seed: int) -> SimLoop:
    return SimLoop(seed)  # type: ignore[abstract] # what a simulation has no use for


def test_a_strand_keeps_its_order_and_the_seed_decides_between_strands() -> None:
    orders = set()
    for seed in range(8):
        said: list[tuple[str, int]] = []
        loop = new_loop(seed)
        for strand in ("a", "b"):
            for number in range(4):
                loop.call_soon(said.append, (strand, number), context=loop.context_of(strand))
        loop.run_until(lambda said=said: len(said) == 8, 1.0)  # type: ignore[misc]  # mypy does not infer a lambda's default
        for strand in ("a", "b"):
            assert [number for name, number in said if name == strand] == [0, 1, 2, 3]
        orders.add(tuple(said))
    assert len(orders) > 1


def test_time_stands_still_while_something_runs_and_passes_at_once_where_nothing_does() -> None:
    times: list[float] = []
    loop = new_loop(0)
    loop.call_later(3600.0, lambda: times.append(loop.time()))
    for _ in range(5):
        loop.call_soon(lambda: times.append(loop.time()))
    loop.run_until(lambda: len(times) == 6, 7200.0)
    assert times == [0.0] * 5 + [3600.0]


def test_what_is_held_runs_once_it_is_let_go() -> None:
    said: list[int] = []
    loop = new_loop(0)
    held = loop.context_of("a#1")
    loop.call_soon(said.append, 1, context=held)
    loop.hold("a#1")
    loop.call_soon(said.append, 2, context=held)
    loop.call_soon(said.append, 3, context=loop.context_of("b"))
    with pytest.raises(Stuck):
        loop.run_until(lambda: len(said) > 1, 1.0)
    assert said == [3]
    loop.let_go("a#1")
    loop.run_until(lambda: len(said) > 2, 1.0)
    assert said == [3, 1, 2]


def test_what_nobody_will_wake_is_found_stuck() -> None:
    loop = new_loop(0)

    async def wait() -> None:
        await loop.create_future()

    waiting = in_strand(loop, "a", wait())
    with pytest.raises(Stuck):
        loop.run_until(waiting.done, 10.0)
    assert loop.left_of("a")
    loop.bury(10.0)
    assert waiting.cancelled()


def test_a_session_that_is_forgotten_leaves_no_append_behind() -> None:
    """Seed 7014: another orchestrator took it over while the log did not answer, which forgot it before that ended."""
    request = SimRequest(start=0.87, at=0, prompt=(1, 6, 11, 5, 10, 4), max_tokens=21, library=True)
    faults = (
        Fault(start=1.295, kind="log_cut", target="orchestrator-0", seconds=33.605),
        Fault(start=1.345, kind="cut", target="orchestrator-0-client", seconds=0.025),
        Fault(start=1.453, kind="stop", target="verifier-0", seconds=15.947),
    )
    check(
        Scenario(
            7014,
            orchestrators=2,
            forward=0.05,
            draft=0.002,
            agree=0.0,
            retention=5.0,
            requests=(request,),
            faults=faults,
        )
    )


def test_a_session_whose_last_token_is_in_its_slot_already_goes_on() -> None:
    """Seed 1300: a session that was taken over had nothing left to feed, and was given no row for ever."""
    check(
        Scenario(
            1300,
            orchestrators=2,
            forward=0.2,
            draft=0.002,
            agree=0.9,
            delay=(0.0002, 0.02),
            buffer=2,
            requests=(
                SimRequest(0.677, at=0, prompt=(4, 9, 6, 6, 2), max_tokens=31, temperature=0.5, request_id="request-0"),
                SimRequest(0.686, at=0, prompt=(5, 7, 11), max_tokens=4, drafting=4),
            ),
            faults=(Fault(2.207, "cut", "orchestrator-0-client"),),
        )
    )
