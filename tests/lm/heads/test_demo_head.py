"""The demo target's trained head as it is served: right as often as in a plain loop, on held-out prompts.

The loop is transformers' target in float32, a text at a time, and a reader of the original EAGLE-3 format that shares
nothing with ours. Served is what `--runtime auto` and `--dtype` make of the pair here, all texts in one batch, in which
large layers of a head are rounded to 8 bits. So some guesses differ; how often they are right must not.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer
from transformers import LlamaForCausalLM

from demo_pair import HEAD, TARGET, held_out_prompts
from specwire.core.draft import HeadRequest
from specwire.core.law.sampling import Sampling
from specwire.core.model import Feed
from specwire.lm import load_model
from specwire.lm.heads.slots import HeadedModel
from specwire.lm.load import native_dtype
from tests.lm.heads.original_eagle3 import OriginalEagle3, original_of

PROMPTS, TOKENS, DEPTH = 8, 64, 4
TAPS = (1, 3, 5)
# Of all places, those at which one of the two has more guesses right. Rounding makes it 1 to 2 %; more than this is
# another computation.
MOST_DIFFERENT = 0.05
# Standard deviations of a fair coin's sum.
SIGMAS = 4.0


@pytest.fixture(scope="module")
def target() -> Any:
    return LlamaForCausalLM.from_pretrained(TARGET, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def texts(target: Any) -> list[tuple[list[int], int]]:
    """The target's greedy texts of one length behind prompts, and where they begin."""
    tokenizer = Tokenizer.from_file(str(TARGET / "tokenizer.json"))
    made = []
    for prompt in held_out_prompts()[:PROMPTS]:
        ids = tokenizer.encode(prompt.text, add_special_tokens=False).ids
        given, length = torch.tensor([ids]), dict[str, Any](max_new_tokens=TOKENS, min_new_tokens=TOKENS)
        whole = target.generate(given, attention_mask=torch.ones_like(given), do_sample=False, **length)
        made.append((whole[0].tolist(), len(ids)))
    return made


def right(guesses: Sequence[int], text: Sequence[int], place: int) -> int:
    """How many are the text's own next tokens, one after the other; place: of the first."""
    wrong = (at for at, guess in enumerate(guesses) if guess != text[place + at])
    return next(wrong, len(guesses))


@pytest.fixture(scope="module")
@torch.no_grad()
def plain(target: Any, texts: list[tuple[list[int], int]], tmp_path_factory: pytest.TempPathFactory) -> list[list[int]]:
    """Of each text how many guesses are right at each place where there is room for all."""
    folder = tmp_path_factory.mktemp("original")
    original_of(HEAD, folder)
    head, found = OriginalEagle3(folder, target.get_parameter("model.embed_tokens.weight")), []
    for text, begin in texts:
        told = target(input_ids=torch.tensor([text]), output_hidden_states=True, use_cache=False).hidden_states
        taps, places = torch.cat([told[tap][0] for tap in TAPS], dim=-1), range(begin, len(text) - DEPTH + 1)
        found.append([right(head.draft(taps[: at - 1], text[:at], DEPTH)[0], text, at) for at in places])
    return found


def served(lm: HeadedModel, texts: list[tuple[list[int], int]]) -> list[list[int]]:
    """As `plain`, a step for all texts at once: each is fed its next token, and drafted for."""
    counts: list[list[int]] = [[] for _ in texts]
    fed = [0] * len(texts)
    for step in range(min(len(text) - begin for text, begin in texts) - DEPTH + 1):
        seen = [text[: begin + step] for text, begin in texts]
        lm.forward([Feed(slot, fed[slot], part[fed[slot] : -1], 1) for slot, part in enumerate(seen)])
        fed = [len(part) - 1 for part in seen]
        drafted = lm.draft([HeadRequest(slot, part, Sampling(), DEPTH) for slot, part in enumerate(seen)])
        for slot, guesses in enumerate(drafted):
            counts[slot].append(right(guesses, texts[slot][0], len(seen[slot])))
    return counts


@pytest.mark.parametrize("dtype", dict.fromkeys(["float32", native_dtype()]))
def test_its_acceptance_is_that_of_a_plain_loop(
    dtype: str, texts: list[tuple[list[int], int]], plain: list[list[int]]
) -> None:
    """At each place both are tried, so they are compared in pairs: where they differ, a fair coin says which is right.

    By position k: how often k guesses in a row are right, whose difference has to be within SIGMAS of that coin's, and
    few places may differ at all.
    """
    lm = load_model(str(TARGET), slots=len(texts), dtype=dtype, context=512, runtime="auto", heads=str(HEAD), threads=1)
    assert isinstance(lm, HeadedModel)
    found = served(lm, texts)
    pairs = [pair for one, other in zip(found, plain, strict=True) for pair in zip(one, other, strict=True)]
    for position in range(1, DEPTH + 1):
        more = sum(one >= position > other for one, other in pairs)
        fewer = sum(one < position <= other for one, other in pairs)
        shares = [sum(counts[way] >= position for counts in pairs) / len(pairs) for way in (0, 1)]
        said = f"{lm.info.runtime} {dtype}, {position} in a row: {shares[0]:.3f}, plain {shares[1]:.3f}"
        assert abs(more - fewer) <= SIGMAS * max(1, more + fewer) ** 0.5, said
        assert more + fewer <= MOST_DIFFERENT * len(pairs), said
    assert sum(counts[1] >= 1 for counts in pairs) / len(pairs) > 0.4, "the head is the trained one"
