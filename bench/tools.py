"""Count what drafting and chunking change in forced tool calls: python -m bench.tools --help.

Each call is asked for twice over HTTP by the official client: without drafting, and with it; one of the two in a
stream, by turns. Half are greedy, half are sampled. Its text is then parsed again from pieces of random sizes. All must
be the same call, its arguments JSON that meets the function's schema. These are counts, so a busy machine does not
disturb them. The models are tiny random ones, whose drafter is a disturbed copy of the target: what they would say is
nonsense of every kind, and quick. `--pair demo` asks the demo pair.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import shutil
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import jsonschema
import openai
import torch
from tokenizers import Tokenizer
from transformers import LlamaConfig, LlamaForCausalLM

from bench.harness import RESULTS, ROOT, record
from bench.harness.interleave import tracked
from bench.harness.interval import Estimate
from bench.harness.report import Bar, at_most, table
from bench.harness.rows import up
from demo_pair import DRAFT, TARGET, held_out_prompts
from specwire.rpc.process import say
from specwire.text.tool_calls.formats import FORMATS
from specwire.text.tool_calls.parser import OutputParser, ParsedOutput, gathered
from specwire.text.tool_calls.readers import ToolFunction

OUT = RESULTS / "tools.json"
TEMPLATE = ROOT / "examples" / "chatml.jinja"
# Beside the calls themselves: at once, sessions of a batch; characters of a prompt; tokens of a call, which all end
# before; seconds for one.
AT_ONCE, PROMPT_CHARACTERS, MOST_TOKENS, LIMIT_S = 12, 120, 256, 300.0
TEMPERATURE = 0.8
CUTTINGS = 8
# Of the tiny models.
CONTEXT, SPREAD, NOISE = 1024, 0.4, 0.01

# Without white space between the parts, each has an end.
CLOSED = {"x-guidance": {"whitespace_flexible": False}, "type": "object", "additionalProperties": False}
FUNCTIONS: dict[str, dict[str, Any]] = {
    "add_parameter": {
        **CLOSED,
        "properties": {
            "name": {"type": "string", "maxLength": 12},
            "kind": {"enum": ["positional", "keyword", "variadic"]},
            "default": {"anyOf": [{"type": "null"}, {"type": "integer", "minimum": 0, "maximum": 99}]},
        },
        "required": ["name", "kind", "default"],
    },
    "rename": {
        **CLOSED,
        "properties": {"places": {"type": "array", "items": {"$ref": "#/$defs/Place"}, "minItems": 1, "maxItems": 2}},
        "required": ["places"],
        "$defs": {
            "Place": {
                "type": "object",
                "properties": {
                    "line": {"type": "integer", "minimum": 1, "maximum": 999},
                    "public": {"type": "boolean"},
                },
                "required": ["line", "public"],
                "additionalProperties": False,
            }
        },
    },
    "say": {**CLOSED, "properties": {"text": {"type": "string", "maxLength": 20}}, "required": ["text"]},
}
TOOLS: list[Any] = [
    {"type": "function", "function": {"name": name, "strict": True, "parameters": schema}}
    for name, schema in FUNCTIONS.items()
]
CHOICES: list[Any] = [
    "required",
    *({"type": "function", "function": {"name": name}} for name in FUNCTIONS),
]
ON, OFF = "auto", "off"


@dataclass(frozen=True, slots=True)
class ToldCall:
    """One answer. calls: (name, arguments) of each. forwards: of the target."""

    content: str
    calls: tuple[tuple[str, str], ...]
    reason: str
    tokens: tuple[int, ...]
    forwards: int

    @property
    def parsed(self) -> bool:
        return self.reason == "tool_calls" and len(self.calls) == 1 and not self.content and _is_json(self.calls[0][1])

    @property
    def meets_schema(self) -> bool:
        ((name, arguments),) = self.calls
        return bool(jsonschema.Draft202012Validator(FUNCTIONS[name]).is_valid(json.loads(arguments)))

    @property
    def told(self) -> tuple[object, ...]:
        """What must not depend on who drafts."""
        return self.tokens, self.content, self.calls, self.reason


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except ValueError:
        return False
    return True


@dataclass(frozen=True, slots=True)
class Counts:
    """Of the calls of one format and one way of sampling. cut: parsed otherwise from pieces."""

    form: str
    sampled: bool
    calls: int
    differing: int
    unparsable: int
    violating: int
    cut: int
    tokens: int
    forwards_off: int
    forwards_on: int


class Asking:
    """Asks one stack, whose model writes calls as `form` says."""

    def __init__(self, client: openai.AsyncOpenAI, model: str, form: str, prompts: Sequence[str]) -> None:
        self._client = client
        self._model = model
        self._form = form
        self._prompts = prompts
        self._turns = asyncio.Semaphore(AT_ONCE)

    async def both(self, number: int) -> tuple[ToldCall, ToldCall]:
        """The call of this number, drafting off and on."""
        streamed = number % 2 == 0
        async with self._turns:
            off = await self._ask(number, OFF, streamed)
            return off, await self._ask(number, ON, not streamed)

    async def _ask(self, number: int, drafting: str, streamed: bool) -> ToldCall:
        asked: dict[str, Any] = {
            "model": self._model,
            "messages": [{"role": "user", "content": self._prompts[number % len(self._prompts)]}],
            "tools": TOOLS,
            "tool_choice": CHOICES[number // 4 % len(CHOICES)],
            "parallel_tool_calls": False,
            "max_completion_tokens": MOST_TOKENS,
            "temperature": TEMPERATURE if is_sampled(number) else 0.0,
            "seed": number,
            "extra_body": {"drafting": drafting, "details": True},
        }
        if not streamed:
            done = await self._client.chat.completions.create(**asked)
            return _told(done.choices[0], [done.choices[0]])
        chunks = []
        async with self._client.chat.completions.stream(**asked) as stream:
            async for event in stream:
                if event.type == "chunk":
                    chunks += event.chunk.choices
            done = await stream.get_final_completion()
        return _told(done.choices[0], chunks)


def is_sampled(number: int) -> bool:
    return number // 2 % 2 == 1


def _told(choice: Any, parts: Sequence[Any]) -> ToldCall:
    """parts: the choice's own, or its chunks: where the tokens' ids stand."""
    more = [(part.model_extra or {}).get("specwire", {}) for part in parts]
    calls = tuple((call.function.name, call.function.arguments) for call in choice.message.tool_calls or ())
    return ToldCall(
        content=choice.message.content or "",
        calls=calls,
        reason=choice.finish_reason,
        tokens=tuple(token for each in more for token in each.get("tokens", ())),
        forwards=max(each.get("stats", {}).get("target_forwards", 0) for each in more),
    )


def parsed_in_pieces(form: str, text: str, cuts: random.Random) -> ParsedOutput:
    """What the text is found to be, in pieces of random sizes."""
    functions = [ToolFunction(name, schema) for name, schema in FUNCTIONS.items()]
    parser, events, at = OutputParser(FORMATS[form], functions, None), [], 0
    while at < len(text):
        size = cuts.choice((1, 2, 3, 5, 8, 40))
        events += parser.feed(text[at : at + size])
        at += size
    return gathered([*events, *parser.finish()])


def counted(form: str, pairs: Mapping[int, tuple[ToldCall, ToldCall]], tokenizer: Tokenizer, sampled: bool) -> Counts:
    """Of the calls of these numbers, those that are sampled, or not."""
    differing = unparsable = violating = cut = tokens = off_forwards = on_forwards = 0
    for number, (off, on) in pairs.items():
        if is_sampled(number) is not sampled:
            continue
        differing += off.told != on.told
        unparsable += not (off.parsed and on.parsed)
        violating += not all(each.meets_schema for each in (off, on) if each.parsed)
        text, cuts = tokenizer.decode(list(off.tokens), skip_special_tokens=True), random.Random(number)
        found = {parsed_in_pieces(form, text, cuts) for _ in range(CUTTINGS)}
        calls = {tuple((call.name, call.arguments) for call in each.calls) for each in found}
        cut += calls != {off.calls}
        tokens += len(on.tokens)
        off_forwards, on_forwards = off_forwards + off.forwards, on_forwards + on.forwards
    mine = sum(is_sampled(number) is sampled for number in pairs)
    return Counts(form, sampled, mine, differing, unparsable, violating, cut, tokens, off_forwards, on_forwards)


async def ask_all(url: str, form: str, numbers: Sequence[int]) -> dict[int, tuple[ToldCall, ToldCall]]:
    prompts = [prompt.text[:PROMPT_CHARACTERS] for prompt in held_out_prompts()]
    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="any", timeout=LIMIT_S, max_retries=0) as client:
        model = (await client.models.list()).data[0].id
        asking = Asking(client, model, form, prompts)
        tasks = {number: asyncio.create_task(asking.both(number)) for number in numbers}
        return {number: await tasks[number] for number in tracked(numbers, len(numbers), form)}


def save_tiny(folder: Path) -> tuple[Path, Path]:
    """Write a random target and a copy of it with noise, with the demo pair's tokenizer; their folders."""
    torch.manual_seed(1)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=Tokenizer.from_file(str(TARGET / "tokenizer.json")).get_vocab_size(),
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=CONTEXT,
            initializer_range=SPREAD,
            bos_token_id=0,
            eos_token_id=0,
        )
    )
    for name, noise in (("target", 0.0), ("draft", NOISE)):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(noise * torch.randn_like(parameter))
        model.save_pretrained(folder / name)
        shutil.copy(TARGET / "tokenizer.json", folder / name)
    return folder / "target", folder / "draft"


