"""One cell of the matrix, played: texts stream, the fault happens, the texts come to their ends."""

from __future__ import annotations

import re
import signal
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass

from specwire.client.requests import RequestOptions
from specwire.core.law.sampling import Sampling
from tests.faults.http_streams import HttpStream
from tests.faults.matrix import AWAY_S, CLIENTS_LINE, CUT_S, HTTP_LINE, JOINED_LINE, REGISTRYS_LINE, STOPPED_S, Cell
from tests.faults.parts import ServiceProcess, steps_of
from tests.faults.place import Place, said_since
from tests.faults.stack import PLAIN
from tests.faults.streams import LIMIT_S, PROMPT, Stream, plain

# Tokens before the fault.
BEGUN = 40
# At most some 300 tokens a second are decided, so this lasts longer than any fault and any stop.
LENGTH = 800
# For cells where text goes on during the fault, and is left once a drafter that is back has helped.
LONG = 4000
# Behind the fault's end; what a lost drafter proposed before is used up by then.
OLD = 100
PATIENCE_S = 120.0
# Seconds that a busy machine may add to any pause.
BUSY_S = 5.0
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


@dataclass(frozen=True, slots=True)
class Manner:
    """How a scene is played.

    length: of the texts; None for what suits the cell. begun: tokens before the fault.
    left: the texts are left once they have gone on for a while behind the fault; None for what suits the cell.
    stopped_s: how long nobody answers where the cell says so.
    """

    length: int | None = None
    begun: int = BEGUN
    left: bool | None = None
    stopped_s: float = STOPPED_S


class Scene:
    """A cell and its streams, which all go through the same orchestrator.

    Greedy and sampled, and as two verifiers share sessions evenly, one of them at each. Where text streams on through
    the fault, and what is lost comes back, the end of it is waited for, and the texts are then left (`left`).

    Attributes, once it was played:
        pause: the longest wait for a chunk of any stream since the fault. usual: the same before it.
        noticed: seconds until somebody said that he had noticed, None where nobody did.
        fences: of the sessions, before the fault.
    """

    def __init__(self, place: Place, cell: Cell, asked: Sequence[Asked] = ASKED, manner: Manner | None = None) -> None:
        self._place = place
        self._cell = cell
        self._asked = asked
        self._manner = manner or Manner()
        self.comes_back = cell.about_drafter and cell.fault not in ("SIGKILL", "graceful stop")
        outlasts = self.comes_back or cell.where == REGISTRYS_LINE
        self.left = outlasts if self._manner.left is None else self._manner.left
        self.length = self._manner.length or (LONG if self.left else LENGTH)
        self.streams: list[Stream] = []
        self.pause = self.usual = 0.0
        self.noticed: float | None = None
        self.fences: list[int] = []

    def play(self) -> None:
        """Begin, hurt, read on. Everything must be there: see `Place.mend`."""
        with ExitStack() as stack:
            self._begin(stack)
            self.fences = [self._place.log(stream.session_id).fence for stream in self.streams]
            prepare(self._place, self._cell)
            began, moment = time.monotonic(), time.time()
            hurt(self._place, self._cell, self._manner.stopped_s)
            over = time.monotonic()
            for stream in self.streams:
                if self.left:
                    self._read_on(stream, over)
                else:
                    stream.rest()
            assert all(stream.arrivals[-1] > began for stream in self.streams), "a text had ended before the fault"
            self.pause = max(stream.pause_since(began) for stream in self.streams)
            self.usual = max(stream.pause_before(began) for stream in self.streams)
            self.noticed = noticed(self._place, self._cell, self.streams, moment)

    def _read_on(self, stream: Stream, over: float) -> None:
        """Until text has gone on for a while, and drafters are of use again."""
        stream.until_arrived(over)
        stream.until(len(stream.tokens) + OLD)
        if self.comes_back:
            stream.until_accepted()

    def check_pause(self) -> None:
        """Raise AssertionError where text paused so much longer than it may that no busy machine explains it.

        What the bounds themselves are held against is measured (`tests.faults.measure`).
        """
        bound_s = 0.0 if self._cell.bound_s is None else self._cell.bound_s
        longer = max(0.0, self._manner.stopped_s - STOPPED_S)
        assert self.pause <= 2 * (bound_s + longer) + BUSY_S, f"no text for {self.pause:.1f} s: {self._cell.name}"

    def expected(self) -> list[list[int]]:
        """What the target alone writes for each stream, as far as it was read."""
        ends = [len(stream.tokens) if self.left else self.length for stream in self.streams]
        texts = [plain(PLAIN, self.length, asked.prompt, asked.sampling) for asked in self._asked]
        return [text[:end] for text, end in zip(texts, ends, strict=True)]

    def _begin(self, stack: ExitStack) -> None:
        """Until all texts stream at once; if a verifier shall be hurt, one of them from that one."""
        until = time.monotonic() + LIMIT_S
        while True:
            with ExitStack() as trial:
                self.streams = [trial.enter_context(self._ask(asked)) for asked in self._asked]
                for stream in self.streams:
                    stream.until(self._manner.begun)
                    if self._drafted:
                        stream.until_accepted()
                meant = self._cell.where != "verifier" or self._serves(self._place.verifiers[0])
                ended = [stream for stream in self.streams if not stream.under_way]
                if meant and not ended:
                    stack.enter_context(trial.pop_all())
                    return
                for stream in ended:
                    stream.rest()
                    assert stream.error is None, stream.error
            assert time.monotonic() < until, "the verifier never served, or a text ended before the others streamed"

    @property
    def _drafted(self) -> bool:
        """Whether the loss of drafting must show, so that there must be drafting before: not with the demo pair."""
        return self._cell.about_drafter and self._manner.left is not False

    def _serves(self, verifier: ServiceProcess) -> bool:
        before = steps_of(verifier.address)
        self.streams[0].until(len(self.streams[0].tokens) + 1)
        self.streams[-1].until(len(self.streams[-1].tokens) + 1)
        return steps_of(verifier.address) > before + 1

    def _ask(self, asked: Asked) -> Stream:
        options = RequestOptions(max_tokens=self.length, temperature=asked.temperature, seed=asked.seed, ngram=False)
        kind = HttpStream if self._cell.where == HTTP_LINE else Stream
        return kind(addresses(self._place, self._cell), asked.prompt, PATIENCE_S, **options)


