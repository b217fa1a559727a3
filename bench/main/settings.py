"""What to measure, and the command line that says so."""

from __future__ import annotations

import argparse
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from bench.harness import RESULTS
from bench.harness.entry import add_head_argument, head_of, located, shown_model
from bench.harness.machine import dtype_of
from demo_pair import DRAFT, TARGET, held_out_prompts
from specwire.core.invalid import InvalidParameter
from specwire.core.model import AUTO
from specwire.rpc.server_options import SERVED_DTYPES


@dataclass(frozen=True, slots=True)
class Settings:
    """What to measure. `repeats` below 6 leave the intervals without 95 % coverage.

    head: of a row that has one beside the target, too; None for no such row.
    box: specwire in one process and in several on its fastest runtime, in place of assisted generation and of specwire
    on torch; see `bench.main.box`.
    """

    target: str
    draft: str
    prompts: int = 32
    tokens: int = 128
    repeats: int = 7
    dtype: str = "bfloat16"
    ray: bool = True
    head: Path | None = None
    box: bool = False

    def __post_init__(self) -> None:
        for name, model in (("target", self.target), ("draft", self.draft)):
            if model.startswith(("/", ".", "~")) and not Path(model).is_dir():
                raise InvalidParameter(name, f"there is no directory {model}")
        available = len(held_out_prompts())
        if not 1 <= self.prompts <= available:
            raise InvalidParameter("prompts", f"must be from 1 to {available}, not {self.prompts}")
        for name, value in (("tokens", self.tokens), ("repeats", self.repeats)):
            if value < 1:
                raise InvalidParameter(name, f"must be at least 1, not {value}")

    def shown(self) -> dict[str, object]:
        """For others to read: models without where this machine keeps them."""
        models = {"target": shown_model(self.target), "draft": shown_model(self.draft)}
        return {**asdict(self), **models, "head": None if self.head is None else shown_model(str(self.head))}


def parser() -> argparse.ArgumentParser:
    line = argparse.ArgumentParser(
        prog="python -m bench.main.run",
        description="Measure specwire against transformers and OpenVINO GenAI, interleaved on the same cores.",
        epilog="Exit code 1: it could not be measured, or a text differs from transformers' and is no near-tie.",
    )
    line.add_argument("--target", default=str(TARGET), metavar="PATH", help="path or hub id (default: the demo pair)")
    line.add_argument("--draft", default=str(DRAFT), metavar="PATH", help="path or hub id (default: the demo pair)")
    add_head_argument(line)
    line.add_argument("--prompts", type=int, metavar="N", help="held-out prompts (default: 32)")
    line.add_argument("--tokens", type=int, metavar="N", help="new tokens for each (default: 128)")
    line.add_argument("--repeats", type=int, metavar="N", help="7 or more for a full measurement (default: 7)")
    line.add_argument("--dtype", default=AUTO, choices=SERVED_DTYPES, help="of all rows (default: %(default)s)")
    line.add_argument("--quick", action="store_true", help="2 prompts x 8 tokens x 1 repeat unless said otherwise")
    line.add_argument("--no-ray", action="store_true", help="specwire's services as plain processes")
    box = "specwire in one process and in several, on its fastest runtime, in place of rows b, c, d and h"
    line.add_argument("--box", action="store_true", help=box)
    own = "JSON; a PNG beside it (default: main.json in bench/results, with --box box.json)"
    line.add_argument("--out", type=Path, metavar="FILE", help=own)
    return line


def settings_of(args: argparse.Namespace) -> Settings:
    """Also says in `args` where the results go, unless they do."""
    args.out = args.out or RESULTS / ("box.json" if args.box else "main.json")
    usual = (2, 8, 1) if args.quick else (32, 128, 7)
    given = (args.prompts, args.tokens, args.repeats)
    prompts, tokens, repeats = (
        default if value is None else value for default, value in zip(usual, given, strict=True)
    )
    target, draft, head = located(args.target), located(args.draft), None if args.box else head_of(args)
    asked = Settings(target, draft, prompts, tokens, repeats, args.dtype, not args.no_ray, head, args.box)
    return replace(asked, dtype=dtype_of(asked.dtype))
