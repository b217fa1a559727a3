"""A table of n-grams as a drafter: what it says, what it refuses, and texts that it has a part in."""

from __future__ import annotations

from dataclasses import replace
from hashlib import sha256
from pathlib import Path

import pytest
import torch

from specwire.client import Completion
from specwire.core.verify.table import NgramTable
from specwire.lm import Feed, ModelError, load_model
from specwire.text.table_file import load_table, save_table
from tests.orchestrator.stack import PROMPT, SLOW_TARGET, TARGET, TURNS, drafted, plain, stack

TOKENIZER = load_model(TARGET, slots=1).info.tokenizer_json
TEXT = (5, 6, 7, 8, 5, 6, 7, 9, 5, 6, 7, 8, 30, 31)


def saved(folder: Path, *texts: tuple[int, ...], tokenizer: bytes = TOKENIZER) -> str:
    table = NgramTable.built(texts, 3, sha256(TOKENIZER).hexdigest())
    save_table(replace(table, tokenizer_json=tokenizer), folder / "a.table")
    return f"table:{folder / 'a.table'}"


def test_a_row_has_what_follows_its_last_tokens(tmp_path: Path) -> None:
    """Behind 6 7 stands 8 in two of three places; behind 40 nothing is known."""
    lm = load_model(saved(tmp_path, TEXT), slots=1)
    rows = lm.forward([Feed(0, 0, (40, 6, 7), 3)])
    assert rows.shape == (3, 64)
    assert rows[0].tolist() == [0.0] * 64
    law = torch.softmax(rows, 1)
    assert law.argmax(1)[1:].tolist() == [7, 8]
    assert law[2, 8].item() == pytest.approx(170 / 255, abs=1e-6)
    assert law[1, 7].item() == pytest.approx(0.999, abs=1e-6)  # always, so far


def test_rows_depend_on_the_text_alone(tmp_path: Path) -> None:
    spec = saved(tmp_path, TEXT)
    whole = load_model(spec, slots=1).forward([Feed(0, 0, TEXT, len(TEXT))])
    lm = load_model(spec, slots=2)
    lm.forward([Feed(1, 0, (*TEXT[:4], 50, 51), 1)])
    lm.rollback(1, 4)
    lm.copy(1, 0, 4)
    rest = lm.forward([Feed(0, 4, TEXT[4:], len(TEXT) - 4), Feed(1, 4, TEXT[4:9], 1)])
    assert torch.equal(rest[:-1], whole[4:])
    assert torch.equal(rest[-1], whole[8])
    lm.discard(0)
    assert (lm.cached(0), lm.cached(1)) == (0, 9)


def test_its_tokenizer_travels_in_the_file(tmp_path: Path) -> None:
    spec = saved(tmp_path, TEXT)
    assert load_table(tmp_path / "a.table").tokenizer_json == TOKENIZER
    told, target = load_model(spec, slots=1).info, load_model(TARGET, slots=1).info
    assert (told.vocabulary_fingerprint, told.vocabulary) == (target.vocabulary_fingerprint, target.vocabulary)
    assert (told.runtime, told.name) == ("table", "a.table")


def test_what_cannot_draft_is_refused(tmp_path: Path) -> None:
    spec = saved(tmp_path, TEXT, tokenizer=b"")
    with pytest.raises(ModelError, match=r"a\.table has no tokenizer; `specwire table build` writes one"):
        load_model(spec, slots=1)
    with pytest.raises(ModelError, match=r"nowhere: No such file"):
        load_model("table:nowhere", slots=1)
    spec = saved(tmp_path, TEXT)
    with pytest.raises(ModelError, match=r"context: a table has from 2 to 65536 positions, not 1"):
        load_model(spec, slots=1, context=1)
    file = tmp_path / "a.table"
    whole = file.read_bytes()
    for cut in (1, 40, len(whole) // 2):
        file.write_bytes(whole[:-cut])
        with pytest.raises(ModelError, match=r"a\.table"):
            load_model(spec, slots=1)


@pytest.mark.parametrize("temperature", [0.0, 0.8])
async def test_it_drafts_for_a_target(tmp_path: Path, temperature: float) -> None:
    text = plain(TARGET, PROMPT, 48)
    spec = saved(tmp_path, (*PROMPT, *text))
    async with stack(SLOW_TARGET, spec, plan=TURNS, patient=True) as running:

        async def ask() -> Completion:
            return await running.client.complete(
                list(PROMPT), max_tokens=48, ngram=False, temperature=temperature, seed=5
            )

        told = await drafted(ask)
        without = await running.client.complete(
            list(PROMPT), max_tokens=48, drafting=False, temperature=temperature, seed=5
        )
    assert told.tokens == without.tokens
    if not temperature:
        assert list(told.tokens) == text
