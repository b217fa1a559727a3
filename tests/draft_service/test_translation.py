"""A drafter of another vocabulary: what it proposes is what its model says, by an independent computation."""

from __future__ import annotations

import json
import zlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, decoders, models
from transformers import LlamaConfig, LlamaForCausalLM

import demo_pair
from draft_service import translation
from draft_service.service import deliver
from draft_service.sessions import AdvanceSession, Dropped, LearnVocabulary, OpenSession, Sessions
from draft_service.translation import TranslatingModel
from specwire.core.law.noise import gumbel
from specwire.core.law.sampling import Sampling
from specwire.core.messages import Pace
from specwire.lm import LanguageModel, load_model
from specwire.lm.guesses import CANDIDATES, LEAST_LOG, guesses
from specwire.text.tokenizer import BYTE_OF
from specwire.text.vocabulary_map import MOST_VOCABULARIES
from tests.draft_service.test_sessions import Recorder
from tests.text import other_vocabularies
from tests.text.tokenizers_for_tests import byte_level, id_of, word_piece

TARGET = Tokenizer.from_file(str(demo_pair.TARGET / "tokenizer.json"))
TEXTS = ("def area(width, height):\n    ", "日本語のテキスト 🙂 und naïve", "Ελληνικά and кириллица then ")
LENGTH = 24
COUPLED = Sampling(temperature=1.0, seed=11)


def told(tokenizer: Tokenizer = TARGET, eos: Sequence[int] = (0,), packed: bytes | None = None) -> LearnVocabulary:
    text = zlib.compress(tokenizer.to_str().encode()) if packed is None else packed
    return LearnVocabulary("told", text, tokenizer.get_vocab_size(), frozenset(eos))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The demo drafter with a SentencePiece vocabulary."""
    return other_vocabularies.save(tmp_path_factory.mktemp("models") / "pieces", other_vocabularies.sentencepiece)


@pytest.fixture(scope="module")
def pieces(folder: str) -> LanguageModel:
    return load_model(folder, slots=3)


class Drafting:
    """Sessions of a model, and one link to them."""

    def __init__(self, model: LanguageModel, learn: LearnVocabulary) -> None:
        self.link = Recorder()
        self.sessions = Sessions(model, guesses, deliver, texts=TranslatingModel)
        self.sessions.apply(learn)

    def open(self, tokens: Sequence[int], sampling: Sampling, pace: Pace, handle: int = 1) -> None:
        self.sessions.apply(OpenSession(self.link, handle, tuple(tokens), sampling, pace, vocabulary="told"))

    def run(self) -> None:
        while self.sessions.wanting:
            self.sessions.step()
        self.sessions.deliver()

    def proposed(self, handle: int = 1) -> list[int]:
        self.run()
        found = self.link.proposed(handle)
        self.link.take()
        return found


def scores(model: LlamaForCausalLM, own: Sequence[int]) -> torch.Tensor:
    with torch.no_grad():
        logits: torch.Tensor = model(torch.tensor([list(own)])).logits[0, -1]
    return logits


def by_bytes(tokenizer: Tokenizer, token: int) -> bytes:
    """Read off the surface form, by the conventions' own definitions."""
    name = str(tokenizer.id_to_token(token))
    if name.startswith("<0x"):
        return bytes([int(name[3:5], 16)])
    if "▁" in name or tokenizer is not TARGET:
        return name.replace("▁", " ").encode()
    return bytes(BYTE_OF[character] for character in name)


def expected_by_token(model: LlamaForCausalLM, own: Tokenizer, text: str, sampling: Sampling, count: int) -> list[int]:
    """Masked to the tokens that both have; under coupled with the noise of the target's ids.

    As every drafter, it leaves out what is too unlikely to need noise.
    """
    rank = {by_bytes(own, token): token for token in range(own.get_vocab_size() - 1, 1, -1) if token > 257}
    rank = {bytes([token - 2]): token for token in range(2, 258)} | rank
    pairs = [(token, rank[by_bytes(TARGET, token)]) for token in range(1, TARGET.get_vocab_size())]
    pairs.append((0, id_of(own, "</s>")))
    theirs, ours = np.array([one for one, _ in pairs]), torch.tensor([other for _, other in pairs])
    line, position, found = own.encode(text, add_special_tokens=False).ids, len(TARGET.encode(text).ids), []
    for at in range(position, position + count):
        kept = scores(model, line)[ours].double().numpy()
        if sampling.temperature:
            noise = gumbel(sampling.seed, sampling.choice, at, theirs)
            likely = kept >= max(kept.max() - sampling.temperature * LEAST_LOG, np.sort(kept)[-CANDIDATES])
            kept = np.where(likely, kept / sampling.temperature + noise, -np.inf)
        best = int(kept.argmax())
        found.append(int(theirs[best]))
        line.append(int(ours[best]))
    return found


