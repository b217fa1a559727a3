"""A step is planned by a pure function; these tests show it states and read its plans."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from specwire.core.messages import MOST_WINDOW, SourceKind
from specwire.core.policy import windows
from specwire.core.policy.costs import part_of
from specwire.core.policy.drafters import Due
from specwire.core.policy.estimates import AcceptanceByPosition, expected_tokens
from specwire.core.policy.tunables import PREFILL_ROWS
from specwire.core.policy.windows import Guess, Share, StepCandidate, StepPlan, schedule


def flat(_: int) -> float:
    return 1000.0


def linear(rows: int) -> float:
    return 1000.0 * rows


def acceptance(rate: float) -> AcceptanceByPosition:
    """Learned from 200 windows at this rate (by an even pattern)."""
    learned, owed = AcceptanceByPosition(), 0.0
    for _ in range(200):
        owed += rate
        accepted = MOST_WINDOW if owed >= 1 else 0
        owed -= accepted > 0
        learned.observe(MOST_WINDOW, accepted)
    return learned


def candidate(
    slot: int = 0,
    room: int = 100,
    uncached: int = 1,
    drafted: int = 0,
    spare_us: float = 1e6,
    rate: float = 0.9,
    awaited: tuple[int, Due | None] = (0, None),
) -> StepCandidate:
    return StepCandidate(slot, room, uncached, drafted, spare_us, acceptance(rate), awaited[1], awaited[0])


def test_every_session_with_room_decides_at_least_one_token() -> None:
    plan = schedule([candidate(0), candidate(1, drafted=3), candidate(2, room=1, drafted=3)], 0.0, flat)
    assert plan.shares == (Share(0, 1, 0, True), Share(1, 1, 3, True), Share(2, 1, 0, True))
    assert plan.wait_until_us is None


@pytest.mark.parametrize(("room", "drafted", "window"), [(100, 40, MOST_WINDOW), (4, 9, 3), (2, 9, 1), (1, 9, 0)])
def test_window_fits_the_room(room: int, drafted: int, window: int) -> None:
    assert schedule([candidate(room=room, drafted=drafted)], 0.0, flat).shares[0].window == window


@pytest.mark.parametrize(("spare_us", "window"), [(0.0, 0), (99.0, 0), (100.0, 1), (350.0, 3), (9999.0, 10)])
def test_window_is_no_wider_than_the_ledger_bears_if_all_of_it_is_wrong(spare_us: float, window: int) -> None:
    plan = schedule([candidate(drafted=10, rate=1.0, spare_us=spare_us)], 0.0, lambda rows: 1000.0 + 100.0 * rows)
    assert plan.shares[0].window == window


def test_a_window_is_weighed_beside_all_that_it_delays() -> None:
    """Alone, a token that is right every second time is worth 20 % more time; it is not if eight others wait for it."""
    guesses = [guessing(0.5, tokens=1, slot=slot) for slot in range(9)]
    assert [share.window for share in schedule(guesses[:1], 0.0, steady).shares] == [1]
    assert {share.window for share in schedule(guesses, 0.0, steady).shares} == {0}


def steady(rows: int) -> float:
    return 1000.0 + 200.0 * (rows - 1)


def best_rate(candidates: Sequence[StepCandidate], V: Callable[[int], float]) -> float:
    """Of all ways to give each session a window, or none: the most tokens per microsecond."""
    most = {0: 0.0}  # tokens that so many rows can be expected to decide
    for each in candidates:
        wider: dict[int, float] = {}
        for window in range(each.drafted + 1):
            tokens = expected_tokens(each.acceptance.rates(window), window)
            for rows, others in most.items():
                wider[rows + 1 + window] = max(wider.get(rows + 1 + window, 0.0), others + tokens)
        most = wider
    return max(tokens / V(rows) for rows, tokens in most.items())


@pytest.mark.parametrize("slope_us", [5.0, 60.0, 500.0])
def test_rows_go_where_the_expected_gain_is_highest(slope_us: float) -> None:
    """Within a hundredth of the best division of rows that there is, whichever order the sessions come in."""
    choice = random.Random(int(slope_us))
    for _ in range(20):
        free = choice.choice((4, 8, 16, 32))

        def V(rows: int, free: int = free) -> float:
            return 1000.0 + slope_us * max(0, rows - free)

        candidates = [
            candidate(slot, drafted=choice.randint(1, 8), rate=choice.choice((0.1, 0.3, 0.5, 0.7, 0.9)))
            for slot in range(choice.choice((2, 5, 12)))
        ]
        shares = schedule(candidates, 0.0, V).shares
        rates = [candidates[share.slot].acceptance.rates(share.window) for share in shares]
        tokens = sum(expected_tokens(each, share.window) for each, share in zip(rates, shares, strict=True))
        assert tokens / V(sum(share.rows for share in shares)) >= 0.99 * best_rate(candidates, V)


@pytest.mark.parametrize(("spare_us", "sessions"), [(math.inf, 32), (1e9, 2), (0.0, 32)])
def test_windows_shrink_to_zero_where_none_is_worth_it(spare_us: float, sessions: int) -> None:
    """Whatever a ledger has put by while the verifier was less busy."""
    full = [candidate(slot, drafted=8, rate=0.7, spare_us=spare_us) for slot in range(sessions)]
    assert {share.window for share in schedule(full, 0.0, linear).shares} == {0}
    assert {share.window for share in schedule(full, 0.0, flat).shares} == {8}


@pytest.mark.parametrize("rate", [0.4, 0.9])
def test_a_window_may_pay_beyond_widths_that_do_not(rate: float) -> None:
    """V(m) need not rise: a float32 library may take longer for two rows than for five."""
    table = {1: 15_400.0, 2: 25_900.0, 3: 32_000.0, 4: 27_700.0, 5: 15_800.0}
    [share] = schedule([candidate(drafted=4, rate=rate)], 0.0, lambda rows: table.get(rows, 60_000.0)).shares
    assert share.window == 4


def charges_us(candidates: Sequence[StepCandidate], V: Callable[[int], float]) -> list[tuple[float, float]]:
    """Of each session with a window: what it is charged for it if all of it is wrong, and what it may lose."""
    sessions, shares = len(candidates), schedule(candidates, 0.0, V).shares
    windows = sum(share.window for share in shares)
    all_us = max(0.0, V(sessions + windows) - V(sessions))
    return [
        (part_of(share.window, windows, sessions) * all_us, candidates[share.slot].spare_us)
        for share in shares
        if share.window
    ]


@pytest.mark.parametrize("seed", range(40))
def test_no_session_is_charged_more_than_it_bears_whatever_rows_cost(seed: int) -> None:
    """Where any window costs something, and where V(m) rises in steps; a test of the estimates is due for some."""
    chance = random.Random(seed)
    any_us, row_us, steps = 400.0 * chance.random(), 60.0 * chance.random(), chance.choice((1, 4))

    def V(rows: int) -> float:
        further = max(0, rows - 8)
        return 1000.0 + (any_us if further else 0.0) + row_us * steps * -(-further // steps)

    batch = [
        candidate(slot, drafted=4, rate=0.5 + 0.5 * chance.random(), spare_us=4000.0 * chance.random() ** 2)._replace(
            untested_us=chance.choice((0.0, 1e7))
        )
        for slot in range(8)
    ]
    for charge_us, spare_us in charges_us(batch, V):
        assert charge_us <= spare_us + 1e-6


@pytest.mark.parametrize(("most_rows", "rows"), [(1, 2), (2, 2), (5, 5), (99, 10)])
def test_a_step_has_no_more_rows_than_there_is_memory_for(most_rows: int, rows: int) -> None:
    batch = [candidate(0, drafted=4, rate=0.95), candidate(1, drafted=4, rate=0.9)]
    assert sum(share.rows for share in schedule(batch, 0.0, flat, most_rows=most_rows).shares) == rows


def test_where_rows_come_in_fours_four_windows_may_gain_what_one_does_not() -> None:
    def fours(rows: int) -> float:
        return 1000.0 + 250.0 * (-(-rows // 4) - 1)

    batch = [candidate(slot, drafted=1, rate=0.6) for slot in range(4)]
    assert [share.window for share in schedule(batch, 0.0, fours).shares] == [1, 1, 1, 1]
    lone = [batch[0], *[each._replace(drafted=0) for each in batch[1:]]]
    assert [share.window for share in schedule(lone, 0.0, fours).shares] == [0, 0, 0, 0]


@pytest.mark.parametrize(("untested_us", "sessions", "window"), [(1e5, 1, 0), (3e5, 1, 1), (3e5, 2, 0), (6e5, 2, 1)])
def test_now_and_then_a_token_of_a_chain_is_tested_that_is_worth_nothing(
    untested_us: float, sessions: int, window: int
) -> None:
    """Else a rate that fell under a rule that learns from tests alone could never rise again. 1 ms is 0.5 % of 200 ms,
    and in a batch everybody's.
    """
    first = candidate(drafted=8, rate=0.0)._replace(untested_us=untested_us)
    others = [candidate(slot) for slot in range(1, sessions)]
    assert schedule([first, *others], 0.0, linear).shares[0].window == window


@pytest.mark.parametrize(("untested_us", "window"), [(0.0, 0), (1e6, 4)])
def test_whole_chunks_are_withdrawn_whole(untested_us: float, window: int) -> None:
    chunks = candidate(drafted=8, rate=0.1)._replace(whole=(4, 8), untested_us=untested_us)
    assert schedule([chunks], 0.0, linear).shares[0].window == window


def test_prompts_share_a_budget_and_wait_their_turn() -> None:
    plan = schedule([candidate(0, uncached=400), candidate(1, uncached=400), candidate(2)], 0.0, flat)
    assert plan.shares == (Share(2, 1, 0, True), Share(0, 400, 0, True), Share(1, PREFILL_ROWS - 400, 0, False))


def test_prompt_without_budget_is_left_out_and_a_lone_one_never_starves() -> None:
    plan = schedule([candidate(0, uncached=9), candidate(1, uncached=3)], 0.0, flat, prefill_rows=9)
    assert plan.shares == (Share(0, 9, 0, True),)


def due(tokens: int = 4, expected: float = 200.0, latest: float = 300.0, chance: float = 1.0) -> tuple[int, Due]:
    return tokens, Due(expected, latest, chance)


def test_waits_for_tokens_that_are_due_soon() -> None:
    assert schedule([candidate(awaited=due())], 0.0, flat).wait_until_us == 300.0


def test_what_could_not_be_tested_is_not_waited_for() -> None:
    """In a step that has to be a plain one there is no row for it."""
    assert schedule([candidate(awaited=due())], 0.0, flat, most_rows=1) == schedule([candidate()], 0.0, flat)


Veto = Callable[[], list[StepCandidate]]


@pytest.mark.parametrize(
    ("why", "candidates"),
    [
        ("too late to be worth it", lambda: [candidate(awaited=due(1, 5000.0, 6000.0))]),
        ("never accepted", lambda: [candidate(rate=0.0, awaited=due())]),
        ("never on time", lambda: [candidate(awaited=due(chance=0.0))]),
        ("the time is over", lambda: [candidate(awaited=due(latest=-1.0, expected=-2.0))]),
        ("no room for them", lambda: [candidate(room=1, awaited=due())]),
        ("it could not bear it for both", lambda: [candidate(awaited=due(), spare_us=599.0), candidate(1)]),
        ("it is in debt", lambda: [candidate(awaited=due(), spare_us=-1.0), candidate(1)]),
        ("a prompt is to be read", lambda: [candidate(awaited=due()), candidate(1, uncached=2)]),
    ],
)
def test_does_not_wait(why: str, candidates: Veto) -> None:
    assert schedule(candidates(), 0.0, flat).wait_until_us is None, why


def test_a_late_answer_is_no_time_gained() -> None:
    late = candidate(rate=0.3, awaited=due(4, expected=-4000.0, latest=300.0))
    assert schedule([late], 0.0, lambda rows: 1000.0 * rows).wait_until_us is None


@pytest.mark.parametrize("tokens", [2, 4, 16])
def test_a_wait_is_weighed_by_the_tokens_that_would_be_tested(tokens: int) -> None:
    """A row adds 300 to a step of 1,000, so it must gain 0.3: of tokens right 0.6 of the time the third gains 0.22."""
    waiting = candidate(rate=0.6, awaited=due(tokens))

    def steep(rows: int) -> float:
        return 700.0 + 300.0 * rows

    assert schedule([waiting], 0.0, steep).wait_until_us == 300.0
    assert schedule([candidate(rate=0.2, awaited=due(tokens))], 0.0, steep).wait_until_us is None


def test_a_batch_waits_only_if_the_whole_gains() -> None:
    others = [candidate(slot, drafted=8) for slot in range(1, 8)]
    waiting = candidate(0, awaited=due(2, 500.0, 600.0))
    assert schedule([waiting], 0.0, flat).wait_until_us == 600.0
    assert schedule([waiting, *others], 0.0, flat).wait_until_us is None


def test_who_is_waited_for_pays_for_all() -> None:
    """Two that wait for one: its wait of 300 is charged twice. Two that are waited for share it."""
    indebted = candidate(1, spare_us=-1.0)
    assert schedule([candidate(awaited=due(), spare_us=600.0), indebted], 0.0, flat).awaited == (0,)
    both = [candidate(slot, awaited=due(), spare_us=300.0) for slot in range(2)]
    assert schedule(both, 0.0, flat).awaited == (0, 1)
    poor = candidate(2, awaited=due(), spare_us=299.0)
    assert schedule([*both, poor], 0.0, flat).awaited == ()
    rich = [candidate(slot, awaited=due(), spare_us=450.0) for slot in range(2)]
    assert schedule([*rich, poor], 0.0, flat).awaited == (0, 1)


def test_waits_for_the_best_of_several_due_times() -> None:
    soon, late = candidate(0, awaited=due()), candidate(1, awaited=due(4, 50_000.0, 60_000.0))
    assert schedule([soon, late], 0.0, flat).wait_until_us == 300.0


def guessing(guess_rate: float, tokens: int = MOST_WINDOW, untested_us: float = 0.0, **rest: Any) -> StepCandidate:
    """A candidate for whom the verifier has a guess of so many `tokens`."""
    guess = Guess(0, (1,) * tokens, AcceptanceByPosition(prior=guess_rate))
    return candidate(**rest)._replace(guess=guess, untested_us=untested_us)


def costly(rows: int) -> float:
    return 1000.0 + 100.0 * (rows - 1)


@pytest.mark.parametrize(
    ("drafted", "rate", "guess_rate", "kind"),
    [
        (0, 0.9, 0.5, SourceKind.NGRAM),
        (2, 0.9, 0.5, SourceKind.DRAFTER),
        (2, 0.9, 0.95, SourceKind.NGRAM),
        (16, 0.9, 0.9, SourceKind.DRAFTER),
        (2, 0.2, 0.5, SourceKind.NGRAM),
    ],
)
def test_of_chain_and_guess_the_one_expected_to_decide_more_is_tested(
    drafted: int, rate: float, guess_rate: float, kind: SourceKind
) -> None:
    [share] = schedule([guessing(guess_rate, drafted=drafted, rate=rate)], 0.0, costly).shares
    assert share.kind is kind
    assert share.window > 0


def test_a_guess_that_gains_nothing_is_not_tested() -> None:
    """Nor one of which it is known that it gains a little less than what costs are uncertain by."""
    [share] = schedule([guessing(0.05)], 0.0, costly).shares
    assert (share.window, share.kind) == (0, SourceKind.DRAFTER)


@pytest.mark.parametrize("seed", range(20))
def test_what_is_not_even_weighed_would_not_have_been_taken(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Batches whose V(m) is straight, with guesses of every quality, planned with the short cut and without."""
    chance = random.Random(seed)
    rates = [chance.random() for _ in range(12)]
    batch = [guessing(rate)._replace(slot=slot) for slot, rate in enumerate(rates)]
    begins_us, row_us = 1000.0 * chance.random(), 500.0 * chance.random()

    def straight(rows: int) -> float:
        return begins_us + row_us * rows

    planned, weighed = schedule(batch, 0.0, straight), len(windows._pieces(batch, straight))
    monkeypatch.setattr(windows, "_least_density", lambda *_: 0.0)
    assert planned == schedule(batch, 0.0, straight)
    assert weighed < len(windows._pieces(batch, straight))


