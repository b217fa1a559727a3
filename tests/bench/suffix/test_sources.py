"""Sources told known texts again: what is right of their guesses, and arctic-inference's tree as an oracle of ours."""

from __future__ import annotations

import importlib
import random
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from bench.harness.runs import BenchError
from bench.suffix.sources import (
    AGAIN,
    COLD,
    PACKAGE,
    WARM,
    OwnGuesses,
    Said,
    TableGuesses,
    arctic,
    build_table,
    replay,
    replays,
    shared_texts,
    training_files,
)
from demo_pair import TARGET, held_out_prompts
from specwire.core.policy.tunables import SHARED_ORDERS
from specwire.core.verify import shared_texts as module
from specwire.core.verify.shared_texts import Occurrence, ScopeTexts, SharedIndex, voted
from specwire.core.verify.table import NgramTable
from specwire.text.table_file import load_table

MOST = 16
ROOMY = 1 << 20
compiled = pytest.mark.skipif(not PACKAGE.is_dir(), reason="arctic-inference: make setup-arctic has not run")


def said(tenant: str, seed: int, prompt: int = 30, output: int = 60) -> Said:
    """A session whose text repeats nothing of its own."""
    tokens = random.Random(seed).sample(range(5000), prompt + output)
    return Said(tenant, tuple(tokens[:prompt]), tuple(tokens[prompt:]))


def test_what_a_tenant_said_before_is_right_in_its_own_sessions_only() -> None:
    first, again, other = said("ada", 1), said("ada", 1), said("bob", 1)
    [found] = replay("", [first, again, other], {"ada": shared_texts(), "bob": shared_texts()})
    [alone] = replay("", [first, again, other], {"ada": OwnGuesses(), "bob": OwnGuesses()})
    assert alone.tokens_a_guess == 1.0
    # 60 tokens of the second session in windows of 16 and one; 120 tokens of the others one by one.
    assert found.tokens_a_guess == pytest.approx(180 / (4 + 120))
    assert found.accepted == 1.0


