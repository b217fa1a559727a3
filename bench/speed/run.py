"""Measure whole stacks beside the libraries that people run: python -m bench.speed.run --help.

Either models that people run, or a suite of the included pair: main, box, batch, heads.

A piece is some rows beside each other, off among them. A turn is a prompt, or a group of several sessions at once,
through all rows of its piece. Each turn is added to a journal of one commit, machine and settings (build/bench-real),
so a run that was ended goes on with the next turn, and reports what is there at its end.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import statistics
import sys
import time
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import demo_pair
from bench.harness import RESULTS, ROOT, machine
from bench.harness.entry import located, shown_model, terminable
from bench.harness.interleave import tracked
from bench.harness.interval import percentile
from bench.harness.machine import dtype_of
from bench.harness.runs import BenchError, Run
from bench.harness.sessions import Together
from bench.peers.library import PEERS, packages_of
from bench.speed import prompts as asked_for
from bench.speed import report, rows
from bench.speed.prompts import SpeedPrompt
from bench.speed.rows import SpeedField, SpeedModels
from specwire.client.events import Stats
from specwire.core.invalid import InvalidParameter
from specwire.core.model import AUTO, ModelError, is_gguf
from specwire.named_models import NAMED, file_of
from specwire.rpc.process import say

JOURNALS = ROOT / "build" / "bench-real"
MODELS = ("smollm2-135m", "qwen2.5-coder-1.5b")
# What drafts for a model where --draft does not say; the included pair is for trying the bench itself.
DRAFTS = {"qwen2.5-coder-1.5b": "smollm2-135m"}
DEMO = "demo"
TRAINED = ROOT / "build" / "heads"
TEMPERATURES = (0.0, 0.8)
TOKENS, LONG_TOKENS = 96, 256
MINUTES, SHORT_MINUTES = 85.0, 15.0
# Of a short run; and of a piece of long texts: one of each task.
SHORT_PROMPTS, LONG_PROMPTS = 14, 7
# Groups of a level: their order is drawn again until there are so many.
LEAST_GROUPS = 6
WARM_UP, WARM_UP_TOKENS = SpeedPrompt("warm-up", "Say hello in three languages."), 32
# Forwards of more rows are of prompts.
MOST_ROWS = 64
PARTS = ("forward", "drafted", "choose", "gap", "waited")
WAY = ("verifier, gRPC", "log", "orchestrator", "gRPC, client", "whole")


@dataclass(frozen=True, slots=True)
class Piece:
    """Rows beside each other. tokens, prompts: None for what the run has. short: part of a short run, too."""

    name: str
    rows: tuple[str, ...]
    levels: tuple[int, ...] = (1,)
    tokens: int | None = None
    prompts: int | None = None
    short: bool = True


PIECES = (
    Piece("main", (rows.OFF, rows.DEFAULT, rows.LLAMACPP, rows.OPENVINO)),
    Piece("sources", (rows.OFF, rows.TEXTS, rows.HEAD, rows.DRAFTER)),
    Piece("far", (rows.OFF, *rows.FAR)),
    Piece("llama.cpp", (rows.OFF, *(key for key in rows.LIBRARIES if key.startswith(f"{rows.LLAMACPP},")))),
    Piece("openvino", (rows.OFF, *(key for key in rows.LIBRARIES if key.startswith(f"{rows.OPENVINO},")))),
    Piece("many", (rows.OFF, rows.DEFAULT, rows.LLAMACPP), levels=(4, 16)),
    Piece("vllm", (rows.OFF, *rows.VLLM_ROWS), short=False),
    Piece("long", tuple(rows.LEFT_OUT), tokens=LONG_TOKENS, prompts=LONG_PROMPTS, short=False),
    Piece("far-long", (rows.OFF, *rows.FAR), tokens=LONG_TOKENS, prompts=LONG_PROMPTS, short=False),
)


# Of the included pair. A box: in one process and in several, beside the forward alone.
LEVELS = (1, 2, 4, 8, 16, 32)
SUITES = {
    "main": (
        Piece("main", (rows.OFF, rows.HEADLESS, rows.DEFAULT, rows.TRANSFORMERS, rows.ASSISTED)),
        Piece("openvino", (rows.OFF, rows.OPENVINO, rows.LOOKUP, rows.DRAFT_MODEL)),
    ),
    "box": (
        Piece("box", (rows.OFF, rows.HEADLESS, rows.ONE_OFF, rows.ONE, rows.FORWARD, rows.PAUSED)),
        Piece("openvino", (rows.OFF, rows.ONE_OFF, rows.ONE, rows.OPENVINO, rows.LOOKUP, rows.DRAFT_MODEL)),
    ),
    "batch": (Piece("batch", (rows.OFF, rows.HEADLESS, rows.DEFAULT, rows.STATIC, rows.CONTINUOUS), levels=LEVELS),),
    "heads": (
        Piece(
            "heads",
            (rows.OFF, rows.DRAFTER, rows.TEXTS, rows.HEAD, "medusa", "mtp", rows.DEFAULT),
            levels=(1, 4, 16, 32),
        ),
        Piece("others", (rows.OFF, "hydra", rows.SKIP, rows.TRANSFORMERS, rows.OPENVINO)),
    ),
}


@dataclass(frozen=True, slots=True)
class SpeedSettings:
    """What to measure of one model, or suite. prompts: of the sample, so many; None for all.

    record: its name. questions: see `prompts.sample`. levels: those asked for; () for what the pieces have.
    """

    name: str
    record: str
    models: SpeedModels
    pieces: tuple[Piece, ...]
    questions: Path | None
    prompts: int | None
    tokens: int
    levels: tuple[int, ...]
    short: bool

    def shown(self) -> dict[str, object]:
        """What must be the same of all turns in a journal: without where this machine keeps things."""
        models = {
            key: shown_model(value) if isinstance(value, str) else value
            for key, value in self.models._asdict().items()
            if key not in ("peers", "trained")
        }
        return {"model": self.name, **models, "questions": None if self.questions is None else self.questions.name}


@dataclass(frozen=True, slots=True)
class SpeedTurn:
    """prompts: by their numbers, at once."""

    piece: str
    level: int
    temperature: float
    tokens: int
    prompts: tuple[int, ...]


def parser() -> argparse.ArgumentParser:
    line = argparse.ArgumentParser(
        prog="python -m bench.speed.run",
        description="Measure whole stacks beside the libraries that people run.",
        epilog="Exit code 1: something could not be measured at all. A second run goes on where this one ended.",
    )
    add = line.add_argument
    own = f"models (default: {' '.join(MODELS)}; {DEMO}: to try this bench), or suites: {', '.join(SUITES)}"
    add("models", nargs="*", metavar="NAME", help=own)
    add("--target", metavar="MODEL", help="serve this under the only name that is given")
    add("--draft", metavar="MODEL", help="drafter (default: the target's own; smollm2-135m for Qwen)")
    add("--head", metavar="DIR", help="of the row head, and of default (default: what specwire up takes)")
    add("--peer-draft", metavar="FILE", help="what libraries draft with (default: the drafter, if they read it)")
    add("--peers", type=Path, default=PEERS, metavar="PYTHON", help="has the libraries (default: make setup-peers')")
    add("--questions", type=Path, metavar="FILE", help="Spec-Bench's (default: ../shared/data/spec_bench, if there)")
    add("--pieces", default="", metavar="NAME,NAME", help=f"of {', '.join(each.name for each in PIECES)}")
    add("--prompts", type=int, metavar="N", help="the first of the sample (default: all)")
    add("--tokens", type=int, default=TOKENS, metavar="N", help="new tokens for each (default: %(default)s)")
    add("--sessions", default="", metavar="N,N", help="at once, of pieces with several (default: 4,16; a suite's own)")
    add("--minutes", type=float, metavar="M", help=f"stop after so long (default: {MINUTES:g})")
    add("--short", action="store_true", help=f"{SHORT_MINUTES:g} minutes for all pieces: fewer prompts and sessions")
    add("--dtype", default=AUTO, help="of all rows of a suite (default: what the machine computes itself)")
    add("--trained", type=Path, default=TRAINED, metavar="DIR", help="has medusa, hydra, mtp (default: build/heads)")
    add("--option", action="append", default=[], metavar="WORD", help="further option of our services; may be repeated")
    add("--record", metavar="NAME", help="of the only suite's record (default: its own name)")
    add("--out", type=Path, metavar="DIR", help="of results (default: bench/results; of a short run build/bench-real)")
    return line


def settings_of(args: argparse.Namespace) -> list[SpeedSettings]:
    """InvalidParameter names what is wrong."""
    for name, value in (("tokens", args.tokens), ("prompts", args.prompts), ("minutes", args.minutes)):
        if value is not None and value < 1:
            raise InvalidParameter(name, f"must be at least 1, not {value:g}")
    names = tuple(args.models) or MODELS
    for option, value in (("target", args.target), ("record", args.record)):
        if value is not None and len(names) != 1:
            raise InvalidParameter(option, "is of one NAME, which must be given")
    return [_of_name(name, args, _levels(args.sessions)) for name in names]


def _of_name(name: str, args: argparse.Namespace, levels: tuple[int, ...]) -> SpeedSettings:
    pieces = SUITES.get(name, PIECES)
    known = {piece.name: piece for piece in pieces if piece.short or not args.short}
    asked = [piece for piece in args.pieces.split(",") if piece] or list(known)
    if wrong := [piece for piece in asked if piece not in known]:
        raise InvalidParameter("pieces", f"there is no piece {wrong[0]!r}, only {', '.join(known)}")
    return SpeedSettings(
        name,
        args.record or (name if name in SUITES else f"real_{name}"),
        _suite_models(name, args) if name in SUITES else _models(name, args),
        tuple(known[piece] for piece in asked),
        args.questions,
        args.prompts or (SHORT_PROMPTS if args.short else None),
        args.tokens,
        levels,
        args.short,
    )


def _levels(text: str) -> tuple[int, ...]:
    try:
        levels = tuple(int(each) for each in text.split(",")) if text else ()
    except ValueError:
        levels = (0,)
    if levels and min(levels) < 1:
        raise InvalidParameter("sessions", f"must be numbers from 1, not {text!r}")
    return levels


def _suite_models(name: str, args: argparse.Namespace) -> SpeedModels:
    """The included pair, or one that is given; libraries read it as it is."""
    target, draft = (located(str(each)) for each in (args.target or demo_pair.TARGET, args.draft or demo_pair.DRAFT))
    heads = name == "heads"
    return SpeedModels(
        target,
        draft,
        located(str(args.head or demo_pair.HEAD)),
        target,
        args.peer_draft or draft,
        args.peers.absolute(),
        tuple(args.option),
        dtype_of(args.dtype),
        args.trained.expanduser().resolve(),
        one_tenant=heads,
    )


def _models(name: str, args: argparse.Namespace) -> SpeedModels:
    if name not in NAMED and name != DEMO and args.target is None:
        raise InvalidParameter(
            "models", f"there is no {name!r}, only {', '.join((*MODELS, *SUITES, DEMO))}, or say its --target"
        )
    target, draft, head = args.target or name, args.draft or DRAFTS.get(name), args.head
    if name == DEMO and args.target is None:
        target, draft, head = str(demo_pair.TARGET), draft or str(demo_pair.DRAFT), head or str(demo_pair.HEAD)
    head = head and located(head)
    files = (_file_of(name) or _file_of(target), args.peer_draft or (draft and _file_of(draft)))
    models = (located(target), draft and located(draft), head, *files)
    return SpeedModels(*models, args.peers.absolute(), tuple(args.option))


def _file_of(model: str) -> str | None:
    """The GGUF file of a model, for libraries; None where it is none. Of a named one it may be missing yet."""
    if model in NAMED:
        return str(file_of(model))
    return located(model) if is_gguf(model) else None


class Journal:
    """Lines of JSON: first who measured what, then what was found. Of a line that was cut off nothing is kept."""

    def __init__(self, path: Path, head: Mapping[str, object]) -> None:
        """BenchError where what is there was measured elsewhere, or otherwise."""
        self.path, self.lines = path, []
        head = json.loads(json.dumps(head))
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists():
            self.lines = [json.loads(line) for line in path.read_text().split("\n")[:-1]]
            path.write_text("".join(json.dumps(line) + "\n" for line in self.lines))
        if not self.lines:
            self.add({"head": head})
        elif self.lines[0]["head"] != head:
            before = self.lines[0]["head"]
            other = ", ".join(key for key in head if before.get(key) != head[key])
            raise BenchError(f"{path.name} in {path.parent.name} is of another {other}: move it away to begin anew")

    def add(self, line: dict[str, Any]) -> None:
        self.lines.append(line)
        with self.path.open("a") as file:
            file.write(json.dumps(line) + "\n")

    def of(self, key: str) -> list[dict[str, Any]]:
        """The lines of a kind, in their order: each has its kind's name as a key."""
        return [line for line in self.lines if key in line]


