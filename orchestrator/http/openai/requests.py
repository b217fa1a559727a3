"""What a request asks for: from its JSON fields to the sessions' own requests."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any

from orchestrator.chat.fields import Fields, check_count, made_constraint, shown
from orchestrator.chat.talk import text_of
from specwire.core.invalid import MOST_REFERENCES, InvalidParameter
from specwire.core.law.constraint import MOST_CHOICES as MOST_TEXTS
from specwire.core.law.constraint import Constraint, ConstraintKind
from specwire.core.law.sampling import MOST_BIASES, MOST_LOGPROBS, SEED_BITS, seed_of
from specwire.core.text import MOST_STOP_IDS
from specwire.rpc.convert import constraint_to_wire
from specwire.text.output import MOST_STOPS
from specwire.v1 import common_pb2
from specwire.v1 import generation_pb2 as pb

# ----------------------------------------------------------------------------------------------------------------------
# What form an answer must have: OpenAI's `response_format`, and the fields that vLLM's clients send.

ANY_OBJECT = {"type": "object"}
# By the names in `structured_outputs`; with "guided_" before it, each is also a field of its own.
KINDS = {
    "json": ConstraintKind.JSON_SCHEMA,
    "regex": ConstraintKind.REGEX,
    "choice": ConstraintKind.CHOICES,
    "grammar": ConstraintKind.GRAMMAR,
}


Named = list[tuple[str, Constraint]]


def take_form(fields: Fields) -> Constraint | None:
    """None for any. InvalidParameter names the field."""
    found = [*_response_format(fields), *_structured(fields), *_each(fields, "guided_")]
    if len(found) > 1:
        raise InvalidParameter(found[1][0], f"contradicts {found[0][0]}: an answer has one form")
    return found[0][1] if found else None


def _response_format(fields: Fields) -> Named:
    inner = fields.inner("response_format")
    if inner is None:
        return []
    kind = inner.choice("type", ("text", "json_object", "json_schema"))
    if kind is None:
        raise inner.invalid("type", "is required")
    found: Named = []
    if kind == "json_schema":
        found.append(("response_format", _named_schema(inner)))
    elif kind == "json_object":  # by `schema`, which llama.cpp's clients send with it
        schema = inner.take("schema")
        path = "response_format" if schema is None else "response_format.schema"
        found.append(("response_format", _schema(path, ANY_OBJECT if schema is None else schema)))
    inner.end()
    return found


def _named_schema(inner: Fields) -> Constraint:
    named = inner.inner("json_schema")
    if named is None:
        raise inner.invalid("json_schema", "is required")
    for name in ("name", "description"):
        named.text(name)
    named.flag("strict")  # it always is
    schema = named.take("schema")
    if schema is None:
        raise named.invalid("schema", "is required")
    named.end()
    return _schema("response_format.json_schema.schema", schema)


def _structured(fields: Fields) -> Named:
    inner = fields.inner("structured_outputs")
    if inner is None:
        return []
    found = _each(inner, "")
    if inner.flag("json_object"):
        name = "structured_outputs.json_object"
        found.append((name, _schema(name, ANY_OBJECT)))
    inner.end()
    return found


def _each(fields: Fields, prefix: str) -> Named:
    taken = ((fields.path + prefix + name, kind, fields.take(prefix + name)) for name, kind in KINDS.items())
    return [(name, _constraint(name, kind, value)) for name, kind, value in taken if value is not None]


def _constraint(name: str, kind: ConstraintKind, value: Any) -> Constraint:
    if kind is ConstraintKind.JSON_SCHEMA:
        return _schema(name, value)
    texts = value if kind is ConstraintKind.CHOICES else [value]
    if isinstance(texts, list):
        check_count(name, len(texts), MOST_TEXTS)
    if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
        wanted = "a list of strings" if kind is ConstraintKind.CHOICES else "a string"
        raise InvalidParameter(name, f"must be {wanted}, not {shown(value)}")
    return made_constraint(name, kind, texts)


def _schema(name: str, value: Any) -> Constraint:
    """An object, or one as a string, which vLLM's clients may send."""
    return made_constraint(name, ConstraintKind.JSON_SCHEMA, [value if isinstance(value, str) else json.dumps(value)])


