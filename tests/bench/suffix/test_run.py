"""The trace of `make bench-suffix`: which steps are cold, what their prompts repeat, whose tenants they are; bars."""

from __future__ import annotations

import pytest

from bench.harness.interval import Estimate
from bench.harness.runs import Run, Sample
from bench.suffix.run import (
    LABELS,
    STEPS,
    TABLE,
    TEMPERATURES,
    bars,
    keys,
    main,
    of_kind,
    parser,
    report,
    row_figures,
    row_key,
    steps_of,
    tenant_names,
)
from bench.suffix.sources import AGAIN, COLD, WARM, LookUp, Replayed
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
    assert [sample.prompt for sample in of_kind(samples, COLD)] == [0, len(STEPS)]
    assert [sample.prompt for sample in of_kind(samples, AGAIN)] == [len(STEPS) - 1, 2 * len(STEPS) - 1]
    assert len(of_kind(samples, WARM)) == 2 * len(STEPS) - 4


# Seconds of a session, by row.
SECONDS = {"off": 1.2, "own": 1.0, "shared": 0.8, "table": 1.0}


def made() -> list[Sample]:
    return [
        Sample(repeat, step, row_key(row, temperature), Run((1, 2), seconds, 0.1, 2, 4, 2))
        for repeat in range(6)
        for temperature in TEMPERATURES
        for row, seconds in SECONDS.items()
        for step in range(len(steps_of(row)))
    ]


def test_a_table_is_held_against_nothing_in_cold_sessions() -> None:
    took, samples = Estimate(10.0, 9.0, 11.0, 1.0), made()
    found = LookUp(1000, took, took, 60.0, 1.0)
    judged = {bar.name: (round(bar.value, 3), bar.needed, bar.holds) for bar in bars(samples, found)}
    assert len(judged) == 7
    for temperature in ("0", "0.8"):
        name = f"speed, {LABELS[TABLE]} / nothing proposed, cold, T = {temperature}"
        assert judged[name] == (1.2, 1.1, True)
    assert [row.steps for row in row_figures(samples) if row.label == LABELS[TABLE]] == ["cold", "cold"]
    printed = report(samples, found, [Replayed("a source", 0.8, COLD, 1.5, None, 2.0)])
    assert printed.count(LABELS[TABLE]) == 4
    assert "MISSED" not in printed


def test_no_two_rows_or_repeats_share_a_tenant() -> None:
    args = parser().parse_args(["--repeats", "2", "--tenants", "3"])
    names = list(tenant_names(args))
    assert len(names) == len(set(names)) == 3 * len(keys()) * 3
    assert all(name.replace(".", "").replace("_", "").isalnum() for name in names)


@pytest.mark.parametrize("name", ["prompts", "tokens", "repeats", "tenants", "others"])
def test_nothing_to_measure(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([f"--{name}", "0"]) == 2
    assert capsys.readouterr().err == f"bench: error: {name}: must be at least 1, not 0\n"
