"""What `specwire deploy`, `status`, `scale` and `undeploy` share."""

from __future__ import annotations

import argparse
import importlib.util
import os
from collections.abc import Callable
from pathlib import Path

from deploy.cluster.schema import ClusterConfig, InvalidConfig
from deploy.stack.options import StackError
from specwire.rpc.process import say

START_TIMEOUT_S = 600.0
RAY_AUTH_MODE = "RAY_AUTH_MODE"
# Beyond the grace of a service that drains.
DRAIN_MARGIN_S = 30.0


def add_cluster_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--ray-address", default="auto", metavar="ADDR", help="of the Ray cluster (default: the one of this machine)"
    )
    parser.add_argument(
        "--namespace", default="specwire", metavar="NAME", help="Ray's, of this deployment (default: %(default)s)"
    )


def add_waiting_arguments(parser: argparse.ArgumentParser) -> None:
    add_drain_argument(parser)
    parser.add_argument(
        "--start-timeout",
        type=float,
        default=START_TIMEOUT_S,
        metavar="S",
        help="until what is started must be ready (default: %(default)g s)",
    )


def add_drain_argument(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--drain-timeout",
        type=float,
        metavar="S",
        help=f"then what drains is killed (default: the longest grace in the file, and {DRAIN_MARGIN_S:g} s)",
    )


def drain_timeout_of(args: argparse.Namespace, config: ClusterConfig | None) -> float:
    """Seconds; config: what is deployed, or will be."""
    if args.drain_timeout is not None:
        return float(args.drain_timeout)
    return max((group.grace for group in config.groups), default=0.0) + DRAIN_MARGIN_S if config else DRAIN_MARGIN_S


def ray_token() -> tuple[str, str]:
    """The token that Ray's clusters may demand, and where it is from, for people; empty where there is none.

    From the places where Ray looks for it. Ray itself shows a token to a cluster that runs only if it is told to.
    """
    if os.environ.get(RAY_AUTH_MODE, "token") != "token":
        return "", ""
    if token := os.environ.get("RAY_AUTH_TOKEN", ""):
        return token, "$RAY_AUTH_TOKEN"
    file = Path(os.environ.get("RAY_AUTH_TOKEN_PATH") or Path.home() / ".ray" / "auth_token")
    try:
        return file.read_text(encoding="utf-8").strip(), str(file)
    except (OSError, UnicodeDecodeError):
        return "", ""


def carried_out(command: str, what: Callable[[], int]) -> int:
    """Run it; returns the exit code, with one line on stderr for whatever keeps it from being done."""
    prefix = f"specwire {command}: error:"
    if importlib.util.find_spec("ray") is None:
        say(f"{prefix} Ray is not installed: install the extra specwire[ray]")
        return 1
    if ray_token()[0]:
        os.environ.setdefault(RAY_AUTH_MODE, "token")  # Ray reads it when it is imported, as `what` does
    try:
        return what()
    except InvalidConfig as error:
        say(f"{prefix} {error}")
        return 2
    except StackError as error:
        say(f"{prefix} {error}")
        return 1
