"""One session in virtual time: the table from which the design was made, and what must hold in every cell."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from itertools import accumulate
from operator import mul
from pathlib import Path
from typing import Any

import pytest

from specwire.core.invalid import InvalidParameter
from specwire.sim import (
    AUTO,
    CHAIN,
    HEADS,
    PLAIN,
    RULE,
    Cell,
    InvalidCell,
    Policy,
    best_textbook,
    fixed,
    optimum,
    parse_policy,
    simulate,
    simulate_batch,
    stream_wait,
    textbook,
)
from specwire.sim.guesses import WRONG
from specwire.telemetry.tally import DraftCounts

# V, d, a, R (ms); tokens/s: plain, textbook at its best k, streaming with a waiting verifier, streaming.
TABLE = [
    (30, 8, 0.8, 0.5, 33, 54, 67, 67),
    (30, 8, 0.8, 20, 33, 41, 53, 56),
    (30, 8, 0.8, 80, 33, 25, 32, 43),
    (30, 8, 0.8, 200, 33, 15, 18, 36),
    (15, 1, 0.8, 20, 67, 102, 107, 130),
    (15, 1, 0.7, 80, 67, 31, 32, 72),
]
# A draw whose share of right guesses is the table's, to 0.002.
SEED, TOKENS = 9, 2048


def cell_of(V: float, d: float, a: float, R: float, **changes: float) -> Cell:
    fields = {"acceptance": a, "seed": SEED, "tokens": TOKENS, **changes}
    return Cell(1000 * V, 0.0, 1000 * d, 1000 * R, **fields)  # type: ignore[arg-type]  # any field, by name


@pytest.mark.parametrize(("V", "d", "a", "R", "plain", "book", "waiting", "stream"), TABLE)
def test_the_table(
    V: float, d: float, a: float, R: float, plain: float, book: float, waiting: float, stream: float
) -> None:
    """Within 6 %: a contradiction finds the drafter in a token that it does not abandon."""
    cell = cell_of(V, d, a, R)
    speeds = [
        simulate(cell, PLAIN).steady_tokens_per_second,
        max(simulate(cell, textbook(k)).steady_tokens_per_second for k in (3, 5, 8, 10)),
        max(simulate(cell, stream_wait(chunk, 32)).steady_tokens_per_second for chunk in (1, 2)),
        simulate(cell, fixed("stream:1,32")).steady_tokens_per_second,
    ]
    assert speeds == [pytest.approx(value, rel=0.06) for value in (plain, book, waiting, stream)]


def test_plain_decoding_takes_a_forward_per_token_and_a_round_trip() -> None:
    result = simulate(Cell(30_000, 0.1, 8_000, 80_000, tokens=10), PLAIN)
    assert (result.tokens, result.forwards, result.drafts) == (10, 10, DraftCounts())
    assert result.elapsed_us == 10 * 30_000 + 80_000
    assert result.time_to_first_us == 30_000 + 80_000


def test_textbook_with_a_drafter_that_is_always_right() -> None:
    """The first token comes alone; then every round drafts 4, tests 4 and decides 5."""
    cell = Cell(30_000, 0.0, 8_000, 80_000, acceptance=1.0, tokens=201)
    result = simulate(cell, textbook(4))
    round_us = 80_000 + 4 * 8_000 + 30_000
    assert result.steady_tokens_per_second == pytest.approx(5 / round_us * 1e6, rel=0.03)


def test_a_drafter_that_is_always_wrong_costs_at_most_the_ledger() -> None:
    for slope in (0.02, 0.05):
        cell = Cell(30_000, slope, 3_000, 20_000, acceptance=0.0)
        plain = simulate(cell, PLAIN)
        for policy in (AUTO, fixed("stream:4,32,4"), fixed("lockstep:8")):
            assert simulate(cell, policy).elapsed_us <= plain.elapsed_us / 0.97


def test_the_same_cell_gives_the_same_result() -> None:
    cell = Cell(30_000, 0.02, 8_000, 80_000, seed=3, tokens=64)
    first, second = simulate(cell), simulate(cell)
    assert (first.elapsed_us, first.plans, first.ledger_us) == (second.elapsed_us, second.plans, second.ledger_us)


def test_a_trace_says_which_guesses_are_right() -> None:
    cell = Cell(30_000, 0.0, 1_000, 0.0, trace=(True, True, False), tokens=30)
    result = simulate(cell, fixed("stream:1,8"))
    assert result.tokens == 30
    assert 0 < result.drafts.accepted <= 20


def test_sessions_at_once_share_their_steps_and_the_batch_stays_full() -> None:
    cells = [
        Cell(30_000, 0.0, 3_000, 0.0, acceptance=0.8, seed=seed, tokens=32, session_slope=0.0) for seed in range(8)
    ]
    pair = simulate_batch(cells, PLAIN, sessions=2)
    assert pair.tokens == 4 * 32
    assert pair.tokens_per_second == pytest.approx(2 / 30_000 * 1e6, rel=0.1)
    assert len(pair.begun) == 4
    with pytest.raises(InvalidCell, match="more than 8 for 4 sessions, not 8"):
        simulate_batch(cells, PLAIN, sessions=4)


def test_of_a_batch_every_session_counts_that_begins_while_it_is_counted_however_slow() -> None:
    """The fifth text is ten times as long as the others, so it ends when they are all over."""
    cells = [
        Cell(30_000, 0.0, 3_000, 0.0, acceptance=0.8, seed=seed, tokens=320 if seed == 4 else 32, session_slope=0.0)
        for seed in range(8)
    ]
    batch = simulate_batch(cells, PLAIN, sessions=2)
    assert sorted(stats.tokens for stats in batch.begun)[-1] == 320
    assert all(stats.last_us for stats in batch.begun)


def test_a_text_that_repeats_itself_is_guessed_from_itself() -> None:
    fresh, repeating = (Cell(30_000, 0.0, 3_000, 0.0, seed=1, tokens=256, repeats=share) for share in (0.0, 0.8))
    assert simulate(repeating, PLAIN).elapsed_us < 0.8 * simulate(fresh, PLAIN).elapsed_us


def test_a_shared_host_never_overlaps() -> None:
    """Drafting for every token and a forward for every few: not faster than the sum of both."""
    cell = Cell(30_000, 0.0, 10_000, 0.0, acceptance=1.0, tokens=64, shared_host=True)
    apart = simulate(Cell(30_000, 0.0, 10_000, 0.0, acceptance=1.0, tokens=64), fixed("stream:1,16"))
    shared = simulate(cell, fixed("stream:1,16"))
    assert shared.elapsed_us >= shared.forwards * 30_000 + shared.drafts.accepted * 10_000
    assert shared.elapsed_us > apart.elapsed_us


def test_delays_add_up() -> None:
    base = simulate(Cell(30_000, 0.0, 8_000, 80_000, tokens=5), PLAIN)
    slow = simulate(Cell(30_000, 0.0, 8_000, 80_000, tokens=5, append_us=700, hop_us=100, step_us=50), PLAIN)
    assert slow.time_to_first_us - base.time_to_first_us == 700 + 2 * 100 + 50


def test_the_optimum_is_not_beaten_by_what_it_sweeps() -> None:
    cell = Cell(30_000, 0.02, 3_000, 20_000, seed=2, tokens=64)
    best = optimum(cell)
    others = ("off", "lockstep:4", "stream:1,16", "stream:4,32")
    assert best.result.elapsed_us <= min(simulate(cell, fixed(spec)).elapsed_us for spec in others)
    assert best_textbook(cell).result.elapsed_us <= simulate(cell, textbook(4)).elapsed_us


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"V_us": 0.0}, "V_us"),
        ({"rtt_us": -1.0}, "rtt_us"),
        ({"acceptance": 1.5}, "acceptance"),
        ({"tokens": 0}, "tokens"),
        ({"trace": ()}, "trace"),
    ],
)
def test_invalid_cells(changes: dict[str, object], field: str) -> None:
    fields: dict[str, object] = {"V_us": 1.0, "slope": 0.0, "draft_us": 1.0, "rtt_us": 0.0, **changes}
    with pytest.raises(InvalidCell, match=f"^{field}: "):
        Cell(**fields)  # type: ignore[arg-type]  # any field, by name


def test_policies_by_name() -> None:
    assert parse_policy("auto") is AUTO
    assert parse_policy("plain") is PLAIN
    assert parse_policy("rule") is RULE
    assert parse_policy("textbook:3") == textbook(3)
    assert parse_policy("stream-wait:1,8") == stream_wait(1, 8)
    assert isinstance(parse_policy("stream:2,16,1"), Policy)
    for spec in ("fly", "textbook", "textbook:0", "stream-wait:x"):
        with pytest.raises(InvalidParameter, match="policy: must be auto"):
            parse_policy(spec)


# ----------------------------------------------------------------------------------------------------------------------
# Trees.

# Behind a quarter of the places the drafter's first guess is wrong and its second right, behind a twelfth none is.
RANKS: tuple[int | None, ...] = (0, 0, 0, 1, 0, 0, 0, 1, 0, 0, 0, None)
SURE, UNSURE = (0.0, -3.0, -4.0, -5.0), (0.0, -0.2, -3.0, -4.0)


def ranked(rtt_us: float, row_slope: float = 0.02, tokens: int = 256) -> Cell:
    scores = [SURE if rank == 0 else UNSURE for rank in RANKS]
    return Cell(30_000, 0.0, 3_000, rtt_us, ranks=RANKS, scores=scores, row_slope=row_slope, tokens=tokens)


def test_a_second_guess_that_is_at_hand_saves_the_round_trip() -> None:
    """The text is the same, and the chain's first guesses are those of a trace without ranks."""
    cell = ranked(80_000)
    tree, chain = (simulate(cell, fixed(spec)) for spec in ("stream:1,64,0,4", "stream:1,64,0,1"))
    assert tree.tokens == chain.tokens == cell.tokens
    assert tree.elapsed_us < 0.85 * chain.elapsed_us
    assert tree.extended > 2
    assert chain.extended == 1
    first = Cell(30_000, 0.0, 3_000, 80_000, trace=[rank == 0 for rank in RANKS], tokens=256)
    assert simulate(first, fixed("stream:1,64")).elapsed_us == chain.elapsed_us


