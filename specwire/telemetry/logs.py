"""Log lines on stderr, for people (text) or machines (one JSON object a line).

No line has a prompt or an output, unless the service was told to (`--log-prompts`). Of a session's id a line has the
first eight characters: the whole id is the right to read the session.
"""

from __future__ import annotations

import json
import logging
import sys
import time
from collections.abc import Mapping

from specwire.rpc.process import SAID, visible

TEXT, JSON = FORMATS = ("text", "json")
LEVELS = ("debug", "info", "warning", "error")
DEFAULT_LEVEL = "warning"
SHOWN_CHARACTERS = 8
# What a record may have beside its message; see `tell`.
FIELDS = ("session", "prompt", "output")


def tell(
    logger: logging.Logger,
    session_id: str,
    message: str,
    *args: object,
    level: int = logging.INFO,
    error: Exception | None = None,
    texts: Mapping[str, str] = {},
) -> None:
    """Log a line about a session. texts: `prompt` or `output`, for where they may be logged."""
    shown = session_id[:SHOWN_CHARACTERS]
    logger.log(level, f"session %s: {message}", shown, *args, exc_info=error, extra={"session": shown, **texts})


class JsonLines(logging.Formatter):
    """time (UTC), level, service, logger, message; session, prompt, output and error where there are any."""

    def __init__(self, service: str) -> None:
        super().__init__()
        self._service = service

    def format(self, record: logging.LogRecord) -> str:
        line = {
            "time": f"{time.strftime('%Y-%m-%dT%H:%M:%S', time.gmtime(record.created))}.{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "service": self._service,
            "logger": record.name,
            "message": record.getMessage(),
        }
        line |= {name: getattr(record, name) for name in FIELDS if hasattr(record, name)}
        if record.exc_info:
            line["error"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False)


class TextLines(logging.Formatter):
    """Prompts and outputs stand behind the message, quoted: a line stays one line."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(name)s: %(message)s")

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 # logging's name
        texts = [f" {name}={getattr(record, name)!r}" for name in FIELDS[1:] if hasattr(record, name)]
        return visible(super().formatMessage(record) + "".join(texts), lines=False)


def set_up(service: str, form: str = TEXT, level: str = DEFAULT_LEVEL) -> None:
    """Have this process log so, from now on; what it says to people besides (`say`) becomes JSON, too.

    With the defaults nothing changes: warnings and errors go to stderr as they are.
    """
    if (form, level) == (TEXT, DEFAULT_LEVEL):
        return
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonLines(service) if form == JSON else TextLines())
    root = logging.getLogger()
    root.handlers = [handler]
    root.setLevel(level.upper())
    if form == JSON:
        said = logging.getLogger(SAID)
        said.handlers, said.propagate = [handler], False
        said.setLevel(logging.INFO)


def message_of(line: str) -> str:
    """What a line of either form says."""
    try:
        read = json.loads(line)
    except ValueError:
        return line
    return str(read.get("message", line)) if isinstance(read, dict) else line