@pytest.fixture(scope="module")
def reference(folder: str) -> LlamaForCausalLM:
    model: LlamaForCausalLM = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    return model


@pytest.mark.parametrize("sampling", [Sampling(), COUPLED], ids=["greedy", "coupled"])
@pytest.mark.parametrize("text", TEXTS)
def test_shared_tokens_are_drawn_with_the_targets_noise(
    pieces: LanguageModel, reference: LlamaForCausalLM, folder: str, text: str, sampling: Sampling
) -> None:
    own = Tokenizer.from_file(f"{folder}/tokenizer.json")
    drafting = Drafting(pieces, told())
    drafting.open(TARGET.encode(text).ids, sampling, Pace(4, LENGTH))
    assert drafting.proposed() == expected_by_token(reference, own, text, sampling, LENGTH)


def test_a_contradicted_chain_begins_anew_behind_the_text(pieces: LanguageModel) -> None:
    """As if the session had been opened with the text as it is now; also where the text goes back."""
    rng = np.random.default_rng(5)
    for text in TEXTS:
        drafting, tokens = Drafting(pieces, told()), TARGET.encode(text).ids
        drafting.open(tokens, Sampling(), Pace(2, 8))
        for _ in range(6):
            ahead = drafting.proposed()
            right = int(rng.integers(0, len(ahead) + 1)) if ahead else 0
            wrong = int(rng.integers(1, TARGET.get_vocab_size()))
            position = max(1, len(tokens) - int(rng.integers(0, 3)))
            tokens = [*tokens, *ahead[:right], wrong]
            drafting.sessions.apply(AdvanceSession(drafting.link, 1, position, tuple(tokens[position:]), Pace(2, 8)))
        fresh = Drafting(load_like(pieces), told())
        fresh.open(tokens, Sampling(), Pace(2, 8))
        assert drafting.proposed() == fresh.proposed()


def load_like(model: LanguageModel) -> LanguageModel:
    for slot in range(model.slots):
        model.discard(slot)
    return model


def test_what_is_decided_as_drafted_goes_on(pieces: LanguageModel) -> None:
    """In steps, and at once: a chain that is told to be right is the chain that would have been drafted."""
    drafting, tokens = Drafting(pieces, told()), TARGET.encode(TEXTS[0]).ids
    drafting.open(tokens, Sampling(), Pace(3, 30))
    whole = drafting.proposed()
    again = Drafting(load_like(pieces), told())
    again.open(tokens, Sampling(), Pace(3, 6))
    found, position = again.proposed(), len(tokens)
    while len(found) < len(whole):
        decided = found[position - len(tokens) :]
        again.sessions.apply(AdvanceSession(again.link, 1, position, tuple(decided), Pace(3, 6)))
        position += len(decided)
        more = again.proposed()
        assert more
        found += more
    assert found[: len(whole)] == whole
    assert again.sessions.tally.rollbacks == 0


def test_both_kinds_of_sessions_share_a_forward(pieces: LanguageModel) -> None:
    """And each drafts what it would alone."""
    own = Tokenizer.from_str(pieces.info.tokenizer_json.decode())
    alone = []
    for native in (False, True):
        single = Drafting(load_like(pieces), told())
        start(single, own, native)
        alone.append(single.proposed(1 + native))
    both = Drafting(load_like(pieces), told())
    start(both, own, native=False)
    start(both, own, native=True)
    both.run()
    assert [both.link.proposed(1), both.link.proposed(2)] == alone
    assert all(alone)


def start(drafting: Drafting, own: Tokenizer, native: bool) -> None:
    if native:
        tokens = tuple(own.encode(TEXTS[0], add_special_tokens=False).ids)
        drafting.sessions.apply(OpenSession(drafting.link, 2, tokens, Sampling(), Pace(2, 10)))
    else:
        drafting.open(TARGET.encode(TEXTS[2]).ids, Sampling(), Pace(2, 10))


# Where nothing can be said


