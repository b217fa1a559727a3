"""Processor time of a site's processes, by what they are."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from bench.cluster.site import command_lines
from bench.harness.child import cpu_seconds
from bench.harness.runs import BenchError

ORCHESTRATORS, VERIFIERS, DRAFTERS, CLIENTS = "orchestrators", "verifiers", "drafters", "clients"
# Ray, Redis, and orchestrators that have nothing to do.
REST = "rest"
_WORDS = {ORCHESTRATORS: "-m deploy orchestrate ", VERIFIERS: "-m deploy verify ", DRAFTERS: "-m deploy draft "}
# In /proc/PID/net/tcp: columns of a socket's own address, its state and its inode; the state of one that listens.
OWN, STATE, INODE, LISTENING = 1, 3, 9, "0A"


class Clocks:
    """The processes below this one as they are now, and this one as the clients'; later ones are not counted.

    fronts: addresses of the orchestrators; of the first of them `read` counts as many as are in use.
    """

    def __init__(self, fronts: Sequence[str]) -> None:
        kinds = {pid: kind_of(line) for pid, line in command_lines(os.getpid()).items()}
        self._pids: Mapping[str, Sequence[int]] = {
            kind: [pid for pid, each in kinds.items() if each == kind] for kind in (*_WORDS, REST)
        }
        by_port = {port: pid for pid in self._pids[ORCHESTRATORS] for port in ports_of(pid)}
        ports = [int(front.rpartition(":")[2]) for front in fronts]
        if missing := [port for port in ports if port not in by_port]:
            raise BenchError(f"orchestrators: no process of ours listens at ports {missing}")
        self._fronts = [by_port[port] for port in ports]

    def read(self, orchestrators: int) -> dict[str, float]:
        """Seconds so far, by kind. orchestrators: how many are in use."""
        seconds = {kind: sum(map(cpu_seconds, pids)) for kind, pids in self._pids.items()}
        used = sum(map(cpu_seconds, self._fronts[:orchestrators]))
        idle = seconds[ORCHESTRATORS] - used
        return {**seconds, ORCHESTRATORS: used, REST: seconds[REST] + idle, CLIENTS: cpu_seconds(os.getpid())}

    def count(self, kind: str) -> int:
        return len(self._pids[kind])


def kind_of(line: str) -> str:
    """What a process is, by its command line."""
    return next((kind for kind, word in _WORDS.items() if word in line), REST)


def ports_of(pid: int) -> set[int]:
    """The TCP ports at which a process listens."""
    process, own = Path(f"/proc/{pid}"), set()
    for descriptor in (process / "fd").iterdir():
        with suppress(OSError):  # it was closed meanwhile
            own.add(str(descriptor.readlink()))
    lines = [line.split() for table in ("tcp", "tcp6") for line in (process / "net" / table).read_text().splitlines()]
    return {
        int(fields[OWN].rpartition(":")[2], 16)
        for fields in lines
        if fields[STATE] == LISTENING and f"socket:[{fields[INODE]}]" in own
    }
