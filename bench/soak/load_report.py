"""The figures of a crowd, what was needed, and their form for people and on disk (bench/results/load.json)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from bench.harness.interval import Estimate
from bench.harness.record import save
from bench.harness.report import Bar, at_least, at_most, exactly, none_of, table
from bench.soak.memory import MOST_KEPT, Point, Sample, Weight, kept_bytes
from bench.soak.report import WHOLE_MINUTES

# Redis keeps the request ids, for as long as the sessions' logs may live and longer.
OURS = ("orchestrator", "verifier")
GROWING = (*OURS, "redis")
MOST_SHOWN = 20
# What a record is of.
WHOLE_SESSIONS = 1000


@dataclass(frozen=True, slots=True)
class LoadReport:
    """A run.

    Attributes:
        tokens_per_second: at full speed; the rest is of the paced run.
        before: MiB by process, resident, before the crowd came.
        samples, weights: see `bench.soak.memory`.
        sessions: at a time, those that nobody reads on included.
        idle: for each session that nobody read on: tokens decided before the crowd came, and at the end.
        unread: tokens that these had asked for.
    """

    arguments: Mapping[str, object]
    ran_on: Mapping[str, object]
    tokens_per_second: float
    before: Mapping[str, float]
    samples: Sequence[Sample]
    weights: Sequence[Weight]
    sessions: int
    ended: int
    errors: Sequence[str]
    judged: int
    mismatches: int
    idle: Sequence[tuple[int, int]]
    unread: int

    @property
    def whole(self) -> bool:
        """As long, and of as many sessions, as what is recorded."""
        return self.samples[-1][0] >= 60 * WHOLE_MINUTES - 30 and self._asked >= WHOLE_SESSIONS

    @property
    def _asked(self) -> int:
        """Sessions to be there at every look, besides those that nobody reads on."""
        return self.sessions - len(self.idle)

    @property
    def paced(self) -> float:
        """Tokens per second while memory was looked at."""
        (begin, first, *_), (end, last, *_) = self.samples[0], self.samples[-1]
        return (last - first) / (end - begin) if end > begin else 0.0

    @property
    def kib_per_session(self) -> dict[str, float]:
        """At most, over what the process had before."""
        most = {name: max(memory[name] for *_, memory in self.samples) for name in self.before}
        return {name: round((size - self.before[name]) * 1024 / self.sessions, 1) for name, size in most.items()}

    @property
    def kept(self) -> dict[str, Estimate]:
        """Bytes that each session leaves behind when it has ended, by process, of what is held.

        A run that is too short to tell has none.
        """
        return _kept([(gone, held) for gone, held, _ in self.weights])

    @property
    def resident_kept(self) -> dict[str, Estimate]:
        """The same of resident memory, which moves by itself, too: by what the allocator has not given back."""
        return _kept([(gone, resident) for gone, _, resident in self.weights])

    @property
    def bars(self) -> list[Bar]:
        moved = sum(later > first for first, later in self.idle)
        fewest = min((running for _, _, running, _, _ in self.samples), default=0)
        return [
            at_least("fewest sessions at a look", exactly(fewest), self._asked),
            none_of("sessions that failed", len(self.errors)),
            none_of("mismatches", self.mismatches),
            *(at_most(f"bytes kept of an ended session, {name}", self.kept[name], MOST_KEPT) for name in self._told),
            *self._resident_bars,
            none_of("services whose growth could not be told", len(GROWING) - len(self._told)),
            none_of("unread sessions decided to their end", sum(last >= self.unread for _, last in self.idle)),
            none_of("unread sessions decided further meanwhile", moved),
        ]

    @property
    def _told(self) -> list[str]:
        return [name for name in GROWING if name in self.kept]

    @property
    def _resident_bars(self) -> list[Bar]:
        """Of what is not held, growth can be shown, but not that there is none."""
        found = self.resident_kept
        name = "bytes of resident memory kept of one, at least"
        return [at_most(f"{name}, {of}", exactly(round(found[of].low, 1)), MOST_KEPT) for of in OURS if of in found]

    @property
    def holds(self) -> bool:
        return all(bar.holds for bar in self.bars)

    @property
    def figures(self) -> dict[str, object]:
        return {
            "sessions": self.sessions,
            "sessions_ended": self.ended,
            "tokens": self.samples[-1][1],
            "tokens_per_second": round(self.tokens_per_second, 1),
            "tokens_per_second_paced": round(self.paced, 1),
            "judged_tokens": self.judged,
            "mib_before": dict(self.before),
            "mib_at_the_end": self.samples[-1][4],
            "kib_per_session": self.kib_per_session,
            "kept_bytes": _intervals(self.kept),
            "resident_kept_bytes": _intervals(self.resident_kept),
            "unread_decided": sorted(last for _, last in self.idle),
        }

    def write(self, path: Path) -> None:
        found = {"bars": [asdict(bar) for bar in self.bars], **self.figures, "errors": list(self.errors)[:MOST_SHOWN]}
        looked = {"samples": self.samples, "weights": self.weights}
        save(path, {**found, **looked}, self.arguments, ran_on=self.ran_on)

    def shown(self) -> str:
        rows = [f"{name.replace('_', ' ')}: {value}" for name, value in self.figures.items()]
        bars = [
            (bar.name, _shown(bar), f"{bar.sense} {bar.needed:g}", "holds" if bar.holds else "MISSED")
            for bar in self.bars
        ]
        parts = (rows, table(("bar", "value", "needed", ""), bars), list(self.errors)[:MOST_SHOWN])
        return "\n\n".join("\n".join(lines) for lines in parts if lines)


def _kept(memory: Sequence[tuple[int, Mapping[str, float]]]) -> dict[str, Estimate]:
    found = {}
    for name in memory[0][1] if memory else ():
        with suppress(ValueError):
            found[name] = kept_bytes([Point(ended, sizes[name]) for ended, sizes in memory])
    return found


def _intervals(kept: Mapping[str, Estimate]) -> dict[str, list[float]]:
    return {name: [round(x, 1) for x in (each.value, each.low, each.high)] for name, each in kept.items()}


def _shown(bar: Bar) -> str:
    return f"{bar.value:g}" if bar.low == bar.high else f"{bar.value:.0f} ({bar.low:.0f} to {bar.high:.0f})"
