"""What to measure, and the command line that says so."""

from __future__ import annotations

import argparse
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from bench.machine import AUTO, MEASURED_DTYPES, dtype_of
from demo_pair import DRAFT, TARGET, held_out_prompts
from specwire.core.invalid import InvalidParameter

HERE = Path(__file__).resolve().parent
OUT = HERE / "results" / "main.json"


@dataclass(frozen=True, slots=True)
class Settings:
    """What to measure. `repeats` below 6 leave the intervals without 95 % coverage."""

    target: str
    draft: str
    prompts: int = 32
    tokens: int = 128
    repeats: int = 7
    dtype: str = "bfloat16"
    ray: bool = True

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
        return {**asdict(self), "target": shown_model(self.target), "draft": shown_model(self.draft)}


def parser() -> argparse.ArgumentParser:
    line = argparse.ArgumentParser(
        prog="python -m bench.run",
        description="Measure specwire against transformers, interleaved on the same cores.",
        epilog="Exit code 1: it could not be measured, or a text differs from transformers' and is no near-tie.",
    )
    line.add_argument("--target", default=str(TARGET), metavar="PATH", help="path or hub id (default: the demo pair)")
    line.add_argument("--draft", default=str(DRAFT), metavar="PATH", help="path or hub id (default: the demo pair)")
    line.add_argument("--prompts", type=int, metavar="N", help="held-out prompts (default: 32)")
    line.add_argument("--tokens", type=int, metavar="N", help="new tokens for each (default: 128)")
    line.add_argument("--repeats", type=int, metavar="N", help="7 or more for a full measurement (default: 7)")
    line.add_argument("--dtype", default=AUTO, choices=MEASURED_DTYPES, help="of all rows (default: %(default)s)")
    line.add_argument("--quick", action="store_true", help="2 prompts x 8 tokens x 1 repeat unless said otherwise")
    line.add_argument("--no-ray", action="store_true", help="specwire's services as plain processes")
    line.add_argument("--out", type=Path, default=OUT, metavar="FILE", help="JSON; a PNG beside it")
    return line


def settings_of(args: argparse.Namespace) -> Settings:
    usual = (2, 8, 1) if args.quick else (32, 128, 7)
    given = (args.prompts, args.tokens, args.repeats)
    prompts, tokens, repeats = (
        default if value is None else value for default, value in zip(usual, given, strict=True)
    )
    asked = Settings(
        located(args.target), located(args.draft), prompts, tokens, repeats, args.dtype, ray=not args.no_ray
    )
    return replace(asked, dtype=dtype_of(asked.dtype))


def shown_model(model: str) -> str:
    """A model's name for others: without where this machine keeps it."""
    path = Path(model)
    if not path.exists():
        return model
    root = HERE.parent
    return str(path.relative_to(root)) if path.is_relative_to(root) else path.name


def located(model: str) -> str:
    """A path made absolute (the processes run elsewhere); a hub id as it is."""
    path = Path(model).expanduser()
    return str(path.resolve()) if path.exists() else model
