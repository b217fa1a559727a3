"""Weigh Ray Serve as the way in: python -m bench.ingress.run --help."""

from __future__ import annotations

import argparse
import importlib.util
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from bench.cluster.run import repeats_of
from bench.harness import RESULTS, entry, machine
from deploy.stack.processes import environment
from specwire.rpc.process import say

OUT = RESULTS / "ingress.json"
REPEATS = 7
# Of ray[serve]'s packages, those that this project has no other use for.
NEEDED = ("ray", "fastapi", "aiohttp")
INSTALL = "python -m pip install -c constraints.txt -e '.[serve]'"


def parser() -> argparse.ArgumentParser:
    line = argparse.ArgumentParser(
        prog="python -m bench.ingress.run",
        description="Streams over HTTP to an orchestrator, directly and through Ray Serve, in turns.",
        epilog="Exit code 1: it could not be measured, or a text differed. Needs the extra `serve`.",
    )
    line.add_argument("--repeats", type=int, default=REPEATS, metavar="N", help="of both (default: %(default)s)")
    line.add_argument("--out", type=Path, default=OUT, metavar="FILE", help="JSON")
    return line


def main(argv: Sequence[str] | None = None) -> int:
    args = parser().parse_args(argv)
    if missing := [name for name in NEEDED if importlib.util.find_spec(name) is None]:
        say(f"bench: error: {', '.join(missing)} not installed: {INSTALL}")
        return 1
    # Ray Serve comes with these.
    from bench.ingress.measure import STREAMS, TOKENS, V_MS, Measured, measure
    from bench.ingress.results import bars, shown, write

    head = {"machine": machine.describe(), "commit": machine.commit()}

    def tell(measured: Measured, out: Path) -> bool:
        asked = {"repeats": args.repeats, "streams": STREAMS, "tokens": TOKENS, "V_ms": V_MS}
        write(measured, {"arguments": asked, **head}, out)
        print(shown(measured))
        return all(bar.holds for bar in bars(measured))

    return entry.run(args, repeats_of, lambda repeats: measure(repeats, say), tell)


if __name__ == "__main__":
    # Ray's workers, which import the deployment, are started from here.
    os.environ.update({**environment(), "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")})
    sys.exit(main())
