"""The small version of `make statistics`: the law of texts through a whole stack, and that the test can refuse one."""

from __future__ import annotations

import pytest

from bench.laws import run
from bench.laws.biased import BIASED
from bench.laws.exact import chi_square, joint
from bench.laws.sampling import DRAFTING, PROMPT, SCRIPT, Drafting, deployment, sample

SESSIONS = 60
BROKEN_SESSIONS = 100


@pytest.mark.parametrize("drafter", DRAFTING)
async def test_the_law_is_the_target_s_under_every_exact_rule(drafter: str) -> None:
    for verdict in await run.exact(drafter, SESSIONS):
        assert not verdict.refused, verdict
        assert verdict.sample.figures["accepted"] + verdict.sample.figures["recovered"] > 0, "nothing was tested"


@pytest.mark.parametrize("name", ["longest of two chains", "value-dependent restart"])
async def test_what_breaks_a_condition_is_refused(name: str) -> None:
    """The others hold tokens back, and how much of that shows depends on how busy the machine is: `make statistics`."""
    assert name in BIASED
    verdict = await run.broken(name, BROKEN_SESSIONS)
    assert verdict.refused, verdict


async def test_a_seed_s_text_is_the_same_with_any_drafter_and_any_chunk() -> None:
    """Coupled: drafting off and on, right and wrong drafters, chunks of one and of three."""
    async with deployment(Drafting(DRAFTING["random"].model, "stream:1,4,1")) as client:
        texts = [
            (await sample(client, "coupled", iter(range(20)), drafting=drafting)).texts for drafting in (False, True)
        ]
    async with deployment(Drafting(DRAFTING["good"].model, "lockstep:3")) as client:
        texts.append((await sample(client, "coupled", iter(range(20)))).texts)
    assert len(texts[0]) == 20
    assert texts[0] == texts[1] == texts[2]


def test_the_law_that_is_tested_is_one() -> None:
    law = joint(SCRIPT, PROMPT, 3)
    assert sum(law.values()) == pytest.approx(1.0)
    assert any(len(text) < 3 for text in joint(SCRIPT, (0,), 3)), "a text may end before"


def test_chi_square_pools_what_is_rare_and_refuses_what_cannot_be() -> None:
    law = {0: 0.5, 1: 0.496, 2: 0.002, 3: 0.002}
    assert chi_square({0: 500, 1: 496, 2: 4}, law, 1000) == pytest.approx((0.0, 1))
    assert chi_square({0: 480, 1: 520}, {0: 0.5, 1: 0.5}, 1000) == pytest.approx((1.6, 1))
    assert chi_square({0: 1, 7: 1}, law, 2)[0] == float("inf")
