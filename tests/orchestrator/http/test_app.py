"""What every answer has, and what docs/HTTP.md says of endpoints."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path

import pytest
from starlette.responses import Response

from orchestrator.chat.models import ChatModels
from orchestrator.http import app
from orchestrator.http.app import routed
from orchestrator.http.endpoint import HttpService
from orchestrator.options import HttpAccess
from tests.orchestrator.http.front import COMPLETIONS, Front, another
from tests.orchestrator.stack import PROMPT, TARGET, plain

PAGE, OTHER = "https://chat.example", "https://evil.example"
WISH = {"prompt": list(PROMPT), "max_tokens": 2}
ALLOWED = "access-control-allow-origin"


@pytest.fixture(scope="module")
def shared(door: Front) -> Iterator[Front]:
    with another(door, http_access=HttpAccess(origins=(PAGE.upper(),))) as running:
        yield running


@pytest.mark.parametrize("path", ["/v1/models", "/health", "/nowhere", COMPLETIONS])
def test_every_answer_has_a_name(door: Front, path: str) -> None:
    """Also one that is an error: no endpoint, no body, a stranger's page."""
    drawn = {door.client.get(path).headers["x-request-id"] for _ in range(2)}
    assert len(drawn) == 2
    assert all(re.fullmatch("req_[0-9a-f]{32}", name) for name in drawn)
    assert door.client.get(path, headers={"X-Request-Id": "mine/1"}).headers["x-request-id"] == "mine/1"
    refused = door.client.get(path, headers={"Origin": OTHER, "X-Request-Id": "mine/2"})
    assert (refused.status_code, refused.headers["x-request-id"]) == (403, "mine/2")


@pytest.mark.parametrize("odd", ["", "two words", "x" * 129, "\u00e9"])
def test_what_is_no_name_is_not_echoed(door: Front, odd: str) -> None:
    answer = door.client.get("/health", headers={b"X-Request-Id": odd.encode("latin-1")})
    assert answer.headers.get_list("x-request-id")[0].startswith("req_")


def test_a_failure_of_ours_is_logged_under_that_name(
    door: Front, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(_: object) -> Response:
        raise RuntimeError("broken")

    monkeypatch.setattr(app, "JSONResponse", fail)
    answer = door.client.get("/version", headers={"X-Request-Id": "theirs"})
    assert (answer.status_code, answer.json()["error"]["code"]) == (500, "internal_error")
    assert [record.getMessage() for record in caplog.records] == ["HTTP request theirs failed"]


def test_a_request_id_in_that_header_repeats_nothing(door: Front) -> None:
    """Proxies add it by themselves; what a request is repeated by is X-Specwire-Request-Id."""
    asked = [door.client.post(COMPLETIONS, json=WISH, headers={"X-Request-Id": "same"}) for _ in range(2)]
    assert len({answer.json()["choices"][0]["specwire"]["session_id"] for answer in asked}) == 2


def test_a_page_of_an_allowed_origin_may_call_and_read(shared: Front) -> None:
    preflight = {
        "Origin": PAGE,
        "Access-Control-Request-Method": "POST",
        "Access-Control-Request-Headers": "authorization, content-type, x-stainless-lang",
    }
    asked = shared.client.options(COMPLETIONS, headers=preflight)
    assert (asked.status_code, asked.headers[ALLOWED]) == (200, PAGE)
    assert asked.headers["access-control-allow-headers"] == preflight["Access-Control-Request-Headers"]
    for more in ({}, {"stream": True}, {"max_tokens": -2}):
        answer = shared.client.post(COMPLETIONS, json={**WISH, **more}, headers={"Origin": PAGE})
        assert (answer.status_code, answer.headers[ALLOWED]) == (400 if "max_tokens" in more else 200, PAGE)
        assert "x-request-id" in answer.headers["access-control-expose-headers"]
    strange = {**preflight, "Origin": OTHER}
    asked, posted = (
        shared.client.options(COMPLETIONS, headers=strange),
        shared.client.post(COMPLETIONS, json=WISH, headers=strange),
    )
    assert [(each.status_code, ALLOWED in each.headers) for each in (asked, posted)] == [(403, False)] * 2
    assert ALLOWED not in shared.client.get("/v1/models").headers


# ----------------------------------------------------------------------------------------------------------------------
# The example of docs/HTTP.md runs, and its table names every endpoint.

# The console's own are no interface.
PUBLIC = ("/v1/", "/tokenize", "/detokenize", "/metrics", "/health", "/ready", "/version")
DOCUMENT = (Path(__file__).resolve().parents[3] / "docs" / "HTTP.md").read_text()


def test_the_example_runs(door: Front) -> None:
    code = re.search(r"```python\n(.*?)```", DOCUMENT, re.DOTALL)
    assert code is not None
    source = (
        code[1]
        .replace("http://127.0.0.1:8000", door.url)
        .replace("stream=True", 'stream=True, extra_body={"ignore_eos": True}')
    )
    written = StringIO()
    with redirect_stdout(written):
        exec(compile(source, "docs/HTTP.md", "exec"), {})
    assert written.getvalue() == " ".join(map(str, plain(TARGET, (1, 2, 3), 40)))


def test_every_endpoint_is_named(door: Front) -> None:
    async def paths() -> set[str]:
        orchestrator = door.serving.orchestrator
        app = routed(HttpService(orchestrator, ChatModels(orchestrator.pool)))
        return {getattr(route, "path", "") for route in app.routes}

    public = {path for path in door.loop.run(paths()) if path.startswith(PUBLIC)}
    assert len(public) == 14
    for path in public:
        assert f"{path.replace('{model:path}', 'ID').replace('{response}', 'ID')}`" in DOCUMENT
