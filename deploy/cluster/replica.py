"""The Ray actor of a replica: one service as a child process, the same command that a user would run.

A process of its own has what an actor's process lacks: signals to drain by, ranks of a split model below it, an event
loop and an allocator of its own. If it ends, its actor ends, and Ray starts another one, elsewhere if need be. If the
actor's process ends, the service is killed with it.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import ray

from deploy.cluster.rollout import ReplicaPlace
from deploy.stack.processes import BlockingChild, environment
from specwire.registry.options import advertised

# Seconds before a service that cannot start is started again: Ray itself does not wait.
PAUSE_S = 5.0
# Beyond its --grace a service ends by itself; this is for one that hangs.
DRAIN_LIMIT_S = 3700.0
# A node may say where its services are dialled, as every option can be said.
ADVERTISE = "SPECWIRE_ADVERTISE"


@dataclass(frozen=True, slots=True)
class ReplicaSpec:
    """What to run. words: after `specwire`. http_port: -1 for none. environment: beside the actor's own.

    python: of another environment, which has specwire of its own; "" for the actor's.
    """

    words: tuple[str, ...]
    port: int
    http_port: int
    environment: Mapping[str, str]
    python: str = ""


class Replica:
    """After its process died Ray runs __init__ again, with the same arguments, in another."""

    def __init__(self, order: ReplicaSpec) -> None:
        context = ray.get_runtime_context()
        self._succeeds = bool(context.was_current_actor_reconstructed)
        self._node = str(context.get_node_id())
        self._actor = context.current_actor
        # What the fleet has set aside for it, if anything.
        self._reserved = ray.util.get_current_placement_group()
        self._command = command(order, node_address())
        self._environment = {**environment(), **order.environment}
        if order.python:  # what is installed here is not for another environment
            self._environment["PYTHONPATH"] = os.environ.get("PYTHONPATH", "")
        self._address = self._http = self._error = ""
        self._settled = threading.Event()
        self._child: BlockingChild | None = None
        self._draining = threading.Event()
        # A thread for as long as the child lives: the kernel binds the child to the thread that started it.
        self._thread = threading.Thread(target=self._run, name="replica", daemon=True)
        self._thread.start()

    def outcome(self) -> ReplicaPlace:
        """Wait for the start: the address, or an error in one sentence."""
        self._settled.wait()
        return self.place()

    def place(self) -> ReplicaPlace:
        registered = advertised(self._environment.get(ADVERTISE, ""), self._address) if self._address else ""
        return ReplicaPlace(self._address, self._node, self._http, self._error, self._draining.is_set(), registered)

    def drain(self) -> None:
        """Drain and end the service, then the actor: waiting callers learn that it is gone."""
        self._draining.set()
        if self._child is not None and self._child.process.poll() is None:
            self._child.process.send_signal(signal.SIGTERM)
        self._thread.join(DRAIN_LIMIT_S)
        if self._reserved is not None:
            ray.util.remove_placement_group(self._reserved)
        ray.kill(self._actor)

    def _run(self) -> None:
        child = self._child = BlockingChild(self._command, signal.SIGKILL, self._environment, say_in_log)
        if self._draining.is_set():  # it was asked for before there was a process to tell
            child.process.send_signal(signal.SIGTERM)
        ready = child.line()
        if ready:
            said = json.loads(ready)
            self._http, self._address = str(said.get("http") or ""), str(said["address"])
            self._settled.set()
        code = child.process.wait()
        if self._draining.is_set():
            self._settle("was told to end")
            return
        if not ready and not self._succeeds:
            self._settle(child.last_words() or f"ended with {code}")
            return
        if not ready:
            time.sleep(PAUSE_S)
        os._exit(1)

    def _settle(self, error: str) -> None:
        if not self._settled.is_set():
            self._error = error
            self._settled.set()


def say_in_log(line: str) -> None:
    """Into the actor's log, which is Ray's."""
    sys.stderr.write(f"{line}\n")
    sys.stderr.flush()


def command(order: ReplicaSpec, host: str) -> Sequence[str]:
    """The whole command line of a service on the node whose address is `host`."""
    where = [f"--listen={host}:{order.port}", *([f"--http={host}:{order.http_port}"] if order.http_port >= 0 else [])]
    return [order.python or sys.executable, "-m", "deploy", *order.words, *where, "--json"]


def node_address() -> str:
    """Where other nodes reach the one that this process runs on."""
    found: Callable[[], str] = ray.util.get_node_ip_address
    return found()


class Record:
    """The actor that keeps what was applied last, for commands that are given no file."""

    def __init__(self, text: str) -> None:
        self._text = text

    def text(self) -> str:
        return self._text
