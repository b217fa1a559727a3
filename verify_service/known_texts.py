"""What a verifier proposes from beside its sessions' texts: documents of its operator's, and a table of n-grams.

Both are the same for all callers, and only read. Documents are indexed as texts of sessions are, in memory of their own
which no other text may take; of a table only what is looked up is in memory.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path

from tokenizers import Tokenizer

from specwire.core.invalid import InvalidParameter
from specwire.core.model import ModelError, ModelInfo
from specwire.core.verify.shared_texts import ScopeTexts, SharedIndex
from specwire.core.verify.table import KnownTexts, NgramTable
from specwire.corpus import texts_of
from specwire.text.table_file import load_table

SHOWN_HEX = 12


def known_texts(info: ModelInfo, references: Sequence[str], table: str) -> KnownTexts:
    """Read what the operator named: files and folders of documents, and the file of a table; "" for none.

    Raises:
        ModelError: names the option and what is wrong with it.
    """
    if not references and not table:
        return KnownTexts(info.vocabulary)
    if not info.tokenizer_json:
        raise ModelError(f"{'reference' if references else 'table'}: this target has no tokenizer to read texts with")
    texts = _indexed(info, references) if references else None
    return KnownTexts(info.vocabulary, texts, _table(info, table) if table else None)


def _indexed(info: ModelInfo, references: Sequence[str]) -> ScopeTexts:
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


def _table(info: ModelInfo, path: str) -> NgramTable:
    try:
        table = load_table(Path(path))
    except (OSError, InvalidParameter) as error:
        raise ModelError(str(error) if isinstance(error, InvalidParameter) else f"table: {error}") from error
    own = hashlib.sha256(info.tokenizer_json).hexdigest()
    if table.tokenizer != own:
        theirs = table.tokenizer[:SHOWN_HEX]
        raise ModelError(f"table: {path} was made with the tokenizer {theirs}, the target's is {own[:SHOWN_HEX]}")
    return table
