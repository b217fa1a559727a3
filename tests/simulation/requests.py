"""What clients ask for in a simulation: values, and how they are drawn."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from random import Random
from typing import Any, cast

from specwire.client.requests import RequestOptions
from specwire.core.law.sampling import Acceptance, LogprobsOf, Sampling
from specwire.core.text import Stopping
from tests.simulation.services import CONTEXT

# The last one keeps the end of every token withheld.
STOPS = ((), (), ("7 3",), ("5", "9 9"), ("1 ", "4 2"), tuple(f"{digit} 0" for digit in range(10)))
RULES = ("rejection", "rejection", "block", "block", "threshold(0.3)", "typical(0.3,0.09)")
WEIGHED = ("rejection", "block")
# By SimRequest.drafting: whether drafters may propose, and whether the verifier may.
DRAFTING = {2: (False, False), 3: (True, False), 4: (False, True)}
# How often a request id is used for two different things.
OTHER_BODY = 0.1
# What a next turn needs of the context at least, beside what stands before it.
LEAST_TURN = 12


@dataclass(frozen=True, slots=True)
class SimRequest:
    """A client's request. times in seconds, counts in tokens; None: never.

    at: where it asks first, by number. reading: seconds that it takes for each message. library: through the
    project's own client. tenant, follows: by number; the request that is followed is the conversation's turn before.
    predicted: how much of the right output it predicts. processed: what log-probabilities are of.
    delete_after: it has the session deleted then; at 0 as soon as it has begun.
    """

    start: float
    at: int
    prompt: tuple[int, ...]
    max_tokens: int
    temperature: float = 0.0
    seed: int = 0
    stop: tuple[str, ...] = ()
    request_id: str = ""
    drafting: int = 0
    timeout: float | None = None
    cancel_after: int | None = None
    leave_after: int | None = None
    reading: float = 0.0
    library: bool = False
    tenant: int = 0
    follows: int | None = None
    n: int = 1
    rule: str = ""
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    stop_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    min_tokens: int = 0
    logprobs: int | None = None
    processed: bool = False
    echo: bool = False
    priority: int = 0
    predicted: int = 0
    delete_after: int | None = None

    @property
    def possible(self) -> bool:
        """Whether it is a request that is not refused for what it says."""
        weighed = self.rule in WEIGHED and self.temperature == 0.0
        several = self.n > 1 and (self.request_id or self.library)
        return not weighed and not several and self.min_tokens <= self.max_tokens

    def same_id(self, other: SimRequest) -> bool:
        """The two stand for one session, if what they ask for is the same."""
        return bool(self.request_id) and (self.tenant, self.request_id) == (other.tenant, other.request_id)

    def same_body(self, other: SimRequest) -> bool:
        """They ask for the same, whatever becomes of their calls."""
        return replace(self, **CALL) == replace(other, **CALL)

    def sampling(self, choice: int = 0) -> Sampling:
        return Sampling(
            temperature=self.temperature,
            top_k=self.top_k,
            top_p=self.top_p,
            seed=self.seed,
            choice=choice,
            min_p=self.min_p,
            repetition_penalty=self.repetition_penalty,
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            logit_bias=self.logit_bias,
            logprobs=self.logprobs,
            logprobs_of=LogprobsOf.PROCESSED if self.processed and self.logprobs is not None else LogprobsOf.MODEL,
            acceptance=Acceptance.parse(self.rule) if self.rule else None,
        )

    @property
    def stopping(self) -> Stopping:
        return Stopping(self.max_tokens, frozenset(self.stop_ids), self.ignore_eos, self.min_tokens)

    def options(self, parent: str, prediction: Sequence[int]) -> RequestOptions:
        """As `specwire.client` takes them. parent: the session that is followed."""
        drafting, ngram = DRAFTING.get(self.drafting, (True, True))
        wanted: dict[str, Any] = {name: getattr(self, name) for name in NAMES}
        if self.processed and self.logprobs is not None:
            wanted["logprobs_of"] = "processed"
        wanted |= {"logit_bias": dict(self.logit_bias), "drafting": drafting, "ngram": ngram}
        return cast(RequestOptions, {**wanted, "parent": parent, "prediction": tuple(prediction)})


# What of a request is about one call.
CALL: dict[str, Any] = {
    "start": 0.0, "at": 0, "reading": 0.0, "library": False, "timeout": None,
    "cancel_after": None, "leave_after": None, "delete_after": None,
}  # fmt: skip
# Options that are called what they are called here.
NAMES = (
    "max_tokens", "temperature", "seed", "stop", "request_id", "rule", "top_k", "top_p", "min_p",
    "repetition_penalty", "presence_penalty", "frequency_penalty", "stop_ids", "ignore_eos", "min_tokens", "logprobs",
    "echo", "priority",
)  # fmt: skip


def random_requests(
    random: Random, orchestrators: int, tenants: int, vocabulary: int, common: int
) -> tuple[SimRequest, ...]:
    """Those of one tenant's request id ask for the same, at any time and place; now and then for something else.

    common: of their first tokens, so many are the same for all.
    """
    requests: list[SimRequest] = []
    for number in range(random.choice((1, 2, 3, 3, 5))):
        request = _followed(
            random, requests, _random_request(random, orchestrators, tenants, vocabulary, common, number)
        )
        first = next((each for each in requests if each.same_id(request)), request)
        if random.random() < OTHER_BODY:
            first = request
        requests.append(
            replace(first, start=request.start, at=request.at, reading=request.reading, library=request.library)
        )
    return tuple(requests)


def _followed(random: Random, requests: Sequence[SimRequest], request: SimRequest) -> SimRequest:
    """Perhaps a turn behind an earlier one, if the context holds both; now and then behind another tenant's."""
    if not requests or random.random() > 0.25:
        return request
    before = random.randrange(len(requests))
    room = CONTEXT - length_of(requests, before) - len(request.prompt)
    if room < LEAST_TURN:
        return request
    tenant = requests[before].tenant if random.random() < 0.9 else request.tenant
    most = min(request.max_tokens, room)
    return replace(request, follows=before, tenant=tenant, max_tokens=most, min_tokens=min(request.min_tokens, most))


