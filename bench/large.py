"""Measure a pair of the sizes that people run, through the whole stack: python -m bench.large --help.

Weights are random, and how often the drafter is right is planted (`bench.gpu.shapes`): every weight is read and every
product computed as in trained models of these shapes, and the target's text is known beforehand. N-grams are off, so
that what is gained is the drafter's. Off is a server that has no drafter.

    box       `specwire up`: target and drafter share all cores
    0, 20 ms  verifier and drafter have a core each, and a line between them
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from math import ceil, log2
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from tokenizers import Tokenizer, decoders, models
from transformers.utils import logging as transformers_logging

from bench.gpu.shapes import SHAPES, ModelShape, agreeing, build, successors, walk
from bench.harness import RESULTS, machine
from bench.harness.entry import run
from bench.harness.interleave import interleave
from bench.harness.interval import Estimate
from bench.harness.record import write_object
from bench.harness.report import Bar, at_least, at_most, bar_lines, table
from bench.harness.rows import up
from bench.harness.runs import Sample, acceptance, of_row, speed_ratio, tokens_per_forward, tokens_per_second
from bench.wan.disciplines import DEFAULT, DisciplineRow
from bench.wan.places import Places, places
from bench.wan.rig import Orchestration, WanPair, WanRig, can_be_apart, rig
from deploy.stack.options import cores
from specwire.client import Client
from specwire.core.invalid import InvalidParameter
from specwire.core.messages import MOST_WINDOW
from specwire.core.model import AUTO, INT8, INT8_DYNAMIC, NONE, RUNTIMES
from specwire.rpc.process import say

OUT = RESULTS / "large.json"
OFF = "off"
BOX = "box"
# Of the line where verifier and drafter have a core each, and what the default needs over off there, and in the box.
RTTS_MS, NEEDED = (0.0, 20.0), {BOX: 1.6, "0 ms": 1.6, "20 ms": 1.3}
WEIGHTS = {"float32": NONE, INT8: INT8, INT8_DYNAMIC: INT8_DYNAMIC}
DTYPE = "float32"
PROMPT_TOKENS, SLOTS, SEED = 32, 2, 1


@dataclass(frozen=True, slots=True)
class LargeSettings:
    """What to measure. target, draft: names in `bench.gpu.shapes.SHAPES`. acceptance: the drafter's, planted."""

    target: str = "qwen2.5-0.5b"
    draft: str = "draft-30m"
    acceptance: float = 0.8
    weights: tuple[str, ...] = tuple(WEIGHTS)
    prompts: int = 2
    tokens: int = 96
    repeats: int = 7
    runtime: str = AUTO

    @property
    def context(self) -> int:
        """Positions of a text, and of a window beyond its end."""
        return 1 << ceil(log2(PROMPT_TOKENS + self.tokens + MOST_WINDOW))

    def __post_init__(self) -> None:
        for name, value in (("prompts", self.prompts), ("tokens", self.tokens), ("repeats", self.repeats)):
            if value < 1:
                raise InvalidParameter(name, f"must be at least 1, not {value}")
        if not 0 <= self.acceptance <= 1:
            raise InvalidParameter("acceptance", f"must be from 0 to 1, not {self.acceptance:g}")
        for each in self.weights:
            if each not in WEIGHTS:
                raise InvalidParameter("weights", f"must be of {', '.join(WEIGHTS)}, not {each!r}")


@dataclass(frozen=True, slots=True)
class Walks:
    """Folders of the two models, prompts, and what the target says behind each."""

    target: Path
    draft: Path
    prompts: Sequence[Sequence[int]]
    texts: Sequence[Sequence[int]]


@dataclass(frozen=True, slots=True)
class LargeLine:
    """One row at one place. to_off: speed over that of off there. different: prompts whose text is not the target's."""

    weights: str
    place: str
    row: str
    tokens_per_second: Estimate
    to_off: Estimate
    tokens_per_forward: float
    acceptance: float | None
    plan: str
    different: int


@dataclass(frozen=True, slots=True)
class LargeResults:
    """notes: what was not measured, and why."""

    settings: LargeSettings
    lines: Sequence[LargeLine]
    bars: Sequence[Bar]
    samples: Sequence[tuple[str, str, Sample]]
    notes: Sequence[str]


def write_pair(settings: LargeSettings, folder: Path) -> Walks:
    return write_shapes(SHAPES[settings.target], SHAPES[settings.draft], settings, settings.context, folder)


