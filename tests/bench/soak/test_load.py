"""The figures of a crowd."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest

from bench.harness import record
from bench.soak import load as load
from bench.soak.load import LONGEST, MEAN_LENGTH, length
from bench.soak.load_report import LoadReport

BEFORE = {"orchestrator": 10.0, "verifier": 20.0, "redis": 4.0}


def memory(orchestrator: float, verifier: float = 30.0) -> dict[str, float]:
    return {"orchestrator": orchestrator, "verifier": verifier, "redis": 4.0}


def a_report() -> LoadReport:
    samples = [
        (float(second), 100 * second, 8, 1000 * second, memory(20.0 if second > 2 else 15.0)) for second in range(20)
    ]
    rested = memory(20.0)
    weights = [(1000 * second, memory(20.0 if second > 2 else 15.0), rested) for second in range(20)]
    return LoadReport({}, {}, 4321.0, BEFORE, samples, weights, 8, 5, [], 100, 0, [(700, 700)], 4000)


def missed(report: LoadReport) -> list[str]:
    return [bar.name for bar in report.bars if not bar.holds]


def test_figures(tmp_path: Path) -> None:
    report = a_report()
    assert report.paced == 100.0
    assert report.kib_per_session == {"orchestrator": 1280.0, "verifier": 1280.0, "redis": 0.0}
    assert {name: kept.high for name, kept in report.kept.items()} == dict.fromkeys(BEFORE, 0.0)
    assert report.holds
    report.write(tmp_path / "load.json")
    assert json.loads((tmp_path / "load.json").read_text())["tokens_per_second"] == 4321.0
    assert "unread decided: [700]" in report.shown()


def test_what_is_missed() -> None:
    report = a_report()
    leaking = [(gone, memory(10.0 + gone / 1000), resident) for gone, _, resident in report.weights]
    assert missed(replace(report, weights=leaking)) == ["bytes kept of an ended session, orchestrator"]
    growing = [(gone, held, memory(30.0, 10.0 + gone / 1000)) for gone, held, _ in report.weights]
    of = "bytes of resident memory kept of one, at least, verifier"
    assert missed(replace(report, weights=growing)) == [of]
    assert missed(replace(report, weights=report.weights[:1])) == ["services whose growth could not be told"]
    assert missed(replace(report, sessions=9)) == []  # besides the one that nobody reads on
    assert missed(replace(report, sessions=10)) == ["fewest sessions at a look"]
    assert missed(replace(report, errors=["UNAVAILABLE: x"], mismatches=1)) == ["sessions that failed", "mismatches"]
    assert missed(replace(report, idle=[(700, 800)])) == ["unread sessions decided further meanwhile"]
    assert missed(replace(report, idle=[(4000, 4000)])) == ["unread sessions decided to their end"]


@pytest.mark.parametrize("words", [["--minutes", "0"], ["--sessions", "961", "--idle", "60"], ["--idle", "-1"]])
def test_settings_are_checked(words: list[str], capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert load.main([*words, "--out", str(tmp_path / "load.json")]) == 2
    assert words[0].removeprefix("--") in capsys.readouterr().err


def test_only_a_whole_run_is_recorded(tmp_path: Path) -> None:
    said: list[str] = []
    path = tmp_path / "load.json"
    report = a_report()
    record.keep(report, None, path, said.append)
    assert not path.exists()
    assert "not a whole run: load.json is left as it is" in said[0]
    long = [(600.0, 100, 1000, 1000, memory(20.0)), (1198.0, 200, 1000, 2000, memory(20.0))]
    record.keep(replace(report, samples=long, sessions=1001), None, path, said.append)
    assert json.loads(path.read_text())["sessions"] == 1001
    record.keep(report, tmp_path / "other.json", path, said.append)
    assert json.loads((tmp_path / "other.json").read_text())["sessions"] == 8
    assert len(said) == 1


def test_how_long_a_session_was_says_nothing_of_how_long_it_will_be() -> None:
    random = Random(1)
    lengths = [length(random) for _ in range(20_000)]
    assert min(lengths) == 1
    assert max(lengths) <= LONGEST
    for age in (1, MEAN_LENGTH, 2 * MEAN_LENGTH):
        left = [each - age for each in lengths if each >= age]
        assert sum(left) / len(left) == pytest.approx(MEAN_LENGTH, rel=0.05)
