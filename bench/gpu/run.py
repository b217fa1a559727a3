"""Measure a target of billions of random weights, in this process: python -m bench.gpu.run --help."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.utils import logging as transformers_logging

from bench.gpu.decoding import Decoded, Decoding, ModelDrafter, Oracle, Source, TransformersPair
from bench.gpu.shapes import SHAPES, agreeing, beside, build, forward_bytes, planted, successors, walk
from bench.gpu.steps import Floor, StepLine, bandwidth, measure_steps, weight_bytes
from bench.harness import RESULTS, entry
from bench.harness.interleave import schedule, tracked
from bench.harness.interval import Estimate, estimate
from bench.harness.record import save
from bench.harness.report import Bar, at_most
from bench.harness.runs import BenchError
from bench.peers.transformers_peer import DTYPES
from scripts.figures.speed import gpu_table
from specwire.core.invalid import InvalidParameter
from specwire.core.model import ModelInfo
from specwire.lm import LanguageModel
from specwire.lm.heads.eagle3 import Eagle3
from specwire.lm.kv_cache import CachedLM
from specwire.lm.runners.compiled import Buckets, CompiledRunner
from specwire.lm.runners.llama import LlamaRunner
from specwire.rpc.process import say

OUT = RESULTS / "gpu.json"


@dataclass(frozen=True, slots=True)
class GpuSettings:
    """What to measure.

    Attributes:
        target, draft: names of SHAPES.
        rows, windows: of steps: sessions, and positions of each.
        sessions: at once, where tokens per second are measured.
        prompt: tokens behind which everything is measured.
        drafts: tokens that are drafted for each step; by a head, at most.
        acceptance: of the oracle, of the drafter and of the head.
    """

    target: str = "llama-8b"
    draft: str = "llama-1b"
    device: str = "cuda:0"
    dtype: str = "bfloat16"
    compiled: bool = False
    rows: tuple[int, ...] = (1, 8, 32, 128)
    windows: tuple[int, ...] = (1, 4, 8)
    sessions: tuple[int, ...] = (1, 8, 32)
    prompt: int = 512
    tokens: int = 128
    drafts: int = 4
    acceptance: float = 0.8
    repeats: int = 7

    def __post_init__(self) -> None:
        for name in ("rows", "windows", "sessions"):
            sizes = getattr(self, name)
            if not sizes or min(sizes) < 1:
                raise InvalidParameter(name, f"must each be at least 1, not {sizes}")
        for name, least in (("prompt", 2), ("tokens", 2), ("drafts", 1), ("repeats", 1)):
            if getattr(self, name) < least:
                raise InvalidParameter(name, f"must be at least {least}, not {getattr(self, name)}")
        least = self.drafts + 2  # or the first step might be the whole text, which takes no time that is measured
        if self.tokens < least:
            raise InvalidParameter(
                "tokens", f"must be at least {least} with drafts of {self.drafts}, not {self.tokens}"
            )
        if not 0 <= self.acceptance <= 1:  # nor NaN
            raise InvalidParameter("acceptance", f"must be from 0 to 1, not {self.acceptance:g}")
        if SHAPES[self.target].vocabulary != SHAPES[self.draft].vocabulary:
            raise InvalidParameter("draft", f"{self.draft} has another vocabulary than {self.target}")

    @property
    def slots(self) -> int:
        return max(*self.rows, *self.sessions)

    @property
    def context(self) -> int:
        """Positions that the longest text comes to, and the drafts behind it."""
        return self.prompt + max(self.tokens, max(self.windows)) + self.drafts + 1

    def shown(self) -> dict[str, object]:
        return asdict(self)


def parser() -> argparse.ArgumentParser:
    usual = GpuSettings()
    line = argparse.ArgumentParser(
        prog="python -m bench.gpu.run",
        description="Measure a target of random weights in this process: steps against the floor, tokens per second.",
    )
    line.add_argument("--target", choices=SHAPES, help="shape (default: llama-8b)")
    line.add_argument("--draft", choices=SHAPES, help="shape (default: llama-1b)")
    line.add_argument("--device", help="such as cuda:0, the default, or cpu")
    line.add_argument("--dtype", choices=DTYPES, help="(default: bfloat16)")
    line.add_argument("--compile", action="store_true", help="static shapes through torch.compile, minutes at start")
    line.add_argument("--rows", metavar="N,N", help="of steps: sessions (default: 1,8,32,128)")
    line.add_argument("--windows", metavar="N,N", help="of steps: positions of each (default: 1,4,8)")
    line.add_argument("--sessions", metavar="N,N", help="at once, for tokens per second (default: 1,8,32)")
    for name, meaning in (
        ("prompt", "tokens of each prompt"),
        ("tokens", "new tokens"),
        ("drafts", "draft tokens for each step"),
        ("repeats", "7 or more for a full measurement"),
    ):
        line.add_argument(f"--{name}", type=int, metavar="N", help=f"{meaning} (default: {getattr(usual, name)})")
    line.add_argument("--acceptance", type=float, metavar="A", help="of the drafts, from 0 to 1 (default: 0.8)")
    line.add_argument("--quick", action="store_true", help="tiny shapes on cpu unless said otherwise: does it run?")
    line.add_argument("--out", type=Path, default=OUT, metavar="FILE", help="JSON")
    return line


QUICK = {
    "target": "tiny",
    "draft": "tiny-draft",
    "device": "cpu",
    "dtype": "float32",
    "rows": (1, 2),
    "windows": (1, 4),
    "sessions": (1, 2),
    "prompt": 16,
    "tokens": 24,
    "repeats": 1,
}


def settings_of(args: argparse.Namespace) -> GpuSettings:
    """InvalidParameter names what is wrong."""
    chosen: dict[str, object] = dict(QUICK) if args.quick else {}
    for name in ("target", "draft", "device", "dtype", "prompt", "tokens", "drafts", "repeats", "acceptance"):
        if getattr(args, name) is not None:
            chosen[name] = getattr(args, name)
    for name in ("rows", "windows", "sessions"):
        if getattr(args, name) is not None:
            chosen[name] = _sizes(name, getattr(args, name))
    return GpuSettings(**chosen, compiled=args.compile)  # type: ignore[arg-type]  # each of its own type


def _sizes(name: str, text: str) -> tuple[int, ...]:
    try:
        return tuple(sorted({int(each) for each in text.split(",")}))
    except ValueError:
        raise InvalidParameter(name, f"must be numbers with commas between them, not {text!r}") from None


# Of the floor, for a compiled target: sessions, positions of each, and how many times the floor a step may take.
NEEDED = ((1, 1, 1.35), (8, 4, 1.6))


@dataclass(frozen=True, slots=True)
class SpeedSample:
    """One run of a row with so many sessions.

    floor_s: what its forwards, and those of what drafts, take at least (see Floor), each read at the text's mean length
    once; 0.0 where they were not counted.
    """

    repeat: int
    row: str
    sessions: int
    seconds: float
    tokens: int
    tested: int
    accepted: int
    floor_s: float = 0.0


@dataclass(frozen=True, slots=True)
class SpeedLine:
    """Tokens per second of all sessions together. tokens_per_session: of each. to_floor: see `SpeedSample.floor_s`."""

    row: str
    sessions: int
    tokens_per_second: Estimate
    tokens_per_session: float
    acceptance: float | None
    to_floor: Estimate | None = None


@dataclass(frozen=True, slots=True)
class GpuResults:
    """device: its name, as its driver has it. notes: what is not as it would be in service."""

    device: str
    compiled: bool
    arguments: Mapping[str, object]
    floor: Floor
    steps: Sequence[StepLine]
    speeds: Sequence[SpeedLine]
    samples: Sequence[SpeedSample]
    notes: Sequence[str]

    @property
    def bars(self) -> list[Bar]:
        return list(_bars(self.steps)) if self.compiled else []


def _bars(steps: Sequence[StepLine]) -> Iterator[Bar]:
    for rows, window, needed in NEEDED:
        for step in steps:
            if (step.rows, step.window) == (rows, window):
                yield at_most(f"step of {rows} sessions x {window} / its floor", step.to_floor, needed)


def write(found: GpuResults, path: Path) -> dict[str, Any]:
    """Returns the record."""
    head = {
        "device": found.device,
        "compiled": found.compiled,
        "bars": [asdict(bar) for bar in found.bars],
        "floor": asdict(found.floor),
        "steps": [asdict(step) for step in found.steps],
        "speeds": [asdict(line) for line in found.speeds],
        "notes": list(found.notes),
    }
    return save(path, head, found.arguments, [asdict(sample) for sample in found.samples])


SEED = 1
# Of the copies that measure the memory: far above any cache of a GPU.
COPIED = {"cuda": 1 << 32, "cpu": 1 << 26}
OFF, ORACLE, DRAFTER = "drafting off", "drafting by the oracle", "drafting by the drafter"
HEAD = "drafting by an EAGLE-3 head"
PLAIN, ASSISTED = "transformers", "transformers assisted"
NOTES = (
    "Weights are random and acceptance is chosen; the oracle, which drafts in no time, exists in measurements only.",
    "The engine runs in this process: no network, no log. The drafter takes turns with the target on the same device.",
    "The head drafts as many tokens as pay, no more than they do. A floor reads what a forward needs, once in each.",
)


@dataclass(frozen=True, slots=True)
class GpuRow:
    """One way to decode with several sessions at once; `name` is for people.

    run: texts behind prompts, so many tokens each. levels: how many sessions it can take part with. draft_bytes: what
    each forward reads that is counted as a draft.
    """

    name: str
    run: Callable[[Sequence[Sequence[int]], int], Decoded]
    levels: Sequence[int]
    draft_bytes: int = 0


def measure(settings: GpuSettings) -> GpuResults:
    """BenchError, or what the device's runtime raises, if it cannot be measured."""
    device, dtype = torch.device(settings.device), DTYPES[settings.dtype]
    after = successors(SHAPES[settings.target].vocabulary, SEED)
    say(f"bench: building {settings.target}, {settings.draft} and a head")
    target = build(SHAPES[settings.target], after, settings.context, dtype, device, SEED)
    draft_after = agreeing(after, settings.acceptance, SEED)
    draft = build(SHAPES[settings.draft], draft_after, settings.context, dtype, device, SEED + 1)
    head = planted(SHAPES[settings.target], target, draft_after, _said(settings, after), SEED + 2)
    floor = Floor(weight_bytes(target), _position_bytes(settings), bandwidth(device, COPIED.get(device.type, 1 << 30)))
    if settings.compiled:
        say("bench: compiling")
    lm = language_model(target, settings, max(*settings.windows, settings.drafts + 1))
    # A drafter is fed its last token, or the two that it lacks after a window that was all right.
    draft_lm = language_model(draft, settings, 2)
    headed = language_model(target, settings, settings.drafts + 1, head)
    say("bench: measuring steps")
    text = walk(after, 0, settings.prompt + max(settings.windows))
    shapes = [(rows, window) for rows in settings.rows for window in settings.windows]
    steps = measure_steps(lm, text, shapes, settings.repeats, floor)
    pair = TransformersPair(target, draft, settings.drafts)

    def ours(name: str, engine: Decoding, source: Source | None = None, draft_bytes: int = 0) -> GpuRow:
        return GpuRow(name, partial(engine.run, source=source), settings.sessions, draft_bytes)

    def theirs(name: str, assisted: bool) -> GpuRow:
        """Assisted generation takes one session."""
        return GpuRow(name, lambda prompts, tokens: pair.run(prompts[0], tokens, assisted), (1,))

    engine, oracle = Decoding(lm), Oracle(after, settings.acceptance, settings.drafts, SEED)
    rows = [
        ours(OFF, engine),
        ours(ORACLE, engine, oracle),
        ours(DRAFTER, engine, ModelDrafter(draft_lm, settings.drafts), weight_bytes(draft)),
        ours(HEAD, Decoding(headed, settings.drafts), draft_bytes=forward_bytes(head)),
        theirs(PLAIN, assisted=False),
        theirs(ASSISTED, assisted=True),
    ]
    samples = [one for level in settings.sessions for one in _decode(rows, settings, level, after, floor)]
    return GpuResults(
        device=torch.cuda.get_device_name(device) if device.type == "cuda" else str(device),
        compiled=settings.compiled,
        arguments=settings.shown(),
        floor=floor,
        steps=steps,
        speeds=speed_lines(samples),
        samples=samples,
        notes=NOTES,
    )


