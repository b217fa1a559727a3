"""What is made of a long run: its bars, its form on disk, and the table that is printed of it."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

from scripts.figures.exact import fuzz_table
from tests.fuzz.record import MIB, MINUTES, MOST_GROWTH_MIB, MOST_WAIT_MS, Record, lines

MACHINE: dict[str, object] = {"cpu": "a CPU", "cores": 2}
TALLY = Counter(
    {"tried": 7, "OK": 3, "session_id": 3, "read DATA_LOSS": 2, "claim DATA_LOSS": 1, "404": 1, "read done": 4}
)


def run(minutes: float = MINUTES, grown_mib: float = 0.0, findings: tuple[str, ...] = ()) -> Record:
    sizes = [300 * MIB, round((300 + grown_mib) * MIB)]
    return Record(250, {"a target": TALLY}, sizes, list(findings), minutes)


def missed(record: Record) -> list[str]:
    return [bar.name for bar in record.bars if not bar.holds]


def test_a_short_run_is_no_whole_one_and_clean_all_the_same() -> None:
    assert (missed(run()), run().clean) == ([], True)
    assert (missed(run(MINUTES - 1)), run(MINUTES - 1).clean) == (["minutes"], True)


def test_findings_and_growth_count() -> None:
    found, grown = run(findings=("x: AssertionError: no",)), run(grown_mib=MOST_GROWTH_MIB + 1)
    assert (missed(found), found.clean) == (["findings"], False)
    assert (missed(grown), grown.clean) == (["growth of memory after the first round, MiB"], False)
    assert "FOUND: x: AssertionError: no" in lines(found)


def test_a_neighbour_that_waits_too_long_each_time_counts() -> None:
    record = run()
    record.waited("a body", 0.001 * MOST_WAIT_MS)
    record.waited("a message", 2.0)
    assert (missed(record), record.clean) == (["longest wait of another tenant, ms"], False)
    record.waited("a message", 0.1)
    assert (missed(record), record.clean) == ([], True)
    assert record.longest == ("a body", MOST_WAIT_MS)
    assert "2 large requests; a neighbour waited 250 ms at most (a body)" in lines(record)
    assert record.results()["longest_wait"] == {"request": "a body", "of": 2}


def test_its_table(tmp_path: Path) -> None:
    out = tmp_path / "results" / "fuzz.json"
    run(grown_mib=5).write(out, MACHINE, "0123456789abcdef")
    table = fuzz_table(json.loads(out.read_text())).splitlines()
    assert "| a target | 7 | 404 1, DATA_LOSS 3, OK 3, done 4 |" in table
    assert table[-1].startswith("Commit 0123456789ab, 30 minutes, 2 rounds of 250 tries, on a CPU, 2 cores")
    assert "300 MiB after the first round, 305 MiB after the last. Found: nothing" in table[-1]
