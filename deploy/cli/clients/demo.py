"""`specwire demo`: real answers through the whole stack, with drafting and without, and who guessed what.

The demo asks SmolLM2 twelve questions, if its file is there (`make setup-models`). Else it completes code with the
included pair, from prompts behind which there is little to copy (`demo_pair.train.prompts`).
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import demo_pair
from deploy.cli.clients.generate import shown, tokens_per_second
from deploy.cli.main import run_owned
from deploy.cli.terminal import dim, legend, number, painter, shortened, table, wants_colour
from deploy.stack import stack
from deploy.stack.options import StackError, StackOptions, included_head, stack_options
from specwire import named_models
from specwire.client import AsyncClient, Chat, Completion, SpecwireError
from specwire.client.events import PartialCompletion
from specwire.client.requests import RequestOptions
from specwire.core.invalid import InvalidParameter
from specwire.core.messages import FinishReason
from specwire.core.model import AUTO, NONE, ModelError
from specwire.named_models import NAMED, REAL, file_of, how_to_get, located
from specwire.options import STACK, add_options
from specwire.progress import LAST_LINE
from specwire.rpc.process import say
from specwire.v1 import common_pb2

TIMEOUT = 60.0
# Texts that are shown at each temperature, and how much of the prompt before.
SHOWN_TEXTS, SHOWN_LINES = 2, 3
# Prompts whose texts are not measured: see `Demo._warm_up`.
WARM_UP_PROMPTS = 3
QUESTIONS = Path(__file__).with_name("demo_questions.json")


@dataclass(frozen=True, slots=True)
class DemoPrompt:
    """text: what is completed; of a question (`chat`) what is asked, by the target's chat template."""

    name: str
    text: str
    chat: bool = False

    @property
    def prompt(self) -> str | Chat:
        return Chat([{"role": "user", "content": self.text}]) if self.chat else self.text


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--count", type=int, default=12, metavar="N", help="prompts at most (default: %(default)s)")
    parser.add_argument(
        "--max-tokens",
        type=int,
        default=demo_pair.DEMO_TOKENS,
        metavar="N",
        help="of a completion (default: %(default)s)",
    )
    parser.add_argument(
        "--prompts",
        metavar="F",
        help="JSON list of texts to complete, of {name, text}, or of {name, question} (default: twelve questions for a "
        "named model, else code that the included pair was not trained on)",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of texts and table")
    add_options(parser, STACK)


def run(args: argparse.Namespace) -> int:
    try:
        if args.target is None and not args.draft and file_of(REAL).is_file():
            args.target = REAL
        if args.heads is None:
            args.heads = included_head(args)
        options = stack_options(args)
        prompts = prompts_of(args)
        if args.max_tokens < 1:
            raise InvalidParameter("max_tokens", f"must be at least 1, not {args.max_tokens}")
        if options.draft is None and not options.ngram and head_of(options) is None:
            raise InvalidParameter("draft", "there is nothing to compare without anything that guesses")
    except (InvalidParameter, ModelError) as error:
        say(f"specwire demo: error: {error}")
        return 2
    if args.target is None:
        say(f"specwire demo: the included pair of 11 and 2 million weights; {how_to_get(REAL)} fetches a real model")
    return run_owned("demo", lambda folder: _demo(options, prompts, args.max_tokens, args.json, folder))


def prompts_of(args: argparse.Namespace) -> list[DemoPrompt]:
    """Return the prompts that the command line asks for; InvalidParameter names what is wrong."""
    if args.count < 1:
        raise InvalidParameter("count", f"must be at least 1, not {args.count}")
    if args.prompts is None and args.target not in NAMED:
        return [DemoPrompt(each.name, each.text) for each in demo_pair.demo_prompts()][: args.count]
    path = QUESTIONS if args.prompts is None else Path(args.prompts)
    try:
        rows = json.loads(path.read_text(encoding="utf-8"))
        prompts = [_prompt_of(row) for row in rows]
    except (OSError, ValueError, TypeError) as error:
        raise InvalidParameter("prompts", f"{path} cannot be used: {error}") from None
    if not prompts:
        raise InvalidParameter("prompts", f"{path} holds none")
    return prompts[: args.count]


def _prompt_of(row: object) -> DemoPrompt:
    """TypeError says what it is not."""
    match row:
        case str(text):
            return DemoPrompt(shortened(text, NAME_WIDTH), text)
        case {"name": str(name), "text": str(text), **rest} if not rest:
            return DemoPrompt(name, text)
        case {"name": str(name), "question": str(text), **rest} if not rest:
            return DemoPrompt(name, text, chat=True)
    told = shortened(json.dumps(row), NAME_WIDTH)
    raise TypeError(f"{told} is neither a text nor an object of name and text, or of name and question")


async def _demo(
    options: StackOptions, prompts: Sequence[DemoPrompt], max_tokens: int, as_json: bool, folder: Path
) -> int:
    LAST_LINE.quiet = as_json
    running = await stack.start(options, folder)
    try:
        async with AsyncClient(running.address) as client:
            return await Demo(client, options, max_tokens, as_json).run(prompts)
    except SpecwireError as error:
        raise StackError(error.message) from None
    finally:
        await running.stop()


class Demo:
    """Completes prompts with drafting on and off, at each temperature, and compares. as_json: silent until the end."""

    def __init__(self, client: AsyncClient, options: StackOptions, max_tokens: int, as_json: bool) -> None:
        self._client = client
        self._options = options
        self._head = head_of(options)
        self._max_tokens = max_tokens
        self._as_json = as_json
        self._colour = wants_colour()

    async def run(self, prompts: Sequence[DemoPrompt]) -> int:
        """Print completions and the comparison; 1 where drafting changed a text that it may not change, else 0."""
        models = {"target": self._options.target, "head": self._head, "draft": self._options.draft}
        self._tell("\n" + "".join(f"{name:6} {model}\n" for name, model in models.items() if model is not None))
        self._tell(f"{legend()}\n" if self._colour else "")
        await self._warm_up(prompts)
        compared = [await self._compare(prompts, temperature) for temperature in demo_pair.DEMO_TEMPERATURES]
        served = (await self._client.server_info()).target  # what the verifier made of auto
        if self._as_json:
            computed = {"dtype": served.dtype, "runtime": served.runtime, "exact": is_exact(served)}
            print(json.dumps({**models, **computed, "temperatures": [as_object(each) for each in compared]}))
        else:
            print("\n" + report(compared, headed=self._head is not None))
        changed = changed_texts(compared)
        if not changed:
            return 0
        told = "drafting may change none" if is_exact(served) else "guesses may tip near-ties"
        how = f"in {served.dtype} on {served.runtime} {told}"
        say(f"specwire demo: {'error: ' * is_exact(served)}texts that differ: {'; '.join(changed)}; {how}")
        return int(is_exact(served))

    def _tell(self, text: str) -> None:
        if not self._as_json:
            print(text, end="", flush=True)

    async def _warm_up(self, prompts: Sequence[DemoPrompt]) -> None:
        """Complete a few prompts once with and once without drafting, by another seed.

        The first texts of a new service pay for what it learns of its machine, and of who guesses.
        """
        self._tell("first a few texts both ways, unmeasured\n")
        for temperature in demo_pair.DEMO_TEMPERATURES:
            for prompt in prompts[:WARM_UP_PROMPTS]:
                for drafting in (True, False):
                    asked = self._asked(temperature, drafting)
                    asked["seed"] = demo_pair.DEMO_SEED + 1
                    _checked(await self._client.complete(prompt.prompt, timeout=TIMEOUT, **asked))

    async def _compare(self, prompts: Sequence[DemoPrompt], temperature: float) -> Comparison:
        return Comparison(temperature, [await self._pair(*each, temperature) for each in enumerate(prompts)])

    async def _pair(self, index: int, prompt: DemoPrompt, temperature: float) -> Pair:
        """Complete with and without drafting, in alternating order, so that neither gains by its place.

        Both start from the prompt's keys and values, which a short request left at the verifier before. It drafts: else
        what a head reads of the prompt would not be kept, and a head would miss the text's first half. It asks for as
        many tokens as a draft needs room for.
        """
        await self._client.complete(prompt.prompt, max_tokens=2, timeout=TIMEOUT)
        blank = "\n" if index <= SHOWN_TEXTS else ""
        self._tell(f"{blank}--- temperature {temperature:g}, {painter().plain(prompt.name)}\n")
        complete = self._show if index < SHOWN_TEXTS and not self._as_json else self._complete
        if index % 2:
            off = await self._complete(prompt, temperature, drafting=False)
            on = await complete(prompt, temperature)
        else:
            on = await complete(prompt, temperature)
            off = await self._complete(prompt, temperature, drafting=False)
        self._tell(f"[{counts(off, on, headed=self._head is not None)}]\n")
        return Pair(prompt.name, off, on)

    def _asked(self, temperature: float, drafting: bool = True) -> RequestOptions:
        seed = demo_pair.DEMO_SEED
        return RequestOptions(max_tokens=self._max_tokens, temperature=temperature, seed=seed, drafting=drafting)

    async def _complete(self, prompt: DemoPrompt, temperature: float, drafting: bool = True) -> Completion:
        asked = self._asked(temperature, drafting)
        return _checked(await self._client.complete(prompt.prompt, timeout=TIMEOUT, **asked))

    async def _show(self, prompt: DemoPrompt, temperature: float) -> Completion:
        """Complete with drafting, painting the text as it comes."""
        lines = prompt.text.splitlines(keepends=True)[-SHOWN_LINES:]
        paint, gathered = painter(), PartialCompletion()
        self._tell(dim(paint.plain("".join(lines)), self._colour) + ("\n" if prompt.chat else ""))
        asked = self._asked(temperature)
        async with aclosing(self._client.generate(prompt.prompt, timeout=TIMEOUT, **asked)) as events:
            async for event in events:
                gathered.add(event)
                self._tell(shown(event, paint))
        return _checked(gathered.completion())


def is_exact(served: common_pb2.GetModelInfoResponse) -> bool:
    """Whether drafting may change no text of this target: a trial found so, or its weights and sums are in float32."""
    return served.deterministic or (served.dtype == "float32" and served.quantization in ("", NONE))


def head_of(options: StackOptions) -> str | None:
    """The head that the stack has, if any: of a target for which it chooses, the included one."""
    if options.heads != AUTO:
        return options.heads or None
    from specwire.lm.load import rows_are_free  # imports torch: `specwire --help` does not wait for it

    if not rows_are_free():
        return None
    found = named_models.included_head(located(options.target))
    return None if found is None else str(found)


def _checked(completion: Completion) -> Completion:
    if completion.finish_reason is FinishReason.ERROR:
        raise StackError(completion.message)
    return completion


HEAD = ("temperature", "tokens/s off", "on", "gain", "per forward", "text", "head", "drafter")
EXPLAINED = (
    "gain: on / off of a prompt, the median; tokens/s: of all prompts together\n"
    "per forward: tokens that one forward of the target decided, drafting on\n"
    "text, head, drafter: the part of all tokens that each guessed; text: copied from\n"
    "what stood before\n"
)
NAME_WIDTH = 36


@dataclass(frozen=True, slots=True)
class Pair:
    """One prompt's completions with drafting off and on."""

    name: str
    off: Completion
    on: Completion

    @property
    def identical(self) -> bool:
        return self.off.tokens == self.on.tokens


@dataclass(frozen=True, slots=True)
class Comparison:
    """All pairs of a temperature."""

    temperature: float
    pairs: Sequence[Pair]


def changed_texts(compared: Sequence[Comparison]) -> list[str]:
    """The prompts of pairs that differ, and at which temperature."""
    return [f"{pair.name} at {each.temperature:g}" for each in compared for pair in each.pairs if not pair.identical]


def report(compared: Sequence[Comparison], headed: bool) -> str:
    """Return the table, a row a temperature, what it means, and a sentence on the texts. headed: there is a head."""
    rows = [HEAD, *(_row(each) for each in compared)]
    explained = EXPLAINED
    if not headed:
        column = HEAD.index("head")
        rows = [(*row[:column], *row[column + 1 :]) for row in rows]
        explained = explained.replace(" head,", "")
    pairs = [pair for each in compared for pair in each.pairs]
    verdict = f"texts identical, token for token: {sum(pair.identical for pair in pairs)} of {len(pairs)}"
    return "\n".join([table(rows), "", explained, verdict])


def counts(off: Completion, on: Completion, headed: bool) -> str:
    """Return how fast a completion came without drafting and with it, and who guessed its tokens."""
    stats = on.stats
    by = {source: count for source, count in guessed_of([on]).items() if headed or source != "head"}
    return (
        f"{number(stats.output_tokens, 'token')}, {number(stats.target_forwards, 'forward')}; "
        f"guessed: {', '.join(f'{name} {count}' for name, count in by.items())}; "
        f"tokens/s {tokens_per_second(off):.0f} off, {tokens_per_second(on):.0f} on"
    )


def guessed_of(completions: Sequence[Completion]) -> dict[str, int]:
    """Return how many tokens of these each kind of source guessed: copied from the text, by a head, by drafters."""
    head = _sum(completions, "accepted_head")
    text = _sum(completions, "accepted_ngram") + _sum(completions, "accepted_prediction")
    return {"text": text, "head": head, "drafter": _sum(completions, "accepted") - text - head}


def figures(pairs: Sequence[Pair]) -> dict[str, Any]:
    """Return what a row of the table tells of some pairs, and more, with drafting off and on.

    acceptance: of the tokens that were tested; None if none was. guessed: parts of all tokens. first_token_ms: the
    median. identical: all texts are.
    """
    off, on = [pair.off for pair in pairs], [pair.on for pair in pairs]
    slow, fast, tokens, tested = _speed(off), _speed(on), _sum(on, "output_tokens"), _sum(on, "tested")
    return {
        "tokens": tokens,
        "tokens_per_second_off": slow,
        "tokens_per_second_on": fast,
        "ratio": _ratio(fast, slow),
        "median_ratio": median(_ratio(_speed([pair.on]), _speed([pair.off])) for pair in pairs),
        "tokens_per_forward": _ratio(tokens, _sum(on, "target_forwards")),
        "acceptance": _sum(on, "accepted") / tested if tested else None,
        "guessed": {source: _ratio(count, tokens) for source, count in guessed_of(on).items()},
        "first_token_ms_off": _first_token_ms(off),
        "first_token_ms_on": _first_token_ms(on),
        "identical": all(pair.identical for pair in pairs),
    }


def as_object(compared: Comparison) -> dict[str, object]:
    """Return the comparison for scripts."""
    prompts = [{"name": pair.name, "text": pair.on.text, **figures([pair])} for pair in compared.pairs]
    return {"temperature": compared.temperature, "prompts": prompts, "all": figures(compared.pairs)}


def _row(compared: Comparison) -> tuple[str, ...]:
    found = figures(compared.pairs)
    return (
        f"{compared.temperature:g}",
        *(f"{found[name]:.1f}" for name in ("tokens_per_second_off", "tokens_per_second_on")),
        *(f"{found[name]:.2f}" for name in ("median_ratio", "tokens_per_forward")),
        *(f"{share:.0%}" for share in found["guessed"].values()),
    )


def _speed(completions: Sequence[Completion]) -> float:
    """Output tokens per second, from each request's arrival to its end."""
    return _ratio(_sum(completions, "output_tokens"), _sum(completions, "duration_us") / 1e6)


def _first_token_ms(completions: Sequence[Completion]) -> float:
    return median(one.stats.time_to_first_token_us for one in completions) / 1e3


def _sum(completions: Sequence[Completion], figure: str) -> int:
    return sum(int(getattr(one.stats, figure)) for one in completions)


def _ratio(above: float, below: float) -> float:
    return above / below if below else 0.0
