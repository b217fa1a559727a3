"""Files that an operator may have from anywhere: GGUF files, configurations, session logs.

Each is whole but for some bytes, or numbers of the head, that say anything. It is refused by one sentence, or used; in
either case soon, and without more memory than it has bytes.
"""

from __future__ import annotations

import asyncio
import json
import struct
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from hypothesis import strategies as st

from orchestrator.store import StoreError
from orchestrator.store.sqlite import SqliteStore
from specwire.core.invalid import InvalidParameter
from specwire.core.messages import Append, Outcome
from specwire.core.model import ModelError, served_context
from specwire.lm.gguf_file import SIZES, read_gguf
from specwire.lm.model_config import check_layers
from tests.fuzz.messages import Values
from tests.orchestrator.test_store import TTL, record_of

# Seconds of processor time that no file may take, and what numbers of 8 bytes are made of.
MOST_S = 1.0
NUMBERS = (0, 1, 255, (1 << 31) - 1, 1 << 32, 10**9, 10**12, 1 << 40, (1 << 63) - 1, 1 << 63, (1 << 64) - 1)
WIDTHS = (1, 4, 8)
MOST_EDITS = 6
HEAD_BYTES = 1024
TEXT = [(7 * at + at // 9) % 50 for at in range(400)]


@dataclass(frozen=True, slots=True)
class Spoilt:
    """kind: of KINDS. edits: (at which part of the head or the file, whether of the head, a number, its bytes)."""

    kind: str
    edits: tuple[tuple[float, bool, int, int], ...]
    kept: float


def spoilt() -> Values:
    """Any of them; most are not cut."""
    edit = st.tuples(st.floats(0.0, 0.999), st.booleans(), st.sampled_from(NUMBERS), st.sampled_from(WIDTHS))
    edits = st.lists(edit, max_size=MOST_EDITS).map(tuple)
    return st.builds(Spoilt, st.sampled_from(sorted(KINDS)), edits, st.one_of(st.just(1.0), st.floats(0.0, 1.0)))


def read_spoilt(case: Spoilt) -> Counter[str]:
    """Whether it was REFUSED or READ. Raises what is no refusal; AssertionError where it took long."""
    data = bytearray(_whole(case.kind))
    for part, of_head, number, width in case.edits:
        at = int(part * (min(HEAD_BYTES, len(data)) if of_head else len(data)))
        end = min(at + width, len(data))
        data[at:end] = (number & ((1 << 8 * width) - 1)).to_bytes(width, "little")[: end - at]
    with tempfile.TemporaryDirectory(prefix="specwire-fuzz-") as folder:
        path = Path(folder) / f"file.{case.kind}"
        path.write_bytes(data[: round(case.kept * len(data))])
        began, said = time.process_time(), "READ"
        try:
            KINDS[case.kind][1](path)
        except (ModelError, InvalidParameter):
            said = "REFUSED"
        took_s = time.process_time() - began
    assert took_s < MOST_S, f"{case.kind}: {took_s:.1f} s"
    return Counter({said: 1})


@cache
def _whole(kind: str) -> bytes:
    with tempfile.TemporaryDirectory(prefix="specwire-fuzz-") as folder:
        path = Path(folder) / "file"
        KINDS[kind][0](path)
        return path.read_bytes()


def _text(said: str) -> bytes:
    return len(said).to_bytes(8, "little") + said.encode()


def _write_gguf(path: Path) -> None:
    """A head with all sizes, a tokenizer of four tokens, and one tensor."""
    sizes = dict.fromkeys(SIZES, 4) | {"context_length": 64, "rope.scaling.original_context_length": 16}
    entries = [_text("general.architecture") + struct.pack("<I", 8) + _text("llama")]
    entries += [_text(f"llama.{name}") + struct.pack("<IQ", 10, size) for name, size in sizes.items()]
    entries.append(_text("tokenizer.ggml.model") + struct.pack("<I", 8) + _text("gpt2"))
    names = b"".join(map(_text, "abcd"))
    entries.append(_text("tokenizer.ggml.tokens") + struct.pack("<IIQ", 9, 8, 4) + names)
    entries.append(_text("tokenizer.ggml.token_type") + struct.pack("<IIQ4i", 9, 5, 4, 1, 1, 3, 1))
    entries.append(_text("tokenizer.ggml.eos_token_id") + struct.pack("<II", 4, 3))
    tensor = _text("token_embd.weight") + struct.pack("<IQQIQ", 2, 4, 4, 0, 0)
    head = b"GGUF" + struct.pack("<IQQ", 3, 1, len(entries)) + b"".join(entries) + tensor
    path.write_bytes(head + bytes(-len(head) % 32 + 64))


def _read_gguf(path: Path) -> None:
    file = read_gguf(str(path))
    assert len(file.tokens) <= len(path.read_bytes())
    file.text()
    assert set(file.eos_ids) <= set(file.tokens)
    file.context(None)
    file.check_rotation(4, 16)
    file.position_bytes(file.kv_type("auto"))


def _write_config(path: Path) -> None:
    path.write_text(json.dumps({"num_hidden_layers": 2, "max_position_embeddings": 64, "text": {"n_layer": 2}}))


def _read_config(path: Path) -> None:
    """As much of it as is held against bounds before the library reads it."""
    try:
        said = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise ModelError(str(error)) from error
    if not isinstance(said, Mapping):
        raise ModelError("no object")
    try:
        check_layers(said)
    except ValueError as error:
        raise ModelError(str(error)) from error
    stated = said.get("max_position_embeddings")
    served_context(stated if type(stated) is int else None, None)


# Sessions, and seconds for which they are kept: it is written once, and read for as long as a run lasts.
LOGGED, KEPT_S = 4, 1e6


def _write_log(path: Path) -> None:
    async def write() -> None:
        store = SqliteStore(path)
        for number in range(LOGGED):
            fence = await store.create(record_of(f"s{number}"), KEPT_S)
            await store.append(f"s{number}", fence, Append(3, (7,) * 40, (Outcome.DIRECT,) * 40))
        await store.close()

    asyncio.run(write())


def _read_log(path: Path) -> None:
    """What is lost is kept aside, and a log that is begun anew takes sessions."""

    async def read() -> None:
        store = SqliteStore(path)
        try:
            read = [await store.read(f"s{number}") for number in range(LOGGED)]
            if not any(read):
                assert path.with_name(f"{path.name}.damaged-1").exists(), "a log was begun anew over another one"
                await store.create(record_of("new"), TTL)
        finally:
            await store.close()

    try:
        asyncio.run(read())
    except StoreError as error:
        raise ModelError(str(error)) from error


# How a whole one is written, and how one is read.
KINDS: Mapping[str, tuple[Callable[[Path], None], Callable[[Path], None]]] = {
    "gguf": (_write_gguf, _read_gguf),
    "json": (_write_config, _read_config),
    "log": (_write_log, _read_log),
}
