"""The settings of a measurement of a large target, and its command line."""

from __future__ import annotations

import argparse
from dataclasses import asdict, dataclass
from pathlib import Path

from bench.gpu.shapes import SHAPES
from bench.harness import RESULTS
from bench.peers.transformers_peer import DTYPES
from specwire.core.invalid import InvalidParameter

OUT = RESULTS / "gpu.json"


@dataclass(frozen=True, slots=True)
class GpuSettings:
    """What to measure.

    Attributes:
        target, draft: names of SHAPES.
        rows, windows: of steps: sessions, and positions of each.
        sessions: at once, where tokens per second are measured.
        prompt: tokens behind which everything is measured.
        drafts: tokens that are drafted for each step; by a head, at most.
        acceptance: of the oracle, of the drafter and of the head.
    """

    target: str = "llama-8b"
    draft: str = "llama-1b"
    device: str = "cuda:0"
    dtype: str = "bfloat16"
    compiled: bool = False
    rows: tuple[int, ...] = (1, 8, 32, 128)
    windows: tuple[int, ...] = (1, 4, 8)
    sessions: tuple[int, ...] = (1, 8, 32)
    prompt: int = 512
    tokens: int = 128
    drafts: int = 4
    acceptance: float = 0.8
    repeats: int = 7

    def __post_init__(self) -> None:
        for name in ("rows", "windows", "sessions"):
            sizes = getattr(self, name)
            if not sizes or min(sizes) < 1:
                raise InvalidParameter(name, f"must each be at least 1, not {sizes}")
        for name, least in (("prompt", 2), ("tokens", 2), ("drafts", 1), ("repeats", 1)):
            if getattr(self, name) < least:
                raise InvalidParameter(name, f"must be at least {least}, not {getattr(self, name)}")
        least = self.drafts + 2  # or the first step might be the whole text, which takes no time that is measured
        if self.tokens < least:
            raise InvalidParameter(
                "tokens", f"must be at least {least} with drafts of {self.drafts}, not {self.tokens}"
            )
        if not 0 <= self.acceptance <= 1:  # nor NaN
            raise InvalidParameter("acceptance", f"must be from 0 to 1, not {self.acceptance:g}")
        if SHAPES[self.target].vocabulary != SHAPES[self.draft].vocabulary:
            raise InvalidParameter("draft", f"{self.draft} has another vocabulary than {self.target}")

    @property
    def slots(self) -> int:
        return max(*self.rows, *self.sessions)

    @property
    def context(self) -> int:
        """Positions that the longest text comes to, and the drafts behind it."""
        return self.prompt + max(self.tokens, max(self.windows)) + self.drafts + 1

    def shown(self) -> dict[str, object]:
        return asdict(self)


def parser() -> argparse.ArgumentParser:
    usual = GpuSettings()
    line = argparse.ArgumentParser(
        prog="python -m bench.gpu.run",
        description="Measure a target of random weights in this process: steps against the floor, tokens per second.",
    )
    line.add_argument("--target", choices=SHAPES, help="shape (default: llama-8b)")
    line.add_argument("--draft", choices=SHAPES, help="shape (default: llama-1b)")
    line.add_argument("--device", help="such as cuda:0, the default, or cpu")
    line.add_argument("--dtype", choices=DTYPES, help="(default: bfloat16)")
    line.add_argument("--compile", action="store_true", help="static shapes through torch.compile, minutes at start")
    line.add_argument("--rows", metavar="N,N", help="of steps: sessions (default: 1,8,32,128)")
    line.add_argument("--windows", metavar="N,N", help="of steps: positions of each (default: 1,4,8)")
    line.add_argument("--sessions", metavar="N,N", help="at once, for tokens per second (default: 1,8,32)")
    for name, meaning in (
        ("prompt", "tokens of each prompt"),
        ("tokens", "new tokens"),
        ("drafts", "draft tokens for each step"),
        ("repeats", "7 or more for a full measurement"),
    ):
        line.add_argument(f"--{name}", type=int, metavar="N", help=f"{meaning} (default: {getattr(usual, name)})")
    line.add_argument("--acceptance", type=float, metavar="A", help="of the drafts, from 0 to 1 (default: 0.8)")
    line.add_argument("--quick", action="store_true", help="tiny shapes on cpu unless said otherwise: does it run?")
    line.add_argument("--out", type=Path, default=OUT, metavar="FILE", help="JSON")
    return line


QUICK = {
    "target": "tiny",
    "draft": "tiny-draft",
    "device": "cpu",
    "dtype": "float32",
    "rows": (1, 2),
    "windows": (1, 4),
    "sessions": (1, 2),
    "prompt": 16,
    "tokens": 24,
    "repeats": 1,
}


def settings_of(args: argparse.Namespace) -> GpuSettings:
    """InvalidParameter names what is wrong."""
    chosen: dict[str, object] = dict(QUICK) if args.quick else {}
    for name in ("target", "draft", "device", "dtype", "prompt", "tokens", "drafts", "repeats", "acceptance"):
        if getattr(args, name) is not None:
            chosen[name] = getattr(args, name)
    for name in ("rows", "windows", "sessions"):
        if getattr(args, name) is not None:
            chosen[name] = _sizes(name, getattr(args, name))
    return GpuSettings(**chosen, compiled=args.compile)  # type: ignore[arg-type]  # each of its own type


def _sizes(name: str, text: str) -> tuple[int, ...]:
    try:
        return tuple(sorted({int(each) for each in text.split(",")}))
    except ValueError:
        raise InvalidParameter(name, f"must be numbers with commas between them, not {text!r}") from None
