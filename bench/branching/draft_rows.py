"""What a further token that a drafter's forward extends costs, d(W): python -m bench.branching.draft_rows --help.

Behind a held-out text the forward extends W tokens that are no line, as a tree's are; what it wrote is rolled back. The
widths take turns, so that none has the machine to itself.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from bench.harness import RESULTS
from bench.harness.interval import Estimate, estimate
from bench.harness.machine import dtype_of
from bench.harness.record import prompts_of, refused, write
from bench.harness.report import table
from demo_pair import DRAFT
from specwire.core.model import AUTO, Feed, TreeFeed
from specwire.lm import LanguageModel, load_model
from specwire.rpc.process import say
from specwire.rpc.server_options import SERVED_DTYPES

OUT = RESULTS / "draft_rows.json"
WIDTHS = (1, 2, 4, 8, 16)
# Forwards of a width in turn, of which the median counts.
STEPS = 20
NUMBERS = ("length", "repeats", "threads")


def seconds(model: LanguageModel, text: Sequence[int], width: int) -> float:
    """Median of STEPS forwards that extend `width` tokens behind the text, which the slot holds."""
    tree = TreeFeed(len(text), ((),) * width)
    feed = Feed(0, len(text), list(range(1, width + 1)), width, tree)
    found = []
    for _ in range(STEPS):
        began = time.perf_counter()
        model.forward([feed])
        found.append(time.perf_counter() - began)
        model.rollback(0, len(text))
    return statistics.median(found)


def measure(model: LanguageModel, texts: Sequence[Sequence[int]], repeats: int) -> dict[int, list[float]]:
    """Milliseconds by width, of every repeat on the next text."""
    found: dict[int, list[float]] = {width: [] for width in WIDTHS}
    for repeat in range(repeats):
        model.discard(0)
        text = texts[repeat % len(texts)]
        model.forward([Feed(0, 0, text, 1)])
        for width in WIDTHS:
            found[width].append(1000 * seconds(model, text, width))
    return found


def report(found: dict[int, list[float]]) -> str:
    rows = [(str(width), f"{estimate(each):.3f}", f"{_to_one(found, width):.3f}") for width, each in found.items()]
    return "\n".join(table(("tokens a forward extends", "ms", "x one"), rows))


def _to_one(found: dict[int, list[float]], width: int) -> Estimate:
    return estimate([wide / one for wide, one in zip(found[width], found[1], strict=True)])


def main(argv: Sequence[str] | None = None) -> int:
    line = argparse.ArgumentParser(
        prog="python -m bench.branching.draft_rows",
        description="What each further token costs that a forward of the demo drafter extends.",
    )
    line.add_argument("--dtype", default=AUTO, choices=SERVED_DTYPES, help="of the drafter (default: %(default)s)")
    line.add_argument("--length", type=int, default=64, metavar="N", help="tokens of the text (default: 64)")
    line.add_argument("--repeats", type=int, default=15, metavar="N", help="default: 15")
    line.add_argument("--threads", type=int, default=1, metavar="N", help="of the drafter (default: 1)")
    line.add_argument("--out", type=Path, default=OUT, metavar="FILE", help="JSON")
    args = line.parse_args(argv)
    if refused(args, NUMBERS):
        return 2
    args.dtype = dtype_of(args.dtype)
    texts = [prompt[: args.length] for prompt in prompts_of(DRAFT) if len(prompt) >= args.length]
    if not texts:
        say(f"bench: error: length: no held-out prompt has {args.length} tokens")
        return 2
    model = load_model(str(DRAFT), slots=1, dtype=args.dtype, threads=args.threads, runtime="torch")
    found = measure(model, texts, args.repeats)
    write(args.out, {"ms": {str(width): each for width, each in found.items()}}, args, [*NUMBERS, "dtype"])
    print(report(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