# ----------------------------------------------------------------------------------------------------------------------
# What a request asks for: from its JSON fields to the sessions' own requests, as gRPC's clients send them.
#
# Values are checked where those of gRPC are (`orchestrator.api.requests`), so that both ways in refuse the same ones.

# OpenAI's default; gRPC's is 0, greedy.
TEMPERATURE = 1.0
# OpenAI's default for /v1/completions; a chat's answer may fill the context.
COMPLETION_TOKENS = 16
# Says of max_tokens: as many as fit, and as the service allows.
AS_FITS, MOST_TOKENS = -1, (1 << 32) - 1
# Sessions of one request, over all its prompts.
MOST_CHOICES = 64
MOST_TIMEOUT_S = 86_400.0

# One spelling for each id: 07 beside 7 would be two biases of one id.
ID = re.compile(r"0|[1-9][0-9]{0,9}")

# Fields of OpenAI's API that are accepted without effect: each is a string of the client's choice.
WITHOUT_EFFECT = (
    "user",
    "safety_identifier",
    "prompt_cache_key",
    "prompt_cache_retention",
    "service_tier",
    "reasoning_effort",
    "verbosity",
)

DRAFTING = {
    "auto": pb.DRAFTING_AUTOMATIC,
    "off": pb.DRAFTING_OFF,
    "drafters": pb.DRAFTING_DRAFTERS,
    "ngram": pb.DRAFTING_NGRAM,
}
SOURCES = ("drafters", "ngram", "heads")
LOGPROBS_OF = {"model": common_pb2.LOGPROBS_OF_MODEL, "processed": common_pb2.LOGPROBS_OF_PROCESSED}


@dataclass(frozen=True, slots=True)
class CompletionRequest:
    """A request, without its prompts.

    Attributes:
        template: what each session is asked for; lacks the prompt and n.
        n: completions of each prompt.
        include_usage: streams end with the usage of all. usage_so_far: each event has it, as far as it has come.
        details: tell each token's id and outcome.
        timeout: seconds for everything; None for no limit.
        echo_logprobs: most probable ids told with each token of the echoed prompt; None for no log-probabilities.
        prompt_logprobs: likewise, in vLLM's form beside the answer.
        scores_only: the prompt is all; nothing is generated.
        request_id: as it was asked with, which a template may lack.
    """

    template: pb.GenerateRequest
    n: int
    stream: bool
    include_usage: bool
    usage_so_far: bool
    details: bool
    timeout: float | None
    logprobs: bool
    echo: bool = False
    echo_logprobs: int | None = None
    prompt_logprobs: int | None = None
    scores_only: bool = False
    request_id: str = ""

    @property
    def scored(self) -> int | None:
        """Most probable ids to be told with each token of the prompt; None where its log-probabilities are not."""
        return max((each for each in (self.echo_logprobs, self.prompt_logprobs) if each is not None), default=None)

    def for_prompt(self, prompt: str | list[int]) -> pb.GenerateRequest:
        """What is asked for with one prompt."""
        request = pb.GenerateRequest(n=self.n)
        request.MergeFrom(self.template)
        request.ClearField("request_id")  # of several sessions each has its own
        if isinstance(prompt, str):
            request.text = prompt
        else:
            request.tokens.ids.extend(prompt)
        return request


def take_chat(fields: Fields, request_id: str) -> CompletionRequest:
    """All of a chat's fields but its messages, its tools and what its template takes."""
    sampling = _sampling(fields)
    wanted, top = fields.flag("logprobs"), fields.whole("top_logprobs", most=MOST_LOGPROBS)
    if top and not wanted:
        raise InvalidParameter("top_logprobs", "needs logprobs")
    if wanted:
        sampling.logprobs = top or 0
    stopping = _stopping(fields, _answer_tokens(fields), default=0)
    fields.fixed("modalities", ["text"])
    n = fields.whole("n", least=1, most=MOST_CHOICES) or 1
    return _request(fields, sampling, stopping, request_id, n, logprobs=wanted)


def take_length(fields: Fields, name: str, least: int = 1) -> int | None:
    """Tokens of an answer: from `least`, AS_FITS, or None where nothing is said."""
    value = fields.whole(name, least=AS_FITS)
    if value is not None and value != AS_FITS and value < least:
        raise fields.invalid(name, f"must be at least {least}, or {AS_FITS} for as many as fit, not {value}")
    return value


