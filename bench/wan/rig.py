"""The processes of a cell: drafter and orchestrators on the edge, verifiers in the cloud, a relay to each of these.

Edge and cloud are network namespaces of their own, joined to ours by a cable each, where the system allows it. Packets
between the two have no route but through a relay in our own namespace. Where namespaces cannot be made (no root, not
Linux) both places are the loopback interface, and the relay is the way by agreement only.

gRPC would send what goes to an address beyond loopback through a proxy that the environment names, if it does.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from itertools import count
from pathlib import Path

from bench.harness.child import BenchChild
from bench.harness.runs import BenchError
from bench.relay.link import RelayLink
from specwire.core.model import TORCH

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


START_LIMIT_S = 180.0
MOST_SAID = 500
# The second has drafters extend one token a forward.
AUTO, AUTO_CHAIN = "auto", "auto:1"
COMPUTED = ("--runtime", TORCH, "--dtype", "float32", "--threads", "1", "--slots", "4")


@dataclass(frozen=True, slots=True)
class WanPair:
    """The models, as services take them."""

    target: str
    draft: str


@dataclass(frozen=True, slots=True)
class Orchestration:
    """An orchestrator's plan (`python -m orchestrator --plan`), and whether its verifier waits for what is due."""

    plan: str = AUTO
    patient: bool = False


class WanService:
    """`python -m MODULE ...` at a place; `address` once it is ready. Its words on stderr go into a file."""

    def __init__(self, name: str, place: WanPlace, words: Sequence[str], folder: Path) -> None:
        self._said = folder / f"{name}.stderr"
        with self._said.open("wb") as said:
            command = [*place.prefix, sys.executable, "-m", *words, *place.options, "--json"]
            self._child = BenchChild(name, command, errors=said)

    def ready(self) -> str:
        """Wait for its ready line; its address. BenchError with its last words if there is none."""
        try:
            return str(self._child.answer(START_LIMIT_S)["address"])
        except BenchError as error:
            said = self._said.read_text(errors="replace")[-MOST_SAID:].strip()
            raise BenchError(f"{self._child.name}: did not become ready: {said}") from error

    def stop(self) -> None:
        self._child.stop()


@dataclass(frozen=True, slots=True)
class WanRig:
    """`addresses`: of the orchestrators. `links`: between edge and cloud; `draft_link`: between the two on the edge."""

    addresses: dict[Orchestration, str]
    links: tuple[RelayLink, ...]
    draft_link: RelayLink | None

    def shape(self, rtt_ms: float) -> None:
        """Delay what passes. Orchestrators have to connect anew, and so know at once how far their verifiers are."""
        for link in self.links:
            link.shape(rtt_ms)
            link.cut(0.0)


@contextmanager
def rig(
    places: Places, pair: WanPair, orchestrations: Sequence[Orchestration], *, watch_drafter: bool = False
) -> Iterator[WanRig]:
    """Start everything; orchestrators that differ in their plan alone share the verifier and the drafter.

    Verifiers that nobody asks for are not started. watch_drafter: put a relay before the drafter too.
    """
    with ExitStack() as owned:
        folder = Path(owned.enter_context(tempfile.TemporaryDirectory(prefix="specwire-wan-")))

        def start(words: Sequence[str], place: WanPlace) -> WanService:
            number = len(list(folder.iterdir()))
            service = WanService(f"{words[0]} {number}", place, words, folder)
            owned.callback(service.stop)
            return service

        kinds = sorted({one.patient for one in orchestrations})
        verifiers = {patient: start(_verifier(pair, patient), places.cloud) for patient in kinds}
        drafter = start(("draft_service", pair.draft, *COMPUTED), places.edge)
        links = {patient: _link(owned, service.ready(), places.edge) for patient, service in verifiers.items()}
        dialled, draft_link = drafter.ready(), None
        if watch_drafter:
            draft_link = _link(owned, dialled, places.edge)
            dialled = draft_link.address
        starting = {
            one: start(_orchestrator(one, links[one.patient].address, dialled), places.edge) for one in orchestrations
        }
        addresses = {one: service.ready() for one, service in starting.items()}
        yield WanRig(addresses, tuple(links.values()), draft_link)


def _link(owned: ExitStack, to: str, dialled_from: WanPlace) -> RelayLink:
    return owned.enter_context(RelayLink(to, f"{dialled_from.ours}:0"))


def _verifier(pair: WanPair, patient: bool) -> tuple[str, ...]:
    """Without proposals of its own: what is measured is the drafter's."""
    return ("verify_service", pair.target, *COMPUTED, "--no-ngram", *(("--patient",) if patient else ()))


def _orchestrator(one: Orchestration, verifier: str, drafter: str) -> tuple[str, ...]:
    return ("orchestrator", "--verifier", verifier, "--drafter", drafter, "--plan", one.plan)