def test_what_promises_more_is_tested_and_nothing_in_debt() -> None:
    """A row costs 100 us."""
    for spare_us, window in ((1e6, True), (99.0, False), (-1.0, False)):
        [share] = schedule([guessing(0.95, drafted=2, spare_us=spare_us)], 0.0, costly).shares
        assert share.kind is (SourceKind.NGRAM if window else SourceKind.DRAFTER)
        assert (share.window > 0) is window


def steep(rows: int) -> float:
    return 1000.0 if rows == 1 else 50_000.0


@pytest.mark.parametrize(("untested_us", "window"), [(9e6, 0), (1e7, MOST_WINDOW)])
def test_now_and_then_a_guess_is_tested_against_what_v_says(untested_us: float, window: int) -> None:
    """49 ms are 0.5 % of 9.8 s."""
    [share] = schedule([guessing(0.9, untested_us=untested_us)], 0.0, steep).shares
    assert share.window == window


def test_does_not_wait_for_a_drafter_while_a_better_guess_is_at_hand() -> None:
    waiting = candidate(awaited=due())
    assert schedule([waiting], 0.0, flat).wait_until_us == 300.0
    assert schedule([guessing(0.95, awaited=due())], 0.0, flat).wait_until_us is None


def test_waits_for_a_drafter_that_is_worth_more_than_the_guess() -> None:
    assert schedule([guessing(0.3, awaited=due())], 0.0, flat).wait_until_us == 300.0