def tiny(folder: Path, tokenizer: Tokenizer) -> LanguageModel:
    """A random model of this vocabulary."""
    torch.manual_seed(3)
    config = LlamaConfig(
        vocab_size=tokenizer.get_vocab_size(),
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=48,
        eos_token_id=tokenizer.token_to_id("</s>"),
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save(str(folder / "tokenizer.json"))
    return load_model(str(folder), slots=1)


def test_text_that_the_drafter_cannot_express_ends_its_chain(tmp_path: Path) -> None:
    """Half a character, where it has no tokens for bytes; behind a whole one drafting goes on."""
    lacking = Tokenizer(models.BPE({"<unk>": 0, "</s>": 1, "▁": 2, "a": 3, "▁a": 4}, [("▁", "a")], unk_token="<unk>"))
    lacking.decoder = decoders.Metaspace()
    drafting = Drafting(tiny(tmp_path, lacking), told(byte_level(), (1,)))
    face = byte_level().encode("a🙃", add_special_tokens=False).ids
    drafting.open(face[:-1], Sampling(), Pace(1, 4))
    assert drafting.proposed() == []
    rest = AdvanceSession(drafting.link, 1, len(face) - 1, (face[-1],), Pace(1, 4))
    drafting.sessions.apply(rest)
    assert drafting.proposed() != []


def test_a_text_longer_than_the_drafter_holds_ends_its_chain(tmp_path: Path) -> None:
    """It counts in own tokens: 48 of them fit."""
    tokenizer, _ = other_vocabularies.sentencepiece()
    drafting = Drafting(tiny(tmp_path, tokenizer), told())
    drafting.open(TARGET.encode("a b c d e f ").ids, Sampling(), Pace(1, 200))
    proposed = drafting.proposed()
    assert 0 < len(proposed) < 200
    assert len(proposed) <= 48
    drafting.open(TARGET.encode("日本語" * 20).ids, Sampling(), Pace(1, 4), handle=2)
    assert drafting.sessions.tally.refused == {"resource_exhausted": 1}


# Vocabularies that are told are not trusted

NO_DECODER = Tokenizer(models.WordLevel({"a": 0, "b": 1}, unk_token="a"))
BOMB = zlib.compress(bytes(translation.MOST_JSON_BYTES + 1))
GOOD = TARGET.to_str()


def changed(**parts: object) -> bytes:
    return zlib.compress(json.dumps(json.loads(GOOD) | parts).encode())


@pytest.mark.parametrize(
    ("packed", "said"),
    [
        (b"", "tokenizer_zlib: is cut off"),
        (b"nonsense", "tokenizer_zlib: Error -3"),
        (zlib.compress(GOOD.encode())[:-50], "tokenizer_zlib: is cut off"),
        (BOMB, f"tokenizer_zlib: is cut off, or has more than {translation.MOST_JSON_BYTES} bytes"),
        (zlib.compress(b""), "tokenizer_json: is empty"),
        (zlib.compress(b"\xff\xfe"), "tokenizer_json: "),
        (zlib.compress(b"{}"), "tokenizer_json: "),
        (zlib.compress(b"[" * 100_000), "tokenizer_json: "),
        (changed(model=None), "tokenizer_json: "),
        (changed(decoder=None), "tokenizer_json: its tokens do not stand for bytes"),
        (zlib.compress(NO_DECODER.to_str().encode()), "tokenizer_json: its tokens do not stand for bytes"),
        (zlib.compress(word_piece().to_str().encode()), "tokenizer_json: its tokens do not stand for bytes"),
    ],
)
def test_a_broken_vocabulary_is_told_to_its_sessions(pieces: LanguageModel, packed: bytes, said: str) -> None:
    drafting = Drafting(load_like(pieces), told(packed=packed))
    drafting.open([1, 2, 3], Sampling(), Pace(1, 4))
    found = refused(drafting)
    assert found.code == 9
    assert found.message.startswith(f"vocabulary_fingerprint: {said}")


def refused(drafting: Drafting) -> Dropped:
    drafting.run()
    (found,) = drafting.link.take()
    assert isinstance(found, Dropped)
    return found


def test_only_the_latest_vocabularies_are_kept(pieces: LanguageModel) -> None:
    drafting = Drafting(load_like(pieces), told())
    packed = told().tokenizer_zlib
    for number in range(MOST_VOCABULARIES):
        drafting.sessions.apply(LearnVocabulary(str(number), packed, 300, frozenset()))
    drafting.open([1, 2, 3], Sampling(), Pace(1, 4))
    assert refused(drafting).message == "vocabulary_fingerprint: was told too long ago"


def test_ids_that_the_target_has_not_are_refused(pieces: LanguageModel) -> None:
    drafting = Drafting(load_like(pieces), told())
    drafting.open([1, 2, 3], Sampling(), Pace(1, 4))
    drafting.run()
    drafting.link.take()
    drafting.sessions.apply(AdvanceSession(drafting.link, 1, 3, (TARGET.get_vocab_size(),), Pace(1, 4)))
    assert refused(drafting).message == "tokens: token id 4096 is outside 0..4095"
