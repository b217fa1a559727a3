"""`specwire generate`: one completion, from a running stack or one started for the purpose."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from deploy.cli.main import run_owned
from deploy.cli.stack_address import StackAddress, add_address_arguments, explained, say_what_starts, stack_address_of
from deploy.cli.terminal import Painter, number, painter
from deploy.stack import stack
from deploy.stack.options import StackError
from specwire.client import (
    AsyncClient,
    Chunk,
    Completion,
    Event,
    Finished,
    PromptEcho,
    SpecwireError,
    Started,
    Stats,
)
from specwire.client.events import PartialCompletion
from specwire.client.requests import MOST_COMPLETIONS, RequestOptions
from specwire.core.invalid import MOST_REFERENCES, InvalidParameter
from specwire.core.law.constraint import Constraint, ConstraintKind, check_constraint
from specwire.core.law.sampling import (
    KNOWN,
    MOST_LOGPROBS,
    LogprobsOf,
    Sampling,
    finite,
    resolve_rule,
    seed_of,
)
from specwire.core.messages import FinishReason
from specwire.core.placement import check_priority
from specwire.core.text import Stopping
from specwire.corpus import SEARCHED, named_texts
from specwire.progress import LAST_LINE
from specwire.rpc.channel import MOST_MESSAGE_BYTES
from specwire.rpc.process import say

# As the name of a file.
STDIN = "-"


@dataclass(frozen=True, slots=True)
class GenerateCall:
    """What to complete, where, and how to show it."""

    prompt: str
    options: RequestOptions
    n: int
    timeout: float
    where: StackAddress
    as_json: bool


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("prompt", nargs="?", metavar="PROMPT", help="the text to continue (default: what is piped in)")
    parser.add_argument("--prompt-file", metavar="F", help="read the prompt from a file, - for stdin")
    add_sampling_arguments(parser)
    parser.add_argument("--timeout", type=float, default=300.0, metavar="S", help="seconds (default: %(default)s)")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of the text")
    add_address_arguments(parser, references=False)


def run(args: argparse.Namespace) -> int:
    try:
        request = request_of(args)
    except InvalidParameter as error:
        say(f"specwire generate: error: {error}")
        return 2
    return run_owned("generate", lambda folder: _generate(request, folder))


def request_of(args: argparse.Namespace) -> GenerateCall:
    """Return what the command line asks for; InvalidParameter names what is wrong."""
    options = sampling_options(args)
    check_timeout(args.timeout)
    where = stack_address_of(args)
    options["drafting"], options["ngram"] = not args.no_draft, not args.no_ngram
    options["model"] = args.model
    return GenerateCall(_prompt(args), options, args.n, args.timeout, where, args.json)


def check_timeout(seconds: float) -> None:
    """Raises InvalidParameter."""
    if not 0 < seconds < float("inf"):
        raise InvalidParameter("timeout", f"must be a positive number of seconds, not {seconds}")


def _prompt(args: argparse.Namespace) -> str:
    piped = sys.stdin is not None and not sys.stdin.isatty()
    if args.prompt is not None and args.prompt_file is not None:
        raise InvalidParameter("prompt", "give either PROMPT or --prompt-file")
    if args.prompt is None and args.prompt_file is None and not piped:
        raise InvalidParameter("prompt", "give PROMPT or --prompt-file, or pipe the prompt in")
    prompt = _read("prompt_file", args.prompt_file or STDIN) if args.prompt is None else args.prompt
    if not prompt:
        raise InvalidParameter("prompt", "must not be empty")
    return str(prompt)


def _reads_stdin(args: argparse.Namespace) -> bool:
    """Whether the prompt does."""
    return args.prompt is None and (args.prompt_file or STDIN) == STDIN


async def _generate(request: GenerateCall, folder: Path) -> int:
    LAST_LINE.quiet = request.as_json
    async with (
        stack_at("generate", request.where, folder) as address,
        AsyncClient(address, tls=request.where.tls, token=request.where.token) as client,
    ):
        try:
            completions = await _complete(client, request)
        except SpecwireError as error:
            raise StackError(await explained(error, address, request.where.tls)) from None
    for completion in completions:
        if request.as_json:
            print(json.dumps(as_object(completion), allow_nan=False))
        else:
            say(summary(completion))
    for failed in (each for each in completions if each.finish_reason is FinishReason.ERROR):
        say(f"specwire generate: error: {failed.message}")
        return 1
    return 0


async def _complete(client: AsyncClient, request: GenerateCall) -> list[Completion]:
    """One is shown as it comes; several are, one after the other, once all are there."""
    if request.n == 1:
        return [await _stream(client, request)]
    completions = await client.complete_many(request.prompt, request.n, timeout=request.timeout, **request.options)
    if not request.as_json:
        for completion in completions:
            text = painter().plain(f"{_echoed(completion.prompt)}{completion.text}")
            print(f"[{completion.sampling.choice}] {text}")
    return completions


def _echoed(prompt: PromptEcho | None) -> str:
    return "" if prompt is None else prompt.text


@asynccontextmanager
async def stack_at(command: str, where: StackAddress, folder: Path) -> AsyncIterator[str]:
    """The running stack's address, or that of one that lives as long as the context."""
    if where.address is not None:
        yield where.address
        return
    say_what_starts(command, where)
    running = await stack.start(where.own, folder)
    try:
        yield running.address
    finally:
        await running.stop()


