"""The small version of `make statistics`: the law of texts through a whole stack, and that the test can refuse one."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from bench.laws import run
from bench.laws.biased import BIASED, BIASED_VERIFIERS, PATIENCE_US
from bench.laws.exact import chi_square, joint
from bench.laws.run import LawTest, judged
from bench.laws.sampling import DRAFTING, PROMPT, RULES, SCRIPT, TARGET, WAYS, LawSample, SeedWay, all_of, same_seed
from scripts.figures.exact import laws_table
from specwire.core.draft import DraftSession
from specwire.core.messages import Proposal
from tests.wait import asked

SESSIONS = 60
BROKEN_SESSIONS = 250
SEEDS = 16


@pytest.mark.parametrize("drafter", DRAFTING)
async def test_the_law_is_the_target_s_under_every_exact_rule(drafter: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # Nobody waits for the drafter: on a busy machine a text of 40 ms may be over before anything is proposed.
    longer = 1.0 if DRAFTING[drafter].patient else 4.0
    monkeypatch.setitem(DRAFTING, drafter, replace(DRAFTING[drafter], delay_ms=longer * DRAFTING[drafter].delay_ms))
    samples = await asked(
        lambda: run.exact(drafter, SESSIONS),
        lambda found: all(judged(drafter, rule, each).tested for rule, each in found.items()),
    )
    assert set(samples) == ({"coupled"} if drafter == "head" else set(RULES))
    for rule, found in samples.items():
        verdict = judged(drafter, rule, found)
        assert not verdict.refused, verdict
        first = list(DRAFTING).index(drafter) * run.APART
        assert sorted(found.texts) == list(range(first, first + SESSIONS)), "no seed is used for two drafters"


@pytest.mark.parametrize("name", ["longest of two chains", "value-dependent restart", *BIASED_VERIFIERS])
async def test_what_breaks_a_condition_is_refused(name: str) -> None:
    """The others hold tokens back, and how much of that shows depends on how busy the machine is: `make statistics`."""
    assert name in BIASED or name in BIASED_VERIFIERS
    verdict = await run.broken(name, BROKEN_SESSIONS)
    assert verdict.refused, verdict


async def test_a_drafter_that_holds_nothing_back_is_waited_for_however_late(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a busy machine it may take longer than the verifier's patience with one that does. Each text has DIRECT tokens
    only where there was nothing to wait for.
    """
    slow = replace(run.ONE_BY_ONE, model=f"{TARGET}:delay_ms={1.5 * PATIENCE_US / 1e3:g}")
    monkeypatch.setattr(run, "ONE_BY_ONE", slow)
    verdict = await asked(lambda: run.broken("longest of two chains", 4), lambda found: found.direct <= found.sessions)
    assert verdict.direct <= verdict.sessions


async def test_a_seed_s_text_is_the_same_with_any_drafter_and_any_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Coupled: drafting off, guesses from the text, right and wrong drafters, chunks of one or three, trees, a head."""
    branched, taken = 0, DraftSession.take_proposal

    def take_proposal(session: DraftSession) -> Proposal | None:
        nonlocal branched
        proposal = taken(session)
        branched += proposal is not None and len(proposal.parents) > 0
        return proposal

    monkeypatch.setattr(DraftSession, "take_proposal", take_proposal)
    chains = {name: WAYS[name] for name in ("good, chunks of 3, in turns", "random, chunks of 1, in turns")}
    ways = await same_seed(chains, SEEDS)
    assert not branched
    ways += (await same_seed({"good, trees": WAYS["good, trees"]}, SEEDS))[2:]
    assert branched
    ways += (await same_seed({"a head": WAYS["a head"]}, SEEDS))[2:]
    assert [(way.sessions, way.differing) for way in ways] == [(SEEDS, 0)] * 6
    assert ways[0].accepted == 0 < ways[2].accepted
    assert min(ways[4].accepted, ways[5].accepted) > 0


def test_a_text_that_differs_is_counted() -> None:
    known, other = LawSample({1: (1, 2), 2: (3,)}), LawSample({1: (1, 2), 2: (4,)})
    assert SeedWay.of("x", other, known) == SeedWay("x", 2, 0, 1)
    assert all_of([known, LawSample({5: (6,)})]).listed == [(1, 2), (3,), (6,)]


def test_the_law_that_is_tested_is_one() -> None:
    law = joint(SCRIPT, PROMPT, 3)
    assert sum(law.values()) == pytest.approx(1.0)
    assert any(len(text) < 3 for text in joint(SCRIPT, (0,), 3)), "a text may end before"


def test_chi_square_pools_what_is_rare_and_refuses_what_cannot_be() -> None:
    law = {0: 0.5, 1: 0.496, 2: 0.002, 3: 0.002}
    assert chi_square({0: 500, 1: 496, 2: 4}, law, 1000) == pytest.approx((0.0, 1))
    assert chi_square({0: 480, 1: 520}, {0: 0.5, 1: 0.5}, 1000) == pytest.approx((1.6, 1))
    assert chi_square({0: 1, 7: 1}, law, 2)[0] == float("inf")


GOOD = LawTest("good", "block", True, 9, 5, 2, 1, p_firsts=0.4, p_steps=0.6)
POOLED = replace(GOOD, drafter=run.ALL, sessions=run.WANTED)
HEADED = replace(GOOD, drafter="head", rule="coupled", sessions=run.WANTED_HEADED)
BROKEN = replace(GOOD, drafter="value-dependent stop", exact=False, p_firsts=1e-9)
WAY = SeedWay("good", 9, 4, 0)


@pytest.mark.parametrize(
    ("verdicts", "ways", "holds"),
    [
        ([GOOD, HEADED, POOLED, BROKEN], [WAY], [True, True, True, True, True]),
        ([replace(GOOD, p_steps=1e-6), HEADED, POOLED, BROKEN], [WAY], [False, True, True, True, True]),
        ([GOOD, HEADED, POOLED, replace(BROKEN, p_firsts=1e-4)], [WAY], [True, False, True, True, True]),
        ([GOOD, HEADED, POOLED, BROKEN], [replace(WAY, differing=1)], [True, True, False, True, True]),
        ([GOOD, HEADED, replace(POOLED, sessions=49_999), BROKEN], [WAY], [True, True, True, False, True]),
        ([GOOD, replace(HEADED, sessions=9_999), POOLED, BROKEN], [WAY], [True, True, True, True, False]),
    ],
)
def test_what_is_wrong_is_said(
    verdicts: list[LawTest],
    ways: list[SeedWay],
    holds: list[bool],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A record of fewer sessions than are wanted is no failure, and says so."""

    async def told_laws(sessions: int, headed: int) -> list[LawTest]:
        assert (sessions, headed) == (9, 7)
        return verdicts

    async def told_ways(of: object, sessions: int) -> list[SeedWay]:
        return ways

    monkeypatch.setattr(run, "laws", told_laws)
    monkeypatch.setattr(run, "same_seed", told_ways)
    words = ["--sessions", "9", "--headed", "7", "--out", str(tmp_path / "laws.json")]
    assert run.main(words) == (0 if all(holds[:3]) else 1)
    found = json.loads((tmp_path / "laws.json").read_text())
    assert [bar["holds"] for bar in found["bars"]] == holds
    page = laws_table(found)
    assert "biased: value-dependent stop" in page
    assert page.count("| refused |") == sum(law["refused"] for law in found["laws"])
    printed = capsys.readouterr().out
    assert page in printed
    assert printed.count("MISSED") == holds.count(False)
