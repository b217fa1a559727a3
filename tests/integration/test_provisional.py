"""Provisional text through real processes: what is decided is byte for byte what it is without."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from contextlib import suppress
from typing import Unpack

import pytest

import demo_pair
from bench.relay.link import RelayLink
from deploy.cli.terminal import MARKED
from specwire.client import Chunk, Client, Finished, Provisional, Started
from specwire.client.requests import RequestOptions
from specwire.core.messages import FinishReason
from tests.deploy.screen import Screen
from tests.faults.parts import ROOT, parts
from tests.faults.streams import PROMPT, plain

TARGET = "scripted:7:vocab=64:delay_ms=20"
DRAFT = "scripted:7:vocab=64:agree=0.6"
LENGTH = 80
LIMIT_S = 60.0
COLUMNS, LINES = 40, 6


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    """Give an orchestrator's address; its peers are processes of their own."""
    with parts() as owned:
        verifier, drafter = owned.start("verify", TARGET), owned.start("draft", DRAFT)
        peers = ("--verifier", verifier.ready(), "--drafter", drafter.ready())
        yield owned.start("orchestrate", *peers, "--redis-url", "memory:").ready()


class Reading:
    """A stream as it was read: decided tokens and text, the end, and how many guesses came."""

    def __init__(self, address: str, pause: float = 0.0, **options: Unpack[RequestOptions]) -> None:
        self.tokens: list[int] = []
        self.text = ""
        self.guesses: list[Provisional] = []
        asked: RequestOptions = {"max_tokens": LENGTH, "ignore_eos": True, **options}
        with Client(address) as client:
            for number, event in enumerate(client.generate(PROMPT, timeout=LIMIT_S, **asked)):
                match event:
                    case Chunk():
                        self.tokens += event.tokens
                        self.text += event.text
                    case Provisional():
                        self.guesses.append(event)
                    case Finished():
                        self.text += event.text
                        self.reason = event.reason
                if number % 10 == 1:
                    time.sleep(pause)


def test_an_edge_shows_its_own_guesses_at_once() -> None:
    """The verifier is 80 ms away: guesses are there while nothing is decided, and the text is the same."""
    with parts() as owned, RelayLink(owned.start("verify", TARGET).ready()) as link:
        link.shape(rtt_ms=80)
        edge = owned.start("edge", "--verifier", link.address, "--draft", DRAFT).ready()
        shown, without = Reading(edge, provisional=True), Reading(edge)
    assert shown.tokens == without.tokens == plain(TARGET, LENGTH)
    assert shown.text == without.text
    assert any(guess.tokens for guess in shown.guesses)
    assert not without.guesses


def test_the_text_is_the_same_and_guesses_come_before_it(address: str) -> None:
    shown, without = Reading(address, provisional=True), Reading(address)
    assert shown.tokens == without.tokens == plain("scripted:7:vocab=64", LENGTH)
    assert shown.text == without.text
    assert without.guesses == []
    right = [guess for guess in shown.guesses if guess.tokens and _follows(guess, shown.tokens)]
    wrong = [guess for guess in shown.guesses if guess.tokens and not _follows(guess, shown.tokens)]
    assert right
    assert wrong


