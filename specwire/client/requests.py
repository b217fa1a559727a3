"""Requests from arguments. Only what the wire cannot carry is refused here; the service judges the rest."""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypedDict, Unpack

from specwire.client.events import invalid
from specwire.core.invalid import InvalidParameter
from specwire.core.law.sampling import SEED_BITS, seed_of
from specwire.v1 import common_pb2
from specwire.v1 import generation_pb2 as pb

# ----------------------------------------------------------------------------------------------------------------------
# A conversation as a prompt, written as OpenAI's API has it.

Message = Mapping[str, Any]
Tool = Mapping[str, Any]

CHOICES = {"auto": pb.TOOL_CHOICE_AUTO, "none": pb.TOOL_CHOICE_NONE, "required": pb.TOOL_CHOICE_REQUIRED}
# What a message may say.
TEXTS = ("role", "content", "tool_call_id", "name", "reasoning_content")


@dataclass(frozen=True, slots=True)
class Chat:
    """A prompt that the model's chat template writes.

    Attributes:
        messages: {"role", "content"}, of assistants also "tool_calls", of tools "tool_call_id". `Completion.answer` is
            one.
        tools: {"type": "function", "function": {"name", "description", "parameters", "strict"}}.
        tool_choice: auto, none, required, or {"type": "function", "function": {"name"}}.
        parallel_tool_calls: the answer may have several calls.
        continue_final_message: the answer goes on with the last message.
        template_values: more for the template, such as {"enable_thinking": False}.
    """

    messages: Sequence[Message]
    tools: Sequence[Tool] = ()
    tool_choice: str | Mapping[str, Any] = "auto"
    parallel_tool_calls: bool = True
    continue_final_message: bool = False
    template_values: Mapping[str, object] = field(default_factory=dict)


def chat_to_wire(chat: Chat) -> pb.Chat:
    """Raises SpecwireError (INVALID_ARGUMENT), naming field and value."""
    wire = pb.Chat(
        messages=[_message(f"messages[{index}]", each) for index, each in enumerate(chat.messages)],
        tools=[_tool(f"tools[{index}]", each) for index, each in enumerate(chat.tools)],
        parallel_tool_calls=chat.parallel_tool_calls,
        continue_final_message=chat.continue_final_message,
        template_values=_json("template_values", chat.template_values) if chat.template_values else "",
    )
    match chat.tool_choice:
        case str(choice) if choice in CHOICES:
            wire.tool_choice = CHOICES[choice]
        case {"type": "function", "function": {"name": str(name)}}:
            wire.tool_name = _text("tool_choice", name)
        case _:
            message = f"must be none, auto, required or a function by name, not {chat.tool_choice!r:.80}"
            raise invalid("tool_choice", message)
    return wire


def _message(path: str, message: Message) -> pb.ChatMessage:
    said = _said(path, message, (*TEXTS, "tool_calls"))
    calls = said.pop("tool_calls", [])
    if not isinstance(calls, list | tuple):
        raise invalid(f"{path}.tool_calls", f"must be a list, not {calls!r:.80}")
    made = [_call(f"{path}.tool_calls[{index}]", each) for index, each in enumerate(calls)]
    return pb.ChatMessage(**{name: _text(f"{path}.{name}", text) for name, text in said.items()}, tool_calls=made)


def _call(path: str, call: Mapping[str, Any]) -> pb.ToolCall:
    said = _said(path, call, ("id", "type", "function"))
    function = _said(f"{path}.function", said.get("function", {}), ("name", "arguments"))
    arguments = function.get("arguments", "")
    return pb.ToolCall(
        id=_text(f"{path}.id", said.get("id", "")),
        name=_text(f"{path}.function.name", function.get("name", "")),
        arguments=arguments if isinstance(arguments, str) else _json(f"{path}.function.arguments", arguments),
    )


def _tool(path: str, tool: Tool) -> pb.ChatTool:
    said = _said(path, tool, ("type", "function"))
    if said.get("type") != "function":
        raise invalid(f"{path}.type", f"must be 'function', not {said.get('type')!r:.80}")
    function = _said(f"{path}.function", said.get("function", {}), ("name", "description", "parameters", "strict"))
    parameters = function.get("parameters")
    return pb.ChatTool(
        name=_text(f"{path}.function.name", function.get("name", "")),
        description=_text(f"{path}.function.description", function.get("description", "")),
        parameters="" if parameters is None else _json(f"{path}.function.parameters", parameters),
        strict=bool(function.get("strict", False)),
    )


