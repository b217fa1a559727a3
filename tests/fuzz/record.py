"""What a long run of fuzzing tried, what came of it, and its form on disk (`bench/results/fuzz.json`)."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from bench.harness import machine
from bench.harness.report import Bar, at_least, at_most, exactly, none_of

OUT = Path(__file__).resolve().parents[2] / "bench" / "results" / "fuzz.json"
# What docs/SECURITY.md promises of a run that is recorded.
MINUTES = 30.0
# By which the process, which holds all services, may grow after its first round.
MOST_GROWTH_MIB = 256.0
# For which another tenant's /health or text may wait while a request is served whose fields are as large as can be.
MOST_WAIT_MS = 250.0
MIB = 1 << 20


@dataclass(slots=True)
class Record:
    """A run.

    tallies: by target, how often it was `tried`, and each answer. sizes: bytes of memory after each round.
    findings: a line for each target that has failed. minutes: that it took. waits_s: of neighbours, while a large
    request was served: seconds of computing between two turns of the loop, by that request.
    """

    examples: int
    tallies: dict[str, Counter[str]] = field(default_factory=dict)
    sizes: list[int] = field(default_factory=list)
    findings: list[str] = field(default_factory=list)
    minutes: float = 0.0
    waits_s: dict[str, float] = field(default_factory=dict)

    def waited(self, request: str, seconds: float) -> None:
        """The shortest of several tries counts: what else goes on in this process may come between."""
        self.waits_s[request] = min(seconds, self.waits_s.get(request, seconds))

    @property
    def longest(self) -> tuple[str, float]:
        """The request behind which a neighbour waited longest, and for how many milliseconds."""
        name = max(self.waits_s, key=self.waits_s.__getitem__, default="")
        return name, 1000 * self.waits_s.get(name, 0.0)

    @property
    def growth_mib(self) -> float:
        return (self.sizes[-1] - self.sizes[0]) / MIB if self.sizes else 0.0

    @property
    def bars(self) -> list[Bar]:
        """How long it took is one, so that a short run is not taken for a whole one."""
        return [
            at_least("minutes", exactly(self.minutes), MINUTES),
            none_of("findings", len(self.findings)),
            at_most("growth of memory after the first round, MiB", exactly(self.growth_mib), MOST_GROWTH_MIB),
            at_most("longest wait of another tenant, ms", exactly(self.longest[1]), MOST_WAIT_MS),
        ]

    @property
    def clean(self) -> bool:
        """Nothing was found, whatever the time."""
        return all(bar.holds for bar in self.bars if bar.name != "minutes")

    def results(self) -> dict[str, Any]:
        """As JSON."""
        return {
            "name": OUT.stem,
            "bars": [asdict(bar) for bar in self.bars],
            "minutes": round(self.minutes, 1),
            "rounds": len(self.sizes),
            "examples": self.examples,
            "resident_mib": [round(size / MIB) for size in self.sizes[:1] + self.sizes[-1:]],
            "targets": [_target(name, tally) for name, tally in self.tallies.items()],
            "findings": self.findings,
            "longest_wait": {"request": self.longest[0], "of": len(self.waits_s)},
        }

    def write(self, out: Path, ran_on: dict[str, object], commit: str | None) -> None:
        """ran_on, commit: as `bench.harness.machine` said at the start."""
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(json.dumps({**self.results(), "machine": ran_on, "commit": commit}, indent=1) + "\n")


def _target(name: str, tally: Counter[str]) -> dict[str, Any]:
    return {"name": name, "tried": tally["tried"], "answers": dict(sorted(_answers(tally).items()))}


def _answers(tally: Counter[str]) -> Counter[str]:
    """By status; of several calls (CALL STATUS) their sum. Fields of answers, in small letters, are left out."""
    summed: Counter[str] = Counter()
    for said, count in tally.items():
        if said.isupper() or said.isdecimal() or " " in said:
            summed[said.rpartition(" ")[2]] += count
    return summed


def lines(record: Record) -> Iterator[str]:
    """For people."""
    for target in record.results()["targets"]:
        answers = ", ".join(f"{code} {count}" for code, count in target["answers"].items())
        yield f"{target['name']}: {target['tried']}: {answers}"
    yield f"{len(record.sizes)} rounds in {record.minutes:.1f} minutes; memory grew by {record.growth_mib:.0f} MiB"
    name, wait_ms = record.longest
    yield f"{len(record.waits_s)} large requests; a neighbour waited {wait_ms:.0f} ms at most ({name or 'none'})"
    yield from (f"FOUND: {each}" for each in record.findings)


def started() -> tuple[dict[str, object], str | None]:
    """The machine and the commit, before anything is done."""
    return machine.describe(), machine.commit()
