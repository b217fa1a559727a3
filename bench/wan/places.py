"""Edge and cloud: network namespaces of their own, joined to ours by a cable each, where the system allows it.

Packets between the two have no route but through a relay in our own namespace. Where namespaces cannot be made (no
root, not Linux) both places are the loopback interface, and the relay is the way by agreement only.

gRPC would send what goes to an address beyond loopback through a proxy that the environment names, if it does.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import count
from pathlib import Path

LIMIT_S = 20.0
LOOPBACK = "127.0.0.1"
NAMESPACES = Path("/run/netns")
PREFIX = "specwire-"
# A network of two addresses for each cable: 10.203.x.y/30. Numbers are taken in turn within a process.
NETWORKS = 1 << 14
PROXIES = ("grpc_proxy", "https_proxy", "http_proxy")
_turn = count()


@dataclass(frozen=True, slots=True)
class WanPlace:
    """Where processes run: the words before their command, their address, and ours on the cable to them."""

    prefix: tuple[str, ...]
    host: str
    ours: str

    @property
    def options(self) -> tuple[str, ...]:
        """For a service that listens here; the cable is ours, so nothing on it is encrypted."""
        return ("--listen", f"{self.host}:0", *(() if self.host == LOOPBACK else ("--insecure",)))


@dataclass(frozen=True, slots=True)
class Places:
    edge: WanPlace
    cloud: WanPlace

    @property
    def isolated(self) -> bool:
        return bool(self.edge.prefix)


@contextmanager
def places(isolated: bool = True) -> Iterator[Places]:
    """Places until the block ends, and no proxies for this process and those that it starts.

    Args:
        isolated: in namespaces if that is possible here; False never tries.
    """
    proxies = {name: os.environ.pop(name) for name in PROXIES if name in os.environ}
    names: list[str] = []
    here = WanPlace((), LOOPBACK, LOOPBACK)
    try:
        found = _isolated(names) if isolated and _possible() else None
        yield found or Places(here, here)
    finally:
        for name in names:
            with suppress(OSError, subprocess.SubprocessError):
                _ip("netns", "del", name)
        os.environ.update(proxies)


def _possible() -> bool:
    return hasattr(os, "geteuid") and os.geteuid() == 0 and shutil.which("ip") is not None


def _isolated(names: list[str]) -> Places | None:
    """Both places, their namespaces' names added to `names` as they come to be; None if the system refuses."""
    _sweep()
    try:
        return Places(_place(names), _place(names))
    except (OSError, subprocess.SubprocessError):
        return None


def _place(names: list[str]) -> WanPlace:
    """A namespace, and a cable to it: two ends with an address each."""
    turn = next(_turn)
    name = f"{PREFIX}{os.getpid()}-{turn}"
    network = (os.getpid() * 64 + turn) % NETWORKS * 4
    ours, theirs = (f"10.203.{(network + end) >> 8}.{(network + end) & 255}" for end in (1, 2))
    near, far = f"sw{os.getpid()}n{turn}", f"sw{os.getpid()}f{turn}"
    _ip("netns", "add", name)
    names.append(name)
    _ip("link", "add", near, "type", "veth", "peer", "name", far, "netns", name)
    _ip("addr", "add", f"{ours}/30", "dev", near)
    _ip("link", "set", near, "up")
    _ip("-n", name, "addr", "add", f"{theirs}/30", "dev", far)
    _ip("-n", name, "link", "set", far, "up")
    _ip("-n", name, "link", "set", "lo", "up")
    return WanPlace(("ip", "netns", "exec", name), theirs, ours)


def _sweep() -> None:
    """Delete what a process that was killed has left."""
    for path in NAMESPACES.glob(f"{PREFIX}*") if NAMESPACES.is_dir() else ():
        owner = path.name.removeprefix(PREFIX).partition("-")[0]
        if not Path(f"/proc/{owner}").exists():
            with suppress(OSError, subprocess.SubprocessError):
                _ip("netns", "del", path.name)


def _ip(*words: str) -> None:
    command: Sequence[str] = ("ip", *words)
    subprocess.run(command, check=True, capture_output=True, timeout=LIMIT_S)