def _said(path: str, given: object, names: Sequence[str]) -> dict[str, Any]:
    """What is neither null nor an empty list of an object that may have these members."""
    if not isinstance(given, Mapping):
        raise invalid(path, f"must be an object, not {given!r:.80}")
    said = {name: value for name, value in given.items() if value is not None and value != []}
    for name in said:
        if name not in names:
            raise invalid(f"{path}.{name}", "is not carried: over HTTP a template may have it")
    return said


def _json(path: str, value: object) -> str:
    try:
        return _text(path, json.dumps(value, ensure_ascii=False, allow_nan=False))
    except (TypeError, ValueError) as error:
        raise invalid(path, f"is no JSON: {error}") from None


def _text(path: str, value: object) -> str:
    """A lone surrogate, as an undecodable command line argument has it, is no text."""
    if not isinstance(value, str):
        raise invalid(path, f"must be a string, not {value!r:.80}")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise invalid(path, f"is not valid Unicode at index {error.start}") from error
    return value


# ----------------------------------------------------------------------------------------------------------------------
# Requests from arguments.

TIMEOUT_S = 300.0
REQUEST_ID_BYTES = 18
# Most completions of one prompt in one call.
MOST_COMPLETIONS = 64

Text = str | Sequence[int]
Prompt = Text | Chat

# By whether drafters may propose, and whether the verifier may.
DRAFTING = {
    (True, True): pb.DRAFTING_AUTOMATIC,
    (True, False): pb.DRAFTING_DRAFTERS,
    (False, True): pb.DRAFTING_NGRAM,
    (False, False): pb.DRAFTING_OFF,
}
# Kinds of sources, as `Sources` of the wire names them.
SOURCES = ("drafters", "ngram", "heads")

LOGPROBS_OF = {
    "": common_pb2.LOGPROBS_OF_UNSPECIFIED,
    "model": common_pb2.LOGPROBS_OF_MODEL,
    "processed": common_pb2.LOGPROBS_OF_PROCESSED,
}


class RequestOptions(TypedDict, total=False):
    """How a prompt is completed. What is left out is 0, empty, None or False, but for `top_p` and `repetition_penalty`,
    1.0, and `drafting`, True.

    Attributes:
        max_tokens: 0 asks for the service's default, mostly as many as the context holds.
        fit_context: lower max_tokens to what the context has room for and the service allows; else more is refused.
        temperature: 0 is greedy.
        top_k: 0 keeps all.
        seed: of 64 bits, signed or not; None lets the service draw one. What is used is told in Started.
        rule: acceptance rule; "" takes the one that fits the temperature.
        drafting: False leaves out the drafters.
        ngram: False leaves out the verifier's own proposals from the text; None goes by `drafting`, so that
            drafting=False alone has the target decode plainly.
        sources: which may propose, of `SOURCES`, chosen one by one; instead of the two above. None goes by those.
        request_id: a repeated id joins the running session instead of starting another.
        parent: a session that has ended, behind whose tokens (prompt and output) the prompt goes on; "" for none.
        priority: among the tenant's sessions that wait for a place, the greater number goes first; from -100 to 100.
        choice: index of this completion among those of one prompt and seed; see `complete_many`.
        min_p: keep ids at least this times as probable as the most probable one; 0 keeps all.
        repetition_penalty: of ids in prompt or output, as in transformers; 1 is none.
        presence_penalty, frequency_penalty: of ids in the output, as OpenAI's; 0 is none.
        logit_bias: added to the logits of these ids.
        min_tokens: before so many, no id that would end the text is drawn, and no stop string ends it.
        logprobs: report log-probabilities, with so many of the most probable ids for each token; None for no report.
        logprobs_of: "model" (the default) or "processed", see LogprobsOf in common.proto.
        echo: True asks for the prompt, in Started.
        prediction: what the output may look like, text or token ids; right, it saves time, wrong, it costs none.
        references: documents that the output may quote, each text or token ids, together up to 1,048,576 tokens.
        private: True keeps the text out of what is proposed in the tenant's other sessions, and theirs out of this one.
        json_schema, regex, choices, grammar: what form the output must have (docs/HTTP.md); at most one of them.
        model: the target's name, where the service has several; "" takes the only one, or the parent's.
    """

    max_tokens: int
    fit_context: bool
    temperature: float
    top_k: int
    top_p: float
    stop: Sequence[str]
    seed: int | None
    rule: str
    drafting: bool
    ngram: bool | None
    sources: Sequence[str] | None
    stop_ids: Sequence[int]
    ignore_eos: bool
    request_id: str
    parent: str
    priority: int
    choice: int
    min_p: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    logit_bias: Mapping[int, float]
    min_tokens: int
    logprobs: int | None
    logprobs_of: str
    echo: bool
    prediction: Text
    references: Sequence[Text]
    json_schema: str | Mapping[str, object]
    regex: str
    choices: Sequence[str]
    grammar: str
    model: str
    private: bool


