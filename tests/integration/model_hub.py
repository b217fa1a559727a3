"""A model hub on this machine, as much of one as its library asks for: one model, whose weights come in two halves."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from hashlib import sha256
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from socketserver import BaseServer

MODEL = "maker/tiny"
COMMIT = "0123456789abcdef0123456789abcdef01234567"
WEIGHTS = "model.safetensors"
PATIENCE_S = 120.0


class _Answers(BaseHTTPRequestHandler):
    """folder: the model's. rest: set when the second half of its weights may come."""

    protocol_version = "HTTP/1.1"

    def __init__(
        self, request: object, client: object, server: BaseServer, *, folder: Path, rest: threading.Event
    ) -> None:
        self._folder = folder
        self._rest = rest
        super().__init__(request, client, server)  # type: ignore[arg-type]  # typeshed names a private type

    def do_HEAD(self) -> None:
        self._begin()

    def do_GET(self) -> None:
        content = self._begin()
        half = len(content) // 2
        self.wfile.write(content[:half])
        if self._name == WEIGHTS:
            self._rest.wait(PATIENCE_S)
        self.wfile.write(content[half:])

    @property
    def _name(self) -> str:
        return self.path.partition("/resolve/")[2].partition("/")[2]

    def _begin(self) -> bytes:
        """The answer's head; its content."""
        file = self._folder / self._name
        known = self.path.startswith(f"/{MODEL}/resolve/") and file.is_file()
        content = file.read_bytes() if known else b""
        self.send_response(200 if known else 404)
        self.send_header("Content-Length", str(len(content)))
        if known:
            self.send_header("X-Repo-Commit", COMMIT)
            self.send_header("ETag", f'"{sha256(content).hexdigest()}"')
        else:
            self.send_header("X-Error-Code", "EntryNotFound")
        self.end_headers()
        return content

    def log_message(self, *_: object) -> None:
        """Nobody reads it."""


@contextmanager
def hub(folder: Path, rest: threading.Event) -> Iterator[str]:
    """Serves the model in `folder` as MODEL; its URL."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(_Answers, folder=folder, rest=rest))
    serving = threading.Thread(target=server.serve_forever)
    serving.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        rest.set()
        server.shutdown()
        serving.join()
        server.server_close()
