"""The trace of `make bench-suffix`: which steps are cold, what their prompts repeat, and whose tenants they are."""

from __future__ import annotations

import pytest

from bench.runs import Run, Sample
from bench.suffix import STEPS, again, cold, keys, main, parser, tenant_names, warm
from demo_pair import held_out_prompts


def test_each_prompt_ends_as_the_code_does() -> None:
    for prompt in held_out_prompts():
        asked = [step(prompt.text, ["    return 1\n"]) for step in STEPS]
        assert len(set(asked)) == len(STEPS) - 1, "the last one is the first again"
        end = prompt.text[-40:]
        assert all(text.endswith(end) for text in asked)
        assert "return 1" in asked[2]


def test_the_first_step_of_each_piece_is_cold_and_the_last_one_by_itself() -> None:
    run = Run((1,), 1.0, 0.1, 1)
    samples = [Sample(0, prompt, "own_0", run) for prompt in range(2 * len(STEPS))]
    assert [sample.prompt for sample in cold(samples)] == [0, len(STEPS)]
    assert [sample.prompt for sample in again(samples)] == [len(STEPS) - 1, 2 * len(STEPS) - 1]
    assert len(warm(samples)) == 2 * len(STEPS) - 4


def test_no_two_rows_or_repeats_share_a_tenant() -> None:
    args = parser().parse_args(["--repeats", "2", "--tenants", "3"])
    names = list(tenant_names(args))
    assert len(names) == len(set(names)) == 3 * len(keys()) * 3
    assert all(name.replace(".", "").replace("_", "").isalnum() for name in names)


@pytest.mark.parametrize("name", ["prompts", "tokens", "repeats", "tenants", "others"])
def test_nothing_to_measure(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([f"--{name}", "0"]) == 2
    assert capsys.readouterr().err == f"bench: error: {name}: must be at least 1, not 0\n"