def _follows(guess: Provisional, decided: list[int]) -> bool:
    start = guess.position - len(PROMPT)
    return tuple(decided[start : start + len(guess.tokens)]) == guess.tokens


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_stop_strings_cut_the_same_text_and_every_guess(address: str, temperature: float) -> None:
    whole = Reading(address, temperature=temperature, seed=5)
    stop = " ".join(whole.text.split()[LENGTH // 2 : LENGTH // 2 + 3])
    shown, without = (
        Reading(address, temperature=temperature, seed=5, provisional=asked, stop=[stop]) for asked in (True, False)
    )
    assert (shown.tokens, shown.text, shown.reason) == (without.tokens, without.text, without.reason)
    assert shown.text == whole.text[: whole.text.index(stop)]
    assert shown.reason is FinishReason.STOP_STRING
    assert shown.guesses
    assert not any(stop in guess.text for guess in shown.guesses)


def test_a_slow_reader_gets_the_same_text(address: str) -> None:
    shown = Reading(address, pause=0.3, provisional=True)
    assert shown.tokens == plain("scripted:7:vocab=64", LENGTH)
    assert shown.text == " ".join(map(str, shown.tokens))


def test_a_verifier_that_is_replaced_takes_nothing_back_but_guesses() -> None:
    """What is provisional goes on where the decided text ends, also while nobody decides.

    The text is long enough for any reader to find it under way, and left once the new verifier has gone on with it.
    """
    with parts() as owned:
        verifier, drafter = owned.start("verify", TARGET), owned.start("draft", DRAFT)
        peers = ("--verifier", verifier.ready(), "--drafter", drafter.ready())
        at = owned.start("orchestrate", *peers, "--redis-url", "memory:").ready()
        tokens: list[int] = []
        session_id, decided = "", None
        with Client(at) as client:
            asked = client.generate(PROMPT, max_tokens=4000, ignore_eos=True, provisional=True, timeout=4 * LIMIT_S)
            for event in asked:
                assert not isinstance(event, Finished)
                if isinstance(event, Started):
                    session_id = event.session_id
                elif isinstance(event, Chunk):
                    tokens += event.tokens
                    if len(tokens) > LENGTH // 3 and decided is None:
                        verifier.kill()
                        decided = len(client.get_session(session_id).tokens) - len(PROMPT)
                        verifier.restart()
                    elif decided is not None and len(tokens) > decided + LENGTH:
                        break
                elif isinstance(event, Provisional):
                    assert event.position == len(PROMPT) + len(tokens)
        assert tokens == plain("scripted:7:vocab=64", len(tokens))


# The command


def command(address: str, *arguments: str) -> list[str]:
    prompt = " ".join(map(str, PROMPT))
    asked = ("--address", address, "--max-tokens", str(LENGTH), "--ignore-eos", "--provisional", *arguments)
    return [sys.executable, "-m", "deploy", "generate", prompt, *asked]


def on_a_terminal(arguments: list[str], guesses: int | None = None) -> tuple[int, str]:
    """Run a program whose stdout is a terminal: its exit code and all that it wrote there.

    guesses: a SIGINT follows once so many have been shown.
    """
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", LINES, COLUMNS, 0, 0))
    environment = {**os.environ, "TERM": "xterm"}
    with subprocess.Popen(arguments, cwd=ROOT, stdout=theirs, stderr=subprocess.DEVNULL, env=environment) as program:
        os.close(theirs)
        try:
            written = b""
            for part in _until_closed(ours):
                written += part
                if guesses is not None and written.count(MARKED.encode()) >= guesses:
                    program.send_signal(signal.SIGINT)
                    guesses = None
            return program.wait(LIMIT_S), written.decode()
        finally:
            program.kill()
            os.close(ours)


def _until_closed(terminal: int) -> Iterator[bytes]:
    end = time.monotonic() + LIMIT_S
    with suppress(OSError):  # Linux: the other side has been closed
        while select.select([terminal], [], [], max(0.0, end - time.monotonic()))[0]:
            yield os.read(terminal, 65536)


def on_screen(written: str) -> str:
    screen = Screen(COLUMNS, LINES)
    screen.write(written)
    return screen.text


def test_a_terminal_shows_guesses_and_at_the_end_the_text_alone(address: str) -> None:
    code, written = on_a_terminal(command(address))
    assert code == 0
    assert MARKED in written
    assert on_screen(written) == on_screen(" ".join(map(str, plain("scripted:7:vocab=64", LENGTH))))


def test_an_interrupted_command_takes_its_guess_back(address: str) -> None:
    code, written = on_a_terminal(command(address, "--max-tokens", "500"), guesses=20)
    assert code == 128 + signal.SIGINT
    words = list(map(str, plain("scripted:7:vocab=64", 500)))
    assert on_screen(written) in [on_screen(" ".join(words[:count])) for count in range(1, 500)]


HOSTILE = "\x1b]0;X\x07\x1b[2J\x9b1m\r"
SHOWN = r"\x1b]0;X\x07\x1b[2J\x9b1m\x0d"


def test_a_model_does_not_command_the_terminal() -> None:
    """Of its text a terminal gets no control character, in colour or without; a pipe gets the text as it is."""
    with parts() as owned:
        verifier = owned.start("verify", str(demo_pair.TARGET), "--no-ngram").ready()
        address = owned.start("orchestrate", "--verifier", verifier, "--redis-url", "memory:").ready()
        asked = [sys.executable, "-m", "deploy", "generate", "x", "--address", address, "--choice", HOSTILE]
        for colour in ([], ["NO_COLOR=1"]):
            code, written = on_a_terminal(["env", *colour, *asked])
            assert (code, re.sub(r"\x1b\[\d*m", "", written)) == (0, f"{SHOWN}\r\n")  # the terminal's own line end
        done = subprocess.run(asked, cwd=ROOT, capture_output=True, timeout=LIMIT_S, check=False)
    assert (done.returncode, done.stdout) == (0, f"{HOSTILE}\n".encode())


def test_elsewhere_only_decided_text_is_written(address: str) -> None:
    done = subprocess.run(command(address), cwd=ROOT, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    text = " ".join(map(str, plain("scripted:7:vocab=64", LENGTH)))
    assert (done.returncode, done.stdout) == (0, f"{text}\n")
    assert "--provisional: stdout is not a terminal, decided text only" in done.stderr
    done = subprocess.run(
        command(address, "--json"), cwd=ROOT, capture_output=True, text=True, timeout=LIMIT_S, check=False
    )
    assert json.loads(done.stdout)["text"] == text
    assert "terminal" not in done.stderr
