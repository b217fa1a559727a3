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


def changed(folder: Path, old: str, new: str) -> None:
    source = folder / GENERATION
    text = source.read_text()
    assert text.count(old) == 1, old
    source.write_text(text.replace(old, new))


def test_what_is_there_breaks_nobody(copy: Path) -> None:
    assert (breaking(copy).returncode, breaking(copy).stdout) == (0, "")


def test_lint_asks() -> None:
    assert "buf breaking --against proto/baseline.binpb" in (ROOT / "Makefile").read_text()


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("Prompt prompt = 5;", "Prompt prompt = 99;", 'field "5" with name "prompt"'),
        ("Prompt prompt = 5;", "bytes prompt = 5;", 'changed type from "message" to "bytes"'),
        ("rpc Cancel(", "rpc Abort(", 'RPC "Cancel"'),
    ],
    ids=["renumbered", "of another type", "renamed"],
)
def test_what_breaks_peers_is_refused_by_name(copy: Path, old: str, new: str, said: str) -> None:
    changed(copy, old, new)
    done = breaking(copy)
    assert done.returncode != 0
    assert said in done.stdout
    assert GENERATION in done.stdout


def test_an_addition_breaks_nobody(copy: Path) -> None:
    with (copy / GENERATION).open("a") as source:
        source.write("\n// New.\nmessage Addition {\n  // A number.\n  uint32 number = 1;\n}\n")
    assert breaking(copy).returncode == 0