def test_every_source_that_there_is() -> None:
    known = NgramTable.built([[1, 2, 3]], 2, "")
    sessions = [said("ada", 1), replace(said("ada", 1), steps=AGAIN), replace(said("bob", 1), temperature=0.8)]
    found = replays(sessions, known)
    parts = [(0.0, COLD), (0.0, AGAIN), (0.8, COLD)]
    assert [(each.temperature, each.steps) for each in found] == parts * (len(found) // len(parts))
    labels = [each.label for each in found[:: len(parts)]]
    ours = ["the session's own text", "the tenant's texts", "the better of both in hindsight"]
    assert labels[:4] == [*ours, "a table of 2 contexts, order 2"]
    assert labels[4:] == (["arctic-inference"] if PACKAGE.is_dir() else [])


def test_in_hindsight_the_better_guess_counts() -> None:
    """The text itself promises more, behind a longer match. What another one said is right."""
    other = Said("ada", (*range(20, 50), 7, 8, *range(60, 90)), (100,))
    last = Said("ada", (*range(1, 9), 50, 51, 52, *range(1, 9)), tuple(range(60, 75)), steps=WARM)
    found = {
        hindsight: replay("", [other, last], {"ada": shared_texts(hindsight=hindsight)})[1].tokens_a_guess
        for hindsight in (False, True)
    }
    assert found == {True: 15.0, False: 7.5}


def test_a_table_says_what_it_learnt_and_nothing_of_the_text() -> None:
    text = said("ada", 1)
    whole = [*text.prompt, *text.output]
    [learnt] = replay("", [text], {"ada": TableGuesses(NgramTable.built([whole, whole], 3, ""))})
    assert learnt.accepted == 1.0
    assert learnt.tokens_a_guess > 5
    repeating = Said("ada", text.prompt, (*text.output, *text.output))
    [other] = replay("", [repeating], {"ada": TableGuesses(NgramTable.built([[7001, 7002]], 2, ""))})
    assert (other.tokens_a_guess, other.accepted) == (1.0, None)


def test_the_pair_s_table_has_nothing_of_what_is_asked_for() -> None:
    texts = [file.read_text(encoding="utf-8") for file in training_files()]
    assert len(texts) > 100
    assert not [prompt.name for prompt in held_out_prompts() if any(prompt.text in text for text in texts)]


def test_a_table_is_built_by_the_command(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    corpus = tmp_path / "corpus.py"
    corpus.write_text("x = 1\ny = 1\n")
    assert load_table(build_table(str(TARGET), [corpus], tmp_path / "table")).contexts > 0
    with pytest.raises(BenchError, match="specwire table build: CalledProcessError; its last words are above"):
        build_table(str(TARGET), [tmp_path / "nowhere"], tmp_path / "table")
    assert "there is no" in capfd.readouterr().err


# Against arctic-inference


def random_texts() -> list[list[int]]:
    chance = random.Random(3)
    return [[int(chance.paretovariate(1.0)) % 12 for _ in range(300)] for _ in range(20)]


def code_texts() -> list[list[int]]:
    tokenizer = Tokenizer.from_file(str(TARGET / "tokenizer.json"))
    return [tokenizer.encode(prompt.text, add_special_tokens=False).ids for prompt in held_out_prompts()]


def indexed(texts: Sequence[Sequence[int]]) -> ScopeTexts:
    scope = ScopeTexts(lambda _: True)
    for number, text in enumerate(texts):
        index = SharedIndex(scope, text, str(number))
        while not index.complete:
            index.read()
    return scope


def agreeing(occurrences: Sequence[Occurrence], tokens: Sequence[int]) -> Iterator[Counter[int]]:
    """Before each of `tokens`: what follows where all those before it do."""
    for depth in range(len(tokens)):
        yield Counter(
            text[end + depth]
            for text, end, _ in occurrences
            if list(text[end : end + depth]) == list(tokens[:depth]) and end + depth < len(text)
        )


@compiled
@pytest.mark.parametrize("texts", [random_texts(), code_texts()], ids=["random", "code"])
def test_the_likeliest_continuation_and_its_share_are_those_of_a_suffix_tree(
    texts: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """All occurrences are counted, of which a verifier counts the latest few.

    The tree takes the best of all lengths: it is never less sure than we are, and where it takes our length it is as
    sure, by the same counts. Each text begins and ends with a token of its own: none begins as another does, and
    everything else is followed by something.
    """
    for name in ("VOTES", "CHAIN_LINKS"):
        monkeypatch.setattr(module, name, ROOMY)
    assert arctic() is not None
    texts = [[200_000 + number, *text, 100_000 + number] for number, text in enumerate(texts)]
    scope, tree = indexed(texts), importlib.import_module("arctic_inference.suffix_decoding._C").SuffixTree(64)
    for number, text in enumerate(texts):
        tree.extend(number, text)
    chance, same = random.Random(5), 0
    for _ in range(2000):
        text = chance.choice(texts)
        tail = text[: chance.randrange(SHARED_ORDERS[0] + 1, len(text))][-SHARED_ORDERS[0] :]
        order, occurrences = scope.occurrences(tail)
        length = SHARED_ORDERS[order]
        ours, share = voted(occurrences, MOST)
        # It looks for at most all but one of the tokens that it is told.
        one = tree.speculate([0, *tail[-length:]], 1, float(MOST), 0.0, 0.0, False)
        assert one.probs[0] >= share - 1e-5
        if one.match_len == length:
            assert one.probs[0] == pytest.approx(share, abs=1e-5)
            counts = next(agreeing(occurrences, one.token_ids))
            assert counts[one.token_ids[0]] == max(counts.values()) == counts[ours[0]]
        whole = tree.speculate([0, *tail[-length:]], MOST, float(MOST), 0.0, 0.0, False)
        if whole.match_len == length:
            same += 1
            for tokens in (whole.token_ids, ours):
                for counts, token in zip(agreeing(occurrences, tokens), tokens, strict=True):
                    assert counts[token] == max(counts.values())
    assert same > 500, "it takes the longest match often enough"
