"""The included drafter in other vocabularies than its own: the same model, its rows renamed, with other tokenizers."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers

from demo_pair import DRAFT
from specwire.text.tokenizer import BYTE_OF

EMBEDDINGS = "model.embed_tokens.weight"
END = AddedToken("</s>", special=True)


def demo_tokens() -> dict[bytes, int]:
    """Of the pair in the box, which is byte-level: the bytes of its tokens; its end of text is id 0."""
    tokens: dict[str, int] = json.loads((DRAFT / "tokenizer.json").read_text())["model"]["vocab"]
    return {_bytes(token): index for token, index in tokens.items() if index}


def demo_merges() -> list[tuple[bytes, bytes]]:
    merges = json.loads((DRAFT / "tokenizer.json").read_text())["model"]["merges"]
    return [(_bytes(one), _bytes(other)) for one, other in merges]


def _bytes(name: str) -> bytes:
    return bytes(BYTE_OF[character] for character in name)


def written(token: bytes) -> str | None:
    """As SentencePiece has it; None for a part of a character."""
    try:
        return token.decode().replace(" ", "▁")
    except UnicodeDecodeError:
        return None


def sentencepiece() -> tuple[Tokenizer, list[int]]:
    """Metaspace and byte tokens. With the tokenizer come the rows of the demo model that its ids stand for."""
    known, tokens = demo_tokens(), {"<unk>": 0, "</s>": 0}
    tokens |= {f"<0x{byte:02X}>": known[bytes([byte])] for byte in range(256)}
    tokens |= {name: row for token, row in known.items() if (name := written(token)) is not None}
    merges = [(written(one), written(other)) for one, other in demo_merges()]
    ids = {name: index for index, name in enumerate(tokens)}
    whole = [(one, other) for one, other in merges if one and other and one + other in ids]
    tokenizer = Tokenizer(models.BPE(ids, whole, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens([END])
    return tokenizer, list(tokens.values())


def word_piece() -> tuple[Tokenizer, list[int]]:
    """Words between blanks, and their further parts with '##' before them: no token's text is its own."""
    tokens = {"[UNK]": 0, "</s>": 0}
    for token, row in demo_tokens().items():
        name = written(token)
        if name is not None and name.strip() == name and name != "▁":
            tokens[name.removeprefix("▁") if name.startswith("▁") else f"##{name}"] = row
    for name, row in list(tokens.items()):
        tokens.setdefault(name.removeprefix("##"), row)
    ids = {name: index for index, name in enumerate(tokens)}
    tokenizer = Tokenizer(models.WordPiece(ids, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.decoder = decoders.WordPiece(cleanup=False)
    tokenizer.add_special_tokens([END])
    return tokenizer, list(tokens.values())


def save(folder: Path, made: Callable[[], tuple[Tokenizer, list[int]]], source: Path = DRAFT) -> str:
    """The model of `source`, which is one of the pair, in another vocabulary; returns where it is."""
    shutil.copytree(source, folder)
    tokenizer, rows = made()
    weights = load_file(folder / "model.safetensors")
    names = [EMBEDDINGS, *({"lm_head.weight"} & weights.keys())]
    weights |= {name: weights[name][torch.tensor(rows)].contiguous() for name in names}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    end = tokenizer.token_to_id("</s>")
    for name, more in (("config.json", {"vocab_size": len(rows)}), ("generation_config.json", {})):
        settings = json.loads((folder / name).read_text())
        (folder / name).write_text(json.dumps(settings | {"bos_token_id": end, "eos_token_id": end} | more))
    (folder / "tokenizer_config.json").unlink()
    tokenizer.save(str(folder / "tokenizer.json"))
    return str(folder)
