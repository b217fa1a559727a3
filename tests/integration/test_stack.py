"""The whole stack as its user starts it: real processes, real gRPC, a real Redis; known logits.

With equal logits the text is a function of target, prompt and sampling alone, so each test compares texts exactly.
"""

from __future__ import annotations

import json
import os
import signal

import pytest

from specwire.client import Chunk, Client, Completion
from specwire.client.events import PartialCompletion
from specwire.client.requests import RequestOptions
from tests.integration.stack_process import DRAFT, END_LIMIT, START_LIMIT, TARGET, Command, listeners, running
from tests.wait import asked_blocking, eventually

PROMPT = "1 2 3"
TOKENS = 150
KILL_AFTER = 20
VERIFIER, DRAFTER = "-m verify_service", "-m draft_service"
APART = ("--listen", "127.0.0.1:0", "--http", "none", "--unlisted")
ASKED: list[RequestOptions] = [
    {"max_tokens": 60},
    {"max_tokens": 60, "temperature": 0.9, "top_k": 20, "seed": 11},
    {"max_tokens": 60, "temperature": 1.1, "top_p": 0.9, "seed": 5, "repetition_penalty": 1.2},
]


@pytest.fixture(scope="module")
def plain(address: str) -> Completion:
    """What the target decodes alone."""
    with Client(address) as client:
        return client.complete(PROMPT, max_tokens=TOKENS, drafting=False, timeout=START_LIMIT)


def complete_with_a_kill(address: str, stack: Command, part: str) -> Completion:
    """Complete, killing a process in the middle."""
    gathered = PartialCompletion()
    with Client(address) as client:
        for event in client.generate(PROMPT, max_tokens=TOKENS, timeout=180.0):
            before = len(gathered.tokens)
            gathered.add(event)
            if isinstance(event, Chunk) and before < KILL_AFTER <= len(gathered.tokens):
                os.kill(stack.pid_of(part), signal.SIGKILL)
    assert len(gathered.tokens) > KILL_AFTER
    return gathered.completion()


def test_every_process_listens_on_loopback_only(address: str, stack: Command) -> None:
    found, away = listeners(stack.family())
    assert int(address.rpartition(":")[2]) in [port for _, port in found]
    assert away == []


def test_drafting_changes_no_token(address: str, plain: Completion) -> None:
    with Client(address) as client:
        drafted = asked_blocking(
            lambda: client.complete(PROMPT, max_tokens=TOKENS, timeout=START_LIMIT), lambda told: told.stats.accepted
        )
    assert (drafted.text, drafted.tokens) == (plain.text, plain.tokens)
    assert drafted.stats.target_forwards < plain.stats.target_forwards


def test_a_killed_drafter_costs_no_token(address: str, stack: Command, plain: Completion) -> None:
    completion = complete_with_a_kill(address, stack, DRAFTER)
    assert completion.tokens == plain.tokens


def test_a_killed_verifier_comes_back(address: str, stack: Command, plain: Completion) -> None:
    completion = complete_with_a_kill(address, stack, VERIFIER)
    assert completion.tokens == plain.tokens


def test_a_drafter_that_was_killed_drafts_again(address: str, stack: Command, plain: Completion) -> None:
    assert eventually(lambda: any(DRAFTER in command for command in stack.family().values()), START_LIMIT)
    os.kill(stack.pid_of(DRAFTER), signal.SIGKILL)

    def drafts() -> bool:
        with Client(address) as client:
            completion = client.complete(PROMPT, max_tokens=TOKENS, timeout=START_LIMIT)
        assert completion.tokens == plain.tokens
        return completion.stats.accepted > 0

    assert eventually(drafts, START_LIMIT)


def test_one_process_says_the_same(address: str) -> None:
    """Nothing but it is there, and it ends in order."""
    with running("up", "--json", "--target", TARGET, "--draft", DRAFT, "--one-process", *APART) as one:
        told = one.ready()
        assert told["redis"] == "memory:"
        assert texts(told["address"]) == texts(address)
        assert list(one.family()) == [one.process.pid]
        one.process.send_signal(signal.SIGINT)
        assert one.wait(END_LIMIT) == 0, one.said()
        assert one.nothing_left(), one.family()
        assert "Traceback" not in one.said()


def texts(address: str) -> list[tuple[tuple[int, ...], str, str]]:
    with Client(address) as client:
        done = [client.complete(PROMPT, timeout=START_LIMIT, **asked) for asked in ASKED]
    return [(each.tokens, each.text, each.finish_reason.name) for each in done]


def test_generate_asks_a_running_stack(address: str, plain: Completion) -> None:
    with running("generate", PROMPT, "--address", address, "--max-tokens", str(TOKENS), "--json") as command:
        answer = json.loads(command.line())
        assert command.wait() == 0
    assert answer["text"] == plain.text
    assert answer["tokens"] == list(plain.tokens)
    assert (answer["prompt_tokens"], answer["finish_reason"], answer["rule"]) == (3, "length", "greedy")
    stats = answer["stats"]
    assert stats["accepted"] + stats["recovered"] + stats["bonus"] + stats["direct"] == TOKENS


def test_generate_tells_errors_of_the_service_in_one_line(address: str) -> None:
    with running("generate", "1 " * 5000, "--address", address) as command:
        assert command.wait() == 1
        assert command.said().startswith("specwire generate: error: prompt")
        assert command.said().count("\n") == 1


def test_ctrl_c_cancels_a_generation(address: str) -> None:
    with running("generate", PROMPT, "--address", address, "--max-tokens", "3000", "--ignore-eos") as command:
        assert command.process.stdout is not None
        assert command.process.stdout.read(1)
        command.process.send_signal(signal.SIGINT)
        assert command.wait(END_LIMIT) == 128 + signal.SIGINT
        assert command.said() == ""
        assert command.nothing_left()
