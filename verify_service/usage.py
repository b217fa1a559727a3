"""What sessions used, as records that a billing job reads (`--usage-log FILE`, `specwire usage FILE...`).

A record is a line of JSON about one stay: a session on one link, from when it has its slot until it is closed or the
link is lost. A running stay is written every few seconds, and again when it is over. The newest line of a stay counts,
so no line counts twice. A session that moves to another verifier has a stay there. Its text has no gaps, so what was
decided of it is the greatest end that any of its stays tells, less its prompt. A verifier that was killed thus loses no
token that another one went on behind.

Texts that were scored in one call are a session that decides nothing. Its only stay is named by what was asked, so one
that is asked for again, here or elsewhere, counts once. It is on the disk before its caller is answered; one that fails
is in no record.
"""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import logging
import os
import secrets
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import msgspec

from specwire.core.invalid import InvalidParameter
from specwire.v1 import verify_pb2
from verify_service.engine.messages import Opening, Report
from verify_service.engine.sessions import PARK_AFTER_US

log = logging.getLogger(__name__)

FLAG = "--usage-log"
# Seconds between two lines of a running stay.
INTERVAL_S = 10.0
# For an answer that waits until its record is written.
WRITTEN_WITHIN_S = 5.0
# Records that wait while the file cannot be written; later ones are lost, and counted.
MOST_WAITING = 100_000
# Hexadecimal digits by which a session is told. Its id itself is the right to read it.
SHOWN_DIGITS = 32
RUNNING, CLOSED, LINK_LOST, REFUSED, REOPENED = "running", "closed", "link lost", "refused", "opened anew"
SCORED, LEFT = "scored", "score left"


class UsageRecord(msgspec.Struct, frozen=True):
    """A stay so far.

    Attributes:
        stay: names it, for ever and everywhere.
        session: a hash of the session's id, the same on every verifier.
        tenant: as `--tenants` has it; "" where nothing tells.
        prompt_tokens: as the orchestrator says.
        start, end: the text's length, prompt included, when the stay began, and now.
        fed: tokens of the text at `start` whose keys and values had to be computed.
        tested: draft tokens that were tested.
        kv_byte_seconds: memory of the text's keys and values, by time. Of a pause the first 5 s count: then whoever
            waits for a slot may have this one.
        began, until: seconds since 1970.
        why: what ended it, or that it is running.
        scored: given tokens that were told their probability.
    """

    stay: str
    session: str
    tenant: str
    model: str
    prompt_tokens: int
    start: int
    end: int
    fed: int
    tested: int
    kv_byte_seconds: float
    began: float
    until: float
    why: str
    scored: int = 0


@dataclass(slots=True)
class Stay:
    """What is known of a session on a link.

    counted_s: until when its memory is accounted for, on the monotonic clock; None while it waits for a slot. heard_s:
    when it last had a token.
    """

    session: str
    tenant: str
    attach: int
    prompt_tokens: int
    start: int
    name: str = ""
    end: int = 0
    fed: int = 0
    tested: int = 0
    kv_byte_seconds: float = 0.0
    began: float = 0.0
    counted_s: float | None = None
    heard_s: float = 0.0


