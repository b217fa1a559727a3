"""Which stack a command talks to: a given one, the one that runs on this machine, or one of its own.

A running `specwire up` is listed: a file in a private folder of its user ($XDG_RUNTIME_DIR, or the folder of temporary
files) says where it listens. The file is locked as long as its process lives, so that the file of a killed one is known
to be stale.
"""

from __future__ import annotations

import argparse
import asyncio
import fcntl
import json
import os
import secrets
import ssl
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

from deploy.stack.options import StackOptions, stack_options
from deploy.stack.processes import AT_END
from specwire.client import SpecwireError
from specwire.core.invalid import InvalidParameter
from specwire.options import STACK, add_options
from specwire.rpc.channel import check_token_is_safe
from specwire.rpc.keys import read_token
from specwire.rpc.process import say
from specwire.rpc.tls import ClientTls, client_tls

ADDRESS_VARIABLE = "SPECWIRE_ADDRESS"
PROBE_S = 2.0
# Of a listing that is being written.
HIDDEN = ".new"


@dataclass(frozen=True, slots=True)
class ListedStack:
    """One that runs on this machine. address: HOST:PORT for gRPC. http: the URL for HTTP, or None. tls: of both."""

    address: str
    http: str | None
    target: str
    tls: bool


@contextmanager
def listed(stack: ListedStack) -> Iterator[None]:
    """Let this user's other commands find the stack while the context lasts."""
    file = _folder() / f"{secrets.token_hex(8)}.json"
    unlist = partial(_unlist, file)
    AT_END.append(unlist)
    lock = None
    try:
        lock = _list(stack, file)
    except OSError as error:
        say(f"specwire up: other commands will not find this stack by themselves: {error}")
    try:
        yield
    finally:
        unlist()
        AT_END.remove(unlist)
        if lock is not None:
            os.close(lock)


def listed_stacks() -> list[ListedStack]:
    """The user's running stacks. Files of other users are ignored, stale ones are removed."""
    folder = _folder()
    files = sorted(folder.glob("*.json")) if _is_private(folder) else []
    return [stack for file in files if (stack := _read(file)) is not None]


