"""The included pair: a small target and a smaller drafter for Python source, and held-out prompts for them."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
TARGET = HERE / "target"
DRAFT = HERE / "draft"
HEAD = HERE / "head"
PROMPTS = HERE / "prompts.json"
DEMO_PROMPTS = HERE / "demo_prompts.json"
# What `specwire demo` completes, and how: its prompts were chosen by such texts (train/prompts.py).
DEMO_TOKENS, DEMO_TEMPERATURES, DEMO_SEED = 64, (0.0, 0.8), 0


@dataclass(frozen=True)
class Prompt:
    """The beginning of a function from a file that neither model was trained on."""

    name: str
    text: str


def held_out_prompts() -> list[Prompt]:
    """All held-out prompts, in a fixed order that mixes the files they come from."""
    return [Prompt(**row) for row in json.loads(PROMPTS.read_text())]


def demo_prompts() -> list[Prompt]:
    """Held-out prompts behind which the target's own text repeats little, in a fixed order."""
    return [Prompt(row["name"], row["text"]) for row in json.loads(DEMO_PROMPTS.read_text())]