async def _stream(client: AsyncClient, request: GenerateCall) -> Completion:
    """Show the text as it comes, unless the whole is wanted as JSON."""
    paint, gathered = painter(), PartialCompletion()
    async with aclosing(client.generate(request.prompt, timeout=request.timeout, **request.options)) as events:
        async for event in events:
            gathered.add(event)
            if not request.as_json:
                print(shown(event, paint), end="", flush=True)
    return gathered.completion()


def shown(event: Event, painter: Painter) -> str:
    """Return what an event makes a terminal, or a file, get."""
    match event:
        case Started():
            return painter.plain(_echoed(event.prompt))
        case Chunk():
            return painter.chunk(event)
        case Finished():
            return painter.text(event.text) + "\n"


def tokens_per_second(completion: Completion) -> float:
    """Output tokens over the time from the request's arrival to its end."""
    stats = completion.stats
    return stats.output_tokens / (stats.duration_us / 1e6) if stats.duration_us else 0.0


def as_object(completion: Completion) -> dict[str, object]:
    """Return the completion as --json prints it."""
    return {
        **({} if completion.prompt is None else {"prompt": completion.prompt.text}),
        "text": completion.text,
        "tokens": list(completion.tokens),
        "prompt_tokens": completion.prompt_tokens,
        "finish_reason": completion.finish_reason.name.lower(),
        **({} if completion.sampling.logprobs is None else {"logprobs": _logprobs(completion)}),
        "seed": completion.seed,
        "choice": completion.sampling.choice,
        "rule": completion.sampling.rule,
        "lossy": completion.lossy,
        "stats": _figures(completion),
    }


def _figures(completion: Completion) -> dict[str, object]:
    """All figures of `Stats`, times in milliseconds, and the speed."""
    told = asdict(completion.stats)
    times = {f"{name}_ms": round(told.pop(f"{name}_us") / 1e3, 3) for name in ("time_to_first_token", "duration")}
    return {"tokens_per_second": round(tokens_per_second(completion), 2), **times, **told}


def _logprobs(completion: Completion) -> list[dict[str, object]]:
    return [
        {"logprob": finite(each.logprob), "top": [[token, finite(value)] for token, value in each.top]}
        for each in completion.logprobs
    ]


def summary(completion: Completion) -> str:
    """Return one line of figures."""
    stats = completion.stats
    first_us = stats.time_to_first_token_us
    first = f"first after {first_us / 1e3:.0f} ms, " if first_us else ""
    return (
        f"{number(stats.output_tokens, 'token')} in {stats.duration_us / 1e6:.2f} s "
        f"({tokens_per_second(completion):.0f}/s), {first}"
        f"{forwards(stats)}, {stats.accepted} of {stats.tested} tested draft tokens accepted{by_source(stats)}, "
        f"end: {completion.finish_reason.name.lower()}, seed {completion.seed}"
        f"{f', LOSSY: {completion.sampling.rule}' if completion.lossy else ''}"
    )


def forwards(stats: Stats) -> str:
    """Return how many there were, and what was saved: an accepted token that came during a forward saves none."""
    return f"{number(stats.target_forwards, 'target forward')} ({stats.forwards_saved} saved)"


def by_source(stats: Stats) -> str:
    """Return, in brackets, how many of each source's tested draft tokens were accepted; nothing if none was tested."""
    sources = {
        "head": (stats.accepted_head, stats.tested_head),
        "drafters": (sum(each.accepted for each in stats.drafters), sum(each.tested for each in stats.drafters)),
        "n-grams": (stats.accepted_ngram, stats.tested_ngram),
        "prediction": (stats.accepted_prediction, stats.tested_prediction),
    }
    told = [f"{name} {accepted} of {tested}" for name, (accepted, tested) in sources.items() if tested]
    return f" ({', '.join(told)})" if told else ""


# ----------------------------------------------------------------------------------------------------------------------
# How tokens are drawn, what is proposed, and when a text ends: options, checked before anything starts. `specwire chat`
# has them too.