def _answer_tokens(fields: Fields) -> int | None:
    """max_completion_tokens, which has replaced max_tokens."""
    old, new = take_length(fields, "max_tokens"), take_length(fields, "max_completion_tokens")
    if old is not None and new is not None and old != new:
        raise InvalidParameter("max_tokens", f"{old} contradicts max_completion_tokens, {new}")
    return old if new is None else new


def take_completion(fields: Fields, request_id: str, default: int = 0) -> CompletionRequest:
    """All of a completion's fields but its prompt. default: tokens where it says nothing; 0 for OpenAI's."""
    sampling = _sampling(fields)
    top, echo = fields.whole("logprobs", most=MOST_LOGPROBS), fields.flag("echo")
    if top is not None:
        sampling.logprobs = top
    max_tokens = take_length(fields, "max_tokens", least=0)
    of_prompt = fields.whole("prompt_logprobs", most=MOST_LOGPROBS)
    stopping = _stopping(fields, 1 if max_tokens == 0 else max_tokens, default or COMPLETION_TOKENS)
    fields.fixed("suffix", "")
    n = fields.whole("n", least=1, most=MOST_CHOICES) or 1
    fields.fixed("best_of", n)
    scored: dict[str, Any] = {"echo_logprobs": top if echo else None, "prompt_logprobs": of_prompt}
    scored |= {"echo": echo, "scores_only": max_tokens == 0}
    request = _request(fields, sampling, stopping, request_id, n, logprobs=top is not None, **scored)
    _check_scored(request)
    if request.scores_only:
        request.template.ClearField("request_id")  # no session that an id could stand for
    return request


def _check_scored(request: CompletionRequest) -> None:
    """Refuse what a prompt's log-probabilities cannot go with."""
    least = request.template.stopping.min_tokens
    if request.scores_only and least:
        raise InvalidParameter("min_tokens", f"must be from 0 to max_tokens, which is 0, not {least}")
    if request.template.parent and (request.scores_only or request.scored is not None):
        field = "max_tokens" if request.scores_only else "logprobs" if request.echo else "prompt_logprobs"
        raise InvalidParameter(field, "of a prompt that goes on behind a parent is not served: give the whole prompt")
    if request.prompt_logprobs is not None and request.stream:
        raise InvalidParameter("prompt_logprobs", "are not told in streams: use echo with logprobs")


def _request(
    fields: Fields, sampling: common_pb2.Sampling, stopping: common_pb2.Stopping, request_id: str, n: int, **more: Any
) -> CompletionRequest:
    """more: as of `CompletionRequest`."""
    model, stream = fields.text("model"), fields.flag("stream")
    request_id = fields.text("request_id") or request_id
    template = _template(fields, sampling, stopping, request_id)
    template.model = model or ""
    _without_effect(fields)
    include_usage, usage_so_far = _usage_wanted(fields, stream)
    return CompletionRequest(
        template=template,
        n=n,
        stream=stream,
        include_usage=include_usage,
        usage_so_far=usage_so_far,
        details=fields.flag("details"),
        timeout=_timeout(fields),
        request_id=request_id,
        **more,
    )


def _sampling(fields: Fields) -> common_pb2.Sampling:
    temperature, seed = fields.number("temperature"), fields.whole("seed", -(1 << SEED_BITS - 1), (1 << SEED_BITS) - 1)
    logprobs_of = fields.choice("logprobs_of", LOGPROBS_OF)
    sampling = common_pb2.Sampling(
        temperature=TEMPERATURE if temperature is None else temperature,
        top_p=fields.number("top_p"),
        top_k=_top_k(fields),
        min_p=fields.number("min_p"),
        repetition_penalty=fields.number("repetition_penalty"),
        presence_penalty=fields.number("presence_penalty"),
        frequency_penalty=fields.number("frequency_penalty"),
        logit_bias=_bias(fields),
        seed=None if seed is None else seed_of(seed),
        rule=fields.text("rule") or "",
        logprobs_of=LOGPROBS_OF[logprobs_of] if logprobs_of else common_pb2.LOGPROBS_OF_UNSPECIFIED,
    )
    sampling.MergeFrom(constraint_to_wire(take_form(fields)))
    return sampling


def _top_k(fields: Fields) -> int:
    """0 keeps all; clients of other servers say -1."""
    return max(0, fields.whole("top_k", least=-1) or 0)


