"""Measure dtypes and 8-bit weights beside float32: python -m bench.dtypes --help.

Target and drafter in one process, without network: the speed of plain decoding and of a loop that drafts, how often the
drafter's token is the target's, how well both predict held-out text. Ways of computing take turns, prompt by prompt.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import torch

from bench.harness import RESULTS, record
from bench.harness.interleave import tracked
from bench.harness.interval import Estimate, estimate
from bench.harness.report import table
from demo_pair import DRAFT, TARGET
from specwire.core.model import INT8_DYNAMIC, QUANTIZATIONS
from specwire.lm import Feed, LanguageModel, load_model
from specwire.rpc.process import say
from specwire.rpc.server_options import DTYPES

# Arguments that must be positive, and say what was measured.
NUMBERS = ("prompts", "tokens", "ahead", "threads")
OUT = RESULTS / "dtypes.json"
RUNTIMES = ("torch", "openvino")
CHUNK = 64  # positions of a forward that only reads
TOKENS_PER_SECOND = ("plain", "drafted")


class DtypeWay(NamedTuple):
    """How target and drafter are computed."""

    runtime: str
    dtype: str
    quantization: str


class DtypePair:
    """Target and drafter, each with one text."""

    def __init__(self, way: DtypeWay, args: argparse.Namespace) -> None:
        runtime, dtype, quantization = way
        self.target, self.draft = (
            load_model(
                str(folder), slots=1, dtype=dtype, runtime=runtime, quantization=quantization, threads=args.threads
            )
            for folder in (args.target, args.draft)
        )

    def plain(self, prompt: Sequence[int], count: int) -> tuple[list[int], float]:
        """The target's greedy text, and the seconds that it took behind the prompt."""
        text = list(prompt)
        _read(self.target, text[:-1])
        began = time.perf_counter()
        for _ in range(count):
            text.append(_next(self.target, text, 1)[0])
        return text[len(prompt) :], time.perf_counter() - began

    def drafted(self, prompt: Sequence[int], count: int, ahead: int) -> float:
        """Seconds for the same with `ahead` draft tokens a step, target and drafter by turns."""
        text = list(prompt)
        _read(self.target, text[:-1])
        _read(self.draft, text[:-1])
        began = time.perf_counter()
        while len(text) < len(prompt) + count:
            guess = list(text)
            for _ in range(ahead):
                guess += _next(self.draft, guess, 1)
            chosen = _next(self.target, guess, ahead + 1)
            right = next((i for i in range(ahead) if guess[len(text) + i] != chosen[i]), ahead)
            text += chosen[: right + 1]
            for lm in (self.target, self.draft):
                lm.rollback(0, min(lm.cached(0), len(text) - 1))
        return time.perf_counter() - began

    def agreement(self, prompt: Sequence[int], text: Sequence[int]) -> list[bool]:
        """Whether the drafter's best token is the target's, at each of its tokens."""
        rows = _read(self.draft, [*prompt, *text[:-1]])[len(prompt) - 1 :]
        return [best == token for best, token in zip(rows.argmax(dim=1).tolist(), text, strict=True)]


def _read(lm: LanguageModel, text: Sequence[int]) -> torch.Tensor:
    """Logits (len(text), vocabulary) of a text, which the slot holds afterwards."""
    lm.rollback(0, 0)
    feeds = [
        Feed(0, start, text[start : start + CHUNK], len(text[start : start + CHUNK]))
        for start in range(0, len(text), CHUNK)
    ]
    return torch.cat([lm.forward([feed]).clone() for feed in feeds])


def _next(lm: LanguageModel, text: Sequence[int], rows: int) -> list[int]:
    """The best token behind each of the last `rows` of a text, of which the slot holds a prefix."""
    start = min(lm.cached(0), len(text) - rows)
    tokens: list[int] = lm.forward([Feed(0, start, text[start:], rows)]).argmax(dim=1).tolist()
    return tokens


def loss(lm: LanguageModel, text: Sequence[int]) -> list[float]:
    """Nats of each token of a text but the first."""
    found = _read(lm, text[:-1]).log_softmax(dim=1)
    losses: list[float] = (-found[torch.arange(len(text) - 1), torch.tensor(text[1:])]).tolist()
    return losses


@dataclass(slots=True)
class MeasuredDtype:
    """What one way was found to be."""

    seconds: dict[str, list[float]] = field(default_factory=lambda: {name: [] for name in TOKENS_PER_SECOND})
    accepted: list[bool] = field(default_factory=list)
    target_loss: list[float] = field(default_factory=list)
    draft_loss: list[float] = field(default_factory=list)
    texts: list[list[int]] = field(default_factory=list)


