"""Measure Speculative RAG on questions about code, answered in one of many documents: python -m bench.rag --help.

The rule of the questions: documents are the functions in the demo pair's held-out prompts, each up to 9 lines, the last
line of a prompt left out. A question is a function up to the last word of a line, the first one behind the second line
whose last word has 4 letters or more, is said neither before it nor in another document, and whose `def` line stands in
no other document. The answer is the rest of the line, right if it is the same but for blanks around it. So what is
asked for can be copied by a model that continues code, and hardly be guessed; such models have no rationale to give.

Four ways to answer, asked in turns of one stack that serves both models of the pair: drafts of the small model, of
which the target chooses one; the same with drafts of the target itself; the first of the small model's drafts by
itself; the target, which reads all documents that were retrieved. Each way is a tenant of its own in each repeat, so
that none begins from another's keys and values. The pair is tiny, was never trained beyond 512 tokens, and its drafter
of two layers hardly copies: the figures tell how the method works here, not what it brings to models that answer
questions.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import os
import re
import secrets
import signal
import statistics
import sys
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import grpc

from bench.harness import RESULTS, record
from bench.harness.entry import terminable
from bench.harness.interleave import schedule
from bench.harness.interval import Estimate, estimate
from bench.harness.machine import dtype_of
from bench.harness.report import table
from bench.harness.rows import up
from bench.harness.runs import BenchError
from demo_pair import DRAFT, TARGET, held_out_prompts
from deploy.cli.clients.rag import served_name
from specwire.client import AsyncClient, SpecwireError
from specwire.core.invalid import InvalidParameter
from specwire.core.model import AUTO
from specwire.progress import ProgressBar
from specwire.rag import Document, DraftWriter, MissingExtra, RagOptions, Template, TfidfRetriever, answer
from specwire.rag.drafts import evidence
from specwire.rpc.process import say
from specwire.rpc.server_options import SERVED_DTYPES

OUT = RESULTS / "rag.json"
FUNCTION_LINES, KNOWN_LINES = 9, 2
DEFINITION = re.compile(r"\s*def \w+\(.*\):$")
# A line up to its last word, the word, and what is behind it.
LAST_WORD = re.compile(r"(.*\W)([A-Za-z_]\w{3,})\W*")
ASKED_S = 300.0
# The question goes on with the answer.
TEMPLATE = Template(
    draft="{documents}\n{question}",
    document="{text}\n\n",
    verify="{question}",
    answer="",
    reflection="\n# This line is right:",
    yes=" True",
    answer_stops=("\n",),
)
CHOSEN, OWN, SINGLE, WHOLE = "chosen", "own", "single", "target"
LABELS = {
    CHOSEN: "the draft that the target chose",
    OWN: "the same, of the target's own drafts",
    SINGLE: "the first draft by itself",
    WHOLE: "the target, with all documents",
}
NUMBERS = ("questions", "top", "clusters", "subsets", "tokens", "repeats")


# ----------------------------------------------------------------------------------------------------------------------
# The questions.


@dataclass(frozen=True, slots=True)
class Question:
    """text: a function up to its answer. document: where the answer stands."""

    text: str
    answer: str
    document: Document


def functions() -> list[Document]:
    """The documents."""
    found = []
    for prompt in held_out_prompts():
        lines = prompt.text.splitlines()[:-1]
        starts = [index for index, line in enumerate(lines) if DEFINITION.match(line)]
        for start, following in itertools.pairwise([*starts, len(lines)]):
            text = "\n".join(lines[start : min(following, start + FUNCTION_LINES)]).rstrip()
            found.append(Document(f"{prompt.name}, line {start + 1}", text))
    return found


def questions(documents: Sequence[Document]) -> Iterator[Question]:
    """Those that documents answer, in their order; at most one of each."""
    for document in documents:
        lines = document.text.splitlines()
        if sum(lines[0] in each.text for each in documents) > 1:
            continue
        for number, line in enumerate(lines[KNOWN_LINES:], KNOWN_LINES):
            text, word, rest = cut(line)
            asked = "\n".join([*lines[:number], text])
            if word and not says(asked, word) and sum(says(each.text, word) for each in documents) == 1:
                yield Question(asked, rest.strip(), document)
                break


def cut(line: str) -> tuple[str, str, str]:
    """A line up to the blanks before its last word, the word, and all that was cut off; no word where none fits."""
    found = LAST_WORD.fullmatch(line)
    if found is None or not found[1].strip():
        return line, "", ""
    text = found[1].rstrip()
    return text, found[2], line[len(text) :]


def says(text: str, word: str) -> bool:
    return re.search(rf"\b{word}\b", text) is not None


# ----------------------------------------------------------------------------------------------------------------------
# The ways to answer.


@dataclass(frozen=True, slots=True)
class RagTold:
    """An answer, "" where there was none. drafts: of each that the target chose from, whether it is right."""

    answer: str
    drafts: tuple[bool, ...] = ()


@dataclass(frozen=True, slots=True)
class RagSample:
    """One way's answer to one question. seconds: retrieval included."""

    repeat: int
    question: int
    row: str
    seconds: float
    right: bool
    told: RagTold


