"""The demo pair's part of an earlier run, so that the emulated cells can be measured anew without it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.runs import Run, Sample
from bench.wan.real_pair import MeasuredPair

WHERE = "demo pair, {:g} ms"


@dataclass(frozen=True, slots=True)
class Earlier:
    """What was measured then, and of which commit."""

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