def journal_of(settings: SpeedSettings, asked: Sequence[SpeedPrompt]) -> Journal:
    """asked: the whole sample, whatever part of it is measured now."""
    made = machine.describe()
    made.pop("load_average")
    commit = machine.commit() or "unknown"
    short, changed = "-short" if settings.short else "", "+" if commit.endswith("+") else ""
    name = f"{settings.record.removeprefix('real_')}{short}-{commit[:12]}{changed}"
    head = {"commit": commit, "machine": made, "arguments": settings.shown(), "tasks": [each.task for each in asked]}
    texts = zlib.crc32("\0".join(each.text for each in asked).encode())
    return Journal(JOURNALS / f"{name}.jsonl", {**head, "texts": texts})


def turns_of(piece: Piece, settings: SpeedSettings, prompts: int) -> list[SpeedTurn]:
    """Both temperatures of a group behind each other, so that a piece that ends early has them alike."""
    count = min(prompts, piece.prompts or prompts)
    levels = piece.levels if piece.levels == (1,) else settings.levels or piece.levels
    levels = levels[:1] if settings.short else levels
    return [
        SpeedTurn(piece.name, level, temperature, piece.tokens or settings.tokens, group)
        for level in levels
        for group in groups(level, count)
        for temperature in TEMPERATURES
    ]


