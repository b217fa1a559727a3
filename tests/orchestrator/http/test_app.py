"""What every answer has, what docs/HTTP.md says of endpoints, and the console's figures."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from starlette.responses import Response

import orchestrator.http
from orchestrator.chat.models import ChatModels
from orchestrator.http import app
from orchestrator.http.app import routed
from orchestrator.http.endpoint import HttpService
from orchestrator.options import HttpAccess
from orchestrator.session.stats import TracedVerdict
from specwire.core.messages import Outcome, SourceKind, Verdict
from specwire.v1 import verify_pb2
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


def test_a_stream_has_a_name(door: Front) -> None:
    answer = door.client.post(COMPLETIONS, json={**WISH, "stream": True}, headers={"X-Request-Id": "s"})
    assert (answer.status_code, answer.headers["x-request-id"]) == (200, "s")


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


def test_no_page_of_another_origin_may_read_by_default(door: Front) -> None:
    preflight = {"Origin": PAGE, "Access-Control-Request-Method": "POST"}
    answer = door.client.options(COMPLETIONS, headers=preflight)
    assert answer.status_code == 403
    assert ALLOWED not in answer.headers
    assert ALLOWED not in door.client.get("/v1/models").headers


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
    other = shared.client.post(COMPLETIONS, json=WISH, headers={"Origin": OTHER})
    assert (other.status_code, ALLOWED in other.headers) == (403, False)


def test_pages_of_every_origin(door: Front) -> None:
    with another(door, http_access=HttpAccess(origins=("*",))) as open_to_all:
        answer = open_to_all.client.get("/v1/models", headers={"Origin": OTHER})
    assert (answer.status_code, answer.headers[ALLOWED]) == (200, "*")


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


# ----------------------------------------------------------------------------------------------------------------------
# The console's figures of a session, without a browser: what its modules make of what was told (needs Node.js).

NEEDS_NODE = pytest.mark.skipif(shutil.which("node") is None, reason="needs Node.js (`node` on PATH)")

# Just enough of a document for charts to be drawn into.
SCRIPT = """
class Element {
  constructor(name) { Object.assign(this, { name, children: [], attributes: {}, style: {}, textContent: "" }); }
  setAttribute(name, value) { this.attributes[name] = value; }
  append(...more) { this.children.push(...more); }
  replaceChildren(...more) { this.children = more; }
  get clientWidth() { return 400; }
  all(name) { return [...(this.name === name ? [this] : []), ...this.children.flatMap((one) => one.all(name))]; }
}
globalThis.document = { createElement: (name) => new Element(name), createElementNS: (_, name) => new Element(name) };
const { Session } = await import("./session.js"), { figures, savers } = await import("./figures.js");
const { draw } = await import("./timeline.js");
const session = new Session(), elements = {}, of = (id) => (elements[id] ??= new Element(id)), box = new Element("box");
for (const event of JSON.parse(process.argv[2])) session.take(event);
figures(of, session, session, null);
draw(box, session, 1, null);
const texts = Object.fromEntries(Object.entries(elements).map(([id, one]) => [id, one.textContent]));
console.log(JSON.stringify({ texts, savers: savers(session), titles: box.all("title").map((one) => one.textContent) }));
"""


def shown(folder: Path, events: list[dict[str, Any]]) -> Any:
    page = Path(orchestrator.http.__file__).parent / "page"
    for module in page.glob("*.js"):
        shutil.copy(module, folder)
    (folder / "package.json").write_text('{"type": "module"}')
    (folder / "script.js").write_text(SCRIPT)
    words = ["node", "script.js", json.dumps(events)]
    return json.loads(subprocess.run(words, cwd=folder, check=True, capture_output=True, text=True).stdout)


def judged(at_us: int, verdict: Verdict, **step: int) -> dict[str, Any]:
    """As the console is told it."""
    traced = TracedVerdict.of(verdict, verify_pb2.StepTimings(forward_ended_ns=at_us * 1000, **step), 100.0, "")
    told = {name: getattr(traced, name) for name in TracedVerdict.__slots__}
    texts, outcomes = ["x"] * len(verdict.tokens), [outcome.name.lower() for outcome in verdict.outcomes]
    return {"type": "judged", **told, "texts": texts, "outcomes": outcomes, "at_us": at_us + 500}


@NEEDS_NODE
def test_what_a_head_saved_is_told_beside_the_others(tmp_path: Path) -> None:
    guessed = Verdict(3, (7, 8), (Outcome.ACCEPTED, Outcome.RECOVERED), 3, kind=SourceKind.HEAD)
    events = [
        {"type": "started", "at_us": 0, "prompt_tokens": 3},
        judged(9_000, guessed, forward_us=3_000, drafted_us=1_200, sessions=1, rows=4),
        judged(19_000, Verdict(5, (9,), (Outcome.DIRECT,), 0), forward_us=2_000, sessions=1, rows=1),
    ]
    told = shown(tmp_path, events)
    assert told["texts"]["by_head"] == "1 of 2"
    assert told["texts"]["by_ngram"] == told["texts"]["by_drafter"] == "none tested"
    assert told["texts"]["plan"] == "nothing drafts; heads saved 1 forward"
    assert told["savers"] == "1 forward saved (1 by heads)"
    forwards = [title.partition("\n")[0] for title in told["titles"] if title.startswith("forward")]
    assert forwards == [
        "forward of 3.0 ms, behind 1.2 ms of a head, window of 3 from a head",
        "forward of 2.0 ms, window of 0",
    ]