@dataclass(frozen=True, slots=True)
class RagSetting:
    """The names of a stack's models, and what its ways retrieve from, and how."""

    target: str
    draft: str
    retriever: TfidfRetriever
    options: RagOptions


Way = Callable[[AsyncClient, RagSetting, Question], Awaitable[RagTold]]


async def ask_chosen(client: AsyncClient, setting: RagSetting, question: Question, draft: str = "") -> RagTold:
    """draft: who drafts; "" for the small model."""
    try:
        found = await answer(
            client,
            question.text,
            setting.retriever,
            model=setting.target,
            draft_model=draft or setting.draft,
            options=setting.options,
            template=TEMPLATE,
            timeout=ASKED_S,
        )
    except SpecwireError as error:
        if error.code is grpc.StatusCode.ABORTED:  # not one draft has an answer
            return RagTold("")
        raise
    return RagTold(found.text, tuple(is_right(draft.answer, question) for draft in found.drafts))


async def ask_own(client: AsyncClient, setting: RagSetting, question: Question) -> RagTold:
    return await ask_chosen(client, setting, question, setting.target)


async def ask_single(client: AsyncClient, setting: RagSetting, question: Question) -> RagTold:
    _, subsets = await asyncio.to_thread(evidence, question.text, setting.retriever, setting.options)
    return await _written(client, setting.draft, setting.options, question, subsets[0])


async def ask_whole(client: AsyncClient, setting: RagSetting, question: Question) -> RagTold:
    found = await asyncio.to_thread(setting.retriever.retrieve, question.text, setting.options.top)
    return await _written(client, setting.target, setting.options, question, found.documents)


async def _written(
    client: AsyncClient, name: str, options: RagOptions, question: Question, documents: tuple[Document, ...]
) -> RagTold:
    info = await client.server_info(timeout=ASKED_S)
    model = next(each for each in info.targets if each.model == name)
    writer = DraftWriter(client, model, question.text, options, TEMPLATE, ASKED_S)
    return RagTold((await writer.attempt(0, documents)).answer)


WAYS: dict[str, Way] = {CHOSEN: ask_chosen, OWN: ask_own, SINGLE: ask_single, WHOLE: ask_whole}


def is_right(text: str, question: Question) -> bool:
    return text.strip() == question.answer


def tenant_of(row: str, repeat: int) -> str:
    """Repeats count from 0; -1 warms up."""
    return f"{row}.{repeat + 1}"


async def measure(
    address: str, tokens: Mapping[str, str], setting: RagSetting, asked: Sequence[Question], repeats: int
) -> list[RagSample]:
    """Every way on every question, in turns. tokens: by tenant."""
    samples, rows = list[RagSample](), list(WAYS)
    async with AsyncExitStack() as cleanup:
        clients = {
            tenant: await cleanup.enter_async_context(AsyncClient(address, token=token))
            for tenant, token in tokens.items()
        }
        say("bench: warming up")
        for row, way in WAYS.items():
            await way(clients[tenant_of(row, -1)], setting, asked[0])
        with ProgressBar("measuring", repeats * len(asked) * len(rows)) as bar:
            for repeat, number, index in schedule(repeats, len(asked), len(rows)):
                row, question = rows[index], asked[number]
                client, began = clients[tenant_of(row, repeat)], time.monotonic()
                told = await WAYS[row](client, setting, question)
                seconds = time.monotonic() - began
                samples.append(RagSample(repeat, number, row, seconds, is_right(told.answer, question), told))
                bar.update(note=f"repeat {repeat + 1} of {repeats}")
    return samples


# ----------------------------------------------------------------------------------------------------------------------
# The report.


@dataclass(frozen=True, slots=True)
class RowFigures:
    """right: of `questions`, in the first repeat. seconds: of a question, in the mean of a repeat."""

    key: str
    label: str
    right: int
    questions: int
    seconds: Estimate


def row_figures(samples: Sequence[RagSample]) -> list[RowFigures]:
    rows = []
    for key, label in LABELS.items():
        own = [sample for sample in samples if sample.row == key]
        first = [sample for sample in own if sample.repeat == 0]
        repeats = sorted({sample.repeat for sample in own})
        means = [statistics.mean(each.seconds for each in own if each.repeat == repeat) for repeat in repeats]
        rows.append(RowFigures(key, label, sum(each.right for each in first), len(first), estimate(means)))
    return rows


@dataclass(frozen=True, slots=True)
class Chances:
    """What the choice had to choose from, counted in questions, in the first repeat.

    retrieved, offered: the answer's document was, and stood in a subset. any_right: some draft was. mean_right: the
    share of right drafts, summed.
    """

    retrieved: int
    offered: int
    any_right: int
    mean_right: float


