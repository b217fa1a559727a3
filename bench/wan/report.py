"""What people read of a measurement over a line."""

from __future__ import annotations

from collections.abc import Sequence

from bench.interval import Estimate
from bench.report import table
from bench.runs import Sample
from bench.wan.cells import RTTS_MS
from bench.wan.disciplines import DEFAULT, DISCIPLINES, PLAIN, STREAM_WAIT, TEXTBOOK
from bench.wan.emulated import Measured
from bench.wan.gauge import Gauge
from bench.wan.judged import simulator_error
from bench.wan.real_pair import MeasuredPair
from bench.wan.results import Results
from bench.wan.speeds import ratio, ratio_to, tokens_per_second
from bench.wan.virtual import Expected, Software
from bench.wan.wire import Wire

EMULATED = "emulated devices (forwards are sleeps, guesses a recorded trace), real sockets; tokens/s"


def report(results: Results) -> str:
    sections = (
        _gauge(results.gauge, results.software),
        _cells(results.cells),
        _pair(results.pair),
        _grid(results.grid),
        _wire(results.wire),
        _bars(results),
        list(results.notes),
    )
    return "\n\n".join("\n".join(lines) for lines in sections if lines)


def _gauge(gauge: Gauge, software: Software) -> list[str]:
    head = ("the relay itself: round trip told, ms", "p50", "p99")
    body = [(f"{one.wanted:g}", f"{one.p50:.3f}", f"{one.p99:.3f}") for one in gauge.round_trips]
    return [
        *table(head, body),
        f"throughput with no delay {gauge.megabytes_per_second:.0f} MB/s; deliveries late by "
        + ", ".join(f"{late:.3f} ms (p{100 * float(share):g})" for share, late in gauge.late_ms.items()),
        f"software of ours: {software.step_us / 1000:.2f} ms a step, {software.hop_us / 1000:.2f} ms a hop, "
        f"{software.draft_us / 1000:.2f} ms a draft token",
    ]


def _cells(cells: Sequence[Measured]) -> list[str]:
    head = (EMULATED, *DISCIPLINES, "/ plain", "/ textbook", "/ optimum", "simulator off by")
    body = [(_title(one), *_speeds(one.samples), *_ratios(one)) for one in cells]
    return table(head, body) if body else []


def _title(one: Measured) -> str:
    settings = one.expected.settings
    return f"{one.cell.name}  ({settings[TEXTBOOK]}, {settings[STREAM_WAIT]})"


def _speeds(samples: Sequence[Sample]) -> list[str]:
    return [f"{tokens_per_second(samples, name).value:.1f}" for name in DISCIPLINES]


def _ratios(one: Measured) -> list[str]:
    worst = max(simulator_error(one, name).value for name in DISCIPLINES)
    return [
        _interval(ratio(one.samples, DEFAULT, PLAIN)),
        _interval(ratio(one.samples, DEFAULT, TEXTBOOK)),
        _interval(ratio_to(one.samples, DEFAULT, one.expected.optimum)),
        f"{worst:.1%}",
    ]


def _pair(pair: Sequence[MeasuredPair]) -> list[str]:
    head = ("demo pair, real forwards on shared cores; tokens/s", *DISCIPLINES, "/ plain", "/ textbook", "texts")
    body = [
        (
            f"R {one.rtt_ms:g} ms  ({one.settings[TEXTBOOK]}, {one.settings[STREAM_WAIT]})",
            *_speeds(one.samples),
            _interval(ratio(one.samples, DEFAULT, PLAIN)),
            _interval(ratio(one.samples, DEFAULT, TEXTBOOK)),
            "equal" if one.texts_equal else "near-ties",
        )
        for one in pair
    ]
    return table(head, body) if body else []


def _grid(grid: Sequence[Expected]) -> list[str]:
    """The default over the better of plain and textbook, and over the optimum: the least of each row's round trips."""
    head = ("in virtual time: default / better of plain and textbook", *(f"{rtt:g} ms" for rtt in RTTS_MS), "/ optimum")
    rows: dict[str, dict[float, Expected]] = {}
    for one in grid:
        cell = one.cell
        name = f"d {cell.draft_ms:g} ms, a {cell.acceptance:g}, s {cell.slope:g}"
        rows.setdefault(name, {})[cell.rtt_ms] = one
    body = [
        (
            name,
            *(_to_better(found.get(rtt)) for rtt in RTTS_MS),
            f"{min(one.speeds[DEFAULT] / one.optimum for one in found.values()):.2f}",
        )
        for name, found in rows.items()
    ]
    return [*table(head, body), "the last column is the least of its row"] if body else []


def _to_better(one: Expected | None) -> str:
    return "-" if one is None else f"{one.speeds[DEFAULT] / max(one.speeds[PLAIN], one.speeds[TEXTBOOK]):.2f}"


def _wire(wire: Sequence[Wire]) -> list[str]:
    head = ("bytes on the wire, framing included", "per proposed token", "per decided token", "messages", "by kind")
    body = [
        (
            f"{one.rule}, {hop.name}",
            f"{hop.per_token('proposals'):.1f}" if hop.tokens.get("proposals") else "-",
            f"{sum(hop.bytes.values()) / one.decided:.1f}",
            str(hop.messages),
            ", ".join(f"{kind} {size:.0f}" for kind, size in hop.bytes.items()),
        )
        for one in wire
        for hop in one.hops
    ]
    return table(head, body) if body else []


def _bars(results: Results) -> list[str]:
    head = ("bar", "value", "interval", "needed", "")
    body = [
        (
            bar.name,
            f"{bar.value:.3g}",
            f"{bar.low:.3g} .. {bar.high:.3g}",
            f"{bar.sense} {bar.needed:g}",
            "holds" if bar.holds else "MISSED",
        )
        for bar in results.bars
    ]
    missed = sum(not bar.holds for bar in results.bars)
    return [*table(head, body), f"{missed} of {len(results.bars)} missed"] if body else []


def _interval(one: Estimate) -> str:
    return f"{one.value:.2f} [{one.low:.2f}, {one.high:.2f}]"
