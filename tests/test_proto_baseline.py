"""`make lint` refuses a change of proto/ that would break peers of the released version, and nothing else."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
BASELINE = ROOT / "proto" / "baseline.binpb"
GENERATION = "proto/specwire/v1/generation.proto"
LIMIT_S = 120.0


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """What buf reads, to be changed."""
    shutil.copytree(ROOT / "proto", tmp_path / "proto")
    shutil.copy(ROOT / "buf.yaml", tmp_path)
    return tmp_path


def breaking(folder: Path) -> subprocess.CompletedProcess[str]:
    """What lint runs, in `folder`."""
    places = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"
    buf = shutil.which("buf", path=places)
    assert buf is not None, "buf comes with the extra dev"
    words = [buf, "breaking", "--against", str(BASELINE)]
    return subprocess.run(words, cwd=folder, capture_output=True, text=True, timeout=LIMIT_S, check=False)


def test_what_is_there_breaks_nobody_nor_does_an_addition(copy: Path) -> None:
    assert (breaking(copy).returncode, breaking(copy).stdout) == (0, "")
    with (copy / GENERATION).open("a") as source:
        source.write("\n// New.\nmessage Addition {\n  // A number.\n  uint32 number = 1;\n}\n")
    assert breaking(copy).returncode == 0


def test_lint_asks() -> None:
    assert "buf breaking --against proto/baseline.binpb" in (ROOT / "Makefile").read_text()


def test_what_breaks_peers_is_refused_by_name(copy: Path) -> None:
    text = (copy / GENERATION).read_text()
    for old, new, said in (
        ("Prompt prompt = 5;", "Prompt prompt = 99;", 'field "5" with name "prompt"'),
        ("Prompt prompt = 5;", "bytes prompt = 5;", 'changed type from "message" to "bytes"'),
        ("rpc Cancel(", "rpc Abort(", 'RPC "Cancel"'),
    ):
        assert text.count(old) == 1, old
        (copy / GENERATION).write_text(text.replace(old, new))
        done = breaking(copy)
        assert done.returncode != 0
        assert said in done.stdout
        assert GENERATION in done.stdout
