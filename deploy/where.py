"""Which stack a command talks to: one that runs, or one of its own, started for the purpose."""

from __future__ import annotations

import argparse
import os
from dataclasses import dataclass

from deploy.options import StackOptions, add_stack_arguments, stack_options
from specwire.core.sampling import InvalidParameter
from specwire.rpc.channel import check_token_is_safe
from specwire.rpc.keys import read_token
from specwire.rpc.tls import ClientTls, add_client_arguments, client_tls

ADDRESS_VARIABLE = "SPECWIRE_ADDRESS"


@dataclass(frozen=True, slots=True)
class Where:
    """`own` is the stack to start where no address is given.

    tls: how to encrypt the connection to `address`. token: what to show there.
    """

    address: str | None
    own: StackOptions
    tls: ClientTls | None
    token: str


def add_where_arguments(parser: argparse.ArgumentParser) -> None:
    """What `where_of` reads."""
    parser.add_argument(
        "--address",
        metavar="ADDR[,ADDR]",
        help=f"a running stack, by one or several of its addresses (default: ${ADDRESS_VARIABLE}, else none)",
    )
    parser.add_argument(
        "--model", default="", metavar="NAME", help="of a stack that serves several (default: the only one)"
    )
    add_stack_arguments(parser)
    add_client_arguments(parser, "a running stack", variable=True)


def where_of(args: argparse.Namespace) -> Where:
    """InvalidParameter names what is wrong."""
    own = stack_options(args)
    given = args.target is not None or args.draft is not None or args.speculative_config is not None
    if given and args.address is not None:
        raise InvalidParameter("address", "names a running stack, --target and --draft one to start")
    address = args.address or (None if given else os.environ.get(ADDRESS_VARIABLE) or None)
    tls = client_tls(args)
    if address is not None and not all(each.strip() for each in address.split(",")):
        raise InvalidParameter("address", f"must be HOST:PORT, or several with commas between them, not {address!r}")
    if tls is not None and address is None:
        raise InvalidParameter("--tls", "and its companions encrypt the connection to a running stack: give --address")
    token = read_token(args, {} if address is None else os.environ)
    for each in address.split(",") if address is not None else ():
        check_token_is_safe(each.strip(), tls, token)
    if token and address is None:
        raise InvalidParameter("--token-file", "is shown to a running stack: give --address")
    return Where(address, own, tls, token)