def groups(level: int, prompts: int) -> list[tuple[int, ...]]:
    """Prompts that are asked at once; none where there are too few."""
    if level == 1:
        return [(prompt,) for prompt in range(prompts)]
    if prompts < level:
        return []
    found: list[tuple[int, ...]] = []
    chance = random.Random(asked_for.SEED)
    order = list(range(prompts))
    while len(found) < LEAST_GROUPS:
        found += [tuple(order[at : at + level]) for at in range(0, prompts - level + 1, level)]
        chance.shuffle(order)
    return found


def measure(settings: SpeedSettings, until: float) -> Journal:
    """Go on with the journal until it is whole, or time is over; the journal. Raises BenchError."""
    if settings.name in SUITES:
        found, notes = asked_for.held_out(), list[str]()
    else:
        found, notes = asked_for.sample(settings.questions, packages_of(settings.models.peers))
    journal = journal_of(settings, found)
    for note in notes:
        if note not in (line["note"] for line in journal.of("note")):
            journal.add({"note": note})
    found = found[: settings.prompts]
    for number, piece in enumerate(settings.pieces):
        left = until - time.monotonic()
        # A short run has some of each piece; a whole one may go on another time.
        share = left / (len(settings.pieces) - number) if settings.short else left
        if share > 0:
            _piece(piece, settings, journal, found, time.monotonic() + share)
    return journal


