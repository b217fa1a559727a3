"""What a request asks for: from its JSON fields to the sessions' own requests, as gRPC's clients send them.

Values are checked where those of gRPC are (`orchestrator.requests`), so that both ways in refuse the same ones.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from orchestrator.http.chat import take_prediction
from orchestrator.http.fields import Fields
from orchestrator.http.forms import take_form
from specwire.core.sampling import MOST_LOGPROBS, SEED_BITS, InvalidParameter, seed_of
from specwire.rpc.constraints import constraint_to_wire
from specwire.v1 import common_pb2
from specwire.v1 import generation_pb2 as pb

# OpenAI's default; gRPC's is 0, greedy.
TEMPERATURE = 1.0
# OpenAI's default for /v1/completions; a chat's answer may fill the context.
COMPLETION_TOKENS = 16
# Sessions of one request, over all its prompts.
MOST_CHOICES = 64
MOST_TIMEOUT_S = 86_400.0

# One spelling of each: 07 beside 7 would be two biases of one id.
ID = re.compile(r"0|[1-9][0-9]{0,9}")

# Of OpenAI's API: each is a string of the client's choice.
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
LOGPROBS_OF = {"model": common_pb2.LOGPROBS_OF_MODEL, "processed": common_pb2.LOGPROBS_OF_PROCESSED}


@dataclass(frozen=True, slots=True)
class CompletionRequest:
    """A request, without its prompts.

    Attributes:
        template: what each session is asked for; lacks the prompt and n.
        n: completions of each prompt.
        include_usage: streams end with the usage of all.
        details: tell each token's id and outcome.
        timeout: seconds for everything; None for no limit.
    """

    model: str | None
    template: pb.GenerateRequest
    n: int
    stream: bool
    include_usage: bool
    details: bool
    timeout: float | None
    logprobs: bool
    echo: bool = False

    def request(self, prompt: str | list[int]) -> pb.GenerateRequest:
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
    """All of a chat's fields but its messages and what its template takes."""
    sampling = _sampling(fields)
    wanted, top = fields.flag("logprobs"), fields.whole("top_logprobs", most=MOST_LOGPROBS)
    if top is not None and not wanted:
        raise InvalidParameter("top_logprobs", "needs logprobs")
    if wanted:
        sampling.logprobs = top or 0
    stopping = _stopping(fields, _answer_tokens(fields))
    fields.fixed("modalities", ["text"])
    for name in ("tools", "functions"):
        fields.fixed(name, [])
    fields.fixed("tool_choice", "none", "auto")
    fields.fixed("function_call", "none", "auto")
    fields.flag("parallel_tool_calls")  # there are none
    return _wish(fields, sampling, stopping, request_id, wanted, echo=False)


def _answer_tokens(fields: Fields) -> int:
    """max_completion_tokens, which has replaced max_tokens; 0 for as many as fit."""
    old, new = fields.whole("max_tokens", least=1), fields.whole("max_completion_tokens", least=1)
    if old is not None and new is not None and old != new:
        raise InvalidParameter("max_tokens", f"{old} contradicts max_completion_tokens, {new}")
    return new or old or 0


def take_completion(fields: Fields, request_id: str) -> CompletionRequest:
    """All of a completion's fields but its prompt."""
    sampling = _sampling(fields)
    top, echo = fields.whole("logprobs"), fields.flag("echo")
    if top is not None:
        sampling.logprobs = top
        if echo:
            raise InvalidParameter("logprobs", "of the prompt are not served: leave out echo or logprobs")
    stopping = _stopping(fields, fields.whole("max_tokens", least=1))
    fields.fixed("suffix", "")
    n = fields.whole("n", least=1, most=MOST_CHOICES) or 1
    fields.fixed("best_of", n)
    return _wish(fields, sampling, stopping, request_id, top is not None, echo, n)


def _wish(
    fields: Fields,
    sampling: common_pb2.Sampling,
    stopping: common_pb2.Stopping,
    request_id: str,
    logprobs: bool,
    echo: bool,
    n: int | None = None,
) -> CompletionRequest:
    n = n or fields.whole("n", least=1, most=MOST_CHOICES) or 1
    model, stream = fields.text("model"), fields.flag("stream")
    template = _template(fields, sampling, stopping, fields.text("request_id") or request_id)
    template.model = model or ""
    if template.provisional and not stream:
        raise InvalidParameter("provisional", "is shown in streams only")
    _without_effect(fields)
    return CompletionRequest(
        model=model,
        template=template,
        n=n,
        stream=stream,
        include_usage=_include_usage(fields, stream),
        details=fields.flag("details"),
        timeout=_timeout(fields),
        logprobs=logprobs,
        echo=echo,
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
    value = fields.whole("top_k", least=-1) or 0
    return max(0, value)


def _bias(fields: Fields) -> dict[int, float]:
    inner = fields.inner("logit_bias")
    bias: dict[int, float] = {}
    for name in inner.names() if inner is not None else ():
        if not (ID.fullmatch(name) and int(name) < 1 << 32):
            raise InvalidParameter("logit_bias", f"{name[:20]!r} is no token id")
        value = inner.number(name) if inner is not None else None
        bias[int(name)] = value or 0.0
    return bias


def _stopping(fields: Fields, max_tokens: int | None) -> common_pb2.Stopping:
    """None: by default, as far as it fits."""
    return common_pb2.Stopping(
        max_tokens=COMPLETION_TOKENS if max_tokens is None else max_tokens,
        fit_context=max_tokens is None,
        min_tokens=fields.whole("min_tokens"),
        stop_ids=fields.ids("stop_token_ids"),
        ignore_eos=fields.flag("ignore_eos"),
    )


def _template(
    fields: Fields, sampling: common_pb2.Sampling, stopping: common_pb2.Stopping, request_id: str
) -> pb.GenerateRequest:
    drafting = fields.choice("drafting", DRAFTING)
    return pb.GenerateRequest(
        sampling=sampling,
        stopping=stopping,
        stop=fields.texts("stop"),
        drafting=DRAFTING[drafting or "auto"],
        request_id=request_id,
        take_over=fields.flag("take_over"),
        provisional=fields.flag("provisional"),
        parent=fields.text("parent"),
        priority=fields.whole("priority", least=-100, most=100),
        prediction_text=take_prediction(fields),
    )


def _include_usage(fields: Fields, stream: bool) -> bool:
    options = fields.inner("stream_options")
    if options is None:
        return False
    if not stream:
        raise InvalidParameter("stream_options", "needs stream")
    include = options.flag("include_usage")
    options.fixed("include_obfuscation", False)
    options.end()
    return include


def _timeout(fields: Fields) -> float | None:
    value = fields.number("timeout")
    if value is not None and not 0 < value <= MOST_TIMEOUT_S:
        raise InvalidParameter("timeout", f"must be above 0 and at most {MOST_TIMEOUT_S:g} seconds, not {value:g}")
    return value


def _without_effect(fields: Fields) -> None:
    """What clients send for services that bill, file, moderate or reason; here it changes nothing."""
    for name in WITHOUT_EFFECT:
        fields.text(name)
    fields.inner("metadata")
    fields.flag("store")