def language_model(
    model: PreTrainedModel, settings: GpuSettings, widest: int, head: Eagle3 | None = None
) -> LanguageModel:
    """The model over a slot cache, as `specwire.lm.load_model` makes it of one on disk; feeds are of up to `widest`.

    head: drafts beside it.
    """
    vocabulary, slots, context = model.config.vocab_size, settings.slots, settings.context
    taps = () if head is None else head.config.taps
    runner: CompiledRunner | LlamaRunner
    if settings.compiled:
        runner = CompiledRunner(model, slots, context, vocabulary, buckets_of(settings, widest), taps=taps)
    else:
        runner = LlamaRunner(model, slots, context, vocabulary, taps=taps)
    kind = type(model).__name__
    info = ModelInfo("random", kind, vocabulary, context, (), settings.dtype, settings.device, "", "")
    return CachedLM(runner, info, slots) if head is None else beside(runner, info, slots, head)


def buckets_of(settings: GpuSettings, widest: int) -> Buckets:
    """The buckets of a service of this size, without wide ones that feeds of up to `widest` tokens never need."""
    usual = Buckets.usual(settings.slots, settings.context)
    enough = min((columns for columns in usual.columns if columns >= widest), default=settings.context)
    return usual._replace(columns=tuple(columns for columns in usual.columns if columns <= enough))


