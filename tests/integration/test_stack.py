"""The whole stack as its user starts it: real processes, real gRPC, a real Redis; known logits.

With equal logits the text is a function of target, prompt and sampling alone, so each test compares texts exactly.
"""

from __future__ import annotations

import ipaddress
import json
import os
import signal
import stat
from collections.abc import Iterator
from contextlib import suppress

import grpc
import psutil
import pytest

from specwire.client import Chunk, Client, Completion, SpecwireError
from specwire.client.events import PartialCompletion
from specwire.client.requests import RequestOptions
from tests.integration.stack_process import DRAFT, END_LIMIT, START_LIMIT, TARGET, Command, running
from tests.wait import asked_blocking, eventually

PROMPT = "1 2 3"
TOKENS = 150
KILL_AFTER = 20
# A method of each of Ray's processes that can be made to run code.
RAY_METHODS = {
    "gcs_server": "ActorInfoGcsService/RegisterActor",
    "raylet": "NodeManagerService/RequestWorkerLease",
    "ray::Verifier": "CoreWorkerService/PushTask",
    "ray::Drafter": "CoreWorkerService/PushTask",
}
PARTS = {"--ray": ("ray::Verifier", "ray::Drafter"), "--no-ray": ("-m verify_service", "-m draft_service")}


def up(*more: str) -> list[str]:
    return ["up", "--json", "--listen", "127.0.0.1:0", "--target", TARGET, "--draft", DRAFT, *more]


@pytest.fixture(scope="module", params=["--ray", "--no-ray"])
def host(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def stack(host: str) -> Iterator[Command]:
    """One stack for the tests of a host, ended by Ctrl-C at last."""
    with running(*up(*([host] if host == "--no-ray" else []))) as command:
        yield command
        command.process.send_signal(signal.SIGINT)
        assert command.wait(END_LIMIT) == 0, command.said()
        assert command.nothing_left(), command.family()


@pytest.fixture(scope="module")
def address(stack: Command) -> str:
    ready = json.loads(stack.line() or f'"{stack.said()}"')
    assert ready["redis"].startswith("unix://")
    assert ready["http"].startswith("http://127.0.0.1:")
    assert ready == {**ready, "target": TARGET, "draft": DRAFT}
    return str(ready["address"])


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


def listeners(stack: Command) -> list[tuple[str, str, int]]:
    """(process, address, port) of all sockets of the stack's processes that wait for connections or datagrams."""
    found = []
    for pid in stack.family():
        with suppress(psutil.NoSuchProcess):
            process = psutil.Process(pid)
            found += [
                (process.name(), str(each.laddr.ip).removeprefix("::ffff:"), int(each.laddr.port))
                for each in process.net_connections("inet")
                if each.laddr and not each.raddr
            ]
    return found


def test_every_process_listens_on_loopback_only(address: str, stack: Command) -> None:
    found = listeners(stack)
    assert int(address.rpartition(":")[2]) in [port for _, _, port in found]
    assert [each for each in found if not ipaddress.ip_address(each[1]).is_loopback] == []


def test_ray_serves_only_who_has_the_stacks_own_token(address: str, stack: Command, host: str) -> None:
    """Who may talk to Ray can run code as this user."""
    assert address
    tokens = list(stack.folder.glob("specwire-*/ray.token"))
    assert len(tokens) == (host == "--ray")
    for token in tokens:
        assert (stat.S_IMODE(token.stat().st_mode), stat.S_IMODE(token.parent.stat().st_mode)) == (0o600, 0o700)
    assert not (stack.folder / ".ray").exists()  # where Ray keeps the token of its own, which everybody can read
    statuses = {
        name: {status_without_token(port, method) for process, _, port in listeners(stack) if process == name}
        for name, method in RAY_METHODS.items()
    }
    for name, seen in statuses.items():
        assert seen <= {grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.UNIMPLEMENTED}, (name, seen)
        assert (grpc.StatusCode.UNAUTHENTICATED in seen) == (host == "--ray"), (name, seen)


def status_without_token(port: int, method: str) -> grpc.StatusCode:
    with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
        try:
            channel.unary_unary(f"/ray.rpc.{method}", bytes, bytes)(b"", timeout=20.0)
        except grpc.RpcError as error:
            code: grpc.StatusCode = error.code()
            return code
    return grpc.StatusCode.OK


def test_services_give_way_to_nobody(address: str, stack: Command, host: str) -> None:
    """Ray would have its workers run behind whatever else the machine does, their own clients among it."""
    assert address
    for part in PARTS[host]:
        assert os.getpriority(os.PRIO_PROCESS, stack.pid_of(part)) == os.getpriority(os.PRIO_PROCESS, 0)


def test_drafting_changes_no_token(address: str, plain: Completion) -> None:
    with Client(address) as client:
        drafted = asked_blocking(
            lambda: client.complete(PROMPT, max_tokens=TOKENS, timeout=START_LIMIT), lambda told: told.stats.accepted
        )
    assert (drafted.text, drafted.tokens) == (plain.text, plain.tokens)
    assert drafted.stats.target_forwards < plain.stats.target_forwards


def test_coupled_sampling_is_replayed_by_its_seed(address: str) -> None:
    with Client(address) as client:
        wish = RequestOptions(max_tokens=60, temperature=0.9)
        drafted = client.complete(PROMPT, **wish, timeout=START_LIMIT)
        undrafted: RequestOptions = {**wish, "seed": drafted.seed, "drafting": False}
        again = client.complete(PROMPT, **undrafted, timeout=START_LIMIT)
    assert drafted.sampling.rule == "coupled"
    assert drafted.tokens == again.tokens


def test_a_killed_drafter_costs_no_token(address: str, stack: Command, host: str, plain: Completion) -> None:
    completion = complete_with_a_kill(address, stack, PARTS[host][1])
    assert completion.tokens == plain.tokens


def test_a_killed_verifier_comes_back(address: str, stack: Command, host: str, plain: Completion) -> None:
    completion = complete_with_a_kill(address, stack, PARTS[host][0])
    assert completion.tokens == plain.tokens


def test_a_drafter_that_was_killed_drafts_again(address: str, stack: Command, host: str, plain: Completion) -> None:
    part = PARTS[host][1]
    assert eventually(lambda: any(part in command for command in stack.family().values()), START_LIMIT)
    os.kill(stack.pid_of(part), signal.SIGKILL)

    def drafts() -> bool:
        with Client(address) as client:
            completion = client.complete(PROMPT, max_tokens=TOKENS, timeout=START_LIMIT)
        assert completion.tokens == plain.tokens
        return completion.stats.accepted > 0

    assert eventually(drafts, START_LIMIT)


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


def test_a_stack_may_serve_several_models() -> None:
    models = "scripted:7", "scripted:8"
    with running(
        "up", "--json", "--listen", "127.0.0.1:0", "--no-ray", "--target", models[0], "--also", models[1]
    ) as up:
        ready = json.loads(up.line() or f'"{up.said()}"')
        assert set(ready["services"]) == {"verifier", "verifier-2"}
        with Client(ready["address"]) as client:
            assert [target.model for target in client.server_info().targets] == list(models)
            texts = [client.complete(PROMPT, max_tokens=20, model=model).tokens for model in models]
            assert texts[0] != texts[1]
            with pytest.raises(SpecwireError, match="model"):
                client.complete(PROMPT, max_tokens=20)
        up.process.send_signal(signal.SIGINT)
        assert up.wait(END_LIMIT) == 0, up.said()
        assert up.nothing_left(), up.family()
