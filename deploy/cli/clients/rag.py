"""`specwire rag`: an answer from documents, drafted by a small model and chosen by the target (arXiv 2407.08223)."""

from __future__ import annotations

import argparse
import json
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from deploy.cli.clients.generate import check_timeout, stack_at
from deploy.cli.main import run_owned
from deploy.cli.stack_address import StackAddress, add_address_arguments, explained, stack_address_of
from deploy.cli.terminal import painter, table
from deploy.stack.options import StackError, StackOptions
from specwire.client import AsyncClient, SpecwireError
from specwire.core.invalid import InvalidParameter
from specwire.core.law.sampling import finite
from specwire.corpus import SEARCHED
from specwire.progress import LAST_LINE
from specwire.rag import SELECTED, Draft, MissingExtra, RagAnswer, RagOptions, TfidfRetriever, answer, read_documents
from specwire.rag.retrieval import PASSAGE_CHARACTERS
from specwire.rpc.process import say

EPILOG = """\
Documents are retrieved by TF-IDF, clustered, and the draft model writes a rationale and an answer for each of several
subsets of them; the target scores all in one call, and the best answer is printed. It is the draft model's text, not
the target's: it was selected, not verified token by token. Needs the extra rag; docs/CLI.md has the rest."""
DEFAULTS = RagOptions()


@dataclass(frozen=True, slots=True)
class RagCall:
    """What to answer, from what, where. draft_address: "" for the target's service."""

    question: str
    retriever: TfidfRetriever
    options: RagOptions
    where: StackAddress
    model: str
    draft_model: str
    draft_address: str
    timeout: float
    as_json: bool


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog, parser.formatter_class = EPILOG, argparse.RawDescriptionHelpFormatter
    parser.add_argument("question", metavar="QUESTION", help="what to answer")
    parser.add_argument(
        "--documents",
        nargs="+",
        required=True,
        type=Path,
        metavar="PATH",
        help=f'files, and folders with {SEARCHED}; a .jsonl has a "text" a line',
    )
    _add_numbers(parser)
    parser.add_argument("--draft-model", default="", metavar="NAME", help="who drafts (default: the other one of two)")
    parser.add_argument(
        "--draft-address",
        default="",
        metavar="ADDR[,ADDR]",
        help="of the service that has it, `specwire draft` or another stack (default: the target's)",
    )
    parser.add_argument("--timeout", type=float, default=300.0, metavar="S", help="seconds (default: %(default)s)")
    parser.add_argument("--json", action="store_true", help="print one JSON object with all drafts and scores")
    add_address_arguments(parser)


def _add_numbers(parser: argparse.ArgumentParser) -> None:
    for name, letter, what in (
        ("top", "K", "passages that are retrieved"),
        ("clusters", "N", "of these, and so passages of a subset"),
        ("subsets", "M", "drafts, each of another subset"),
        ("rationale-tokens", "N", "at most, of a draft's rationale; 0 for none"),
        ("answer-tokens", "N", "at most, of its answer"),
        ("seed", "S", "of clusters, subsets and drafts"),
    ):
        default = getattr(DEFAULTS, name.replace("-", "_"))
        parser.add_argument(
            f"--{name}", type=int, default=default, metavar=letter, help=f"{what} (default: %(default)s)"
        )
    parser.add_argument("--temperature", type=float, default=0.0, metavar="T", help="of drafts; 0 is greedy (default)")
    parser.add_argument(
        "--passage",
        type=int,
        default=PASSAGE_CHARACTERS,
        metavar="N",
        help="characters of a passage, into which documents are cut at line ends (default: %(default)s)",
    )


def run(args: argparse.Namespace) -> int:
    try:
        call = call_of(args)
    except InvalidParameter as error:
        say(f"specwire rag: error: {error}")
        return 2
    except MissingExtra as error:
        say(f"specwire rag: error: {error}")
        return 1
    return run_owned("rag", lambda folder: _answer(call, folder))


