"""Who takes part: specwire with each source, alone and by default, with a drafter at a distance; and the libraries."""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np

from bench.harness.child import BenchChild, descendants
from bench.harness.runs import BenchError, Run
from bench.harness.sessions import (
    LOAD_LIMIT,
    RUN_LIMIT,
    Asked,
    Together,
    client_of,
    exactly,
    run_in,
    together,
)
from bench.peers.library import PRECISIONS, command, exported
from bench.relay.link import RelayLink
from bench.speed.prompts import SpeedPrompt
from specwire.core.model import ModelError, is_gguf
from specwire.named_models import included_head
from specwire.options import cores
from specwire.provenance import proc_field

OFF, DEFAULT, HEADLESS = "off", "default", "default, no head"
TEXTS, HEAD, DRAFTER = "texts", "head", "drafter"
ONE_OFF, ONE = "one process, off", "one process, default"
SKIP, TRAINED = "fewer layers", ("medusa", "hydra", "mtp")
FAR_OFF, FAR_20, FAR_80 = "off, one core", "drafter 20 ms away", "drafter 80 ms away"
LLAMACPP, OPENVINO, TRANSFORMERS, VLLM = "llama.cpp", "OpenVINO GenAI", "transformers", "vLLM"
FORWARD, PAUSED = "the forward alone", "the forward alone, one core, paused"
ASSISTED = f"{TRANSFORMERS}, assisted"
STATIC, CONTINUOUS = f"{TRANSFORMERS}, static batch", f"{TRANSFORMERS}, continuous batching"
LOOKUP, DRAFT_MODEL = f"{OPENVINO}, prompt lookup", f"{OPENVINO}, draft model"
NGRAM_KINDS = ("ngram-simple", "ngram-map", "ngram-mod", "ngram-cache")
FAR = {FAR_OFF: None, FAR_20: 20.0, FAR_80: 80.0}
NOBODY = ("--no-draft", "--no-ngram", "--no-heads")
# Of `specwire up`, by row: what may propose is what is not left out.
LEFT_OUT: dict[str, tuple[str, ...]] = {
    OFF: NOBODY,
    TEXTS: ("--no-draft", "--no-heads"),
    HEAD: ("--no-draft", "--no-ngram"),
    DRAFTER: ("--no-ngram", "--no-heads"),
    DEFAULT: (),
    HEADLESS: ("--no-heads",),
    ONE_OFF: (*NOBODY, "--one-process"),
    ONE: ("--no-heads", "--one-process"),
    **dict.fromkeys((*TRAINED, SKIP), ("--no-draft", "--no-ngram")),
}
# What drafts in the row SKIP, as --heads takes it.
SKIPPED = "self:skip=3"
# By row: the library, and its mode as its process calls it.
LIBRARIES = {
    LLAMACPP: ("llamacpp", "plain"),
    f"{LLAMACPP}, draft model": ("llamacpp", "draft"),
    **{f"{LLAMACPP}, {kind}": ("llamacpp", kind) for kind in NGRAM_KINDS},
    OPENVINO: ("openvino", "plain"),
    LOOKUP: ("openvino", "lookup"),
    DRAFT_MODEL: ("openvino", "draft"),
    TRANSFORMERS: ("transformers", "plain"),
    ASSISTED: ("transformers", "assisted"),
    STATIC: ("transformers", "static"),
    CONTINUOUS: ("transformers", "continuous"),
    FORWARD: ("forward", "plain"),
    PAUSED: ("forward", "paused"),
}
DRAFTED_MODES = ("draft", "assisted")
VLLM_ROWS = (VLLM, f"{VLLM}, n-grams", f"{VLLM}, draft model")
NO_VLLM = "not set up: vLLM reads no such file, and nothing here writes it as bfloat16 for it"
# The libraries' plain rows, and those that speculate.
PLAIN_ROWS = (LLAMACPP, OPENVINO, TRANSFORMERS, STATIC, CONTINUOUS, VLLM)
SPECULATING = tuple(key for key in LIBRARIES if key not in (*PLAIN_ROWS, FORWARD, PAUSED))
OURS = (*LEFT_OUT, *FAR)
SEED = 1
ANY_PORT = "127.0.0.1:0"
# Words of a service that failed, for people.
MOST_SAID = 300
# Positions beside prompt and tokens: windows reach beyond the end.
BEYOND = 64
ASK_LIMIT_S = 60.0
# Memory that is taken before the first row starts. On a virtual machine the first of several equal services gets memory
# that processes before have just given back, and its forwards take longer, by up to a tenth: that was `off`.
SET_ASIDE = 2 << 30
# Slots that `specwire up` has where it is told nothing.
USUAL_SLOTS = 16

