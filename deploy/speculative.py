"""--speculative-config: how to propose, in the words of other servers, where they mean the same here.

    method                        draft_model: a draft model proposes; ngram: the verifier, from the text itself (vLLM)
    model                         of the drafter (vLLM)
    num_speculative_tokens        a drafter drafts so many at a time: the plan lockstep:K (vLLM)
    num_assistant_tokens          the same (transformers with a constant schedule, OpenVINO GenAI)
    assistant_confidence_threshold  0 only: no stop (transformers, OpenVINO GenAI)

Without a number the controller chooses it. How many of the drafted tokens are tested is the verifier's choice in any
case: fewer, or none, while they do not pay; and the n-grams of the verifier are not bound by the number. Whatever else
is given is refused by name.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from typing import Any, NoReturn

from specwire.core.plan import InvalidPlan, parse_plan
from specwire.core.sampling import InvalidParameter

SPECULATIVE = "speculative-config"
DRAFT_MODEL, NGRAM = "draft_model", "ngram"
KNOWN = ("method", "model", "num_speculative_tokens", "num_assistant_tokens", "assistant_confidence_threshold")
# Fields of others that mean something here, and how to say it.
ELSEWHERE = {
    "acceptance_method": "the rule is each request's own (rule)",
    "draft_tensor_parallel_size": "a drafter is one process on one device; 1 needs no saying",
    "disable_by_batch_size": "whether drafting pays is measured for each session, in batches too",
    "num_assistant_tokens_schedule": "without a number of tokens the controller chooses it anew all the time",
    "posterior_alpha": "give a request the rule typical(epsilon,delta)",
    "posterior_threshold": "give a request the rule typical(epsilon,delta)",
    "prompt_lookup_max": "what is looked up, and how far, follows from what was accepted before",
    "prompt_lookup_min": "what is looked up, and how far, follows from what was accepted before",
    "prompt_lookup_num_tokens": "give the method ngram; how many are proposed follows from what was accepted before",
    "quantization": "give --quantization",
}


@dataclass(frozen=True, slots=True)
class Speculative:
    """drafter, ngram: whether these propose; None where nothing is said of it.

    draft: the draft model, None for whichever the target has. plan: see `specwire.core.plan.parse_plan`.
    """

    drafter: bool | None = None
    ngram: bool | None = None
    draft: str | None = None
    plan: str = "auto"

    def with_flags(self, draft: bool, no_draft: bool, no_ngram: bool) -> Speculative:
        """What the flags --draft, --no-draft and --no-ngram leave open is as said here. Raises InvalidParameter."""
        if draft and self.draft is not None:
            _refuse("model", "says what --draft says, too: leave one of them out")
        if draft and self.drafter is False:
            _refuse("method", f"{NGRAM} is without the drafter that --draft names: leave one of them out")
        if no_draft and (self.drafter or self.plan != "auto"):
            _refuse("draft model", "contradicts --no-draft: leave one of them out")
        if no_ngram and self.ngram:
            _refuse("method", f"{NGRAM} contradicts --no-ngram: leave one of them out")
        return replace(
            self, drafter=not no_draft and self.drafter is not False, ngram=not no_ngram and self.ngram is not False
        )


def speculative_of(text: str) -> Speculative:
    """Raises InvalidParameter, which names the field and its value."""
    fields = _fields(text)
    method = fields.get("method", DRAFT_MODEL if "model" in fields else None)
    if method not in (None, DRAFT_MODEL, NGRAM):
        _refuse("method", f"must be {DRAFT_MODEL} or {NGRAM}, not {json.dumps(method)}")
    model = fields.get("model")
    if model is not None and (not isinstance(model, str) or not model):
        _refuse("model", f"must be a path or hub id, not {json.dumps(model)}")
    count = _count(fields)
    if fields.get("assistant_confidence_threshold", 0) != 0:
        reason = "must be 0: a drafter here ends a chain by the product of its confidences, at a floor that is computed"
        _refuse("assistant_confidence_threshold", reason)
    if method == NGRAM:
        for name in ("model", "num_speculative_tokens", "num_assistant_tokens"):
            if name in fields:
                _refuse(name, "is a draft model's: with the method ngram the verifier chooses what to propose")
        return Speculative(drafter=False, ngram=True)
    plan = "auto" if count is None else f"lockstep:{count}"
    if method is None:
        return Speculative(plan=plan)
    return Speculative(drafter=True, ngram=False, draft=model, plan=plan)


def _fields(text: str) -> dict[str, Any]:
    """What is not null; every name is known."""
    try:
        fields = json.loads(text)
    except ValueError as error:
        raise InvalidParameter(SPECULATIVE, f"must be a JSON object, not {text!r}: {error}") from None
    except RecursionError:
        raise InvalidParameter(SPECULATIVE, "is nested too deeply") from None
    if not isinstance(fields, dict):
        raise InvalidParameter(SPECULATIVE, f"must be a JSON object, not {text!r}")
    for name in fields:
        if name in ELSEWHERE:
            _refuse(name, f"is not taken: {ELSEWHERE[name]}")
        if name not in KNOWN:
            _refuse(name, f"is not known; there are {', '.join(KNOWN)}")
    return {name: value for name, value in fields.items() if value is not None}


def _count(fields: dict[str, Any]) -> int | None:
    """Tokens of a window; None where nobody says."""
    given = [name for name in ("num_speculative_tokens", "num_assistant_tokens") if name in fields]
    for name in given:
        value = fields[name]
        if type(value) is not int or value < 1:
            _refuse(name, f"must be a whole number from 1 on, not {json.dumps(value)}")
        try:
            parse_plan(f"lockstep:{value}")
        except InvalidPlan as error:
            _refuse(name, str(error))
    if len({fields[name] for name in given}) > 1:
        _refuse(given[1], f"contradicts {given[0]}, which means the same")
    return fields[given[0]] if given else None


def _refuse(name: str, why: str) -> NoReturn:
    raise InvalidParameter(SPECULATIVE, f"{name} {why}")