class UsageLog:
    """Counts in the event loop, and writes in a thread. `lost`: records that found no place while the file failed.

    Args:
        file: lines are appended; one that is moved away meanwhile is made anew.
        position_bytes: memory of one token's keys and values.
        clock: seconds, which no one sets.
    """

    def __init__(
        self,
        file: Path,
        model: str,
        position_bytes: int,
        interval_s: float = INTERVAL_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._file = file
        self._model = model
        self._position_bytes = position_bytes
        self._interval_s = interval_s
        self._clock = clock
        self.lost = 0
        self._stays: dict[tuple[int, int], Stay] = {}
        self._over: list[UsageRecord] = []
        self._names = (f"{secrets.token_hex(8)}-{number}" for number in itertools.count(1))
        self._fails = False
        # One write at a time, in order. A disk that hangs has no other work wait.
        self._writer = ThreadPoolExecutor(1, "usage log")
        self._writing: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Write from now on; call it in the event loop."""
        self._writing = asyncio.create_task(self._write_for_ever())

    async def stop(self) -> None:
        """Every stay is over; the last lines are written before this returns, where they can be."""
        if self._writing is not None:
            self._writing.cancel()
            with suppress(asyncio.CancelledError):
                await self._writing
            self._writing = None
        for key in list(self._stays):
            self._end(key, LINK_LOST)
        await self.write()

    def opened(self, link: int, opening: Opening) -> None:
        """A session was sent; what was open under its handle is over."""
        self._end((link, opening.handle), REOPENED)
        shown = hashlib.sha256(opening.session_id.encode()).hexdigest()[:SHOWN_DIGITS]
        self._stays[link, opening.handle] = Stay(
            shown, opening.tenant, opening.attach, opening.prompt_length, len(opening.tokens)
        )

    def reported(self, link: int, report: Report) -> None:
        """The engine seated sessions, decided tokens, or refused."""
        for admitted in report.admitted:
            stay = self._stays.get((link, admitted.handle))
            if stay is not None and stay.attach == admitted.attach:
                stay.name, stay.began = next(self._names), time.time()
                stay.counted_s = stay.heard_s = self._clock()
                stay.end = max((each.verdict.end for each in admitted.tail), default=admitted.position)
                stay.fed = 0 if admitted.resumed else admitted.position - admitted.cached
        for decided in report.decided:
            stay = self._stays.get((link, decided.handle))
            if stay is not None and stay.attach == decided.attach:
                self._hold(stay)
                stay.counted_s = stay.heard_s = self._clock()
                stay.end = max(stay.end, decided.verdict.end)
                stay.tested += decided.verdict.width
                if decided.verdict.finish is not None:
                    self._end((link, decided.handle), decided.verdict.finish.name.lower())
        for refusal in report.refused:
            self._end((link, refusal.handle), REFUSED)

    def closed(self, link: int, handles: Iterable[int]) -> None:
        """The orchestrator closed sessions."""
        for handle in handles:
            self._end((link, handle), CLOSED)

    def link_lost(self, link: int) -> None:
        """Nobody is told of its sessions any more."""
        for key in [key for key in self._stays if key[0] == link]:
            self._end(key, LINK_LOST)

    async def scored(self, request: verify_pb2.ScoreRequest, tenant: str, scored: int, seconds: float) -> None:
        """A call's texts have their scores, `seconds` after it came. Returns once the record is written, or late."""
        name = _name_of(request, tenant) if request.score_id else next(self._names)
        self._keep_score(request, tenant, name, _length_of(request) - 1, seconds, SCORED, scored)
        with suppress(TimeoutError):
            async with asyncio.timeout(WRITTEN_WITHIN_S):
                await self.write(running=False)

    def left(self, request: verify_pb2.ScoreRequest, tenant: str, fed: int, seconds: float) -> None:
        """A call's caller left before its end, `seconds` after it came, when so many tokens were computed.

        It is a stay of its own: whoever asks again has them computed again.
        """
        self._keep_score(request, tenant, next(self._names), fed, seconds, LEFT, 0)

    def _keep_score(
        self, request: verify_pb2.ScoreRequest, tenant: str, name: str, fed: int, seconds: float, why: str, scored: int
    ) -> None:
        tokens = _length_of(request)
        stay = Stay(name, tenant, 0, tokens, tokens, name, tokens, fed, began=time.time() - seconds)
        stay.kv_byte_seconds = _longest_of(request) * self._position_bytes * seconds
        self._keep(self._record(stay, why, scored))

    async def write(self, running: bool = True) -> None:
        """Append what is over, and how far running stays are. A file that cannot be written is told of once."""
        over, self._over = self._over, []
        stays = [stay for stay in self._stays.values() if running and stay.counted_s is not None]
        records = [*over, *(self._record(stay, RUNNING) for stay in stays)]
        if not records:
            return
        written = False
        try:
            await asyncio.get_running_loop().run_in_executor(self._writer, append_records, self._file, records)
            written, self._fails = True, False
        except OSError as error:
            if not self._fails:
                log.error("%s: %s cannot be written, and is tried again: %s", FLAG, self._file, error.strerror)
            self._fails = True
        finally:
            if not written:  # a line that is there nevertheless counts once
                self._over[:0] = over

    async def _write_for_ever(self) -> None:
        while True:
            await asyncio.sleep(self._interval_s)
            await self.write()

    def _end(self, key: tuple[int, int], why: str) -> None:
        """Nothing is told of a stay that has ended already, or never had a slot."""
        stay = self._stays.pop(key, None)
        if stay is not None and stay.counted_s is not None:
            self._keep(self._record(stay, why))

    def _keep(self, record: UsageRecord) -> None:
        """For the next write."""
        if len(self._over) < MOST_WAITING:
            self._over.append(record)
        else:
            self.lost += 1

    def _hold(self, stay: Stay) -> None:
        """Account for the memory that it has had since this was last done."""
        until_s = min(self._clock(), stay.heard_s + PARK_AFTER_US / 1e6)
        if stay.counted_s is not None and until_s > stay.counted_s:
            stay.kv_byte_seconds += stay.end * self._position_bytes * (until_s - stay.counted_s)
            stay.counted_s = until_s

    def _record(self, stay: Stay, why: str, scored: int = 0) -> UsageRecord:
        self._hold(stay)
        same = ("session", "tenant", "prompt_tokens", "start", "end", "fed", "tested")
        return UsageRecord(
            stay=stay.name,
            model=self._model,
            kv_byte_seconds=round(stay.kv_byte_seconds, 3),
            began=round(stay.began, 3),
            until=round(time.time(), 3),
            why=why,
            scored=scored,
            **{name: getattr(stay, name) for name in same},
        )


def _length_of(request: verify_pb2.ScoreRequest) -> int:
    """Of all texts. The row of the last token of one is not needed."""
    return len(request.tokens) + sum(len(other.tokens) for other in request.others)


def _longest_of(request: verify_pb2.ScoreRequest) -> int:
    """Of its texts, each behind what they have in common."""
    others = (request.from_position + len(other.tokens) for other in request.others)
    return max(len(request.tokens), *others, 0)


def _name_of(request: verify_pb2.ScoreRequest, tenant: str) -> str:
    """The same on every verifier, and of no two calls that ask for something else, whatever id these come with."""
    asked = f"{len(tenant)}:{tenant}".encode() + request.SerializeToString(deterministic=True)
    return hashlib.sha256(asked).hexdigest()[:SHOWN_DIGITS]


def check_usage(file: Path | None) -> None:
    """InvalidParameter unless lines can be appended to it."""
    if file is not None:
        try:
            append_records(file, [])
        except OSError as error:
            raise InvalidParameter(FLAG, f"{file} cannot be written: {error.strerror}") from None


def append_records(file: Path, records: Sequence[UsageRecord]) -> None:
    """They are on the disk when this returns. Raises OSError; the last line may then be a part of one.

    A part that an earlier failure left is ended first, so that it spoils no other line.
    """
    lines = b"".join(msgspec.json.encode(record) + b"\n" for record in records)
    descriptor = os.open(file, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o600)
    try:
        size = os.fstat(descriptor).st_size
        if size and os.pread(descriptor, 1, size - 1) != b"\n":
            lines = b"\n" + lines
        left = memoryview(lines)
        while left:
            left = left[os.write(descriptor, left) :]
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


class Usage(NamedTuple):
    """What the sessions of a tenant and a model used. decided, fed, tested, scored: tokens."""

    sessions: int
    prompt_tokens: int
    fed: int
    decided: int
    tested: int
    scored: int
    kv_byte_seconds: float


def read_records(file: Path) -> Iterator[UsageRecord | None]:
    """Its lines; None for one that is no record. Raises OSError."""
    decoder = msgspec.json.Decoder(UsageRecord)
    with file.open("rb") as lines:
        for line in lines:
            if line.strip():
                try:
                    yield decoder.decode(line)
                except msgspec.DecodeError:
                    yield None


def totals(records: Iterable[UsageRecord]) -> dict[tuple[str, str], Usage]:
    """By tenant and model, in order. records: of all verifiers that the sessions have been to, in any order."""
    newest: dict[str, UsageRecord] = {}
    for record in records:
        known = newest.get(record.stay)
        if known is None or _progress(record) >= _progress(known):
            newest[record.stay] = record
    sessions: dict[tuple[str, str], dict[str, list[UsageRecord]]] = defaultdict(lambda: defaultdict(list))
    for record in newest.values():
        sessions[record.tenant, record.model][record.session].append(record)
    return {key: _added_up(list(sessions[key].values())) for key in sorted(sessions)}


def _progress(record: UsageRecord) -> tuple[float, ...]:
    """It only grows while a stay lasts: parts of a file may be read in any order, the wall clock may be set back."""
    return record.end, record.tested, record.kv_byte_seconds, record.until


def _added_up(sessions: Sequence[Sequence[UsageRecord]]) -> Usage:
    # An orchestrator that goes on with a session may take its decided tokens for the prompt: the shortest one counts.
    prompts = [min(stay.prompt_tokens for stay in stays) for stays in sessions]
    ends = [max(stay.end for stay in stays) for stays in sessions]
    stays = [stay for each in sessions for stay in each]
    return Usage(
        len(sessions),
        sum(prompts),
        sum(stay.fed for stay in stays),
        sum(ends) - sum(prompts),
        sum(stay.tested for stay in stays),
        sum(stay.scored for stay in stays),
        round(sum(stay.kv_byte_seconds for stay in stays), 3),
    )
