"""Measure a target of billions of random weights, in this process: python -m bench.gpu.run --help."""

from __future__ import annotations

import signal
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from transformers import PreTrainedModel
from transformers.utils import logging as transformers_logging

from bench.gpu.decoding import Decoded, Decoding, ModelDrafter, Oracle, Source
from bench.gpu.floor import Floor, bandwidth, weight_bytes
from bench.gpu.head import beside, forward_bytes, planted
from bench.gpu.peer import TransformersPair
from bench.gpu.results import GpuResults, SpeedLine, SpeedSample, report, write
from bench.gpu.settings import GpuSettings, parser, settings_of
from bench.gpu.shapes import SHAPES, agreeing, build, successors, walk
from bench.gpu.steps import measure_steps
from bench.harness.interleave import schedule, tracked
from bench.harness.interval import estimate
from bench.harness.runs import BenchError
from bench.peers.transformers_peer import DTYPES
from specwire.core.invalid import InvalidParameter
from specwire.core.model import ModelInfo
from specwire.lm import LanguageModel
from specwire.lm.heads.eagle3 import Eagle3
from specwire.lm.kv_cache import CachedLM
from specwire.lm.runners.compiled import Buckets, CompiledRunner
from specwire.lm.runners.llama import LlamaRunner
from specwire.rpc.process import say

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


class GpuRow(Protocol):
    """One way to decode with several sessions at once; `name` is for people."""

    @property
    def name(self) -> str: ...

    @property
    def levels(self) -> Sequence[int]:
        """How many sessions it can take part with."""
        ...

    @property
    def draft_bytes(self) -> int:
        """What each forward reads that is counted as a draft."""
        ...

    def run(self, prompts: Sequence[Sequence[int]], tokens: int) -> Decoded: ...


@dataclass(frozen=True, slots=True)
class EngineRow:
    """Our engine; draft tokens from `source`, or a head. draft_bytes: what a forward of either reads."""

    name: str
    engine: Decoding
    source: Source | None
    levels: Sequence[int]
    draft_bytes: int = 0

    def run(self, prompts: Sequence[Sequence[int]], tokens: int) -> Decoded:
        return self.engine.run(prompts, tokens, self.source)


@dataclass(frozen=True, slots=True)
class GpuPeerRow:
    """transformers, of which assisted generation takes one session."""

    name: str
    pair: TransformersPair
    assisted: bool
    levels: Sequence[int] = (1,)
    draft_bytes: int = 0

    def run(self, prompts: Sequence[Sequence[int]], tokens: int) -> Decoded:
        return self.pair.run(prompts[0], tokens, self.assisted)


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
    engine, drafter = Decoding(lm), ModelDrafter(draft_lm, settings.drafts)
    oracle = Oracle(after, settings.acceptance, settings.drafts, SEED)
    pair = TransformersPair(target, draft, settings.drafts)
    rows: list[GpuRow] = [
        EngineRow(OFF, engine, None, settings.sessions),
        EngineRow(ORACLE, engine, oracle, settings.sessions),
        EngineRow(DRAFTER, engine, drafter, settings.sessions, weight_bytes(draft)),
        EngineRow(HEAD, Decoding(headed, settings.drafts), None, settings.sessions, forward_bytes(head)),
        GpuPeerRow(PLAIN, pair, assisted=False),
        GpuPeerRow(ASSISTED, pair, assisted=True),
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


def main(argv: Sequence[str] | None = None) -> int:
    args = parser().parse_args(argv)
    transformers_logging.disable_progress_bar()
    transformers_logging.set_verbosity_error()
    try:
        settings = settings_of(args)
        args.out.parent.mkdir(parents=True, exist_ok=True)  # fail now, not after the measurement
    except (InvalidParameter, OSError) as error:
        say(f"bench: error: {error}")
        return 2
    try:
        found = measure(settings)
    except (BenchError, RuntimeError, AssertionError) as error:  # no such device, or too little memory on it
        say(f"bench: error: {' '.join(str(error).split())}")
        return 1
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    write(found, args.out)
    print(report(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
