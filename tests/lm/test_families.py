"""Every family that docs/MODELS.md names: served as its own cache-less forward has it, or refused in a sentence."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from transformers import Phi3Config, Starcoder2Config

from specwire.lm import ModelError, load_model
from specwire.lm.kv_cache import CachedLM
from specwire.lm.model_config import WINDOWED
from tests.lm.families import ALONE, CHUNKED, HYBRID, OWN, PADDED, REFUSED, SERVED, SLIDING, WINDOW, Family
from tests.lm.models import CONTEXT, build, save
from tests.lm.walk import Texts

SLOTS = 3
STEPS = 15
MODELS = Path(__file__).parents[2] / "docs" / "MODELS.md"
KINDS = {
    "all of the text": SERVED,
    "sliding window": SLIDING,
    "chunks": CHUNKED,
    "own positions": OWN,
    "ALiBi": ALONE,
    "recurrent": HYBRID,
}
CASES = [pytest.param(family, id=f"{family.name}, {kind}") for kind, families in KINDS.items() for family in families]


@pytest.mark.parametrize("family", CASES)
def test_any_interleaving_of_extend_and_rollback_gives_the_plain_forward(family: Family, tmp_path: Path) -> None:
    model = build(family.config())
    lm = load_model(save(model, tmp_path), slots=SLOTS, context=CONTEXT, threads=1)
    assert isinstance(lm, CachedLM)
    assert getattr(lm.runner, "alone", False) is (family in [*ALONE, *OWN]), "who takes own positions is run alone"
    texts = Texts(model, lm, seed=len(family.name))
    longest = 0
    for _ in range(STEPS):
        texts.step()
        longest = max(longest, *(len(text) for text in texts.held))
    assert longest > WINDOW or family not in [*SLIDING, *CHUNKED, *OWN]  # else no window was slid past


@pytest.mark.parametrize(("family", "message"), [pytest.param(*case, id=case[0].name) for case in REFUSED])
def test_what_cannot_be_rolled_back_is_refused(family: Family, message: str, tmp_path: Path) -> None:
    family.config().save_pretrained(tmp_path)
    with pytest.raises(ModelError, match=re.escape(message)):
        load_model(str(tmp_path), slots=1, context=CONTEXT)


def test_a_window_as_long_as_the_context_is_none(tmp_path: Path) -> None:
    """Of a family whose shorter windows are refused."""
    config = Starcoder2Config(**PADDED, sliding_window=WINDOW)
    lm = load_model(save(build(config), tmp_path), slots=1, context=WINDOW)
    assert lm.info.context == WINDOW


def test_frequencies_that_change_with_the_length_are_refused_beyond_it(tmp_path: Path) -> None:
    """Phi-3's long contexts: once a text is longer, every key would have to be computed again."""
    factors = [1.0, 1.5, 2.0, 2.5]
    rope = {"rope_type": "longrope", "rope_theta": 10_000.0, "short_factor": factors, "long_factor": factors[::-1]}
    config = Phi3Config(**PADDED, original_max_position_embeddings=24, rope_parameters=rope)
    folder = save(build(config), tmp_path)
    with pytest.raises(ModelError, match="give a context of at most 24"):
        load_model(folder, slots=1)
    assert load_model(folder, slots=1, context=24).info.context == 24


def test_every_kind_of_window_that_is_served_is_tested() -> None:
    assert {family.config().model_type for family in (*SLIDING, *CHUNKED, *OWN)} == WINDOWED


def test_the_documentation_lists_what_is_tested() -> None:
    tested = {**KINDS, "refused": [family for family, _ in REFUSED]}
    rows = [[cell.strip() for cell in line.split("|")[1:3]] for line in MODELS.read_text().splitlines()]
    listed = {row[0]: sorted(row[1].split(", ")) for row in rows if row and row[0] in tested}
    assert listed == {kind: sorted(family.name for family in families) for kind, families in tested.items()}
