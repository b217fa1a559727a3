"""`specwire learn`: have a drafter, or a head, learn from what its target decided, version by version."""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import os
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
from msgspec import Struct

from orchestrator.store import DamagedLog, MissingSession, SessionStore, StoredSession, StoreUnavailable, open_store
from specwire.core.invalid import InvalidParameter
from specwire.core.model import ModelError
from specwire.redis.urls import place_of
from specwire.rpc.process import SIGNALS, say
from specwire.rpc.server_options import check_metrics
from specwire.telemetry.listener import listen
from specwire.telemetry.metrics import Families, Registry, by_label, counter, gauge, process_families
from specwire.versions import ANONYMOUS, VersionError

LEARNER = "learner"
EPILOG = """\
Texts come from a session log, where they are kept for a while after their end (--retention), and from FILES: lines of
JSON with an "output", perhaps a "prompt" (texts, or lists of token ids), "tenant" and "session". A file may grow.
Nothing is read of other tenants than those named, nor of sessions that asked to be private, and what lossy rules
decided is left out: it is the drafter's own. Learn from one tenant, or from tenants that agreed to share: what was
learnt of one may show in what is proposed to another. A folder is for one set of tenants, and its versions propose in
sessions of these alone.

Drafters take versions of a drafter with `specwire draft --follow DIR`, verifiers those of a head with `specwire verify
--heads DIR`. What was learnt of a session cannot be taken out of a version; --forget removes every version that saw
it."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog, parser.formatter_class = EPILOG, argparse.RawDescriptionHelpFormatter
    add = parser.add_argument
    either = parser.add_mutually_exclusive_group(required=True)
    either.add_argument("--draft", metavar="MODEL", help="path or hub id of the drafter to begin with")
    either.add_argument(
        "--heads", metavar="HEAD", help="folder of the EAGLE-3 head to begin with, in place of a drafter"
    )
    add("--target", metavar="MODEL", help="of --heads, which reads what it computes (default: none)")
    add("--out", required=True, type=Path, metavar="DIR", help="where versions go, for services to follow")
    add(
        "--learn-from",
        required=True,
        nargs="+",
        metavar="TENANT",
        help=f"whose sessions; {ANONYMOUS} are callers without keys, not all tenants",
    )
    add("--redis-url", metavar="URL", help="session log to learn from (default: none)")
    add("--texts", nargs="+", default=[], type=Path, metavar="FILE", help="files to learn from (default: none)")
    add("--every", type=float, default=60.0, metavar="S", help="seconds between two rounds (default: %(default)g)")
    add("--once", action="store_true", help="end after one round")
    add(
        "--margin",
        type=float,
        default=0.01,
        metavar="X",
        help="acceptance on held-out texts must rise by so much for another version (default: %(default)g)",
    )
    add("--rate", type=float, default=3e-4, metavar="X", help="learning rate (default: %(default)g)")
    add("--steps", type=int, default=400, metavar="N", help="of a round, at most (default: %(default)s)")
    add(
        "--memory",
        type=int,
        default=2_000_000,
        metavar="N",
        help="tokens of texts that are kept to learn from again (default: %(default)s)",
    )
    add("--forget", nargs="+", default=[], metavar="SESSION", help="remove versions that saw it first (default: none)")
    add("--device", default="cpu", help="such as cpu or cuda:0 (default: %(default)s)")
    add("--threads", type=int, metavar="N", help="CPU threads (default: as many as there are cores)")
    add("--metrics", default="", metavar="ADDR", help="HOST:PORT for Prometheus (default: nowhere)")


def run(args: argparse.Namespace) -> int:
    """Learn until a signal, or one round; returns the exit code."""
    try:
        _check(args)
    except InvalidParameter as error:
        say(f"specwire learn: error: {error}")
        return 2
    return asyncio.run(_until_signalled(args))


def _check(args: argparse.Namespace) -> None:
    """Raises InvalidParameter."""
    if args.heads is not None and not args.target:
        raise InvalidParameter("target", "is needed with --heads: it computes what a head reads")
    if args.heads is None and args.target is not None:
        raise InvalidParameter("target", "is for --heads: a drafter learns from tokens alone")
    if not (args.redis_url or args.texts):
        raise InvalidParameter("redis-url", "or --texts is needed: there is nothing to learn from")
    if args.redis_url and place_of(args.redis_url) != "redis":
        why = "must be a Redis: a log in memory or in a file is read by the one process that has it"
        raise InvalidParameter("redis-url", f"{why}, not {args.redis_url!r}")
    for name in ("steps", "memory"):
        if getattr(args, name) < 1:
            raise InvalidParameter(name, f"must be at least 1, not {getattr(args, name)}")
    if args.threads is not None and args.threads < 1:
        raise InvalidParameter("threads", f"must be at least 1, not {args.threads}")
    if not 0 < args.every <= 86_400:
        raise InvalidParameter("every", f"must be above 0 and at most a day, not {args.every:g} s")
    for name in ("margin", "rate"):
        if not 0 < getattr(args, name) < 1:
            raise InvalidParameter(name, f"must be above 0 and below 1, not {getattr(args, name):g}")
    missing = next((path for path in args.texts if not path.is_file()), None)
    if missing is not None:
        raise InvalidParameter("texts", f"there is no file {missing}")
    check_metrics(args.metrics, insecure=False)


# ----------------------------------------------------------------------------------------------------------------------
# Where texts come from.


class SessionText(NamedTuple):
    """A text that was decided, of a session by its id, in token ids."""

    session_id: str
    prompt: tuple[int, ...]
    output: tuple[int, ...]


class LoggedTexts:
    """Ended sessions of a log, each told once. tenants: whose. vocabulary: fingerprint of the ids' vocabulary."""

    def __init__(self, store: SessionStore, tenants: Sequence[str], vocabulary: str) -> None:
        self._store = store
        self._tenants = frozenset(tenants)
        self._vocabulary = vocabulary
        self._told: set[str] = set()
        self.deleted: list[str] = []
        self.left_out: Counter[str] = Counter()

    async def fresh(self) -> list[SessionText]:
        """Those that ended since the last call; `deleted` has the ids of sessions that were deleted.

        Raises StoreUnavailable.
        """
        known = [each async for each in self._store.known_sessions()]
        self._told &= {each.session_id for each in known}
        self.deleted = [each.session_id for each in known if each.state == "deleted"]
        ended = [each for each in known if each.state == "ended" and each.session_id not in self._told]
        found = []
        for each in ended:
            if each.whose is None or not self._agreed(*each.whose):
                continue  # and looked at again: nothing is remembered of it
            self._told.add(each.session_id)
            text = await self._read(each.session_id)
            if text is not None:
                found.append(text)
        return found

    def _agreed(self, tenant: str, private: bool) -> bool:
        return (tenant or ANONYMOUS) in self._tenants and not private

    async def _read(self, session_id: str) -> SessionText | None:
        try:
            stored = await self._store.read(session_id)
        except (MissingSession, DamagedLog):
            return None
        if stored is None or not self._agreed(stored.record.tenant, stored.record.private):
            return None
        why = self._unfit(stored)
        if why:
            self.left_out[why] += 1
            return None
        return SessionText(session_id, stored.record.prompt, stored.tokens)

    def _unfit(self, stored: StoredSession) -> str:
        """Why a text teaches nothing; "" if it does."""
        if stored.record.sampling.lossy:
            return "decided by a lossy rule"
        if stored.record.vocabulary_fingerprint != self._vocabulary:
            return "of another vocabulary than the model's"
        return "" if stored.tokens else "empty"


