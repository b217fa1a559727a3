"""Train the whole pair and hold it against the figures in the repository: `make train-demo-pair`.

    python -m demo_pair.train --work DIR [--publish]

Takes an hour and more on two cores; one that was interrupted goes on where it was. `--publish` replaces the weights,
the figures and the list of what was read in demo_pair/.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
from pathlib import Path

import torch

from demo_pair import DRAFT, HERE, TARGET
from demo_pair.train.data import MANIFEST, manifest_of, read_corpus
from demo_pair.train.draft import train_draft
from demo_pair.train.evaluate import evaluate
from demo_pair.train.target import train_target

FIGURES = HERE / "figures.json"
TOLERANCE = 0.02
# glibc hands freed memory back at once by default; keeping it doubled the training's speed.
ENVIRONMENT = {"MALLOC_TRIM_THRESHOLD_": "8000000000", "MALLOC_MMAP_THRESHOLD_": "8000000000"}


def publish(work: Path) -> None:
    for source, place in ((work / "target", TARGET), (work / "draft", DRAFT)):
        shutil.rmtree(place, ignore_errors=True)
        shutil.copytree(source, place)
    shutil.copy(work / "figures.json", FIGURES)
    listed = json.dumps(manifest_of(read_corpus()), separators=(",", ":"))
    MANIFEST.write_text(listed.replace("],[", "],\n[") + "\n")


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
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--publish", action="store_true")
    arguments = parser.parse_args()
    if not ENVIRONMENT.items() <= os.environ.items():  # it is read as a process begins
        words = [sys.executable, "-m", "demo_pair.train", *sys.argv[1:]]
        os.execve(sys.executable, words, {**os.environ, **ENVIRONMENT})
    work: Path = arguments.work
    torch.set_num_threads(arguments.threads)
    train_target(work)
    train_draft(work)
    figures = evaluate(work / "target", work / "draft")
    (work / "figures.json").write_text(json.dumps(figures, indent=1) + "\n")
    if arguments.publish:
        publish(work)
    return compare(work)


if __name__ == "__main__":
    sys.exit(main())
