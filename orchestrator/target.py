"""A model that an orchestrator serves."""

from __future__ import annotations

from dataclasses import dataclass

from tokenizers import Tokenizer

from orchestrator.link import Info
from orchestrator.tokenizers import ReadTokenizer
from specwire.rpc.model_info import Identity


@dataclass(frozen=True, slots=True)
class Target:
    """A model, as one of the verifiers describes it whose models are equal (`identity`).

    context: the most that one of them holds. context_now: likewise, of those that can be used at the moment.
    longest: the most bytes of text that one token may stand for.
    """

    info: Info
    identity: Identity
    tokenizer: Tokenizer
    longest: int
    context: int
    context_now: int

    @classmethod
    def of(cls, info: Info, read: ReadTokenizer) -> Target:
        return cls(info, Identity.of(info), read.tokenizer, read.longest, info.context, info.context)

    @property
    def eos_ids(self) -> frozenset[int]:
        return frozenset(self.identity.eos_ids)

    @property
    def most_prompt_bytes(self) -> int:
        return self.context * self.longest


def vocabulary_mismatch(target: Info, drafter: Info) -> str | None:
    """Why the drafter's ids do not mean what the target's mean, or None if they do."""
    if target.vocabulary_fingerprint == drafter.vocabulary_fingerprint:
        return None
    return (
        f"vocabulary mismatch: drafter {drafter.model} has {drafter.vocabulary_fingerprint[:12]} "
        f"({drafter.vocabulary} ids), target {target.model} has {target.vocabulary_fingerprint[:12]} "
        f"({target.vocabulary} ids); both need the same tokenizer"
    )
