"""Measure heads beside the demo target: python -m bench.heads --help.

Each head has a stack of its own, and so has a table of n-grams; whatever works without them shares a stack that was
started without heads, so that nothing is read from hidden states there. All rows take turns on the same prompts, texts
off where a row does not name them: with one session, where the peers take part too, then with several at once. All
sessions are one tenant's, and may be proposed what the others at once say.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import secrets
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory

import demo_pair
from bench.batch.figures import BatchSample, full_ratio
from bench.batch.measure import client_of, runtime_of
from bench.batch.rows import BatchRow, OurRow, Together
from bench.batch.sessions import Asked
from bench.batch.settings import levels_of
from bench.harness import RESULTS, ROOT, machine
from bench.harness.child import BenchChild
from bench.harness.entry import located, run, shown_model
from bench.harness.interleave import schedule, tracked
from bench.harness.interval import CONFIDENCE, Estimate
from bench.harness.machine import CoreUse, CpuSeconds, dtype_of
from bench.harness.record import write_object
from bench.harness.report import Bar, at_least, at_most, bar_lines, table
from bench.harness.rows import TransformersRow, encoded_prompts, start_peer, up
from bench.harness.runs import BenchError, Row, Sample, speed_ratio, tokens_per_forward, tokens_per_second
from bench.harness.texts import Judged, judge, mismatches, scores_at, tolerance
from bench.peers import openvino_rows
from bench.suffix.sources import build_table
from specwire.client.events import Stats
from specwire.core.invalid import InvalidParameter
from specwire.core.model import AUTO, RUNTIMES
from specwire.options import cores
from specwire.rpc.process import say
from specwire.rpc.server_options import SERVED_DTYPES

OUT = RESULTS / "heads.json"
OFF, FAR, NGRAM, TABLE, EAGLE3, AUTOMATIC = "off", "far", "ngram", "table", "eagle3", "automatic"
TRAINED = ("medusa", "hydra", "mtp")
SELF, TRANSFORMERS, OPENVINO = "self", "transformers", "openvino"
LABELS = {
    OFF: "nothing drafts",
    FAR: "drafter in a process of its own",
    NGRAM: "n-grams of the tenant's texts",
    TABLE: "a table of n-grams",
    EAGLE3: "EAGLE-3 head",
    "medusa": "Medusa heads",
    "hydra": "Hydra heads",
    "mtp": "MTP layer",
    SELF: "the target without some layers",
    AUTOMATIC: "drafter, texts, table and EAGLE-3 head",
    TRANSFORMERS: "transformers",
    OPENVINO: "OpenVINO GenAI",
}
PEERS = (TRANSFORMERS, OPENVINO)
# What AUTOMATIC has. A verifier serves one head, so the others are nothing that it could have chosen.
SINGLE = (FAR, NGRAM, TABLE, EAGLE3)
# The rows with more than one session.
AT_ONCE = (OFF, *SINGLE, "medusa", "mtp", AUTOMATIC)
TEMPERATURES, SEED = (0.0, 0.8), 1
# A level has so many turns at least: with nine an interval of 95 % leaves out one at each end.
LEAST_TURNS = 9
LEAST_SLOTS = 16
WARM_UP_PROMPTS = 2
# Needed of EAGLE-3 / off with one session, by temperature, and at the level FULL; of automatic at all levels.
ALONE, FULL, AT_FULL, NEVER_SLOWER = {0.0: 1.25, 0.8: 1.15}, 16, 1.05, 0.97
# What holds numeric libraries to fewer instructions than the machine has.
HELD_BY = ("OV_CPU_MAX_ISA", "ONEDNN_MAX_CPU_ISA", "ATEN_CPU_CAPABILITY", "MKL_ENABLE_INSTRUCTIONS")

Prompts = Sequence[Sequence[int]]


@dataclass(frozen=True, slots=True)
class HeadsSettings:
    """What to measure.

    Attributes:
        head: folder of the EAGLE-3 head. trained: folder of the others' folders, by kind.
        skip: what the target leaves out where it drafts itself, as --heads takes it.
        sessions: at once.
        rounds: passes over all prompts; None for as many as make LEAST_TURNS turns of a level.
        only: rows; () for all. Nothing is measured without OFF.
        corpus: what the table is made from; () for what the demo pair learnt from.
    """

    target: str
    draft: str
    head: Path
    trained: Path
    skip: str
    prompts: int = 32
    tokens: int = 128
    sessions: tuple[int, ...] = (1, 4, 16, 32)
    rounds: int | None = None
    only: tuple[str, ...] = ()
    runtime: str = AUTO
    dtype: str = "bfloat16"
    target_threads: int | None = None
    corpus: tuple[Path, ...] = ()

    def __post_init__(self) -> None:
        available = len(demo_pair.held_out_prompts())
        if not 1 <= self.prompts <= available:
            raise InvalidParameter("prompts", f"must be from 1 to {available}, not {self.prompts}")
        if not all(1 <= level <= self.prompts for level in self.sessions):
            raise InvalidParameter("sessions", f"must each be from 1 to the {self.prompts} prompts")
        for name, value in (("tokens", self.tokens), ("rounds", self.rounds), ("target-threads", self.target_threads)):
            if value is not None and value < 1:
                raise InvalidParameter(name, f"must be at least 1, not {value}")
        for row in self.only:
            if row not in LABELS:
                raise InvalidParameter("only", f"there is no row {row!r}, only {', '.join(LABELS)}")

    def wants(self, row: str) -> bool:
        return row == OFF or not self.only or row in self.only

    def groups(self, level: int) -> list[int]:
        """Each group's first prompt."""
        return list(range(0, self.prompts - level + 1, level))

    def rounds_of(self, level: int) -> int:
        return self.rounds or -(-LEAST_TURNS // len(self.groups(level)))

    def shown(self) -> dict[str, object]:
        """For the record: models without their folders on this machine."""
        models = {"target": shown_model(self.target), "draft": shown_model(self.draft)}
        folders = {"head": _shown(self.head), "trained": _shown(self.trained), "corpus": [*map(_shown, self.corpus)]}
        return {**asdict(self), **models, **folders}


def _shown(folder: Path) -> str:
    """As `shown_model`, of one that need not be there."""
    return str(folder.relative_to(ROOT)) if folder.is_relative_to(ROOT) else folder.name


def parser() -> argparse.ArgumentParser:
    line = argparse.ArgumentParser(
        prog="python -m bench.heads",
        description="Measure heads beside the demo target, interleaved on the same cores.",
        epilog="Exit code 1: it could not be measured, or a greedy text differs from that of off and is no near-tie.",
    )
    add = line.add_argument
    add("--target", default=str(demo_pair.TARGET), metavar="PATH", help="path or hub id (default: the demo pair)")
    add("--draft", default=str(demo_pair.DRAFT), metavar="PATH", help="path or hub id (default: the demo pair)")
    add("--head", type=Path, default=demo_pair.HEAD, metavar="DIR", help="the EAGLE-3 head (default: the demo pair's)")
    add(
        "--trained",
        type=Path,
        default=ROOT / "build" / "heads",
        metavar="DIR",
        help="has medusa, hydra and mtp, each as `specwire train-heads --kind` writes it (default: build/heads)",
    )
    add("--skip", default="self:skip=3", metavar="SPEC", help="of the row self, as --heads (default: %(default)s)")
    add("--prompts", type=int, default=32, metavar="N", help="held-out prompts (default: %(default)s)")
    add("--tokens", type=int, default=128, metavar="N", help="new tokens for each (default: %(default)s)")
    add("--sessions", default="1,4,16,32", metavar="N,N", help="at once (default: %(default)s)")
    add(
        "--rounds",
        type=int,
        metavar="N",
        help=f"of all prompts (default: as many as make {LEAST_TURNS} turns)",
    )
    add("--only", default="", metavar="ROW,ROW", help=f"besides {OFF}: {', '.join(list(LABELS)[1:])} (default: all)")
    add("--runtime", default=AUTO, choices=RUNTIMES, help="of specwire up (default: %(default)s)")
    add("--dtype", default=AUTO, choices=SERVED_DTYPES, help="of all rows (default: %(default)s)")
    own = "texts to make the table from (default: the demo pair's, without what is held out)"
    add("--corpus", nargs="+", default=[], type=Path, metavar="PATH", help=own)
    add("--target-threads", type=int, metavar="N", help="of specwire up (default: half of the cores)")
    add("--out", type=Path, default=OUT, metavar="FILE", help="JSON (default: bench/results/heads.json)")
    return line


def settings_of(args: argparse.Namespace) -> HeadsSettings:
    """InvalidParameter names what is wrong."""
    asked = HeadsSettings(
        located(args.target),
        located(args.draft),
        args.head.expanduser().resolve(),
        args.trained.expanduser().resolve(),
        args.skip,
        args.prompts,
        args.tokens,
        levels_of(args.sessions, "sessions"),
        args.rounds,
        tuple(filter(None, args.only.split(","))),
        args.runtime,
        args.dtype,
        args.target_threads,
        tuple(path.expanduser().resolve() for path in args.corpus),
    )
    return replace(asked, dtype=dtype_of(asked.dtype))


def key_of(row: str, temperature: float) -> str:
    """A row's name at a temperature."""
    return f"{row}, {temperature:g}" if temperature else row


@dataclass(frozen=True, slots=True)
class Lone:
    """A peer that generates for one session, greedily."""

    key: str
    row: Row

    def run(self, prompts: Prompts, tokens: int) -> Together:
        (prompt,) = prompts
        alone = self.row.run(prompt, tokens)
        return Together(alone.seconds, (alone,))


class Field:
    """Every process that takes part, ended by `cleanup`. notes: what was not measured, and why."""

    def __init__(self, settings: HeadsSettings, cleanup: ExitStack) -> None:
        self._settings, self._cleanup = settings, cleanup
        self._folder = Path(cleanup.enter_context(TemporaryDirectory(prefix="specwire-heads-")))
        # A tenant with a key: without, sessions are proposed nothing of each other.
        self._token, self._keys = secrets.token_urlsafe(24), self._folder / "keys"
        self._keys.touch(0o600)
        self._keys.write_text(f"bench {self._token}\n")
        self._runner = cleanup.enter_context(asyncio.Runner())
        self.rows: list[BatchRow] = []
        self.runtimes: dict[str, str] = {}
        self.clocks: dict[str, CpuSeconds] = {"client": time.process_time}
        self.notes = [f"Held to {', '.join(held)} by the environment."] if (held := _held()) else []
        self.peer = self._own(TRANSFORMERS, start_peer(settings.target, settings.draft, settings.dtype, cores()))

    def start(self) -> None:
        self._start_stacks()
        if 1 in self._settings.sessions:
            self._start_peers()
        order = list(LABELS)
        self.rows.sort(key=lambda row: order.index(row.key.partition(",")[0]))

    def _own(self, name: str, child: BenchChild) -> BenchChild:
        self.clocks[name] = child.cpu_seconds
        return self._cleanup.enter_context(child)

    def _start_stacks(self) -> None:
        asked, table = self._settings, self._table()
        self._add({OFF: (False, False), FAR: (True, False), NGRAM: (False, True)}, asked.draft, "--no-heads")
        if asked.wants(TABLE):
            self._add({TABLE: (False, True)}, None, "--no-heads", "--no-ngram", *table)
        for row, spec in self._specs().items():
            own = (*table, "--heads", spec) if row == AUTOMATIC else ("--no-ngram", "--heads", spec)
            try:
                self._add({row: (True, True)}, asked.draft if row == AUTOMATIC else None, *own)
            except BenchError as error:
                self.notes.append(f"{row} was not measured: {error}.")

    def _table(self) -> tuple[str, ...]:
        """Words that name a table, which is built; none where no row asks for it."""
        asked = self._settings
        if not asked.wants(TABLE) and not asked.wants(AUTOMATIC):
            return ()
        return "--table", str(build_table(asked.target, asked.corpus, self._folder / "table"))

    def _specs(self) -> dict[str, str]:
        """What --heads is given, by row; a head that is not there is noted."""
        asked = self._settings
        folders = {EAGLE3: asked.head, **{kind: asked.trained / kind for kind in TRAINED}, AUTOMATIC: asked.head}
        specs = {SELF: asked.skip} if asked.wants(SELF) else {}
        for row, folder in folders.items():
            if not asked.wants(row):
                continue
            if (folder / "config.json").is_file():
                specs[row] = str(folder)
            else:
                self.notes.append(f"{row} was not measured: there is no head in {_shown(folder)}.")
        return specs

    def _add(self, sources: Mapping[str, tuple[bool, bool]], draft: str | None, *own: str) -> None:
        """A stack, and its rows at each temperature; by row whether drafters, or heads, and n-grams may propose."""
        asked = self._settings
        words = ["--slots", str(max(LEAST_SLOTS, *asked.sessions)), "--runtime", asked.runtime, *own]
        words += ["--api-keys", str(self._keys)]
        if asked.target_threads is not None:
            words += ["--target-threads", str(asked.target_threads)]
        name = next(iter(sources))
        say(f"bench: starting {name}")
        stack, ready = up(asked.target, draft, asked.dtype, False, *words)
        self._own(name, stack)
        client = client_of(self._runner, self._cleanup, ready["address"], self._token)
        runtime = runtime_of(self._runner, client)
        for row, (drafting, ngram) in sources.items():
            if asked.wants(row):
                self.runtimes[row] = runtime
                for temperature in TEMPERATURES:
                    how = Asked(client, LABELS[row], drafting, temperature, SEED, ngram)
                    self.rows.append(OurRow(key_of(row, temperature), self._runner, how))

    def _start_peers(self) -> None:
        asked = self._settings
        if asked.wants(TRANSFORMERS):
            self.rows.append(Lone(TRANSFORMERS, TransformersRow(self.peer)))
        if not asked.wants(OPENVINO):
            return
        if not openvino_rows.installed():
            self.notes.append(openvino_rows.NOT_INSTALLED)
            return
        folder = self._cleanup.enter_context(TemporaryDirectory(prefix="specwire-openvino-"))
        try:
            peer = openvino_rows.start(asked.target, asked.draft, asked.dtype, cores(), folder)
        except BenchError as error:
            self.notes.append(f"{OPENVINO} was not measured: {error}.")
            return
        self._own(OPENVINO, peer)
        self.rows.append(Lone(OPENVINO, openvino_rows.plain_row(peer)))


def _held() -> list[str]:
    return [f"{name}={os.environ[name]}" for name in HELD_BY if name in os.environ]


@dataclass(frozen=True, slots=True)
class Line:
    """One row at one level. The intervals are over turns, each of which is a group of prompts.

    Attributes:
        to_off, full_to_off: until a group's last text has ended; and while all of them decode, None if they never do.
        of_all: times off for all tokens together.
        accepted_at: of the draft tokens that were tested at each position of a window.
        sources: draft tokens tested and accepted, by who proposed them.
        head_share: of the verifier's steps, what the head's forwards took; None where none were timed.
        different: prompts whose text is not that of off.
    """

    level: int
    row: str
    label: str
    temperature: float
    runtime: str
    tokens_per_second: Estimate
    to_off: Estimate
    full_to_off: Estimate | None
    of_all: float
    tokens_per_forward: float
    accepted_at: tuple[float, ...]
    sources: Mapping[str, tuple[int, int]]
    head_share: float | None
    different: int


@dataclass(frozen=True, slots=True)
class HeadsResults:
    """A measurement; see `bench.batch.measure.BatchResults`. texts: by level."""

    arguments: Mapping[str, object]
    lines: Sequence[Line]
    bars: Sequence[Bar]
    texts: Mapping[int, Sequence[Judged]]
    cores: Mapping[str, Mapping[str, float]]
    samples: Sequence[BatchSample]
    notes: Sequence[str]


def measure(settings: HeadsSettings) -> HeadsResults:
    with ExitStack() as cleanup:
        field = Field(settings, cleanup)
        prompts = encoded_prompts(field.peer, settings.prompts)
        field.start()
        say("bench: warming up")
        for level in settings.sessions:
            for row in _at(field.rows, level):
                for first in settings.groups(level)[: WARM_UP_PROMPTS if level == 1 else 1]:
                    row.run(prompts[first : first + level], settings.tokens)
        use = CoreUse(field.clocks)
        samples = [one for level in settings.sessions for one in _level(field.rows, settings, level, prompts, use)]
        texts = {level: _texts(field.peer, settings, prompts, samples, level) for level in settings.sessions}
    found = lines_of(samples, field.runtimes)
    bars = [*speed_bars(samples, found), *text_bars(texts)]
    return HeadsResults(settings.shown(), found, bars, texts, use.by_row(), samples, field.notes)


def _at(rows: Sequence[BatchRow], level: int) -> list[BatchRow]:
    return [row for row in rows if level == 1 or row.key.partition(",")[0] in AT_ONCE]


def _level(
    rows: Sequence[BatchRow], settings: HeadsSettings, level: int, prompts: Prompts, use: CoreUse
) -> list[BatchSample]:
    """All rows with so many sessions at once. A turn is a group, or a group of one round where there are few."""
    rows, groups, rounds = _at(rows, level), settings.groups(level), settings.rounds_of(level)
    samples = []
    turns = schedule(rounds, len(groups), len(rows))
    for number, group, index in tracked(turns, rounds * len(groups) * len(rows), f"{level} at once"):
        first, row = groups[group], rows[index]
        together = row.run(prompts[first : first + level], settings.tokens)
        turn = group if len(groups) >= LEAST_TURNS else number * len(groups) + group
        samples.append(BatchSample(level, turn, first, row.key, together))
        use.ran(f"{row.key}, {level} at once")
    wholes = [sample.whole for sample in samples]
    said = ", ".join(f"{row.key} {tokens_per_second(wholes, row.key).value:.0f}" for row in rows)
    say(f"bench: {level} at once, tokens/s: {said}")
    return samples


def _texts(
    peer: BenchChild, settings: HeadsSettings, prompts: Prompts, samples: Sequence[BatchSample], level: int
) -> list[Judged]:
    """Where a greedy text of ours differs from that of off at the same level, and whether that is a near-tie.

    Drawn tokens may differ at a near-tie of probabilities and noise, which scores do not show.
    """
    ours = [one for one in samples if one.level == level and "," not in one.row and one.row not in PEERS]
    sessions = [session for one in ours for session in one.sessions]
    return list(judge(mismatches(sessions, OFF), scores_at(peer, prompts, sessions, OFF), tolerance(settings.dtype)))


def lines_of(samples: Sequence[BatchSample], runtimes: Mapping[str, str]) -> list[Line]:
    places = dict.fromkeys((sample.level, sample.row) for sample in samples)
    ordered = sorted(places, key=lambda place: (place[0], "," in place[1]))
    return [_line([one for one in samples if one.level == level], level, key, runtimes) for level, key in ordered]


def _line(samples: Sequence[BatchSample], level: int, key: str, runtimes: Mapping[str, str]) -> Line:
    row, _, drawn = key.partition(", ")
    reference = f"{OFF}, {drawn}" if drawn else OFF
    pair = [one for one in samples if one.row in (key, reference)]
    wholes = [one.whole for one in pair]
    own = [one for one in pair if one.row == key]
    stats = stats_of(own)
    sessions = [session for one in pair for session in one.sessions]
    return Line(
        level=level,
        row=row,
        label=LABELS[row],
        temperature=float(drawn or 0),
        runtime=runtimes.get(row, ""),
        tokens_per_second=tokens_per_second(wholes, key),
        to_off=speed_ratio(wholes, key, reference),
        full_to_off=full_ratio(pair, key, reference),
        of_all=_seconds(wholes, reference) / _seconds(wholes, key),
        tokens_per_forward=tokens_per_forward(wholes, key),
        accepted_at=accepted_at(stats),
        sources=sources(stats),
        head_share=head_share(own),
        different=len({one.prompt for one in mismatches(sessions, reference) if one.row == key}),
    )


def stats_of(samples: Sequence[BatchSample]) -> list[Stats]:
    """Of every session of ours."""
    return [run.stats for sample in samples for run in sample.together.runs if run.stats is not None]


def _seconds(samples: Sequence[Sample], row: str) -> float:
    return sum(sample.run.seconds for sample in samples if sample.row == row)


def accepted_at(stats: Sequence[Stats]) -> tuple[float, ...]:
    """The share of the draft tokens tested at each position that were accepted there."""
    most = max((len(each.tested_at) for each in stats), default=0)
    tested, accepted = ([0] * most for _ in range(2))
    for each in stats:
        for position, (tests, hits) in enumerate(zip(each.tested_at, each.accepted_at, strict=True)):
            tested[position] += tests
            accepted[position] += hits
    return tuple(round(hits / tests, 4) for tests, hits in zip(tested, accepted, strict=True) if tests)


def sources(stats: Sequence[Stats]) -> dict[str, tuple[int, int]]:
    """Draft tokens tested and accepted by who proposed them, where any were tested."""
    whole = _sums(stats, "tested", "accepted")
    known = {name: _sums(stats, f"tested_{name}", f"accepted_{name}") for name in ("ngram", "head")}
    rest = tuple(all_ - sum(parts) for all_, *parts in zip(whole, *known.values(), strict=True))
    found = {"drafter": (rest[0], rest[1]), **known}
    return {name: counts for name, counts in found.items() if counts[0]}


def _sums(stats: Sequence[Stats], *names: str) -> tuple[int, int]:
    first, second = (sum(getattr(each, name) for each in stats) for name in names)
    return first, second


def head_share(samples: Sequence[BatchSample]) -> float | None:
    """Of the time of all steps: of each forward, and of what lies before it."""
    head = whole = 0
    for sample in samples:
        timed = [arrival.timings for run in sample.together.runs for arrival in run.arrivals]
        for step in {each.step.number: each.step for each in timed if each is not None}.values():
            head += step.drafted_us
            whole += step.forward_us + step.gap_us + step.waited_us + step.drafted_us
    return head / whole if head else None


def speed_bars(samples: Sequence[BatchSample], lines: Sequence[Line]) -> Iterator[Bar]:
    by_place = {(line.level, line.temperature, line.row): line for line in lines}
    for level, temperature in dict.fromkeys((line.level, line.temperature) for line in lines):
        at = {row: by_place[level, temperature, row] for row in LABELS if (level, temperature, row) in by_place}
        name = f"{level} at once" + (f", temperature {temperature:g}" if temperature else "")
        needed = ALONE.get(temperature) if level == 1 else AT_FULL if level == FULL else None
        if EAGLE3 in at and needed is not None:
            yield at_least(f"{name}, {EAGLE3} / {OFF}", at[EAGLE3].to_off, needed)
        if AUTOMATIC not in at:
            continue
        yield at_least(f"{name}, {AUTOMATIC} / {OFF}", at[AUTOMATIC].to_off, NEVER_SLOWER)
        singles = [row for row in SINGLE if row in at]
        # Of one alone it would not be the best of anything.
        if len(singles) > 1:
            best = max(singles, key=lambda row: at[row].tokens_per_second.value)
            wholes = [sample.whole for sample in samples if sample.level == level]
            ratio = speed_ratio(wholes, key_of(AUTOMATIC, temperature), key_of(best, temperature))
            single = f"the best single source ({best} of {', '.join(singles)})"
            yield at_least(f"{name}, {AUTOMATIC} / {single}", ratio, NEVER_SLOWER)


def text_bars(texts: Mapping[int, Sequence[Judged]]) -> Iterator[Bar]:
    for level, judged in texts.items():
        wrong = sum(not one.near_tie for one in judged)
        name = f"texts, {level} at once, that differ from those of {OFF} but for near-ties"
        yield at_most(name, Estimate(wrong, wrong, wrong, 1.0), 0)


def report(found: HeadsResults) -> str:
    head = (
        *("at once, temperature", "row", "tokens/s", f"x {OFF}", "while all decode", "of all tokens", "tokens/forward"),
        *("accepted by position", "accepted of tested", "head's share", f"texts unlike {OFF}"),
    )
    body = [
        (
            f"{line.level}, {line.temperature:g}",
            line.label,
            f"{line.tokens_per_second.value:.0f}",
            f"{line.to_off.value:.2f} [{line.to_off.low:.2f}, {line.to_off.high:.2f}]",
            "-" if line.full_to_off is None else f"{line.full_to_off.value:.2f}",
            f"{line.of_all:.2f}",
            f"{line.tokens_per_forward:.2f}",
            " ".join(f"{share:.2f}" for share in line.accepted_at) or "-",
            ", ".join(f"{name} {hits}/{tests}" for name, (tests, hits) in line.sources.items()) or "-",
            "-" if line.head_share is None else f"{line.head_share:.0%}",
            str(line.different),
        )
        for line in found.lines
    ]
    coverage = min(line.to_off.coverage for line in found.lines)
    said = f"medians over turns (groups of prompts under all rows) in intervals that cover {coverage:.1%} or more"
    said += "" if coverage >= CONFIDENCE else f": too few turns for {CONFIDENCE:.0%}"
    return "\n".join([*table(head, body), said, "", *bar_lines(found.bars), "", *found.notes])


def write(found: HeadsResults, path: Path) -> None:
    head = {
        "name": path.stem,
        "bars": [asdict(bar) for bar in found.bars],
        "rows": [asdict(line) for line in found.lines],
        "mismatches": [{"level": level, **asdict(one)} for level, judged in found.texts.items() for one in judged],
        "cores_in_use": found.cores,
        "notes": list(found.notes),
        "machine": machine.describe(),
        "commit": machine.commit(),
        "arguments": found.arguments,
    }
    write_object(head, [_raw(sample) for sample in found.samples], path)


def _raw(sample: BatchSample) -> dict[str, object]:
    return {
        "level": sample.level,
        "turn": sample.repeat,
        "first_prompt": sample.first,
        "row": sample.row,
        "seconds": round(sample.together.seconds, 6),
        "forwards": [run.forwards for run in sample.together.runs],
        "plans": sorted({run.plan for run in sample.together.runs}),
        "sources": sources(stats_of([sample])),
    }


def tell(found: HeadsResults, out: Path) -> bool:
    write(found, out)
    print(report(found))
    return all(bar.holds for bar in found.bars if bar.name.startswith("texts"))


def main(argv: Sequence[str] | None = None) -> int:
    return run(parser().parse_args(argv), settings_of, measure, tell)


if __name__ == "__main__":
    # Threads of numeric libraries in this process would only disturb those that are measured.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    sys.exit(main())
