"""What the main process and the process that hosts Ray say to each other."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest

from deploy.stack.ray_cluster import RayAnswer, RayOrder, private_environment
from specwire.rpc.server_options import ModelServiceOptions


def test_an_order_survives_the_way() -> None:
    services = {"verifier": ModelServiceOptions("m", threads=2), "drafter": ModelServiceOptions("d", context=9)}
    order = RayOrder("/somewhere", services, 3.5)
    assert RayOrder.from_json(order.to_json()) == order


def test_answers_survive_the_way() -> None:
    for answer in (RayAnswer(progress="x"), RayAnswer(addresses={"verifier": "h:1"}), RayAnswer(error="no\nway")):
        line = answer.to_json()
        assert "\n" not in line
        assert RayAnswer.from_json(line) == answer


def test_rays_environment_is_not_the_users(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A user who has turned Ray's tokens off, or has one for another cluster, gets a private one all the same."""
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    monkeypatch.setenv("RAY_AUTH_TOKEN", "of-another-cluster")
    token = tmp_path / "ray.token"
    found = private_environment(token)
    assert (found["RAY_AUTH_MODE"], found["RAY_AUTH_TOKEN_PATH"]) == ("token", str(token))
    assert "RAY_AUTH_TOKEN" not in found
    assert (len(token.read_text()), stat.S_IMODE(token.stat().st_mode)) == (64, 0o600)
    assert private_environment(tmp_path / "another.token")["RAY_AUTH_TOKEN_PATH"] != str(token)
