"""The head of a GGUF file: what gguf's own writer wrote, the model's vocabulary, and broken files by name."""

from __future__ import annotations

import math
import os
import struct
from collections.abc import Mapping
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
from gguf import GGMLQuantizationType as Type

from demo_pair import DRAFT, TARGET
from deploy.cli.diagnosis.checks import Grade
from deploy.cli.diagnosis.doctor_models import check_models, facts_of
from specwire.lm import ModelError
from specwire.lm.gguf_file import END_TOKENS, NORMAL, SIZES, StoredTensor, read_gguf
from specwire.lm.gguf_tokenizer import text_of
from specwire.text.tokenizer import load_tokenizer, vocabulary_fingerprint, vocabulary_map
from tests.lm.gguf_files import ids_of, write, written
from tests.lm.models import CONTEXT, VOCABULARY, build, config
from tests.text import other_vocabularies


@pytest.fixture(scope="module")
def draft(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Give the demo drafter's file."""
    path = tmp_path_factory.mktemp("gguf") / "draft.gguf"
    written(DRAFT, path, Type.Q8_0)
    return path


def test_the_vocabulary_is_that_of_the_same_model_in_safetensors(draft: Path) -> None:
    file = read_gguf(str(draft))
    tokens = vocabulary_map((DRAFT / "tokenizer.json").read_bytes(), 0)
    assert file.tokens == tokens
    assert vocabulary_fingerprint(file.tokens) == vocabulary_fingerprint(tokens)
    assert [file.tokens[id_] for id_ in range(len(tokens))] == ids_of(str(draft))


def test_what_fills_gaps_between_ids_is_no_token(tmp_path: Path) -> None:
    path = write(build(config("llama")), tmp_path / "a.gguf", tokenizer=DRAFT / "tokenizer.json", padding=5)
    assert read_gguf(path).tokens == vocabulary_map((DRAFT / "tokenizer.json").read_bytes(), 0)
    assert ids_of(path)[-1].startswith("[PAD")


def test_a_model_without_a_tokenizer_calls_its_ids_by_their_numbers(tmp_path: Path) -> None:
    file = read_gguf(write(build(config("qwen3")), tmp_path / "a.gguf"))
    assert file.tokens == vocabulary_map(b"", VOCABULARY)
    assert (file.architecture, file.dtype, file.context(None)) == ("qwen3", "f32", CONTEXT)
    assert file.attention == (2 * 2 * 16, 2 * 2 * 16, 16)
    assert file.position_bytes("f32") == 2 * 2 * 2 * 16 * 4


def test_a_tokenizer_beside_it_must_have_the_files_own_tokens(draft: Path, tmp_path: Path) -> None:
    text = read_gguf(str(draft)).text()
    assert text.tokenizer_json == b""
    moved, beside = tmp_path / "draft.gguf", tmp_path / "tokenizer.json"
    moved.write_bytes(draft.read_bytes())
    beside.write_bytes((DRAFT / "tokenizer.json").read_bytes())
    assert read_gguf(str(moved)).text().tokenizer_json == beside.read_bytes()
    beside.write_text(beside.read_text().replace("<|endoftext|>", "<|end|>"))
    with pytest.raises(ModelError, match=r"beside it is of another vocabulary: id 0 is '<\|end\|>' there"):
        read_gguf(str(moved)).text()


@pytest.mark.parametrize(
    ("kept", "message"),
    [
        (b"", "cannot be read as a GGUF file"),
        (b"GGML", "it does not begin with GGUF"),
        (b"", "it is empty"),
        (b"GGUF\x09\0\0\0" + bytes(16), "version 9 is not known, only 2 and 3; convert it anew"),
        (b"GGUF\0\0\0\x03" + bytes(16), "its numbers are big-endian"),
        (b"GGUF\x03\0\0\0" + bytes(8), "it ends too early, after 16 bytes; is it cut off?"),
        (b"GGUF\x03\0\0\0" + bytes(8) + b"\xff" * 8, "it says that it has 18446744073709551615 entries"),
        (b"GGUF\x03\0\0\0" + bytes(8) + b"\x01" + bytes(7) + b"\xff" * 8, "it ends too early"),
        (b"GGUF\x03\0\0\0" + bytes(16), "has no tensors"),
    ],
)
def test_broken_files_are_named(kept: bytes, message: str, tmp_path: Path) -> None:
    path = tmp_path / "broken.gguf"
    path.write_bytes(kept)
    with pytest.raises(ModelError, match=message) as told:
        read_gguf(str(path))
    assert "broken.gguf" in str(told.value)


def test_a_file_that_is_cut_anywhere_is_refused(draft: Path, tmp_path: Path) -> None:
    whole, path = draft.read_bytes(), tmp_path / "cut.gguf"
    for length in (5, 20, 100, 1000, 50_000):
        path.write_bytes(whole[:length])
        with pytest.raises(
            ModelError, match=rf"cannot be read as a GGUF file: .* after {length} bytes; is it cut off\?"
        ):
            read_gguf(str(path))
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ModelError, match=r"the tensor '.*' of .* from byte \d+ on does not fit .* is it cut off"):
        read_gguf(str(path))