def generate_request(prompt: Prompt, **options: Unpack[RequestOptions]) -> pb.GenerateRequest:
    """One completion.

    Args:
        prompt: text, encoded by the service with nothing added, token ids, or a chat that the model's template writes.
        options: see `RequestOptions`.

    Raises:
        SpecwireError: INVALID_ARGUMENT, naming field and value.
    """
    if unknown := options.keys() - RequestOptions.__annotations__.keys():
        raise TypeError(f"there are no such options: {', '.join(sorted(unknown))}")
    stop = options.get("stop", ())
    request = pb.GenerateRequest(
        sampling=_sampling(options),
        stopping=_stopping(options),
        stop=[_text("stop", each) for each in ((stop,) if isinstance(stop, str) else stop)],
        drafting=_drafting(options.get("drafting", True), options.get("ngram"), options.get("sources")),
        sources=_sources(options.get("sources")),
        request_id=_text("request_id", options.get("request_id", "")),
        parent=_text("parent", options.get("parent", "")),
        priority=_signed("priority", options.get("priority", 0)),
        echo=options.get("echo", False),
        model=_text("model", options.get("model", "")),
        private=options.get("private", False),
    )
    _put_prompt(request, prompt)
    _put_prediction(request, options.get("prediction", ()))
    request.references.extend(_text_part("references", each) for each in _listed(options.get("references", ())))
    return request


def _put_prompt(request: pb.GenerateRequest, prompt: Prompt) -> None:
    if isinstance(prompt, Chat):
        request.chat.CopyFrom(chat_to_wire(prompt))
        return
    if isinstance(prompt, str):
        request.text = _text("prompt", prompt)
        return
    request.tokens.ids.extend(_unsigned("prompt", token) for token in prompt)
    request.tokens.SetInParent()  # an empty list is still a list of ids, for the service to refuse


def score_request(prefix: Text, continuations: Sequence[Sequence[Text]], model: str) -> pb.ScoreTextRequest:
    """See `Client.score_text`. Raises SpecwireError (INVALID_ARGUMENT)."""
    return pb.ScoreTextRequest(
        prefix=_text_part("prefix", prefix),
        continuations=[
            pb.ScoredText(parts=[_text_part("continuations", part) for part in parts]) for parts in continuations
        ],
        model=_text("model", model),
        request_id=request_id(),
    )


def _text_part(field: str, part: Text) -> pb.TextPart:
    if isinstance(part, str):
        return pb.TextPart(text=_text(field, part))
    return pb.TextPart(tokens=pb.TokenIds(ids=[_unsigned(field, token) for token in part]))


def _listed(references: Sequence[Text]) -> Sequence[Text]:
    """A text alone is no list of them; neither are token ids."""
    if isinstance(references, str) or any(isinstance(each, int) for each in references):
        raise invalid("references", "must be a list of texts, or of lists of token ids")
    return references


def _put_prediction(request: pb.GenerateRequest, prediction: Text) -> None:
    if isinstance(prediction, str):
        request.prediction_text = _text("prediction", prediction)
    elif prediction:
        request.prediction_tokens.ids.extend(_unsigned("prediction", token) for token in prediction)


def _drafting(drafting: bool, ngram: bool | None, sources: Sequence[str] | None) -> pb.Drafting:
    if sources is None:
        return DRAFTING[drafting, drafting if ngram is None else ngram]
    if not drafting or ngram is not None:
        raise invalid("sources", "contradicts drafting and ngram: give those or this")
    return pb.DRAFTING_UNSPECIFIED


def _sources(named: Sequence[str] | None) -> pb.Sources | None:
    if named is None:
        return None
    if isinstance(named, str) or any(name not in SOURCES for name in named):
        raise invalid("sources", f"must be a list of {', '.join(SOURCES)}, not {named!r}")
    return pb.Sources(**{name: name in named for name in SOURCES})


def _stopping(options: RequestOptions) -> common_pb2.Stopping:
    return common_pb2.Stopping(
        max_tokens=_unsigned("max_tokens", options.get("max_tokens", 0)),
        fit_context=options.get("fit_context", False),
        stop_ids=[_unsigned("stop_ids", token) for token in options.get("stop_ids", ())],
        ignore_eos=options.get("ignore_eos", False),
        min_tokens=_unsigned("min_tokens", options.get("min_tokens", 0)),
    )