Prompts = Sequence[Sequence[int]]


class SpeedModels(NamedTuple):
    """What is served; None for what there is none of, or what `specwire up` takes by itself.

    target, draft: as --target and --draft take them. peer_target, peer_draft: what libraries read. peers: the
    interpreter of their environment. options: further ones, of every service of ours. dtype: of all rows; None for what
    each takes by itself. trained: has TRAINED's folders.
    one_tenant: sessions are of one tenant with a key, and proposed what the others say.
    """

    target: str
    draft: str | None = None
    head: str | None = None
    peer_target: str | None = None
    peer_draft: str | None = None
    peers: Path = Path("none")
    options: tuple[str, ...] = ()
    dtype: str | None = None
    trained: Path | None = None
    one_tenant: bool = False

    @property
    def words(self) -> tuple[str, ...]:
        """Of every service of ours."""
        return (*self.options, *(() if self.dtype is None else ("--dtype", self.dtype)))


class Memory(NamedTuple):
    """MiB: in memory now, shares of what several map counted once, and the sum of each process's most."""

    resident: float
    peak: float


@dataclass(frozen=True, slots=True)
class SpeedRow:
    """One way to generate. `ask` yields what all prompts took, begun at once: (prompts, tokens, temperature).

    children: its processes, which may be other rows', too. ready_seconds: from their start to "ready".
    """

    key: str
    children: tuple[BenchChild, ...]
    ready_seconds: float
    ask: Callable[[Prompts, int, float], Together]

    def memory(self) -> Memory:
        pids = [pid for child in self.children for pid in (child.pid, *descendants(child.pid))]
        parts = [(_kib(pid, "smaps_rollup", "Pss"), _kib(pid, "status", "VmHWM")) for pid in pids]
        return Memory(*(round(sum(column) / 1024, 1) for column in zip(*parts, strict=True)))


def _kib(pid: int, file: str, field: str) -> int:
    """0 of a process that has gone."""
    found = proc_field(f"/proc/{pid}/{file}", field)
    return int(found.split()[0]) if found else 0


