"""A model in other vocabularies than its own, and what it is worth as a drafter there: python -m bench.vocabularies.

The models are the pair in the box, its drafter's rows renamed, with other tokenizers: what differs between the rows of
the table is the vocabulary alone. All drafters have one verifier and one fixed plan, and take turns on the same
prompts, n-grams off. The verifier still bounds what windows may cost.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers

from bench.harness import RESULTS, machine
from bench.harness.entry import run
from bench.harness.interleave import schedule, tracked
from bench.harness.interval import Estimate
from bench.harness.machine import dtype_of
from bench.harness.record import write_object
from bench.harness.report import table
from bench.harness.rows import RUN_LIMIT, run_of, service
from bench.harness.runs import BenchError, Run, Sample, acceptance, speed_ratio, tokens_per_forward, tokens_per_second
from demo_pair import DRAFT, TARGET, held_out_prompts
from specwire.client import Client, SpecwireError
from specwire.client.events import Started
from specwire.core.model import AUTO
from specwire.rpc.process import say
from specwire.rpc.server_options import SERVED_DTYPES
from specwire.text.tokenizer import BYTE_OF

EMBEDDINGS = "model.embed_tokens.weight"
END = AddedToken("</s>", special=True)
TEMPERATURES, SEED = (0.0, 0.8), 1
# Draft tokens for each forward, however few of them are accepted.
PLAN = "lockstep:4"
OUT = RESULTS / "vocabularies.json"
NONE, EQUAL, BY_TOKEN, BY_TEXT = "none", "equal", "by token", "by text"
LABELS = {
    NONE: "no drafter",
    EQUAL: "the target's",
    BY_TOKEN: "SentencePiece, by token",
    BY_TEXT: "WordPiece, by text",
}


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


# ----------------------------------------------------------------------------------------------------------------------
# Side by side.


@dataclass(frozen=True, slots=True)
class VocabularySettings:
    """prompts: held-out ones; tokens: new ones behind each; repeats: of all of them."""

    prompts: int
    tokens: int
    repeats: int
    dtype: str

    def __post_init__(self) -> None:
        for name in ("prompts", "tokens", "repeats"):
            if getattr(self, name) < 1:
                raise ValueError(f"--{name}: must be at least 1, not {getattr(self, name)}")


@dataclass(frozen=True, slots=True)
class VocabularyLine:
    """A drafter at one temperature. to_equal: its speed, times that of the one with the target's vocabulary."""

    row: str
    label: str
    temperature: float
    tokens_per_second: Estimate
    to_equal: Estimate
    tokens_per_forward: float
    acceptance: float | None


@dataclass(frozen=True, slots=True)
class FoundVocabulary:
    settings: VocabularySettings
    samples: Mapping[float, Sequence[Sample]]

    @property
    def lines(self) -> list[VocabularyLine]:
        return [_line(row, temperature, samples) for temperature, samples in self.samples.items() for row in LABELS]


def _line(row: str, temperature: float, samples: Sequence[Sample]) -> VocabularyLine:
    return VocabularyLine(
        row,
        LABELS[row],
        temperature,
        tokens_per_second(samples, row),
        speed_ratio(samples, row, EQUAL),
        tokens_per_forward(samples, row),
        acceptance(samples, row),
    )


def measure(settings: VocabularySettings) -> FoundVocabulary:
    prompts = [prompt.text for prompt in held_out_prompts()[: settings.prompts]]
    if len(prompts) < settings.prompts:
        raise BenchError(f"--prompts: there are {len(prompts)} held-out ones, not {settings.prompts}")
    with ExitStack() as cleanup:
        folder = Path(cleanup.enter_context(TemporaryDirectory(prefix="specwire-vocabularies-")))
        verifier = service(cleanup, "verify", str(TARGET), "--dtype", settings.dtype)
        drafts = {
            EQUAL: str(DRAFT),
            BY_TOKEN: save(folder / "pieces", sentencepiece),
            BY_TEXT: save(folder / "words", word_piece),
        }
        clients = {row: _client(cleanup, verifier, draft, settings.dtype) for row, draft in drafts.items()}
        clients[NONE] = clients[EQUAL]
        say("bench: warming up")
        for row, client in clients.items():
            _ask(client, prompts[0], settings.tokens, TEMPERATURES[0], row)
        return FoundVocabulary(settings, {each: _samples(settings, clients, prompts, each) for each in TEMPERATURES})


