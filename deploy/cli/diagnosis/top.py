"""`specwire top`: what an orchestrator is doing, once or every second."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import sys
import termios
import textwrap
import time
import tty
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import grpc
import grpc.aio

from deploy.cli import terminal
from deploy.cli.stack_address import ADDRESS_VARIABLE, explained, found_address
from deploy.cli.terminal import dim, table, wants_colour
from specwire.client.errors import SpecwireError, from_rpc
from specwire.core.invalid import InvalidParameter
from specwire.options import DEFAULT_LISTEN, add_options
from specwire.rpc.channel import open_channel
from specwire.rpc.keys import read_token
from specwire.rpc.process import one_line, say, visible
from specwire.rpc.server_options import check_listen
from specwire.rpc.tls import ClientTls, client_tls
from specwire.v1 import status_pb2 as pb
from specwire.v1 import status_pb2_grpc

# ----------------------------------------------------------------------------------------------------------------------
# A full-screen terminal, for a command that repeats its output.

ALTERNATE, NORMAL = "\x1b[?1049h\x1b[?25l", "\x1b[?25h\x1b[?1049l"
QUIT = b"qQ"


@contextmanager
def whole_screen() -> Iterator[None]:
    """The terminal's alternate screen, without a cursor; afterwards the former one is restored."""
    try:
        sys.stdout.write(ALTERNATE)
        yield
    finally:
        sys.stdout.write(NORMAL)
        sys.stdout.flush()


@contextmanager
def quit_key(stop: asyncio.Event) -> Iterator[None]:
    """Where there is a keyboard, q sets `stop`; what else is typed meanwhile is not shown."""
    if not sys.stdin.isatty():
        yield
        return
    keyboard, loop = sys.stdin.fileno(), asyncio.get_running_loop()

    def on_key() -> None:
        typed = os.read(keyboard, 64)
        if not typed or any(key in QUIT for key in typed):  # nothing: the terminal is gone
            stop.set()

    before = termios.tcgetattr(keyboard)
    tty.setcbreak(keyboard)
    loop.add_reader(keyboard, on_key)
    try:
        yield
    finally:
        loop.remove_reader(keyboard)
        termios.tcsetattr(keyboard, termios.TCSADRAIN, before)


LIMIT_S = 5.0
LEAST_S, MOST_S = 0.1, 3600.0
HOME, CLEAR_LINE, CLEAR_BELOW = "\x1b[H", "\x1b[K", "\x1b[J"
NOT_OFFERED = "this orchestrator shows its status to nobody: start it with --operator-keys"
NONE = "-"
# Between two figures of the head.
GAP = "  "


@dataclass(frozen=True, slots=True)
class TopRequest:
    """Which orchestrator to ask, and how."""

    address: str
    tls: ClientTls | None
    token: str
    interval: float
    once: bool
    as_json: bool


@dataclass(frozen=True, slots=True)
class StatusSample:
    """A status, and when it came by this process's clock in seconds."""

    status: pb.GetStatusResponse
    at: float


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--address",
        metavar="ADDR",
        help=f"of an orchestrator (default: ${ADDRESS_VARIABLE}, else the stack that runs here, else {DEFAULT_LISTEN})",
    )
    parser.add_argument(
        "--interval", type=float, default=1.0, metavar="S", help="between looks (default: %(default)g s)"
    )
    parser.add_argument("--once", action="store_true", help="look once (what stdout gets where it is no terminal)")
    parser.add_argument("--json", action="store_true", help="print a JSON object for each look")
    add_options(parser, "client", peers="the orchestrator")


def run(args: argparse.Namespace) -> int:
    try:
        request = request_of(args)
    except InvalidParameter as error:
        say(f"specwire top: error: {error}")
        return 2
    try:
        return asyncio.run(_watch(request))
    except (SpecwireError, InvalidParameter) as error:
        say(f"specwire top: error: {error.message if isinstance(error, SpecwireError) else one_line(error)}")
        return 1


def request_of(args: argparse.Namespace) -> TopRequest:
    """InvalidParameter names what is wrong."""
    tls = client_tls(args)
    address = args.address or os.environ.get(ADDRESS_VARIABLE) or found_address(tls) or DEFAULT_LISTEN
    check_listen(address, "address")
    if not LEAST_S <= args.interval <= MOST_S:
        raise InvalidParameter("interval", f"must be from {LEAST_S:g} to {MOST_S:g} seconds, not {args.interval:g}")
    once = args.once or not (args.json or terminal.is_terminal())
    return TopRequest(address, tls, read_token(args, os.environ), args.interval, once, args.json)


