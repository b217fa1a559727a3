"""The included pair: a small target and a smaller drafter for Python source, and held-out prompts for them."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
TARGET = HERE / "target"
DRAFT = HERE / "draft"
PROMPTS = HERE / "prompts.json"


@dataclass(frozen=True)
class Prompt:
    """The beginning of a function from a file that neither model was trained on."""

    name: str
    text: str


def held_out_prompts() -> list[Prompt]:
    """All held-out prompts, in a fixed order that mixes the files they come from."""
    return [Prompt(**row) for row in json.loads(PROMPTS.read_text())]
