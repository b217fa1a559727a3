"""The model that an orchestrator serves."""

from __future__ import annotations

from dataclasses import dataclass

from tokenizers import Tokenizer

from orchestrator.link import Info
from specwire.text import load_tokenizer


@dataclass(frozen=True, slots=True)
class Target:
    """The model that this orchestrator serves: of the first verifier that answered; others must equal it."""

    info: Info
    tokenizer: Tokenizer
    eos_ids: frozenset[int]
    most_prompt_bytes: int

    @classmethod
    def of(cls, info: Info) -> Target:
        """Raises TokenizerError."""
        tokenizer = load_tokenizer(info.tokenizer_json)
        # One byte more a token: for the separator that tokenizers of words drop.
        longest = 1 + max((len(token.encode()) for token in tokenizer.get_vocab()), default=0)
        return cls(info, tokenizer, frozenset(info.eos_ids), info.context * longest)


def vocabulary_mismatch(target: Info, drafter: Info) -> str | None:
    """Why the drafter's ids do not mean what the target's mean, or None if they do."""
    if target.vocabulary_fingerprint == drafter.vocabulary_fingerprint:
        return None
    return (
        f"vocabulary mismatch: drafter {drafter.model} has {drafter.vocabulary_fingerprint[:12]} "
        f"({drafter.vocabulary} ids), target {target.model} has {target.vocabulary_fingerprint[:12]} "
        f"({target.vocabulary} ids); both need the same tokenizer"
    )