async def _watch(request: TopRequest) -> int:
    """Repeat until a signal, or look once. A later look that fails is shown, and the next one is waited for."""
    async with open_channel(request.address, request.tls, request.token) as channel:
        try:
            seen = await _look(channel, request)
        except SpecwireError as error:
            raise SpecwireError(error.code, await explained(error, request.address, request.tls)) from None
        if request.once:
            _print(request, seen, None)
            return 0
        stop = asyncio.Event()
        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(number, stop.set)
        if request.as_json:
            await _repeat(channel, request, seen, stop)
            return 0
        with whole_screen(), quit_key(stop):
            await _repeat(channel, request, seen, stop)
    return 0


async def _repeat(channel: grpc.aio.Channel, request: TopRequest, seen: StatusSample, stop: asyncio.Event) -> None:
    before: StatusSample | None = None
    trouble = ""
    while not stop.is_set():
        if not trouble or not request.as_json:
            _print(request, seen, before, trouble)
        try:
            async with asyncio.timeout(request.interval):
                await stop.wait()
        except TimeoutError:
            try:
                before, seen, trouble = seen, await _look(channel, request), ""
            except SpecwireError as error:
                trouble = error.message


async def _look(channel: grpc.aio.Channel, request: TopRequest) -> StatusSample:
    """Raises SpecwireError."""
    stub = status_pb2_grpc.StatusServiceStub(channel)
    try:
        return StatusSample(await stub.GetStatus(pb.GetStatusRequest(), timeout=LIMIT_S), time.monotonic())
    except grpc.aio.AioRpcError as error:
        if error.code() is grpc.StatusCode.UNIMPLEMENTED:
            raise SpecwireError(error.code(), NOT_OFFERED) from None
        raise from_rpc(error, request.address, tls=request.tls is not None) from None


def _print(request: TopRequest, seen: StatusSample, before: StatusSample | None, trouble: str = "") -> None:
    if request.as_json:
        print(json.dumps(as_object(seen, before), allow_nan=False), flush=True)
        return
    columns, rows = terminal.size()
    text = page(seen, before, request.address, trouble, columns if terminal.is_terminal() else None)
    if request.once:
        print(text)
        return
    lines = [line[:columns] for line in text.split("\n")[: rows - 1]]
    sys.stdout.write(HOME + "".join(f"{line}{CLEAR_LINE}\n" for line in lines) + CLEAR_BELOW)
    sys.stdout.flush()


def rate(seen: StatusSample, before: StatusSample | None) -> float:
    """Tokens per second of all sessions: between two looks, or else over the life of those that are writing."""
    if before is not None and seen.at > before.at and seen.status.tokens >= before.status.tokens:
        return (seen.status.tokens - before.status.tokens) / (seen.at - before.at)
    return sum(session_rate(each) for each in seen.status.sessions)


def session_rate(session: pb.SessionStatus) -> float:
    """Tokens per second since its first token."""
    return max(0, session.tokens - 1) / (session.writing_ms / 1000) if session.writing_ms else 0.0


def share(accepted: int, tested: int) -> float | None:
    """Acceptance; None where nothing was tested."""
    return accepted / tested if tested else None


def page(
    seen: StatusSample, before: StatusSample | None, address: str, trouble: str = "", columns: int | None = None
) -> str:
    """The whole screen, for people. columns: width of the terminal, which bounds the head; None for no bound."""
    status, colour = seen.status, wants_colour()
    figures = (
        f"specwire {address}",
        f"up {_duration(status.uptime_ms)}",
        f"{status.sessions_running} running, {status.sessions_finished} finished",
        f"{rate(seen, before):.0f} tokens/s",
        f"acceptance {_percent(share(status.accepted, status.tested))}",
        f"log {visible(status.durability, lines=False)}",
    )
    told = [visible(f"no answer: {trouble}", lines=False)] if trouble else []
    if status.log_trouble:
        told.append(
            f"no session begins: {visible(status.log_trouble, lines=False)}, for {_duration(status.log_trouble_ms)}"
        )
    head = [line for part in (figures, *((line,) for line in told)) for line in _wrapped(part, columns)]
    parts = [*head, "", table(_peers(status)), ""]
    hidden = status.sessions_running - len(status.sessions)
    if status.sessions:
        parts.append(table(_sessions(status)))
    if hidden > 0:
        parts.append(dim(f"and {hidden} more sessions", colour))
    return "\n".join(parts).rstrip()


