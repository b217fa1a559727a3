"""deploy.stack.stack: what a start tells its user."""

from __future__ import annotations

import io
from pathlib import Path

import pytest

from deploy.stack.hub_cache import Fetching
from deploy.stack.stack import Starting
from specwire.progress import Bar, LastLine


def test_lines_are_said_and_move_the_bar(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bar = Bar("starting", 2, line=LastLine(io.StringIO))
    told = Starting(bar, Fetching([], tmp_path))
    told("starting Ray")
    told("verifier: loading models/large")
    told("drafter-2: loading models/small")
    assert bar.text(3.0).endswith("] 0/2  0:03  loading drafter-2, verifier")
    told("drafter-2: ready after 1.0 s")
    told("drafter-2: ready")
    assert bar.text(4.0).endswith("] 1/2  0:04, 0:04 left  loading verifier")
    assert capsys.readouterr().err.splitlines()[:2] == [
        "specwire: starting Ray",
        "specwire: verifier: loading models/large",
    ]
