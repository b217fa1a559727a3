"""Starts a library in a process of its own, and prepares what it reads."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from bench.harness import ROOT
from bench.harness.child import BenchChild
from bench.harness.runs import BenchError
from bench.harness.sessions import LOAD_LIMIT

# Has OpenVINO GenAI and llama.cpp: `make setup-peers`.
PEERS = ROOT / ".venv" / "peers" / "bin" / "python"
NO_PEERS = "its environment is not set up: make setup-peers"
# By name: the module of its process.
MODULES = {
    "transformers": "bench.peers.transformers_peer",
    "openvino": "bench.peers.openvino_peer",
    "llamacpp": "bench.peers.llamacpp_peer",
    "forward": "bench.peers.forward_peer",
}
# As OpenVINO names them.
PRECISIONS = {"float32": "f32", "bfloat16": "bf16"}
# What runs where the models are computed, too.
WITH_US = ("transformers", "forward")


def command(library: str, peers: Path = PEERS) -> tuple[str, ...]:
    """BenchError where the environment of the peers is needed and is not there. CI: they shall send no statistics."""
    if library not in WITH_US and not peers.exists():
        raise BenchError(NO_PEERS)
    return ("env", "CI=true", sys.executable if library in WITH_US else str(peers), "-m", MODULES[library])


def start(library: str, loading: Mapping[str, object], peers: Path = PEERS) -> BenchChild:
    """With its models loaded, as its `load` is told. Raises BenchError."""
    child = BenchChild(library, command(library, peers))
    try:
        child.ask({"do": "load", **loading}, LOAD_LIMIT)
    except BaseException:
        child.stop()
        raise
    return child


def packages_of(python: Path) -> list[Path]:
    """The package folders of an environment."""
    return sorted((python.parent.parent / "lib").glob("python*/site-packages"))


def exported(model: str, folder: Path, peers: Path = PEERS) -> str:
    """A model of transformers as OpenVINO reads it, in a folder that is made for it. Raises BenchError."""
    if not (packages := packages_of(peers)):
        raise BenchError(NO_PEERS)
    words = (sys.executable, "-m", "bench.peers.openvino_export", model, str(folder), str(packages[0]))
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=LOAD_LIMIT, check=False)
    if done.returncode:
        raise BenchError(f"OpenVINO does not take {Path(model).name}: {' '.join(done.stderr.split())[-300:]}")
    return str(folder)