def call_of(args: argparse.Namespace) -> RagCall:
    """Read the documents, and return what the command line asks for. Raises InvalidParameter, MissingExtra."""
    names = ("top", "clusters", "subsets", "rationale_tokens", "answer_tokens", "temperature", "seed")
    options = RagOptions(**{name: getattr(args, name) for name in names})
    check_timeout(args.timeout)
    if not args.question.strip():
        raise InvalidParameter("question", "must not be empty")
    if args.passage < 1:
        raise InvalidParameter("passage", f"must be at least 1, not {args.passage}")
    where, model = stack_address_of(args), args.model
    if where.address is None:
        where = replace(where, own=_with_draft_model(where.own, bool(args.draft_address)))
        model = model or served_name(where.own.target)
    return RagCall(
        args.question,
        TfidfRetriever(read_documents(args.documents, args.passage)),
        options,
        where,
        model,
        args.draft_model,
        args.draft_address,
        args.timeout,
        args.json,
    )


def _with_draft_model(own: StackOptions, elsewhere: bool) -> StackOptions:
    """A stack whose draft model is served beside the target, to be asked for texts, not for draft tokens."""
    also = () if own.draft in (None, own.target) or elsewhere else (str(own.draft),)
    return replace(own, draft=None, more_drafts=(), also=also)


def served_name(model: str) -> str:
    """By which requests name a model that was given as a path or hub id."""
    path = Path(model).expanduser()
    return path.name if path.is_dir() else path.stem if path.suffix == ".gguf" else model


async def _answer(call: RagCall, folder: Path) -> int:
    LAST_LINE.quiet = call.as_json
    tls, token = call.where.tls, call.where.token
    async with AsyncExitStack() as cleanup:
        address = await cleanup.enter_async_context(stack_at("rag", call.where, folder))
        client = await cleanup.enter_async_context(AsyncClient(address, tls=tls, token=token))
        drafter = None
        if call.draft_address:
            drafter = await cleanup.enter_async_context(AsyncClient(call.draft_address, tls=tls, token=token))
        try:
            found = await answer(
                client,
                call.question,
                call.retriever,
                model=call.model,
                draft_model=call.draft_model,
                drafter=drafter,
                options=call.options,
                timeout=call.timeout,
            )
        except SpecwireError as error:
            raise StackError(await explained(error, address, tls)) from None
    if call.as_json:
        print(json.dumps(as_object(found), allow_nan=False))
        return 0
    print(painter().plain(found.text))
    who = f"drafts of {found.draft_model}, judged by {found.model}"
    for line in [*drafts_table(found).splitlines(), *found.notes, f"specwire rag: {who}; {SELECTED}"]:
        say(line)
    return 0


def as_object(found: RagAnswer) -> dict[str, object]:
    """Return the answer as --json prints it; scores are natural logarithms."""
    return {
        "answer": found.text,
        "rationale": found.chosen.rationale,
        "lossy": found.lossy,
        "note": SELECTED,
        "model": found.model,
        "draft_model": found.draft_model,
        "best": found.best,
        "drafts": [_draft(draft) for draft in found.drafts],
        "documents": [
            {"name": document.name, "similarity": similarity, "text": document.text}
            for document, similarity in zip(found.retrieved.documents, found.retrieved.similarities, strict=True)
        ],
        "notes": list(found.notes),
    }


def _draft(draft: Draft) -> dict[str, object]:
    scores = None
    if draft.scores is not None:
        scores = {name: finite(value) for name, value in asdict(draft.scores).items()}
        scores["total"] = finite(draft.scores.total)
    return {
        "answer": draft.answer,
        "rationale": draft.rationale,
        "documents": [document.name for document in draft.documents],
        "scores": scores,
        "error": draft.error,
        "cut": draft.cut,
    }


def drafts_table(found: RagAnswer) -> str:
    """Return the drafts with their scores, a line each; the chosen one is marked."""
    rows = [["documents", "log P", "draft", "self-consistency", "self-reflection"]]
    for index, draft in enumerate(found.drafts):
        name = f"{'*' if index == found.best else ' '} {' + '.join(each.name for each in draft.documents)}"
        if draft.scores is None:
            rows.append([f"{name}: {draft.error}", *"----"])
            continue
        scores = draft.scores
        told = (scores.total, scores.draft, scores.self_consistency, scores.self_reflection)
        rows.append([name, *(f"{value:.2f}" for value in told)])
    return table(rows)