DEFAULT_TOKENS = 128


def add_sampling_arguments(
    parser: argparse.ArgumentParser, several: bool = True, max_tokens: int = DEFAULT_TOKENS
) -> None:
    """What `sampling_options` reads, PROMPT, --prompt-file and --json apart.

    several: also what concerns the whole output; without it prompts are lines from stdin.
    max_tokens: by default, as far as the context has room.
    """
    add = parser.add_argument_group("sampling").add_argument
    parser.set_defaults(default_max_tokens=max_tokens)
    add("--max-tokens", type=int, metavar="N", help=f"default: {max_tokens}, or as many as the context has room for")
    add("--min-tokens", type=int, default=0, metavar="N", help="let no id and no stop string end the text before")
    add("--temperature", type=float, default=0.0, metavar="T", help="0 is greedy (default)")
    add("--top-k", type=int, default=0, metavar="K", help="keep the K most probable tokens, 0 all")
    add("--top-p", type=float, default=1.0, metavar="P", help="keep the most probable mass P")
    add("--min-p", type=float, default=0.0, metavar="P", help="keep what is P times as probable as the best")
    add("--repetition-penalty", type=float, default=1.0, metavar="F", help="of prompt and output; 1 is none")
    add("--presence-penalty", type=float, default=0.0, metavar="F", help="of what the output holds; 0 is none")
    add("--frequency-penalty", type=float, default=0.0, metavar="F", help="for each time; 0 is none")
    add("--logit-bias", action="append", default=[], metavar="ID=B", help="add B to an id's logit; may be repeated")
    add("--stop", action="append", default=[], metavar="S", help="end before S; may be repeated")
    add("--stop-id", action="append", type=int, default=[], metavar="ID", help="end behind ID; may be repeated")
    add("--ignore-eos", action="store_true", help="go on after the end of the text")
    add("--seed", type=int, metavar="S", help="of the noise (default: drawn, and told)")
    add(
        "--priority",
        type=int,
        default=0,
        metavar="N",
        help="among what waits for a slot; the greatest first",
    )
    add(
        "--rule",
        default="",
        metavar="R",
        help=f"acceptance rule: {KNOWN}; the last two are lossy (default: by --temperature)",
    )
    _add_form_arguments(parser)
    _add_text_arguments(parser)
    if several:
        _add_output_arguments(parser)
    else:
        parser.set_defaults(
            n=1, logprobs=None, logprobs_of=None, echo=False, json=False, prompt=None, prompt_file=STDIN
        )


def _add_form_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("form of the output, at most one (docs/HTTP.md)").add_mutually_exclusive_group()
    add.add_argument("--json-schema", metavar="FILE|JSON", help="JSON that fits this schema")
    add.add_argument("--regex", metavar="R", help="what this regular expression matches")
    add.add_argument("--choice", action="append", default=[], metavar="TEXT", help="one of several; repeat it")
    add.add_argument("--grammar", metavar="FILE", help="what this Lark grammar describes")


def _add_text_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("texts to propose from, sent with the request").add_argument
    add(
        "--reference",
        dest="references",
        action="append",
        default=[],
        metavar="PATH",
        help=f"documents that the output may quote, a file, or a folder with {SEARCHED}; may be repeated",
    )
    add("--prediction", metavar="FILE", help="what the output may look like; - for stdin, if the prompt is not there")
    add("--private", action="store_true", help="propose nothing of it in the tenant's other texts, nor of theirs in it")


def _add_output_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("output").add_argument
    add("-n", "--n", type=int, default=1, metavar="N", help="completions of the prompt (default: %(default)s)")
    add(
        "--logprobs",
        type=int,
        metavar="N",
        help=f"with --json: of each token, and of the N best (0 to {MOST_LOGPROBS})",
    )
    add("--logprobs-of", choices=("model", "processed"), help="the model's own (default), or what is drawn from")
    add("--echo", action="store_true", help="show the prompt, too")


def sampling_options(args: argparse.Namespace) -> RequestOptions:
    """What the command line asks for; InvalidParameter names what is wrong."""
    _check(args)
    return RequestOptions(
        max_tokens=_max_tokens(args),
        fit_context=args.max_tokens is None,
        min_tokens=args.min_tokens,
        temperature=args.temperature,
        top_k=args.top_k,
        top_p=args.top_p,
        min_p=args.min_p,
        repetition_penalty=args.repetition_penalty,
        presence_penalty=args.presence_penalty,
        frequency_penalty=args.frequency_penalty,
        logit_bias=dict(map(_bias, args.logit_bias)),
        stop=args.stop,
        stop_ids=args.stop_id,
        ignore_eos=args.ignore_eos,
        seed=args.seed,
        priority=args.priority,
        rule=args.rule,
        logprobs=args.logprobs,
        logprobs_of=args.logprobs_of or "",
        echo=args.echo,
        private=args.private,
        **_form(args),
        **_texts(args),
    )


