"""The machine's id."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from specwire.rpc import model_info


def test_it_is_stable_and_depends_on_boot_and_name(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    mine = model_info.host_id()
    assert model_info.host_id() == mine
    monkeypatch.setattr(model_info, "BOOT_ID", tmp_path / "none")
    without_boot = model_info.host_id()
    monkeypatch.setattr(socket, "gethostname", lambda: "another")
    assert len({mine, without_boot, model_info.host_id()}) == 3
    assert socket.gethostname() not in mine
