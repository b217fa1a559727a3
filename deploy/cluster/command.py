"""What `specwire deploy`, `status`, `scale` and `undeploy` share."""

from __future__ import annotations

import argparse
import importlib.util
from collections.abc import Callable

from deploy.cluster.schema import InvalidConfig
from deploy.options import StackError
from specwire.rpc.process import say

START_TIMEOUT_S = 600.0
DRAIN_TIMEOUT_S = 60.0


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
        default=DRAIN_TIMEOUT_S,
        metavar="S",
        help="then what drains is killed; longer than the services' --grace (default: %(default)g s)",
    )


def carried_out(command: str, what: Callable[[], int]) -> int:
    """Run it; returns the exit code, with one line on stderr for whatever keeps it from being done."""
    prefix = f"specwire {command}: error:"
    if importlib.util.find_spec("ray") is None:
        say(f"{prefix} Ray is not installed: install the extra specwire[ray]")
        return 1
    try:
        return what()
    except InvalidConfig as error:
        say(f"{prefix} {error}")
        return 2
    except StackError as error:
        say(f"{prefix} {error}")
        return 1
