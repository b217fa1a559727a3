"""The processes of a cell: drafter and orchestrators on the edge, verifiers in the cloud, a relay to each of these.

All listen on loopback, and who is on the edge is told of the relays' addresses only.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from bench.harness.child import BenchChild
from bench.harness.runs import BenchError
from bench.relay.link import RelayLink
from specwire.core.model import TORCH

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
    """`python -m MODULE ...`. Its words on stderr go into a file."""

    def __init__(self, name: str, words: Sequence[str], folder: Path) -> None:
        self._said = folder / f"{name}.stderr"
        with self._said.open("wb") as said:
            command = [sys.executable, "-m", *words, "--listen", "127.0.0.1:0", "--json"]
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
def rig(pair: WanPair, orchestrations: Sequence[Orchestration], *, watch_drafter: bool = False) -> Iterator[WanRig]:
    """Start everything; orchestrators that differ in their plan alone share the verifier and the drafter.

    Verifiers that nobody asks for are not started. watch_drafter: put a relay before the drafter too.
    """
    with ExitStack() as owned:
        folder = Path(owned.enter_context(tempfile.TemporaryDirectory(prefix="specwire-wan-")))

        def start(words: Sequence[str]) -> WanService:
            number = len(list(folder.iterdir()))
            service = WanService(f"{words[0]} {number}", words, folder)
            owned.callback(service.stop)
            return service

        kinds = sorted({one.patient for one in orchestrations})
        verifiers = {patient: start(_verifier(pair, patient)) for patient in kinds}
        drafter = start(("draft_service", pair.draft, *COMPUTED))
        links = {patient: owned.enter_context(RelayLink(service.ready())) for patient, service in verifiers.items()}
        dialled, draft_link = drafter.ready(), None
        if watch_drafter:
            draft_link = owned.enter_context(RelayLink(dialled))
            dialled = draft_link.address
        starting = {one: start(_orchestrator(one, links[one.patient].address, dialled)) for one in orchestrations}
        addresses = {one: service.ready() for one, service in starting.items()}
        yield WanRig(addresses, tuple(links.values()), draft_link)


def _verifier(pair: WanPair, patient: bool) -> tuple[str, ...]:
    """Without proposals of its own: what is measured is the drafter's."""
    return ("verify_service", pair.target, *COMPUTED, "--no-ngram", *(("--patient",) if patient else ()))


def _orchestrator(one: Orchestration, verifier: str, drafter: str) -> tuple[str, ...]:
    return ("orchestrator", "--verifier", verifier, "--drafter", drafter, "--plan", one.plan)
