"""How many sessions a verifier holds: the search, what is counted, and a small case by hand."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest

from bench import capacity
from bench.batch.sessions import Asked
from bench.capacity import (
    BOX,
    FAR,
    LONG,
    NEAR,
    SHORT,
    WITHOUT,
    Capacity,
    CapacityLevel,
    CapacityPlacement,
    EmulatedTarget,
)
from bench.harness.runs import Arrival, Run
from specwire.lm.scripted import Script


def level(sessions: int, held: bool) -> CapacityLevel:
    return CapacityLevel(sessions, 20.0 if held else 19.9, 21.0, 100.0, 40, 1, 2.0, 50.0)


@pytest.mark.parametrize("guess", [1, 2, 7, 12, 13, 30, 64])
@pytest.mark.parametrize("most", [0, 1, 11, 12, 40])
def test_the_most_that_is_held_is_found_from_any_guess(guess: int, most: int) -> None:
    asked: list[int] = []

    def tried(sessions: int) -> CapacityLevel:
        asked.append(sessions)
        return level(sessions, sessions <= most)

    found = Capacity(LONG, NEAR, capacity.most_held(tried, guess))
    assert found.sessions == most
    assert len(set(asked)) == len(asked) == len(found.levels)
    assert all(sessions >= 1 for sessions in asked)
    assert [one.sessions for one in found.levels] == sorted(asked)


def test_the_levels_that_decide_are_run_again_and_the_median_counts() -> None:
    """Of nine sessions the first run is lucky, of eight each one holds."""
    lucky = iter([True, False, False])

    def tried(sessions: int) -> CapacityLevel:
        return level(sessions, sessions <= 8 or (sessions == 9 and next(lucky)))

    found = Capacity(LONG, NEAR, capacity.most_held(tried, 9, repeats=3))
    assert found.sessions == 8
    assert {one.sessions: (one.runs, one.counted) for one in found.levels} == {8: (3, 120), 9: (3, 120), 10: (1, 40)}


async def test_a_slow_session_that_begins_in_the_window_counts_and_the_load_stays_until_it_ends(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    slow, ended = Run((), 9.0, 0.5, 3), list[Run]()

    async def generate(_asked: object, prompt: Sequence[int], _tokens: int) -> tuple[str, Run]:
        await asyncio.sleep(0.5 if prompt == (1,) else 0.02)
        ended.append(slow if prompt == (1,) else Run((), 1.0, 0.1, 3))
        return "s", ended[-1]

    async def forget(_client: object, _ids: Sequence[str]) -> None:
        pass

    monkeypatch.setattr(capacity, "generate", generate)
    monkeypatch.setattr(capacity, "forget", forget)
    now = time.monotonic()
    asked = Asked(SimpleNamespace(), "edge", drafting=True)  # type: ignore[arg-type]  # nobody calls it
    load = capacity.CapacityLoad(asked, 2, now, now + 0.1)
    async with asyncio.timeout(20), asyncio.TaskGroup() as group:
        for place in range(2):
            group.create_task(load.follow(place))
    assert load.counted.count(slow) == 1
    assert len(load.counted) < ended.index(slow), "the load ended with the window, or what came behind it counts"


def test_a_level_is_held_by_nearly_all_sessions_and_pauses() -> None:
    assert capacity.level_of(9, [20.0] * 96 + [1.0] * 4, [249.0] * 96 + [900.0] * 4).held
    assert not capacity.level_of(9, [20.0] * 93 + [1.0] * 7, [249.0] * 100).held
    assert not capacity.level_of(9, [20.0] * 100, [249.0] * 93 + [251.0] * 7).held


def test_pauses_and_speed_are_of_what_comes_behind_the_first_arrival() -> None:
    arrivals = tuple(Arrival(tokens, at * 1_000_000) for tokens, at in ((1, 500), (2, 540), (3, 640)))
    run = Run((1, 2, 3, 4, 5, 6), 9.0, 0.5, 3, arrivals=arrivals)
    assert capacity.pauses_ms(run) == [40.0, 100.0]
    assert capacity.speed(run) == pytest.approx(5 / 0.14)


def test_without_drafting_it_is_what_arithmetic_says() -> None:
    """20 tokens/s each is a forward of 50 ms: 30 ms and 20 more, of which a further session takes 2.4."""
    found = capacity.simulated((EmulatedTarget(0.08, 0.0), WITHOUT))
    assert found.sessions == 1 + int(20 / 2.4)
    assert found.best is not None
    assert found.best.window == 0.0


def test_devices_take_the_times_that_are_stated(tmp_path: Path) -> None:
    for target in (LONG, SHORT):
        for placement in (NEAR, BOX):
            pair = capacity.emulated(target, placement, tmp_path)
            verifier, drafter = Script.parse(pair.target), Script.parse(pair.draft)
            ms = 30 * (1 + 2 * target.session + 6 * target.row)
            assert verifier.duration(9, 3) == pytest.approx(ms / 1000)
            assert drafter.duration(3, 3) == pytest.approx(8 * (1 + 2 * capacity.DRAFT_SLOPE) / 1000)
            assert (verifier.turns == drafter.turns != "") is placement.shared
            assert (verifier.device == drafter.device) is placement.shared


def test_what_is_needed_is_held_against_no_drafting() -> None:
    def held(target: EmulatedTarget, placement: CapacityPlacement, most: int) -> Capacity:
        return Capacity(target, placement, (level(most, True), level(most + 1, False)))

    found = [held(LONG, WITHOUT, 10), held(LONG, NEAR, 16), held(SHORT, WITHOUT, 10), held(SHORT, NEAR, 15)]
    assert [(bar.name.split(":")[0], bar.holds) for bar in capacity.bars(found)] == [(LONG.name, True)]
    assert not capacity.bars([held(LONG, WITHOUT, 10), held(LONG, NEAR, 15)])[0].holds
    told = capacity.report([], [*found, held(LONG, FAR, 12), held(LONG, BOX, 11)])
    assert "1.60" in told
    assert told.count("edge, 80 ms") == 1
    limit = capacity.bound(held(LONG, NEAR, 16))
    assert limit == pytest.approx(1 + 2.0 * 8 * (1 + 15 * capacity.DRAFT_SLOPE) / 50.0)