def _list(stack: ListedStack, file: Path) -> int:
    """Write the file; returns its descriptor, which holds the lock. Raises OSError."""
    folder, hidden = file.parent, file.with_suffix(HIDDEN)
    folder.mkdir(0o700, exist_ok=True)
    if not _is_private(folder):
        raise PermissionError(f"{folder} is not this user's alone")
    lock = os.open(hidden, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    fcntl.flock(lock, fcntl.LOCK_EX)
    os.write(lock, json.dumps(asdict(stack)).encode())
    hidden.rename(file)
    return lock


def _unlist(file: Path) -> None:
    """Remove the file as far as it was written, and the folder if it was the last one there. Never raises."""
    with suppress(OSError):
        for each in (file, file.with_suffix(HIDDEN)):
            each.unlink(missing_ok=True)
        file.parent.rmdir()


def _folder() -> Path:
    """Where this user's stacks are listed; it may not be there."""
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    if runtime and Path(runtime).is_dir():
        return Path(runtime) / "specwire"
    return Path(tempfile.gettempdir()) / f"specwire-{os.geteuid()}"


def _is_private(folder: Path) -> bool:
    """Whether only this user can write there: prompts go to the addresses that are read."""
    try:
        found = folder.lstat()
    except OSError:
        return False
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid() and not found.st_mode & 0o077


def _read(file: Path) -> ListedStack | None:
    """None if its stack does not run any more, or is of a release that writes something else."""
    try:
        with file.open("rb") as read:
            try:
                fcntl.flock(read, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                return ListedStack(**json.load(read))
            file.unlink(missing_ok=True)
    except (OSError, ValueError, TypeError):
        pass
    return None


@dataclass(frozen=True, slots=True)
class StackAddress:
    """`own` is the stack to start where no address is given.

    tls: how to encrypt the connection to `address`. token: what to show there.
    """

    address: str | None
    own: StackOptions
    tls: ClientTls | None
    token: str


def add_address_arguments(parser: argparse.ArgumentParser, references: bool = True) -> None:
    """What `stack_address_of` reads. references: False leaves --reference to the caller."""
    parser.add_argument(
        "--address",
        metavar="ADDR[,ADDR]",
        help=f"a running stack, by one or several of its addresses (default: ${ADDRESS_VARIABLE}, else the stack that "
        "runs on this machine, else one is started)",
    )
    parser.add_argument(
        "--model", default="", metavar="NAME", help="of a stack that serves several (default: the only one)"
    )
    add_options(parser, STACK, without="" if references else "reference")
    parser.set_defaults(**({} if references else {"reference": []}))
    add_options(parser, "client", peers="a running stack")


def stack_address_of(args: argparse.Namespace) -> StackAddress:
    """InvalidParameter names what is wrong."""
    own = stack_options(args)
    given = args.target is not None or args.draft is not None
    if given and args.address is not None:
        raise InvalidParameter("address", "names a running stack, --target and --draft one to start")
    tls = client_tls(args)
    address = args.address or (None if given else os.environ.get(ADDRESS_VARIABLE) or found_address(tls))
    if address is not None and not all(each.strip() for each in address.split(",")):
        raise InvalidParameter("address", f"must be HOST:PORT, or several with commas between them, not {address!r}")
    if tls is not None and address is None:
        raise InvalidParameter("--tls", "and its companions encrypt the connection to a running stack: give --address")
    token = read_token(args, {} if address is None else os.environ)
    for each in address.split(",") if address is not None else ():
        check_token_is_safe(each.strip(), tls, token)
    if token and address is None:
        raise InvalidParameter("--token-file", "is shown to a running stack: give --address")
    return StackAddress(address, own, tls, token)


def found_address(tls: ClientTls | None) -> str | None:
    """Address of the stack that runs on this machine; None where none does. InvalidParameter where several do."""
    stacks = listed_stacks()
    if len(stacks) > 1:
        told = ", ".join(f"{each.address} ({each.target})" for each in stacks)
        raise InvalidParameter("address", f"is needed where several stacks run: {told}")
    for each in stacks:
        if each.tls and tls is None:
            raise InvalidParameter("--tls-ca", f"or --tls: the stack that runs here, {each.address}, encrypts")
        return each.address
    return None


def say_what_starts(command: str, where: StackAddress) -> None:
    """Say that a stack of its own is started: that takes long, and may not be what the user meant."""
    if where.address is None:
        own = f"a stack of its own ({where.own.target})"
        say(f"specwire {command}: starting {own} for this command only; specwire up starts one that stays")


async def explained(error: SpecwireError, address: str, tls: ClientTls | None) -> str:
    """The error's message, or, where what answers is HTTP, which port to call instead."""
    if error.reached or "," in address or not await _speaks_http(address, tls is not None):
        return error.message
    port = address.rpartition(":")[2]
    known = [each.address for each in listed_stacks() if each.http and each.http.rpartition(":")[2] == port]
    grpc = f": its gRPC is on {known[0]}" if known else ", the other address of its ready line is for gRPC"
    return f"{address} speaks HTTP{grpc}"


async def _speaks_http(address: str, encrypted: bool) -> bool:
    """Whether a server there answers a request of HTTP/1."""
    host, _, port = address.rpartition(":")
    context = None
    if encrypted:
        context = ssl.create_default_context()
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE  # it is told nothing
    try:
        async with asyncio.timeout(PROBE_S):
            reader, writer = await asyncio.open_connection(host.strip("[]"), int(port), ssl=context)
            try:
                writer.write(f"GET /health HTTP/1.1\r\nHost: {address}\r\nConnection: close\r\n\r\n".encode())
                return await reader.readexactly(5) == b"HTTP/"
            finally:
                writer.close()
    except (OSError, ValueError, EOFError, TimeoutError):
        return False
