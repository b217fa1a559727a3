"""The figures of a soak, what was needed, and their form for people and on disk (bench/results/soak.json)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from bench.harness.interval import Estimate
from bench.harness.record import save
from bench.harness.report import Bar, at_least, bar_lines, exactly, none_of
from bench.soak.checks import CheckKind, SoakFinding
from bench.soak.neighbour import KINDS
from bench.soak.reader import Told

WHOLE_MINUTES = 10.0


# Findings that are printed and written in full.
MOST_SHOWN = 200


@dataclass(slots=True)
class Tally:
    """Sums over sessions. `waits`: seconds between a session's chunks; `pauses`: the longest of each session.

    left: sessions that were left by their readers, and still ran when the log was looked at. orphans: those of them
    that did not end by themselves; they are read to their end at last, which is no session more.
    """

    sessions: int = 0
    tokens: int = 0
    ends: Counter[str] = field(default_factory=Counter)
    waits: list[float] = field(default_factory=list)
    pauses: list[float] = field(default_factory=list)
    findings: list[SoakFinding] = field(default_factory=list)
    second_readers: int = 0
    left: int = 0
    orphans: int = 0

    def add(self, told: Told, findings: Sequence[SoakFinding]) -> None:
        self.findings += findings
        if told.orphan:
            return
        self.sessions += 1
        self.tokens += len(told.tokens)
        self.second_readers += told.second is not None
        self.ends["error" if told.error else told.end.name.lower() if told.end else str(told.job.manner)] += 1
        self.waits += told.waits
        if told.waits:
            self.pauses.append(max(told.waits))

    def count(self, *kinds: CheckKind) -> int:
        return sum(one.kind in kinds for one in self.findings)


@dataclass(frozen=True, slots=True)
class SoakReport:
    """A run.

    Attributes:
        asked_minutes: how long it was to go on. lasted_s: how long sessions were begun, and faults.
        kinds: how many kinds of faults the monkey has; in a run of WHOLE_MINUTES each comes.
        neighbour: answers to requests that must hurt nobody. asked_kinds: how many kinds of those were answered.
        filed: answers at the orchestrator with its log in a file, and how often that was cut (`FiledService`).
        wrong: what processes did that they should not have.
        unended: sessions that the log does not see ended; not looked for where the run was interrupted.
    """

    arguments: Mapping[str, object]
    ran_on: Mapping[str, object]
    asked_minutes: float
    lasted_s: float
    seconds: float
    tally: Tally
    faults: Mapping[str, int]
    kinds: int
    neighbour: Mapping[str, int]
    asked_kinds: int
    filed: Mapping[str, int]
    wrong: Sequence[str]
    unended: int
    interrupted: bool

    @property
    def whole(self) -> bool:
        """As long as what is recorded, to its end, and beside all that the monkey does."""
        return self.asked_minutes >= WHOLE_MINUTES and all(bar.holds for bar in self._whole)

    @property
    def _whole(self) -> list[Bar]:
        """A run that was cut short, or in which nothing went wrong, shows little."""
        long = self.asked_minutes >= WHOLE_MINUTES
        kinds, asked = (self.kinds, len(KINDS)) if long else (1, 1)
        return [
            at_least("minutes", exactly(round(self.lasted_s / 60, 2)), self.asked_minutes),
            at_least("kinds of faults", exactly(len(self.faults)), kinds),
            at_least("kinds of a neighbour's requests", exactly(self.asked_kinds), asked),
            at_least("notes refused by a full part of a log", self._filed("greedy RESOURCE_EXHAUSTED"), 1),
            at_least("cuts of a log in a file", self._filed("cut"), 1),
            none_of("interruptions", int(self.interrupted)),
        ]

    def _filed(self, what: str) -> Estimate:
        return exactly(self.filed.get(what, 0))

    @property
    def bars(self) -> list[Bar]:
        count = self.tally.count
        return [
            *self._whole,
            none_of("lost", count(CheckKind.LOST)),
            none_of("repeated", count(CheckKind.REPEATED)),
            none_of("mismatches", count(CheckKind.MISMATCH, CheckKind.TEXT)),
            none_of("sessions that did not end as asked", count(CheckKind.END, CheckKind.ERROR) + self.unended),
            none_of("sessions that were left and that nobody ended", self.tally.orphans),
            none_of("logs and readers that were told otherwise", count(CheckKind.LOG, CheckKind.READER)),
            none_of("processes that misbehaved", len(self.wrong)),
        ]

    @property
    def holds(self) -> bool:
        return all(bar.holds for bar in self.bars)

    @property
    def figures(self) -> dict[str, object]:
        tally = self.tally
        return {
            "minutes": round(self.lasted_s / 60, 2),
            "minutes_until_all_ended": round(self.seconds / 60, 2),
            "sessions": tally.sessions,
            "tokens": tally.tokens,
            "tokens_per_second": round(tally.tokens / self.seconds, 1) if self.seconds else 0.0,
            "ends": dict(sorted(tally.ends.items())),
            "second_readers": tally.second_readers,
            "left_running": tally.left,
            "orphans": tally.orphans,
            "faults": dict(sorted(self.faults.items())),
            "neighbour": dict(sorted(self.neighbour.items())),
            "filed": dict(sorted(self.filed.items())),
            "wait_for_a_chunk_s": quantiles(tally.waits),
            "longest_pause_of_a_session_s": quantiles(tally.pauses),
            "near_ties": tally.count(CheckKind.NEAR_TIE),
            "interrupted": self.interrupted,
        }

    def write(self, path: Path) -> None:
        found = {
            "bars": [asdict(bar) for bar in self.bars],
            **self.figures,
            "findings": [asdict(one) for one in self.tally.findings[:MOST_SHOWN]],
            "wrong": list(self.wrong)[:MOST_SHOWN],
        }
        save(path, found, self.arguments, ran_on=self.ran_on)

    def shown(self) -> str:
        rows = [f"{name.replace('_', ' ')}: {_shown(value)}" for name, value in self.figures.items()]
        said = [f"session {one.session}: {one.kind}: {one.detail}" for one in self.tally.findings[:MOST_SHOWN]]
        parts = (rows, bar_lines(self.bars), said, list(self.wrong))
        return "\n\n".join("\n".join(lines) for lines in parts if lines)


def quantiles(values: Sequence[float]) -> dict[str, float]:
    if not values:
        return {}
    ordered = sorted(values)
    at = {"p50": 0.5, "p99": 0.99, "max": 1.0}
    return {name: round(ordered[min(len(ordered) - 1, int(q * len(ordered)))], 3) for name, q in at.items()}


def _shown(value: object) -> str:
    return ", ".join(f"{name} {one}" for name, one in value.items()) if isinstance(value, dict) else str(value)