def addresses(place: Place, cell: Cell) -> list[str]:
    """The client's addresses: with a second orchestrator where one must take over."""
    match cell.where, cell.fault:
        case "client-orchestrator", "reset":
            return [place.lines[CLIENTS_LINE].address]
        case "client-orchestrator", _:
            return [place.lines[CLIENTS_LINE].address, place.second.address]
        case "HTTP client-orchestrator", "reset":
            return place.over_http[:1]
        case "HTTP client-orchestrator", _:
            return place.over_http
        case "orchestrator", "restart":
            return [place.first.address]
        case "orchestrator", _:
            return [place.first.address, place.second.address]
        case "verifier", "restart":
            return [place.apart.address]
        case (("verifier" | "Redis" | "nobody"), _):
            return [place.first.address]
        case where, _ if where == JOINED_LINE:
            return [place.hub.address]
        case _ if cell.about_drafter:
            return [place.drafting.address]
        case where, _ if where == REGISTRYS_LINE:
            return [place.second.address]
        case _:
            return [place.apart.address]


def prepare(place: Place, cell: Cell) -> None:
    """Do what is no fault yet."""
    if (cell.where, cell.fault) == ("Redis", "restart"):
        place.redis.save()
        time.sleep(0.3)  # for text that the saved state lacks


def hurt(place: Place, cell: Cell, stopped_s: float = STOPPED_S) -> None:
    """Inject the fault. What comes back is back, or about to be, when this returns."""
    if cell.fault == "none":
        time.sleep(stopped_s)
    elif "-" in cell.where:
        _hurt_link(place, cell, stopped_s)
    elif cell.where == "Redis":
        _hurt_redis(place, cell.fault, stopped_s)
    else:
        victim = {"drafter": place.drafter, "verifier": place.verifiers[0], "orchestrator": place.first}[cell.where]
        _hurt_process(victim, cell.fault, stopped_s)


