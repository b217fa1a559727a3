"""What to soak, and the command line that says so."""

from __future__ import annotations

import argparse
from dataclasses import dataclass

from bench.harness import RESULTS
from bench.soak import record
from bench.soak.monkey import EVERY_S
from bench.soak.pairs import DEMO, ON_VLLM, PAIRS, SCRIPTED
from specwire.core.invalid import InvalidParameter

# Where each pair's record is.
RECORDS = {
    SCRIPTED: RESULTS / "soak.json",
    DEMO: RESULTS / "soak_demo.json",
    ON_VLLM: RESULTS / "soak_vllm.json",
}


@dataclass(frozen=True, slots=True)
class SoakSettings:
    """`every`: mean seconds between faults; 0 for none. What has begun when `minutes` are over still ends."""

    minutes: float = 10.0
    seed: int = 1
    sessions: int = 32
    pair: str = SCRIPTED
    every: float = EVERY_S

    def __post_init__(self) -> None:
        for name, value, most in (("minutes", self.minutes, 1440.0), ("every", self.every, 3600.0)):
            if not 0 <= value <= most:
                raise InvalidParameter(name, f"must be from 0 to {most:g}, not {value}")
        if not 1 <= self.sessions <= 256:
            raise InvalidParameter("sessions", f"must be from 1 to 256, not {self.sessions}")
        if self.pair not in PAIRS:
            raise InvalidParameter("pair", f"must be one of {', '.join(PAIRS)}, not {self.pair!r}")


def parser() -> argparse.ArgumentParser:
    line = argparse.ArgumentParser(
        prog="python -m bench.soak.run",
        description="Stream to many clients while services are killed, stopped, restarted, and lines cut and stalled.",
        epilog="Exit code 1: something was lost, repeated, wrong, or did not end as asked; or it was ended early "
        "(Ctrl-C), or nothing was broken meanwhile.",
    )
    line.add_argument("--minutes", type=float, default=10.0, metavar="N", help="default: 10")
    line.add_argument("--seed", type=int, default=1, metavar="N", help="of sessions and faults (default: 1)")
    line.add_argument("--sessions", type=int, default=32, metavar="N", help="at a time (default: 32)")
    line.add_argument("--pair", choices=sorted(PAIRS), default=SCRIPTED, help="whose texts (default: scripted)")
    line.add_argument("--every", type=float, default=EVERY_S, metavar="S", help="mean seconds between faults; 0: none")
    line.add_argument("--quiet", action="store_true", help="do not tell each fault")
    record.add_argument(line, *RECORDS.values())
    return line


def settings_of(args: argparse.Namespace) -> SoakSettings:
    """Raises InvalidParameter."""
    return SoakSettings(args.minutes, args.seed, args.sessions, args.pair, args.every)
