"""Record what `make demo` shows: python -m bench.demo --help.

The demo is run several times, each on a stack of its own, and compares drafting on with off by itself. Its figures of
each run are samples: told are medians with their intervals, and who guessed how many of all tokens.
"""

from __future__ import annotations

import argparse
import json
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from bench.harness import RESULTS, ROOT, record
from bench.harness.entry import terminable
from bench.harness.interval import Estimate, estimate
from bench.harness.report import Bar, at_most, bar_lines, table
from bench.harness.runs import BenchError
from demo_pair import DEMO_TOKENS
from specwire.rpc.process import say

OUT = RESULTS / "demo.json"
COMMAND = "import sys; from deploy.cli.main import main; sys.exit(main())"
# Seconds: for one run of the demo, and for its services to end.
LIMIT_S, ENDING_S = 600.0, 30.0
SPEEDS = ("median_ratio", "tokens_per_second_off", "tokens_per_second_on")
SOURCES = ("text", "head", "drafter")


def told_by_demo(options: Sequence[str]) -> dict[str, Any]:
    """What one run of `specwire demo --json` tells; BenchError if it tells nothing."""
    command = (sys.executable, "-c", COMMAND, "demo", "--json", *options)
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        try:
            said, _ = process.communicate(timeout=LIMIT_S)
        except BaseException as error:
            process.terminate()  # it ends its services
            process.wait(ENDING_S)
            if isinstance(error, subprocess.TimeoutExpired):
                raise BenchError(f"the demo took longer than {LIMIT_S:g} s") from None
            raise
    # 1 also where texts differ by more than a near-tie, of which it tells.
    if process.returncode not in (0, 1) or not said.strip():
        raise BenchError(f"the demo ended with {process.returncode}")
    found: dict[str, Any] = json.loads(said)
    return found


def rows_of(runs: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Of each temperature: speeds and their ratio, medians over runs; of all tokens who guessed which part."""
    rows = []
    for same in zip(*(run["temperatures"] for run in runs), strict=True):
        whole = [each["all"] for each in same]
        tokens = sum(one["tokens"] for one in whole)
        forwards = sum(one["tokens"] / one["tokens_per_forward"] for one in whole if one["tokens"])
        texts = [prompt for each in same for prompt in each["prompts"]]
        rows.append(
            {
                "temperature": same[0]["temperature"],
                **{name: asdict(estimate([one[name] for one in whole])) for name in SPEEDS},
                "tokens": tokens,
                "tokens_per_forward": tokens / forwards if forwards else 0.0,
                "guessed": {
                    name: sum(one["guessed"][name] * one["tokens"] for one in whole) / max(1, tokens)
                    for name in SOURCES
                },
                "texts": len(texts),
                "identical": sum(text["identical"] for text in texts),
                "near_ties": sum(bool(text["parting"] and text["parting"]["near_tie"]) for text in texts),
            }
        )
    return rows


def bars_of(rows: Sequence[dict[str, Any]]) -> list[Bar]:
    differing = float(sum(row["texts"] - row["identical"] - row["near_ties"] for row in rows))
    return [at_most("texts that differ by more than a near-tie", Estimate(differing, differing, differing, 1.0), 0)]


def report(found: dict[str, Any], bars: Sequence[Bar]) -> str:
    head = ("temperature", "tokens/s off", "on", "gain", "from", "to", "per forward", *SOURCES)
    body = []
    for row in found["rows"]:
        ratio = (row["median_ratio"][part] for part in ("value", "low", "high"))
        speeds = (f"{row[name]['value']:.0f}" for name in SPEEDS[1:])
        shares = (f"{row['guessed'][name]:.0%}" for name in SOURCES)
        numbers = (f"{each:.2f}" for each in (*ratio, row["tokens_per_forward"]))
        body.append((f"{row['temperature']:g}", *speeds, *numbers, *shares))
    computed = f"computed by {found['runtime']} in {found['dtype']}"
    return "\n".join([*table(head, body), "", computed, "", *bar_lines(bars)])


def measure(args: argparse.Namespace) -> tuple[dict[str, Any], list[Bar]]:
    """The record, but for what the harness adds to it."""
    options = ["--count", str(args.count), "--max-tokens", str(args.max_tokens), *args.options]
    runs = []
    for number in range(args.repeats):
        say(f"bench: demo {number + 1} of {args.repeats}")
        runs.append(told_by_demo(options))
    rows = rows_of(runs)
    bars = bars_of(rows)
    shared = {name: runs[0][name] for name in ("dtype", "runtime")}
    raw = [{f"{each['temperature']:g}": each["all"] for each in run["temperatures"]} for run in runs]
    return {**shared, "rows": rows, "bars": [asdict(bar) for bar in bars], "raw": raw}, bars


def parser() -> argparse.ArgumentParser:
    line = argparse.ArgumentParser(prog="python -m bench.demo", description=(__doc__ or "").partition(":")[0])
    line.add_argument("--repeats", type=int, default=7, metavar="N", help="runs of the demo (default: %(default)s)")
    line.add_argument("--count", type=int, default=12, metavar="N", help="prompts at most (default: %(default)s)")
    line.add_argument(
        "--max-tokens", type=int, default=DEMO_TOKENS, metavar="N", help="of a text (default: %(default)s)"
    )
    line.add_argument("--out", type=Path, default=OUT, metavar="FILE", help="JSON")
    line.add_argument("options", nargs="*", metavar="OPTION", help="of `specwire demo`, behind --")
    return line


def main(argv: Sequence[str] | None = None) -> int:
    args = parser().parse_args(argv)
    if record.refused(args, ("repeats", "count", "max_tokens")):
        return 2
    try:
        with terminable():
            found, bars = measure(args)
    except (BenchError, ValueError) as error:
        say(f"bench: error: {error}")
        return 1
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    record.write(args.out, found, args, ("repeats", "count", "max_tokens", "options"))
    print(report(found, bars))
    return 0 if all(bar.holds for bar in bars) else 1


if __name__ == "__main__":
    sys.exit(main())