# A prompt of 4,000 tokens


def steps_of(uncached: list[int], decoding: int, prefill_rows: int = PREFILL_ROWS) -> list[StepPlan]:
    """Plans until all prompts are fed; every other session decides a token in each, of a chain that is always there."""
    left, plans = dict(enumerate(uncached)), []
    while any(count > 1 for count in left.values()):
        prompts = [candidate(slot, uncached=count) for slot, count in left.items() if count > 1]
        others = [candidate(100 + number, drafted=number % 4) for number in range(decoding)]
        plans.append(schedule([*prompts, *others], 0.0, linear, prefill_rows))
        for share in plans[-1].shares:
            if share.slot in left:
                left[share.slot] -= share.fresh - share.decides
    return plans


def rows_of_prompts(plan: StepPlan) -> int:
    return sum(share.fresh for share in plan.shares if share.slot < 100)


@pytest.mark.parametrize("decoding", [0, 1, 7])
def test_a_long_prompt_delays_no_step_by_more_than_the_budget(decoding: int) -> None:
    plans = steps_of([4000], decoding)
    assert len(plans) == -(-4000 // PREFILL_ROWS)
    assert sum(map(rows_of_prompts, plans)) == 4000
    for plan in plans:
        assert plan.wait_until_us is None
        assert rows_of_prompts(plan) <= PREFILL_ROWS
        assert {share.slot for share in plan.shares if share.decides} >= {100 + number for number in range(decoding)}


@pytest.mark.parametrize("seed", range(20))
def test_nor_do_many_prompts_and_each_comes_to_its_end(seed: int) -> None:
    chance = random.Random(seed)
    prompts = [chance.choice([2, 30, 600, 4000]) for _ in range(chance.randint(1, 6))]
    decoding, budget = chance.randint(0, 5), chance.choice([32, 100, 512])
    plans = steps_of(prompts, decoding, budget)
    for plan in plans:
        assert 0 < rows_of_prompts(plan) <= budget
        assert sum(share.slot >= 100 and share.decides for share in plan.shares) == decoding
    # No budget is left unused while a prompt waits, so none waits for longer than it must.
    assert all(rows_of_prompts(plan) == budget for plan in plans[:-1])
    # A last token that is left over counts as decoding.
    assert sum(prompts) - len(prompts) <= sum(map(rows_of_prompts, plans)) <= sum(prompts)
