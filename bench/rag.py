"""Measure Speculative RAG on questions about code, answered in one of many documents: python -m bench.rag --help.

The rule of the questions: documents are the first 5 lines, at most, of the functions in the demo pair's held-out
prompts, the last line of a prompt left out. A question is a function up to the last word of a line, the first one
behind its `def` line whose last word has 4 letters or more; that `def` line stands in no other document. The answer is
the rest of the line, right if it is the same but for blanks around it. So a model that continues code can copy it. The
rule was chosen by how often the target is right where it reads the right document, and nothing else (`known` of the
record: with it, and without any): longer documents do not fit into what the pair was trained on, and it hardly copies
words that no other document has. No question was left out for how it was answered. Such models have no rationale to
give.

Five ways to answer, asked in turns of a stack that serves the target alone, and of a drafter: drafts of the drafter, of
which the target chooses one; the first of them by itself; the same two with drafts of the target itself; the target,
which reads all documents that were retrieved. Each way is a tenant of its own in each repeat, so that none begins from
another's keys and values. The pair is tiny, and its drafter of two layers hardly copies: the figures tell how the
method works here, not what it brings to models that answer questions.
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
from typing import NamedTuple

import grpc

from bench.harness import RESULTS, record
from bench.harness.entry import terminable
from bench.harness.interleave import schedule
from bench.harness.interval import Estimate, estimate
from bench.harness.machine import dtype_of
from bench.harness.report import table
from bench.harness.rows import service, up
from bench.harness.runs import BenchError
from demo_pair import DRAFT, TARGET, held_out_prompts
from specwire.client import AsyncClient, SpecwireError
from specwire.core.invalid import InvalidParameter
from specwire.core.model import AUTO, TORCH
from specwire.progress import ProgressBar
from specwire.rag import Document, DraftWriter, MissingExtra, RagOptions, Template, TfidfRetriever, answer
from specwire.rag.drafts import evidence
from specwire.rpc.process import say
from specwire.rpc.server_options import SERVED_DTYPES

OUT = RESULTS / "rag.json"
FUNCTION_LINES, KNOWN_LINES = 5, 1
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
CHOSEN, SINGLE, OWN, OWN_SINGLE, WHOLE = "chosen", "single", "own", "own-single", "target"
LABELS = {
    CHOSEN: "the drafter's draft that the target chose",
    SINGLE: "the drafter's first draft by itself",
    OWN: "the target's own draft that it chose",
    OWN_SINGLE: "the target's own first draft by itself",
    WHOLE: "the target, with all documents",
}
# A way that chooses, beside the one that takes the first of the same drafts.
PAIRS = {CHOSEN: SINGLE, OWN: OWN_SINGLE}
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
            if word:
                yield Question(asked, rest.strip(), document)
                break


def cut(line: str) -> tuple[str, str, str]:
    """A line up to the blanks before its last word, the word, and all that was cut off; no word where none fits."""
    found = LAST_WORD.fullmatch(line)
    if found is None or not found[1].strip():
        return line, "", ""
    text = found[1].rstrip()
    return text, found[2], line[len(text) :]


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
    """What the ways retrieve from, and how."""

    retriever: TfidfRetriever
    options: RagOptions


class Asked(NamedTuple):
    """Whom a way asks: the stack, as a tenant of it, and the drafter."""

    target: AsyncClient
    drafter: AsyncClient


Way = Callable[[Asked, RagSetting, Question], Awaitable[RagTold]]


async def ask_chosen(asked: Asked, setting: RagSetting, question: Question) -> RagTold:
    return await _chosen(asked.target, asked.drafter, setting, question)


async def ask_single(asked: Asked, setting: RagSetting, question: Question) -> RagTold:
    return await _first(asked.drafter, setting, question)


async def ask_own(asked: Asked, setting: RagSetting, question: Question) -> RagTold:
    return await _chosen(asked.target, asked.target, setting, question)


async def ask_own_single(asked: Asked, setting: RagSetting, question: Question) -> RagTold:
    return await _first(asked.target, setting, question)


async def ask_whole(asked: Asked, setting: RagSetting, question: Question) -> RagTold:
    found = await asyncio.to_thread(setting.retriever.retrieve, question.text, setting.options.top)
    return await _written(asked.target, setting.options, question, found.documents)


async def _chosen(client: AsyncClient, drafter: AsyncClient, setting: RagSetting, question: Question) -> RagTold:
    try:
        found = await answer(
            client,
            question.text,
            setting.retriever,
            drafter=drafter,
            options=setting.options,
            template=TEMPLATE,
            timeout=ASKED_S,
        )
    except SpecwireError as error:
        if error.code is grpc.StatusCode.ABORTED:  # not one draft has an answer
            return RagTold("")
        raise
    return RagTold(found.text, tuple(is_right(draft.answer, question) for draft in found.drafts))


async def _first(client: AsyncClient, setting: RagSetting, question: Question) -> RagTold:
    _, subsets = await asyncio.to_thread(evidence, question.text, setting.retriever, setting.options)
    return await _written(client, setting.options, question, subsets[0])


async def _written(
    client: AsyncClient, options: RagOptions, question: Question, documents: tuple[Document, ...]
) -> RagTold:
    info = await client.server_info(timeout=ASKED_S)
    writer = DraftWriter(client, info.target, question.text, options, TEMPLATE, ASKED_S)
    return RagTold((await writer.attempt(0, documents)).answer)


WAYS: dict[str, Way] = {
    CHOSEN: ask_chosen,
    SINGLE: ask_single,
    OWN: ask_own,
    OWN_SINGLE: ask_own_single,
    WHOLE: ask_whole,
}


def is_right(text: str, question: Question) -> bool:
    return text.strip() == question.answer


def tenant_of(row: str, repeat: int) -> str:
    """Repeats count from 0; -1 warms up."""
    return f"{row}.{repeat + 1}"


@dataclass(frozen=True, slots=True)
class Known:
    """How many questions the target answers alone: from their document, and without any."""

    document: int
    nothing: int


async def known_of(client: AsyncClient, options: RagOptions, asked: Sequence[Question]) -> Known:
    told = [
        [
            await _written(client, options, question, documents)
            for question in asked
            for documents in [(question.document,) if read else ()]
        ]
        for read in (True, False)
    ]
    counts = [sum(is_right(each.answer, question) for each, question in zip(row, asked, strict=True)) for row in told]
    return Known(*counts)


async def measure(
    stack: str, drafter: str, tokens: Mapping[str, str], setting: RagSetting, asked: Sequence[Question], repeats: int
) -> tuple[list[RagSample], Known]:
    """Every way on every question, in turns. stack, drafter: addresses. tokens: of the stack's tenants, by name."""
    samples, rows = list[RagSample](), list(WAYS)
    async with AsyncExitStack() as cleanup:
        drafting = await cleanup.enter_async_context(AsyncClient(drafter))
        clients = {
            tenant: Asked(await cleanup.enter_async_context(AsyncClient(stack, token=token)), drafting)
            for tenant, token in tokens.items()
        }
        say("bench: warming up")
        for row, way in WAYS.items():
            await way(clients[tenant_of(row, -1)], setting, asked[0])
        known = await known_of(clients[tenant_of(WHOLE, -1)].target, setting.options, asked)
        with ProgressBar("measuring", repeats * len(asked) * len(rows)) as bar:
            for repeat, number, index in schedule(repeats, len(asked), len(rows)):
                row, question = rows[index], asked[number]
                client, began = clients[tenant_of(row, repeat)], time.monotonic()
                told = await WAYS[row](client, setting, question)
                seconds = time.monotonic() - began
                samples.append(RagSample(repeat, number, row, seconds, is_right(told.answer, question), told))
                bar.update(note=f"repeat {repeat + 1} of {repeats}")
    return samples, known


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

    retrieved, offered: the answer's document was, and stood in a subset. By way that chooses: any_right: some draft
    was. mean_right: the share of right drafts, summed. gained: the chosen draft was, the first was not; lost: the other
    way round.
    """

    retrieved: int
    offered: int
    any_right: dict[str, int]
    mean_right: dict[str, float]
    gained: dict[str, int]
    lost: dict[str, int]


def chances(samples: Sequence[RagSample], setting: RagSetting, asked: Sequence[Question]) -> Chances:
    first = {(sample.row, sample.question): sample for sample in samples if sample.repeat == 0}
    found = [(question.document, *evidence(question.text, setting.retriever, setting.options)) for question in asked]
    drafts = {way: [first[way, number].told.drafts for number in range(len(asked))] for way in PAIRS}
    pairs = {
        way: [(first[way, number].right, first[single, number].right) for number in range(len(asked))]
        for way, single in PAIRS.items()
    }
    return Chances(
        sum(document in retrieved.documents for document, retrieved, _ in found),
        sum(any(document in subset for subset in subsets) for document, _, subsets in found),
        {way: sum(map(any, told)) for way, told in drafts.items()},
        {way: sum(statistics.mean(each) for each in told if each) for way, told in drafts.items()},
        {way: pairs[way].count((True, False)) for way in PAIRS},
        {way: pairs[way].count((False, True)) for way in PAIRS},
    )


def choices(found: Chances) -> str:
    """What the choice had to choose from, and what it was worth, a sentence for each who drafts."""
    who = {CHOSEN: "the drafter", OWN: "the target"}
    return " ".join(
        f"Of {who[way]}'s drafts some one was right for {found.any_right[way]}, any one of them for "
        f"{found.mean_right[way]:.1f} in the mean; the chosen one was right and the first wrong for "
        f"{found.gained[way]}, the other way round for {found.lost[way]}."
        for way in PAIRS
    )


def report(samples: Sequence[RagSample], found: Chances, known: Known) -> str:
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
            f"{found.offered}. {choices(found)} Alone the target is right for {known.document} from that document, for "
            f"{known.nothing} without any.",
            "Selected, not lossless. A pair this small says how the method works, not what it brings: no bar is set.",
        ]
    )


def save(args: argparse.Namespace, samples: Sequence[RagSample], found: Chances, known: Known) -> None:
    written: dict[str, object] = {
        "bars": [],
        "rows": [asdict(each) for each in row_figures(samples)],
        "chances": asdict(found),
        "known": asdict(known),
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
    return RagSetting(TfidfRetriever(documents), options)


def run(args: argparse.Namespace) -> tuple[list[RagSample], Chances, Known]:
    """Start a stack and a drafter, and measure on them."""
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
        further = ("--api-keys", str(keys), "--text-memory", "0")
        stack, ready = up(args.target, None, args.dtype, not args.no_ray, *further)
        cleanup.enter_context(stack)
        drafter = service(cleanup, "draft", args.draft, "--dtype", args.dtype, "--runtime", TORCH)
        samples, known = asyncio.run(measure(str(ready["address"]), drafter, tokens, setting, asked, args.repeats))
    return samples, chances(samples, setting, asked), known


def main(argv: Sequence[str] | None = None) -> int:
    args = parser().parse_args(argv)
    if record.refused(args, NUMBERS):
        return 2
    args.dtype = dtype_of(args.dtype)
    try:
        with terminable():
            samples, found, known = run(args)
    except (BenchError, InvalidParameter, MissingExtra, OSError, SpecwireError) as error:
        say(f"bench: error: {error}")
        return 1
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    save(args, samples, found, known)
    print(report(samples, found, known))
    return 0


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    sys.exit(main())
