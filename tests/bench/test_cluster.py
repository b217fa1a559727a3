"""What `make bench-cluster` deploys, what it expects, and its figures."""

from __future__ import annotations

import json
import os
import socket
from dataclasses import replace
from pathlib import Path

import pytest

from bench.cluster import run
from bench.cluster.load import (
    AGREE,
    DRAFTED,
    FLOOD,
    FOUR,
    HEAD,
    NODES,
    ONE,
    OVER_ORCHESTRATORS,
    OVER_VERIFIERS,
    ROWS,
    SESSIONS_PER_VERIFIER,
    SLOPE,
    TOKENS,
    V_MS,
    WIDE,
    CrowdSession,
    ServedCrowd,
    config,
    prompt,
    simulated,
    trace,
)
from bench.cluster.run import (
    EXPECTED,
    ClusterResults,
    ClusterSample,
    MeasuredCluster,
    Texts,
    bars,
    multiple_of,
    row_results,
    write,
)
from bench.cluster.site import CLIENTS, DRAFTERS, ORCHESTRATORS, REST, VERIFIERS, Clocks, kind_of, ports_of
from bench.harness.runs import BenchError
from deploy.cluster.schema import parse
from scripts.figures.speed import cluster_table
from tests.faults.streams import plain


def test_what_is_deployed() -> None:
    deployed = parse(config("127.0.0.1:1"))
    replicas = dict.fromkeys(("verify", "draft", "orchestrate"), 0)
    asked: dict[str, float] = {}
    for group in deployed.groups:
        replicas[group.words[0]] += group.least
        assert group.least == group.most
        for name, amount in group.resources.items():
            asked[name] = asked.get(name, 0.0) + amount * group.least
    assert replicas == dict(
        zip(replicas, (EXPECTED[VERIFIERS], EXPECTED[DRAFTERS], EXPECTED[ORCHESTRATORS]), strict=True)
    )
    had = {name: sum(node.get(name, 0.0) for node in (HEAD, *NODES)) for name in asked}
    assert asked == had


def test_what_is_expected() -> None:
    one, four = simulated(ONE), simulated(FOUR)
    assert one is not None
    assert four is not None
    step_s = V_MS / 1000 * (1 + SLOPE * (SESSIONS_PER_VERIFIER - 1))
    # All but the first one wait for its first step.
    assert one == pytest.approx(SESSIONS_PER_VERIFIER * TOKENS / (TOKENS + 1) / step_s, rel=0.01)
    assert four == pytest.approx(4 * one, rel=0.02)
    assert simulated(FLOOD) is None


def test_the_simulator_is_told_which_guesses_are_right() -> None:
    """Those of the drafter that is deployed, along the target's texts."""
    traces = [trace(DRAFTED, turn) for turn in range(DRAFTED.at_once)]
    assert {len(each) for each in traces} == {DRAFTED.tokens}
    assert sum(map(sum, traces)) / (DRAFTED.at_once * DRAFTED.tokens) == pytest.approx(AGREE, abs=0.02)
    target, drafter = (plain(f"{DRAFTED.model}{agree}", 1, prompt(3)) for agree in ("", f":agree={AGREE}"))
    assert trace(DRAFTED, 3)[0] == (target == drafter)


def test_kinds_of_processes_and_who_listens_where() -> None:
    lines = {
        "python3 -m deploy orchestrate --insecure --listen=127.0.0.1:0": ORCHESTRATORS,
        "python3 -m deploy verify scripted:4 --slots=24": VERIFIERS,
        "python3 -m deploy draft scripted:4:agree=0.8": DRAFTERS,
        "ray::Replica": REST,
        "python3 -m deploy status --json": REST,
    }
    assert {line: kind_of(line) for line in lines} == lines
    with socket.create_server(("127.0.0.1", 0)) as server:
        assert server.getsockname()[1] in ports_of(os.getpid())
    with pytest.raises(BenchError, match="no process of ours listens"):
        Clocks(["127.0.0.1:1"])


def test_texts_may_end_early_but_not_part() -> None:
    texts = Texts()
    texts.add("a", [(1, 2), (3, 4)])
    texts.add("a", [(1, 2, 5), (3,)])
    texts.add("b", [(9,)])
    assert texts.mismatches == 0
    texts.add("a", [(1, 2, 6), (3, 4)])
    assert texts.mismatches == 1


def sample(name: str, repeat: int, speed: float) -> ClusterSample:
    cpu = {ORCHESTRATORS: 0.1, VERIFIERS: 0.2, DRAFTERS: 0.0, REST: 0.1, CLIENTS: 0.1}
    return ClusterSample(name, repeat, int(10 * speed), 10.0, speed, cpu)


def measured(four: float = 395.0) -> MeasuredCluster:
    speeds = {row.name: 100.0 * multiple_of(row) for row in ROWS} | {FOUR.name: four}
    samples = [sample(name, repeat, speed) for repeat in range(7) for name, speed in speeds.items()]
    return MeasuredCluster(samples, 0)


def results(found: MeasuredCluster) -> ClusterResults:
    rows = row_results(found, {row.name: 100.0 if row == ONE else None for row in ROWS})
    return ClusterResults(run.arguments(7), {}, rows, bars(found, rows), found.samples)


def test_figures(tmp_path: Path) -> None:
    found = results(measured())
    assert found.holds
    by_name = {row.name: row for row in found.rows}
    for row, each in ((FOUR, 0.9875), (WIDE[-1], 1.0)):
        to_one = by_name[row.name].to_one
        assert to_one is not None
        assert (to_one.low, to_one.value, to_one.high) == (each, each, each)
        assert to_one.coverage >= 0.95
    assert by_name[DRAFTED.name].to_one is None
    assert by_name[ONE.name].orchestrator_us.value == pytest.approx(100.0)
    assert by_name[ONE.name].tokens_per_core == pytest.approx(10_000.0)
    assert by_name[ONE.name].cores == pytest.approx(0.05)
    write(found, tmp_path / "cluster.json")
    told = json.loads((tmp_path / "cluster.json").read_text())
    assert [row["name"] for row in told["rows"]] == [row.name for row in ROWS]
    assert len(told["raw"]) == 7 * len(ROWS)
    assert FOUR.name in cluster_table(told)


def test_what_is_missed() -> None:
    slow = [bar.name for bar in results(measured(four=350.0)).bars if not bar.holds]
    assert [FOUR.name in name for name in slow] == [True]
    wrong = [bar.name for bar in results(replace(measured(), mismatches=1)).bars if not bar.holds]
    assert wrong == ["sessions whose text changed"]
    assert len(results(measured()).bars) == len(OVER_VERIFIERS) + len(OVER_ORCHESTRATORS) + 1


def test_repeats_are_checked(capsys: pytest.CaptureFixture[str]) -> None:
    assert run.main(["--repeats", "0"]) == 2
    assert "--repeats: must be at least 1, not 0" in capsys.readouterr().err


def test_tokens_are_counted_while_all_run() -> None:
    """The second one begins at 2 s, and the first one ends at 5 s."""
    first = CrowdSession((1,) * 5, tuple((float(at), 1) for at in range(1, 6)))
    second = CrowdSession((1,) * 8, ((2.0, 2), (4.0, 2), (6.0, 2), (8.0, 2)))
    found = ServedCrowd((first, second), 8.0)
    assert (found.tokens, found.tokens_per_second) == (13, 13 / 8)
    assert found.steady == (3 + 2) / 3
