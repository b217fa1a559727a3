"""Requests from arguments. Only what the wire cannot carry is refused here; the service judges the rest."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from typing import TypedDict

from specwire.client.errors import invalid
from specwire.v1 import common_pb2, generation_pb2

TIMEOUT_S = 300.0
REQUEST_ID_BYTES = 18

Prompt = str | Sequence[int]

# By whether drafters may propose, and whether the verifier may.
DRAFTING = {
    (True, True): generation_pb2.DRAFTING_AUTOMATIC,
    (True, False): generation_pb2.DRAFTING_DRAFTERS,
    (False, True): generation_pb2.DRAFTING_NGRAM,
    (False, False): generation_pb2.DRAFTING_OFF,
}


class Options(TypedDict, total=False):
    """What `generate_request` takes beside the prompt."""

    max_tokens: int
    temperature: float
    top_k: int
    top_p: float
    stop: Sequence[str]
    seed: int | None
    rule: str
    drafting: bool
    ngram: bool | None
    stop_ids: Sequence[int]
    ignore_eos: bool
    request_id: str
    provisional: bool
    parent: str
    priority: int


def generate_request(
    prompt: Prompt,
    *,
    max_tokens: int = 0,
    temperature: float = 0.0,
    top_k: int = 0,
    top_p: float = 1.0,
    stop: Sequence[str] = (),
    seed: int | None = None,
    rule: str = "",
    drafting: bool = True,
    ngram: bool | None = None,
    stop_ids: Sequence[int] = (),
    ignore_eos: bool = False,
    request_id: str = "",
    provisional: bool = False,
    parent: str = "",
    priority: int = 0,
) -> generation_pb2.GenerateRequest:
    """One completion.

    Args:
        prompt: text, encoded by the service with nothing added, or token ids.
        max_tokens: 0 asks for as many as the context holds.
        temperature: 0 is greedy.
        top_k: 0 keeps all.
        seed: None lets the service draw one; it is told in Started.
        rule: acceptance rule; "" takes the one that fits the temperature.
        drafting: False leaves out the drafters.
        ngram: False leaves out the verifier's own proposals from the text; None goes by `drafting`, so that
            drafting=False alone has the target decode plainly.
        request_id: a repeated id joins the running session instead of starting another.
        provisional: True asks for Provisional events, too: drafts, before the target has decided.
        parent: a session that has ended, behind whose tokens (prompt and output) the prompt goes on; "" for none.
        priority: among the tenant's sessions that wait for a place, the greater number goes first; from -100 to 100.

    Raises:
        SpecwireError: INVALID_ARGUMENT, naming field and value.
    """
    request = generation_pb2.GenerateRequest(
        sampling=common_pb2.Sampling(
            temperature=temperature, top_k=_unsigned("top_k", top_k), top_p=top_p, rule=_text("rule", rule)
        ),
        stopping=common_pb2.Stopping(
            max_tokens=_unsigned("max_tokens", max_tokens),
            stop_ids=[_unsigned("stop_ids", token) for token in stop_ids],
            ignore_eos=ignore_eos,
        ),
        stop=[_text("stop", each) for each in ((stop,) if isinstance(stop, str) else stop)],
        drafting=DRAFTING[drafting, drafting if ngram is None else ngram],
        request_id=_text("request_id", request_id),
        provisional=provisional,
        parent=_text("parent", parent),
        priority=_signed("priority", priority),
    )
    if seed is not None:
        request.sampling.seed = _unsigned("seed", seed, bits=64)
    if isinstance(prompt, str):
        request.text = _text("prompt", prompt)
    else:
        request.tokens.ids.extend(_unsigned("prompt", token) for token in prompt)
        request.tokens.SetInParent()  # an empty list is still a list of ids, for the service to refuse
    return request


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


def watch_request(session_id: str, from_position: int, prefix_hash: int | None) -> generation_pb2.WatchRequest:
    request = generation_pb2.WatchRequest(
        session_id=_text("session_id", session_id), from_position=_unsigned("from_position", from_position)
    )
    if prefix_hash is not None:
        request.prefix_hash = _unsigned("prefix_hash", prefix_hash, bits=64)
    return request


def _signed(field: str, value: int) -> int:
    if not -(1 << 31) <= value < 1 << 31:
        raise invalid(field, f"must be a whole number of 32 bits, not {value}")
    return value


def _unsigned(field: str, value: int, bits: int = 32) -> int:
    if not 0 <= value < 1 << bits:
        raise invalid(field, f"must be from 0 to {(1 << bits) - 1}, not {value}")
    return value


def _text(field: str, value: str) -> str:
    """A lone surrogate, as an undecodable command line argument has it, is no text."""
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise invalid(field, f"is not valid Unicode at index {error.start}") from error
    return value
