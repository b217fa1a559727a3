"""The results for a large target: tables, bars and the file."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from bench.gpu.floor import Floor
from bench.gpu.steps import StepLine
from bench.harness.interval import Estimate
from bench.harness.record import save
from bench.harness.report import Bar, at_most, bar_lines, table

# Of the floor, for a compiled target: sessions, positions of each, and how many times the floor a step may take.
NEEDED = ((1, 1, 1.35), (8, 4, 1.6))


@dataclass(frozen=True, slots=True)
class SpeedSample:
    """One run of a row with so many sessions.

    floor_s: what its forwards, and those of what drafts, take at least (see Floor), each read at the text's mean length
    once; 0.0 where they were not counted.
    """

    repeat: int
    row: str
    sessions: int
    seconds: float
    tokens: int
    tested: int
    accepted: int
    floor_s: float = 0.0


@dataclass(frozen=True, slots=True)
class SpeedLine:
    """Tokens per second of all sessions together. tokens_per_session: of each. to_floor: see `SpeedSample.floor_s`."""

    row: str
    sessions: int
    tokens_per_second: Estimate
    tokens_per_session: float
    acceptance: float | None
    to_floor: Estimate | None = None


@dataclass(frozen=True, slots=True)
class GpuResults:
    """device: its name, as its driver has it. notes: what is not as it would be in service."""

    device: str
    compiled: bool
    arguments: Mapping[str, object]
    floor: Floor
    steps: Sequence[StepLine]
    speeds: Sequence[SpeedLine]
    samples: Sequence[SpeedSample]
    notes: Sequence[str]

    @property
    def bars(self) -> list[Bar]:
        return list(_bars(self.steps)) if self.compiled else []


def _bars(steps: Sequence[StepLine]) -> Iterator[Bar]:
    for rows, window, needed in NEEDED:
        for step in steps:
            if (step.rows, step.window) == (rows, window):
                yield at_most(f"step of {rows} sessions x {window} / its floor", step.to_floor, needed)


def report(found: GpuResults) -> str:
    floor = found.floor
    head = f"{found.device}: copies at {floor.bandwidth / 1e9:.0f} GB/s; weights {floor.weight_bytes / 1e9:.2f} GB"
    steps = [
        (str(step.rows), str(step.window), _interval(step.ms), f"{step.floor_ms:.3f}", _interval(step.to_floor))
        for step in found.steps
    ]
    speeds = [
        (
            line.row,
            str(line.sessions),
            _interval(line.tokens_per_second),
            f"{line.tokens_per_session:.1f}",
            "" if line.acceptance is None else f"{line.acceptance:.2f}",
            "" if line.to_floor is None else _interval(line.to_floor),
        )
        for line in found.speeds
    ]
    parts = (
        [head],
        table(("sessions", "positions of each", "ms per step", "floor", "x floor"), steps),
        table(("row", "sessions", "tokens/s", "of each", "acceptance", "x floor"), speeds),
        bar_lines(found.bars) if found.bars else [],
        list(found.notes),
    )
    return "\n\n".join("\n".join(part) for part in parts if part)


def write(found: GpuResults, path: Path) -> None:
    head = {
        "device": found.device,
        "compiled": found.compiled,
        "bars": [asdict(bar) for bar in found.bars],
        "floor": asdict(found.floor),
        "steps": [asdict(step) for step in found.steps],
        "speeds": [asdict(line) for line in found.speeds],
        "notes": list(found.notes),
    }
    save(path, head, found.arguments, [asdict(sample) for sample in found.samples])


def _interval(value: Estimate) -> str:
    return f"{value.value:.3g} [{value.low:.3g}, {value.high:.3g}]"
