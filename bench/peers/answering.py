"""The other end of bench.harness.child: a process that reads a request per line and answers each with a line."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Mapping
from typing import Any, TextIO

Request = Mapping[str, Any]  # as JSON has it
Answer = dict[str, object]
Methods = Mapping[str, Callable[[Request], Answer]]  # by what the request's "do" says


def answer_requests(methods: Methods, requests: TextIO, answers: TextIO) -> None:
    """Answer until the requests end; a failed request is answered with its error."""
    for line in requests:
        request = json.loads(line)
        try:
            answer = methods[request["do"]](request)
        except Exception as error:  # the asker reports any error of the library
            answer = {"error": " ".join(f"{type(error).__name__}: {error}".split())}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


def answer_asker(methods: Methods) -> None:
    """Serve the process that started this one; other prints go to standard error, not between the answers."""
    with os.fdopen(os.dup(sys.stdout.fileno()), "w") as answers:
        os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
        answer_requests(methods, sys.stdin, answers)