def test_a_drafter_whose_further_tokens_are_dear_extends_fewer_at_once() -> None:
    cheap, dear = (simulate(ranked(0.0, slope), fixed("stream:1,64,0,4")) for slope in (0.0, 0.8))
    assert 1 < dear.extended < cheap.extended


def test_a_wrong_branch_has_scores_recorded_elsewhere_and_nothing_right() -> None:
    guesses = ranked(0.0).guesses()
    right = tuple(guesses.target(position) for position in range(5, 8))
    assert guesses.behind(5, right, 8) == ((WRONG, guesses.target(8), WRONG + 2, WRONG + 3), UNSURE)
    assert guesses.behind(5, (*right, guesses.target(8)), 2) == ((guesses.target(9), WRONG + 1), SURE[:2])
    seen = set()
    for token in range(WRONG, WRONG + 4):
        tokens, scores = guesses.behind(5, (right[0], token, right[2]), 8)
        assert not {guesses.target(position) for position in range(12)} & set(tokens)
        assert guesses.behind(6, (token, right[2]), 8) == (tokens, scores)
        seen.add(scores)
    assert seen <= {SURE, UNSURE}


def test_ranks_without_their_scores_are_refused() -> None:
    for scores in ([], [SURE] * 11, [()] * 12, [SURE * 3] * 12):
        with pytest.raises(InvalidCell, match="scores: must be from 1 to 8 for each of 12 ranks"):
            Cell(30_000, 0.0, 3_000, 0.0, ranks=RANKS, scores=scores)


