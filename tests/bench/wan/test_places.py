"""Edge and cloud reach each other through what is between them only, and leave nothing behind."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from bench.wan.rig import LOOPBACK, NAMESPACES, PREFIX, WanPlace, places

ASK = "import socket, sys; socket.create_connection((sys.argv[1], int(sys.argv[2])), 2).close()"
SERVE = "import socket; s = socket.create_server(('', 0)); print(s.getsockname()[1], flush=True); s.accept()"


def reaches(place: WanPlace, host: str, port: int) -> bool:
    command = [*place.prefix, sys.executable, "-c", ASK, host, str(port)]
    return subprocess.run(command, capture_output=True, timeout=120.0, check=False).returncode == 0


def test_without_isolation_both_are_the_loopback_interface_and_proxies_are_void(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("http_proxy", "http://nowhere:1")
    with places(isolated=False) as found:
        assert not found.isolated
        for place in (found.edge, found.cloud):
            assert place == WanPlace((), LOOPBACK, LOOPBACK)
            assert place.options == ("--listen", "127.0.0.1:0")
        assert "http_proxy" not in os.environ
    assert os.environ["http_proxy"] == "http://nowhere:1"


def test_places_reach_us_and_not_each_other_where_the_system_isolates() -> None:
    with places() as found:
        command = [*found.cloud.prefix, sys.executable, "-c", SERVE]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
            assert server.stdout is not None
            port = int(server.stdout.readline())
            if found.isolated:
                assert not reaches(found.edge, found.cloud.host, port)
            assert reaches(WanPlace((), LOOPBACK, LOOPBACK), found.cloud.host, port)
            assert server.wait(30) == 0
    assert not [name for name in _namespaces() if name.startswith(f"{PREFIX}{os.getpid()}-")]


def _namespaces() -> list[str]:
    return [path.name for path in Path(NAMESPACES).iterdir()] if NAMESPACES.is_dir() else []