@pytest.mark.parametrize("name", ["vocab_size", "block_count", "feed_forward_length"])
def test_a_size_that_the_file_cannot_have_is_refused(name: str, tmp_path: Path) -> None:
    """Before anything is made of it."""
    path = write(build(config("llama")), tmp_path / "a.gguf")
    whole = Path(path).read_bytes()
    key = f"llama.{name}".encode()
    at = whole.index(key) + len(key)
    assert whole[at : at + 4] == (4).to_bytes(4, "little")
    Path(path).write_bytes(whole[: at + 4] + (1 << 31).to_bytes(4, "little") + whole[at + 8 :])
    with pytest.raises(ModelError, match=rf"llama\.{name} is 2147483648, more than its \d+ bytes can hold"):
        read_gguf(path)


# How a value begins in a file: the numbers of unsigned and signed whole numbers, of float64, a string, a list.
WRITTEN: Mapping[str, tuple[int, bytes]] = {
    "2 billion": (10, (2 * 10**9).to_bytes(8, "little")),
    "below 0": (11, b"\xff" * 8),
    "infinite": (12, struct.pack("<d", math.inf)),
    "text": (8, (1).to_bytes(8, "little") + b"x"),
    "an empty list": (9, struct.pack("<IQ", 10, 0)),
    "too many in a list": (9, struct.pack("<IQ2Q", 10, 2, 4, 2 * 10**9)),
}


@pytest.mark.parametrize("name", SIZES)
@pytest.mark.parametrize("way", WRITTEN)
def test_what_is_no_size_of_a_model_is_refused_however_large_the_file_is(name: str, way: str, tmp_path: Path) -> None:
    """A list with a place for each block of 8 billion was made, where the file had a gigabyte."""
    path, (kind, value) = tmp_path / "a.gguf", WRITTEN[way]

    def text(said: str) -> bytes:
        return len(said).to_bytes(8, "little") + said.encode()

    head = b"GGUF" + struct.pack("<IQQ", 3, 0, 2) + text("general.architecture") + struct.pack("<I", 8) + text("llama")
    path.write_bytes(head + text(f"llama.{name}") + struct.pack("<I", kind) + value)
    os.truncate(path, 1 << 30)
    with pytest.raises(ModelError, match=rf"llama\.{name} is .*, no size that a model has"):
        read_gguf(str(path))


def test_an_end_that_is_no_id_is_none(draft: Path) -> None:
    file = read_gguf(str(draft))
    stating = replace(file, metadata={**file.metadata, "tokenizer.ggml.eos_token_id": [0]})
    assert stating.eos_ids == tuple(id_ for id_ in file.eos_ids if file.tokens[id_] in END_TOKENS)
    assert stating.text().tokens == file.text().tokens


@pytest.mark.parametrize("stated", [0, 1, 10**8, 1 << 40])
def test_a_length_that_no_model_has_is_refused(stated: int, draft: Path) -> None:
    file = read_gguf(str(draft))
    stating = replace(file, metadata={**file.metadata, "llama.context_length": stated})
    with pytest.raises(ModelError, match="context: must be from 2 to 16777216 positions, and the model states"):
        stating.context(None)