def _client(cleanup: ExitStack, verifier: str, draft: str, dtype: str) -> Client:
    """Of an orchestrator with a drafter of its own."""
    drafter = service(cleanup, "draft", draft, "--dtype", dtype)
    address = service(cleanup, "orchestrate", "--verifier", verifier, "--drafter", drafter, "--plan", PLAN)
    return cleanup.enter_context(Client(address))


def _samples(
    settings: VocabularySettings, clients: Mapping[str, Client], prompts: Sequence[str], temperature: float
) -> list[Sample]:
    rows, samples = list(LABELS), []
    turns = schedule(settings.repeats, len(prompts), len(rows))
    total = settings.repeats * len(prompts) * len(rows)
    for repeat, prompt, index in tracked(turns, total, f"temperature {temperature:g}"):
        done = _ask(clients[rows[index]], prompts[prompt], settings.tokens, temperature, rows[index])
        samples.append(Sample(repeat, prompt, rows[index], done))
    return samples


def _ask(client: Client, prompt: str, tokens: int, temperature: float, row: str) -> Run:
    wish: dict[str, Any] = {"max_tokens": tokens, "temperature": temperature, "seed": SEED, "ignore_eos": True}
    began_ns = time.monotonic_ns()
    try:
        events = list(client.generate(prompt, ngram=False, drafting=row != NONE, timeout=RUN_LIMIT, **wish))
        ended_ns = time.monotonic_ns()
        for event in events:
            if isinstance(event, Started):
                client.delete_session(event.session_id, timeout=RUN_LIMIT)
    except SpecwireError as error:
        raise BenchError(f"{LABELS[row]}: {error}") from error
    return run_of(events, began_ns, ended_ns, tokens, LABELS[row], row != NONE)


def tell(found: FoundVocabulary, path: Path) -> bool:
    """Print the table and write the record."""
    head = ("temperature", "the drafter's vocabulary", "tokens/s", "x the target's", "tokens/forward", "accepted")
    rows = [
        (
            f"{line.temperature:g}",
            line.label,
            f"{line.tokens_per_second.value:.0f}",
            f"{line.to_equal:.2f}",
            f"{line.tokens_per_forward:.2f}",
            "-" if line.acceptance is None else f"{line.acceptance:.2f}",
        )
        for line in found.lines
    ]
    print("\n".join(table(head, rows)))
    written = {
        "name": path.stem,
        "bars": [],
        "lines": [asdict(line) for line in found.lines],
        "machine": machine.describe(),
        "commit": machine.commit(),
        "arguments": asdict(found.settings) | {"plan": PLAN},
    }
    raw = [
        {
            "temperature": temperature,
            "repeat": sample.repeat,
            "prompt": sample.prompt,
            "row": sample.row,
            "seconds": sample.run.seconds,
            "forwards": sample.run.forwards,
            "tested": sample.run.tested,
            "accepted": sample.run.accepted,
        }
        for temperature, samples in found.samples.items()
        for sample in samples
    ]
    write_object(written, raw, path)
    return True


def parser() -> argparse.ArgumentParser:
    line = argparse.ArgumentParser(
        prog="python -m bench.vocabularies", description="Measure a drafter in other vocabularies than the target's."
    )
    line.add_argument("--prompts", type=int, default=8, metavar="N", help="held-out prompts (default: %(default)s)")
    line.add_argument("--tokens", type=int, default=96, metavar="N", help="tokens behind each (default: %(default)s)")
    line.add_argument("--repeats", type=int, default=9, metavar="N", help="of all prompts (default: %(default)s)")
    line.add_argument("--dtype", default=AUTO, choices=SERVED_DTYPES, help="(default: %(default)s)")
    line.add_argument("--out", type=Path, default=OUT, metavar="FILE", help="JSON")
    return line


def settings_of(args: argparse.Namespace) -> VocabularySettings:
    return VocabularySettings(args.prompts, args.tokens, args.repeats, dtype_of(args.dtype))


if __name__ == "__main__":
    sys.exit(run(parser().parse_args(), settings_of, measure, tell))
