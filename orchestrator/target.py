"""A model that an orchestrator serves."""

from __future__ import annotations

from dataclasses import dataclass

from tokenizers import Tokenizer

from orchestrator.link import Info
from orchestrator.tokenizers import ReadTokenizer


@dataclass(frozen=True, slots=True)
class Target:
    """A model, as the first verifier described it that has its weights; the others equal it."""

    info: Info
    tokenizer: Tokenizer
    eos_ids: frozenset[int]
    most_prompt_bytes: int

    @classmethod
    def of(cls, info: Info, read: ReadTokenizer) -> Target:
        return cls(info, read.tokenizer, frozenset(info.eos_ids), info.context * read.longest)


def vocabulary_mismatch(target: Info, drafter: Info) -> str | None:
    """Why the drafter's ids do not mean what the target's mean, or None if they do."""
    if target.vocabulary_fingerprint == drafter.vocabulary_fingerprint:
        return None
    return (
        f"vocabulary mismatch: drafter {drafter.model} has {drafter.vocabulary_fingerprint[:12]} "
        f"({drafter.vocabulary} ids), target {target.model} has {target.vocabulary_fingerprint[:12]} "
        f"({target.vocabulary} ids); both need the same tokenizer"
    )
