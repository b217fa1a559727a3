"""The processes of a cell: drafter and orchestrators on the edge, verifiers in the cloud, a relay to each of these."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from bench.harness.child import BenchChild
from bench.harness.runs import BenchError
from bench.relay.link import RelayLink
from bench.wan.places import Places, WanPlace
from deploy.stack.options import cores
from specwire.core.model import TORCH

START_LIMIT_S = 180.0
MOST_SAID = 500
# The second has drafters extend one token a forward.
AUTO, AUTO_CHAIN = "auto", "auto:1"


@dataclass(frozen=True, slots=True)
class WanPair:
    """Models and how they compute; threads of either, and slots of each.

    ngram: the verifier proposes from the text itself, too. apart: the drafter has a core to itself, and all other
    services the others.
    """

    target: str
    draft: str
    dtype: str = "float32"
    threads: int = 1
    ngram: bool = False
    slots: int = 4
    apart: bool = False


class Cores(NamedTuple):
    """Of the drafter, and of all other services; empty for any."""

    drafting: frozenset[int] = frozenset()
    other: frozenset[int] = frozenset()


def can_be_apart() -> bool:
    """Whether this machine has two cores for us, and lets a process be kept to one (macOS does not)."""
    return hasattr(os, "sched_setaffinity") and cores() > 1


def cores_of(pair: WanPair) -> Cores:
    """Raises BenchError where the drafter is to be apart and cannot be."""
    if not pair.apart:
        return Cores()
    if not can_be_apart():
        raise BenchError("a drafter with a core of its own needs two, and a system that keeps processes to them")
    *others, last = sorted(os.sched_getaffinity(0))
    return Cores(frozenset({last}), frozenset(others))


@dataclass(frozen=True, slots=True)
class Orchestration:
    """An orchestrator's plan (`python -m orchestrator --plan`), and whether its verifier waits for what is due."""

    plan: str = AUTO
    patient: bool = False


class WanService:
    """`python -m MODULE ...` at a place; `address` once it is ready. Its words on stderr go into a file."""

    def __init__(self, name: str, place: WanPlace, words: Sequence[str], folder: Path, cores: frozenset[int]) -> None:
        self._said = folder / f"{name}.stderr"
        with self._said.open("wb") as said:
            command = [*place.prefix, sys.executable, "-m", *words, *place.options, "--json"]
            self._child = BenchChild(name, command, errors=said, cores=cores)

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
        drafting, other = cores_of(pair)

        def start(words: Sequence[str], place: WanPlace, cores: frozenset[int] = other) -> WanService:
            number = len(list(folder.iterdir()))
            service = WanService(f"{words[0]} {number}", place, words, folder, cores)
            owned.callback(service.stop)
            return service

        kinds = sorted({one.patient for one in orchestrations})
        verifiers = {patient: start(_verifier(pair, patient), places.cloud) for patient in kinds}
        draft = ("draft_service", pair.draft, *_model(pair))
        drafter = start(draft, places.edge, drafting)
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


def _model(pair: WanPair) -> tuple[str, ...]:
    return ("--runtime", TORCH, "--dtype", pair.dtype, "--threads", str(pair.threads), "--slots", str(pair.slots))


def _verifier(pair: WanPair, patient: bool) -> tuple[str, ...]:
    """A patient one has no proposals of its own: it is a baseline."""
    ngram = "--ngram" if pair.ngram and not patient else "--no-ngram"
    return ("verify_service", pair.target, *_model(pair), ngram, *(("--patient",) if patient else ()))


def _orchestrator(one: Orchestration, verifier: str, drafter: str) -> tuple[str, ...]:
    return ("orchestrator", "--verifier", verifier, "--drafter", drafter, "--plan", one.plan)
