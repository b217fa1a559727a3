"""What every process that listens is told: where, who may call and read along, and how it ends."""

from __future__ import annotations

import argparse
import hashlib
import socket
from pathlib import Path

from specwire.core.invalid import InvalidParameter
from specwire.rpc.channel import exposure
from specwire.rpc.process import DRAIN_GRACE
from specwire.rpc.tls import ServerTls, add_server_arguments

# ----------------------------------------------------------------------------------------------------------------------
# Which machine this is.

BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


def host_id() -> str:
    """Equal for two processes exactly if they run on one machine, since one boot: they share cores and clock.

    A hash, so that it tells a remote peer nothing. Containers of one machine count as different hosts by their names.
    """
    try:
        boot = BOOT_ID.read_text().strip()
    except OSError:  # not Linux: the name alone has to do
        boot = ""
    return hashlib.sha256(f"{boot}\0{socket.gethostname()}".encode()).hexdigest()[:32]


MOST_GRACE = 3600.0
ANY_PORT = "127.0.0.1:0"


def check_listen(listen: str, field: str = "listen") -> None:
    """InvalidParameter of `field` unless `listen` reads HOST:PORT."""
    _, colon, port = listen.rpartition(":")
    if not (colon and port.isascii() and port.isdecimal() and int(port) < 1 << 16):
        raise InvalidParameter(field, f"must be HOST:PORT with a port from 0 to 65535, not {listen!r}")


def check_exposure(listen: str, tls: ServerTls | None, insecure: bool) -> None:
    """InvalidParameter if others would read along: said before a model is loaded."""
    exposed = exposure(listen, encrypted=tls is not None, insecure=insecure)
    if exposed is not None:
        raise InvalidParameter("listen", exposed)


def check_metrics(address: str, insecure: bool, tls: ServerTls | None = None) -> str:
    """`address`, of figures, "" for nowhere; InvalidParameter if others would read along."""
    if address:
        check_listen(address, "metrics")
        exposed = exposure(address, encrypted=tls is not None, insecure=insecure)
        if exposed is not None:
            raise InvalidParameter("metrics", exposed)
    return address


def add_listening_arguments(parser: argparse.ArgumentParser, callers: str) -> None:
    """What every command that listens takes: who may call, encryption, and how it ends. See `drain_grace`."""
    parser.add_argument("--insecure", action="store_true", help="listen beyond loopback without encryption")
    parser.add_argument("--api-keys", metavar="FILE", help=f"{callers} must show a token of FILE: NAME TOKEN lines")
    parser.add_argument(
        "--metrics",
        default="",
        metavar="ADDR",
        help="HOST:PORT for Prometheus, encrypted where the service is (default: nowhere)",
    )
    parser.add_argument(
        "--grace",
        type=float,
        default=DRAIN_GRACE,
        metavar="S",
        help="on a signal, let what runs go on for so long (default: %(default)g s)",
    )
    add_server_arguments(parser)


def drain_grace(args: argparse.Namespace) -> float:
    """Seconds of --grace; InvalidParameter if it is no time to wait."""
    if not 0 <= args.grace <= MOST_GRACE:  # nor NaN
        raise InvalidParameter("--grace", f"must be from 0 to {MOST_GRACE:g} seconds, not {args.grace:g}")
    return float(args.grace)
