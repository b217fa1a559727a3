"""The same test on other engines: `python -m bench.laws.peer`.

Without options on transformers' assisted generation, and on OpenVINO GenAI where that is installed. On any other engine
with an HTTP API like OpenAI's in two steps: --write DIR leaves a target and a drafter of four ids, with random weights
from fixed seeds, so that the exact law of the first tokens can be computed from the target's logits; served by the
engine, in float32, --url URL asks it. Plain sampling is the control: if it is refused too, the test is wrong.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from scipy.stats import chi2

from bench.harness import RESULTS, record
from bench.harness.report import table
from bench.harness.runs import BenchError
from bench.laws.engines import FIRSTS, EngineWay, openvino_ways, server_way, transformers_ways
from bench.laws.exact import chi_square
from bench.laws.pair import SEEDS, joint, model, write
from specwire.rpc.process import say

OUT = RESULTS / "laws_peers.json"
ALPHA = 1e-5


@dataclass(frozen=True, slots=True)
class EngineTest:
    """What the test says of one way in which an engine decodes."""

    engine: str
    way: str
    control: bool
    texts: int
    p: float

    @property
    def refused(self) -> bool:
        return self.p < ALPHA

    @property
    def cells(self) -> tuple[str, ...]:
        return self.engine, self.way, str(self.texts), f"{self.p:.2g}", "refused" if self.refused else "accepted"


def judged(ways: Iterable[EngineWay], count: int) -> list[EngineTest]:
    law, verdicts = joint(model(SEEDS[0]), FIRSTS), []
    for way in ways:
        say(f"bench: {way.engine}, {way.name}: {count} texts")
        statistic, freedom = chi_square(way.texts(count), law, count)
        verdicts.append(EngineTest(way.engine, way.name, way.control, count, float(chi2.sf(statistic, freedom))))
    return verdicts


def parser() -> argparse.ArgumentParser:
    line = argparse.ArgumentParser(prog="python -m bench.laws.peer", description=(__doc__ or "").partition(":")[0])
    line.add_argument("--sessions", type=int, default=10_000, metavar="N", help="of each (default: %(default)s)")
    line.add_argument("--out", type=Path, default=OUT, metavar="FILE", help="JSON; not written with --url")
    line.add_argument("--write", type=Path, metavar="DIR", help="write DIR/target and DIR/draft, and do nothing else")
    line.add_argument("--url", metavar="URL", help="of a server, up to /v1, that serves what --write has written")
    line.add_argument("--served", default="target", metavar="NAME", help="of the model there (default: %(default)s)")
    line.add_argument("--more", type=json.loads, default={}, metavar="JSON", help="more fields of the request to it")
    return line


def main(argv: Sequence[str] | None = None) -> int:
    """Print the p-values; fails only where a control is refused: what a peer does is for the reader."""
    args = parser().parse_args(argv)
    if record.refused(args, ("sessions",)):
        return 2
    if args.write is not None:
        print("\n".join(map(str, write(args.write))))
        return 0
    torch.set_num_threads(1)
    own = [server_way(args.url, args.served, args.more)] if args.url else [*transformers_ways(), *openvino_ways()]
    try:
        verdicts = judged(own, args.sessions)
    except BenchError as error:
        say(f"bench: error: {error}")
        return 1
    print("\n".join(table(("engine", "", "texts", f"p, first {FIRSTS}", ""), [each.cells for each in verdicts])))
    if not args.url:
        rows = [{**asdict(each), "refused": each.refused} for each in verdicts]
        record.save(args.out, {"rows": rows, "alpha": ALPHA}, {"sessions": args.sessions})
    return 1 if any(each.control and each.refused for each in verdicts) else 0


if __name__ == "__main__":
    sys.exit(main())
