"""A table of n-grams as a drafter: `table:FILE`, for machines that have no room for a model.

What follows a text is looked up behind its last tokens (`specwire.core.verify.table`). The file has one token of each
context, with its share of what followed there; all others share the rest alike. Under `coupled` its share is thus what
the target's own noise is held against, as any drafter's probabilities are.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from pathlib import Path

import torch

from specwire.core.invalid import InvalidParameter
from specwire.core.messages import MOST_WINDOW
from specwire.core.model import Feed, ModelError, ModelInfo, SlotTable
from specwire.core.verify.table import NgramTable
from specwire.text.table_file import load_table
from specwire.text.tokenizer import TokenizerError, vocabulary_fingerprint, vocabulary_map

PREFIX = "table:"
RUNTIME = "table"
# A text is a list of ids: nothing limits it but what is useful.
CONTEXT = 1 << 16
# What a context was always followed by may be followed by something else, too.
MOST_SHARE = 0.999


class TableLM:
    """A `LanguageModel` that looks its rows up. It keeps no keys and values, and takes no trees."""

    failed: frozenset[int] = frozenset()
    kv_bytes = state_bytes = 0
    most_window = MOST_WINDOW
    branches = False

    def __init__(self, table: NgramTable, info: ModelInfo, slots: int) -> None:
        self.info = info
        self._table = table
        self._slots = SlotTable(slots, info.context, info.vocabulary, self.branches)
        self._texts: list[list[int]] = [[] for _ in range(slots)]

    @property
    def slots(self) -> int:
        return len(self._slots)

    def cached(self, slot: int) -> int:
        return self._slots.cached(slot)

    def rollback(self, slot: int, length: int) -> None:
        self._slots.rollback(slot, length)

    def keep(self, slot: int, start: int, rows: Sequence[int]) -> None:
        self._slots.keep(slot, start, rows)

    def discard(self, slot: int) -> None:
        self._slots.clear(slot)
        self._texts[slot].clear()

    def copy(self, source: int, target: int, length: int) -> None:
        self._slots.copy(source, target, length)
        self._texts[target] = self._texts[source][:length]

    def forward(self, feeds: Sequence[Feed]) -> torch.Tensor:
        self._slots.check(feeds)
        rows = torch.zeros(sum(feed.wanted for feed in feeds), self.info.vocabulary)
        at = 0
        for feed in feeds:
            text = self._texts[feed.slot]
            text[feed.start :] = feed.tokens
            for end in range(feed.stop - feed.wanted + 1, feed.stop + 1):
                self._write(rows[at], text[max(0, end - self._table.order + 1) : end])
                at += 1
        self._slots.commit(feeds)
        return rows

    def _write(self, row: torch.Tensor, tail: Sequence[int]) -> None:
        """Log-probabilities of what follows; all alike where nothing is known."""
        tokens, _, share = self._table.following(tail, 1)
        if tokens and tokens[0] < len(row):
            share = min(share, MOST_SHARE)
            row.fill_(math.log((1 - share) / (len(row) - 1)))
            row[tokens[0]] = math.log(share)


def load_table_model(spec: str, slots: int, context: int | None) -> TableLM:
    """`table:FILE`. Raises ModelError."""
    file = Path(spec.removeprefix(PREFIX))
    if context is not None and not 2 <= context <= CONTEXT:
        raise ModelError(f"context: a table has from 2 to {CONTEXT} positions, not {context}")
    try:
        table = load_table(file)
        tokens = vocabulary_map(table.tokenizer_json, 0)
    except InvalidParameter as error:
        raise ModelError(str(error)) from error
    except (OSError, TokenizerError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise ModelError(f"table: {file}: {reason}") from error
    if not tokens:
        raise ModelError(f"table: {file} has no tokenizer; `specwire table build` writes one")
    info = ModelInfo(
        name=file.name,
        architecture="NgramTable",
        vocabulary=max(tokens) + 1,
        context=context or CONTEXT,
        eos_ids=(),
        dtype="float32",
        device="cpu",
        weights_fingerprint=_fingerprint(file),
        vocabulary_fingerprint=vocabulary_fingerprint(tokens),
        runtime=RUNTIME,
        tokenizer_json=table.tokenizer_json,
    )
    return TableLM(table, info, slots)


def _fingerprint(file: Path) -> str:
    with file.open("rb") as content:
        return hashlib.file_digest(content, "sha256").hexdigest()
