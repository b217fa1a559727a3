"""What small measurements share: numbers that must be positive, held-out prompts as tokens, the file they leave."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from tokenizers import Tokenizer

from bench.harness import machine
from demo_pair import held_out_prompts
from specwire.rpc.process import say


def refused(args: argparse.Namespace, names: Sequence[str]) -> bool:
    """Whether one of these arguments is not positive, which is then said."""
    wrong = [name for name in names if getattr(args, name) < 1]
    for name in wrong[:1]:
        say(f"bench: error: {name}: must be at least 1, not {getattr(args, name)}")
    return bool(wrong)


def prompts_of(folder: Path) -> list[list[int]]:
    """The held-out prompts as the model in `folder` reads them."""
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    return [tokenizer.encode(prompt.text, add_special_tokens=False).ids for prompt in held_out_prompts()]


def save(
    path: Path,
    found: Mapping[str, object],
    arguments: Mapping[str, object],
    raw: Sequence[object] | None = None,
    ran_on: Mapping[str, object] | None = None,
) -> dict[str, Any]:
    """`found`, with the machine, the commit and these arguments, as JSON; raw runs on a line of their own each.

    ran_on: machine and commit, where they were read before. Returns the whole, which `scripts.figures` makes tables of.
    """
    whole = {"name": path.stem, **found, **(ran_on or provenance()), "arguments": arguments}
    lines = [f"{json.dumps(key)}: {json.dumps(value)}" for key, value in whole.items()]
    if raw is not None:
        runs = ",\n  ".join(map(json.dumps, raw))
        lines.append(f'"raw": [\n  {runs}\n ]')
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("{\n " + ",\n ".join(lines) + "\n}\n")
    say(f"written to {path}")
    return {**whole, "raw": raw}


def provenance() -> dict[str, object]:
    """Of what runs now, whatever is committed meanwhile."""
    return {"machine": machine.describe(), "commit": machine.commit()}


# ----------------------------------------------------------------------------------------------------------------------
# Where a long run's figures go: a record is of a whole run, as long as the pages say.


class WholeFigures(Protocol):
    """What came of a run. whole: it is what the record is of, whether its bars hold or not."""

    @property
    def whole(self) -> bool: ...

    def write(self, path: Path) -> None: ...


def add_argument(line: argparse.ArgumentParser, *records: Path) -> None:
    names = " or ".join(path.name for path in records)
    line.add_argument("--out", type=Path, metavar="FILE", help=f"JSON (default: a whole run goes into {names})")


def check(out: Path | None) -> None:
    """Before a run. OSError where its folder cannot be made."""
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)


def keep(figures: WholeFigures, out: Path | None, record: Path, say: Callable[[str], None]) -> None:
    """Write it where it was asked for; else over the record, if it may stand there."""
    if out is not None:
        figures.write(out)
    elif figures.whole:
        figures.write(record)
    else:
        say(f"not a whole run: {record.name} is left as it is (--out FILE keeps these figures)")
