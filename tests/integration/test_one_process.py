"""specwire up --one-process: one process and a file hold all of it; killed and started again, its text goes on."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

from specwire.client import Client
from specwire.client.requests import RequestOptions
from tests.faults.streams import Stream, plain
from tests.integration.stack_process import DRAFT, END_LIMIT, TARGET, Command, running
from tests.ports import free_address

PLAIN = "scripted:7"
LENGTH = 200
PATIENCE_S = 240.0
ASKED: list[RequestOptions] = [
    {"max_tokens": 60},
    {"max_tokens": 60, "temperature": 0.9, "top_k": 20, "seed": 11},
    {"max_tokens": 60, "temperature": 1.1, "top_p": 0.9, "seed": 5, "repetition_penalty": 1.2},
]


def up(*more: str) -> list[str]:
    return ["up", "--json", "--target", TARGET, "--draft", DRAFT, "--http", "none", "--unlisted", *more]


def ready(command: Command) -> dict[str, Any]:
    line = command.line()
    assert line, command.said()
    told: dict[str, Any] = json.loads(line)
    return told


def texts(address: str) -> list[tuple[tuple[int, ...], str, str]]:
    with Client(address) as client:
        done = [client.complete("1 2 3", timeout=PATIENCE_S, **asked) for asked in ASKED]
    return [(each.tokens, each.text, each.finish_reason.name) for each in done]


def test_its_texts_are_those_of_a_process_for_each_service() -> None:
    with running(*up("--one-process", "--listen", "127.0.0.1:0")) as one:
        told = ready(one)
        assert told["redis"] == "memory:"
        found = texts(told["address"])
        assert list(one.family()) == [one.process.pid]
        one.process.send_signal(signal.SIGINT)
        assert one.wait(END_LIMIT) == 0, one.said()
        assert one.nothing_left(), one.family()
        assert "Traceback" not in one.said()
    with running(*up("--listen", "127.0.0.1:0")) as several:
        address = ready(several)["address"]
        assert len(several.family()) > 3
        assert texts(address) == found


def test_killed_and_started_again_its_text_goes_on(tmp_path: Path) -> None:
    log, address = tmp_path / "log", free_address()
    words = up("--one-process", "--listen", address, "--redis-url", f"file:{log}")
    with running(*words) as first:
        assert ready(first)["redis"] == f"file:{log}"
        with Stream(address, patience=PATIENCE_S, max_tokens=LENGTH) as stream:
            stream.until(40)
            first.process.kill()
            first.wait()
            with running(*words) as second:
                ready(second)
                assert stream.rest() == plain(PLAIN, LENGTH)
                assert stream.error is None
                second.process.send_signal(signal.SIGINT)
                assert second.wait(END_LIMIT) == 0, second.said()
                assert second.nothing_left(), second.family()