def _position_bytes(settings: GpuSettings) -> int:
    return SHAPES[settings.target].kv_bytes_per_position * DTYPES[settings.dtype].itemsize // 2


def _said(settings: GpuSettings, after: Sequence[int]) -> list[int]:
    """All ids of all texts: a head that is made for them can say these."""
    length = settings.prompt + settings.tokens
    return [token for start in range(max(settings.sessions)) for token in walk(after, start, length)]


def _decode(
    rows: Sequence[GpuRow], settings: GpuSettings, level: int, after: Sequence[int], floor: Floor
) -> list[SpeedSample]:
    """All rows that can by turns, after a run of each that does not count."""
    prompts = [walk(after, start, settings.prompt) for start in range(level)]
    expected = tuple(tuple(walk(after, after[prompt[-1]], settings.tokens)) for prompt in prompts)
    taking_part = [row for row in rows if level in row.levels]
    say(f"bench: {level} at once: {', '.join(row.name for row in taking_part)}")
    for row in taking_part:
        row.run(prompts, settings.tokens)
    samples = []
    turns = schedule(settings.repeats, 1, len(taking_part))
    for repeat, _, index in tracked(turns, settings.repeats * len(taking_part), f"{level} at once"):
        row = taking_part[index]
        found = row.run(prompts, settings.tokens)
        if found.texts != expected:
            raise BenchError(f"{row.name}: a text is not the walk that the target's weights are arranged to take")
        forward_s = floor.seconds(level, settings.prompt + settings.tokens // 2)
        floor_s = found.forwards * forward_s + found.drafts * row.draft_bytes / floor.bandwidth
        told = (found.seconds, found.tokens, found.tested, found.accepted, floor_s)
        samples.append(SpeedSample(repeat, row.name, level, *told))
    return samples


def speed_lines(samples: Sequence[SpeedSample]) -> list[SpeedLine]:
    places = dict.fromkeys((sample.row, sample.sessions) for sample in samples)
    return [_line([one for one in samples if (one.row, one.sessions) == place]) for place in places]


def _line(samples: Sequence[SpeedSample]) -> SpeedLine:
    row, sessions = samples[0].row, samples[0].sessions
    speed = estimate([sample.tokens / sample.seconds for sample in samples])
    tested = sum(sample.tested for sample in samples)
    acceptance = sum(sample.accepted for sample in samples) / tested if tested else None
    counted = all(sample.floor_s for sample in samples)
    to_floor = estimate([sample.seconds / sample.floor_s for sample in samples]) if counted else None
    return SpeedLine(row, sessions, speed, speed.value / sessions, acceptance, to_floor)


def measured(settings: GpuSettings) -> GpuResults:
    """BenchError, also where there is no such device, or too little memory on it."""
    try:
        return measure(settings)
    except (RuntimeError, AssertionError) as error:
        raise BenchError(" ".join(str(error).split())) from error


def tell(found: GpuResults, out: Path) -> bool:
    print(gpu_table(write(found, out)))
    return True


def main(argv: Sequence[str] | None = None) -> int:
    args = parser().parse_args(argv)
    transformers_logging.disable_progress_bar()
    transformers_logging.set_verbosity_error()
    return entry.run(args, settings_of, measured, tell)


if __name__ == "__main__":
    sys.exit(main())
