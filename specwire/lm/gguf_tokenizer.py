"""Tokenizers of GGUF files, made for `tokenizers` of the files' own tables: whoever serves text needs no llama.cpp.

A file says by a name how its byte-level tokenizer cuts a text before pairs are merged. `CUTS` has what llama.cpp does
for each name (`llm_tokenizer_bpe` in its llama-vocab.cpp): patterns, of which each cuts what the ones before it left,
and what lies between matches is a piece, too. Tables of SentencePiece are not cut: there scores say what is merged.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel, Split
from tokenizers.pre_tokenizers import Sequence as Pieces
from tokenizers.processors import TemplateProcessing

from specwire.core.model import ModelError
from specwire.lm.gguf_file import CONTROL, NORMAL, USER_DEFINED, GgufFile
from specwire.lm.model_files import TOKENIZER, ModelText
from specwire.text.tokenizer import SPACE

logger = logging.getLogger(__name__)

_ENDINGS = r"(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_MARKS = r" ?[^\s\p{L}\p{N}]+[\r\n]*"
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)"
_LLAMA3 = rf"{_ENDINGS}|{_WORDS}|\p{{N}}{{1,3}}|{_MARKS}|{_SPACES}"
_QWEN2 = rf"{_ENDINGS}|{_WORDS}|\p{{N}}|{_MARKS}|{_SPACES}"
_QWEN35 = rf"{_ENDINGS}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{_SPACES}"
_UPPER, _LOWER = r"((?=[\p{L}])([^a-z]))", r"((?=[\p{L}])([^A-Z]))"
_ONE = r"[^\r\n\p{L}\p{N}]?"
_SLASHED = rf" ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_SPACES}"
_TEKKEN = rf"{_ONE}{_UPPER}*{_LOWER}+|{_ONE}{_UPPER}+{_LOWER}*|\p{{N}}|{_SLASHED}"
_GPT4O = rf"{_ONE}{_UPPER}*{_LOWER}+{_ENDINGS}?|{_ONE}{_UPPER}+{_LOWER}*{_ENDINGS}?|\p{{N}}{{1,3}}|{_SLASHED}"
_BLOOM = r" ?[^(\s|.,!?…。，、।۔،)]+"
_FALCON = (r"[\p{P}\$\+<=>\^~\|`]+", _GPT2, "[0-9][0-9][0-9]")
_DEEPSEEK3 = (
    r"\p{N}{1,3}",
    "[一-龥぀-ゟ゠-ヿ]+",
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|"""
    + _SPACES,
)
_FEW_DIGITS = (r"\p{N}", _GPT2)

CUTS: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("gpt-2", "phi-2", "mpt", "olmo", "jais", "trillion", "granite-docling"), (_GPT2,)),
    **dict.fromkeys(("llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral"), (_LLAMA3,)),
    **dict.fromkeys(("dbrx", "smaug-bpe", "chatglm-bpe", "glm4", "lfm2"), (_LLAMA3,)),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "stablelm2", "hunyuan", "megrez", "kormo"), (_QWEN2,)),
    **dict.fromkeys(("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b"), _FEW_DIGITS),
    **dict.fromkeys(("gpt-4o", "llama4"), (_GPT4O,)),
    **dict.fromkeys(("bloom", "poro-chat", "gpt3-finnish"), (_BLOOM,)),
    "qwen35": (_QWEN35,),
    "tekken": (_TEKKEN,),
    "viking": (_BLOOM, r"\p{N}"),
    "falcon": _FALCON,
    "deepseek-v3": _DEEPSEEK3,
}
# Of these a piece that is a token is it, however its pairs are merged.
WHOLE_PIECES = frozenset(("llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral", "lfm2", "tekken"))
BYTE_LEVEL, SENTENCEPIECE = "gpt2", "llama"


def text_of(file: GgufFile) -> ModelText:
    """What stands beside the file and in it, with a tokenizer made of its table where there is none beside it.

    Where none can be made that is said: the model then serves token ids only.
    """
    text = file.text()
    made = None if text.tokenizer_json else made_tokenizer(file)
    return text if made is None else text._replace(tokenizer_json=made.to_str().encode())


def made_tokenizer(file: GgufFile) -> Tokenizer | None:
    """`tokenizer_of`; also None where none can be made, and that is said."""
    try:
        return tokenizer_of(file)
    except ModelError as reason:
        logger.warning("%s: %s; without %s beside it it serves ids only", file.path.name, reason, TOKENIZER)
        return None