def _bias(fields: Fields) -> dict[int, float]:
    inner = fields.inner("logit_bias")
    names = [] if inner is None else inner.names()
    check_count("logit_bias", len(names), MOST_BIASES)
    bias: dict[int, float] = {}
    for name in names:
        if not (ID.fullmatch(name) and int(name) < 1 << 32):
            raise InvalidParameter("logit_bias", f"{name[:20]!r} is no token id")
        value = inner.number(name) if inner is not None else None
        bias[int(name)] = value or 0.0
    return bias


def _stopping(fields: Fields, max_tokens: int | None, default: int) -> common_pb2.Stopping:
    """None: by default, as far as it fits."""
    fits = max_tokens is None or max_tokens == AS_FITS
    return common_pb2.Stopping(
        max_tokens=default if max_tokens is None else MOST_TOKENS if fits else max_tokens,
        fit_context=fits,
        min_tokens=fields.whole("min_tokens"),
        stop_ids=fields.ids("stop_token_ids", MOST_STOP_IDS),
        ignore_eos=fields.flag("ignore_eos"),
    )


def _template(
    fields: Fields, sampling: common_pb2.Sampling, stopping: common_pb2.Stopping, request_id: str
) -> pb.GenerateRequest:
    drafting, sources = fields.choice("drafting", DRAFTING), _sources(fields)
    if drafting is not None and sources is not None:
        raise InvalidParameter("specwire.sources", "contradicts drafting: give one of the two")
    return pb.GenerateRequest(
        sampling=sampling,
        stopping=stopping,
        stop=fields.texts("stop", MOST_STOPS),
        drafting=DRAFTING[drafting or "auto"] if sources is None else pb.DRAFTING_UNSPECIFIED,
        sources=sources,
        request_id=request_id,
        take_over=fields.flag("take_over"),
        parent=fields.text("parent"),
        priority=fields.whole("priority", least=-100, most=100),
        prediction_text=_prediction(fields),
        references=[pb.TextPart(text=text) for text in fields.texts("references", MOST_REFERENCES)],
        private=fields.flag("private"),
    )


def _prediction(fields: Fields) -> str | None:
    """What the output may look like."""
    inner = fields.inner("prediction")
    if inner is None:
        return None
    inner.choice("type", ("content",))
    content = inner.take("content")
    inner.end()
    return text_of("content", content, "prediction") or None


def _sources(fields: Fields) -> pb.Sources | None:
    """What may propose, of `specwire.sources`; None where the request leaves it open."""
    inner = fields.inner("specwire")
    if inner is None:
        return None
    named = inner.texts("sources", len(SOURCES)) if "sources" in inner.names() else None
    inner.end()
    if named is None:
        return None
    for name in named:
        if name not in SOURCES:
            raise inner.invalid("sources", f"must be of {', '.join(SOURCES)}, not {shown(name)}")
    return pb.Sources(**{name: name in named for name in SOURCES})


def _usage_wanted(fields: Fields, stream: bool) -> tuple[bool, bool]:
    """At the end, and with each event; the latter as vLLM has it, only beside the former."""
    options = fields.inner("stream_options")
    if options is None:
        return False, False
    if not stream:
        raise InvalidParameter("stream_options", "needs stream")
    include, so_far = options.flag("include_usage"), options.flag("continuous_usage_stats")
    options.flag("include_obfuscation")  # nothing is added to hide lengths
    options.end()
    return include, include and so_far


def _timeout(fields: Fields) -> float | None:
    value = fields.number("timeout")
    if value is not None and not 0 < value <= MOST_TIMEOUT_S:
        raise InvalidParameter("timeout", f"must be above 0 and at most {MOST_TIMEOUT_S:g} seconds, not {value:g}")
    return value


def _without_effect(fields: Fields) -> None:
    """Take the fields that clients send for other services; here they change nothing."""
    for name in WITHOUT_EFFECT:
        fields.text(name)
    fields.inner("metadata")
    fields.flag("store")
    inner = fields.inner("prompt_cache_options")
    if inner is not None:  # how long a prompt may be kept for, and where it may be parted: as there is room
        for name in ("mode", "ttl"):
            inner.text(name)
        inner.fixed("prewarm", False)
        inner.end()