def length_of(requests: Sequence[SimRequest], number: int) -> int:
    """How long the whole conversation is at most, in tokens, once the request is answered."""
    request = requests[number]
    before = 0 if request.follows is None else length_of(requests, request.follows)
    return before + len(request.prompt) + request.max_tokens


def _random_request(
    random: Random, orchestrators: int, tenants: int, vocabulary: int, common: int, number: int
) -> SimRequest:
    length = random.choice((random.randint(1, 8), random.randint(9, 40), random.randint(9, 120)))
    drawn = random.random() < 0.4
    rule = random.choice(RULES) if random.random() < (0.35 if drawn else 0.05) else ""
    drawn = drawn or rule in WEIGHED
    shared = (1 + 5 * index % (vocabulary - 1) for index in range(common))
    several = random.choice((2, 3)) if random.random() < 0.1 else 1
    named = several == 1 and random.random() < 0.75
    request = SimRequest(
        start=round(random.uniform(0.5, 0.9), 3),
        at=random.randrange(orchestrators),
        prompt=(*shared, *(random.randrange(1, vocabulary) for _ in range(random.randint(1, 6)))),
        max_tokens=length,
        temperature=random.choice((0.5, 1.0)) if drawn else 0.0,
        seed=random.randrange(1 << 32) if drawn else 0,
        stop=random.choice(STOPS),
        request_id=f"request-{random.choice((number, 0))}" if named else "",
        drafting=random.choice((0, 0, 0, 1, 2, 3, 4)),
        timeout=round(random.uniform(0.2, 3.0), 3) if random.random() < 0.1 else None,
        cancel_after=random.randrange(length) if random.random() < 0.1 else None,
        leave_after=random.randrange(length) if random.random() < 0.1 else None,
        reading=round(random.uniform(0.0, 0.3), 3) if random.random() < 0.2 else 0.0,
        library=several == 1 and random.random() < 0.4,
        tenant=random.randrange(tenants),
        n=several,
        rule=rule,
        priority=random.choice((-1, 0, 0, 5)),
        predicted=random.randrange(length) if random.random() < 0.15 else 0,
        delete_after=random.randrange(length) if random.random() < 0.06 else None,
    )
    return replace(request, **_random_options(random, vocabulary, length)) if random.random() < 0.35 else request


def _random_options(random: Random, vocabulary: int, length: int) -> dict[str, Any]:
    """One to three of them."""
    options: dict[str, Any] = {
        "top_k": random.choice((1, 3, 6)),
        "top_p": random.choice((0.5, 0.9)),
        "min_p": 0.05,
        "repetition_penalty": random.choice((0.8, 1.3)),
        "presence_penalty": random.choice((-0.5, 1.5)),
        "frequency_penalty": random.choice((-0.2, 0.7)),
        "logit_bias": ((random.randrange(1, vocabulary), random.choice((-100.0, -3.0, 4.0))),),
        "stop_ids": (random.randrange(1, vocabulary),),
        "ignore_eos": True,
        "min_tokens": random.randint(1, length),
        "logprobs": random.choice((0, 2)),
        "processed": True,
        "echo": True,
    }
    return {name: options[name] for name in random.sample(sorted(options), random.randint(1, 3))}
