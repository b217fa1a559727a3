"""What people read: the rows, then the variants, the gaps, the texts and the bars."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from bench.harness.interval import CONFIDENCE
from bench.harness.report import bar_lines, table
from bench.harness.rows import PLAIN
from bench.harness.texts import Judged
from bench.main.gaps import Figure
from bench.main.results import Results, RowResult, VariantResult


def report(results: Results) -> str:
    sections = (
        _rows(results.rows, results.cores),
        _variants(results.variants) if results.variants else [],
        _gaps(results.figures),
        _cores(results),
        _texts(results.judged),
        bar_lines(results.bars),
        list(results.notes),
    )
    return "\n\n".join("\n".join(lines) for lines in sections if lines)


def core_ms(used: Mapping[str, float], tokens_per_second: float) -> float:
    """Processor time of a token in milliseconds, all processes together. used: cores in use by each of them."""
    return sum(used.values()) / tokens_per_second * 1e3


def _rows(rows: Sequence[RowResult], cores: Mapping[str, Mapping[str, float]]) -> list[str]:
    head = (
        *("row", "tokens/s", *(f"x {peer}" for peer in rows[0].to), f"x {PLAIN}, by prompt"),
        *("tokens/forward", "acceptance", "first token ms", "core-ms/token"),
    )
    body = [
        (
            f"({row.key}) {row.label}",
            f"{row.tokens_per_second.value:.1f}",
            *(f"{ratio:.2f}" for ratio in row.to.values()),
            f"{row.prompts[PLAIN].least:.2f} .. {row.prompts[PLAIN].most:.2f}",
            f"{row.tokens_per_forward:.2f}",
            "-" if row.acceptance is None else f"{row.acceptance:.3f}",
            f"{row.first_token_ms:.1f}",
            f"{core_ms(cores[row.key], row.tokens_per_second.value):.2f}" if row.key in cores else "-",
        )
        for row in rows
    ]
    coverage = rows[0].tokens_per_second.coverage
    note = f"medians over repeats; in brackets an interval that covers the true median with {coverage:.1%}"
    return [*table(head, body), note if coverage >= CONFIDENCE else f"{note}: too few repeats for {CONFIDENCE:.0%}"]


def _variants(variants: Sequence[VariantResult]) -> list[str]:
    head = ("selection pass", "tokens/s", "tokens/forward", "")
    body = [
        (one.name, f"{one.tokens_per_second:.1f}", f"{one.tokens_per_forward:.2f}", "taken" if one.chosen else "")
        for one in variants
    ]
    return table(head, body)


def _gaps(figures: Sequence[Figure]) -> list[str]:
    head = ("ms", "row", "p50", "p95", "samples")
    body = []
    path = ""
    for figure in figures:
        if figure.path != path:
            path = figure.path
            body.append((path, "", "", "", ""))
        body.append((f"  {figure.part}", figure.row, _milli(figure.p50.value), _milli(figure.p95), str(figure.count)))
    return table(head, body) if body else ["no timings came with the chunks"]


def _cores(results: Results) -> list[str]:
    processes = list(next(iter(results.cores.values()), {}))
    body = [(f"while ({row}) ran", *(f"{used[name]:.2f}" for name in processes)) for row, used in results.cores.items()]
    return table(("cores in use", *processes), sorted(body)) if body else []


def _texts(judged: Sequence[Judged]) -> list[str]:
    if not judged:
        return [f"texts: all rows equal ({PLAIN}), token for token"]
    return [f"texts: different from ({PLAIN}) at", *_mismatches(judged)]


def _mismatches(judged: Sequence[Judged]) -> Iterator[str]:
    for one in judged:
        where = one.mismatch
        kind = "a near-tie" if one.near_tie else "NOT a near-tie"
        yield (
            f"  ({where.row}) prompt {where.prompt}, token {where.at}: {where.got} instead of {where.expected}; "
            f"the target's top two there are {one.gap:.2e} apart, {kind}"
        )


def _milli(value: float) -> str:
    return f"{value:.3f}"
