"""`specwire top`: what an orchestrator is doing."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
from dataclasses import dataclass

import grpc

from deploy.cli.stack_address import ADDRESS_VARIABLE, explained, found_address
from deploy.cli.terminal import dim, table, wants_colour
from specwire.client.events import SpecwireError, from_rpc
from specwire.core.invalid import InvalidParameter
from specwire.options import DEFAULT_LISTEN, add_options
from specwire.rpc.channel import open_channel
from specwire.rpc.keys import read_token
from specwire.rpc.process import one_line, say, visible
from specwire.rpc.server_options import check_listen
from specwire.rpc.tls import ClientTls, client_tls
from specwire.v1 import status_pb2 as pb
from specwire.v1 import status_pb2_grpc

LIMIT_S = 5.0
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
    as_json: bool


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--address",
        metavar="ADDR",
        help=f"of an orchestrator (default: ${ADDRESS_VARIABLE}, else the stack that runs here, else {DEFAULT_LISTEN})",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of tables")
    add_options(parser, "client", peers="the orchestrator")


def run(args: argparse.Namespace) -> int:
    try:
        call = request_of(args)
    except InvalidParameter as error:
        say(f"specwire top: error: {error}")
        return 2
    try:
        status = asyncio.run(_asked(call))
    except (SpecwireError, InvalidParameter) as error:
        say(f"specwire top: error: {error.message if isinstance(error, SpecwireError) else one_line(error)}")
        return 1
    print(json.dumps(as_object(status), allow_nan=False) if call.as_json else page(status, call.address))
    return 0


def request_of(args: argparse.Namespace) -> TopRequest:
    """InvalidParameter names what is wrong."""
    tls = client_tls(args)
    address = args.address or os.environ.get(ADDRESS_VARIABLE) or found_address(tls) or DEFAULT_LISTEN
    check_listen(address, "address")
    return TopRequest(address, tls, read_token(args, os.environ), args.json)


async def _asked(call: TopRequest) -> pb.GetStatusResponse:
    """Raises SpecwireError."""
    async with open_channel(call.address, call.tls, call.token) as channel:
        stub = status_pb2_grpc.StatusServiceStub(channel)
        try:
            status: pb.GetStatusResponse = await stub.GetStatus(pb.GetStatusRequest(), timeout=LIMIT_S)
        except grpc.aio.AioRpcError as error:
            found = from_rpc(error, call.address, tls=call.tls is not None)
            if error.code() is grpc.StatusCode.UNIMPLEMENTED:
                found = SpecwireError(error.code(), NOT_OFFERED)
            raise SpecwireError(found.code, await explained(found, call.address, call.tls)) from None
    return status


def rate(status: pb.GetStatusResponse) -> float:
    """Tokens per second of all sessions, over the life of those that are writing."""
    return sum(session_rate(each) for each in status.sessions)


def session_rate(session: pb.SessionStatus) -> float:
    """Tokens per second since its first token."""
    return max(0, session.tokens - 1) / (session.writing_ms / 1000) if session.writing_ms else 0.0


def share(accepted: int, tested: int) -> float | None:
    """Acceptance; None where nothing was tested."""
    return accepted / tested if tested else None


def page(status: pb.GetStatusResponse, address: str) -> str:
    """All of it, for people."""
    figures = (
        f"specwire {address}",
        f"up {_duration(status.uptime_ms)}",
        f"{status.sessions_running} running, {status.sessions_finished} finished",
        f"{rate(status):.0f} tokens/s",
        f"acceptance {_percent(share(status.accepted, status.tested))}",
        f"log {visible(status.durability, lines=False)}",
    )
    head = [GAP.join(figures)]
    if status.log_trouble:
        trouble = visible(status.log_trouble, lines=False)
        head.append(f"no session begins: {trouble}, for {_duration(status.log_trouble_ms)}")
    parts = [*head, "", table(_peers(status)), ""]
    hidden = status.sessions_running - len(status.sessions)
    if status.sessions:
        parts.append(table(_sessions(status)))
    if hidden > 0:
        parts.append(dim(f"and {hidden} more sessions", wants_colour()))
    return "\n".join(parts).rstrip()


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


def as_object(status: pb.GetStatusResponse) -> dict[str, object]:
    """All of it, as --json prints it."""
    return {
        "uptime_s": status.uptime_ms / 1000,
        "durability": status.durability,
        "log_trouble": status.log_trouble,
        "log_trouble_s": status.log_trouble_ms / 1000,
        "tokens_per_second": round(rate(status), 2),
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
