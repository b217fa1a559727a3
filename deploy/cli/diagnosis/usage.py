"""`specwire usage`: what sessions used by tenant and model, from the files of `specwire verify --usage-log`."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from deploy.cli.terminal import table
from specwire.rpc.process import say

EPILOG = """\
FILE is what `specwire verify --usage-log FILE` has written, parts that were moved away included. Give those of all
verifiers that sessions may have moved between: a session's tokens then count once, wherever they were decided."""
GIB_HOUR = float(1 << 30) * 3600.0
HEAD = ("tenant", "model", "sessions", "prompt tokens", "computed", "decided", "tested", "scored", "GiB h of K and V")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog, parser.formatter_class = EPILOG, argparse.RawDescriptionHelpFormatter
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE", help="records of one or several verifiers")
    parser.add_argument("--json", action="store_true", help="a line of JSON for each tenant and model")


def run(args: argparse.Namespace) -> int:
    """Print the sums; returns the exit code: 1 where a file cannot be read."""
    # It needs what services need, which --help does not.
    from verify_service.usage import read_records, totals

    records, spoilt = [], 0
    for file in args.files:
        try:
            for record in read_records(file):
                if record is None:
                    spoilt += 1
                else:
                    records.append(record)
        except OSError as error:
            say(f"specwire usage: error: {file}: {error.strerror}")
            return 1
    if spoilt:
        say(f"specwire usage: {spoilt} lines are no records, and are left out")
    found = totals(records)
    if args.json:
        for (tenant, model), usage in found.items():
            print(json.dumps({"tenant": tenant, "model": model, **usage._asdict()}))
        return 0
    rows: list[tuple[str, ...]] = [HEAD]
    for (tenant, model), usage in found.items():
        *counts, kept = usage
        rows.append((tenant or "-", model, *(f"{count:,}" for count in counts), f"{kept / GIB_HOUR:,.3f}"))
    print(table(rows))
    return 0
