"""Keeps the table of docs/SECURITY.md equal to the recorded run of fuzzing.

python -m scripts.security --write    put it in
python -m scripts.security --check    exit 1 if the one that is there differs
"""

import json
import sys
from pathlib import Path
from typing import Any

from scripts.pages import asked_to_write, with_table

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "SECURITY.md"
RESULTS = ROOT / "bench" / "results" / "fuzz.json"
UNRECORDED = "Not recorded yet: `make fuzz MINUTES=30`."
NOTHING = "nothing of what is not allowed"


def fuzz_table(results: dict[str, Any]) -> str:
    """Render how often each target was tried and answered how, and what was found."""
    rows = ["| what | tried | answers |", "| --- | --- | --- |"]
    for target in results["targets"]:
        answers = ", ".join(f"{answer} {count}" for answer, count in target["answers"].items())
        rows.append(f"| {target['name']} | {target['tried']} | {answers} |")
    machine, (first, last) = results["machine"], results["resident_mib"]
    commit = results["commit"] or "unknown"
    of = commit[:12] + (" and changes" if commit.endswith("+") else "")
    said = (
        f"Commit {of}, {results['minutes']:g} minutes, {results['rounds']} rounds of {results['examples']} tries,",
        f"on {machine['cpu']}, {machine['cores']} cores. Memory of the process,",
        f"which holds all services: {first} MiB after the first round, {last} MiB after the last.",
        f"Found: {'; '.join(' '.join(each.split()) for each in results['findings']) or NOTHING}.",
    )
    return "\n".join([*rows, "", " ".join(said)])


def main() -> int:
    """Run the command line."""
    write = asked_to_write(__doc__)
    have = PAGE.read_text()
    table = fuzz_table(json.loads(RESULTS.read_text())) if RESULTS.exists() else UNRECORDED
    want = with_table(have, "fuzz", "security", table)
    if write:
        PAGE.write_text(want)
    elif have != want:
        print(f"{PAGE.name}: the table differs from {RESULTS.name}: run python -m scripts.security --write")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
