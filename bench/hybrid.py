"""Measure a target with recurrent layers: what its kept states cost, and what drafting gains: python -m bench.hybrid.

Weights are random, and agreement is planted (`bench.gpu.shapes`). The target is a Qwen3.5 of the demo target's sizes:
of three layers two are gated delta rules, one is attention.

    V(m)      forwards of m rows that go on and on behind a text: with all states of a window kept, with one state a
              slot, and by the model's own modules and cache
    box       `specwire up` without a drafter (off) and with one (default), and transformers' own `generate`
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Protocol

import torch
from transformers import AutoModelForCausalLM, DynamicCache, PreTrainedConfig, PreTrainedModel, Qwen3_5TextConfig

from bench.gpu.shapes import ModelShape
from bench.harness import RESULTS, machine
from bench.harness.entry import run
from bench.harness.interleave import interleave
from bench.harness.interval import Estimate, estimate
from bench.harness.record import write_object
from bench.harness.report import Bar, at_least, at_most, bar_lines, table
from bench.harness.rows import PLAIN, TransformersRow, start_peer
from bench.harness.runs import Row, Sample
from bench.large import BOX, DTYPE, OFF, LargeLine, LargeSettings, Walks, box, lines_of, write_shapes
from bench.wan.disciplines import DEFAULT
from deploy.stack.options import cores
from specwire.core.invalid import InvalidParameter
from specwire.core.model import NONE, Feed
from specwire.lm import load_model
from specwire.lm.kv_cache import CachedLM
from specwire.lm.kv_memory import readable
from specwire.lm.runners.hybrid import STATES, HybridRunner
from specwire.rpc.process import say

OUT = RESULTS / "hybrid.json"
WIDTHS, PREFIX = (1, 4, 8), 64
KEPT, BARE, OWN = "kept", "bare", "own modules"
# What keeping states may cost, and what the default needs over off where a forward takes so long.
MOST_COST, NEEDED, LEAST_MS = 1.1, 1.3, 10.0


@dataclass(frozen=True, slots=True)
class HybridShape(ModelShape):
    """Sizes of a Qwen3.5."""

    def config(self, context: int) -> PreTrainedConfig:
        head = self.hidden // self.heads
        return Qwen3_5TextConfig(
            vocab_size=self.vocabulary,
            hidden_size=self.hidden,
            intermediate_size=self.intermediate,
            num_hidden_layers=self.layers,
            num_attention_heads=self.heads,
            num_key_value_heads=self.kv_heads,
            head_dim=head,
            layer_types=[
                ("linear_attention", "linear_attention", "full_attention")[at % 3] for at in range(self.layers)
            ],
            linear_num_key_heads=self.heads,
            linear_num_value_heads=self.heads,
            linear_key_head_dim=head,
            linear_value_head_dim=head,
            max_position_embeddings=context,
            eos_token_id=None,
            tie_word_embeddings=False,
        )


DRAFT = ModelShape(2, 128, 256, 2, 2, 4096)


@dataclass(frozen=True, slots=True)
class HybridSettings:
    """layers: of the target. acceptance: the drafter's, planted. steps: forwards of a width in turn."""

    layers: int = 6
    acceptance: float = 0.8
    prompts: int = 2
    tokens: int = 96
    repeats: int = 7
    steps: int = 20

    def __post_init__(self) -> None:
        for name, value, least in (("layers", self.layers, 3), ("steps", self.steps, 1)):
            if value < least:
                raise InvalidParameter(name, f"must be at least {least}, not {value}")
        _ = self.stack  # it checks the others

    @property
    def stack(self) -> LargeSettings:
        """Of the part that goes through the stack."""
        return LargeSettings(acceptance=self.acceptance, prompts=self.prompts, tokens=self.tokens, repeats=self.repeats)

    @property
    def target(self) -> HybridShape:
        return HybridShape(self.layers, 384, 1024, 6, 2, DRAFT.vocabulary)


@dataclass(frozen=True, slots=True)
class HybridResults:
    """ms: by way and width, of each repeat. slot: bytes of keys and values, and of states. notes: what is left out."""

    settings: HybridSettings
    ms: dict[str, dict[int, list[float]]]
    slot: tuple[int, int]
    lines: Sequence[LargeLine]
    bars: Sequence[Bar]
    samples: Sequence[Sample]
    notes: Sequence[str]


