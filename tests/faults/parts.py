"""The services as processes of their own, started through the command line, that a test may kill, stop and restart."""

from __future__ import annotations

import os
import secrets
import socket
import subprocess
import sys
import tempfile
import threading
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import grpc
import redis

from bench.harness import ROOT
from bench.harness.services import START_LIMIT_S, ServiceProcess
from specwire.v1 import common_pb2, verify_pb2, verify_pb2_grpc
from tests.orchestrator.redis_for_tests import RedisServer
from tests.ports import free_address
from tests.wait import LIMIT_S, marked

__all__ = ["LOADED_AGAIN", "ROOT", "Parts", "ServiceProcess", "parts"]

# Of an orchestrator whose only verifier is started again with a real model: on a busy machine it has loaded that within
# a minute or so. Scenes of the matrix have clients that ask again instead.
LOADED_AGAIN = ("--verifier-wait", "110")


class Parts:
    """Owns the services of a test, which always end with it."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._mark = f"SPECWIRE_TEST_PARTS={uuid.uuid4().hex}"
        self._services: list[ServiceProcess] = []

    def start(self, *arguments: str, without: str = "", at: str = "", python: str = sys.executable) -> ServiceProcess:
        """Launch a service, at `at` or at a port of its own so that it can be restarted there, or one that dials.

        without: names of packages, with commas, that it cannot import. python: whose environment it runs in.
        """
        said = self._folder / f"{len(self._services)}-{arguments[0]}.stderr"
        address = at or ("" if "--connect" in arguments else free_address())
        service = ServiceProcess(arguments, self._environment(without), said, address, python=python)
        self._services.append(service)
        return service

    def _environment(self, without: str) -> dict[str, str]:
        name, _, value = self._mark.partition("=")
        return {**os.environ, name: value, "OMP_NUM_THREADS": "1", **hiding(self._folder, without)}

    def run(self, *arguments: str, without: str = "") -> tuple[int, str, str]:
        """Run a program to its end: exit code, stdout, stderr."""
        done = subprocess.run(
            [sys.executable, *arguments],
            cwd=ROOT,
            env=self._environment(without),
            capture_output=True,
            text=True,
            timeout=START_LIMIT_S,
            check=False,
        )
        return done.returncode, done.stdout, done.stderr

    def living(self) -> list[int]:
        """The processes that began here and still live, by the mark in their environment."""
        return marked(self._mark)

    def end(self) -> None:
        for service in self._services:
            service.kill()


def hiding(folder: Path, without: str) -> dict[str, str]:
    """What in a program's environment keeps it from importing these packages, named with commas."""
    if not without:
        return {"PYTHONPATH": str(ROOT)}
    (folder / "sitecustomize.py").write_text(HIDE)
    return {"PYTHONPATH": os.pathsep.join([str(folder), str(ROOT)]), "SPECWIRE_TEST_HIDDEN": without}


@contextmanager
def parts() -> Iterator[Parts]:
    with tempfile.TemporaryDirectory(prefix="specwire-parts-") as folder:
        owned = Parts(Path(folder))
        try:
            yield owned
        finally:
            owned.end()


HIDE = """
import os, sys
from importlib.machinery import PathFinder

HIDDEN = set(os.environ["SPECWIRE_TEST_HIDDEN"].split(","))

class Hiding(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        return None if name.partition(".")[0] in HIDDEN else super().find_spec(name, path, target)

sys.meta_path[sys.meta_path.index(PathFinder)] = Hiding
"""


# ----------------------------------------------------------------------------------------------------------------------
# Whether anything is left of what was told to end.


def check_ports_are_taken(*addresses: str) -> None:
    """Else it would mean nothing that they are free afterwards."""
    for address in addresses:
        host, _, port = address.rpartition(":")
        with socket.create_connection((host, int(port)), timeout=LIMIT_S):
            pass


def check_ports_are_free(*addresses: str) -> None:
    for address in addresses:
        host, _, port = address.rpartition(":")
        with socket.create_server((host, int(port))):
            pass


def check_keys_expire(log: RedisServer) -> None:
    """There are keys, and each has its end."""
    with redis.Redis.from_url(log.url) as client:
        keys = list(client.scan_iter("*"))
        assert keys
        assert [key for key in keys if client.pttl(key) <= 0] == []


# ----------------------------------------------------------------------------------------------------------------------
# A verifier's own count of its steps, asked for from outside.


def steps_of(address: str) -> int:
    """How many steps the verifier has taken; asking takes one more."""
    answered = threading.Event()
    with grpc.insecure_channel(address) as channel:
        stub = verify_pb2_grpc.VerifyServiceStub(channel)
        info = stub.GetModelInfo(common_pb2.GetModelInfoRequest(), timeout=LIMIT_S)
        try:
            for response in stub.Connect(_requests(_shortest(info), answered), timeout=LIMIT_S):
                if response.HasField("timings"):
                    return int(response.timings.step)
        finally:
            answered.set()
    raise AssertionError("the verifier took no step")


def _requests(opening: verify_pb2.Open, answered: threading.Event) -> Iterator[verify_pb2.ConnectVerifyRequest]:
    """The link is there until it is answered."""
    yield verify_pb2.ConnectVerifyRequest(opens=[opening])
    answered.wait(LIMIT_S)


def _shortest(info: common_pb2.GetModelInfoResponse) -> verify_pb2.Open:
    """A session of one token."""
    return verify_pb2.Open(
        handle=1,
        session_id=secrets.token_hex(16),
        fence=1,
        attach=1,
        tokens=(1,),
        prompt_length=1,
        sampling=common_pb2.Sampling(seed=0),
        stopping=common_pb2.Stopping(max_tokens=1),
        progress=verify_pb2.Progress(durable=1, credit=2),
        vocabulary_fingerprint=info.vocabulary_fingerprint,
    )
