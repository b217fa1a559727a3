"""Documents of its operator's, that a verifier proposes from beside its sessions' texts.

They are the same for all callers, and only read: indexed as texts of sessions are, in memory of their own which no
other text may take.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from tokenizers import Tokenizer

from specwire.core.model import ModelError, ModelInfo
from specwire.core.verify.shared_texts import ScopeTexts, SharedIndex
from specwire.corpus import texts_of


def known_texts(info: ModelInfo, references: Sequence[str]) -> ScopeTexts | None:
    """Read the files and folders that the operator named; None where there are none.

    Raises:
        ModelError: names the option and what is wrong with it.
    """
    if not references:
        return None
    if not info.tokenizer_json:
        raise ModelError("reference: this target has no tokenizer to read texts with")
    missing = next((path for path in references if not Path(path).exists()), None)
    if missing is not None:
        raise ModelError(f"reference: there is no {missing}")
    tokenizer = Tokenizer.from_str(info.tokenizer_json.decode())
    texts = ScopeTexts(lambda _: True)
    for number, document in enumerate(texts_of([Path(path) for path in references])):
        ids = tokenizer.encode(document, add_special_tokens=False).ids
        index = SharedIndex(texts, ids, f"document {number}", grows=False)
        while not index.complete:
            index.read()
    if not texts.tokens:
        raise ModelError(f"reference: nothing to read in {', '.join(references)}")
    return texts
