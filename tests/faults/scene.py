"""One cell of the matrix, played: texts stream, the fault happens, the texts come to their ends."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

from specwire.client.requests import Options
from specwire.core.sampling import Sampling
from tests.faults.matrix import AWAY_S, CUT_S, STOPPED_S, Cell
from tests.faults.parts import Service
from tests.faults.place import Place
from tests.faults.stack import PLAIN
from tests.faults.steps import steps_of
from tests.faults.streams import LIMIT_S, PROMPT, Stream, plain

# Tokens before the fault.
BEGUN = 40
# Of it some 300 tokens a second are decided at best: it lasts longer than who hurts and who is told to stop take.
LENGTH = 800
# Where text goes on during the fault, and is left once a drafter that is back has been of use.
LONG = 4000
# Behind the fault's end; what a lost drafter proposed before is used up by then.
OLD = 100
PATIENCE_S = 30.0
# Every target step takes as long at least, so that there is text left when the fault comes.
TARGET = "scripted:7:vocab=64:delay_ms=10"
DRAFT = "scripted:7:vocab=64:agree=0.7"


@dataclass(frozen=True, slots=True)
class Asked:
    """A stream of a scene."""

    prompt: tuple[int, ...] = PROMPT
    temperature: float = 0.0
    seed: int = 0

    @property
    def sampling(self) -> Sampling:
        return Sampling(temperature=self.temperature, seed=self.seed)


ASKED = (Asked(), Asked((9, 9), temperature=0.8, seed=5))


class Scene:
    """A cell and its streams, which all go through the same orchestrator.

    Greedy and sampled, and as two verifiers share sessions evenly, one of them at each. Where a drafter comes back
    while text streams, that is waited for, and the texts are then left (`open_ended`).
    """

    def __init__(self, place: Place, cell: Cell, asked: Sequence[Asked] = ASKED, length: int | None = None) -> None:
        self._place = place
        self._cell = cell
        self._asked = asked
        self.open_ended = "drafter" in cell.where and cell.fault not in ("SIGKILL", "graceful stop")
        self.length = length or (LONG if self.open_ended else LENGTH)
        self.streams: list[Stream] = []
        self.pause = 0.0
        self.fences: list[int] = []

    def play(self) -> None:
        """Begin, hurt, read on; `pause` is the longest of any stream since the fault."""
        self._place.mend()
        with ExitStack() as stack:
            self._begin(stack)
            self.fences = [self._place.log(stream.session_id).fence for stream in self.streams]
            began = time.monotonic()
            hurt(self._place, self._cell)
            over = time.monotonic()
            for stream in self.streams:
                if self.open_ended:
                    stream.until_arrived(over)
                    stream.until(len(stream.tokens) + OLD)
                    stream.until_accepted()
                else:
                    stream.rest()
            assert all(stream.arrivals[-1] > began for stream in self.streams), "a text had ended before the fault"
            self.pause = max(stream.pause_since(began) for stream in self.streams)

    def expected(self) -> list[list[int]]:
        """What the target alone writes for each stream, as far as it was read."""
        ends = [len(stream.tokens) if self.open_ended else self.length for stream in self.streams]
        texts = [plain(PLAIN, self.length, asked.prompt, asked.sampling) for asked in self._asked]
        return [text[:end] for text, end in zip(texts, ends, strict=True)]

    def _begin(self, stack: ExitStack) -> None:
        """Until every text streams; if a verifier shall be hurt, one of them from that one."""
        until = time.monotonic() + LIMIT_S
        while True:
            with ExitStack() as trial:
                self.streams = [trial.enter_context(self._ask(asked)) for asked in self._asked]
                for stream in self.streams:
                    stream.until(BEGUN)
                if self._cell.where != "verifier" or self._serves(self._place.verifiers[0]):
                    stack.enter_context(trial.pop_all())
                    return
            assert time.monotonic() < until, "the verifier never served"

    def _serves(self, verifier: Service) -> bool:
        before = steps_of(verifier.address)
        self.streams[0].until(len(self.streams[0].tokens) + 1)
        self.streams[-1].until(len(self.streams[-1].tokens) + 1)
        return steps_of(verifier.address) > before + 1

    def _ask(self, asked: Asked) -> Stream:
        options = Options(max_tokens=self.length, temperature=asked.temperature, seed=asked.seed, ngram=False)
        return Stream(addresses(self._place, self._cell), asked.prompt, PATIENCE_S, **options)


def addresses(place: Place, cell: Cell) -> list[str]:
    """Whom the client knows: a second orchestrator where one shall take over."""
    match cell.where, cell.fault:
        case "client-orchestrator", "reset":
            return [place.lines.client.address]
        case "client-orchestrator", _:
            return [place.lines.client.address, place.second.address]
        case "orchestrator", "restart":
            return [place.first.address]
        case "orchestrator", _:
            return [place.first.address, place.second.address]
        case "verifier", "restart":
            return [place.apart.address]
        case (("drafter" | "verifier" | "Redis"), _):
            return [place.first.address]
        case _:
            return [place.apart.address]


def hurt(place: Place, cell: Cell) -> None:
    """Have it happen. Whoever is to come back is back when this returns, or about to be."""
    if cell.fault == "none":
        return
    if "-" in cell.where:
        _hurt_link(place, cell)
    elif cell.where == "Redis":
        REDIS[cell.fault](place)
    else:
        victim = {"drafter": place.drafter, "verifier": place.verifiers[0], "orchestrator": place.first}[cell.where]
        PROCESS[cell.fault](victim)


def _hurt_link(place: Place, cell: Cell) -> None:
    link = place.lines.of(cell.where)
    match cell.fault:
        case "cut":
            link.cut(CUT_S)
            time.sleep(CUT_S)  # how long the fault lasts
        case "stall":
            link.stall(STOPPED_S)
            time.sleep(STOPPED_S)
        case _:
            link.cut(0.0)


def _stop_for_a_while(service: Service) -> None:
    service.send(signal.SIGSTOP)
    time.sleep(STOPPED_S)  # how long the fault lasts
    service.send(signal.SIGCONT)


def _stop_gracefully(service: Service) -> None:
    service.send(signal.SIGTERM)
    assert service.wait() == 0
    assert "Traceback" not in service.said()


PROCESS: dict[str, Callable[[Service], None]] = {
    "SIGKILL": Service.kill,
    "SIGSTOP": _stop_for_a_while,
    "graceful stop": _stop_gracefully,
    "restart": Service.restart,
}


def _lose_redis(place: Place) -> None:
    place.redis.stop()
    place.redis.forget()
    time.sleep(AWAY_S)  # how long the fault lasts
    place.redis.start()


def _stop_redis_for_a_while(place: Place) -> None:
    place.redis.pause()
    time.sleep(STOPPED_S)  # how long the fault lasts
    place.redis.resume()


def _end_redis(place: Place) -> None:
    place.redis.end()
    time.sleep(AWAY_S)  # how long the fault lasts
    place.redis.start()


def _restart_redis(place: Place) -> None:
    place.redis.save()
    time.sleep(0.3)  # for text that the saved state lacks
    place.redis.stop()
    place.redis.start()


REDIS: dict[str, Callable[[Place], None]] = {
    "SIGKILL": _lose_redis,
    "SIGSTOP": _stop_redis_for_a_while,
    "graceful stop": _end_redis,
    "restart": _restart_redis,
}