def _piece(piece: Piece, settings: SpeedSettings, journal: Journal, found: Sequence[SpeedPrompt], until: float) -> None:
    done = {_turn_of(line) for line in journal.of("turn")}
    left = [turn for turn in turns_of(piece, settings, len(found)) if turn not in done]
    if not left:
        return
    say(f"bench: {settings.name}, {piece.name}: {len(left)} turns left")
    # Of equal services each keeps for life what it drew at its start, up to 6 %: a second one draws anew, in the other
    # order.
    halves: tuple[list[SpeedTurn], list[SpeedTurn]] = ([], [])
    for number, turn in enumerate(left):
        halves[0 if settings.short else number // len(TEMPERATURES) % 2].append(turn)
    half_s = until if settings.short else (time.monotonic() + until) / 2
    _started(piece.name, piece.rows, halves[0], settings, journal, found, half_s)
    if halves[1] and time.monotonic() < until:
        _started(piece.name, piece.rows[::-1], halves[1], settings, journal, found, until)


def _started(
    name: str,
    order: Sequence[str],
    turns: Sequence[SpeedTurn],
    settings: SpeedSettings,
    journal: Journal,
    found: Sequence[SpeedPrompt],
    until: float,
) -> None:
    """Start rows in this order, those of libraries behind ours, and ask them the turns."""
    with ExitStack() as cleanup:
        folder = Path(cleanup.enter_context(TemporaryDirectory(prefix="specwire-real-")))
        field = SpeedField(settings.models, folder, cleanup)
        most = max(turn.level for turn in turns)
        field.start([key for key in order if key in rows.LEFT_OUT], most, 0)
        if rows.OFF not in field.rows:
            journal.add({"failed": {rows.OFF: field.failed[rows.OFF]}, "piece": name})
            say(f"bench: {name} is left out, without {rows.OFF}: {field.failed[rows.OFF]}")
            return
        texts = field.encoded([*found, WARM_UP])
        longest = max(map(len, texts)) + max(turn.tokens for turn in turns)
        field.start([key for key in order if key not in rows.LEFT_OUT], most, longest)
        _turns(field, turns, texts, journal, until)
        for key, row in field.rows.items():
            facts = {"ready_seconds": round(row.ready_seconds, 2), **row.memory()._asdict()}
            journal.add({"facts": {**facts, "runtime": field.runtimes.get(key, "")}, "row": key, "piece": name})
        if field.failed:
            journal.add({"failed": field.failed, "piece": name})


def _turns(
    field: SpeedField, left: Sequence[SpeedTurn], texts: Sequence[Sequence[int]], journal: Journal, until: float
) -> None:
    """Each turn through all rows, which rotate; a row that fails is left out from then on.

    The first prompt is asked however late it is: starting the rows would have been in vain.
    """
    for temperature in TEMPERATURES:
        for key in list(field.rows):
            _ask(field, key, texts[-1:], WARM_UP_TOKENS, temperature)
    for number, turn in enumerate(tracked(left, len(left), left[0].piece)):
        if rows.OFF not in field.rows or (number >= len(TEMPERATURES) and time.monotonic() > until):
            return
        keys = list(field.rows)
        keys = keys[number % len(keys) :] + keys[: number % len(keys)]
        took = {
            key: packed(together)
            for key in keys
            if (together := _ask(field, key, [texts[at] for at in turn.prompts], turn.tokens, turn.temperature))
        }
        journal.add({"turn": asdict(turn), "rows": took})


def _ask(
    field: SpeedField, key: str, prompts: Sequence[Sequence[int]], tokens: int, temperature: float
) -> Together | None:
    try:
        # A library that has one session at a time is not asked for several.
        return field.rows[key].ask(prompts, tokens, temperature)
    except BenchError as error:
        say(f"bench: {key} is left out from here: {error}")
        field.drop(key, str(error))
        return None


def _turn_of(line: Mapping[str, Any]) -> SpeedTurn:
    fields = line["turn"]
    return SpeedTurn(**{**fields, "prompts": tuple(fields["prompts"])})


def packed(together: Together) -> dict[str, object]:
    return {"seconds": round(together.seconds, 5), "runs": [_packed(run) for run in together.runs]}


def _packed(run: Run) -> dict[str, object]:
    """What figures are made of; the text as a number that tells whether two are equal."""
    found: dict[str, object] = {
        "tokens": len(run.tokens),
        "seconds": round(run.seconds, 5),
        "first": round(run.first_token_seconds, 5),
        "forwards": run.forwards,
        "text": zlib.crc32(",".join(map(str, run.tokens)).encode()),
    }
    if run.stats is None:
        return {**found, "tested": run.tested or 0, "accepted": run.accepted or 0}
    steps = {one.timings.step.number: one.timings.step for one in run.arrivals if one.timings is not None}
    decoding = [step for step in steps.values() if 0 < step.rows <= MOST_ROWS]
    v = {
        width: [step.forward_us for step in decoding if step.rows == width]
        for width in sorted({step.rows for step in decoding})
    }
    return {
        **found,
        "tested": run.stats.tested,
        "accepted": run.stats.accepted,
        "tested_at": list(run.stats.tested_at),
        "accepted_at": list(run.stats.accepted_at),
        "sources": sources(run.stats),
        "plan": run.plan,
        "v": {width: [len(times), round(statistics.median(times))] for width, times in v.items()},
        "parts": {name: sum(getattr(step, f"{name}_us") for step in decoding) for name in PARTS},
        "steps": len(decoding),
        "pauses_ms": pauses_ms(run),
        "delivery_ms": delivery_ms(run),
    }


def sources(stats: Stats) -> dict[str, tuple[int, int]]:
    """Draft tokens tested and accepted by who proposed them, where any were tested."""
    known = {"ngram": (stats.tested_ngram, stats.accepted_ngram), "head": (stats.tested_head, stats.accepted_head)}
    tested, accepted = (stats.tested, stats.accepted)
    known["drafter"] = (
        tested - sum(each[0] for each in known.values()),
        accepted - sum(each[1] for each in known.values()),
    )
    return {name: counts for name, counts in known.items() if counts[0]}


def pauses_ms(run: Run) -> list[float]:
    """Between two arrivals at the client, whatever number of tokens came: the median, and what 95 % are below."""
    pauses = [(now.received_ns - before.received_ns) / 1e6 for before, now in pairwise(run.arrivals)]
    return [round(percentile(pauses, share), 2) for share in (50, 95)] if pauses else []


def delivery_ms(run: Run) -> dict[str, float]:
    """Medians of the way of each chunk's newest tokens to the client; the parts follow one another."""
    ways = list(_ways(run))
    return {name: round(statistics.median(way[at] for way in ways), 3) for at, name in enumerate(WAY) if ways}


def _ways(run: Run) -> Iterator[list[float]]:
    for arrival in run.arrivals:
        if (told := arrival.timings) is not None and told.forward_ended_ns:
            stations = (told.forward_ended_ns, told.verdict_received_ns, told.durable_ns, told.emitted_ns)
            instants = (*stations, arrival.received_ns)
            yield [*((end - begin) / 1e6 for begin, end in pairwise(instants)), (instants[-1] - instants[0]) / 1e6]


def tell(settings: SpeedSettings, journal: Journal, out: Path) -> bool:
    """Write and print what the journal has; False where it has no turn."""
    if not journal.of("turn"):
        say(f"bench: {settings.name}: nothing was measured")
        for line in journal.of("failed"):
            say(f"bench: {line['piece']}: {line['failed']}")
        return False
    found = report.results_of(settings.name, journal.lines)
    report.write(found, journal.lines, out / f"{settings.record}.json")
    print(report.report(found))
    return True


def main(argv: Sequence[str] | None = None) -> int:
    args = parser().parse_args(argv)
    try:
        asked = settings_of(args)
        out = args.out or (JOURNALS if args.short else RESULTS)
        out.mkdir(parents=True, exist_ok=True)
    except (ValueError, OSError) as error:
        say(f"bench: error: {error}")
        return 2
    until = time.monotonic() + 60 * (args.minutes or (SHORT_MINUTES if args.short else MINUTES))
    became = 0
    for number, settings in enumerate(asked):
        try:
            share = until if not args.short else time.monotonic() + (until - time.monotonic()) / (len(asked) - number)
            with terminable():
                journal = measure(settings, share)
        except (BenchError, InvalidParameter, ModelError) as error:
            say(f"bench: error: {settings.name}: {error}")
            became = 1
            continue
        except KeyboardInterrupt:
            say("bench: what was measured is kept; the same command goes on with it")
            return 128 + signal.SIGINT
        became |= not tell(settings, journal, out)
    return became


if __name__ == "__main__":
    # Threads of numeric libraries in this process would only disturb those that are measured.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    sys.exit(main())