def test_a_policy_may_say_how_far_it_branches() -> None:
    assert parse_policy("auto:1") == CHAIN
    assert parse_policy("auto:4").assigned(False, branching=True).plan == "auto:4"
    with pytest.raises(InvalidParameter, match="policy: must be auto"):
        parse_policy("auto:0")


# A head beside the target

RATES = (0.8, 0.7, 0.6, 0.5)
# A draw whose shares of right tokens are the rates, to 0.01.
HEAD_SEED = 5


def headed(head_us: float, rates: tuple[float, ...] = RATES, **changes: float) -> Cell:
    return cell_of(30, 8, 0.8, 0.0, head=rates, head_us=head_us, seed=HEAD_SEED, **changes)  # type: ignore[arg-type]  # any field, by name


def speeds_of(V_us: float, head_us: float, rates: tuple[float, ...]) -> list[float]:
    """Tokens per second by depth, where V is flat: (1 + a1 + a1 a2 + ...) / (V + depth head_us)."""
    decided = [1.0, *accumulate(rates, mul)]
    return [sum(decided[: depth + 1]) / (V_us + depth * head_us) * 1e6 for depth in range(len(decided))]


@pytest.mark.parametrize("head_us", [300.0, 3_000.0, 9_000.0])
@pytest.mark.parametrize("rates", [RATES, (0.6, 0.6, 0.6), (0.9,)])
def test_a_head_gains_what_the_closed_formula_says(rates: tuple[float, ...], head_us: float) -> None:
    """At the best depth, within 4 %: of 2,048 draws, and until the rates are learnt."""
    found = simulate(headed(head_us, rates), HEADS)
    assert found.steady_tokens_per_second == pytest.approx(max(speeds_of(30_000, head_us, rates)), rel=0.04)
    assert found.headed == found.drafts
    assert found.headed.accepted > 0