def measure(args: argparse.Namespace) -> dict[DtypeWay, MeasuredDtype]:
    ways = [
        DtypeWay(runtime, dtype, quantization)
        for runtime in args.runtimes
        if runtime == "torch" or find_spec(runtime)
        for dtype in DTYPES
        for quantization in QUANTIZATIONS
        if quantization != INT8_DYNAMIC or dtype == "float32"
    ]
    say("bench: loading")
    pairs = {way: DtypePair(way, args) for way in ways}
    found = {way: MeasuredDtype() for way in ways}
    prompts = record.prompts_of(args.target)[: args.prompts]
    for number, prompt in enumerate(tracked(prompts, len(prompts))):
        for way, pair in pairs.items():
            _measure(pair, found[way], prompt, args)
        say(f"bench: prompt {number + 1} of {args.prompts}")
    return found


def _measure(pair: DtypePair, found: MeasuredDtype, prompt: Sequence[int], args: argparse.Namespace) -> None:
    text, _ = pair.plain(prompt, args.tokens)  # warms up, too
    found.texts.append(text)
    found.accepted += pair.agreement(prompt, text)
    found.target_loss += loss(pair.target, prompt)
    found.draft_loss += loss(pair.draft, prompt)
    found.seconds["plain"].append(pair.plain(prompt, args.tokens)[1] / args.tokens)
    found.seconds["drafted"].append(pair.drafted(prompt, args.tokens, args.ahead) / args.tokens)


def rows(found: dict[DtypeWay, MeasuredDtype]) -> list[dict[str, Any]]:
    first = next(iter(found.values()))
    return [
        {
            **way._asdict(),
            **{name: asdict(_speed(each.seconds[name])) for name in TOKENS_PER_SECOND},
            "to_first": {name: asdict(_ratio(first, each, name)) for name in TOKENS_PER_SECOND},
            "acceptance": _mean(each.accepted),
            "target_loss": _mean(each.target_loss),
            "draft_loss": _mean(each.draft_loss),
            "same_texts": _mean([one == other for one, other in zip(each.texts, first.texts, strict=True)]),
        }
        for way, each in found.items()
    ]


def _speed(seconds: Sequence[float]) -> Estimate:
    return estimate([1 / each for each in seconds])


def _ratio(first: MeasuredDtype, each: MeasuredDtype, name: str) -> Estimate:
    return estimate([a / b for a, b in zip(first.seconds[name], each.seconds[name], strict=True)])


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


HEAD = ("way", "plain tok/s", "x", "drafted tok/s", "x", "acceptance", "target loss", "draft loss", "same texts")


def report(lines: Sequence[dict[str, Any]]) -> str:
    cells = [
        [
            f"{line['runtime']} {line['dtype']}{'' if line['quantization'] == 'none' else ' ' + line['quantization']}",
            *(
                cell
                for name in TOKENS_PER_SECOND
                for cell in (f"{line[name]['value']:.0f}", f"{line['to_first'][name]['value']:.2f}")
            ),
            f"{line['acceptance']:.3f}",
            f"{line['target_loss']:.4f}",
            f"{line['draft_loss']:.4f}",
            f"{line['same_texts']:.2f}",
        ]
        for line in lines
    ]
    return "\n".join(table(HEAD, cells))


def parser() -> argparse.ArgumentParser:
    line = argparse.ArgumentParser(prog="python -m bench.dtypes", description=(__doc__ or "").partition(":")[0])
    line.add_argument("--target", type=Path, default=TARGET, metavar="DIR", help="with its tokenizer.json")
    line.add_argument("--draft", type=Path, default=DRAFT, metavar="DIR", help="(default: the pair's)")
    line.add_argument("--prompts", type=int, default=16, metavar="N", help="(default: %(default)s)")
    line.add_argument("--tokens", type=int, default=96, metavar="N", help="of each text (default: %(default)s)")
    line.add_argument("--ahead", type=int, default=4, metavar="N", help="draft tokens a step (default: %(default)s)")
    line.add_argument("--threads", type=int, default=1, metavar="N", help="(default: %(default)s)")
    line.add_argument("--runtimes", nargs="+", default=list(RUNTIMES), choices=RUNTIMES, help="(default: all)")
    line.add_argument("--out", type=Path, default=OUT, metavar="FILE", help="JSON")
    return line


def main(argv: Sequence[str] | None = None) -> int:
    args = parser().parse_args(argv)
    if record.refused(args, NUMBERS):
        return 2
    lines = rows(measure(args))
    record.write(args.out, {"bars": [], "rows": lines}, args, NUMBERS)
    print(report(lines))
    return 0


if __name__ == "__main__":
    sys.exit(main())