def test_a_missing_file_and_lengths_that_cannot_be_are_named(draft: Path) -> None:
    with pytest.raises(ModelError, match="there is no such file"):
        read_gguf("/no/such/file.gguf")
    file = read_gguf(str(draft))
    with pytest.raises(ModelError, match="context: the model was made for 2048 positions, not 4096"):
        file.context(4096)
    with pytest.raises(ModelError, match="context: must be from 2 to 16777216"):
        file.context(1)
    with pytest.raises(ModelError, match="kv-type: must be one of auto, f32"):
        file.kv_type("q2_k")


def test_the_narrowest_head_decides_which_keys_and_values_can_be_kept(tmp_path: Path) -> None:
    file = read_gguf(write(build(config("llama")), tmp_path / "a.gguf"))
    assert (file.kv_type("auto"), file.kv_type("f16")) == ("f32", "f16")
    with pytest.raises(ModelError, match="kv-type: q8_0 needs heads of a multiple of 32 elements, not of 8"):
        file.kv_type("q8_0")


def test_a_cache_beyond_the_original_context_of_longrope_is_refused(tmp_path: Path) -> None:
    changed = {"rope.scaling.original_context_length": 32}
    file = read_gguf(write(build(config("llama")), tmp_path / "a.gguf", changed=changed))
    file.check_rotation(8, 32)
    file = replace(file, tensors={**file.tensors, "rope_factors_long.weight": StoredTensor((4,), 0, 0)})
    file.check_rotation(1, 32)
    file.check_rotation(8, 33)
    with pytest.raises(ModelError, match="slots: llama.cpp turns .* beyond 32 positions .* 2 slots of 32 are more"):
        file.check_rotation(2, 32)


def test_the_doctor_holds_a_file_against_the_target(draft: Path) -> None:
    found = list(check_models(str(TARGET), [str(draft)], "float32", 4, 8 << 30))
    assert [each.text for each in found if each.topic == "pair"] == [f"{draft} and {TARGET} have the same 4096 tokens"]
    facts = facts_of(str(draft), "float32")
    assert facts.kv_bytes == 2048 * (256 + 256) * 2
    assert facts.weight_bytes == draft.stat().st_size
    assert all(each.grade is not Grade.BAD for each in found if each.topic != "llamacpp")


def pieces_of(text: str, scores: Mapping[str, float]) -> list[str]:
    """As SentencePiece has it: of neighbours that make a token the best scored are merged, the left ones first."""
    parts = list("\u2581" + text.replace(" ", "\u2581"))
    while found := [
        (scores[one + other], -at) for at, (one, other) in enumerate(pairwise(parts)) if one + other in scores
    ]:
        at = -max(found)[1]
        parts[at : at + 2] = ["".join(parts[at : at + 2])]
    return [
        token for part in parts for token in ([part] if part in scores else map("<0x{:02X}>".format, part.encode()))
    ]


def test_a_tokenizer_of_pieces_is_made_of_the_files_scores(tmp_path: Path) -> None:
    """So a drafter of another family needs no tokenizer.json beside its file to draft by token."""
    path = written(
        Path(other_vocabularies.save(tmp_path / "pieces", other_vocabularies.sentencepiece)), tmp_path / "pieces.gguf"
    )
    file = read_gguf(path)
    told = text_of(file).tokenizer_json
    made = load_tokenizer(told)
    kinds, scores = (file.metadata[f"tokenizer.ggml.{name}"] for name in ("token_type", "scores"))
    pieces = {name: scores[id_] for id_, name in file.tokens.items() if kinds[id_] == NORMAL}
    for text in ("def area(width, height):\n    return", "  naïve – 日本語 🙂 \t and  then", "x"):
        encoded = made.encode(text, add_special_tokens=False)
        assert encoded.tokens == pieces_of(text, pieces)
        assert made.decode(encoded.ids) == text
    assert vocabulary_fingerprint(vocabulary_map(told, 0)) == vocabulary_fingerprint(file.tokens)
    (pair,) = [each for each in check_models(str(TARGET), [path], "float32", 4, 8 << 30) if each.topic == "pair"]
    assert pair.grade is Grade.OK
    assert "tokens are shared (100% of a text); it drafts in these" in pair.text
