"""Small tokenizers of each family, built in memory."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

CORPUS = [
    "def area(width, height):\n    return width * height\n",
    "the quick brown fox jumps over the lazy dog, again and again",
    "naïve café – 日本語のテキスト, emoji 🙂🙃👩‍👩‍👧, Ελληνικά, кириллица",
    "    indented  twice;  spaces   and\ttabs",
]
PIECES = ["▁", "▁▁", "▁▁▁▁", "a", "b", "é", "t", "h", "e", "▁t", "th", "▁th", "▁the", "he", "日", "�", "."]
SPECIALS = [AddedToken("<s>", special=True), AddedToken("</s>", special=True)]


def trainer_of(size: int, specials: list[AddedToken], alphabet: Sequence[str] = ()) -> trainers.BpeTrainer:
    return trainers.BpeTrainer(
        vocab_size=size, initial_alphabet=list(alphabet), special_tokens=list(specials), show_progress=False
    )


def id_of(tokenizer: Tokenizer, token: str) -> int:
    found = tokenizer.token_to_id(token)
    assert found is not None, token
    return found


@cache
def byte_level() -> Tokenizer:
    """As GPT-2 and Qwen: every byte has a token, so any text and any malformed byte string can occur."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainer_of(340, SPECIALS, alphabet)
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_tokens(["<tool>", "à la", "语"])
    return tokenizer


@cache
def sentencepiece_like() -> Tokenizer:
    """As Llama 2 and Mistral: metaspace, byte tokens for what the vocabulary lacks, one space stripped at the start."""
    vocabulary = ["<unk>", "<s>", "</s>"] + [f"<0x{byte:02X}>" for byte in range(256)]
    vocabulary += [*PIECES, "\n", ""]
    merges = [("▁", "t"), ("t", "h"), ("▁", "th"), ("▁t", "h"), ("▁th", "e"), ("h", "e"), ("▁", "▁"), ("▁▁", "▁▁")]
    ids = {token: index for index, token in enumerate(vocabulary)}
    tokenizer = Tokenizer(models.BPE(ids, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens(SPECIALS)
    return tokenizer


@cache
def metaspace() -> Tokenizer:
    """A plain Metaspace decoder: the first token loses its leading space."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    trainer = trainer_of(200, [AddedToken("<unk>", special=True), *SPECIALS])
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


@cache
def word_level() -> Tokenizer:
    """Whole words, no decoder: joined with spaces."""
    words = ["<unk>", "red", "green", "blue", "日本", "", "x"]
    tokenizer = Tokenizer(models.WordLevel({word: index for index, word in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.add_special_tokens(SPECIALS)
    return tokenizer


@cache
def word_piece() -> Tokenizer:
    """As BERT: '##' joins, spaces before punctuation are removed."""
    words = ["[UNK]", "play", "##ing", "##ed", ".", ",", "do", "not", "n't", "'s", "##", "we", "?"]
    tokenizer = Tokenizer(models.WordPiece({word: index for index, word in enumerate(words)}, unk_token="[UNK]"))
    tokenizer.decoder = decoders.WordPiece()
    tokenizer.add_special_tokens(SPECIALS)
    return tokenizer


@cache
def end_of_word() -> Tokenizer:
    """As the original BPE: a suffix marks a word's end and becomes a space unless it is the last."""
    words = ["lo", "w</w>", "er</w>", "new", "est</w>", "</w>", "a"]
    tokenizer = Tokenizer(models.BPE({word: index for index, word in enumerate(words)}, []))
    tokenizer.decoder = decoders.BPEDecoder()
    tokenizer.add_special_tokens(SPECIALS)
    return tokenizer


@cache
def byte_level_in_sequence() -> Tokenizer:
    """A byte-level decoder inside a sequence takes the general path."""
    tokenizer = Tokenizer.from_str(byte_level().to_str())
    tokenizer.decoder = decoders.Sequence([decoders.ByteLevel(), decoders.Fuse()])
    return tokenizer


ALL = {
    "byte_level": byte_level,
    "sentencepiece_like": sentencepiece_like,
    "metaspace": metaspace,
    "word_level": word_level,
    "word_piece": word_piece,
    "end_of_word": end_of_word,
    "byte_level_in_sequence": byte_level_in_sequence,
}