class SpeedField:
    """The rows of a piece, ended by `cleanup`. A row that cannot be had is in `failed`, with the reason.

    sessions: at once, at most. longest: tokens of a prompt, and behind it.
    """

    def __init__(self, models: SpeedModels, folder: Path, cleanup: ExitStack) -> None:
        self._models, self._folder, self._cleanup = models, folder, cleanup
        self._runner = cleanup.enter_context(asyncio.Runner())
        self._sessions = 1
        self._token = secrets.token_urlsafe(24) if models.one_tenant else ""
        if self._token:
            self._keys.touch(0o600)
            self._keys.write_text(f"bench {self._token}\n")
        self.rows: dict[str, SpeedRow] = {}
        self.failed: dict[str, str] = {}
        # Of the service without drafting: where prompts are encoded, and what it says of itself.
        self.http = ""
        self.runtimes: dict[str, str] = {}
        self._set_aside = np.empty(0, np.uint8)

    @property
    def _keys(self) -> Path:
        return self._folder / "keys"

    def start(self, keys: Sequence[str], sessions: int, longest: int) -> None:
        """Start these rows; those at a distance share a verifier and a drafter."""
        self._sessions = sessions
        if not len(self._set_aside):
            self._set_aside = np.ones(SET_ASIDE, np.uint8)  # touched, and kept as long as the rows
        for key in keys:
            if key in LEFT_OUT:
                self._try([key], partial(self._up, key))
            elif key in LIBRARIES:
                self._try([key], partial(self._library, key, sessions, longest))
            elif key in VLLM_ROWS:
                self.failed[key] = NO_VLLM
        if far := [key for key in keys if key in FAR]:
            self._try(far, lambda: self._apart(far))

    def drop(self, key: str, reason: str) -> None:
        """Go on without a row; what it shares with others goes on."""
        row = self.rows.pop(key)
        self.failed[key] = reason
        shared = {child for other in self.rows.values() for child in other.children}
        for child in set(row.children) - shared:
            child.stop()

    def _try(self, keys: Sequence[str], start: Callable[[], Iterable[SpeedRow]]) -> None:
        with ExitStack() as owned:
            self._owned = owned
            try:
                self.rows |= {row.key: row for row in start()}
            except (BenchError, ModelError, OSError) as error:
                self.failed |= dict.fromkeys(keys, str(error))
                return
            self._cleanup.push(owned.pop_all())

    def _child(self, name: str, words: Sequence[str], only: frozenset[int] = frozenset()) -> tuple[BenchChild, Path]:
        said = self._folder / f"{name.replace(' ', '-').replace(',', '')}.stderr"
        with said.open("wb") as errors:
            child = BenchChild(name, words, errors=errors, cores=only)
        self._owned.callback(child.stop)
        return child, said

    def _ready(self, started: tuple[BenchChild, Path], request: dict[str, object] | None = None) -> dict[str, object]:
        """Its ready line, or its answer to the request; BenchError with its last words."""
        child, said = started
        try:
            return child.answer(LOAD_LIMIT) if request is None else child.ask(request, LOAD_LIMIT)
        except BenchError as error:
            words = " ".join(said.read_text(errors="replace").split())[-MOST_SAID:]
            raise BenchError(f"{error}: {words}" if words and "error" not in str(error) else str(error)) from None

    def _service(self, key: str, *words: str, only: frozenset[int] = frozenset()) -> tuple[BenchChild, Path]:
        command = (sys.executable, "-m", "deploy", *words, "--listen", ANY_PORT, "--json")
        return self._child(f"specwire {words[0]} {key}", command, only)

    def _up(self, key: str) -> list[SpeedRow]:
        """`specwire up`, with what the row is about and nothing else."""
        words = [*self._models.words, *LEFT_OUT[key]]
        if self._sessions > USUAL_SLOTS:
            words += ["--slots", str(self._sessions)]
        if self._token:
            words += ["--api-keys", str(self._keys)]
        if key in (ONE, ONE_OFF):  # its log would be in memory
            words += ["--redis-url", f"file:{self._folder / key}.log"]
        words += ["--http", ANY_PORT, *self._sources(key)]
        began = time.monotonic()
        started = self._service(key, "up", "--target", self._models.target, *words)
        ready = self._ready(started)
        seconds = time.monotonic() - began
        if key == OFF:
            self.http = str(ready["http"])
        return [self._ours(key, (started[0],), seconds, str(ready["address"]))]

    def _sources(self, key: str) -> Iterable[str]:
        """What proposes in a row, as options. BenchError for what there is none of."""
        models = self._models
        if key in TRAINED:
            folder = (models.trained or Path("none")) / key
            if not (folder / "config.json").is_file():
                raise BenchError(f"there is no head in {folder.name}")
            yield from ("--heads", str(folder))
        if key == SKIP:
            yield from ("--heads", SKIPPED)
        if key in (DRAFTER, DEFAULT, HEADLESS, ONE) and models.draft is not None:
            yield from ("--draft", models.draft)
        # By itself `up` takes an included head only where rows are free.
        included = included_head(models.target) if key == HEAD else None
        if key in (HEAD, DEFAULT) and (head := models.head or included) is not None:
            yield from ("--heads", str(head))

    def _ours(self, key: str, children: tuple[BenchChild, ...], seconds: float, address: str) -> SpeedRow:
        client = client_of(self._runner, self._cleanup, address, self._token)
        self.runtimes[key] = self._runner.run(client.server_info()).target.runtime
        drafting = key not in (OFF, FAR_OFF, ONE_OFF)

        def ask(prompts: Prompts, tokens: int, temperature: float) -> Together:
            asked = Asked(client, key, drafting, temperature, SEED)
            return run_in(self._runner, key, together(asked, prompts, tokens))

        return SpeedRow(key, children, seconds, ask)

    def _apart(self, keys: Sequence[str]) -> list[SpeedRow]:
        """Target and drafter with a core each, a relay before the drafter; an orchestrator beside the target."""
        models, mine = self._models, sorted(os.sched_getaffinity(0))
        if len(mine) < 2:
            raise BenchError("a drafter with a core of its own needs two cores")
        if models.draft is None:
            raise BenchError("there is no drafter (--draft)")
        target, drafter = frozenset(mine[:1]), frozenset(mine[-1:])
        began = time.monotonic()
        verify = self._service("apart", "verify", models.target, "--no-ngram", *models.words, only=target)
        draft = self._service("apart", "draft", models.draft, *models.words, only=drafter)
        verifier, drafts = (str(self._ready(each)["address"]) for each in (verify, draft))
        rows = []
        for key in keys:
            dialled, rtt = [], FAR[key]
            if rtt is not None:
                link = RelayLink(drafts)
                self._owned.callback(link.close)
                link.shape(rtt)
                dialled = ["--drafter", link.address]
            place = self._service(key, "orchestrate", "--verifier", verifier, *dialled, only=target)
            address = str(self._ready(place)["address"])
            children = (verify[0], place[0], *(() if rtt is None else (draft[0],)))
            rows.append(self._ours(key, children, time.monotonic() - began, address))
        return rows

    def _library(self, key: str, sessions: int, longest: int) -> list[SpeedRow]:
        library, mode = LIBRARIES[key]
        models = self._models
        if models.peer_target is None:
            raise BenchError("it is measured on GGUF files, and the target is none")
        if library == "llamacpp" and not is_gguf(models.peer_target):
            raise BenchError("it reads GGUF files, and the target is none")
        if mode in DRAFTED_MODES and models.peer_draft is None:
            raise BenchError("there is no smaller model for it (--peer-draft)")
        began = time.monotonic()
        read = self._read_by_openvino if library == "openvino" else str
        started = self._child(key, command(library, models.peers))
        loading = {
            "do": "load",
            "model": read(models.peer_target),
            "draft": models.peer_draft and mode in DRAFTED_MODES and read(models.peer_draft),
            "mode": mode,
            "threads": cores(),
            "dtype": models.dtype,
            "precision": models.dtype and PRECISIONS[models.dtype],
        }
        self._ready(started, {**loading, "sessions": sessions, "context": longest + BEYOND})
        child = started[0]

        def ask(prompts: Prompts, tokens: int, temperature: float) -> Together:
            request = {"do": "generate", "prompts": [list(each) for each in prompts], "tokens": tokens}
            answer = child.ask({**request, "temperature": temperature, "seed": SEED}, RUN_LIMIT)
            return Together(answer["seconds"], tuple(_run(each, tokens, key) for each in answer["runs"]))

        return [SpeedRow(key, (child,), time.monotonic() - began, ask)]

    def _read_by_openvino(self, model: str) -> str:
        """The model itself, or what is exported of it, once."""
        if is_gguf(model):
            return model
        folder = self._folder / f"exported-{Path(model).name}"
        return str(folder) if folder.exists() else exported(model, folder, self._models.peers)

    def encoded(self, prompts: Sequence[SpeedPrompt]) -> list[list[int]]:
        """As the target reads them: a user's turn behind its chat template, if it has one."""
        found = [self._tokens({"messages": [{"role": "user", "content": each.text}]}) for each in prompts[:1]]
        if found[0] is None:
            return [self._tokens({"prompt": each.text}) or [] for each in prompts]
        return [self._tokens({"messages": [{"role": "user", "content": each.text}]}) or [] for each in prompts]

    def _tokens(self, body: dict[str, object]) -> list[int] | None:
        """None for messages where there is no template. BenchError for any other refusal."""
        asked = urllib.request.Request(f"{self.http}/tokenize", json.dumps(body).encode(), self._headers)
        try:
            with urllib.request.urlopen(asked, timeout=ASK_LIMIT_S) as answer:
                tokens: list[int] = json.loads(answer.read())["tokens"]
                return tokens
        except urllib.error.HTTPError as error:
            said = error.read().decode(errors="replace")
            if "messages" in body and "template" in said:
                return None
            raise BenchError(f"prompts cannot be encoded: {said}") from error
        except OSError as error:
            raise BenchError(f"prompts cannot be encoded: {error}") from error

    @property
    def _headers(self) -> dict[str, str]:
        known = {"Authorization": f"Bearer {self._token}"} if self._token else {}
        return {"Content-Type": "application/json", **known}


def _run(answer: dict[str, object], tokens: int, key: str) -> Run:
    fields = {**answer, "tokens": exactly(tokens, answer["tokens"], key)}  # type: ignore[arg-type]  # as JSON has it
    return Run(**fields)  # type: ignore[arg-type]  # as JSON has it
