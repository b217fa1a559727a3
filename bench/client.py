"""Measure what a client alone takes: python -m bench.client --help.

A package is built of this checkout and installed as `pip install specwire` does it, with what it needs and nothing
else, into an environment of its own. Told: its size and packages, and how long a new process takes until it can call,
and until it has the first token of a stack on this machine, whose scripted target takes no time.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
import venv
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

from bench.harness import ROOT, machine
from bench.harness.entry import terminable
from bench.harness.interval import Estimate, estimate
from bench.harness.record import refused
from bench.harness.report import table
from bench.harness.runs import BenchError
from deploy.stack.child_stack import own_stack
from deploy.stack.options import StackError
from specwire.rpc.process import say

# What only services need: none of it may come with a client.
OF_SERVICES = ("msgspec", "ray", "redis", "tokenizers", "torch")
IMPORT = "from specwire.client import Client"
CALL = """
import sys
with Client(sys.argv[1]) as client:
    client.complete([1, 2, 3], max_tokens=1)
"""
PROGRAMS = {
    "does nothing": "",
    "can call": IMPORT,
    "has a first token": f"{IMPORT}{CALL}",
}
# Bytes of each installed package by name, and under PAIR those of the demo pair, which lies in ours.
PAIR = "of specwire: the demo pair"
WEIGH = f"""
import importlib.metadata, json
told = {{{PAIR!r}: 0}}
for package in importlib.metadata.distributions():
    sizes = [(file.parts[0], file.locate().stat().st_size) for file in package.files or () if file.locate().is_file()]
    told[package.metadata["Name"]] = sum(size for _, size in sizes)
    told[{PAIR!r}] += sum(size for folder, size in sizes if folder == "demo_pair")
print(json.dumps(told))
"""
STACK = ("--no-ray", "--target", "scripted:7", "--draft", "scripted:7:agree=0.8")
# Seconds: for a command; an index that is slow sends tens of megabytes.
LIMIT_S = 600.0


def installed(folder: Path) -> Path:
    """The interpreter of a new environment in `folder` that has a client and nothing else, not even pip."""
    pip = (sys.executable, "-m", "pip", "--quiet")
    said_by(*pip, "wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", str(folder), str(ROOT))
    (package,) = folder.glob("*.whl")
    venv.create(folder / "client", symlinks=True)
    python = folder / "client" / "bin" / "python"
    pins = ("--constraint", str(ROOT / "constraints.txt"))
    said_by(*pip, "--python", str(python), "install", *pins, str(package))
    return python


def weighed(python: Path) -> dict[str, int]:
    """Bytes of what is installed there, by package; BenchError where a part of a service is among it."""
    told: dict[str, int] = json.loads(said_by(str(python), "-I", "-c", WEIGH))
    foreign = sorted(set(OF_SERVICES) & told.keys())
    if foreign:
        raise BenchError(f"a client brings along {', '.join(foreign)}")
    return told


def said_by(*command: str) -> str:
    """What it prints; BenchError with its last words if it fails."""
    try:
        done = subprocess.run(command, cwd="/", capture_output=True, text=True, timeout=LIMIT_S, check=False)
    except subprocess.TimeoutExpired:
        raise BenchError(f"{command[0]} took longer than {LIMIT_S:g} s") from None
    if done.returncode:
        raise BenchError(f"{command[0]} failed: {done.stderr.strip().rpartition(chr(10))[2] or done.returncode}")
    return done.stdout


def seconds_of(python: Path, program: str, *words: str) -> float:
    """From the start of a process until it has run `program` and is gone."""
    began = time.perf_counter()
    said_by(str(python), "-I", "-c", program, *words)
    return time.perf_counter() - began


def measure(folder: Path, runs: int) -> tuple[dict[str, int], dict[str, Estimate]]:
    """Bytes by package, and seconds by the key of PROGRAMS."""
    say("bench: a client is built and installed")
    python = installed(folder)
    sizes = weighed(python)
    say("bench: a stack starts")
    times: dict[str, list[float]] = {name: [] for name in PROGRAMS}
    try:
        with own_stack(STACK, say) as address:
            for _ in range(runs + 1):  # the first round, which reads the disk, does not count
                for name, program in PROGRAMS.items():
                    times[name].append(seconds_of(python, program, address))
    except StackError as error:
        raise BenchError(f"the stack: {error}") from None
    return sizes, {name: estimate(some[1:]) for name, some in times.items()}


def report(sizes: dict[str, int], seconds: dict[str, Estimate]) -> str:
    packages = sorted((name for name in sizes if name != PAIR), key=lambda name: -sizes[name])
    whole = sum(sizes[name] for name in packages)
    rows = [[name, f"{sizes[name] / 1e6:.1f}"] for name in (*packages, PAIR)]
    times = [[name, *(f"{each:.2f}" for each in (one.value, one.low, one.high))] for name, one in seconds.items()]
    about = machine.describe()
    sections = (
        table((f"{len(packages)} packages", "MB"), [["all", f"{whole / 1e6:.1f}"], *rows]),
        table(("until a process has ended that", "s, median", "from", "to"), times),
        [f"on {about['cores']} cores, {about['cpu']}, Python {about['python']}"],
    )
    return "\n\n".join("\n".join(lines) for lines in sections)


def main(argv: Sequence[str] | None = None) -> int:
    line = argparse.ArgumentParser(prog="python -m bench.client", description="Measure what a client takes.")
    line.add_argument("--runs", type=int, default=9, metavar="N", help="processes of each kind (default: %(default)s)")
    args = line.parse_args(argv)
    if refused(args, ("runs",)):
        return 2
    try:
        with terminable(), TemporaryDirectory(prefix="specwire-client-") as folder:
            print(report(*measure(Path(folder), args.runs)))
    except BenchError as error:
        say(f"bench: error: {error}")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
