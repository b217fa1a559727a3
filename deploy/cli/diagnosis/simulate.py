"""`specwire simulate`: what a setting would do, in virtual time, without any model."""

from __future__ import annotations

import argparse
import json
import math
import sys

from specwire.core.invalid import InvalidParameter
from specwire.core.policy.tunables import MOST_HEAD_DEPTH
from specwire.sim import (
    HEADS,
    Cell,
    InvalidCell,
    best_textbook,
    optimum,
    parse_policy,
    simulate,
)
from specwire.sim.fleet import SimFleet, simulate_fleet
from specwire.sim.simulation import Policy

Row = dict[str, str | float]

EPILOG = """\
One session: tokens per second of each policy, its time to the first token, and what the verifier did for it.
With --sessions: a pool of verifiers and drafters that serves so many sessions, arriving at random.
Policies: auto, plain, off, lockstep:K, stream:CHUNK,RUN_AHEAD[,DUE], textbook:K, stream-wait:CHUNK,RUN_AHEAD; with a
head beside the target also heads (no drafter), and auto has both.
Devices do what the flags say and software takes no time, so results are an upper reference, not a measurement."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog, parser.formatter_class = EPILOG, argparse.RawDescriptionHelpFormatter
    add = parser.add_argument
    add("--forward", type=float, default=30.0, metavar="MS", help="target forward of one token (default: %(default)s)")
    add("--slope", type=float, default=0.02, metavar="SHARE", help="of it per further token (default: %(default)s)")
    add("--draft", type=float, default=8.0, metavar="MS", help="time of a draft token (default: %(default)s)")
    add(
        "--rtt",
        default="80",
        metavar="MS[,MS...]",
        help="round trip to the verifier (default: %(default)s); several: drawn by session",
    )
    add("--acceptance", type=float, default=0.8, metavar="SHARE", help="of draft tokens (default: %(default)s)")
    add("--tokens", type=int, default=256, metavar="N", help="of each session's output (default: %(default)s)")
    add("--append", type=float, default=0.0, metavar="MS", help="until the log acknowledges (default: %(default)s)")
    add("--seed", type=int, default=0, metavar="N", help="of all that is drawn (default: %(default)s)")
    add("--policy", action="append", metavar="POLICY", help="how to draft; may be repeated (default: auto and plain)")
    add("--json", action="store_true", help="print one JSON object instead of a table")
    one = parser.add_argument_group("one session")
    one.add_argument("--shared-host", action="store_true", help="drafter and verifier compute on one machine, in turns")
    one.add_argument("--head", type=float, metavar="MS", help="forward of a head beside the target (default: no head)")
    one.add_argument(
        "--head-acceptance",
        metavar="SHARE[,SHARE...]",
        help="of its tokens, by how many it drafted before; it drafts as many in a row as are named",
    )
    one.add_argument("--best", action="store_true", help="also search the best fixed setting and textbook's best K")
    pool = parser.add_argument_group("a pool")
    pool.add_argument("--sessions", type=int, metavar="N", help="sessions in all")
    pool.add_argument("--verifiers", type=int, default=1, metavar="N", help="(default: %(default)s)")
    pool.add_argument("--drafters", type=int, default=1, metavar="N", help="(default: %(default)s)")
    pool.add_argument(
        "--arrivals", type=float, default=1.0, metavar="PER_S", help="sessions per second (default: %(default)s)"
    )
    pool.add_argument("--slots", type=int, default=64, metavar="N", help="sessions per verifier (default: %(default)s)")
    pool.add_argument(
        "--session-slope", type=float, metavar="SHARE", help="of a forward per further session (default: --slope)"
    )
    pool.add_argument(
        "--draft-slope", type=float, default=0.0, metavar="SHARE", help="of a draft pass per further session"
    )
    pool.add_argument("--prompt", type=int, default=64, metavar="N", help="tokens (default: %(default)s)")
    pool.add_argument("--prefill", type=float, default=0.0, metavar="MS", help="per prompt token")


def run(args: argparse.Namespace) -> int:
    try:
        _check(args)
        policies = [parse_policy(spec) for spec in args.policy or ("auto", "plain")]
        _check_head(args, policies)
        rows = _one(args, policies) if args.sessions is None else _pool(args, policies)
    except (InvalidCell, InvalidParameter) as error:
        print(f"specwire simulate: error: {error}", file=sys.stderr)
        return 2
    print(json.dumps({"simulated": rows}, indent=2) if args.json else _table(rows))
    return 0


def _check(args: argparse.Namespace) -> None:
    """Name a wrong value as it was given, where the simulator has another unit or name for it."""
    for name in ("forward", "draft", "arrivals"):
        if not 0 < getattr(args, name) < math.inf:
            raise InvalidCell(f"{name}: must be positive, not {getattr(args, name):g}")
    for name in ("append", "prefill"):
        if not 0 <= getattr(args, name) < math.inf:
            raise InvalidCell(f"{name}: must not be negative, not {getattr(args, name):g}")


def _check_head(args: argparse.Namespace, policies: list[Policy]) -> None:
    if args.head is None:
        if args.head_acceptance is not None:
            raise InvalidCell(f"head-acceptance: is of a head, and needs --head, not only {args.head_acceptance!r}")
        if HEADS in policies:
            raise InvalidCell("policy: heads needs a head: --head and --head-acceptance")
        return
    if args.sessions is not None:
        raise InvalidCell(f"head: is simulated for one session, without --sessions, not for {args.sessions}")
    if not 0 < args.head < math.inf:
        raise InvalidCell(f"head: must be positive, not {args.head:g}")
    if args.head_acceptance is None:
        raise InvalidCell("head: needs --head-acceptance")


def _head_rates(spec: str | None) -> tuple[float, ...]:
    if spec is None:
        return ()
    try:
        rates = tuple(map(float, spec.split(",")))
    except ValueError as error:
        raise InvalidCell(f"head-acceptance: must be numbers joined by commas, not {spec!r}") from error
    if not all(0 <= rate <= 1 for rate in rates) or len(rates) > MOST_HEAD_DEPTH:
        raise InvalidCell(f"head-acceptance: must be up to {MOST_HEAD_DEPTH} numbers from 0 to 1, not {spec!r}")
    return rates


def _rtts_us(spec: str) -> tuple[float, ...]:
    try:
        rtts = tuple(1000.0 * float(each) for each in spec.split(","))
    except ValueError as error:
        raise InvalidCell(f"rtt: must be milliseconds, or several joined by commas, not {spec!r}") from error
    if not all(0 <= rtt < math.inf for rtt in rtts):
        raise InvalidCell(f"rtt: must not be negative, not {spec!r}")
    return rtts


def _one(args: argparse.Namespace, policies: list[Policy]) -> list[Row]:
    rtts = _rtts_us(args.rtt)
    if len(rtts) != 1:
        raise InvalidCell(f"rtt: one session has one, not {args.rtt!r}")
    cell = Cell(
        V_us=1000.0 * args.forward,
        slope=args.slope,
        draft_us=1000.0 * args.draft,
        rtt_us=rtts[0],
        acceptance=args.acceptance,
        seed=args.seed,
        tokens=args.tokens,
        shared_host=args.shared_host,
        append_us=1000.0 * args.append,
        head=_head_rates(args.head_acceptance),
        head_us=1000.0 * (args.head or 0.0),
    )
    found = [(policy.name, simulate(cell, policy)) for policy in policies]
    if args.best:
        found += [(f"best: {best.policy.name}", best.result) for best in (optimum(cell), best_textbook(cell))]
    return [
        {
            "policy": name,
            "tokens/s": round(result.tokens_per_second, 2),
            "first token ms": round(result.time_to_first_us / 1000, 2),
            "forwards": result.forwards,
            "saved": result.forwards_saved,
            "proposed": result.drafts.proposed,
            "tested": result.drafts.tested,
            "accepted": result.drafts.accepted,
            "ledger ms": round(result.ledger_us / 1000, 2),
        }
        for name, result in found
    ]


def _pool(args: argparse.Namespace, policies: list[Policy]) -> list[Row]:
    fleet = SimFleet(
        sessions=args.sessions,
        verifiers=args.verifiers,
        drafters=args.drafters,
        V_us=1000.0 * args.forward,
        slope=args.slope,
        draft_us=1000.0 * args.draft,
        arrivals_per_second=args.arrivals,
        rtts_us=_rtts_us(args.rtt),
        acceptance=args.acceptance,
        session_slope=args.session_slope,
        draft_slope=args.draft_slope,
        prompt=args.prompt,
        prefill_us=1000.0 * args.prefill,
        tokens=args.tokens,
        slots=args.slots,
        append_us=1000.0 * args.append,
        seed=args.seed,
    )
    return [_pool_row(policy, fleet) for policy in policies]


def _pool_row(policy: Policy, fleet: SimFleet) -> Row:
    result = simulate_fleet(fleet, policy)
    first, token = result.first_us, result.per_token_us
    return {
        "policy": policy.name,
        "tokens/s": round(result.tokens_per_second, 1),
        **{f"first ms p{p}": round(value / 1000, 1) for p, value in zip((50, 95, 99), first, strict=True)},
        **{f"token ms p{p}": round(value / 1000, 2) for p, value in zip((50, 95, 99), token, strict=True)},
        "verifiers busy": round(result.verifier_share, 3),
        "drafters busy": round(result.drafter_share, 3),
        "batch": round(result.batch, 2),
        "most at once": result.most_at_once,
    }


def _table(rows: list[Row]) -> str:
    names = list(rows[0])
    cells = [names, *([str(row[name]) for name in names] for row in rows)]
    widths = [max(len(line[index]) for line in cells) for index in range(len(names))]
    return "\n".join("  ".join([line[0].ljust(widths[0]), *map(str.rjust, line[1:], widths[1:])]) for line in cells)
