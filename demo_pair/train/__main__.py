"""Train the whole pair and hold it against the figures in the repository: `make train-demo-pair`.

    python -m demo_pair.train --work DIR [--publish]

Takes an hour and more on two cores. `--publish` replaces the weights and figures in demo_pair/.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

from demo_pair import DRAFT, HERE, TARGET

FIGURES = HERE / "figures.json"
TOLERANCE = 0.02

# glibc hands freed memory back at once by default; keeping it doubled the training's speed.
ENVIRONMENT = {"MALLOC_TRIM_THRESHOLD_": "8000000000", "MALLOC_MMAP_THRESHOLD_": "8000000000"}


def stage(name: str, *arguments: str) -> None:
    command = [sys.executable, "-m", f"demo_pair.train.{name}", *arguments]
    subprocess.run(command, check=True, env={**os.environ, **ENVIRONMENT})


def publish(work: Path) -> None:
    for source, place in ((work / "target", TARGET), (work / "draft", DRAFT)):
        shutil.rmtree(place, ignore_errors=True)
        shutil.copytree(source, place)
    shutil.copy(work / "figures.json", FIGURES)


def compare(work: Path) -> int:
    """Prints held-out losses beside the recorded ones; 1 if one is more than 2 % away."""
    here = json.loads((work / "figures.json").read_text())["held_out_loss"]
    recorded = json.loads(FIGURES.read_text())["held_out_loss"]
    for name, loss in here.items():
        print(f"{name}: held-out loss {loss:.4f}, recorded {recorded[name]:.4f}")
    return int(any(abs(here[name] - recorded[name]) > TOLERANCE * recorded[name] for name in here))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--publish", action="store_true")
    arguments = parser.parse_args()
    work: Path = arguments.work
    stage("corpus")
    stage("target", "--work", str(work))
    stage("draft", "--work", str(work))
    pair = ("--target", str(work / "target"), "--draft", str(work / "draft"))
    stage("evaluate", *pair, "--out", str(work / "figures.json"))
    if arguments.publish:
        publish(work)
    return compare(work)


if __name__ == "__main__":
    sys.exit(main())