def chances(samples: Sequence[RagSample], setting: RagSetting, asked: Sequence[Question]) -> Chances:
    told = [sample.told for sample in samples if sample.row == CHOSEN and sample.repeat == 0]
    found = [(question.document, *evidence(question.text, setting.retriever, setting.options)) for question in asked]
    return Chances(
        sum(document in retrieved.documents for document, retrieved, _ in found),
        sum(any(document in subset for subset in subsets) for document, _, subsets in found),
        sum(any(each.drafts) for each in told),
        sum(statistics.mean(each.drafts) for each in told if each.drafts),
    )


def report(samples: Sequence[RagSample], found: Chances) -> str:
    head = ("answered by", "exact match", "seconds a question")
    rows = []
    for row in row_figures(samples):
        seconds = f"{row.seconds:.3f}"
        rows.append((row.label, f"{row.right} of {row.questions}", seconds))
    return "\n".join(
        [
            *table(head, rows),
            "",
            f"The answer's document was retrieved for {found.retrieved} questions and stood in a subset for "
            f"{found.offered}; some draft of the small model was right for {found.any_right}, any one of them for "
            f"{found.mean_right:.1f} in the mean.",
            "Selected, not lossless. A pair this small says how the method works, not what it brings: no bar is set.",
        ]
    )


def save(args: argparse.Namespace, samples: Sequence[RagSample], found: Chances) -> None:
    written: dict[str, object] = {
        "bars": [],
        "rows": [asdict(each) for each in row_figures(samples)],
        "chances": asdict(found),
        "raw": [asdict(each) for each in samples],
    }
    record.write(args.out, written, args, (*NUMBERS, "dtype"))


def parser() -> argparse.ArgumentParser:
    line = argparse.ArgumentParser(prog="python -m bench.rag", description=(__doc__ or "").partition(":")[0])
    line.add_argument("--target", default=str(TARGET), metavar="DIR", help="who chooses (default: the demo pair's)")
    line.add_argument("--draft", default=str(DRAFT), metavar="DIR", help="who drafts (default: the demo pair's)")
    for name, default, what in (
        ("questions", 1000, "at most"),
        ("top", 8, "documents that are retrieved"),
        ("clusters", 2, "documents of a subset"),
        ("subsets", 5, "drafts"),
        ("tokens", 16, "at most of an answer"),
        ("repeats", 7, "of all questions"),
    ):
        line.add_argument(f"--{name}", type=int, default=default, metavar="N", help=f"{what} (default: %(default)s)")
    line.add_argument("--dtype", default=AUTO, choices=SERVED_DTYPES, help="of both models (default: %(default)s)")
    line.add_argument("--no-ray", action="store_true", help="services as plain processes")
    line.add_argument("--out", type=Path, default=OUT, metavar="FILE", help="JSON")
    return line


def setting_of(args: argparse.Namespace, documents: Sequence[Document]) -> RagSetting:
    """Raises InvalidParameter, MissingExtra."""
    options = RagOptions(args.top, args.clusters, args.subsets, rationale_tokens=0, answer_tokens=args.tokens)
    return RagSetting(served_name(args.target), served_name(args.draft), TfidfRetriever(documents), options)


def run(args: argparse.Namespace) -> tuple[list[RagSample], Chances]:
    """Start a stack, and measure on it."""
    documents = functions()
    asked = list(questions(documents))[: args.questions]
    setting = setting_of(args, documents)
    say(f"bench: {len(asked)} questions, {len(documents)} documents")
    tenants = [tenant_of(row, repeat) for row in WAYS for repeat in range(-1, args.repeats)]
    tokens = {tenant: secrets.token_urlsafe(24) for tenant in tenants}
    with ExitStack() as cleanup:
        keys = Path(cleanup.enter_context(TemporaryDirectory(prefix="specwire-rag-"))) / "keys"
        keys.touch(0o600)
        keys.write_text("".join(f"{tenant} {token}\n" for tenant, token in tokens.items()))
        further = ("--also", args.draft, "--api-keys", str(keys), "--text-memory", "0")
        stack, ready = up(args.target, None, args.dtype, not args.no_ray, *further)
        cleanup.enter_context(stack)
        samples = asyncio.run(measure(str(ready["address"]), tokens, setting, asked, args.repeats))
    return samples, chances(samples, setting, asked)


def main(argv: Sequence[str] | None = None) -> int:
    args = parser().parse_args(argv)
    if record.refused(args, NUMBERS):
        return 2
    args.dtype = dtype_of(args.dtype)
    try:
        with terminable():
            samples, found = run(args)
    except (BenchError, InvalidParameter, MissingExtra, OSError, SpecwireError) as error:
        say(f"bench: error: {error}")
        return 1
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    save(args, samples, found)
    print(report(samples, found))
    return 0


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    sys.exit(main())
