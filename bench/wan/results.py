"""Everything that a measurement over a line found, and its form on disk: bench/results/wan.json."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from bench.harness.report import Bar
from bench.harness.runs import Run, Sample, of_row
from bench.relay.gauge import Gauge
from bench.wan.disciplines import (
    CHAIN,
    DISCIPLINES,
    PLAIN,
    TEXTBOOK,
    first_token_ms,
    ratio,
    ratio_to,
    tokens_per_second,
)
from bench.wan.emulated import EmulatedTimes
from bench.wan.judged import against_optimum, simulator_error
from bench.wan.real_pair import MeasuredPair
from bench.wan.virtual import ExpectedCell, Software
from bench.wan.wire import Hop, Wire

WHERE = "demo pair, {:g} ms"


@dataclass(frozen=True, slots=True)
class WanResults:
    """What was not asked for is empty. notes: for people. pair_commit: of `pair`, if that is of an earlier run."""

    arguments: Mapping[str, object]
    machine: Mapping[str, object]
    commit: str | None
    gauge: Gauge
    software: Software
    grid: Sequence[ExpectedCell]
    cells: Sequence[EmulatedTimes]
    pair: Sequence[MeasuredPair]
    wire: Sequence[Wire]
    bars: Sequence[Bar]
    notes: Sequence[str]
    pair_commit: str | None = None

    @property
    def texts_hold(self) -> bool:
        """Whether every text over an emulated device was the same, whatever the discipline."""
        return all(one.texts_equal for one in self.cells)


def write(results: WanResults, path: Path) -> None:
    """One JSON object; each raw session on a line of its own."""
    head = {
        "name": path.stem,
        "bars": [asdict(bar) for bar in results.bars],
        "emulated": [_cell(one) for one in results.cells],
        "demo_pair": [_pair(one) for one in results.pair],
        "demo_pair_commit": results.pair_commit,
        "simulated": [_expected(one) for one in results.grid],
        "wire": [_wire(one) for one in results.wire],
        "relay": asdict(results.gauge),
        "software": asdict(results.software),
        "notes": list(results.notes),
        "machine": results.machine,
        "commit": results.commit,
        "arguments": results.arguments,
    }
    raw = ",\n  ".join(json.dumps(row) for row in _raw(results))
    lines = ",\n ".join(f"{json.dumps(key)}: {json.dumps(value)}" for key, value in head.items())
    path.write_text(f'{{\n {lines},\n "raw": [\n  {raw}\n ]\n}}\n')


def _cell(one: EmulatedTimes) -> dict[str, object]:
    return {
        "name": one.cell.name,
        "cell": asdict(one.cell),
        "namespaces": one.isolated,
        "settings": one.expected.settings,
        "simulated": _rounded(one.expected.speeds),
        "optimum": round(one.expected.optimum, 3),
        "optimum_of_chains": round(one.expected.optimum_of_chains, 3),
        "disciplines": _disciplines(one.samples),
        "simulator_error": {name: asdict(simulator_error(one, name)) for name in one.expected.speeds},
        **{f"{row}_to_optimum": asdict(ratio_to(one.samples, row, best)) for row, _, best in against_optimum(one)},
        "texts_equal": one.texts_equal,
        "relay_late_ms": one.late_ms,
    }


def _pair(one: MeasuredPair) -> dict[str, object]:
    return {
        "rtt_ms": one.rtt_ms,
        "namespaces": one.isolated,
        "settings": one.settings,
        "disciplines": _disciplines(one.samples),
        "texts_equal": one.texts_equal,
    }


def _disciplines(samples: Sequence[Sample]) -> dict[str, object]:
    """Of those that were measured."""
    names = [name for name in DISCIPLINES if of_row(samples, name)]
    return {name: _discipline(samples, name, names) for name in names}


def _discipline(samples: Sequence[Sample], name: str, others: Sequence[str]) -> dict[str, object]:
    compared = {PLAIN: "to_plain", TEXTBOOK: "to_textbook", CHAIN: "to_chain"}
    return {
        "tokens_per_second": asdict(tokens_per_second(samples, name)),
        **{key: asdict(ratio(samples, name, other)) for other, key in compared.items() if other in others},
        "first_token_ms": asdict(first_token_ms(samples, name)),
    }


def _expected(one: ExpectedCell) -> dict[str, object]:
    return {
        "name": one.cell.name,
        "tokens_per_second": _rounded(one.speeds),
        "optimum": round(one.optimum, 3),
        "optimum_of_chains": round(one.optimum_of_chains, 3),
        "settings": one.settings,
    }


def _wire(one: Wire) -> dict[str, object]:
    return {
        "rule": one.rule,
        "trees": one.trees,
        "decided": one.decided,
        "hops": [_hop(hop, one.decided) for hop in one.hops],
    }


def _hop(hop: Hop, decided: int) -> dict[str, object]:
    return {
        **asdict(hop),
        "bytes": _rounded(hop.bytes),
        "bytes_per_proposed_token": round(hop.per_token("proposals"), 3),
        "bytes_per_decided_token": round(sum(hop.bytes.values()) / decided, 3),
    }


def _rounded(values: Mapping[str, float]) -> dict[str, float]:
    return {name: round(value, 3) for name, value in values.items()}


def _raw(results: WanResults) -> Iterator[dict[str, object]]:
    for cell in results.cells:
        yield from (_session(cell.cell.name, sample) for sample in cell.samples)
    for pair in results.pair:
        yield from (_session(WHERE.format(pair.rtt_ms), sample) for sample in pair.samples)


def _session(where: str, sample: Sample) -> dict[str, object]:
    run = sample.run
    return {
        "where": where,
        "repeat": sample.repeat,
        "prompt": sample.prompt,
        "discipline": sample.row,
        "tokens": len(run.tokens),
        "seconds": round(run.seconds, 6),
        "first_token_seconds": round(run.first_token_seconds, 6),
        "forwards": run.forwards,
        "tested": run.tested,
        "accepted": run.accepted,
        "plan": run.plan,
    }


@dataclass(frozen=True, slots=True)
class Earlier:
    """The demo pair's part of an earlier run, so that the emulated cells can be measured anew without it."""

    pair: tuple[MeasuredPair, ...]
    commit: str


def earlier(path: Path) -> Earlier:
    """Raises ValueError that says what is missing in `path`."""
    try:
        record = json.loads(path.read_text())
        pair = tuple(_measured(line, record["raw"]) for line in record["demo_pair"])
        commit = record.get("demo_pair_commit") or record["commit"]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path}: not a record of this measurement: {error!r}") from error
    if not pair:
        raise ValueError(f"{path}: the demo pair was not measured in it")
    return Earlier(pair, commit)


def _measured(line: Mapping[str, Any], raw: list[Mapping[str, Any]]) -> MeasuredPair:
    where = WHERE.format(line["rtt_ms"])
    rows = [row for row in raw if row["where"] == where]
    # What sessions said is not in the file, only whether it was the same.
    samples = [_sample(row, 0 if line["texts_equal"] else number) for number, row in enumerate(rows)]
    return MeasuredPair(line["rtt_ms"], line["settings"], samples, line["namespaces"])


def _sample(row: Mapping[str, Any], token: int) -> Sample:
    run = Run(
        (token,) * row["tokens"],
        row["seconds"],
        row["first_token_seconds"],
        row["forwards"],
        row["tested"],
        row["accepted"],
        plan=row["plan"],
    )
    return Sample(row["repeat"], row["prompt"], row["discipline"], run)
