"""The small endpoints: models, health, version, tokens, figures."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from starlette.responses import JSONResponse, PlainTextResponse, Response

from orchestrator.api.requests import encoded
from orchestrator.chat.talk import take_talk
from orchestrator.http.endpoint import Call, HttpService, Served
from orchestrator.sessions import ORCHESTRATOR
from specwire import __version__
from specwire.core.invalid import InvalidParameter
from specwire.telemetry.metrics import CONTENT_TYPE, Families, by_labels, counter
from specwire.text.tokenizer import TokenBytes

# ----------------------------------------------------------------------------------------------------------------------
# /metrics: the orchestrator's figures (`orchestrator.metrics`), and HTTP's own.


class Metrics:
    """The page of figures; it also counts HTTP's own answers (`observe`)."""

    def __init__(self, service: HttpService) -> None:
        self._answers: Counter[tuple[str, int]] = Counter()
        self._registry = service.orchestrator.registry
        self._registry.add(ORCHESTRATOR, self._families)

    def observe(self, route: str, status: int) -> None:
        self._answers[route, status] += 1

    async def answer(self, _: Call) -> Response:
        return PlainTextResponse(self._registry.text(), media_type=CONTENT_TYPE)

    def _families(self) -> Families:
        counts = sorted(self._answers.items())
        samples = (((route, str(status)), count) for (route, status), count in counts)
        yield by_labels(
            counter, "http_responses_total", "HTTP answers by route and status.", ("route", "status"), samples
        )


# ----------------------------------------------------------------------------------------------------------------------
# The small endpoints: models, health, version, tokens.


# Of a token's text in an answer.
TEXT_BYTES = 16


def _texts(names: TokenBytes, tokens: Sequence[int]) -> list[str]:
    return [names.text(token) for token in tokens]


class Info:
    """Each takes a call and gives a response."""

    def __init__(self, service: HttpService) -> None:
        self._service = service
        self._admission = service.orchestrator.admission

    async def models(self, _: Call) -> Response:
        return JSONResponse({"object": "list", "data": [self._model(each) for each in self._service.all_served()]})

    async def model(self, call: Call) -> Response:
        return JSONResponse(self._model(self._service.served(call.path["model"])))

    def _model(self, served: Served) -> dict[str, Any]:
        return {
            "id": served.name,
            "object": "model",
            "created": self._service.started,
            "owned_by": "specwire",
            "root": served.name,
            "parent": None,
            "max_model_len": served.target.context,
        }

    async def health(self, _: Call) -> Response:
        """The process answers; `ready` tells whether it can generate."""
        return JSONResponse({"status": "ok"})

    async def ready(self, _: Call) -> Response:
        reason = self._service.orchestrator.unready
        return JSONResponse({"ready": reason is None, "reason": reason}, 200 if reason is None else 503)

    async def version(self, _: Call) -> Response:
        return JSONResponse({"version": __version__})

    async def tokenize(self, call: Call) -> Response:
        """`prompt`, or `messages` as the model's chat template writes them, as the model's tokens."""
        fields = await self._service.fields(call)
        served = self._service.served(fields.text("model"))
        prompt = fields.text("prompt")
        if prompt is None:
            aside = self._admission.of(call.tenant, len(call.body))
            prompt = (await self._service.chat(served, await aside(take_talk, fields), aside)).text
        fields.fixed("add_special_tokens", False)
        with_texts = fields.flag("return_token_strs")
        fields.end()
        tokens = await encoded(prompt, served.target)
        texts = None
        if with_texts:
            texts = await self._admission.aside(call.tenant, TEXT_BYTES * len(tokens), _texts, served.names, tokens)
        context = served.target.context
        return JSONResponse({"count": len(tokens), "max_model_len": context, "tokens": tokens, "token_strs": texts})

    async def detokenize(self, call: Call) -> Response:
        fields = await self._service.fields(call)
        served = self._service.served(fields.text("model"))
        tokens = await self._admission.aside(call.tenant, len(call.body), fields.ids, "tokens", served.target.context)
        fields.end()
        vocabulary = served.target.info.vocabulary
        if max(tokens, default=0) >= vocabulary:
            raise InvalidParameter("tokens", f"token id {max(tokens)} is outside 0..{vocabulary - 1}")
        return JSONResponse({"prompt": served.target.tokenizer.decode(tokens, skip_special_tokens=False)})
