"""Hold the texts of a GGUF file to those of the libraries that define it: python -m bench.reference --help.

Greedy, behind a chat template. `specwire up` on torch and OpenVINO, in float32 and with n-grams, is held to
transformers' own `generate`, which reads the file by itself; on llama.cpp, in the file's own numbers, to
llama-cpp-python with flash attention, which llama.cpp takes by itself. There it drafts nothing: llama.cpp rounds the
rows of a window otherwise than a row alone. Each first difference of a text is told with the margin between the two
best scores there. It is a near-tie where both tokens are within what equal arithmetic may differ by of the best one:
1e-4 in float32; of llama.cpp, twice what its own scores there move by between the text at once and token by token.

Quantised arithmetic and rounded weights change texts, and a library is quicker that rounds more. So it is told, too, of
`specwire up` as it is by default and of each library, how many tokens of its own greedy texts transformers finds the
best ones there.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast
from transformers.utils import logging as transformers_logging

from bench.harness.child import BenchChild
from bench.harness.entry import line_of_texts, run, texts_asked
from bench.harness.interleave import tracked
from bench.harness.record import save
from bench.harness.report import Bar, none_of, table
from bench.harness.runs import BenchError
from bench.harness.sessions import LOAD_LIMIT
from bench.peers.library import NO_PEERS, PEERS, start
from bench.peers.transformers_peer import PLAIN, TransformersPeer
from bench.speed.prompts import TASKS, in_turns, sample, spec_bench
from scripts.figures.exact import reference_table
from specwire.client import Client, SpecwireError
from specwire.core.invalid import InvalidParameter
from specwire.core.model import AUTO, LLAMACPP, OPENVINO, TORCH, ModelError, is_gguf
from specwire.lm.gguf_file import read_gguf
from specwire.lm.gguf_tokenizer import text_of

TRANSFORMERS, LLAMA_CPP_PYTHON = "transformers", "llama-cpp-python"
# By runtime of ours: the dtype, the library whose text is expected, and further options.
DEFAULT, OPENVINO_GENAI = "default", "OpenVINO GenAI"
EXPECTED: dict[str, tuple[str, str, tuple[str, ...]]] = {
    TORCH: ("float32", TRANSFORMERS, ()),
    OPENVINO: ("float32", TRANSFORMERS, ()),
    LLAMACPP: (AUTO, LLAMA_CPP_PYTHON, ("--no-ngram",)),
}
PACKAGES = {OPENVINO: "openvino", LLAMACPP: "llama_cpp"}
# In float32, scores of one token computed alone and in a longer forward differ by a few 1e-6.
FLOAT32_TIE = 1e-4
Scores = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class ReferenceSettings:
    """target: a GGUF file. questions: of Spec-Bench; None for our own prompts. threads: of every process."""

    target: Path
    prompts: int
    tokens: int
    threads: int = 1
    questions: Path | None = None
    runtimes: tuple[str, ...] = tuple(EXPECTED)

    def __post_init__(self) -> None:
        if not is_gguf(str(self.target)) or not self.target.is_file():
            raise InvalidParameter("target", f"must be a GGUF file, not {self.target}")
        for name in ("prompts", "tokens", "threads"):
            if getattr(self, name) < 1:
                raise InvalidParameter(name, f"must be at least 1, not {getattr(self, name)}")

    def texts(self) -> list[str]:
        """User's turns, of all tasks by their shares."""
        if self.questions is None:
            found = sample(None)[0]
        else:
            found = in_turns(spec_bench(self.questions, -(-self.prompts // len({*TASKS.values()}))))
        return [prompt.text for prompt in found[: self.prompts]]


class TextDifference(NamedTuple):
    """The first one of a text. at: counted from the prompt's end. margin: between the two best scores of the library.

    behind: how far the worse of the two tokens is below the best one. tolerance: how far it may be in a near-tie.
    """

    runtime: str
    prompt: int
    at: int
    expected: int
    got: int
    margin: float
    behind: float
    tolerance: float

    @property
    def near_tie(self) -> bool:
        return self.behind <= self.tolerance


class ReferenceRow(NamedTuple):
    """A runtime's texts. compared: tokens up to and with each text's first difference."""

    runtime: str
    expected: str
    texts: int
    equal: int
    compared: int


class OwnTexts(NamedTuple):
    """Greedy texts as transformers judges them. best: tokens that it finds the best ones. nats: a token, on average."""

    whose: str
    tokens: int
    best: int
    nats: float

    @property
    def share(self) -> float:
        return self.best / self.tokens


@dataclass(frozen=True, slots=True)
class ReferenceResults:
    settings: ReferenceSettings
    rows: Sequence[ReferenceRow]
    own: Sequence[OwnTexts]
    differences: Sequence[TextDifference]
    bars: Sequence[Bar]
    notes: Sequence[str]


class Library(Protocol):
    """One that computes the file."""

    def text(self, prompt: Sequence[int], tokens: int) -> list[int]:
        """The best tokens behind a prompt, whatever they are."""
        ...

    def scores(self, prompt: Sequence[int], text: Sequence[int]) -> tuple[Scores, float]:
        """What it says after prompt and text, and how far below the best score another counts as equal."""
        ...


class Transformers:
    """See `Library`; in float32, as its users run it."""

    def __init__(self, target: Path, threads: int) -> None:
        transformers_logging.disable_progress_bar()
        self._peer = TransformersPeer()
        self._peer.load({"model": str(target), "mode": PLAIN, "dtype": "float32", "threads": threads})

    def text(self, prompt: Sequence[int], tokens: int) -> list[int]:
        asked = {"prompts": [prompt], "tokens": tokens, "temperature": 0.0, "seed": 0}
        found: Any = self._peer.generate(asked)["runs"]
        return [*found[0]["tokens"]]

    def scores(self, prompt: Sequence[int], text: Sequence[int]) -> tuple[Scores, float]:
        return np.array(self._peer.scores([*prompt, *text]), np.float32), FLOAT32_TIE

    def judged(self, whose: str, prompts: Sequence[Sequence[int]], texts: Sequence[Sequence[int]]) -> OwnTexts:
        told = [self._peer.judged(*pair) for pair in zip(prompts, texts, strict=True)]
        tokens = sum(map(len, texts))
        return OwnTexts(whose, tokens, sum(best for best, _ in told), round(sum(nats for _, nats in told) / tokens, 3))


class LlamaCppPython:
    """See `Library`."""

    def __init__(self, target: Path, threads: int, context: int) -> None:
        import llama_cpp

        self._functions = llama_cpp
        asked: dict[str, Any] = {"n_ctx": context, "n_threads": threads, "n_threads_batch": threads}
        self._model = llama_cpp.Llama(str(target), verbose=False, flash_attn=True, **asked)

    def text(self, prompt: Sequence[int], tokens: int) -> list[int]:
        self._model.reset()
        return [*islice(self._model.generate([*prompt], temp=0.0), tokens)]

    def scores(self, prompt: Sequence[int], text: Sequence[int]) -> tuple[Scores, float]:
        moved = self._fed([[token] for token in (*prompt, *text)]) - self._fed([[*prompt, *text]])
        return self._fed([prompt, *([token] for token in text)]), 2 * float(np.abs(moved).max())

    def _fed(self, pieces: Sequence[Sequence[int]]) -> Scores:
        self._model.reset()
        for piece in pieces:
            self._model.eval(piece)
        told = self._functions.llama_get_logits_ith(self._model.ctx, -1)
        return np.array(np.ctypeslib.as_array(told, shape=(self._model.n_vocab(),)), np.float32)


def compared(
    runtime: str, library: Library, prompt: int, asked: Sequence[int], expected: Sequence[int], got: Sequence[int]
) -> tuple[int, TextDifference | None]:
    """Tokens up to and with the first difference, and what the library says there. prompt: its number."""
    for at, (wanted, found) in enumerate(zip(expected, got, strict=True)):
        if wanted != found:
            scores, tolerance = library.scores(asked, expected[:at])
            second, best = np.partition(scores, -2)[-2:]
            behind = best - min(scores[wanted], scores[found])
            told = (round(float(each), 7) for each in (best - second, behind, tolerance))
            return at + 1, TextDifference(runtime, prompt, at, wanted, found, *told)
    return len(expected), None


@contextmanager
def client_of(settings: ReferenceSettings, runtime: str) -> Iterator[Client]:
    """Of a whole stack on this runtime, or as it is by DEFAULT."""
    own: tuple[str, ...] = ()
    if runtime != DEFAULT:
        dtype, _, further = EXPECTED[runtime]
        own = ("--runtime", runtime, "--dtype", dtype, "--no-draft", "--no-heads", "--slots", "1", *further)
    words = ("up", "--target", str(settings.target), *own, "--target-threads", str(settings.threads))
    command = (sys.executable, "-m", "deploy", *words, "--listen", "127.0.0.1:0", "--json")
    with (
        BenchChild("specwire up", command) as stack,
        Client(str(stack.answer(LOAD_LIMIT)["address"])) as client,
    ):
        yield client


def prompts_of(settings: ReferenceSettings) -> list[list[int]]:
    """As the model reads them: behind its chat template, if it has one."""
    text = text_of(read_gguf(str(settings.target)))
    speaker: Any = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(text.tokenizer_json.decode()), **text.special_tokens
    )
    found = []
    for turn in settings.texts():
        said = turn
        if text.chat_template:
            messages = [{"role": "user", "content": turn}]
            asked = {"chat_template": text.chat_template, "tokenize": False, "add_generation_prompt": True}
            said = speaker.apply_chat_template(messages, **asked)
        found.append(speaker.encode(said, add_special_tokens=False))
    return found


def measure(settings: ReferenceSettings) -> ReferenceResults:
    """Each library's texts, then those of the runtimes that are held to them. BenchError."""
    try:
        prompts = prompts_of(settings)
        left_out = [each for each in settings.runtimes if each in PACKAGES and find_spec(PACKAGES[each]) is None]
        rows, differences = list[ReferenceRow](), list[TextDifference]()
        said = dict[str, list[list[int]]]()
        for name in (TRANSFORMERS, LLAMA_CPP_PYTHON):
            held = [each for each in settings.runtimes if EXPECTED[each][1] == name and each not in left_out]
            if held:
                library = library_of(name, settings, prompts)
                expected = [library.text(each, settings.tokens) for each in tracked(prompts, len(prompts), name)]
                if name != TRANSFORMERS:
                    said[name] = expected
                for runtime in held:
                    found = _held(settings, runtime, library, prompts, expected)
                    rows.append(found[0])
                    differences += found[1]
        with client_of(settings, DEFAULT) as client:
            said[DEFAULT] = [_completed(client, each, settings) for each in tracked(prompts, len(prompts), DEFAULT)]
        notes = [f"{runtime} was left out: it is not installed" for runtime in left_out]
        if PEERS.exists():
            said[OPENVINO_GENAI] = _said_by_genai(settings, prompts)
        else:
            notes.append(f"{OPENVINO_GENAI} was left out: {NO_PEERS}")
        judge = Transformers(settings.target, settings.threads)
        own = [judge.judged(whose, prompts, texts) for whose, texts in said.items()]
    except (ModelError, SpecwireError) as error:
        raise BenchError(str(error)) from error
    return ReferenceResults(settings, rows, own, differences, [*bars(rows, differences)], notes)


def _completed(client: Client, prompt: Sequence[int], settings: ReferenceSettings) -> list[int]:
    told = client.complete(prompt, max_tokens=settings.tokens, ignore_eos=True, temperature=0.0)
    return [*told.tokens]


def _said_by_genai(settings: ReferenceSettings, prompts: Sequence[Sequence[int]]) -> list[list[int]]:
    loading = {"model": str(settings.target), "mode": PLAIN, "threads": settings.threads}
    with start("openvino", loading) as peer:
        asked = {"do": "generate", "tokens": settings.tokens, "temperature": 0.0, "seed": 0}
        answers = [
            peer.ask({**asked, "prompts": [each]}, LOAD_LIMIT)
            for each in tracked(prompts, len(prompts), OPENVINO_GENAI)
        ]
    return [[*answer["runs"][0]["tokens"]] for answer in answers]


def library_of(name: str, settings: ReferenceSettings, prompts: Sequence[Sequence[int]]) -> Library:
    if name == TRANSFORMERS:
        return Transformers(settings.target, settings.threads)
    return LlamaCppPython(settings.target, settings.threads, max(map(len, prompts)) + settings.tokens + 1)


def _held(
    settings: ReferenceSettings,
    runtime: str,
    library: Library,
    prompts: Sequence[Sequence[int]],
    expected: Sequence[Sequence[int]],
) -> tuple[ReferenceRow, list[TextDifference]]:
    count, differences = 0, list[TextDifference]()
    with client_of(settings, runtime) as client:
        for number, prompt in enumerate(tracked(prompts, len(prompts), runtime)):
            said = _completed(client, prompt, settings)
            tokens, difference = compared(runtime, library, number, prompt, expected[number], said)
            count += tokens
            differences += [] if difference is None else [difference]
    texts = len(prompts)
    return ReferenceRow(runtime, EXPECTED[runtime][1], texts, texts - len(differences), count), differences


def bars(rows: Sequence[ReferenceRow], differences: Sequence[TextDifference]) -> Iterator[Bar]:
    for row in rows:
        wrong = sum(one.runtime == row.runtime and not one.near_tie for one in differences)
        name = f"texts on {row.runtime} that differ from those of {row.expected} but for near-ties"
        yield none_of(name, wrong)


def tell(found: ReferenceResults, path: Path) -> bool:
    """Write and print; whether all bars hold."""
    settings = found.settings
    arguments = {
        **{name: getattr(settings, name) for name in ("prompts", "tokens", "threads")},
        "questions": None if settings.questions is None else settings.questions.name,
    }
    record = {
        "model": {"name": settings.target.stem, "sha256": read_gguf(str(settings.target)).fingerprint()},
        "rows": [row._asdict() for row in found.rows],
        "own_texts": [{**each._asdict(), "share": round(each.share, 4)} for each in found.own],
        "notes": found.notes,
        "bars": [asdict(bar) for bar in found.bars],
    }
    raw = [{**one._asdict(), "near_tie": one.near_tie} for one in found.differences]
    print(reference_table(save(path, record, arguments, raw)))
    told = [(*map(str, one[:5]), *(f"{each:.2g}" for each in one[5:]), str(one.near_tie)) for one in found.differences]
    listed = table((*TextDifference._fields, "near-tie"), told) if told else []
    print("\n".join((*listed, *found.notes)))
    return all(bar.holds for bar in found.bars)


def settings_of(args: argparse.Namespace) -> ReferenceSettings:
    return ReferenceSettings(**texts_asked("reference", args), runtimes=tuple(args.runtimes))


def main(argv: Sequence[str] | None = None) -> int:
    line = line_of_texts("reference", __doc__, prompts=32, tokens=64, threads=1)
    line.add_argument("--runtimes", nargs="+", choices=EXPECTED, default=[*EXPECTED], help="of ours (default: all)")
    return run(line.parse_args(argv), settings_of, measure, tell)


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    sys.exit(main())