# ----------------------------------------------------------------------------------------------------------------------
# V(m).


class HybridWay(Protocol):
    def begin(self, text: Sequence[int]) -> None:
        """Hold this text, and nothing else."""
        ...

    def feed(self, tokens: Sequence[int]) -> None:
        """Go on with it."""
        ...


class OurWay:
    """With so many states a slot."""

    def __init__(self, folder: Path, states: int) -> None:
        lm = load_model(str(folder), slots=1, dtype=DTYPE, threads=cores())
        if not isinstance(lm, CachedLM) or not isinstance(lm.runner, HybridRunner):
            raise TypeError(f"{folder} is not served by the runner of recurrent layers")
        self.lm = lm
        if states != STATES:
            self.lm = CachedLM(HybridRunner(lm.runner.model, 1, lm.info.context, states), lm.info, 1)

    def begin(self, text: Sequence[int]) -> None:
        self.lm.discard(0)
        self.feed(text)

    def feed(self, tokens: Sequence[int]) -> None:
        self.lm.forward([Feed(0, self.lm.cached(0), tokens, len(tokens))])


class OwnWay:
    """By the model's modules and cache."""

    def __init__(self, folder: Path) -> None:
        model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, DTYPE))
        self._model = model.eval()

    def begin(self, text: Sequence[int]) -> None:
        self._cache = DynamicCache(config=self._model.config)
        self.feed(text)

    @torch.inference_mode()
    def feed(self, tokens: Sequence[int]) -> None:
        self._model(input_ids=torch.tensor([list(tokens)]), past_key_values=self._cache, use_cache=True)


def times(ways: dict[str, HybridWay], settings: HybridSettings) -> dict[str, dict[int, list[float]]]:
    """Milliseconds by way and width: of each repeat the median. The ways take turns."""
    text = [(7 * at + 3) % DRAFT.vocabulary for at in range(PREFIX + settings.steps * WIDTHS[-1])]
    found: dict[str, dict[int, list[float]]] = {name: {width: [] for width in WIDTHS} for name in ways}
    for repeat in range(-1, settings.repeats):  # the first one warms up
        for width in WIDTHS:
            order = [*ways] if repeat % 2 else [*reversed(ways)]
            for name in order:
                took = _median_ms(ways[name], text, width, settings.steps)
                if repeat >= 0:
                    found[name][width].append(took)
    return found


def _median_ms(way: HybridWay, text: Sequence[int], width: int, steps: int) -> float:
    way.begin(text[:PREFIX])
    taken = []
    for step in range(steps):
        first = PREFIX + step * width
        began = time.perf_counter()
        way.feed(text[first : first + width])
        taken.append(1000 * (time.perf_counter() - began))
    return statistics.median(taken)


def cost(ms: dict[str, dict[int, list[float]]], width: int, of: str = KEPT, over: str = BARE) -> Estimate:
    return estimate([one / other for one, other in zip(ms[of][width], ms[over][width], strict=True)])


# ----------------------------------------------------------------------------------------------------------------------
# Through the stack.


def measure(settings: HybridSettings) -> HybridResults:
    stack = settings.stack
    context = max(stack.context, PREFIX + settings.steps * WIDTHS[-1])
    with TemporaryDirectory(prefix="specwire-hybrid-") as folder:
        walks = write_shapes(settings.target, DRAFT, stack, context, Path(folder))
        say("bench: forward times")
        kept = OurWay(walks.target, STATES)
        ways: dict[str, HybridWay] = {KEPT: kept, BARE: OurWay(walks.target, 1), OWN: OwnWay(walks.target)}
        ms = times(ways, settings)
        slot = (kept.lm.kv_bytes - kept.lm.state_bytes, kept.lm.state_bytes)
        del kept, ways
        say("bench: through the stack")
        samples = through_the_stack(stack, walks)
        lines = lines_of([(DTYPE, BOX, each) for each in samples], walks.texts)
    bars, notes = bars_of(ms, lines)
    return HybridResults(settings, ms, slot, lines, bars, samples, notes)


def through_the_stack(stack: LargeSettings, walks: Walks) -> list[Sample]:
    with ExitStack() as owned:
        peer = owned.enter_context(start_peer(str(walks.target), None, DTYPE, cores()))
        ours = owned.enter_context(box(stack, walks, NONE))
        rows: list[Row] = [TransformersRow(peer), *ours]
        for row in rows:
            row.run(walks.prompts[0], stack.tokens)
        return interleave(rows, walks.prompts, stack.tokens, stack.repeats, lambda _: None)