def _hurt_link(place: Place, cell: Cell, stopped_s: float) -> None:
    link = place.lines[cell.where]
    match cell.fault:
        case "cut":
            link.cut(CUT_S)
            time.sleep(CUT_S)  # how long the fault lasts
        case "stall":
            link.stall(stopped_s)
            time.sleep(stopped_s)
        case _:
            link.cut(0.0)


def _hurt_process(victim: ServiceProcess, fault: str, stopped_s: float) -> None:
    match fault:
        case "SIGKILL":
            victim.kill()
        case "SIGSTOP":
            victim.send(signal.SIGSTOP)
            time.sleep(stopped_s)  # how long the fault lasts
            victim.send(signal.SIGCONT)
        case "graceful stop":
            victim.send(signal.SIGTERM)
            assert victim.wait() == 0
            assert "Traceback" not in victim.said()
        case _:
            victim.restart()


def _hurt_redis(place: Place, fault: str, stopped_s: float) -> None:
    match fault:
        case "SIGKILL":
            place.redis.stop()
            place.redis.forget()
            _leave_redis_away(place)
        case "SIGSTOP":
            place.redis.pause()
            time.sleep(stopped_s)  # how long the fault lasts
            place.redis.resume()
        case "graceful stop":
            place.redis.end()
            _leave_redis_away(place)
        case _:
            place.redis.stop()
            place.redis.start()


def _leave_redis_away(place: Place) -> None:
    time.sleep(AWAY_S)  # how long the fault lasts
    place.redis.start()


# When whoever has to deal with a fault first knew of it, by its own words

# Of the one drafter that has dialled in, of the log, of the registry.
FORMS = " has left: ", ": the (session )?log (does not|has lost)", "; what is known stays in use$"
LEFT, NO_LOG, NO_REGISTRY = map(re.compile, FORMS)


def noticed(place: Place, cell: Cell, streams: Sequence[Stream], moment: float) -> float | None:
    """Seconds from `moment`, by the wall's clock, until somebody said so; None where nobody did, or had to."""
    if cell.fault == "none":
        return None
    if cell.where in ("orchestrator", CLIENTS_LINE, HTTP_LINE):
        told = [at for stream in streams for at in stream.breaks if at >= moment]
    else:
        sign = _sign(place, cell)
        told = [at for at, message in said_since(serving(place, cell), moment) if sign.search(message)]
    return max(0.0, min(told) - moment) if told else None


def _sign(place: Place, cell: Cell) -> re.Pattern[str]:
    if "Redis" in cell.where:
        return NO_LOG
    if cell.where == REGISTRYS_LINE:
        return NO_REGISTRY
    if cell.where == JOINED_LINE:
        return LEFT
    victim = re.escape(_victim(place, cell))
    drains = (cell.where, cell.fault) == ("verifier", "graceful stop")
    return re.compile(rf"^{victim} is draining$" if drains else rf"^link to {victim} lost")


def _victim(place: Place, cell: Cell) -> str:
    """The address under which the noticing party dialled the lost one."""
    if "-" in cell.where:
        return place.lines[cell.where].address
    if cell.where == "drafter":
        return place.lines["orchestrator-drafter"].address
    apart = serving(place, cell) is place.apart
    return (place.lines["orchestrator-verifier"] if apart else place.verifiers[0]).address


def serving(place: Place, cell: Cell) -> ServiceProcess:
    """The orchestrator through which the cell's streams go."""
    if cell.where == JOINED_LINE:
        return place.hub
    if cell.where == REGISTRYS_LINE:
        return place.second
    if cell.about_drafter:
        return place.drafting
    apart = "-" in cell.where or (cell.where, cell.fault) == ("verifier", "restart")
    return place.apart if apart else place.first