def _max_tokens(args: argparse.Namespace) -> int:
    return int(args.default_max_tokens if args.max_tokens is None else args.max_tokens)


def _form(args: argparse.Namespace) -> RequestOptions:
    """The constraint on the output; None where there is none."""
    if args.json_schema is not None:
        given = args.json_schema.strip()
        return RequestOptions(json_schema=given if given.startswith("{") else _read("json_schema", given))
    if args.grammar is not None:
        return RequestOptions(grammar=_read("grammar", args.grammar))
    return RequestOptions(regex=args.regex) if args.regex is not None else RequestOptions(choices=args.choice)


def _constraint(args: argparse.Namespace) -> Constraint | None:
    """The same, checked."""
    for kind, value in _form(args).items():
        texts = tuple(value) if isinstance(value, list) else (str(value),)
        return Constraint(ConstraintKind(kind), texts) if texts else None
    return None


def _texts(args: argparse.Namespace) -> RequestOptions:
    """What may be proposed. How many tokens it may have only a service can tell, which has a tokenizer."""
    documents = [text for path in args.references for text in _documents(Path(path))]
    if len(documents) > MOST_REFERENCES:
        raise InvalidParameter("references", f"at most {MOST_REFERENCES} are allowed, not {len(documents)}")
    _check_bytes("references", documents)
    if args.prediction is None:
        return RequestOptions(references=documents)
    if args.prediction == STDIN and _reads_stdin(args):
        raise InvalidParameter("prediction", f"must be a file, not {STDIN}: stdin has the prompt")
    prediction = _read("prediction", args.prediction)
    _check_bytes("prediction", [prediction])
    return RequestOptions(references=documents, prediction=prediction)


def _check_bytes(field: str, texts: Sequence[str]) -> None:
    """Refuse what no message can carry: gRPC's own words for that name no field."""
    size = sum(len(text.encode()) for text in texts)
    if size > MOST_MESSAGE_BYTES:
        message = f"{size} bytes of text are more than a request may have (at most {MOST_MESSAGE_BYTES})"
        raise InvalidParameter(field, message)


def _documents(path: Path) -> list[str]:
    """Texts of a file, or of a folder, without empty ones, such as an __init__.py, which a service refuses."""
    if not path.exists():
        raise InvalidParameter("references", f"there is no {path}")
    found = [text for _, text in named_texts([path], "references") if text]
    if not found:
        raise InvalidParameter("references", f"there is nothing to read in {path}")
    return found


def _read(field: str, name: str) -> str:
    """A file's text, or stdin's where `name` is STDIN and a prompt or a prediction is read."""
    piped = name == STDIN and field in ("prompt_file", "prediction")
    try:
        return sys.stdin.read() if piped else Path(name).read_text(encoding="utf-8")
    except OSError as error:
        raise InvalidParameter(field, f"{name} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise InvalidParameter(field, f"{name} is not UTF-8 at byte {error.start}") from None


def _check(args: argparse.Namespace) -> None:
    """Refuse what a service would refuse, and what makes no sense here."""
    resolve_rule(args.rule, _sampling(args))
    stopping = Stopping(_max_tokens(args), frozenset(args.stop_id), args.ignore_eos, args.min_tokens)
    check_constraint(_constraint(args), stopping)
    check_priority(args.priority)
    if not all(args.stop):
        raise InvalidParameter("stop", "must not be empty")
    if not 1 <= args.n <= MOST_COMPLETIONS:
        raise InvalidParameter("n", f"must be from 1 to {MOST_COMPLETIONS}, not {args.n}")
    if args.logprobs is not None and not args.json:
        raise InvalidParameter("logprobs", "are told with --json only")


def _sampling(args: argparse.Namespace) -> Sampling:
    sampling = Sampling(
        args.temperature,
        args.top_k,
        args.top_p,
        seed_of(args.seed or 0),
        min_p=args.min_p,
        repetition_penalty=args.repetition_penalty,
        presence_penalty=args.presence_penalty,
        frequency_penalty=args.frequency_penalty,
        logit_bias=tuple(sorted(map(_bias, args.logit_bias))),
        logprobs=args.logprobs,
    )
    return sampling if args.logprobs_of is None else replace(sampling, logprobs_of=LogprobsOf[args.logprobs_of.upper()])


def _bias(given: str) -> tuple[int, float]:
    token, _, bias = given.partition("=")
    try:
        return int(token), float(bias)
    except ValueError:
        raise InvalidParameter("logit_bias", f"must be ID=B, not {given!r}") from None