def _wrapped(figures: Sequence[str], columns: int | None) -> list[str]:
    """As many side by side as fit; one that does not fit by itself is broken between its words."""
    if columns is None:
        return [GAP.join(figures)]
    lines: list[str] = []
    for figure in figures:
        if lines and len(lines[-1]) + len(GAP) + len(figure) <= columns:
            lines[-1] += GAP + figure
        else:
            lines += textwrap.wrap(figure, columns)
    return lines


def _peers(status: pb.GetStatusResponse) -> list[list[str]]:
    rows = [["service", "state", "sessions", "RTT", "region", "model"]]
    for peer in status.peers:
        trip = f"{peer.round_trip_us / 1000:.1f} ms" if peer.round_trip_us else NONE
        name = f"{kind_of(peer)} {peer.address}"
        rows.append([name, state_of(peer), _places(peer), trip, peer.region or NONE, peer.trouble or peer.model])
    return rows


def _places(peer: pb.PeerStatus) -> str:
    """Sessions and slots, sessions of other orchestrators apart; an orchestrator has no slots."""
    others = f"+{peer.others_sessions}" if peer.others_sessions else ""
    return f"{peer.sessions}{others}/{peer.slots}" if peer.slots else str(peer.sessions)


def _sessions(status: pb.GetStatusResponse) -> list[list[str]]:
    rows = [["session", "tenant", "state", "age", "prompt", "tokens", "tokens/s", "accepted", "plan"]]
    for each in status.sessions:
        accepted = _percent(share(each.accepted, each.tested))
        speed, age = f"{session_rate(each):.0f}", _duration(each.age_ms)
        counts = [str(each.prompt_tokens), str(each.tokens)]
        rows.append([each.name, each.tenant or NONE, each.state, age, *counts, speed, accepted, each.plan or NONE])
    return rows


def kind_of(peer: pb.PeerStatus) -> str:
    return pb.PeerKind.Name(peer.kind).removeprefix("PEER_KIND_").lower()


def state_of(peer: pb.PeerStatus) -> str:
    return pb.PeerState.Name(peer.state).removeprefix("PEER_STATE_").lower()


def _percent(value: float | None) -> str:
    return NONE if value is None else f"{100 * value:.0f} %"


def _duration(milliseconds: int) -> str:
    seconds = milliseconds // 1000
    if seconds < 60:
        return f"{milliseconds / 1000:.1f} s"
    return f"{seconds // 60} min" if seconds < 3600 else f"{seconds // 3600} h {seconds % 3600 // 60} min"


def as_object(seen: StatusSample, before: StatusSample | None) -> dict[str, object]:
    """A look, as --json prints it."""
    status = seen.status
    return {
        "uptime_s": status.uptime_ms / 1000,
        "durability": status.durability,
        "log_trouble": status.log_trouble,
        "log_trouble_s": status.log_trouble_ms / 1000,
        "tokens_per_second": round(rate(seen, before), 2),
        "acceptance": share(status.accepted, status.tested),
        "sessions_running": status.sessions_running,
        "sessions_finished": status.sessions_finished,
        "tokens": status.tokens,
        "proposed": status.proposed,
        "tested": status.tested,
        "accepted": status.accepted,
        "target_forwards": status.target_forwards,
        "forwards_saved": status.forwards_saved,
        "services": [
            {
                "kind": kind_of(peer),
                "address": peer.address,
                "model": peer.model,
                "state": state_of(peer),
                "trouble": peer.trouble,
                "sessions": peer.sessions,
                "slots": peer.slots,
                "round_trip_ms": peer.round_trip_us / 1000 or None,
                "region": peer.region,
                "others_sessions": peer.others_sessions,
            }
            for peer in status.peers
        ],
        "sessions": [
            {
                "session": each.name,
                "tenant": each.tenant,
                "state": each.state,
                "age_s": each.age_ms / 1000,
                "prompt_tokens": each.prompt_tokens,
                "tokens": each.tokens,
                "tokens_per_second": round(session_rate(each), 2),
                "acceptance": share(each.accepted, each.tested),
                "plan": each.plan,
            }
            for each in status.sessions
        ],
    }