def write_shapes(target: ModelShape, draft: ModelShape, settings: LargeSettings, context: int, folder: Path) -> Walks:
    """Write both models; one whose successors are those of the target for as large a share as the drafter is right."""
    transformers_logging.disable_progress_bar()
    after = successors(target.vocabulary, SEED)
    guessed = agreeing(after, settings.acceptance, SEED + 1)
    for name, shape, follow in (("target", target, after), ("draft", draft, guessed)):
        model = build(shape, follow, context, torch.float32, torch.device("cpu"), SEED)
        model.save_pretrained(folder / name)
        _numbers(shape.vocabulary).save(str(folder / name / "tokenizer.json"))
        del model
    stride = target.vocabulary // settings.prompts
    walks = [walk(after, start * stride, PROMPT_TOKENS + settings.tokens) for start in range(settings.prompts)]
    return Walks(
        folder / "target",
        folder / "draft",
        [text[:PROMPT_TOKENS] for text in walks],
        [tuple(text[PROMPT_TOKENS:]) for text in walks],
    )


def _numbers(vocabulary: int) -> Tokenizer:
    """A tokenizer whose tokens are their ids' numbers; nothing is encoded."""
    tokenizer = Tokenizer(models.BPE({f"{index},": index for index in range(vocabulary)}, []))
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


Rows = Sequence[DisciplineRow]


@contextmanager
def box(settings: LargeSettings, walks: Walks, quantization: str) -> Iterator[Rows]:
    """`specwire up` without a drafter, and with one. Either has all cores."""
    words = ["--runtime", settings.runtime, "--quantization", quantization, "--no-ngram", "--slots", str(SLOTS)]
    words += ["--target-threads", str(cores())]
    with ExitStack() as owned:
        rows = []
        for name, draft in ((OFF, None), (DEFAULT, str(walks.draft))):
            stack, ready = up(str(walks.target), draft, DTYPE, False, *words)
            owned.enter_context(stack)
            client = owned.enter_context(Client(str(ready["address"])))
            rows.append(DisciplineRow(client, draft is not None, name))
        yield rows


@contextmanager
def apart(
    settings: LargeSettings, walks: Walks, quantization: str, where: Places
) -> Iterator[tuple[Rows, list[WanRig]]]:
    """Verifier and drafter with a core each, and the same verifier's like without a drafter."""
    pair = WanPair(str(walks.target), str(walks.draft), DTYPE, slots=SLOTS, apart=True)
    pair = replace(pair, runtime=settings.runtime, quantization=quantization)
    with ExitStack() as owned:
        rows, rigs = [], []
        for name, drafters in ((OFF, 0), (DEFAULT, 1)):
            rigs.append(owned.enter_context(rig(where, replace(pair, drafters=drafters), [Orchestration()])))
            client = owned.enter_context(Client(rigs[-1].addresses[Orchestration()]))
            rows.append(DisciplineRow(client, drafters > 0, name))
        yield rows, rigs


def measure(settings: LargeSettings) -> LargeResults:
    """Each kind of weights in turn, in the box and then apart."""
    samples: list[tuple[str, str, Sample]] = []
    notes = [] if can_be_apart() else ["Not measured apart: that takes two cores."]
    with ExitStack() as owned:
        say("bench: writing the models")
        walks = write_pair(settings, Path(owned.enter_context(TemporaryDirectory(prefix="specwire-large-"))))
        where = owned.enter_context(places())
        for weights in settings.weights:
            quantization = WEIGHTS[weights]
            say(f"bench: {weights}, {BOX}")
            with box(settings, walks, quantization) as rows:
                samples += ((weights, BOX, each) for each in _turns(settings, walks, rows))
            if notes:
                continue
            with apart(settings, walks, quantization, where) as (rows, rigs):
                for rtt_ms in RTTS_MS:
                    say(f"bench: {weights}, {rtt_ms:g} ms")
                    for started in rigs:
                        started.shape(rtt_ms)
                    samples += ((weights, f"{rtt_ms:g} ms", each) for each in _turns(settings, walks, rows))
    lines = lines_of(samples, walks.texts)
    return LargeResults(settings, lines, bars_of(lines), samples, notes)


