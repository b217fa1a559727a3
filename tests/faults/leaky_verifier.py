"""`specwire verify`, keeping a kibibyte of each session for ever: python -m tests.faults.leaky_verifier verify ..."""

from __future__ import annotations

import runpy

from verify_service.engine.messages import Opening
from verify_service.engine.sessions import Roster

KEPT = 1024
kept: list[bytes] = []
original = Roster.remember


def remember(self: Roster, opening: Opening) -> None:
    kept.append(bytes(KEPT))
    original(self, opening)


if __name__ == "__main__":
    setattr(Roster, "remember", remember)  # noqa: B010 # mypy lets nobody assign to a method
    runpy.run_module("deploy", run_name="__main__", alter_sys=True)
