"""Services as processes of their own, started through the command line, that may be killed, stopped and restarted."""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import redis

from bench.harness import ROOT
from bench.harness.runs import BenchError
from deploy.stack.processes import bound
from deploy.stack.redis_server import find_redis

# Only what hangs takes so long, on a busy machine too.
START_LIMIT_S = 240.0
END_LIMIT_S = 120.0
ANY_PORT = "127.0.0.1:0"
PING_EVERY_S = 0.05


class Process:
    """A command, bound to this process: should this one be killed, it dies too. A terminal's Ctrl-C does not reach it.

    Its words on stderr, those of all its lives, go into the file `said`.
    """

    def __init__(self, command: Sequence[str], environment: Mapping[str, str], said: Path) -> None:
        self.command = tuple(command)
        self._environment = environment
        self._said = said
        self.process = self._launch()

    def _launch(self) -> subprocess.Popen[bytes]:
        with self._said.open("ab") as said:
            return subprocess.Popen(
                bound(self.command, signal.SIGKILL),
                cwd=ROOT,
                env=self._environment,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=said,
                bufsize=0,
                start_new_session=True,
            )

    def restart(self) -> None:
        """Start again; does not wait until it is ready."""
        self.kill()
        self.process = self._launch()

    def send(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def wait(self) -> int:
        """Its exit code."""
        return self.process.wait(END_LIMIT_S)

    def end(self) -> str:
        """Ask it to end, and wait for that; what is wrong with how it did, "" if nothing."""
        self.send(signal.SIGTERM)
        try:
            code = self.wait()
        except subprocess.TimeoutExpired:
            return f"still there {END_LIMIT_S:g} s after it was asked to end"
        return f"exit code {code} when it was asked to end" if code else ""

    def kill(self) -> None:
        """Idempotent; works on a stopped process too."""
        self.process.kill()
        self.process.wait(END_LIMIT_S)
        if self.process.stdout is not None:
            self.process.stdout.close()

    @property
    def lives(self) -> bool:
        return self.process.poll() is None

    def said(self) -> str:
        """Everything on its stderr, restarts included."""
        return self._said.read_text(errors="replace")


class ServiceProcess(Process):
    """`specwire ARGUMENTS --listen ADDRESS --json`. `address` is known once it was ready; a restart keeps it.

    `http`: HOST:PORT of its HTTP front door, "" where it has none. What dials does not listen: its `address` is "".
    module: the words between `python -m` and ARGUMENTS. python: whose environment it runs in.
    """

    def __init__(
        self,
        arguments: Sequence[str],
        environment: Mapping[str, str],
        said: Path,
        address: str,
        module: Sequence[str] = ("deploy",),
        python: str = sys.executable,
    ) -> None:
        self._arguments = tuple(arguments)
        self._module = tuple(module)
        self._python = python
        self.address = address
        self.http = ""
        super().__init__(self._line(), environment, said)

    def _line(self) -> tuple[str, ...]:
        listen = ("--listen", self.address) if self.address else ()
        return (self._python, "-m", *self._module, *self._arguments, *listen, "--json")

    def restart(self) -> None:
        self.command = self._line()
        super().restart()

    def ready(self) -> str:
        """Wait for its ready line; the address in it. BenchError with its words if there is none."""
        pipe = self.process.stdout
        readable, _, _ = select.select([pipe], [], [], START_LIMIT_S) if pipe is not None else ([], [], [])
        line = pipe.readline() if pipe is not None and readable else b""
        if not line:
            raise BenchError(f"{self._arguments} did not become ready: {self.said()}")
        told = json.loads(line)
        self.address = str(told.get("address", self.address))
        self.http = str(told.get("http") or "").removeprefix("http://")
        return self.address


class RedisLog(Process):
    """redis-server on a TCP port, for relays. It writes to its file before it answers, so SIGKILL loses nothing."""

    def __init__(self, folder: Path) -> None:
        self._port = free_port()
        self.address = f"127.0.0.1:{self._port}"
        settings = {
            "bind": "127.0.0.1",
            "port": str(self._port),
            "dir": str(folder),
            "save": "",
            "appendonly": "yes",
            "appendfsync": "everysec",
            "loglevel": "warning",
            "logfile": str(folder / "redis.log"),
            "maxmemory-policy": "noeviction",
        }
        words = [word for name, value in settings.items() for word in (f"--{name}", value)]
        super().__init__([find_redis(), *words], os.environ, folder / "redis.stderr")

    def ready(self) -> str:
        """Wait until it answers, which it does once its file is read."""
        deadline = time.monotonic() + START_LIMIT_S
        with redis.Redis(port=self._port, socket_timeout=1.0) as client:
            while time.monotonic() < deadline and self.lives:
                try:
                    client.ping()
                    return self.address
                except redis.RedisError:
                    time.sleep(PING_EVERY_S)
        raise BenchError(f"redis-server at {self.address} did not become ready")

    def held_bytes(self) -> int:
        """What its allocator has given out for keys, buffers and clients.

        Keys that have expired are freed when they are met. By itself Redis meets few of them among many that have not
        (a tenth of all may be stale); a scan meets all, as a collection does in the processes of Python.
        """
        with redis.Redis(port=self._port, socket_timeout=10.0) as client:
            for _ in client.scan_iter(count=1000):
                pass
            return int(client.info("memory")["used_memory"])

    def eternal_keys(self) -> list[str]:
        """Keys that nothing would ever remove."""
        with redis.Redis(port=self._port, socket_timeout=10.0) as client:
            return sorted(_eternal(client))


def _eternal(client: redis.Redis) -> Iterator[str]:
    for key in client.scan_iter(count=1000):
        if client.ttl(key) == -1:
            yield key.decode(errors="replace")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
