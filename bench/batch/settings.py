"""The settings of a measurement of many sessions at once, and its command line."""

from __future__ import annotations

import argparse
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from bench.batch.arrivals import LatencyTarget
from bench.harness import RESULTS
from bench.harness.entry import add_head_argument, head_of, located, shown_model
from bench.harness.machine import dtype_of
from demo_pair import DRAFT, TARGET, held_out_prompts
from specwire.core.invalid import InvalidParameter
from specwire.core.model import AUTO, RUNTIMES
from specwire.core.policy.controller import InvalidPlan, parse_plan
from specwire.rpc.server_options import SERVED_DTYPES

OUT = RESULTS / "batch.json"
LEVELS = (1, 2, 4, 8, 16, 32)
# A repeat of a level has at least so many sessions, and so many groups that begin together: one group of many is over
# in a second or two, of which a hiccup is a large part.
LEAST_SESSIONS, LEAST_GROUPS = 8, 4
# Seven would do for an interval of 95 %, from the least of them to the greatest; of nine it leaves out one at each end.
REPEATS = 9
PLAN = "lockstep:4"
# Of `specwire up`: the fastest that is installed and agrees with the model.
RUNTIME = "auto"
SHARES = (0.5, 0.8)
SEEDS = (1, 2, 3)


@dataclass(frozen=True, slots=True)
class BatchSettings:
    """What to measure.

    Attributes:
        levels: sessions at once.
        repeats: below 6 the intervals are without 95 % coverage.
        target_threads: of the target's forwards in `specwire up`; None for its default.
        runtime: that `specwire up` computes both models with.
        head: beside the target, of rows that have one; None for no such rows.
        plan: of the row with drafting on, whatever it costs (`specwire.core.policy.controller.parse_plan`).
        requests: of each load that arrives; 0 for none.
        in_time: what counts as such there.
    """

    target: str
    draft: str
    levels: tuple[int, ...] = LEVELS
    tokens: int = 128
    repeats: int = REPEATS
    dtype: str = "bfloat16"
    ray: bool = True
    plan: str = PLAN
    requests: int = 64
    in_time: LatencyTarget = LatencyTarget(500.0, 50.0)
    target_threads: int | None = None
    runtime: str = RUNTIME
    head: Path | None = None

    def __post_init__(self) -> None:
        available = len(held_out_prompts())
        if not self.levels or not all(1 <= level <= available for level in self.levels):
            raise InvalidParameter("levels", f"must each be from 1 to {available}, not {self.levels}")
        for name, value, least in (
            ("tokens", self.tokens, 2),
            ("repeats", self.repeats, 1),
            ("requests", self.requests, 0),
            ("target-threads", 1 if self.target_threads is None else self.target_threads, 1),
        ):
            if value < least:
                raise InvalidParameter(name, f"must be at least {least}, not {value}")
        try:
            parse_plan(self.plan)
        except InvalidPlan as error:
            raise InvalidParameter("plan", str(error)) from error

    @property
    def most(self) -> int:
        return max(self.levels)

    @property
    def prompts(self) -> int:
        return max(map(self._sessions, self.levels))

    def groups(self, level: int) -> list[int]:
        """Each group's first prompt."""
        return list(range(0, self._sessions(level) - level + 1, level))

    def _sessions(self, level: int) -> int:
        """Of a repeat, as far as there are prompts."""
        return min(max(level * LEAST_GROUPS, LEAST_SESSIONS), len(held_out_prompts()))

    def shown(self) -> dict[str, object]:
        """For the record: models without their folders on this machine."""
        models = {"target": shown_model(self.target), "draft": shown_model(self.draft)}
        return {**asdict(self), **models, "head": None if self.head is None else shown_model(str(self.head))}


def parser() -> argparse.ArgumentParser:
    line = argparse.ArgumentParser(
        prog="python -m bench.batch.run",
        description="Measure many sessions at once, beside transformers, interleaved on the same cores.",
        epilog="Exit code 1: it could not be measured, or a text differs from drafting off and is no near-tie.",
    )
    line.add_argument("--target", default=str(TARGET), metavar="PATH", help="path or hub id (default: the demo pair)")
    line.add_argument("--draft", default=str(DRAFT), metavar="PATH", help="path or hub id (default: the demo pair)")
    add_head_argument(line)
    line.add_argument("--levels", metavar="N,N", help="sessions at once (default: 1,2,4,8,16,32)")
    line.add_argument("--tokens", type=int, metavar="N", help="new tokens for each (default: 128)")
    line.add_argument("--repeats", type=int, metavar="N", help="7 or more for a full measurement (default: 9)")
    line.add_argument("--requests", type=int, metavar="N", help="of each load that arrives, 0: none (default: 64)")
    line.add_argument("--dtype", default=AUTO, choices=SERVED_DTYPES, help="of all rows (default: %(default)s)")
    line.add_argument("--plan", default=PLAN, metavar="PLAN", help="of the row with drafting on (default: %(default)s)")
    line.add_argument("--first-ms", type=float, default=500.0, metavar="MS", help="in time: first token (default: 500)")
    line.add_argument("--pause-ms", type=float, default=50.0, metavar="MS", help="and 95 %% of pauses (default: 50)")
    line.add_argument("--target-threads", type=int, metavar="N", help="of specwire up (default: half of the cores)")
    line.add_argument("--runtime", default=RUNTIME, choices=RUNTIMES, help="of specwire up (default: %(default)s)")
    line.add_argument("--quick", action="store_true", help="levels 1,2 x 8 tokens x 1 repeat, 4 requests unless said")
    line.add_argument("--no-ray", action="store_true", help="specwire's services as plain processes")
    line.add_argument("--out", type=Path, default=OUT, metavar="FILE", help="JSON; a PNG beside it")
    return line


def settings_of(args: argparse.Namespace) -> BatchSettings:
    """InvalidParameter names what is wrong."""
    levels, tokens, repeats, requests = ((1, 2), 8, 1, 4) if args.quick else (LEVELS, 128, REPEATS, 64)
    asked = BatchSettings(
        located(args.target),
        located(args.draft),
        levels if args.levels is None else levels_of(args.levels, "levels"),
        tokens if args.tokens is None else args.tokens,
        repeats if args.repeats is None else args.repeats,
        args.dtype,
        not args.no_ray,
        args.plan,
        requests if args.requests is None else args.requests,
        LatencyTarget(args.first_ms, args.pause_ms),
        args.target_threads,
        args.runtime,
        head_of(args),
    )
    return replace(asked, dtype=dtype_of(asked.dtype))


def levels_of(text: str, name: str) -> tuple[int, ...]:
    """Numbers with commas between them. InvalidParameter names the option."""
    try:
        return tuple(sorted({int(each) for each in text.split(",")}))
    except ValueError:
        raise InvalidParameter(name, f"must be numbers with commas between them, not {text!r}") from None
