"""The small endpoints: models, health, version, tokens, figures."""

from __future__ import annotations

from collections import Counter
from typing import Any

from starlette.responses import JSONResponse, PlainTextResponse, Response

from orchestrator.api.requests import encoded
from orchestrator.chat.talk import take_talk
from orchestrator.http.endpoint import Call, HttpService, Served
from orchestrator.sessions import ORCHESTRATOR
from specwire import __version__
from specwire.core.invalid import InvalidParameter
from specwire.telemetry.metrics import CONTENT_TYPE, Families, by_labels, counter

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


class Info:
    """Each takes a call and gives a response."""

    def __init__(self, service: HttpService) -> None:
        self._service = service

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
            prompt = await self._service.prompt(served, take_talk(fields))
        fields.fixed("add_special_tokens", False)
        with_texts = fields.flag("return_token_strs")
        fields.end()
        tokens = await encoded(prompt, served.target)
        texts = [served.names.text(token) for token in tokens] if with_texts else None
        context = served.target.context
        return JSONResponse({"count": len(tokens), "max_model_len": context, "tokens": tokens, "token_strs": texts})

    async def detokenize(self, call: Call) -> Response:
        fields = await self._service.fields(call)
        served = self._service.served(fields.text("model"))
        tokens = fields.ids("tokens")
        fields.end()
        vocabulary, context = served.target.info.vocabulary, served.target.context
        if len(tokens) > context:
            raise InvalidParameter("tokens", f"must be at most {context}, as a context holds, not {len(tokens)}")
        for token in tokens:
            if token >= vocabulary:
                raise InvalidParameter("tokens", f"token id {token} is outside 0..{vocabulary - 1}")
        return JSONResponse({"prompt": served.target.tokenizer.decode(tokens, skip_special_tokens=False)})
