"""What is needed of `make bench`, and whether it holds."""

from __future__ import annotations

from collections.abc import Iterator, Sequence, Set

from bench.harness.interval import Estimate
from bench.harness.report import Bar, at_least, at_most
from bench.harness.rows import (
    ASSISTED,
    DRAFTING_OFF,
    DRAFTING_ON,
    GENAI,
    GENAI_DRAFT,
    GENAI_LOOKUP,
    ONE_OFF,
    ONE_ON,
    PLAIN,
    SEVERAL_OFF,
    SEVERAL_ON,
    WITH_HEAD,
)
from bench.harness.runs import Sample, speed_ratio
from bench.harness.texts import Judged
from bench.main.gaps import BETWEEN, DELIVERY, Figure

SPEED = (
    ("drafting on / transformers", DRAFTING_ON, PLAIN, 2.5),
    ("drafting on / transformers assisted", DRAFTING_ON, ASSISTED, 2.0),
    ("drafting off / transformers", DRAFTING_OFF, PLAIN, 1.0),
    ("one process, off / OpenVINO GenAI", ONE_OFF, GENAI, 0.8),
    ("one process, default / OpenVINO GenAI's prompt lookup", ONE_ON, GENAI_LOOKUP, 0.8),
    ("one process, default / OpenVINO GenAI's draft model", ONE_ON, GENAI_DRAFT, 1.3),
)
GAPS_MS = {BETWEEN: 1.0, DELIVERY: 2.5}
OURS = (DRAFTING_OFF, DRAFTING_ON, WITH_HEAD, ONE_OFF, ONE_ON, SEVERAL_OFF, SEVERAL_ON)


def bars(samples: Sequence[Sample], figures: Sequence[Figure], judged: Sequence[Judged]) -> list[Bar]:
    return [*_speed(samples), *_texts(judged, {sample.row for sample in samples}), *_gaps(figures)]


def speed_bars(measured: Set[str]) -> list[tuple[str, str, str, float]]:
    """Of `SPEED`, those whose two rows were measured."""
    return [bar for bar in SPEED if {bar[1], bar[2]} <= measured]


def _speed(samples: Sequence[Sample]) -> Iterator[Bar]:
    for name, faster, slower, needed in speed_bars({sample.row for sample in samples}):
        yield at_least(f"speed, {name}", speed_ratio(samples, faster, slower), needed)


def _texts(judged: Sequence[Judged], measured: Set[str]) -> Iterator[Bar]:
    for row in OURS:
        if row not in measured:
            continue
        wrong = sum(one.mismatch.row == row and not one.near_tie for one in judged)
        yield at_most(
            f"texts of row {row} that differ from transformers' but for near-ties",
            Estimate(wrong, wrong, wrong, 1.0),
            0,
        )


def _gaps(figures: Sequence[Figure]) -> Iterator[Bar]:
    for figure in figures:
        if figure.part == "total":
            yield at_most(f"ms, {figure.path}, row {figure.row}, p50", figure.p50, GAPS_MS[figure.path])
