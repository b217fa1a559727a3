"""The machine's id."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from specwire.rpc import listening as host


def test_it_is_stable_and_depends_on_boot_and_name(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    mine = host.host_id()
    assert host.host_id() == mine
    monkeypatch.setattr(host, "BOOT_ID", tmp_path / "none")
    without_boot = host.host_id()
    monkeypatch.setattr(socket, "gethostname", lambda: "another")
    assert len({mine, without_boot, host.host_id()}) == 3
    assert socket.gethostname() not in mine
