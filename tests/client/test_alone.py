"""A client without what services need: its imports, and what a command says that is not for it."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path

from tests.client.service import Scripted, serving

ROOT = Path(__file__).resolve().parents[2]
# Stands at the head of a program: of what is installed it can import what a client needs; grpc needs typing_extensions.
ALONE = """
import sys
import importlib.machinery

ALLOWED = {"google", "grpc", "grpc_status", "numpy", "specwire", "typing_extensions", *sys.argv[1].split(",")}

class Alone(importlib.machinery.PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        found = super().find_spec(name, path, target)
        places = (found.origin or "", *(found.submodule_search_locations or ())) if found else ()
        installed = any("site-packages" in place for place in places)
        if installed and name.partition(".")[0] not in ALLOWED:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        return found

sys.meta_path[sys.meta_path.index(importlib.machinery.PathFinder)] = Alone
"""
CALL = """
from specwire.client import AsyncClient, Client
with Client(sys.argv[2]) as client:
    print(client.complete([1, 2], max_tokens=3).text)
print(sorted({"redis", "torch", "ray", "msgspec", "tokenizers", "yaml"} & set(sys.modules)))
"""
COMMAND = """
from deploy.cli.main import main
sys.exit(main(sys.argv[2:]))
"""


def alone(program: str, *words: str, allowed: str = "") -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", ALONE + program, allowed, *words]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120.0, check=False)


async def test_it_needs_grpc_protobuf_and_numpy_only() -> None:
    async with serving(Scripted()) as address:
        done = await asyncio.to_thread(alone, CALL, address)
    assert (done.returncode, done.stdout.splitlines()) == (0, ["abc", "[]"]), done.stderr


def test_a_command_that_serves_says_what_to_install() -> None:
    """`yaml` and `shtab` come with a client, for its command line."""
    done = alone(COMMAND, "up", allowed="yaml,shtab")
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert line.startswith("specwire: error: ")
    assert line.endswith(" is not installed: pip install 'specwire[services]'")
    assert alone(COMMAND, "--version", allowed="yaml,shtab").stdout.startswith("specwire ")