def measure(args: argparse.Namespace) -> list[Counts]:
    """Each format has a stack of its own, as its flag names it."""
    with TemporaryDirectory() as folder:
        target, draft = (TARGET, DRAFT) if args.pair == "demo" else save_tiny(Path(folder))
        return _measured(args.calls, target, draft)


def _measured(calls: int, target: Path, draft: Path) -> list[Counts]:
    tokenizer = Tokenizer.from_file(str(target / "tokenizer.json"))
    rows = []
    for index, form in enumerate(FORMATS):
        numbers = range(index * calls // len(FORMATS), (index + 1) * calls // len(FORMATS))
        say(f"bench: {len(numbers)} calls as {form}")
        with ExitStack() as cleanup:
            http = ("--http", "127.0.0.1:0", "--chat-template", str(TEMPLATE), "--tool-format", form)
            stack, ready = up(str(target), str(draft), "float32", False, "--deterministic", *http)
            cleanup.enter_context(stack)
            pairs = asyncio.run(ask_all(str(ready["http"]), form, numbers))
        rows += [counted(form, pairs, tokenizer, sampled) for sampled in (False, True)]
    return rows


def bars_of(rows: Sequence[Counts]) -> list[Bar]:
    asked = {
        "calls that differ, drafting on or off": "differing",
        "calls that do not parse": "unparsable",
        "calls that violate their schema": "violating",
        "calls that are others in other pieces": "cut",
    }
    sums = {name: float(sum(getattr(row, field) for row in rows)) for name, field in asked.items()}
    return [at_most(name, Estimate(wrong, wrong, wrong, 1.0), 0) for name, wrong in sums.items()]


def report(rows: Sequence[Counts], bars: Sequence[Bar]) -> str:
    head = ("format", "calls", "differ", "do not parse", "violate", "other in pieces", "tokens/forward off", "on")
    cells = [
        (
            f"{row.form}, {'sampled' if row.sampled else 'greedy'}",
            *(str(each) for each in (row.calls, row.differing, row.unparsable, row.violating, row.cut)),
            *(f"{row.tokens / (forwards or 1):.2f}" for forwards in (row.forwards_off, row.forwards_on)),
        )
        for row in rows
    ]
    judged = [
        (bar.name, f"{bar.value:g}", f"{bar.sense} {bar.needed:g}", "holds" if bar.holds else "MISSED") for bar in bars
    ]
    return "\n".join([*table(head, cells), "", *table(("bar", "value", "needed", ""), judged)])


def parser() -> argparse.ArgumentParser:
    line = argparse.ArgumentParser(prog="python -m bench.tools", description=(__doc__ or "").partition(":")[0])
    line.add_argument("--pair", default="tiny", choices=("tiny", "demo"), help="(default: %(default)s)")
    line.add_argument("--calls", type=int, default=10_000, metavar="N", help="over all formats (default: %(default)s)")
    line.add_argument("--out", type=Path, default=OUT, metavar="FILE", help="JSON (default: %(default)s)")
    return line


def main(argv: Sequence[str] | None = None) -> int:
    args = parser().parse_args(argv)
    if record.refused(args, ("calls",)):
        return 2
    rows = measure(args)
    bars = bars_of(rows)
    print(report(rows, bars))
    found = {"bars": [asdict(bar) for bar in bars], "rows": [asdict(row) for row in rows]}
    record.write(args.out, found, args, ("calls", "pair"))
    return 0 if all(bar.holds for bar in bars) else 1


if __name__ == "__main__":
    sys.exit(main())