def _turns(settings: LargeSettings, walks: Walks, rows: Rows) -> list[Sample]:
    for row in rows:
        row.run(walks.prompts[0], settings.tokens)
    return interleave(rows, walks.prompts, settings.tokens, settings.repeats, lambda _: None)


def lines_of(samples: Sequence[tuple[str, str, Sample]], texts: Sequence[Sequence[int]]) -> list[LargeLine]:
    places_of = dict.fromkeys((weights, place) for weights, place, _ in samples)
    found = []
    for weights, place in places_of:
        here = [each for *at, each in samples if (weights, place) == tuple(at)]
        for row in dict.fromkeys(each.row for each in here):
            runs = of_row(here, row)
            found.append(
                LargeLine(
                    weights,
                    place,
                    row,
                    tokens_per_second(here, row),
                    speed_ratio(here, row, OFF),
                    tokens_per_forward(here, row),
                    acceptance(here, row),
                    runs[-1].run.plan,
                    len({each.prompt for each in runs if each.run.tokens != tuple(texts[each.prompt])}),
                )
            )
    return found


def bars_of(lines: Sequence[LargeLine]) -> list[Bar]:
    found = [
        at_least(f"{line.weights}, {line.place}: default / off", line.to_off, NEEDED[line.place])
        for line in lines
        if line.row != OFF
    ]
    different = sum(line.different for line in lines)
    return [*found, at_most("texts that are not the target's", Estimate(different, different, different, 1.0), 0)]


def report(found: LargeResults) -> str:
    head = ("weights, place, row", "tokens/s", "x off", "tokens/forward", "acceptance", "other texts", "plan")
    body = [
        (
            f"{line.weights}, {line.place}, {line.row}",
            f"{line.tokens_per_second.value:.2f}",
            f"{line.to_off:.2f}",
            f"{line.tokens_per_forward:.2f}",
            "-" if line.acceptance is None else f"{line.acceptance:.3f}",
            str(line.different),
            line.plan,
        )
        for line in found.lines
    ]
    return "\n".join([*table(head, body), "", *bar_lines(found.bars), *found.notes])


def tell(found: LargeResults, out: Path) -> bool:
    head = {
        "name": out.stem,
        "bars": [asdict(bar) for bar in found.bars],
        "lines": [asdict(line) for line in found.lines],
        "machine": machine.describe(),
        "commit": machine.commit(),
        "arguments": asdict(found.settings),
        "notes": list(found.notes),
    }
    raw = [
        {"weights": weights, "place": place, "repeat": each.repeat, "prompt": each.prompt, "row": each.row}
        | {"seconds": round(each.run.seconds, 4), "forwards": each.run.forwards}
        for weights, place, each in found.samples
    ]
    write_object(head, raw, out)
    print(report(found))
    return all(bar.holds for bar in found.bars)


def parser() -> argparse.ArgumentParser:
    line = argparse.ArgumentParser(prog="python -m bench.large", description=(__doc__ or "").partition(":")[0])
    usual = LargeSettings()
    add = line.add_argument
    add("--target", default=usual.target, choices=SHAPES, help="its shape (default: %(default)s)")
    add("--draft", default=usual.draft, choices=SHAPES, help="its shape (default: %(default)s)")
    add("--acceptance", type=float, default=usual.acceptance, metavar="A", help="planted (default: %(default)s)")
    add("--weights", default=",".join(usual.weights), metavar="W,W", help="(default: %(default)s)")
    add("--prompts", type=int, default=usual.prompts, metavar="N", help="(default: %(default)s)")
    add("--tokens", type=int, default=usual.tokens, metavar="N", help="new ones for each (default: %(default)s)")
    add("--repeats", type=int, default=usual.repeats, metavar="N", help="(default: %(default)s)")
    add("--runtime", default=usual.runtime, choices=RUNTIMES, help="(default: %(default)s)")
    add("--out", type=Path, default=OUT, metavar="FILE", help="JSON (default: bench/results/large.json)")
    return line


def settings_of(args: argparse.Namespace) -> LargeSettings:
    """InvalidParameter names what is wrong."""
    weights = tuple(filter(None, args.weights.split(",")))
    numbers = args.prompts, args.tokens, args.repeats
    return LargeSettings(args.target, args.draft, args.acceptance, weights, *numbers, args.runtime)


def main(argv: Sequence[str] | None = None) -> int:
    return run(parser().parse_args(argv), settings_of, measure, tell)


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    sys.exit(main())
