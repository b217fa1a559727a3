"""What people read of a measurement over a line."""

from __future__ import annotations

from collections.abc import Sequence

from bench.branching.run import placement_lines, placements
from bench.harness.report import table
from bench.harness.runs import Sample, of_row
from bench.relay.gauge import Gauge
from bench.wan.cells import AT_HOME, AWAY, RTTS_MS
from bench.wan.disciplines import (
    CHAIN,
    DEFAULT,
    DISCIPLINES,
    PLAIN,
    STREAM_WAIT,
    TEXTBOOK,
    ratio,
    ratio_to,
    tokens_per_second,
)
from bench.wan.emulated import EmulatedTimes
from bench.wan.judged import against_optimum, beside, simulator_error
from bench.wan.real_pair import MeasuredPair
from bench.wan.results import WanResults
from bench.wan.virtual import ExpectedCell, Software
from bench.wan.wire import Wire

EMULATED = "emulated devices (forwards are sleeps, guesses a recorded trace), real sockets; tokens/s"
# The default beside all fixed settings that were simulated, and the chain beside those that do not branch.
OPTIMA = ("/ optimum", "chain / its own")


def report(results: WanResults) -> str:
    sections = (
        _gauge(results.gauge, results.software),
        _cells(results.cells),
        _pair(results.pair),
        _grid(results.grid),
        _placements(results),
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


def _cells(cells: Sequence[EmulatedTimes]) -> list[str]:
    head = (EMULATED, *DISCIPLINES, "/ plain", "/ textbook", "/ chain", *OPTIMA, "simulator off by")
    body = [(_title(one), *_speeds(one.samples), *_ratios(one)) for one in cells]
    return table(head, body) if body else []


def _title(one: EmulatedTimes) -> str:
    chosen = [one.expected.settings[name] for name in (TEXTBOOK, STREAM_WAIT) if name in one.expected.settings]
    return f"{one.cell.name}  ({', '.join(chosen)})" if chosen else one.cell.name


def _speeds(samples: Sequence[Sample]) -> list[str]:
    """A dash where it was not measured."""
    return [f"{tokens_per_second(samples, name).value:.1f}" if of_row(samples, name) else "-" for name in DISCIPLINES]


def _to(samples: Sequence[Sample], other: str) -> str:
    return f"{ratio(samples, DEFAULT, other):.2f}" if of_row(samples, other) else "-"


def _ratios(one: EmulatedTimes) -> list[str]:
    worst = max(simulator_error(one, name).value for name in one.expected.speeds)
    default, chain = (ratio_to(one.samples, row, best) for row, _, best in against_optimum(one))
    return [
        *(_to(one.samples, other) for other in (PLAIN, TEXTBOOK, CHAIN)),
        f"{default:.2f}",
        f"{chain.value:.2f}",
        f"{worst:.1%}",
    ]


def _pair(pair: Sequence[MeasuredPair]) -> list[str]:
    head = (
        "demo pair, real forwards; tokens/s",
        *DISCIPLINES,
        "/ plain",
        "/ textbook",
        "/ chain",
        "texts",
    )
    body = [
        (
            f"R {one.rtt_ms:g} ms  ({one.settings[TEXTBOOK]}, {one.settings[STREAM_WAIT]})",
            *_speeds(one.samples),
            *(_to(one.samples, other) for other in (PLAIN, TEXTBOOK, CHAIN)),
            "equal" if one.texts_equal else "near-ties",
        )
        for one in pair
    ]
    return table(head, body) if body else []


def _grid(grid: Sequence[ExpectedCell]) -> list[str]:
    """The default over the better of plain and textbook; it and the chain over their optima: the least of a row."""
    head = ("in virtual time: default / better of plain and textbook", *(f"{rtt:g} ms" for rtt in RTTS_MS), *OPTIMA)
    rows: dict[str, dict[float, ExpectedCell]] = {}
    for one in grid:
        cell = one.cell
        name = f"d {cell.draft_ms:g} ms, a {cell.acceptance:g}, s {cell.slope:g}, b {cell.row_cost:g}"
        rows.setdefault(name, {})[cell.rtt_ms] = one
    body = [
        (
            name,
            *(_to_better(found.get(rtt)) for rtt in RTTS_MS),
            f"{min(one.speeds[DEFAULT] / one.optimum for one in found.values()):.2f}",
            f"{min(one.speeds[CHAIN] / one.optimum_of_chains for one in found.values()):.2f}",
        )
        for name, found in rows.items()
    ]
    return [*table(head, body), "the last two columns are the least of their row"] if body else []


def _placements(results: WanResults) -> list[str]:
    """The default away beside the same drafter in the verifier's box: what a placement is chosen by."""
    found = placements(results.grid)
    measured = {one.cell: one for one in results.cells}
    said = placement_lines(found) if found else []
    if AWAY in measured and AT_HOME in measured:
        for row in (TEXTBOOK, DEFAULT):
            times = beside(measured[AWAY], DEFAULT, measured[AT_HOME], row)
            said.append(f"measured, {AWAY.name}: default is {times:.2f} times {row} at 0 ms")
    return said


def _to_better(one: ExpectedCell | None) -> str:
    if one is None:
        return "-"
    return f"{one.speeds[DEFAULT] / max(speed for name, speed in one.speeds.items() if name in (PLAIN, TEXTBOOK)):.2f}"


def _wire(wire: Sequence[Wire]) -> list[str]:
    head = ("bytes on the wire, framing included", "per proposed token", "per decided token", "messages", "by kind")
    body = [
        (
            f"{one.name}, {hop.name}",
            f"{hop.per_token('proposals'):.1f}" if hop.tokens.get("proposals") else "-",
            f"{sum(hop.bytes.values()) / one.decided:.1f}",
            str(hop.messages),
            ", ".join(f"{kind} {size:.0f}" for kind, size in hop.bytes.items()),
        )
        for one in wire
        for hop in one.hops
    ]
    return table(head, body) if body else []


def _bars(results: WanResults) -> list[str]:
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