class TextLine(Struct, forbid_unknown_fields=True):
    """A line of a file. text: an output, too."""

    output: str | list[int] | None = None
    text: str | None = None
    prompt: str | list[int] = ""
    tenant: str = ANONYMOUS
    session: str = ""


class FiledTexts:
    """Lines of files, each told once. encode: makes token ids; ids are below `vocabulary`."""

    def __init__(
        self, files: Sequence[Path], tenants: Sequence[str], encode: Callable[[str], list[int]], vocabulary: int
    ) -> None:
        self._read: dict[Path, int] = dict.fromkeys(files, 0)
        self._lines: Counter[Path] = Counter()
        self._tenants = frozenset(tenants)
        self._encode = encode
        self._vocabulary = vocabulary

    def fresh(self) -> list[SessionText]:
        """Those that were added since the last call, in whole lines. Raises InvalidParameter."""
        return [text for file in self._read for text in self._added(file)]

    def _added(self, file: Path) -> Iterator[SessionText]:
        try:
            with file.open("rb") as opened:
                opened.seek(self._read[file])
                whole, end, _ = opened.read().rpartition(b"\n")
        except OSError as error:
            raise InvalidParameter("texts", f"{file} cannot be read: {error.strerror}") from None
        self._read[file] += len(whole) + len(end)
        for line in whole.splitlines():
            self._lines[file] += 1
            if not line.strip():
                continue
            try:
                found = self._text(line)
            except (ValueError, msgspec.MsgspecError) as error:
                raise InvalidParameter("texts", f"{file}, line {self._lines[file]}: {error}") from None
            if found is not None:
                yield found

    def _text(self, line: bytes) -> SessionText | None:
        """None where its tenant is none of those named. Raises ValueError and MsgspecError."""
        told = msgspec.json.decode(line, type=TextLine)
        if told.tenant not in self._tenants:
            return None
        output = told.text if told.output is None else told.output
        if output is None:
            raise ValueError("has no output")
        session = told.session or hashlib.sha256(line).hexdigest()
        return SessionText(session, self._ids(told.prompt), self._ids(output))

    def _ids(self, said: str | list[int]) -> tuple[int, ...]:
        ids = self._encode(said) if isinstance(said, str) else said
        outside = next((each for each in ids if not 0 <= each < self._vocabulary), None)
        if outside is not None:
            raise ValueError(f"token id {outside} is outside 0..{self._vocabulary - 1}")
        return tuple(ids)


