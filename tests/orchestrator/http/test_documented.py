"""The example of docs/HTTP.md runs, and its table names every endpoint."""

from __future__ import annotations

import re
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path

from orchestrator.chat.models import ChatModels
from orchestrator.http.app import routed
from orchestrator.http.endpoint import HttpService
from tests.orchestrator.http.front import Front
from tests.orchestrator.stack import TARGET, plain

# The console's own are no interface.
PUBLIC = ("/v1/", "/tokenize", "/detokenize", "/metrics", "/health", "/ready", "/version")
PAGE = (Path(__file__).resolve().parents[3] / "docs" / "HTTP.md").read_text()


def test_the_example_runs(door: Front) -> None:
    code = re.search(r"```python\n(.*?)```", PAGE, re.DOTALL)
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
        assert f"{path.replace('{model:path}', 'ID').replace('{response}', 'ID')}`" in PAGE