def tokenizer_of(file: GgufFile) -> Tokenizer | None:
    """None for a model without one. Raises ModelError, which names the kind."""
    kind, cut = (str(file.metadata.get(f"tokenizer.ggml.{key}", "")) for key in ("model", "pre"))
    if not file.has_tokenizer:
        return None
    if kind not in (BYTE_LEVEL, SENTENCEPIECE):
        raise ModelError(f"tokenizer.ggml.model: {kind!r} is not known here, only {BYTE_LEVEL} and {SENTENCEPIECE}")
    if kind == BYTE_LEVEL and cut not in CUTS:
        raise ModelError(f"tokenizer.ggml.pre: cutting texts as {cut!r} is not known here, only as {', '.join(CUTS)}")
    tokens = file.tokens
    stated = file.metadata.get("tokenizer.ggml.token_type") or ()
    kinds = {id_: each for id_, each in enumerate(stated) if id_ in tokens}
    try:
        made = _byte_level(file, tokens, cut) if kind == BYTE_LEVEL else _sentencepiece(file, tokens, kinds)
        made.add_special_tokens(list(_added(tokens, kinds, CONTROL)))
        made.add_tokens(list(_added(tokens, kinds, USER_DEFINED)))
    except Exception as error:  # any error of the library for merges of what are no tokens
        raise ModelError(f"tokenizer.ggml.merges: no tokenizer can be made of the file's table: {error}") from error
    _frame(made, file, tokens, kind)
    return made


def _added(tokens: dict[int, str], kinds: dict[int, int], kind: int) -> Iterator[AddedToken]:
    """Tokens that are cut out of a text before anything else, as they stand."""
    for id_, each in kinds.items():
        if each == kind and tokens[id_]:
            yield AddedToken(tokens[id_], normalized=False, special=kind == CONTROL)


def _byte_level(file: GgufFile, tokens: dict[int, str], cut: str) -> Tokenizer:
    parts = [str(merge).partition(" ") for merge in file.metadata.get("tokenizer.ggml.merges") or []]
    merges = [(left, right) for left, _, right in parts]
    ids = {name: id_ for id_, name in tokens.items()}
    made = Tokenizer(BPE(ids, merges, ignore_merges=cut in WHOLE_PIECES))
    bytes_of = ByteLevel(add_prefix_space=bool(file.metadata.get("tokenizer.ggml.add_space_prefix")), use_regex=False)
    made.pre_tokenizer = Pieces([*(Split(Regex(pattern), "isolated") for pattern in CUTS[cut]), bytes_of])
    made.decoder = decoders.ByteLevel()
    return made


def _sentencepiece(file: GgufFile, tokens: dict[int, str], kinds: dict[int, int]) -> Tokenizer:
    """Two neighbours are merged where a token says what they say together, the one of the highest score first."""
    scores = file.metadata.get("tokenizer.ggml.scores") or []
    ids = {name: id_ for id_, name in tokens.items()}
    pieces = {name: scores[id_] for name, id_ in ids.items() if kinds.get(id_, NORMAL) == NORMAL}
    splits = [
        (-score, name[:at], name[at:])
        for name, score in pieces.items()
        for at in range(1, len(name))
        if name[:at] in pieces and name[at:] in pieces
    ]
    splits.sort(key=lambda split: split[0])
    unknown = tokens.get(file.metadata.get("tokenizer.ggml.unknown_token_id", 0))
    merges = [(left, right) for _, left, right in splits]
    made = Tokenizer(BPE(ids, merges, unk_token=unknown, fuse_unk=True, byte_fallback=True))
    leads = bool(file.metadata.get("tokenizer.ggml.add_space_prefix", True))
    spaces = normalizers.Replace(" ", SPACE)
    made.normalizer = normalizers.Sequence([normalizers.Prepend(SPACE), spaces]) if leads else spaces
    parts: list[Any] = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    made.decoder = decoders.Sequence([*parts, decoders.Strip(" ", 1, 0)] if leads else parts)
    return made


def _frame(made: Tokenizer, file: GgufFile, tokens: dict[int, str], kind: str) -> None:
    """Have the tokenizer add what the file says is added to a text, where special tokens are asked for."""
    told = file.metadata
    parts = ["$A"]
    special = []
    for key, at, default in (("bos", 0, kind == SENTENCEPIECE), ("eos", 2, False)):
        id_ = told.get(f"tokenizer.ggml.{key}_token_id")
        if told.get(f"tokenizer.ggml.add_{key}_token", default) and id_ in tokens:
            parts.insert(at, tokens[id_])
            special.append((tokens[id_], id_))
    if special:
        made.post_processor = TemplateProcessing(single=parts, special_tokens=special)