def test_a_forward_with_a_head_takes_the_head_s_time_too() -> None:
    """Always right, and one token deep: two tokens for V and one forward of the head."""
    found = simulate(headed(3_000.0, (1.0,)), HEADS)
    assert found.elapsed_us / found.forwards == pytest.approx(33_000.0, rel=0.01)
    assert found.tokens / found.forwards == pytest.approx(2.0, rel=0.02)


@pytest.mark.parametrize("slope", [0.0, 0.02, 0.2])
@pytest.mark.parametrize("head_us", [300.0, 3_000.0, 30_000.0])
@pytest.mark.parametrize("policy", [HEADS, AUTO], ids=["alone", "beside a drafter"])
def test_a_head_that_is_always_wrong_costs_at_most_the_ledger(policy: Policy, head_us: float, slope: float) -> None:
    cell = replace(headed(head_us, (0.0,) * 8), slope=slope, tokens=256, acceptance=0.0)
    assert simulate(cell, policy).elapsed_us <= simulate(cell, PLAIN).elapsed_us / 0.97


def test_a_head_that_is_always_wrong_costs_a_batch_at_most_the_ledger() -> None:
    cells = [replace(headed(3_000.0, (0.0,) * 8), slope=0.1, tokens=128, seed=seed) for seed in range(12)]
    plain, beside = (simulate_batch(cells, policy, sessions=4) for policy in (PLAIN, HEADS))
    assert beside.tokens_per_second >= 0.97 * plain.tokens_per_second


def test_a_batch_finds_out_early_that_a_head_pays_though_it_was_not_thought_to() -> None:
    """Right nine times in ten, where seven would not do; each step with features takes a tenth of V(1) longer."""
    cells = [
        replace(headed(3_000.0, (0.9,) * 4), slope=0.3, tapped_us=3_000.0, tokens=128, seed=seed) for seed in range(12)
    ]
    plain, beside = (simulate_batch(cells, policy, sessions=4) for policy in (PLAIN, HEADS))
    assert beside.tokens_per_second >= 1.04 * plain.tokens_per_second


def test_where_sessions_fill_the_verifier_nothing_is_lost_by_a_good_head() -> None:
    """Each row costs as much as the first: there is nothing to gain."""
    cells = [replace(headed(3_000.0), slope=1.0, tokens=128, seed=seed) for seed in range(12)]
    plain, beside = (simulate_batch(cells, policy, sessions=4) for policy in (PLAIN, HEADS))
    assert beside.tokens_per_second >= 0.97 * plain.tokens_per_second


def test_a_head_pays_where_a_far_drafter_cannot_and_both_do_no_harm() -> None:
    """Round trips of 80 ms, beside a target of 30."""
    cell = replace(headed(1_000.0), rtt_us=80_000.0)
    far = simulate(replace(cell, head=(), head_us=0.0), AUTO).steady_tokens_per_second
    head, both = (simulate(cell, policy).steady_tokens_per_second for policy in (HEADS, AUTO))
    assert head > 1.5 * far
    assert both > 0.97 * head


@pytest.mark.parametrize("wrong", [{"head": (1.5,), "head_us": 1.0}, {"head": (0.5,)}, {"head_us": 5.0}])
def test_a_head_needs_rates_and_a_time(wrong: dict[str, Any]) -> None:
    with pytest.raises(InvalidCell, match=r"^head"):
        Cell(30_000, 0.0, 8_000, 0.0, **wrong)


def test_it_imports_no_model_wire_or_log() -> None:
    """So it starts fast, and draws nothing that a seed does not fix."""
    source = (
        "import sys, specwire.sim; print(sorted({'torch', 'grpc', 'redis', 'ray', 'tokenizers'} & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", source],
        cwd=Path(__file__).resolve().parents[2],
        capture_output=True,
        text=True,
        timeout=30.0,
    )
    assert done.stdout == "[]\n"
