"""From a journal's lines: ratios with their intervals (bootstrap over turns), what is needed, tables, the record."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from bench.harness.interval import CONFIDENCE, Estimate, resampled
from bench.harness.record import save
from bench.harness.report import Bar, at_least, at_most, bar_lines, exactly, table
from bench.speed.rows import (
    ASSISTED,
    CONTINUOUS,
    DEFAULT,
    DRAFT_MODEL,
    DRAFTER,
    FAR,
    FAR_20,
    FAR_80,
    FAR_OFF,
    HEAD,
    HEADLESS,
    LLAMACPP,
    LOOKUP,
    OFF,
    ONE,
    ONE_OFF,
    OPENVINO,
    OURS,
    PLAIN_ROWS,
    SPECULATING,
    STATIC,
    TEXTS,
    TRANSFORMERS,
)

# Needed of each model; see issue R. The keys are those of `bars`.
PLAIN, GREEDY, DRAWN, WORST, SPECULATION, ANY, READY = "plain", "greedy", "0.8", "worst", "speculation", "any", "ready"
NEEDED: dict[str, dict[str | int, float]] = {
    "smollm2-135m": {
        PLAIN: 0.95,
        GREEDY: 1.9,
        DRAWN: 1.5,
        WORST: 1.2,
        FAR_20: 1.25,
        FAR_80: 1.05,
        SPECULATION: 1.5,
        4: 1.2,
        16: 0.98,
        ANY: 0.96,
        READY: 8.0,
    },
    "qwen2.5-coder-1.5b": {
        PLAIN: 0.95,
        GREEDY: 1.4,
        DRAWN: 1.2,
        WORST: 0.98,
        FAR_20: 1.2,
        FAR_80: 1.1,
        SPECULATION: 1.2,
        4: 1.1,
        16: 0.98,
        ANY: 0.96,
        READY: 25.0,
    },
}
# Of any other model nothing is needed but what is needed of every setting.
USUAL: dict[str | int, float] = {PLAIN: 0.95, ANY: 0.96}


class Need(NamedTuple):
    """How many times as fast a row must be as another, or as the fastest of several; None: everywhere."""

    faster: str
    slower: tuple[str, ...]
    times: float
    level: int | None = None
    temperature: float | None = None


SINGLE = (DRAFTER, TEXTS, "table", HEAD)  # the table of n-grams is gone, but records tell of it
# Of the suites of the included pair.
NEEDS: dict[str, tuple[Need, ...]] = {
    "main": (
        Need(HEADLESS, (TRANSFORMERS,), 2.5, temperature=0.0),
        Need(HEADLESS, (ASSISTED,), 2.0, temperature=0.0),
        Need(OFF, (TRANSFORMERS,), 1.0, temperature=0.0),
    ),
    "box": (
        Need(ONE_OFF, (OPENVINO,), 0.8, temperature=0.0),
        Need(ONE, (LOOKUP,), 0.8, temperature=0.0),
        Need(ONE, (DRAFT_MODEL,), 1.3, temperature=0.0),
    ),
    "batch": (
        Need(HEADLESS, (OFF,), 1.3, 1, 0.0),
        Need(HEADLESS, (OFF,), 0.98),
        Need(DEFAULT, (OFF,), 0.98),
        Need(OFF, (STATIC, CONTINUOUS), 0.9, 16, 0.0),
        Need(HEADLESS, (STATIC, CONTINUOUS), 1.0, 16, 0.0),
    ),
    "heads": (
        Need(HEAD, (OFF,), 1.25, 1, 0.0),
        Need(HEAD, (OFF,), 1.15, 1, 0.8),
        Need(HEAD, (OFF,), 1.05, 16),
        Need(DEFAULT, (OFF,), 0.97),
        Need(DEFAULT, SINGLE, 0.97),
    ),
}
# Milliseconds between two forwards of one session, and from a forward's end to the client; and, with 16 sessions at
# once, between two as a share of a forward.
MOST_BETWEEN, MOST_DELIVERY, MOST_SHARE = 1.0, 2.5, 0.2

Lines = Sequence[Mapping[str, Any]]
Group = tuple[int, ...]


class SpeedPlace(NamedTuple):
    """How many sessions at once, at which temperature, how many tokens behind each prompt."""

    level: int
    temperature: float
    tokens: int

    def __str__(self) -> str:
        return f"{self.level} at once, {self.temperature:g}, {self.tokens} tokens"


@dataclass(frozen=True, slots=True)
class StackLine:
    """A row at a place, in its piece.

    Attributes:
        turns: prompts, or groups of them.
        tokens_per_second: of all sessions together, prompts' time included.
        to_off: how many times as fast as off beside it (a drafter at a distance: as off on the target's core).
        to: as libraries' plain rows. text_to_off: of how soon a text is there on average, with several at once.
        decoding: the same from the first token on, where there is one session.
        acceptance: of draft tokens that were tested; accepted_at: by position in the window.
        step_ms: of a forward that decodes, and of what lies between two, by part; v_ms: by rows.
        pauses_ms: between two arrivals at a client, the median and what 95 % are below; () if unknown.
        delivery_ms: from a forward's end to the client, by part.
        unlike: greedy texts that differ from those of off.
    """

    piece: str
    row: str
    level: int
    temperature: float
    tokens: int
    turns: int
    tokens_per_second: Estimate
    to_off: Estimate
    to: Mapping[str, Estimate]
    text_to_off: Estimate | None
    decoding: Estimate | None
    tokens_per_forward: float
    acceptance: float | None
    accepted_at: tuple[float, ...]
    sources: Mapping[str, tuple[int, int]]
    step_ms: Mapping[str, float]
    v_ms: Mapping[int, float]
    first_token_s: float
    pauses_ms: tuple[float, ...]
    delivery_ms: Mapping[str, float]
    unlike: int


@dataclass(frozen=True, slots=True)
class StackResults:
    """facts: of each piece and row, what it weighs and when it was ready. failed: rows that are missing, and why."""

    name: str
    head: Mapping[str, Any]
    lines: Sequence[StackLine]
    tasks: Mapping[tuple[str, SpeedPlace, str], Estimate]
    bars: Sequence[Bar]
    facts: Mapping[tuple[str, str], Mapping[str, Any]]
    failed: Mapping[tuple[str, str], str]
    notes: Sequence[str]


class Measured:
    """What the turns took, by piece, row and place; of each, what every group of prompts took."""

    def __init__(self, lines: Lines) -> None:
        self.took: dict[tuple[str, str, SpeedPlace], dict[Group, Mapping[str, Any]]] = {}
        self.tasks: list[str] = lines[0]["head"]["tasks"]
        for line in lines:
            if turn := line.get("turn"):
                place = SpeedPlace(turn["level"], turn["temperature"], turn["tokens"])
                for row, took in line["rows"].items():
                    self.took.setdefault((turn["piece"], row, place), {})[tuple(turn["prompts"])] = took

    def piece_of(self, row: str, place: SpeedPlace) -> str | None:
        """The first piece that has the row at that place."""
        return next((piece for piece, one, where in self.took if (one, where) == (row, place)), None)

    def ratio(
        self,
        faster: str,
        slower: str,
        place: SpeedPlace,
        task: str | None = None,
        of: Callable[[Mapping[str, Any]], float] | None = None,
        piece: str | None = None,
    ) -> Estimate | None:
        """How many times as fast a row is as another; None where they have no turn in common.

        Rows of two pieces are compared through off, which every piece has: the ratio of their ratios to off.
        """
        one = piece or self.piece_of(faster, place)
        if one is None:
            return None
        if (one, slower, place) in self.took:
            sides = [(one, slower, 1), (one, faster, -1)]
        elif (other := self.piece_of(slower, place)) is not None:
            sides = [(one, OFF, 1), (one, faster, -1), (other, slower, 1), (other, OFF, -1)]
        else:
            return None
        found = [self.took.get((piece, row, place), {}) for piece, row, _ in sides]
        common = [group for group in found[0] if all(group in each for each in found) and self._is_of(group, task)]
        if not common:
            return None
        times = [np.array([(of or _seconds)(each[group]) for group in common]) for each in found]
        powers = [power for _, _, power in sides]
        return resampled(len(common), lambda drawn: _product(times, powers, drawn))

    def _is_of(self, group: Group, task: str | None) -> bool:
        return task is None or all(self.tasks[prompt] == task for prompt in group)


def _product(times: Sequence[NDArray[np.float64]], powers: Sequence[int], drawn: NDArray[np.int64]) -> float:
    return float(np.prod([each[drawn].sum() ** power for each, power in zip(times, powers, strict=True)]))


def results_of(name: str, lines: Lines) -> StackResults:
    found = Measured(lines)
    facts: dict[tuple[str, str], Mapping[str, Any]] = {}
    failed: dict[tuple[str, str], str] = {}
    for line in lines:
        if "facts" in line:
            place = line["piece"], line["row"]
            facts[place] = line["facts"]
            failed.pop(place, None)  # it failed in an earlier run
        failed |= {(line["piece"], row): why for row, why in line.get("failed", {}).items()}
    rows = list(_lines(found))
    return StackResults(
        name,
        lines[0]["head"],
        rows,
        dict(_by_task(found)),
        list(suite_bars(name, found, rows) if name in NEEDS else bars(name, found, facts)),
        facts,
        failed,
        [line["note"] for line in lines if "note" in line],
    )


def _off_of(found: Measured, piece: str, row: str, place: SpeedPlace) -> str:
    return FAR_OFF if row in FAR and (piece, FAR_OFF, place) in found.took else OFF


def _lines(found: Measured) -> Iterator[StackLine]:
    """One for each row at each place where off was measured beside it."""
    for piece, row, place in found.took:
        off = _off_of(found, piece, row, place)
        if (ratio := found.ratio(row, off, place, piece=piece)) is not None:
            yield _line(found, piece, row, place, off, ratio)


def _line(found: Measured, piece: str, row: str, place: SpeedPlace, off: str, to_off: Estimate) -> StackLine:
    took = found.took[piece, row, place]
    runs = [run for each in took.values() for run in each["runs"]]
    counts, seconds = (np.array([of(each) for each in took.values()]) for of in (_tokens, _seconds))
    tested, accepted = (sum(run[key] for run in runs) for key in ("tested", "accepted"))
    alone, plain = place.level == 1, (TRANSFORMERS, OPENVINO, LLAMACPP)
    to = {each: ratio for each in plain if row != each and (ratio := found.ratio(row, each, place, piece=piece))}
    return StackLine(
        piece=piece,
        row=row,
        level=place.level,
        temperature=place.temperature,
        tokens=place.tokens,
        turns=len(took),
        tokens_per_second=resampled(len(took), lambda drawn: float(counts[drawn].sum() / seconds[drawn].sum())),
        to_off=to_off,
        to=to,
        text_to_off=None if alone else found.ratio(row, off, place, of=_texts, piece=piece),
        decoding=found.ratio(row, off, place, of=_decoding, piece=piece) if alone else None,
        tokens_per_forward=sum(run["tokens"] for run in runs) / sum(run["forwards"] for run in runs),
        acceptance=accepted / tested if tested else None,
        accepted_at=_accepted_at(runs),
        sources=_sources(runs),
        step_ms=_step_ms(runs),
        v_ms=_v(runs),
        first_token_s=float(np.median([run["first"] for run in runs])),
        pauses_ms=_medians([run["pauses_ms"] for run in runs if run.get("pauses_ms")]),
        delivery_ms=_delivery(runs),
        unlike=0 if place.temperature else _unlike(took, found.took.get((piece, OFF, place), {})),
    )


def _medians(columns: Sequence[Sequence[float]]) -> tuple[float, ...]:
    return tuple(round(float(np.median(column)), 3) for column in zip(*columns, strict=True))


def _delivery(runs: Lines) -> dict[str, float]:
    told = [run["delivery_ms"] for run in runs if run.get("delivery_ms")]
    return dict(zip(told[0], _medians([list(each.values()) for each in told]), strict=True)) if told else {}


def _texts(took: Mapping[str, Any]) -> float:
    """Of all texts together."""
    return sum(float(run["seconds"]) for run in took["runs"])


def _seconds(took: Mapping[str, Any]) -> float:
    return float(took["seconds"])


def _tokens(took: Mapping[str, Any]) -> int:
    return sum(run["tokens"] for run in took["runs"])


def _decoding(took: Mapping[str, Any]) -> float:
    return max(1e-6, sum(float(run["seconds"] - run["first"]) for run in took["runs"]))


def _accepted_at(runs: Lines) -> tuple[float, ...]:
    tested, accepted = (_summed([run[key] for run in runs if key in run]) for key in ("tested_at", "accepted_at"))
    return tuple(round(hits / tests, 3) for tests, hits in zip(tested, accepted, strict=False) if tests)


def _summed(columns: Sequence[Sequence[int]]) -> list[int]:
    """By position; what is short counts as zero beyond its end."""
    return [sum(one) for one in zip_longest(*columns, fillvalue=0)]


def _step_ms(runs: Lines) -> dict[str, float]:
    """Means over steps that decode, by part."""
    timed = [run for run in runs if run.get("steps")]
    steps = sum(run["steps"] for run in timed)
    return {name: sum(run["parts"][name] for run in timed) / steps / 1e3 for name in timed[0]["parts"]} if timed else {}


def _sources(runs: Lines) -> dict[str, tuple[int, int]]:
    found: dict[str, tuple[int, int]] = {}
    for run in runs:
        for name, (tests, hits) in run.get("sources", {}).items():
            before = found.get(name, (0, 0))
            found[name] = (before[0] + tests, before[1] + hits)
    return found


def _v(runs: Lines) -> dict[int, float]:
    """Milliseconds of a forward by its rows: the mean of the runs' medians, each as often as it was measured."""
    sums: dict[int, tuple[int, float]] = {}
    for run in runs:
        for width, (count, us) in run.get("v", {}).items():
            before = sums.get(int(width), (0, 0.0))
            sums[int(width)] = (before[0] + count, before[1] + count * us)
    return {width: round(total / count / 1e3, 2) for width, (count, total) in sorted(sums.items())}


def _unlike(took: Mapping[Group, Mapping[str, Any]], off: Mapping[Group, Mapping[str, Any]]) -> int:
    common = [(took[group]["runs"], off[group]["runs"]) for group in took if group in off]
    return sum(mine["text"] != its["text"] for runs in common for mine, its in zip(*runs, strict=True))


def _places(found: Measured, piece_of: str = DEFAULT) -> list[SpeedPlace]:
    """Where a row is, in their order; long texts last."""
    return sorted({place for _, row, place in found.took if row == piece_of}, key=lambda place: (place[2], place))


def _by_task(found: Measured) -> Iterator[tuple[tuple[str, SpeedPlace, str], Estimate]]:
    """What default is to off, with one session, by task."""
    for place in _places(found):
        for task in dict.fromkeys(found.tasks) if place.level == 1 else ():
            if (ratio := found.ratio(DEFAULT, OFF, place, task)) is not None:
                yield (DEFAULT, place, task), ratio


def fastest(found: Measured, rows: Sequence[str], place: SpeedPlace) -> str | None:
    """The one of these that is the fastest there, by its ratio to off."""
    ratios = {row: found.ratio(row, OFF, place) for row in rows}
    known = {row: ratio.value for row, ratio in ratios.items() if ratio is not None}
    return max(known, key=known.__getitem__, default=None)


def bars(name: str, found: Measured, facts: Mapping[tuple[str, str], Mapping[str, Any]]) -> Iterator[Bar]:
    """As issue R has them. Off of default's bars is the faster of our off and the best library's plain row."""
    needed = NEEDED.get(name, USUAL)
    places = _places(found)
    usual = min((place.tokens for place in places if place.level == 1), default=0)
    for place in places:
        best = fastest(found, PLAIN_ROWS, place)
        base = fastest(found, (OFF, *([best] if best else [])), place) or OFF
        if place.tokens == usual:
            yield from _default_bars(needed, found, place, best, base)
    for piece, row, place in found.took:
        if row in (FAR_20, FAR_80) and row in needed and place.tokens == usual:
            ratio = found.ratio(row, FAR_OFF, place, piece=piece)
            yield from _bar(f"{place}: {row} / {FAR_OFF}", ratio, needed[row])
    longest = max((place.tokens for place in places), default=0)
    for piece, row, place in found.took:
        if row in OURS and row not in (OFF, FAR_OFF) and place.level == 1 and place.tokens == longest > usual:
            ratio = found.ratio(row, _off_of(found, piece, row, place), place, piece=piece)
            yield from _bar(f"{place}: {row} / off of it", ratio, needed[ANY])
    ready = [fact["ready_seconds"] for (_, row), fact in facts.items() if row == DEFAULT]
    if ready and READY in needed:
        yield at_most("seconds to ready, default", exactly(max(ready)), needed[READY])


def suite_bars(name: str, found: Measured, lines: Sequence[StackLine]) -> Iterator[Bar]:
    """What a suite of the included pair needs."""
    for need in NEEDS[name]:
        for place in _places(found, need.faster):
            if need.level in (None, place.level) and need.temperature in (None, place.temperature):
                best = fastest(found, need.slower, place)
                if best is not None:
                    ratio = found.ratio(need.faster, best, place)
                    yield from _bar(f"{place}: {need.faster} / {best}", ratio, need.times)
    for line in lines:
        at = f"{SpeedPlace(line.level, line.temperature, line.tokens)}: {line.row}"
        if name == "main" and line.step_ms and line.delivery_ms:
            yield at_most(f"{at}: ms between two forwards", exactly(line.step_ms["gap"]), MOST_BETWEEN)
            yield at_most(f"{at}: ms to the client", exactly(line.delivery_ms["whole"]), MOST_DELIVERY)
        if name == "batch" and line.level == 16 and line.row in (OFF, HEADLESS) and line.step_ms:
            share = exactly(line.step_ms["gap"] / line.step_ms["forward"])
            yield at_most(f"{at}: between forwards / forward", share, MOST_SHARE)


def _default_bars(
    needed: Mapping[str | int, float], found: Measured, place: SpeedPlace, best: str | None, base: str
) -> Iterator[Bar]:
    if place.level != 1:
        if place.level in needed:
            yield from _bar(f"{place}: {DEFAULT} / {base}", found.ratio(DEFAULT, base, place), needed[place.level])
        return
    if best is not None and not place.temperature:
        yield from _bar(f"{place}: {OFF} / {best}", _inverse(found.ratio(best, OFF, place)), needed[PLAIN])
    key = DRAWN if place.temperature else GREEDY
    if key in needed:
        yield from _bar(f"{place}: {DEFAULT} / {base}", found.ratio(DEFAULT, base, place), needed[key])
    worst = [(task, found.ratio(DEFAULT, base, place, task)) for task in dict.fromkeys(found.tasks)]
    known = [(task, ratio) for task, ratio in worst if ratio is not None]
    if known and WORST in needed:
        task, ratio = min(known, key=lambda each: each[1].low)
        yield from _bar(f"{place}: {DEFAULT} / {base}, the worst task ({task})", ratio, needed[WORST])
    speculating = fastest(found, SPECULATING, place)
    if speculating is not None and SPECULATION in needed:
        ratio_ = found.ratio(DEFAULT, speculating, place)
        yield from _bar(f"{place}: {DEFAULT} / the best library's ({speculating})", ratio_, needed[SPECULATION])


def _bar(name: str, ratio: Estimate | None, needed: float) -> Iterator[Bar]:
    if ratio is not None:
        yield at_least(name, ratio, needed)


def _inverse(ratio: Estimate | None) -> Estimate | None:
    return None if ratio is None else Estimate(1 / ratio.value, 1 / ratio.high, 1 / ratio.low, ratio.coverage)


def report(found: StackResults) -> str:
    sections = (
        [f"{found.name}, commit {str(found.head['commit'])[:12]}, {found.head['machine']['cpu']}"],
        _rows(found),
        _steps(found),
        _tasks(found),
        _facts(found),
        [f"{piece}: {row} was not measured: {why}" for (piece, row), why in found.failed.items()],
        bar_lines(found.bars) if found.bars else [],
        list(found.notes),
    )
    return "\n\n".join("\n".join(lines) for lines in sections if lines)


def _rows(found: StackResults) -> list[str]:
    head = (
        *("at once, temperature, tokens", "piece", "row", "turns", "tokens/s", "x off", "decoding, a text"),
        *(
            "tokens/forward",
            "accepted",
            "by position",
            "accepted of tested",
            "first s",
            "ms between, p95",
            "unlike off",
        ),
    )
    body = [
        (
            f"{line.level}, {line.temperature:g}, {line.tokens}",
            line.piece,
            line.row,
            str(line.turns),
            f"{line.tokens_per_second.value:.1f}",
            f"{line.to_off:.2f}",
            "-" if (own := line.decoding or line.text_to_off) is None else f"{own.value:.2f}",
            f"{line.tokens_per_forward:.2f}",
            "-" if line.acceptance is None else f"{line.acceptance:.2f}",
            " ".join(f"{share:.2f}" for share in line.accepted_at[:8]) or "-",
            ", ".join(f"{name} {hits}/{tests}" for name, (tests, hits) in line.sources.items()) or "-",
            f"{line.first_token_s:.2f}",
            ", ".join(f"{ms:.1f}" for ms in line.pauses_ms) or "-",
            str(line.unlike),
        )
        for line in found.lines
    ]
    note = f"of all turns, in brackets the middle {CONFIDENCE:.0%} of as many drawn from them"
    return [*table(head, body), note]


def _steps(found: StackResults) -> list[str]:
    """Where a step's time goes, and V(m)."""
    timed = [line for line in found.lines if line.step_ms]
    if not timed:
        return []
    names = list(timed[0].step_ms)
    head = ("ms of a step that decodes", "piece", "row", *names, "to the client", "V(m)")
    body = [
        (
            f"{line.level}, {line.temperature:g}, {line.tokens}",
            line.piece,
            line.row,
            *(f"{line.step_ms[name]:.2f}" for name in names),
            f"{line.delivery_ms['whole']:.2f}" if line.delivery_ms else "-",
            " ".join(f"{width}:{ms:.1f}" for width, ms in list(line.v_ms.items())[:9]),
        )
        for line in timed
    ]
    return table(head, body)


def _tasks(found: StackResults) -> list[str]:
    if not found.tasks:
        return []
    tasks = list(dict.fromkeys(task for _, _, task in found.tasks))
    places = list(dict.fromkeys((row, place) for row, place, _ in found.tasks))
    body = [
        (f"{row}, {place}", *(f"{one:.2f}" if (one := found.tasks.get((row, place, task))) else "-" for task in tasks))
        for row, place in places
    ]
    return table(("x off, by task", *tasks), body)


def _facts(found: StackResults) -> list[str]:
    head = ("piece", "row", "s to ready", "resident MiB", "peak MiB", "runtime")
    body = [
        (piece, row, f"{fact['ready_seconds']:.1f}", f"{fact['resident']:.0f}", f"{fact['peak']:.0f}", fact["runtime"])
        for (piece, row), fact in found.facts.items()
    ]
    return table(head, body) if body else []


def write(found: StackResults, lines: Lines, path: Path) -> None:
    record = {
        "model": found.name,
        "bars": [asdict(bar) for bar in found.bars],
        "rows": [asdict(line) for line in found.lines],
        "by_task": [
            {"row": row, **place._asdict(), "task": task, "to_off": asdict(ratio)}
            for (row, place, task), ratio in found.tasks.items()
        ],
        "facts": [{"piece": piece, "row": row, **fact} for (piece, row), fact in found.facts.items()],
        "failed": [{"piece": piece, "row": row, "why": why} for (piece, row), why in found.failed.items()],
        "notes": list(found.notes),
    }
    raw = [_raw(line) for line in lines if "turn" in line]
    ran_on = {key: found.head[key] for key in ("machine", "commit")}
    save(path, record, found.head["arguments"], raw, ran_on)


def _raw(line: Mapping[str, Any]) -> dict[str, object]:
    """A turn: of each row its seconds, and its forwards and when its first token came for each session."""
    rows = {
        row: [took["seconds"], [run["forwards"] for run in took["runs"]], [run["first"] for run in took["runs"]]]
        for row, took in line["rows"].items()
    }
    return {**line["turn"], "rows": rows}