# ----------------------------------------------------------------------------------------------------------------------
# The rounds.


@dataclass(slots=True)
class LearnerFigures:
    """What was done so far. latest: the last round's, a `LearningRound`; None before the first."""

    version: int = 0
    texts: int = 0
    rounds: int = 0
    steps: int = 0
    changes: int = 0
    latest: Any = None

    def families(self) -> Families:
        yield gauge("learn_version", "In use.", self.version)
        yield counter("learn_texts_total", "Texts that were taken in, held-out ones among them.", self.texts)
        yield counter("learn_rounds_total", "Rounds.", self.rounds)
        yield counter("learn_steps_total", "Steps of learning.", self.steps)
        yield counter("learn_version_changes_total", "Versions that came into use, earlier ones too.", self.changes)
        if self.latest is None:
            return
        losses = {"first": self.latest.loss_before, "last": self.latest.loss_after}
        known = {when: loss for when, loss in losses.items() if loss is not None}
        yield by_label(gauge, "learn_loss", "Nats a token, of the latest round's steps.", "steps", known)
        measured = {"used": self.latest.before, "former": self.latest.former, "learnt": self.latest.candidate}
        shares = {of: found.first for of, found in measured.items() if found is not None}
        chains = {of: found.chain for of, found in measured.items() if found is not None}
        yield by_label(gauge, "learn_acceptance_ratio", "Greedy, on held-out texts: the first token's.", "of", shares)
        yield by_label(gauge, "learn_chain_tokens", "Greedy, on held-out texts: tokens in a row.", "of", chains)


async def _until_signalled(args: argparse.Namespace) -> int:
    """The first signal ends the learning between two steps, the second one on the spot; returns the exit code."""
    learning = asyncio.ensure_future(_learn(args))
    loop = asyncio.get_running_loop()

    def on_signal(number: int) -> None:
        if not learning.cancel() or learning.cancelling() > 1:
            os._exit(128 + number)

    for number in SIGNALS:
        loop.add_signal_handler(number, on_signal, number)
    try:
        return await learning
    finally:
        for number in SIGNALS:
            loop.remove_signal_handler(number)