def _sampling(options: RequestOptions) -> common_pb2.Sampling:
    seed, penalty, bias = options.get("seed"), options.get("repetition_penalty", 1.0), options.get("logit_bias") or {}
    sampling = common_pb2.Sampling(
        temperature=options.get("temperature", 0.0),
        top_k=_unsigned("top_k", options.get("top_k", 0)),
        top_p=options.get("top_p", 1.0),
        rule=_text("rule", options.get("rule", "")),
        seed=None if seed is None else _seed(seed),
        choice=_unsigned("choice", options.get("choice", 0)),
        min_p=options.get("min_p", 0.0),
        repetition_penalty=None if penalty == 1.0 else penalty,
        presence_penalty=options.get("presence_penalty", 0.0),
        frequency_penalty=options.get("frequency_penalty", 0.0),
        logit_bias={_unsigned("logit_bias", token): value for token, value in bias.items()},
    )
    sampling.MergeFrom(_report(options.get("logprobs"), options.get("logprobs_of", "")))
    sampling.MergeFrom(_constraint(options))
    return sampling


# What a Sampling may have beside how it draws; each says nothing else.


def _report(logprobs: int | None, logprobs_of: str) -> common_pb2.Sampling:
    if logprobs_of not in LOGPROBS_OF:
        raise invalid("logprobs_of", f"must be model or processed, not {logprobs_of!r}")
    return common_pb2.Sampling(
        logprobs=None if logprobs is None else _unsigned("logprobs", logprobs), logprobs_of=LOGPROBS_OF[logprobs_of]
    )


def _constraint(options: RequestOptions) -> common_pb2.Sampling:
    schema, regex = options.get("json_schema", ""), options.get("regex", "")
    choices, grammar = options.get("choices", ()), options.get("grammar", "")
    schema = schema if isinstance(schema, str) else json.dumps(schema)
    given = {"json_schema": schema, "regex": regex, "choices": choices, "grammar": grammar}
    asked = [name for name, value in given.items() if value]
    if len(asked) > 1:
        raise invalid(asked[1], f"contradicts {asked[0]}: an output has one form")
    return common_pb2.Sampling(
        json_schema=_text("json_schema", schema) if schema else None,
        regex=_text("regex", regex) if regex else None,
        choices=common_pb2.Choices(texts=[_text("choices", each) for each in choices]) if choices else None,
        grammar=_text("grammar", grammar) if grammar else None,
    )


def single_options(n: int, options: RequestOptions) -> list[RequestOptions]:
    """What each of n completions of one prompt is asked for: they share a seed, drawn here if there is none.

    Raises:
        SpecwireError: INVALID_ARGUMENT, n or what makes sense for one only.
    """
    if not 1 <= n <= MOST_COMPLETIONS:
        raise invalid("n", f"must be from 1 to {MOST_COMPLETIONS}, not {n}")
    for name in ("choice", "request_id"):
        if options.get(name):
            raise invalid(name, f"is of one completion, not of several: {options.get(name)!r}")
    seed = options.get("seed")
    seed = secrets.randbits(SEED_BITS) if seed is None else seed
    return [RequestOptions(**{**options, "seed": seed, "choice": choice}) for choice in range(n)]


def addresses_of(given: str | Sequence[str]) -> tuple[str, ...]:
    """HOST:PORT of each service, from one, from several with commas between them, or from a sequence.

    Raises:
        SpecwireError: INVALID_ARGUMENT, there is none.
    """
    several = given.split(",") if isinstance(given, str) else given
    addresses = tuple(each.strip() for each in several)
    if not addresses or not all(addresses):
        raise invalid("address", f"must be HOST:PORT, or several with commas between them, not {given!r}")
    return addresses


def request_id() -> str:
    """A new one."""
    return secrets.token_urlsafe(REQUEST_ID_BYTES)


def watch_request(session_id: str, from_position: int, prefix_hash: int | None) -> pb.WatchRequest:
    request = pb.WatchRequest(
        session_id=_text("session_id", session_id), from_position=_unsigned("from_position", from_position)
    )
    if prefix_hash is not None:
        request.prefix_hash = _unsigned("prefix_hash", prefix_hash, bits=64)
    return request


def _signed(field: str, value: int) -> int:
    if not -(1 << 31) <= value < 1 << 31:
        raise invalid(field, f"must be a whole number of 32 bits, not {value}")
    return value


def _seed(number: int) -> int:
    try:
        return seed_of(number)
    except InvalidParameter as error:
        raise invalid("seed", str(error).removeprefix("seed: ")) from None


def _unsigned(field: str, value: int, bits: int = 32) -> int:
    if not 0 <= value < 1 << bits:
        raise invalid(field, f"must be from 0 to {(1 << bits) - 1}, not {value}")
    return value