def bars_of(ms: dict[str, dict[int, list[float]]], lines: Sequence[LargeLine]) -> tuple[list[Bar], list[str]]:
    bars = [at_most(f"V({width}), {KEPT} / {BARE}", cost(ms, width), MOST_COST) for width in WIDTHS]
    plain_ms, notes = statistics.median(ms[KEPT][1]), list[str]()
    gained = next(line.to_off for line in lines if line.row == DEFAULT)
    if plain_ms >= LEAST_MS:
        bars.append(at_least("default / off", gained, NEEDED))
    else:
        notes.append(f"default / off has no bar: a forward takes {plain_ms:.1f} ms, less than {LEAST_MS:g}.")
    different = sum(line.different for line in lines)
    return [*bars, at_most("texts that are not the target's", Estimate(different, different, different, 1.0), 0)], notes


def report(found: HybridResults) -> str:
    head = ("ms of a forward", *(f"{width} rows" for width in WIDTHS), "kept / it")
    forwards = [
        (
            name,
            *(f"{statistics.median(each[width]):.2f}" for width in WIDTHS),
            ", ".join(f"{cost(found.ms, width, KEPT, name).value:.3f}" for width in WIDTHS),
        )
        for name, each in found.ms.items()
    ]
    names = {PLAIN: "transformers"}
    speeds = [
        (
            names.get(line.row, line.row),
            f"{line.tokens_per_second.value:.2f}",
            f"{line.to_off:.2f}",
            f"{line.tokens_per_forward:.2f}",
            "-" if line.acceptance is None else f"{line.acceptance:.3f}",
        )
        for line in found.lines
    ]
    keys, states = found.slot
    return "\n".join(
        [
            *table(head, forwards),
            "",
            *table(("row", "tokens/s", f"x {OFF}", "tokens/forward", "acceptance"), speeds),
            "",
            f"A slot: {readable(keys)} of keys and values, {readable(states)} of states.",
            *bar_lines(found.bars),
            *found.notes,
        ]
    )


def tell(found: HybridResults, out: Path) -> bool:
    head = {
        "name": out.stem,
        "bars": [asdict(bar) for bar in found.bars],
        "ms": found.ms,
        "slot_bytes": dict(zip(("keys_and_values", "states"), found.slot, strict=True)),
        "lines": [asdict(line) for line in found.lines],
        "machine": machine.describe(),
        "commit": machine.commit(),
        "arguments": asdict(found.settings),
        "notes": list(found.notes),
    }
    raw = [
        {"repeat": each.repeat, "prompt": each.prompt, "row": each.row, "seconds": round(each.run.seconds, 4)}
        for each in found.samples
    ]
    write_object(head, raw, out)
    print(report(found))
    return all(bar.holds for bar in found.bars)


def parser() -> argparse.ArgumentParser:
    line = argparse.ArgumentParser(prog="python -m bench.hybrid", description=(__doc__ or "").partition(":")[0])
    usual = HybridSettings()
    add = line.add_argument
    add("--layers", type=int, default=usual.layers, metavar="N", help="of the target (default: %(default)s)")
    add("--acceptance", type=float, default=usual.acceptance, metavar="A", help="planted (default: %(default)s)")
    add("--prompts", type=int, default=usual.prompts, metavar="N", help="(default: %(default)s)")
    add("--tokens", type=int, default=usual.tokens, metavar="N", help="new ones for each (default: %(default)s)")
    add("--repeats", type=int, default=usual.repeats, metavar="N", help="(default: %(default)s)")
    add(
        "--steps", type=int, default=usual.steps, metavar="N", help="forwards of a width in turn (default: %(default)s)"
    )
    add("--out", type=Path, default=OUT, metavar="FILE", help="JSON (default: bench/results/hybrid.json)")
    return line


def settings_of(args: argparse.Namespace) -> HybridSettings:
    """InvalidParameter names what is wrong."""
    return HybridSettings(args.layers, args.acceptance, args.prompts, args.tokens, args.repeats, args.steps)


def main(argv: Sequence[str] | None = None) -> int:
    return run(parser().parse_args(argv), settings_of, measure, tell)


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    sys.exit(main())