async def _learn(args: argparse.Namespace) -> int:
    """Returns the exit code; cancelled, it has not failed."""
    try:
        async with AsyncExitStack() as cleanup:
            await _rounds(args, cleanup)
    except asyncio.CancelledError:
        return 0
    except (InvalidParameter, ModelError, VersionError, StoreUnavailable) as error:
        say(f"specwire learn: error: {error}")
        return 1
    return 0


async def _rounds(args: argparse.Namespace, cleanup: AsyncExitStack) -> None:
    # imports torch, which a process that only parses arguments does not need
    from specwire.lm.training.online import Learner, LearnerOptions
    from specwire.lm.training.texts import DecidedText, session_hash

    options = LearnerOptions(
        draft=args.draft if args.heads is None else args.heads,
        out=args.out,
        tenants=tuple(args.learn_from),
        margin=args.margin,
        rate=args.rate,
        steps=args.steps,
        memory=args.memory,
        device=args.device,
        threads=args.threads,
        forgotten=tuple(args.forget),
        target=args.target or "",
    )
    loop, figures, registry = asyncio.get_running_loop(), LearnerFigures(), Registry()
    store = await _log(args.redis_url, cleanup) if args.redis_url else None
    # One thread for all of it: the number of PyTorch's threads belongs to the one that sets it.
    thread = cleanup.enter_context(ThreadPoolExecutor(1, "learner"))
    learner = await loop.run_in_executor(thread, Learner, options, _tell)
    for last in (learner.close, thread.shutdown, learner.stop):  # in the opposite order
        cleanup.callback(last)
    logged = LoggedTexts(store, options.tenants, learner.vocabulary_fingerprint) if store is not None else None
    filed = FiledTexts(args.texts, options.tenants, learner.encode, learner.vocabulary)
    figures.version = learner.version
    registry.add(LEARNER, figures.families)
    registry.add(LEARNER, process_families)
    if args.metrics:
        metrics = await listen(registry, args.metrics)
        cleanup.push_async_callback(metrics.stop)
    while True:
        found = filed.fresh()
        if logged is not None:
            found += await _looked(logged, args.once)
            await loop.run_in_executor(thread, learner.forget, {session_hash(each) for each in logged.deleted})
        texts = [DecidedText(session_hash(each.session_id), each.prompt, each.output) for each in found]
        done = await loop.run_in_executor(thread, learner.round, texts)
        figures.changes += done.version != figures.version
        figures.version, figures.texts = done.version, figures.texts + len(texts)
        figures.rounds, figures.steps, figures.latest = figures.rounds + 1, figures.steps + done.steps, done
        if done.steps or args.once:
            _tell(_told(figures.rounds, len(texts), done))
        if args.once:
            return
        await asyncio.sleep(args.every)


async def _log(url: str, cleanup: AsyncExitStack) -> SessionStore:
    store = await open_store(url)
    cleanup.push_async_callback(store.close)
    return store


async def _looked(logged: LoggedTexts, once: bool) -> list[SessionText]:
    """What ended meanwhile; nothing while the log does not answer, unless there is one look only."""
    try:
        found = await logged.fresh()
    except StoreUnavailable as error:
        if once:
            raise
        _tell(f"{error}; looking again later")
        return []
    for why, count in logged.left_out.items():
        _tell(f"{count} texts are left out: {why}")
    logged.left_out.clear()
    return found


def _told(number: int, texts: int, done: Any) -> str:
    """A round, a `LearningRound`, for people."""
    losses = "" if done.loss_before is None else f", loss {done.loss_before:.3f} -> {done.loss_after:.3f}"
    measured = {"in use": done.before, "before that": done.former, "learnt": done.candidate}
    accepted = ", ".join(
        f"{of} {found.first:.3f} (chain {found.chain:.2f})" for of, found in measured.items() if found is not None
    )
    head = f"round {number}: {texts} texts, {done.steps} steps{losses}"
    return f"{head}; {f'acceptance {accepted}; ' if accepted else ''}version {done.version} is in use: {done.why}"


def _tell(line: str) -> None:
    say(f"specwire learn: {line}")
