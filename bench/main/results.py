"""Everything that a measurement found, and its form on disk: bench/results/main.json."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from bench.harness.interval import Estimate
from bench.harness.record import write_object
from bench.harness.report import Bar
from bench.harness.rows import PLAIN
from bench.harness.runs import (
    Row,
    Sample,
    Spread,
    acceptance,
    first_token_ms,
    of_row,
    prompt_ratios,
    speed_ratio,
    spread,
    tokens_per_forward,
    tokens_per_second,
)
from bench.harness.texts import Judged
from bench.main.gaps import Figure


@dataclass(frozen=True, slots=True)
class RowResult:
    """A row's line in the table. `to` and `prompts`: speed as a multiple of another row's, in all and over prompts."""

    key: str
    label: str
    tokens_per_second: Estimate
    to: Mapping[str, Estimate]
    prompts: Mapping[str, Spread]
    tokens_per_forward: float
    acceptance: float | None
    first_token_ms: float


@dataclass(frozen=True, slots=True)
class VariantResult:
    """A peer's variant in the selection pass."""

    name: str
    tokens_per_second: float
    tokens_per_forward: float
    chosen: bool


@dataclass(frozen=True, slots=True)
class Results:
    """A measurement. cores: mean number in use, by row that ran and process; notes: what was not measured, and why."""

    arguments: Mapping[str, object]
    machine: Mapping[str, object]
    commit: str | None
    rows: Sequence[RowResult]
    variants: Sequence[VariantResult]
    bars: Sequence[Bar]
    figures: Sequence[Figure]
    judged: Sequence[Judged]
    cores: Mapping[str, Mapping[str, float]]
    samples: Sequence[Sample]
    notes: Sequence[str] = ()

    @property
    def texts_hold(self) -> bool:
        """Whether every mismatch of our rows is a near-tie."""
        return all(bar.holds for bar in self.bars if bar.name.startswith("texts"))


def row_result(row: Row, samples: Sequence[Sample], peers: Sequence[str]) -> RowResult:
    """peers: rows whose speed it is a multiple of."""
    return RowResult(
        key=row.key,
        label=row.label,
        tokens_per_second=tokens_per_second(samples, row.key),
        to={peer: speed_ratio(samples, row.key, peer) for peer in peers},
        prompts={peer: spread(prompt_ratios(samples, row.key, peer)) for peer in peers},
        tokens_per_forward=tokens_per_forward(samples, row.key),
        acceptance=acceptance(samples, row.key),
        first_token_ms=first_token_ms(samples, row.key),
    )


def write(results: Results, path: Path) -> None:
    head = {
        "name": path.stem,
        "bars": [asdict(bar) for bar in results.bars],
        "rows": [asdict(row) for row in results.rows],
        "variants": [asdict(variant) for variant in results.variants],
        "gaps_ms": [asdict(figure) for figure in results.figures],
        "mismatches": [asdict(one) for one in results.judged],
        "cores_in_use": results.cores,
        "notes": list(results.notes),
        "machine": results.machine,
        "commit": results.commit,
        "arguments": results.arguments,
        "tokens": {sample.prompt: list(sample.run.tokens) for sample in of_row(results.samples, PLAIN)},
    }
    write_object(head, [_raw(sample) for sample in results.samples], path)


def _raw(sample: Sample) -> dict[str, object]:
    run = sample.run
    return {
        "repeat": sample.repeat,
        "prompt": sample.prompt,
        "row": sample.row,
        "seconds": round(run.seconds, 6),
        "first_token_seconds": round(run.first_token_seconds, 6),
        "forwards": run.forwards,
        "tested": run.tested,
        "accepted": run.accepted,
        "plan": run.plan,
    }
