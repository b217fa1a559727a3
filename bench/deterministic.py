"""Measure what --deterministic keeps equal and costs: python -m bench.deterministic --help.

Texts: sessions alone, then in random mixes over two verifiers (`bench.mixes`), with and without it. Times: steps of the
target with and without it, by turns in one process.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from bench import record
from bench.bars import at_most
from bench.interval import Estimate, estimate
from bench.mixes import Case, alone, differing, samplings, together
from bench.progress import tracked
from bench.report import table
from bench.settings import HERE
from demo_pair import TARGET
from specwire.lm import Feed, LanguageModel, load_model
from specwire.rpc.process import say
from specwire.rpc.server_options import DTYPES

# Arguments that must be positive, and say what was measured.
NUMBERS = ("sessions", "tokens", "mixes", "repeats", "threads")
OUT = HERE / "results" / "deterministic.json"
SLOTS, CONTEXT, VERIFIERS = 16, 512, 2
WAYS = {False: "as usual", True: "deterministic"}
# (sessions, positions of each) of the steps that are timed, behind texts of BEHIND positions.
SHAPES = ((1, 1), (1, 5), (1, 16), (8, 1), (16, 1), (8, 5))
BEHIND = 64


def texts(args: argparse.Namespace, dtype: str, deterministic: bool) -> dict[str, Any]:
    """How many tokens differ between the sessions alone and in the mixes; takeovers and accepted drafts in them."""
    models = [_load(args, dtype, deterministic) for _ in range(VERIFIERS)]
    cases = _cases(args)
    say(f"bench: {dtype}, {WAYS[deterministic]}: {len(cases)} sessions alone")
    known = alone(models[0], cases)
    flips = compared = moves = accepted = 0
    for seed in tracked(range(args.mixes), args.mixes, "mixes"):
        say(f"bench: {dtype}, {WAYS[deterministic]}: mix {seed + 1} of {args.mixes}")
        mixed = together(models, cases, known, seed)
        found = differing(known, mixed.texts)
        flips, compared = flips + found[0], compared + found[1]
        moves, accepted = moves + mixed.moves, accepted + mixed.accepted
    counts = {"differing": flips, "compared": compared, "moves": moves, "accepted": accepted}
    return {"dtype": dtype, "way": WAYS[deterministic], **counts}


def times(args: argparse.Namespace, dtype: str) -> Iterator[dict[str, Any]]:
    """Milliseconds of each shape of step, either way, and their ratio."""
    usual, deterministic = (_load(args, dtype, way) for way in (False, True))
    say(f"bench: {dtype}: times")
    for sessions, window in tracked(SHAPES, len(SHAPES), "times"):
        pairs = [(_step(usual, sessions, window), _step(deterministic, sessions, window)) for _ in range(args.repeats)]
        yield {
            "dtype": dtype,
            "sessions": sessions,
            "window": window,
            "usual_ms": asdict(estimate([1000 * first for first, _ in pairs])),
            "deterministic_ms": asdict(estimate([1000 * second for _, second in pairs])),
            "ratio": asdict(estimate([second / first for first, second in pairs])),
        }


def _step(lm: LanguageModel, sessions: int, window: int) -> float:
    """Seconds of a forward; the second of two, so that neither pays for the change of shape."""
    for slot in range(sessions):
        if lm.cached(slot) < BEHIND:
            lm.forward([Feed(slot, 0, list(range(1, BEHIND + 1)), 0)])
    feeds = [Feed(slot, BEHIND, list(range(1, window + 1)), window) for slot in range(sessions)]
    lm.forward(feeds)
    began = time.perf_counter()
    lm.forward(feeds)
    return time.perf_counter() - began


def _load(args: argparse.Namespace, dtype: str, deterministic: bool) -> LanguageModel:
    return load_model(
        str(args.target), slots=SLOTS, context=CONTEXT, dtype=dtype, threads=args.threads, deterministic=deterministic
    )


def _cases(args: argparse.Namespace) -> list[Case]:
    prompts = record.prompts_of(args.target)
    most = CONTEXT - args.tokens - 1
    chosen = [tuple(prompts[index % len(prompts)][:most]) for index in range(args.sessions)]
    return [
        Case(prompt, sampling, args.tokens) for prompt, sampling in zip(chosen, samplings(len(chosen)), strict=True)
    ]


def report(found: dict[str, Any]) -> str:
    rate = [[row["dtype"], row["way"], *(str(row[name]) for name in COUNTS)] for row in found["texts"]]
    cost = [
        [row["dtype"], str(row["sessions"]), str(row["window"])]
        + [f"{row[name]['value']:.2f} ({row[name]['low']:.2f} to {row[name]['high']:.2f})" for name in RATIOS]
        for row in found["times"]
    ]
    return "\n".join(
        (
            *table(["dtype", "way", "tokens that differ", "of", "takeovers", "draft tokens accepted"], rate),
            "",
            *table(["dtype", "sessions", "positions", "usual, ms", "deterministic, ms", "ratio"], cost),
        )
    )


COUNTS = ("differing", "compared", "moves", "accepted")
RATIOS = ("usual_ms", "deterministic_ms", "ratio")


def parser() -> argparse.ArgumentParser:
    line = argparse.ArgumentParser(prog="python -m bench.deterministic", description=(__doc__ or "").partition(":")[0])
    line.add_argument("--target", type=Path, default=TARGET, metavar="DIR", help="with its tokenizer.json")
    line.add_argument("--sessions", type=int, default=64, metavar="N", help="(default: %(default)s)")
    line.add_argument("--tokens", type=int, default=64, metavar="N", help="of each text (default: %(default)s)")
    line.add_argument("--mixes", type=int, default=3, metavar="N", help="(default: %(default)s)")
    line.add_argument("--repeats", type=int, default=21, metavar="N", help="of each step (default: %(default)s)")
    line.add_argument("--threads", type=int, default=1, metavar="N", help="(default: %(default)s)")
    line.add_argument("--dtypes", nargs="+", default=list(DTYPES), choices=DTYPES, help="(default: all)")
    line.add_argument("--out", type=Path, default=OUT, metavar="FILE", help="JSON")
    return line


def main(argv: Sequence[str] | None = None) -> int:
    args = parser().parse_args(argv)
    if record.refused(args, NUMBERS):
        return 2
    rows = [texts(args, dtype, way) for dtype in args.dtypes for way in WAYS]
    wrong = sum(row["differing"] for row in rows if row["way"] == WAYS[True])
    found: dict[str, Any] = {
        "bars": [asdict(at_most("deterministic: tokens that differ", Estimate(wrong, wrong, wrong, 1.0), 0))],
        "texts": rows,
        "times": [row for dtype in args.dtypes for row in times(args, dtype)],
    }
    record.write(args.out, found, args, NUMBERS)
    print(report(found))
    return 0 if wrong == 0 else 1


if __name__ == "__main__":
    sys.exit(main())
