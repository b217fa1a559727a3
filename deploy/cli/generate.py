"""`specwire generate`: one completion, from a running stack or one started for the purpose."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from deploy.cli.comparison import by_source, forwards
from deploy.cli.main import run_owned
from deploy.cli.sampling_options import add_sampling_arguments, sampling_options
from deploy.cli.terminal import Painter, ProvisionalTail, is_terminal, number, painter
from deploy.cli.where import StackAddress, add_where_arguments, explained, say_what_starts, where_of
from deploy.stack.options import StackError
from deploy.stack.starting import start_shown
from specwire.client import (
    AsyncClient,
    Chunk,
    Completion,
    Event,
    Finished,
    PromptEcho,
    Provisional,
    SpecwireError,
    Started,
)
from specwire.client.events import Gathering
from specwire.client.requests import RequestOptions
from specwire.core.invalid import InvalidParameter
from specwire.core.law.sampling import finite
from specwire.core.messages import FinishReason
from specwire.progress import LAST_LINE
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
    parser.add_argument(
        "--provisional", action="store_true", help="on a terminal, show drafts underlined until they are decided"
    )
    add_where_arguments(parser)


def run(args: argparse.Namespace) -> int:
    try:
        request = request_of(args)
    except InvalidParameter as error:
        say(f"specwire generate: error: {error}")
        return 2
    if args.provisional and not args.json and not is_terminal():
        say("specwire generate: --provisional: stdout is not a terminal, decided text only")
    return run_owned("generate", lambda folder: _generate(request, folder))


def request_of(args: argparse.Namespace) -> GenerateCall:
    """Return what the command line asks for; InvalidParameter names what is wrong."""
    options = sampling_options(args)
    check_timeout(args.timeout)
    where = where_of(args)
    options["drafting"], options["ngram"] = not args.no_draft, not args.no_ngram
    options["provisional"] = args.provisional and not args.json and is_terminal()
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
    prompt = _read(args.prompt_file or STDIN) if args.prompt is None else args.prompt
    if not prompt:
        raise InvalidParameter("prompt", "must not be empty")
    return str(prompt)


def _read(name: str) -> str:
    try:
        return sys.stdin.read() if name == STDIN else Path(name).read_text(encoding="utf-8")
    except OSError as error:
        raise InvalidParameter("prompt_file", f"{name} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise InvalidParameter("prompt_file", f"{name} is not UTF-8 at byte {error.start}") from None


async def _generate(request: GenerateCall, folder: Path) -> int:
    LAST_LINE.quiet = request.as_json
    async with (
        _address(request.where, folder) as address,
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
async def _address(where: StackAddress, folder: Path) -> AsyncIterator[str]:
    """The running stack's address, or that of one that lives as long as the context."""
    if where.address is not None:
        yield where.address
        return
    say_what_starts("generate", where)
    running = await start_shown(where.own, folder)
    try:
        yield running.address
    finally:
        await running.stop()


async def _stream(client: AsyncClient, request: GenerateCall) -> Completion:
    """Show the text as it comes, unless the whole is wanted as JSON."""
    paint, tail, gathering = painter(), ProvisionalTail(), Gathering()
    try:
        async with aclosing(client.generate(request.prompt, timeout=request.timeout, **request.options)) as events:
            async for event in events:
                gathering.add(event)
                if not request.as_json:
                    print(shown(event, paint, tail), end="", flush=True)
    finally:
        print(tail.show(""), end="", flush=True)
    return gathering.completion()


def shown(event: Event, painter: Painter, tail: ProvisionalTail) -> str:
    """Return what an event makes a terminal, or a file, get."""
    match event:
        case Started():
            echoed = _echoed(event.prompt)
            return tail.decided(echoed, painter.plain(echoed))
        case Chunk():
            return tail.decided(event.text, painter.chunk(event))
        case Provisional():
            return tail.show(event.text)
        case Finished():
            return tail.decided(event.text, painter.text(event.text)) + tail.show("") + "\n"


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
    """All of `Stats`, its times in milliseconds, and the speed."""
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
